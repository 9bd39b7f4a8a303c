"""Views: augmented copies of the image, each with its undo (paper section 3).

A view is a scale, with or without a horizontal flip and a conversion to gray. ``make`` turns the
image into the view, ``undo`` brings the probabilities predicted on it back to the image plane.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from numbers import Real

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image as PILImage
from torch import Tensor

Size = tuple[int, int]
"""Height and width."""

SCALES = (0.25, 0.5, 0.75)
MAX_SCALE = 4
LUMA = (19595, 38470, 7471)
"""Weights of red, green and blue in gray, in units of 1/65536 (ITU-R 601, as PIL has them)."""

PIL_BITS = 22
"""Binary digits of the weights in PIL's filters."""


@dataclass(frozen=True)
class View:
    """One way to look at an image, and the way back."""

    scale: float = 1.0
    flip: bool = False
    gray: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.scale, Real) and 0 < self.scale <= MAX_SCALE):
            raise ValueError(
                f"the scale of a view must be a positive number, {MAX_SCALE} at most, got "
                f"{self.scale!r}: a view has its square times as many pixels as the image"
            )

    def __str__(self) -> str:
        return f"{self.scale:g}{' flipped' * self.flip}{' gray' * self.gray}"

    @classmethod
    def parse(cls, text: str) -> "View":
        """Return the view that is written like this.

        Example:
            >>> View.parse("0.5 flipped gray")
            View(scale=0.5, flip=True, gray=True)
        """
        try:
            scale, *words = str(text).split()
            if set(words) <= {"flipped", "gray"}:
                return cls(float(scale), "flipped" in words, "gray" in words)
        except ValueError:
            pass
        raise ValueError(f"a view is written like '0.5' or '0.5 flipped gray', got {text!r}")

    def size(self, size: Size) -> Size:
        """Return height and width of this view of an image of the given size."""
        return max(1, round(size[0] * self.scale)), max(1, round(size[1] * self.scale))

    def make(self, image: Tensor) -> Tensor:
        """Make the view of ``image``, ``(C, H, W)`` in [0, 1]."""
        view = resize(image, self.size(size_of(image)))
        if self.gray:
            view = torch.einsum("chw,c->hw", view, constant(LUMA, view) / 2**16).expand_as(view)
        return view.flip(-1) if self.flip else view

    def undo(self, probs: Tensor, size: Size) -> Tensor:
        """Bring ``probs`` ``(C, h, w)`` predicted on this view back to an image of ``size``."""
        return resize(probs.flip(-1) if self.flip else probs, size)


class OfficialView(View):
    """A view as the released code makes it: on 8-bit PIL images, undone with aligned corners."""

    def size(self, size: Size) -> Size:
        """Return height and width of this view; fractions of a pixel are cut off."""
        return max(1, int(size[0] * self.scale)), max(1, int(size[1] * self.scale))

    def make(self, image: Tensor) -> Tensor:
        """Make the view of ``image``, ``(C, H, W)`` in [0, 1], with PIL's resampling."""
        view = pil_resize(image, self.size(size_of(image)))
        if self.gray:
            levels = (view * 255).round()
            luma = constant(LUMA, levels.int()).reshape(3, 1, 1)
            gray = (levels.int() * luma).sum(dim=0)
            view = ((gray + 2**15) >> 16).to(view.dtype).div(255).expand_as(view)
        return view.flip(-1) if self.flip else view

    def undo(self, probs: Tensor, size: Size) -> Tensor:
        """Bring ``probs`` ``(C, h, w)`` predicted on this view back to an image of ``size``."""
        probs = probs.flip(-1) if self.flip else probs
        return F.interpolate(probs[None], size, mode="bilinear", align_corners=True)[0]


def undo_together(views: Sequence[View], probs: Iterable[Tensor], size: Size) -> Iterable[Tensor]:
    """Bring what was predicted on views of one size back to an image of ``size``.

    Resizing is linear, so the sum is resized once: then there is one map, the sum. Views with a
    custom undo give a map each.
    """
    ways = {type(view).undo for view in views}
    if len(ways) > 1 or not ways <= {View.undo, OfficialView.undo}:
        return (view.undo(part, size) for view, part in zip(views, probs, strict=True))
    pairs = zip(views, probs, strict=True)
    upright = [part.flip(-1) if view.flip else part for view, part in pairs]
    total = upright[0] if len(upright) == 1 else torch.stack(upright).sum(dim=0)
    return [replace(views[0], flip=False).undo(total, size)]


def paper_views(scales: float | Sequence[float] = SCALES) -> tuple[View, ...]:
    """Return the paper's views: each scale plain, and flipped in gray.

    Example:
        >>> for view in paper_views([0.5]):
        ...     print(view)
        0.5
        0.5 flipped gray
    """
    return tuple(View(scale, both, both) for scale in _scales(scales) for both in (False, True))


