"""Metrics: IoU from a confusion matrix, and calibration error from binned confidences.

Both are computed from integer sums over pixels, accumulated exactly and without storing pixels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from selfadapt.labels import ClassSpace
from selfadapt.pseudo import IGNORE

BINS = 30
"""Number of confidence bins; they are merged to 10 or 15 bins."""
UNIT = 2**24
"""Confidences are summed as integers in units of 1 / UNIT, the precision of float32."""


def confusion_matrix(label: Tensor, predicted: Tensor, num_classes: int) -> Tensor:
    """Count pixels by true class (row) and predicted class (column).

    Args:
        label: True classes of any shape, 255 for ignored pixels.
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
    """Return the intersection over union of each class ``(..., C)``; NaN for absent classes.

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
    """Sufficient statistics of an image for IoU and calibration error.

    All are integers, so that sums are exact and independent of their order.
    """

    confusion: Tensor
    """Pixels by true and predicted class ``(C, C)``."""
    bins: Tensor
    """Pixels, hits and confidence in units of 2**-24, by 30 bins of confidence ``(3, 30)``."""
    gaps: Tensor
    """Sum over 10 bins of |confidence - hits| for each true class, in units of 2**-24 ``(C,)``."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.confusion + other.confusion, self.bins + other.bins, self.gaps + other.gaps
        )

    @classmethod
    def zero(cls, num_classes: int) -> "Counts":
        """Return the counts of no images."""
        shapes = (num_classes, num_classes), (3, BINS), (num_classes,)
        return cls(*(torch.zeros(shape, dtype=torch.int64) for shape in shapes))


Cells = tuple[int, int, int]
"""Sizes of three histograms: pixels by true and predicted class; pixels by true class, confidence
bin and hit; and confidence by true class and bin."""
SumPixels = Callable[[Tensor, Tensor, Cells], Tensor]
"""Computes the three concatenated histograms of labels and probabilities."""


def count(label: Tensor, probs: Tensor, sum_pixels: SumPixels | None = None) -> Counts:
    """Return the counts of an image.

    Args:
        label: True classes ``(H, W)``, 255 for ignored pixels.
        probs: Class probabilities ``(C, H, W)``, on the same device.
        sum_pixels: Computes the histograms. None: plain PyTorch.

    Example:
        >>> probs = torch.tensor([[0.75, 0.75], [0.25, 0.25]]).reshape(2, 1, 2)
        >>> count(torch.tensor([[0, 1]]), probs).confusion
        tensor([[1, 0],
                [1, 0]])
    """
    num = len(probs)
    rows = num + 1  # one more for invalid pixels
    cells = rows * num, rows * BINS * 2, rows * BINS
    sums = (sum_pixels or _sum_pixels)(label, probs, cells)
    return _counts(sums.cpu().numpy(), num, cells)


def _counts(sums: np.ndarray, num: int, cells: Cells) -> Counts:
    """Compute counts from the concatenated histograms."""
    confusion, by_hit, confidence = np.split(sums, np.cumsum(cells[:2]))
    if num_invalid := int(confusion[-num:].sum()):
        raise ValueError(
            f"{num_invalid} pixels cannot be counted: labels must be 0 to {num - 1} or {IGNORE}, "
            "and probabilities numbers"
        )
    by_hit = by_hit.reshape(num + 1, BINS, 2)[:num]
    confidence = confidence.reshape(num + 1, BINS)[:num]
    bins = np.stack([by_hit.sum(axis=2), by_hit[..., 1], confidence])
    coarse = bins.reshape(3, num, 10, -1).sum(axis=3)
    gaps = np.abs(coarse[1] * UNIT - coarse[2]).sum(axis=1)
    counts = confusion.reshape(num + 1, num)[:num], bins.sum(axis=1), gaps
    return Counts(*map(torch.from_numpy, counts))


