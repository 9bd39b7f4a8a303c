"""Random changes to training images: the paper's crops, flips, jitter, blur and gray.

What is random is drawn from a generator of the sample's own, so that it does not depend on who
reads the sample, nor on when. Crops are made where images are read; colours are changed on the
device.
"""

from dataclasses import dataclass
from math import ceil, exp, log, sqrt
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image as PILImage
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

from selfadapt.checks import check_number

Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Random changes to training images. The defaults are the paper's."""

    crop: tuple[int, int] = (512, 512)
    """Height and width that crops are resized to."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Area of the crop, as a share of the image's."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width over height of the crop, before it is resized."""
    flip: float = 0.5
    """Probability of a flip, left to right."""
    jitter: float = 0.5
    """Probability of a change of brightness, contrast, saturation and hue."""
    brightness: tuple[float, float] = (0.7, 1.3)
    """Factor of the brightness."""
    contrast: tuple[float, float] = (0.7, 1.3)
    """Factor of the contrast."""
    saturation: tuple[float, float] = (0.7, 1.3)
    """Factor of the saturation."""
    hue: tuple[float, float] = (0.9, 1.1)
    """Turn of the hue; 1 leaves it, 1.1 turns it by a tenth of the colour circle."""
    blur: tuple[float, float] | None = (0.1, 2.0)
    """Standard deviation of a Gaussian blur in pixels; null: none."""
    gray: float = 0.1
    """Probability of taking out the colour."""

    def __post_init__(self) -> None:
        for side in self.crop:
            check_number("crop", side, 16, 16384, whole=True)
        for name in ("flip", "jitter", "gray"):
            check_number(name, getattr(self, name), 0, 1)
        limits = {"scale": (1e-6, 1), "ratio": (1e-3, 1e3), "hue": (0.5, 1.5), "blur": (0, 5)}
        for name in ("scale", "ratio", "brightness", "contrast", "saturation", "hue", "blur"):
            if (pair := getattr(self, name)) is not None:
                _check_range(name, pair, limits.get(name, (0, 100)))


class Colors(NamedTuple):
    """The change of one image's colours."""

    blur: float
    """Deviation in pixels; 0: none."""
    jitter: tuple[float, float, float, float] | None
    """Factors of brightness, contrast and saturation, and the turn of the hue."""
    gray: bool


class Change(NamedTuple):
    """All that was drawn for one image."""

    box: tuple[float, float, float, float]
    """Left, top, right and bottom of the crop."""
    flip: bool
    colors: Colors


def draw_change(rng: np.random.Generator, config: AugmentConfig, size: tuple[int, int]) -> Change:
    """Draw the changes to an image of this width and height."""
    box = _draw_box(rng, config, *size)
    flip = bool(rng.random() < config.flip)
    blur = float(rng.uniform(*config.blur)) if config.blur else 0.0
    jitter = None
    if rng.random() < config.jitter:
        ranges = (config.brightness, config.contrast, config.saturation, config.hue)
        brightness, contrast, saturation, hue = (float(rng.uniform(*pair)) for pair in ranges)
        jitter = (brightness, contrast, saturation, hue - 1)
    return Change(box, flip, Colors(blur, jitter, bool(rng.random() < config.gray)))


def _draw_box(
    rng: np.random.Generator, config: AugmentConfig, width: int, height: int
) -> tuple[float, float, float, float]:
    """Draw a crop that lies in the image; where ten do not, take the largest in its middle."""
    low, high = config.ratio
    for _ in range(10):
        area = width * height * rng.uniform(*config.scale)
        ratio = exp(rng.uniform(log(low), log(high)))
        w, h = sqrt(area * ratio), sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return left, top, left + w, top + h
    ratio = min(max(width / height, low), high)
    w, h = min(width, height * ratio), min(height, width / ratio)
    left, top = (width - w) / 2, (height - h) / 2
    return left, top, left + w, top + h


def cropped(
    image: PILImage.Image, label: np.ndarray, change: Change, crop: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the crop of an image ``(3, H, W)`` and its label ``(H, W)``, both uint8."""
    size = (crop[1], crop[0])
    filters = PILImage.Resampling.BILINEAR, PILImage.Resampling.NEAREST
    pictures = image, PILImage.fromarray(label)
    resized = (p.resize(size, f, box=change.box) for p, f in zip(pictures, filters, strict=True))
    pixels, classes = (torch.from_numpy(np.array(picture)) for picture in resized)
    pixels = pixels.permute(2, 0, 1)
    if change.flip:
        pixels, classes = pixels.flip(-1), classes.flip(-1)
    return pixels.contiguous(), classes.contiguous()


def recolored(images: Tensor, colors: list[Colors]) -> Tensor:
    """Change the colours of images ``(B, 3, H, W)``, uint8, and return them in [0, 1]."""
    return torch.stack(
        [_recolored(image / 255, color) for image, color in zip(images, colors, strict=True)]
    )


def _recolored(image: Tensor, color: Colors) -> Tensor:
    if color.blur > 0:
        taps = 2 * ceil(3 * color.blur) + 1  # three deviations to both sides
        image = TF.gaussian_blur(image, [taps, taps], [color.blur, color.blur])
    if color.jitter is not None:
        brightness, contrast, saturation, hue = color.jitter
        image = TF.adjust_brightness(image, brightness)
        image = TF.adjust_contrast(image, contrast)
        image = TF.adjust_saturation(image, saturation)
        image = TF.adjust_hue(image, hue)
    return TF.rgb_to_grayscale(image, num_output_channels=3) if color.gray else image


def _check_range(name: str, pair: Range, limits: Range) -> None:
    for value in pair:
        check_number(name, value, *limits)
    if pair[0] > pair[1]:
        raise ValueError(f"{name} must be the lower and the upper end of a range, got {pair}")
