"""Augmentation of training images: crop, flip, colour jitter, blur and grayscale (paper).

Every sample has its own random generator, so that augmentation does not depend on the worker or the
order. Images are cropped and flipped by the workers; colours are changed on the device.
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
    """Augmentation of training images. The defaults are those of the paper."""

    crop: tuple[int, int] = (512, 512)
    """Height and width of the resized crop."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Area of the crop, as a fraction of the image area."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width over height of the crop before it is resized."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    jitter: float = 0.5
    """Probability of changing brightness, contrast, saturation and hue."""
    brightness: tuple[float, float] = (0.7, 1.3)
    """Range of the brightness factor."""
    contrast: tuple[float, float] = (0.7, 1.3)
    """Range of the contrast factor."""
    saturation: tuple[float, float] = (0.7, 1.3)
    """Range of the saturation factor."""
    hue: tuple[float, float] = (0.9, 1.1)
    """Range of 1 + hue shift; 1.1 shifts the hue by a tenth of the colour circle."""
    blur: tuple[float, float] | None = (0.1, 2.0)
    """Range of the standard deviation of Gaussian blur in pixels; null disables it."""
    gray: float = 0.1
    """Probability of conversion to grayscale."""

    def __post_init__(self) -> None:
        for side in self.crop:
            check_number("crop", side, 16, 16384, whole=True)
        for name in ("flip", "jitter", "gray"):
            check_number(name, getattr(self, name), 0, 1)
        limits = {"scale": (1e-6, 1), "ratio": (1e-3, 1e3), "hue": (0.5, 1.5), "blur": (0, 5)}
        for name in ("scale", "ratio", "brightness", "contrast", "saturation", "hue", "blur"):
            pair = getattr(self, name) or ()
            for value in pair:
                check_number(name, value, *limits.get(name, (0, 100)))
            if pair and pair[0] > pair[1]:
                raise ValueError(
                    f"{name} must be the lower and the upper end of a range, got {pair}"
                )


class ColorChange(NamedTuple):
    """Colour augmentation of an image."""

    blur: float
    """Standard deviation of the blur in pixels; 0 for none."""
    jitter: tuple[float, float, float, float] | None
    """Factors of brightness, contrast and saturation, and the hue shift."""
    gray: bool


class Augmentation(NamedTuple):
    """The sampled augmentation of an image."""

    box: tuple[float, float, float, float]
    """Left, top, right and bottom of the crop."""
    flip: bool
    colors: ColorChange


def draw_augmentation(
    rng: np.random.Generator, config: AugmentConfig, size: tuple[int, int]
) -> Augmentation:
    """Sample the augmentation of an image of the given width and height."""
    box = _draw_box(rng, config, *size)
    flip = bool(rng.random() < config.flip)
    blur = float(rng.uniform(*config.blur)) if config.blur else 0.0
    jitter = None
    if rng.random() < config.jitter:
        ranges = (config.brightness, config.contrast, config.saturation, config.hue)
        brightness, contrast, saturation, hue = (float(rng.uniform(*pair)) for pair in ranges)
        jitter = (brightness, contrast, saturation, hue - 1)
    return Augmentation(box, flip, ColorChange(blur, jitter, bool(rng.random() < config.gray)))


def _draw_box(
    rng: np.random.Generator, config: AugmentConfig, width: int, height: int
) -> tuple[float, float, float, float]:
    """Sample a crop inside the image, or return a centre crop after ten failures."""
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


def crop_pair(
    image: PILImage.Image, label: np.ndarray, change: Augmentation, crop: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the crop of an image ``(3, H, W)`` and of its label ``(H, W)``, both uint8."""
    size = (crop[1], crop[0])
    filters = PILImage.Resampling.BILINEAR, PILImage.Resampling.NEAREST
    pictures = image, PILImage.fromarray(label)
    resized = (p.resize(size, f, box=change.box) for p, f in zip(pictures, filters, strict=True))
    pixels, classes = (torch.from_numpy(np.array(picture)) for picture in resized)
    pixels = pixels.permute(2, 0, 1)
    if change.flip:
        pixels, classes = pixels.flip(-1), classes.flip(-1)
    return pixels.contiguous(), classes.contiguous()


def change_colors(images: Tensor, colors: list[ColorChange]) -> Tensor:
    """Apply colour augmentation to images ``(B, 3, H, W)``, uint8; return them in [0, 1]."""
    return torch.stack(
        [_change_colors(image / 255, color) for image, color in zip(images, colors, strict=True)]
    )


def _change_colors(image: Tensor, color: ColorChange) -> Tensor:
    if color.blur > 0:
        size = 2 * ceil(3 * color.blur) + 1  # three standard deviations on both sides
        image = TF.gaussian_blur(image, [size, size], [color.blur, color.blur])
    if color.jitter is not None:
        brightness, contrast, saturation, hue = color.jitter
        image = TF.adjust_brightness(image, brightness)
        image = TF.adjust_contrast(image, contrast)
        image = TF.adjust_saturation(image, saturation)
        image = TF.adjust_hue(image, hue)
    return TF.rgb_to_grayscale(image, num_output_channels=3) if color.gray else image
