"""Pseudo-labels from the views' predictions (paper Eq. 1-4)."""

from collections.abc import Iterable
from numbers import Real

import torch
from torch import Tensor

IGNORE = 255
"""Label of a pixel that does not count."""


def ignore_label(num_classes: int) -> int:
    """Return the label of a pixel that does not count: 255, or -1 where 255 is a class."""
    return IGNORE if num_classes <= IGNORE else -1


def fuse(probs: Iterable[Tensor], num_views: int | None = None) -> Tensor:
    """Return the mean of the views' class probabilities, each ``(C, H, W)`` (Eq. 1).

    The views are taken one at a time, so that they never all lie in memory.

    Args:
        probs: The probabilities, or sums of those of several views.
        num_views: How many views there are. None: as many as maps.

    Example:
        >>> import torch
        >>> fuse([torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5])])
        tensor([0.2500, 0.7500])
    """
    total, num = None, 0
    for view_probs in probs:
        num += 1
        if total is None:
            total = view_probs
        else:  # the first map may be somebody else's, the sum is not
            total = total.add_(view_probs) if num > 2 else total + view_probs
    if total is None:
        raise ValueError("at least one view is needed to make a pseudo-label, got none")
    return total.div_(num_views or num) if num > 1 else total / (num_views or num)


def class_counts(label: Tensor, num_classes: int) -> Tensor:
    """Return the number of pixels of each class; labels that are no class do not count.

    Unlike ``torch.bincount`` it does not wait for a GPU.

    Example:
        >>> import torch
        >>> class_counts(torch.tensor([[0, 0, 2], [2, 2, 255]]), 3)
        tensor([2., 0., 3.])
    """
    return torch.histc(label.float(), num_classes, min=-0.5, max=num_classes - 0.5)


def confidence(probs: Tensor) -> Tensor:
    """Return the mean probability of the most likely class of each pixel ``(C, H, W)``."""
    return probs.amax(dim=0).mean()


def above_chance(confidence: Tensor, num_classes: int) -> Tensor:
    """Return a confidence on a scale from 0, that of chance, to 1, certainty."""
    chance = 1 / num_classes
    return (confidence - chance) / (1 - chance)


def view_confidence(probs: Tensor) -> Tensor:
    """Return how sure the views' mean prediction is over the image: 0 is chance, 1 certainty.

    It is low where views contradict each other, and so tells images that a network knows nothing
    of, which its confidence in a single prediction does not.

    Args:
        probs: Class probabilities ``(C, H, W)``, the mean over the views.

    Example:
        >>> import torch
        >>> view_confidence(torch.tensor([[0.9, 0.6], [0.1, 0.4]]).reshape(2, 1, 2))
        tensor(0.5000)
    """
    return above_chance(confidence(probs), len(probs))


def pseudo_label(
    probs: Tensor, psi: float = 0.7, *, ignore: int = IGNORE, strict: bool = False
) -> Tensor:
    """Turn fused class probabilities into labels, leaving out the doubtful pixels (Eq. 2-4).

    A pixel keeps its most likely class ``c`` if its probability reaches ``psi`` times the highest
    probability that ``c`` has anywhere in the image. A rare class the network is never sure of
    therefore still gets labels, which one global threshold would not give it.

    Args:
        probs: Class probabilities ``(C, H, W)``, the mean over the views.
        psi: Confidence threshold in [0, 1]. Higher keeps fewer pixels.
        ignore: Label of the pixels left out.
        strict: Ask for more than the threshold, as the released code does, instead of at least it.

    Returns:
        Labels ``(H, W)``, int64.

    Example:
        >>> import torch
        >>> probs = torch.tensor([[0.9, 0.6, 0.4], [0.1, 0.4, 0.6]]).reshape(2, 1, 3)
        >>> pseudo_label(probs, psi=0.7)
        tensor([[  0, 255,   1]])
    """
    check_psi(psi)
    if 0 <= ignore < len(probs):
        raise ValueError(f"ignore must not be one of the {len(probs)} classes, got {ignore}")
    highest, label = probs.max(dim=0)
    threshold = (psi * probs.amax(dim=(1, 2)))[label]
    kept = highest > threshold if strict else highest >= threshold
    return label.masked_fill(~kept, ignore)


def check_psi(psi: float) -> None:
    """Raise ValueError unless psi lies in [0, 1]."""
    if isinstance(psi, bool) or not isinstance(psi, Real) or not 0 <= psi <= 1:
        raise ValueError(f"psi must lie in [0, 1] (higher keeps fewer pixels), got {psi!r}")
