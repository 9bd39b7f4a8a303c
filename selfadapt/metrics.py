"""How good a segmentation is: IoU from a confusion matrix, calibration error from bins.

Both are sums over pixels, so they are gathered image by image, exactly and without storing pixels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from selfadapt.labels import ClassSpace
from selfadapt.pseudo import IGNORE

BINS = 30
"""Bins of confidence; 10 and 15 are made by joining them."""
UNIT = 2**24
"""Confidences are summed in whole units of this fraction, as exact as 32-bit numbers are."""


def confusion_matrix(label: Tensor, predicted: Tensor, num_classes: int) -> Tensor:
    """Count pixels by true class (row) and predicted class (column).

    Args:
        label: True classes, any shape, 255 where a pixel does not count.
        predicted: Predicted classes, same shape.
        num_classes: Number of classes.

    Returns:
        Counts ``(C, C)``, int64.

    Example:
        >>> confusion_matrix(torch.tensor([0, 1, 255]), torch.tensor([0, 0, 1]), 2)
        tensor([[1, 0],
                [1, 0]])
    """
    counted = label != IGNORE
    pairs = label[counted].long() * num_classes + predicted[counted]
    return torch.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)


def iou(confusion: Tensor) -> Tensor:
    """Return the intersection over union of each class ``(..., C)``; NaN where it does not occur.

    A class occurs when some pixel is labelled with it. The mean IoU of a domain is
    ``iou(confusion).nanmean()`` of the sum of its images' matrices.

    Example:
        >>> iou(torch.tensor([[1, 0], [1, 0]]))
        tensor([0.5000, 0.0000])
    """
    confusion = confusion.double()
    hit = confusion.diagonal(dim1=-2, dim2=-1)
    labelled = confusion.sum(dim=-1)
    union = labelled + confusion.sum(dim=-2) - hit
    return torch.where(labelled > 0, hit / union, torch.nan).float()


@dataclass(frozen=True)
class Counts:
    """What an image adds to the scores of its domain.

    All are whole numbers, so that sums are exact and the same in whatever order they are taken.
    """

    confusion: Tensor
    """Pixels by true and predicted class ``(C, C)``."""
    bins: Tensor
    """Pixels, hits and confidence in units of 2**-24, by 30 bins of confidence ``(3, 30)``."""
    gaps: Tensor
    """Confidence and hits apart, over 10 bins of each true class, in units of 2**-24 ``(C,)``."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.confusion + other.confusion, self.bins + other.bins, self.gaps + other.gaps
        )

    @classmethod
    def zero(cls, num_classes: int) -> "Counts":
        """Return what no image adds."""
        shapes = (num_classes, num_classes), (3, BINS), (num_classes,)
        return cls(*(torch.zeros(shape, dtype=torch.int64) for shape in shapes))


Cells = tuple[int, int, int]
"""How many sums there are: of pixels by true and predicted class, of pixels by true class, bin of
confidence and whether it is a hit, and of units of confidence by true class and bin."""
SumPixels = Callable[[Tensor, Tensor, Cells], Tensor]
"""Sums up label and probabilities of an image's pixels in cells, one kind after the other."""


def count(label: Tensor, probs: Tensor, sum_pixels: SumPixels | None = None) -> Counts:
    """Count an image.

    Args:
        label: True classes ``(H, W)``, 255 where a pixel does not count.
        probs: Class probabilities ``(C, H, W)``, on the same device.
        sum_pixels: Computes the sums. None: plain PyTorch.

    Example:
        >>> probs = torch.tensor([[0.75, 0.75], [0.25, 0.25]]).reshape(2, 1, 2)
        >>> count(torch.tensor([[0, 1]]), probs).confusion
        tensor([[1, 0],
                [1, 0]])
    """
    num = len(probs)
    cells = (num + 1) * num, (num + 1) * BINS * 2, (num + 1) * BINS  # a row for what is wrong
    sums = (sum_pixels or _sum_pixels)(label, probs, cells)
    return _counts(sums.cpu().numpy(), num, cells)


def _counts(sums: np.ndarray, num: int, cells: Cells) -> Counts:
    """Take the sums of an image's pixels apart."""
    confusion, both, trust = np.split(sums, np.cumsum(cells[:2]))
    if wrong := int(confusion[-num:].sum()):
        raise ValueError(
            f"{wrong} pixels cannot be counted: labels must be 0 to {num - 1} or {IGNORE}, and "
            "probabilities numbers"
        )
    both = both.reshape(num + 1, BINS, 2)[:num]
    bins = np.stack([both.sum(axis=2), both[..., 1], trust.reshape(num + 1, BINS)[:num]])
    tens = bins.reshape(3, num, 10, -1).sum(axis=3)
    gaps = np.abs(tens[1] * UNIT - tens[2]).sum(axis=1)
    counts = confusion.reshape(num + 1, num)[:num], bins.sum(axis=1), gaps
    return Counts(*map(torch.from_numpy, counts))


