"""Results as pictures: masks, doubts hatched, confidence as heat, changes."""

import numpy as np
from PIL import Image as PILImage
from torch import Tensor

from selfadapt.images import colored, to_pil
from selfadapt.labels import class_colors
from selfadapt.views import Size, View, resize, size_of

SHOWN = 1600
"""Pictures on the page have at most so many columns and rows."""
HEAT = ((13, 8, 60), (126, 36, 104), (229, 107, 58), (252, 232, 164))
"""Colours of confidence, from 0 to 1."""
STRIPES = ((236, 236, 236), (150, 150, 150))


def mask(label: Tensor, names: tuple[str, ...]) -> PILImage.Image:
    """Paint each class of ``(H, W)`` in its colour."""
    return colored(shown(label), class_colors(names))


def hatched(pseudo_label: Tensor, names: tuple[str, ...]) -> PILImage.Image:
    """Paint a pseudo-label ``(H, W)``, with stripes where a pixel is left out."""
    label = shown(pseudo_label)
    ignored = ((label < 0) | (label >= len(names))).numpy()
    painted = np.array(colored(label.clamp(0, len(names) - 1), class_colors(names)))
    rows, columns = np.indices(ignored.shape)
    width = max(2, max(ignored.shape) // 160)
    stripes = np.array(STRIPES, np.uint8)[(rows + columns) // width % 2]
    painted[ignored] = stripes[ignored]
    return PILImage.fromarray(painted)


def heat(confidence: Tensor) -> PILImage.Image:
    """Paint numbers ``(H, W)`` in [0, 1] from dark to bright."""
    levels = shown(confidence).numpy()
    places = np.linspace(0, 1, len(HEAT))
    channels = [np.interp(levels, places, channel) for channel in zip(*HEAT, strict=True)]
    return PILImage.fromarray(np.stack(channels, axis=-1).round().astype(np.uint8))


def changes(
    label: Tensor, changed: Tensor, image: Tensor, names: tuple[str, ...]
) -> PILImage.Image:
    """Paint where the label changed, in the new class's colour, on the image in pale gray."""
    gray = np.array(to_pil(_at(View(gray=True).make(image), _size_shown(label))))
    pale = (160 + gray * 0.35).astype(np.uint8)
    where = shown(changed).numpy()
    pale[where] = np.array(mask(label, names))[where]
    return PILImage.fromarray(pale)


def photo(image: Tensor) -> PILImage.Image:
    """Return the image ``(3, H, W)`` as a picture for the page."""
    return to_pil(_at(image, _size_shown(image)))


def shown(values: Tensor) -> Tensor:
    """Thin out ``(H, W)`` to what a page shows; no value is mixed with another."""
    return at_size(values, _size_shown(values))


def at_size(values: Tensor, size: Size) -> Tensor:
    """Return ``(H, W)`` at another size, each pixel that of the place it stands for."""
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(int)
        for old, new in zip(size_of(values), size, strict=True)
    )
    return values[rows][:, columns]


def _size_shown(values: Tensor) -> Size:
    height, width = size_of(values)
    shrink = min(1, SHOWN / max(height, width))
    return max(1, round(height * shrink)), max(1, round(width * shrink))


def _at(image: Tensor, size: Size) -> Tensor:
    return image if size_of(image) == size else resize(image, size)
