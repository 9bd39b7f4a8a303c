"""How good a segmentation is: IoU from a confusion matrix, calibration error from bins.

Both are sums over pixels, so they are gathered image by image, exactly and without storing pixels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from selfadapt.labels import ClassSpace
from selfadapt.pseudo import IGNORE


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
    """Return the intersection over union of each class ``(C,)``; NaN where it does not occur.

    A class occurs when some pixel is labelled with it. The mean IoU of a domain is
    ``iou(confusion).nanmean()`` of the sum of its images' matrices.

    Example:
        >>> iou(torch.tensor([[1, 0], [1, 0]]))
        tensor([0.5000, 0.0000])
    """
    confusion = confusion.double()
    hit = confusion.diagonal()
    labelled = confusion.sum(dim=1)
    union = labelled + confusion.sum(dim=0) - hit
    return torch.where(labelled > 0, hit / union, torch.nan).float()


def calibration_bins(label: Tensor, probs: Tensor, num_bins: int = 10) -> Tensor:
    """Sort pixels by confidence; return each bin's count, hits and summed confidence.

    Args:
        label: True classes ``(H, W)``, 255 where a pixel does not count.
        probs: Class probabilities ``(C, H, W)``.
        num_bins: Number of bins of equal width between 0 and 1.

    Returns:
        Sums ``(3, bins)``, float64.
    """
    counted = label != IGNORE
    confidence, predicted = probs.max(dim=0)
    confidence = confidence[counted].double()
    hit = (predicted == label)[counted].double()
    index = (confidence * num_bins).long().clamp(max=num_bins - 1)
    rows = (torch.ones_like(hit), hit, confidence)
    return torch.stack([torch.bincount(index, row, minlength=num_bins) for row in rows])


def ece(bins: Tensor) -> float:
    """Return the expected calibration error of bins from ``calibration_bins``, summed over images.

    Example:
        >>> probs = torch.tensor([[0.75, 0.75], [0.25, 0.25]]).reshape(2, 1, 2)
        >>> ece(calibration_bins(torch.tensor([[0, 1]]), probs))
        0.25
    """
    count, hits, confidence = bins
    return float((hits - confidence).abs().sum() / count.sum().clamp(min=1))


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
    index = torch.tensor([space.index(name) for name in classes], device=probs.device)
    known = index != IGNORE
    merged = probs.new_zeros(len(space.names), *probs.shape[1:])
    return merged.index_add(0, index[known], probs[known])


class Score:
    """Accuracy and calibration over the images of a domain, added one by one."""

    def __init__(self, num_classes: int, num_bins: int = 10) -> None:
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64)
        self.bins = torch.zeros(3, num_bins, dtype=torch.float64)
        self.image_iou: list[float] = []
        """Mean IoU of each image over the classes in its label."""

    def add(self, label: Tensor, probs: Tensor) -> None:
        """Count an image with labels ``(H, W)`` and probabilities ``(C, H, W)``."""
        confusion = confusion_matrix(label, probs.argmax(dim=0), len(self.confusion)).cpu()
        self.confusion += confusion
        self.bins += calibration_bins(label, probs, self.bins.shape[1]).cpu()
        self.image_iou.append(float(iou(confusion).nanmean()))

    @property
    def mean_iou(self) -> float:
        """Mean over the classes that occur in the domain, from one confusion matrix."""
        return float(iou(self.confusion).nanmean())

    @property
    def ece(self) -> float:
        """Expected calibration error over all pixels."""
        return ece(self.bins)
