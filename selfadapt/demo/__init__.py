"""The first five minutes: methods side by side, on built-in streets or images of one's own."""

from selfadapt.demo.run import demo, demo_images

__all__ = ["demo", "demo_images"]
