"""What ``auto`` mode adds to the paper's method, besides its loss and its steps of fixed length.

    shift            how much SaN changes what the network sees in the image, without labels
    quality          how good the mask probably is
    adapted_share    weight of the adapted prediction, the rest is SaN's: from shift and quality
    calibrated       their mean, as sure as SaN and the views are

The constants were chosen on validation domains; docs/auto.md has the measurements.
"""

import torch
from torch import Tensor

from selfadapt.pseudo import above_chance, class_counts, confidence

NO_SHIFT, FULL_SHIFT = 0.1, 0.2
"""Up to the first shift SaN's prediction is kept, from the second on the adapted one."""
LOW_QUALITY, FAIR_QUALITY = 0.25, 0.35
"""Below the first quality a pseudo-label is trusted by half, from the second on fully."""
TEMPERATURES = 0.2, 8.0
"""Lowest and highest temperature that a prediction is calibrated with."""
BISECTIONS = 20
SAMPLE_SIDE = 128
"""The temperature is found on about as many rows and columns, evenly spread."""


def shift(source: Tensor, san: Tensor) -> Tensor:
    """Return how far an image is from those the network was trained on, 0 to 1.

    SaN replaces a part of the training statistics by those of the image. Where the image is like
    the training data, that changes little. The shift is 1 minus the mean IoU of the predictions
    without and with SaN, over the classes that either has.

    Args:
        source: Class scores of the network as trained ``(1, C, H, W)``.
        san: Class scores with SaN ``(1, C, H, W)``.

    Example:
        >>> a = torch.tensor([[2.0, 2.0, 0.0, 0.0], [0.0, 0.0, 2.0, 2.0]]).reshape(1, 2, 2, 2)
        >>> shift(a, a), shift(a, a.flip(1))
        (tensor(0.), tensor(1.))
    """
    num_classes = source.shape[1]
    first, second = source.argmax(dim=1), san.argmax(dim=1)
    both = class_counts(first.masked_fill(first != second, -1), num_classes)
    either = class_counts(first, num_classes) + class_counts(second, num_classes) - both
    return 1 - (both / either.clamp_min(1)).sum() / (either > 0).sum()


def adapted_share(shift: Tensor, quality: Tensor) -> Tensor:
    """Return the weight of the adapted prediction, 0 to 1; the rest is that of SaN's.

    Where there is no shift, there is nothing to adapt to. Where the quality is low, pseudo-labels
    are often wrong, and half of the weight stays with SaN.

    Example:
        >>> adapted_share(torch.tensor([0.05, 0.15, 0.4, 0.4]), torch.tensor([0.6, 0.6, 0.6, 0.1]))
        tensor([0.0000, 0.5000, 1.0000, 0.5000])
    """
    moved = ((shift - NO_SHIFT) / (FULL_SHIFT - NO_SHIFT)).clamp(0, 1)
    trust = ((quality - LOW_QUALITY) / (FAIR_QUALITY - LOW_QUALITY)).clamp(0, 1)
    return moved * (1 + trust) / 2


def expected_confidence(san: Tensor, fused: Tensor) -> Tensor:
    """Return how sure a prediction for the image should be: as SaN and the views are, on average.

    The network itself tends to be too sure of images that it was not trained for, and its views of
    all others too unsure.

    Args:
        san: Class probabilities with SaN ``(C, H, W)``.
        fused: Mean class probabilities of the views ``(C, H, W)``.
    """
    return (confidence(san) + confidence(fused)) / 2


def calibrated(probs: Tensor, expected: Tensor) -> Tensor:
    """Return class scores whose mean confidence is the expected one; labels stay the same.

    Args:
        probs: Class probabilities ``(C, H, W)``.
        expected: Mean confidence to reach, by one temperature for all pixels.

    Returns:
        Class scores ``(C, H, W)``.

    Example:
        >>> probs = torch.tensor([[0.9, 0.8], [0.1, 0.2]]).reshape(2, 1, 2)
        >>> scores = calibrated(probs, torch.tensor(0.7))
        >>> confidence(scores.softmax(dim=0)).round(decimals=3)
        tensor(0.7000)
    """
    scores = probs.log()
    down, across = (max(1, side // SAMPLE_SIDE) for side in scores.shape[-2:])
    sample = scores[:, ::down, ::across]
    low, high = (torch.full_like(expected, t) for t in TEMPERATURES)
    for _ in range(BISECTIONS):
        middle = (low * high).sqrt()
        is_too_sure = confidence((sample / middle).softmax(dim=0)) > expected
        low, high = torch.where(is_too_sure, middle, low), torch.where(is_too_sure, high, middle)
    return scores / (low * high).sqrt()


def quality(expected: Tensor, num_classes: int) -> Tensor:
    """Return how good a mask probably is: an estimate of its mean IoU, 0 to 1.

    Args:
        expected: ``expected_confidence`` of the image.
        num_classes: Number of classes; what chance reaches with them has quality 0.

    Example:
        >>> quality(torch.tensor(0.85), num_classes=19).round(decimals=3)
        tensor(0.5960)
    """
    return above_chance(expected, num_classes).clamp(0, 1) ** 3
