"""The demo: compare methods on rendered streets or on your own images."""

from selfadapt.demo.run import demo, demo_images

__all__ = ["demo", "demo_images"]
