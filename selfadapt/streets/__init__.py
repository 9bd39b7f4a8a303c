"""Rendered street scenes with exact labels, in a source look and several other looks.

The same seed shows the same street in every look and at every size; only its appearance differs.
An image is rendered in four steps:

1. ``scene`` places the objects of ``houses``, ``cars``, ``plants`` and ``figures`` in metres,
   independent of the look.
2. ``painter`` computes the visible face of every pixel, and with it the label.
3. ``shading`` computes the light of the surfaces (``surfaces``, ``facades``) in a look of
   ``looks``, with ``effects`` such as a wet road.
4. ``camera`` simulates the camera: blur, colours, noise.

Example:
    >>> image, label = render("night", seed=3, height=64, width=128)
    >>> image.shape, label.shape
    ((64, 128, 3), (64, 128))
"""

import numpy as np

from selfadapt.labels import STREETS_9
from selfadapt.patterns import alternatives
from selfadapt.streets.camera import take_picture
from selfadapt.streets.looks import LOOKS, Look
from selfadapt.streets.painter import paint
from selfadapt.streets.scene import lay_out
from selfadapt.streets.shading import shade

__all__ = ["CLASSES", "LOOKS", "SOURCE", "TARGETS", "VALIDATION", "Look", "render"]

CLASSES = STREETS_9
SOURCE = "day"
VALIDATION = "dusk"
TARGETS = tuple(name for name in LOOKS if name not in (SOURCE, VALIDATION))


def render(
    look: str, seed: int, height: int = 384, width: int = 768
) -> tuple[np.ndarray, np.ndarray]:
    """Render a street.

    Args:
        look: One of ``LOOKS``.
        seed: Seed of the street, 0 or more. All looks have the same labels for a seed.
        height: Rows of the image, at least 16.
        width: Columns of the image, at least 16.

    Returns:
        The image, uint8 ``(H, W, 3)``, and its label, uint8 ``(H, W)``, an index in ``CLASSES``.
    """
    if look not in LOOKS:
        raise ValueError(f"unknown look {look!r}{alternatives(look, LOOKS)}")
    if min(height, width) < 16:
        raise ValueError(f"an image must be at least 16x16 pixels, got {height}x{width}")
    street = lay_out(seed)
    canvas = paint(street, height, width)
    rng = np.random.default_rng([seed, *look.encode()])
    image = take_picture(shade(street, canvas, LOOKS[look], rng), LOOKS[look], rng)
    return image, canvas.label
