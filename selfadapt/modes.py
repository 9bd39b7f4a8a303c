"""The modes, by name: ours, the paper as written, and the released code as it behaves."""

from dataclasses import dataclass
from math import sqrt
from numbers import Integral
from typing import Literal

from torch import Tensor

from selfadapt.patterns import nearest
from selfadapt.views import OfficialView, Size, View, pil_resize, resize, size_of

ModeName = Literal["auto", "paper", "official"]


@dataclass(frozen=True)
class Mode:
    """Differences between the modes."""

    momentum: float | None
    """Momentum of the running statistics inside a loop of steps; None: SaN, and they stay."""
    strict: bool
    """A pseudo-label must exceed its threshold, not only reach it."""
    view: type[View]
    """How views are resampled."""
    size: Size | None
    """What larger images are resized to; None: down to the budget, with their aspect ratio."""
    loss: str = "cross-entropy"
    """Default loss of the steps."""
    step: str = "gradient-descent"
    """Default step rule."""
    steps: int = 10
    """Default number of steps."""
    lr: float = 0.02
    """Default learning rate of gradient descent, chosen on the validation domain."""
    final_scales: tuple[float, ...] = ()
    """Default scales of the views that the adapted network predicts beside the image."""


MODES = {
    "auto": Mode(
        momentum=None,
        strict=False,
        view=View,
        size=None,
        loss="balanced-cross-entropy",
        step="fixed-length",
        steps=5,
        final_scales=(0.5, 0.75),
    ),
    "paper": Mode(momentum=None, strict=False, view=View, size=None),
    "official": Mode(momentum=0.1, strict=True, view=OfficialView, size=(1024, 2048), lr=0.05),
}
MAX_PIXELS = 1024 * 2048
"""Default of ``max_pixels``: larger images are scaled down to this many pixels."""


def check_mode(mode: str, max_pixels: int | None) -> None:
    """Raise ValueError for an unknown mode, or a number of pixels that it does not allow."""
    if not isinstance(mode, str) or mode not in MODES:
        guess = nearest(str(mode), MODES)
        raise ValueError(f"unknown mode {mode!r};{guess} known: {', '.join(MODES)}")
    if max_pixels is not None and mode == "official":
        raise ValueError("max_pixels cannot be set in official mode, which has 1024 x 2048")
    whole = isinstance(max_pixels, Integral) and not isinstance(max_pixels, bool)
    if max_pixels is not None and not (whole and max_pixels > 0):
        raise ValueError(f"max_pixels must be a positive whole number, got {max_pixels!r}")


def size_within(size: Size, max_pixels: int) -> Size:
    """Return height and width scaled down to at most ``max_pixels`` pixels."""
    shrink = sqrt(max_pixels / (size[0] * size[1]))
    if shrink >= 1:
        return size
    short, long = sorted(size)
    short = max(1, int(short * shrink))
    long = min(int(long * shrink), max_pixels // short)  # a side of one pixel cannot shrink
    return (short, long) if size[0] <= size[1] else (long, short)


def within_budget(image: Tensor, mode: ModeName, max_pixels: int) -> Tensor:
    """Return an image ``(C, H, W)`` of at most ``max_pixels`` pixels, resized as the mode does."""
    if (small := size_within(size_of(image), max_pixels)) == size_of(image):
        return image
    if (size := MODES[mode].size) is not None:
        return pil_resize(image, size)
    resized = resize(image, small)
    return resized.clamp_(image.min(), image.max())  # sums of weights overshoot by rounding
