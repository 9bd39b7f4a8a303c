"""What a method returns for one image."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from PIL import Image as PILImage
from torch import Tensor

from selfadapt.checks import check_number
from selfadapt.images import Image, colored, label_image, overlay, rgb_image
from selfadapt.labels import Classes, Color, predicted_colors

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

    @property
    def shape(self) -> torch.Size:
        """Classes, height and width."""
        return torch.Size((len(self.values), *self.size))

    def cpu(self) -> "ResizedMap":
        """Return this map on the CPU."""
        if self.values.device.type == "cpu":
            return self
        return ResizedMap(self.values.cpu(), self.size, scores=self.scores)

    @cached_property
    def best(self) -> tuple[Tensor, Tensor]:
        """Probability and index of the most likely class of each pixel ``(H, W)``."""
        if self._at_once >= len(self.values):
            confidence, label = self.probs.max(dim=0)
            return confidence, label
        highest, total, label = self._reduced
        return (1 / total if self.scores else highest), label

    def parts(self) -> Iterator[Tensor]:
        """Yield the probabilities of some classes after the other ``(c, H, W)``."""
        if self._at_once >= len(self.values):
            yield self.probs
            return
        for start in range(0, len(self.values), self._at_once):
            part = self._resized(self.values[start : start + self._at_once])
            if self.scores:
                highest, total, _ = self._reduced
                part = part.sub_(highest).exp_().div_(total)
            yield part

    @cached_property
    def _reduced(self) -> tuple[Tensor, Tensor, Tensor]:
        """Highest value of each pixel ``(H, W)``, sum of exponentials below it, and its class."""
        best = self.values.new_full(self.size, -torch.inf)
        label, total = best.new_zeros(self.size, dtype=torch.int64), best.new_zeros(self.size)
        for start in range(0, len(self.values), self._at_once):
            part = self._resized(self.values[start : start + self._at_once])
            top, index = part.max(dim=0)
            label = torch.where(top > best, index + start, label)
            highest = torch.maximum(best, top)
            if self.scores:
                total = total * (best - highest).exp() + part.sub_(highest).exp_().sum(dim=0)
            best = highest
        return best, total, label

    @property
    def _at_once(self) -> int:
        return classes_at_once(self.size, self.values.element_size())

    def _resized(self, values: Tensor) -> Tensor:
        return F.interpolate(values[None], self.size, mode="bilinear", align_corners=False)[0]


def classes_at_once(size: tuple[int, int], bytes_per_value: int) -> int:
    """Return how many classes of an image are dealt with at a time."""
    return max(1, MAX_BYTES // (size[0] * size[1] * bytes_per_value))


def map_parts(probs: Tensor | ResizedMap) -> Iterator[Tensor]:
    """Yield probabilities ``(C, H, W)``, some classes at a time."""
    if isinstance(probs, ResizedMap):
        yield from probs.parts()
    else:
        height, width = probs.shape[-2:]
        yield from probs.split(classes_at_once((height, width), probs.element_size()))


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


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
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
    quality: float | None = None
    """How good the label probably is: an estimate of its mean IoU without labels, 0 to 1; made by
    self-adaptation in ``auto`` mode."""
    seconds: float = 0.0
    """Time the call took."""
    notes: tuple[str, ...] = ()
    """What a user should know about this result, such as a fall-back."""
    image: Image | None = None
    """The image as it was given: a path stays a path, a tensor is not copied."""
    classes: Classes | None = None
    """Names of the classes, with a mapping also their colours; None: not known."""

    def __repr__(self) -> str:
        height, width = self.label.shape
        quality = "" if self.quality is None else f"quality {self.quality:.2f}, "
        return (
            f"Result({width}x{height}, {self.num_classes} classes, {len(self.losses)} steps, "
            f"{quality}{self.seconds:.2f} s, notes={self.notes})"
        )

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        probs = self.__dict__["probs"]
        return len(probs.values if isinstance(probs, ResizedMap) else probs)

    @property
    def label(self) -> Tensor:
        """Most likely class of each pixel ``(H, W)``, int64."""
        return best_of(self.__dict__["probs"])[1]

    @property
    def confidence(self) -> Tensor:
        """Probability of the most likely class of each pixel ``(H, W)``."""
        return best_of(self.__dict__["probs"])[0]

    @property
    def source_label(self) -> Tensor | None:
        """Most likely class of each pixel ``(H, W)`` for the network as trained, int64."""
        source = self.__dict__["source_probs"]
        return None if source is None else best_of(source)[1]

    @property
    def stored_probs(self) -> Tensor | ResizedMap:
        """Class probabilities in the form they are kept in, for what deals with them by parts."""
        probs: Tensor | ResizedMap = self.__dict__["probs"]
        return probs

    def label_image(self, *, classes: Classes | None = None) -> PILImage.Image:
        """Return the label as an image whose values are the classes and whose palette shows them.

        Args:
            classes: Names of the classes, or colours by name. None: as the result knows them.
        """
        return label_image(self.label, self._colors(classes))

    def overlay(
        self, image: Image | None = None, *, classes: Classes | None = None, opacity: float = 0.5
    ) -> PILImage.Image:
        """Return the image with the label laid over it in colours.

        Args:
            image: The image that was segmented, in any form. None: as the result knows it.
            classes: Names of the classes, or colours by name. None: as the result knows them.
            opacity: Of the colours, 0 to 1.
        """
        check_number("opacity", opacity, 0, 1)
        image = self.image if image is None else image
        if image is None:
            raise ValueError("this result does not know its image: give it, result.overlay(image)")
        label = self.label
        picture = rgb_image(image, (label.shape[0], label.shape[1]))
        return overlay(picture, colored(label, self._colors(classes)), opacity)

    def save(
        self,
        folder: str | os.PathLike[str],
        image: Image | None = None,
        *,
        name: str | None = None,
        outputs: Sequence[str] | None = None,
        classes: Classes | None = None,
        overwrite: bool = False,
    ) -> dict[str, Path]:
        """Write the files that ``selfadapt predict`` writes of an image.

        Args:
            folder: Where to; it is made if need be. ``classes.json`` and ``legend.png`` say there
                which index and colour each class has.
            image: The image that was segmented, in any form. None: as the result knows it. Only
                ``overlay`` and ``panel`` need it.
            name: What the names of the files start with. None: the name of the image file.
            outputs: What to write, of ``label``, ``color``, ``overlay``, ``confidence``, ``panel``
                and ``probs``. None: the first four, without ``overlay`` where there is no image.
            classes: Names of the classes, or colours by name. None: as the result knows them.
            overwrite: Replace files that are there.

        Returns:
            The files, by what they show.
        """
        from selfadapt.predict.outputs import save_result  # which builds on this module

        image = self.image if image is None else image
        classes = self.classes if classes is None else classes
        return save_result(
            self, Path(folder), image, name=name, outputs=outputs, classes=classes,
            overwrite=overwrite,
        )  # fmt: skip

    def _colors(self, classes: Classes | None) -> list[Color]:
        return predicted_colors(classes or self.classes, self.num_classes)

    def _replace(self, **changes: Any) -> "Result":
        """Return this result with other values of some fields, and the maps as they are."""
        return Result(**(self.__dict__ | changes))


def best_of(probs: Tensor | ResizedMap) -> tuple[Tensor, Tensor]:
    """Return probability and index of the most likely class of each pixel ``(H, W)``."""
    if isinstance(probs, ResizedMap):
        return probs.best
    confidence, label = probs.max(dim=0)
    return confidence, label