def _sum_pixels(label: Tensor, probs: Tensor, cells: Cells) -> Tensor:
    num, is_labelled = len(probs), label != IGNORE
    confidence, predicted = (values[is_labelled] for values in probs.max(dim=0))
    true = label[is_labelled].long()
    wrong = (true < 0) | (true >= num) | confidence.isnan()
    true, confidence = true.masked_fill(wrong, num), confidence.double().nan_to_num()
    place = true * BINS + (confidence * BINS).long().clamp_(0, BINS - 1)
    confusion = torch.bincount(true * num + predicted, minlength=cells[0])
    both = torch.bincount(place * 2 + (predicted == true), minlength=cells[1])
    trust = torch.bincount(place, (confidence * UNIT).round_(), minlength=cells[2]).long()
    return torch.cat((confusion, both, trust))


def ece(counts: Counts, num_bins: int = 10) -> float:
    """Return the expected calibration error over all pixels, with 10, 15 or 30 bins.

    Example:
        >>> probs = torch.tensor([[0.75, 0.75], [0.25, 0.25]]).reshape(2, 1, 2)
        >>> ece(count(torch.tensor([[0, 1]]), probs))
        0.25
    """
    pixels, hits, trust = _coarse(counts.bins, num_bins)
    return float((hits * UNIT - trust).abs().sum()) / UNIT / max(1, int(pixels.sum()))


def class_ece(counts: Counts) -> float:
    """Return the calibration error as the paper has it: the mean over the true classes.

    Of each class it is the mean over its pixels of the error in their image; it has 10 bins.
    """
    pixels = counts.confusion.sum(dim=1)
    there = pixels > 0
    return float((counts.gaps[there].double() / UNIT / pixels[there]).mean())


def pixel_accuracy(confusion: Tensor) -> float:
    """Return the share of pixels that are right."""
    return int(confusion.diagonal().sum()) / max(1, int(confusion.sum()))


def reliability(counts: Counts, num_bins: int = 10) -> Tensor:
    """Return pixels, accuracy and mean confidence of each bin ``(3, bins)``; NaN where empty."""
    pixels, hits, trust = _coarse(counts.bins, num_bins).double()
    return torch.stack([pixels, hits / pixels, trust / UNIT / pixels])


def _coarse(bins: Tensor, num_bins: int) -> Tensor:
    """Join neighbouring bins of the last dimension."""
    return bins.unflatten(-1, (num_bins, -1)).sum(dim=-1)


def in_space(probs: Tensor, classes: Sequence[str], space: ClassSpace) -> Tensor:
    """Return the probabilities of the classes of ``space``, from those of a network's ``classes``.

    Probabilities of classes that count as the same are added. Those of classes that ``space`` does
    not have are left out.

    Example:
        >>> space = ClassSpace(("person", "car"), merges={"bus": "car"})
        >>> probs = torch.tensor([0.2, 0.3, 0.5]).reshape(3, 1, 1)
        >>> in_space(probs, ("car", "bus", "person"), space).flatten().tolist()
        [0.5, 0.5]
    """
    places = [space.index(name) for name in classes]
    if places == list(range(len(space.names))):
        return probs
    merged = probs.new_zeros(len(space.names), *probs.shape[1:])
    for prob, place in zip(probs, places, strict=True):
        if place != IGNORE:
            merged[place] += prob
    return merged


class Score:
    """Accuracy and calibration over the images of a domain, added one by one."""

    def __init__(self, num_classes: int) -> None:
        self.counts = Counts.zero(num_classes)
        self.image_iou: list[float] = []
        """Mean IoU of each image over the classes in its label."""

    def add(self, label: Tensor, probs: Tensor) -> None:
        """Count an image with labels ``(H, W)`` and probabilities ``(C, H, W)``."""
        counts = count(label, probs)
        self.counts += counts
        self.image_iou.append(float(iou(counts.confusion).nanmean()))

    @property
    def mean_iou(self) -> float:
        """Mean over the classes that occur in the domain, from one confusion matrix."""
        return float(iou(self.counts.confusion).nanmean())

    @property
    def ece(self) -> float:
        """Expected calibration error over all pixels."""
        return ece(self.counts)
