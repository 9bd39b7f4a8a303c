"""How good a segmentation is: IoU from a confusion matrix, calibration error from bins.

Both are sums over pixels, so they are gathered image by image, exactly and without storing pixels.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

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


def merge_classes(values: Tensor, merges: Mapping[int, int]) -> Tensor:
    """Add the probabilities ``(C, H, W)`` of some classes to those of others."""
    merged = values.clone()
    for old, new in merges.items():
        merged[new] += merged[old]
        merged[old] = 0
    return merged