def _sum_pixels(label: Tensor, probs: Tensor, cells: Cells) -> Tensor:
    num, is_labelled = len(probs), label != IGNORE
    confidence, predicted = (values[is_labelled] for values in probs.max(dim=0))
    true = label[is_labelled].long()
    invalid = (true < 0) | (true >= num) | confidence.isnan()
    true, confidence = true.masked_fill(invalid, num), confidence.double().nan_to_num()
    bins = true * BINS + (confidence * BINS).long().clamp_(0, BINS - 1)
    confusion = torch.bincount(true * num + predicted, minlength=cells[0])
    by_hit = torch.bincount(bins * 2 + (predicted == true), minlength=cells[1])
    sums = torch.bincount(bins, (confidence * UNIT).round_(), minlength=cells[2]).long()
    return torch.cat((confusion, by_hit, sums))


def ece(counts: Counts, num_bins: int = 10) -> float:
    """Return the expected calibration error over all pixels, with 10, 15 or 30 bins.

    Example:
        >>> probs = torch.tensor([[0.75, 0.75], [0.25, 0.25]]).reshape(2, 1, 2)
        >>> ece(count(torch.tensor([[0, 1]]), probs))
        0.25
    """
    pixels, hits, confidence = _merge_bins(counts.bins, num_bins)
    return float((hits * UNIT - confidence).abs().sum()) / UNIT / max(1, int(pixels.sum()))


def class_ece(counts: Counts) -> float:
    """Return the calibration error of the paper: the mean over the true classes, with 10 bins.

    The error of a class is the mean over its pixels of the error in their image.
    """
    pixels = counts.confusion.sum(dim=1)
    present = pixels > 0
    return float((counts.gaps[present].double() / UNIT / pixels[present]).mean())


def pixel_accuracy(confusion: Tensor) -> float:
    """Return the fraction of correct pixels."""
    return int(confusion.diagonal().sum()) / max(1, int(confusion.sum()))


def reliability(counts: Counts, num_bins: int = 10) -> Tensor:
    """Return pixels, accuracy and mean confidence of each bin ``(3, bins)``; NaN if empty."""
    pixels, hits, confidence = _merge_bins(counts.bins, num_bins).double()
    return torch.stack([pixels, hits / pixels, confidence / UNIT / pixels])


def _merge_bins(bins: Tensor, num_bins: int) -> Tensor:
    """Merge neighbouring bins of the last dimension."""
    return bins.unflatten(-1, (num_bins, -1)).sum(dim=-1)


def to_class_space(probs: Tensor, classes: Sequence[str], space: ClassSpace) -> Tensor:
    """Map the probabilities of a network's ``classes`` to those of ``space``.

    Probabilities of merged classes are added, those of classes not in ``space`` are dropped.

    Example:
        >>> space = ClassSpace(("person", "car"), merges={"bus": "car"})
        >>> probs = torch.tensor([0.2, 0.3, 0.5]).reshape(3, 1, 1)
        >>> to_class_space(probs, ("car", "bus", "person"), space).flatten().tolist()
        [0.5, 0.5]
    """
    indices = [space.index(name) for name in classes]
    if indices == list(range(len(space.names))):
        return probs
    merged = probs.new_zeros(len(space.names), *probs.shape[1:])
    for prob, index in zip(probs, indices, strict=True):
        if index != IGNORE:
            merged[index] += prob
    return merged


class Score:
    """Accumulates accuracy and calibration over the images of a domain."""

    def __init__(self, num_classes: int) -> None:
        self.counts = Counts.zero(num_classes)
        self.image_iou: list[float] = []
        """Mean IoU of each image over the classes in its label."""

    def add(self, label: Tensor, probs: Tensor) -> None:
        """Add an image with labels ``(H, W)`` and probabilities ``(C, H, W)``."""
        counts = count(label, probs)
        self.counts += counts
        self.image_iou.append(float(iou(counts.confusion).nanmean()))

    @property
    def mean_iou(self) -> float:
        """Mean IoU over the classes that occur in the domain, from the summed confusion matrix."""
        return float(iou(self.counts.confusion).nanmean())

    @property
    def ece(self) -> float:
        """Expected calibration error over all pixels."""
        return ece(self.counts)
