"""What ``auto`` mode adds to the paper's method, besides its loss and its steps of fixed length.

    StatisticsShift  how far BatchNorm statistics of an image are from those of the training data
    san_share        weight of SaN in the prediction without adaptation: from that shift
    adapted_share    weight of the adapted prediction: from what views of different scales see
    temperature      makes their mean as sure as the image and its views are
    quality          how good the mask probably is

The constants were chosen on validation domains; docs/auto.md has the measurements.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from selfadapt.pseudo import above_chance, class_counts, confidence

NO_SHIFT, FULL_SHIFT = 0.2, 0.4
"""Up to the first shift the source statistics are kept, from the second on SaN mixes them."""
NO_GAIN, FULL_GAIN = -0.1, 0.0
"""Gain in agreement of small views, from nothing to learn from them to full trust in them."""
LOW_QUALITY = 0.25
"""A mask of lower quality gets a warning."""
TEMPERATURES = 0.2, 8.0
"""Lowest and highest temperature that a prediction is calibrated with."""
BISECTIONS = 20
SAMPLE_SIDE = 128
"""The temperature is found on about as many rows and columns, evenly spread."""


class StatisticsShift:
    """Measures how far an image is from the training data, while a network runs on it.

    Every image has statistics of its own: so have its halves. A domain shift is what goes beyond
    that. The value is the squared distance of the means of the image's features from the running
    means, divided by that between left and right half plus that between upper and lower half; each
    in units of the running variance, as a mean over the channels of a layer, summed over layers.

    Args:
        model: The network, in evaluation mode. Hooks are added to it within the ``with`` block.
        names: Its BatchNorm layers.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm2d(1)).eval()
        >>> with StatisticsShift(model, ["0"]) as shift:
        ...     _ = model(torch.tensor([[2.0, 4.0], [2.0, 4.0]])[None, None])
        >>> shift.value
        tensor(2.2500)
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._layers = [model.get_submodule(name) for name in names]
        self._parts: list[Tensor] = []

    def __enter__(self) -> "StatisticsShift":
        self._hooks = [
            layer.register_forward_pre_hook(self._record, with_kwargs=True)
            for layer in self._layers
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _record(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        height, width = (side // 2 for side in x.shape[2:]) if x.dim() == 4 else (0, 0)
        if height == 0 or width == 0:  # features without a plane, such as pooled ones
            return
        quarters = x[..., : 2 * height, : 2 * width]
        quarters = quarters.unflatten(-1, (2, width)).unflatten(-3, (2, height))
        means = quarters.mean(dim=(0, 3, 5), dtype=torch.float32)  # (C, 2, 2)
        distance = means.mean(dim=(1, 2)) - layer.running_mean
        (left, right), (upper, lower) = means.mean(dim=1).T, means.mean(dim=2).T
        squares = torch.stack([distance**2, (left - right) ** 2 + (upper - lower) ** 2])
        self._parts.append((squares / (layer.running_var + layer.eps)).mean(dim=1))

    @property
    def value(self) -> Tensor | None:
        """The shift, 0 or more; None if the network ran no such layer."""
        if not self._parts:
            return None
        distance, spread = torch.stack(self._parts).sum(dim=0)
        return distance / spread.clamp_min(torch.finfo(spread.dtype).tiny)


def san_share(shift: Tensor) -> Tensor:
    """Return the weight of SaN's prediction, 0 to 1; the rest is that of the network as trained.

    Example:
        >>> san_share(torch.tensor([0.1, 0.3, 2.0]))
        tensor([0.0000, 0.5000, 1.0000])
    """
    return ((shift - NO_SHIFT) / (FULL_SHIFT - NO_SHIFT)).clamp(0, 1)


def adapted_share(small: Tensor, middle: Tensor, whole: Tensor, num_classes: int) -> Tensor:
    """Return the weight of the adapted prediction, 0 to 1.

    Small views see what the network misses in the whole image, or they only lose detail. If the
    smallest view agrees with the next one as well as the whole image does, they see something, and
    their mean is worth learning from.

    Args:
        small: Label from the smallest views ``(H, W)``.
        middle: Label from the views of the next scale.
        whole: Label of the whole image.
        num_classes: Number of classes.
    """
    gain = label_iou(middle, small, num_classes) - label_iou(middle, whole, num_classes)
    return ((gain - NO_GAIN) / (FULL_GAIN - NO_GAIN)).clamp(0, 1)


def label_iou(first: Tensor, second: Tensor, num_classes: int) -> Tensor:
    """Return the mean IoU of two labels, over the classes that either has.

    Example:
        >>> label_iou(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 1]), num_classes=9)
        tensor(0.5833)
    """
    both = class_counts(first.masked_fill(first != second, -1), num_classes)
    either = class_counts(first, num_classes) + class_counts(second, num_classes) - both
    return (both / either.clamp_min(1)).sum() / (either > 0).sum()


def expected_confidence(plain: Tensor, fused: Tensor) -> Tensor:
    """Return how sure a prediction for the image should be: as the network and its views are.

    The network itself tends to be too sure of images that it was not trained for, and its views of
    all others too unsure.

    Args:
        plain: Class probabilities without adaptation ``(C, H, W)``.
        fused: Mean class probabilities of the views ``(C, H, W)``.
    """
    return (confidence(plain) + confidence(fused)) / 2


def temperature(scores: Tensor, expected: Tensor) -> Tensor:
    """Return what to divide class scores by, so that their mean confidence is the expected one.

    Args:
        scores: Class scores ``(C, H, W)``.
        expected: Mean confidence to reach, by one temperature for all pixels.

    Example:
        >>> scores = torch.tensor([[0.9, 0.8], [0.1, 0.2]]).reshape(2, 1, 2).log()
        >>> scores = scores / temperature(scores, torch.tensor(0.7))
        >>> confidence(scores.softmax(dim=0)).round(decimals=3)
        tensor(0.7000)
    """
    down, across = (max(1, side // SAMPLE_SIDE) for side in scores.shape[-2:])
    sample = scores[:, ::down, ::across]
    low, high = (torch.full_like(expected, t) for t in TEMPERATURES)
    for _ in range(BISECTIONS):
        middle = (low * high).sqrt()
        is_too_sure = confidence((sample / middle).softmax(dim=0)) > expected
        low, high = torch.where(is_too_sure, middle, low), torch.where(is_too_sure, high, middle)
    return (low * high).sqrt()


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
