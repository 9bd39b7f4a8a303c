"""What a method returns for one image."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_BYTES = 2**28
"""Maps of more bytes than these are made a few classes at a time, where a label is wanted."""


class ResizedMap:
    """Class probabilities at the size of an image, which are made when they are needed.

    Args:
        values: Class scores or probabilities ``(C, h, w)``.
        size: Height and width of the image.
        scores: These are scores: they are resized first and made probabilities then.
    """

    def __init__(self, values: Tensor, size: tuple[int, int], *, scores: bool) -> None:
        self.values, self.size, self.scores = values, size, scores

    @cached_property
    def probs(self) -> Tensor:
        """Class probabilities ``(C, H, W)``."""
        resized = self._resized(self.values)
        return resized.softmax(dim=0) if self.scores else resized

    @cached_property
    def best(self) -> tuple[Tensor, Tensor]:
        """Probability and index of the most likely class of each pixel ``(H, W)``."""
        num_pixels = self.size[0] * self.size[1]
        at_once = max(1, MAX_BYTES // (num_pixels * self.values.element_size()))
        if at_once >= len(self.values):
            confidence, label = self.probs.max(dim=0)
            return confidence, label
        best = self.values.new_full(self.size, -torch.inf)
        label, total = best.new_zeros(self.size, dtype=torch.int64), best.new_zeros(self.size)
        for start in range(0, len(self.values), at_once):
            part = self._resized(self.values[start : start + at_once])
            top, index = part.max(dim=0)
            label = torch.where(top > best, index + start, label)
            highest = torch.maximum(best, top)
            if self.scores:
                total = total * (best - highest).exp() + part.sub_(highest).exp_().sum(dim=0)
            best = highest
        return (1 / total if self.scores else best), label

    def _resized(self, values: Tensor) -> Tensor:
        return F.interpolate(values[None], self.size, mode="bilinear", align_corners=False)[0]


T = TypeVar("T")


class _MapField(Generic[T]):
    """A field of ``Result`` that reads as a tensor, whatever it was given as."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, result: Any, owner: type | None = None) -> T:
        if result is None:
            if self.name == "probs":
                raise AttributeError(self.name)  # it has no default
            return None  # type: ignore[return-value]
        value = result.__dict__[self.name]
        return value.probs if isinstance(value, ResizedMap) else value  # type: ignore[return-value]

    def __set__(self, result: Any, value: T | ResizedMap) -> None:
        result.__dict__[self.name] = value


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """A segmented image, and how it came about. All maps have the image's own size."""

    probs: _MapField[Tensor] = _MapField()
    """Class probabilities ``(C, H, W)``. For a large image with many classes they take gigabytes,
    and are made when they are asked for; ``label`` and ``confidence`` do without them."""
    source_probs: _MapField[Tensor | None] = _MapField()
    """Class probabilities of the network as trained ``(C, H, W)``."""
    fused_probs: _MapField[Tensor | None] = _MapField()
    """Mean class probabilities of the views ``(C, H, W)``."""
    pseudo_label: Tensor | None = None
    """Labels the network was adapted to ``(H, W)``; pixels left out are 255, or -1 where 255 is a
    class."""
    losses: tuple[float, ...] = ()
    """Loss before each step: cross-entropy to the pseudo-label, or an entropy."""
    seconds: float = 0.0
    """Time the call took."""
    notes: tuple[str, ...] = ()
    """What a user should know about this result, such as a fall-back."""

    def __repr__(self) -> str:
        height, width = self.label.shape
        return (
            f"Result({width}x{height}, {self.num_classes} classes, {len(self.losses)} steps, "
            f"{self.seconds:.2f} s, notes={self.notes})"
        )

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        probs = self.__dict__["probs"]
        return len(probs.values if isinstance(probs, ResizedMap) else probs)

    @property
    def label(self) -> Tensor:
        """Most likely class of each pixel ``(H, W)``, int64."""
        return _best(self.__dict__["probs"])[1]

    @property
    def confidence(self) -> Tensor:
        """Probability of the most likely class of each pixel ``(H, W)``."""
        return _best(self.__dict__["probs"])[0]

    @property
    def source_label(self) -> Tensor | None:
        """Most likely class of each pixel ``(H, W)`` for the network as trained, int64."""
        source = self.__dict__["source_probs"]
        return None if source is None else _best(source)[1]

    def _replace(self, **changes: Any) -> "Result":
        """Return this result with other values of some fields, and the maps as they are."""
        return Result(**(self.__dict__ | changes))


def _best(probs: Tensor | ResizedMap) -> tuple[Tensor, Tensor]:
    if isinstance(probs, ResizedMap):
        return probs.best
    confidence, label = probs.max(dim=0)
    return confidence, label
