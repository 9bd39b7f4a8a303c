"""Losses between a network's scores and a pseudo-label.

A loss takes class scores ``(1, C, H, W)`` and labels ``(1, H, W)``, and returns a scalar. Pixels
left out are labelled ``ignore_label(C)``: 255, or -1 where 255 is a class.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from selfadapt.checks import check_number
from selfadapt.own import is_own, not_trusted
from selfadapt.patterns import nearest
from selfadapt.pseudo import class_counts, ignore_label
from selfadapt.views import constant

Loss = Callable[[Tensor, Tensor], Tensor]
RULED_OUT = 1e6
"""A larger cross-entropy to equal probabilities means that a class has a score of -inf."""


@dataclass(frozen=True)
class CrossEntropy:
    """Mean cross-entropy over the labelled pixels.

    On a GPU it is computed from the scores before they are upsampled.

    Args:
        label_smoothing: Share of each label that is spread over all classes, 0 to 1.
        class_weights: Weight of each class. None: all count the same.

    Example:
        >>> import torch
        >>> loss = CrossEntropy(label_smoothing=0.1)
        >>> loss(torch.zeros(1, 2, 1, 3), torch.tensor([[[0, 1, 255]]]))
        tensor(0.6931)
    """

    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_number("label_smoothing", self.label_smoothing, 0, 1)
        if self.class_weights is not None:
            object.__setattr__(self, "class_weights", tuple(self.class_weights))
            for weight in self.class_weights:
                check_number("a class weight", weight, 0)

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of scores ``(1, C, H, W)`` for labels ``(1, H, W)``."""
        num_classes, weight = logits.shape[1], None
        if self.class_weights is not None:
            if len(self.class_weights) != num_classes:
                raise ValueError(
                    f"class_weights must have one weight for each of the {num_classes} classes, "
                    f"got {len(self.class_weights)}"
                )
            weight = constant(self.class_weights, logits)
        return F.cross_entropy(
            logits, target, weight, ignore_index=ignore_label(num_classes),
            label_smoothing=self.label_smoothing,
        )  # fmt: skip


@dataclass(frozen=True)
class BalancedCrossEntropy:
    """Cross-entropy in which rare classes count, towards labels that are not certain.

    A pixel weighs ``n ** -balance`` for the ``n`` pixels of its class, so that large classes do not
    drive out small ones, and a share of the loss asks for equal probabilities, so that the network
    does not grow as sure as hard labels would make it. Like ``CrossEntropy`` it is computed before
    scores are upsampled on a GPU.

    Args:
        label_smoothing: That share, 0 to 1.
        balance: 0: all pixels weigh the same; 1: all classes do.

    Example:
        >>> import torch
        >>> loss = BalancedCrossEntropy()
        >>> loss(torch.zeros(1, 2, 1, 3), torch.tensor([[[0, 1, 255]]]))
        tensor(0.6931)
    """

    label_smoothing: float = 0.1
    balance: float = 0.25

    def __post_init__(self) -> None:
        check_number("label_smoothing", self.label_smoothing, 0, 1)
        check_number("balance", self.balance, 0, 1)

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of scores ``(1, C, H, W)`` for labels ``(1, H, W)``."""
        num_classes = logits.shape[1]
        ignore = ignore_label(num_classes)
        weight = class_counts(target, num_classes).clamp_min(1).pow(-self.balance)
        weight = weight.to(logits.dtype)
        hard = F.cross_entropy(logits, target, weight, ignore_index=ignore)
        even = F.cross_entropy(logits, target, ignore_index=ignore, label_smoothing=1.0)
        even = torch.where(even > RULED_OUT, 0.0, even)
        return (1 - self.label_smoothing) * hard + self.label_smoothing * even


FUSED = (CrossEntropy, BalancedCrossEntropy)
"""Losses that are computed before scores are upsampled on a GPU."""
LOSSES: dict[str, Loss] = {
    "cross-entropy": CrossEntropy(),
    "balanced-cross-entropy": BalancedCrossEntropy(),
    "smoothed-cross-entropy": CrossEntropy(label_smoothing=0.1),
}


def find_loss(loss: str | Loss) -> Loss:
    """Return a loss by its name in ``LOSSES``; a function stays as it is."""
    if isinstance(loss, str):
        if loss not in LOSSES:
            if is_own(loss):
                raise not_trusted(loss)
            guess = nearest(loss, LOSSES)
            raise ValueError(f"unknown loss {loss!r};{guess} known: {', '.join(LOSSES)}")
        return LOSSES[loss]
    if not callable(loss):
        raise TypeError(f"loss must be a name or a function of scores and labels, got {loss!r}")
    return loss