def every_view(scales: float | Sequence[float] = SCALES) -> tuple[View, ...]:
    """Return every combination of the scales with flip and gray, four views for each scale."""
    return tuple(View(*view) for view in product(_scales(scales), (False, True), (False, True)))


def usable_views(
    scales: float | Sequence[float],
    views: Iterable[View] | None,
    kind: type[View],
    channels: int | None,
) -> tuple[View, ...]:
    """Return ``views``, or those the scales give, as a network and a mode can use them.

    Plain views become views of the given kind, and none is gray where the network has no colour.
    One that is given twice counts once, but as often as it is given in the released code's way.
    """
    if views is None:
        views = paper_views(scales)
    usable = []
    if not isinstance(views, View | Iterable):
        raise TypeError(f"views must be View objects, got {type(views).__name__}")
    for view in (views,) if isinstance(views, View) else views:
        if not isinstance(view, View):
            raise TypeError(
                f"views must be View objects, got {type(view).__name__}; use scales= for numbers"
            )
        if channels != 3:
            view = replace(view, gray=False)
        usable.append(kind(view.scale, view.flip, view.gray) if type(view) is View else view)
    if not usable:
        raise ValueError("at least one view is needed, got no scales or views")
    return tuple(usable if kind is OfficialView else dict.fromkeys(usable))


def _scales(scales: float | Sequence[float]) -> Sequence[float]:
    if isinstance(scales, bool) or not isinstance(scales, int | float | Iterable):
        raise TypeError(f"scales must be positive numbers, got {scales!r}")
    return (scales,) if isinstance(scales, int | float) else scales


def resize(image: Tensor, size: Size) -> Tensor:
    """Resize ``(C, H, W)`` bilinearly, smoothing ahead where it shrinks."""
    if size_of(image) == tuple(size):
        return image
    shrinks = size[0] < image.shape[-2] or size[1] < image.shape[-1]
    return F.interpolate(image[None], size, mode="bilinear", antialias=shrinks)[0]


def pil_resize(image: Tensor, size: Size) -> Tensor:
    """Resize ``(C, H, W)`` in [0, 1] with PIL's bilinear filter, rounding to 8 bits as it does."""
    levels = (image * 255).round().clamp(0, 255)
    if image.is_cuda:
        return _pil_resize_on_gpu(levels, size).to(image.dtype) / 255
    channels = levels.byte().cpu().numpy()
    resized = np.stack([_pil_resize_channel(channel, size) for channel in channels])
    return torch.from_numpy(resized).to(image).div(255)


def _pil_resize_channel(channel: np.ndarray, size: Size) -> np.ndarray:
    """Resize first across, then down, as PIL of the released code; newer ones choose."""
    picture = PILImage.fromarray(channel)
    for width, height in ((size[1], picture.height), (size[1], size[0])):
        picture = picture.resize((width, height), PILImage.Resampling.BILINEAR)
    return np.asarray(picture)


def _pil_resize_on_gpu(levels: Tensor, size: Size) -> Tensor:
    """Do what PIL does, first across, then down: products of whole numbers, which are exact."""
    levels = levels.double()
    height, width = size_of(levels)
    if size[1] != width:
        levels = _rounded(levels @ pil_weights(width, size[1], levels.device).T)
    if size[0] != height:
        levels = _rounded(pil_weights(height, size[0], levels.device) @ levels)
    return levels


def _rounded(sums: Tensor) -> Tensor:
    return ((sums + 2 ** (PIL_BITS - 1)) / 2**PIL_BITS).floor().clamp(0, 255)


def pil_weights(length: int, new_length: int, device: torch.device) -> Tensor:
    """Return PIL's bilinear filter ``(new_length, length)``: whole numbers, in units of 2^-22."""
    scale = length / new_length
    support = max(scale, 1.0)
    center = (torch.arange(new_length, device=device, dtype=torch.float64)[:, None] + 0.5) * scale
    first = (center - support + 0.5).trunc().clamp_min(0)
    last = (center + support + 0.5).trunc().clamp_max(length)
    at = torch.arange(length, device=device, dtype=torch.float64)
    weights = (1 - ((at - center + 0.5) / support).abs()).clamp_min(0)
    weights = weights * ((at >= first) & (at < last))
    weights = weights / weights.sum(dim=1, keepdim=True)
    return (weights * 2**PIL_BITS + 0.5).floor()


def constant(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Return numbers as a tensor, which is made once for each device and kind of numbers."""
    return _constant(tuple(numbers), like.dtype, like.device)


@cache
def _constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)


def size_of(image: Tensor) -> Size:
    """Return height and width of ``(..., H, W)``."""
    return image.shape[-2], image.shape[-1]
