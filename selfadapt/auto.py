"""What ``auto`` mode adds to the paper's method, besides its loss and its steps of fixed length.

    StatisticsShift  how far BatchNorm statistics of an image are from those of the training data
    san_share        weight of SaN in the prediction without adaptation: from that shift
    adapted_share    weight of the adapted prediction: from what views of different scales see
    temperature      makes their mean as sure as a prediction for the image should be
    quality          how good the mask probably is

The constants were chosen on validation domains; docs/auto.md has the measurements.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfadapt.pseudo import above_chance, class_counts, confidence
from selfadapt.views import Size, size_of

NO_SHIFT, FULL_SHIFT = 0.2, 0.4
"""Up to the first shift the source statistics are kept, from the second on SaN mixes them."""
NO_GAIN, FULL_GAIN = -0.1, 0.0
"""Gain in agreement of small views, from nothing to learn from them to full trust in them."""
LOW_QUALITY = 0.25
"""A mask of lower quality gets a warning."""
TEMPERATURES = 0.2, 8.0
"""Lowest and highest temperature that a prediction is calibrated with."""
BISECTIONS = 20
SAMPLE_SIDE = 160
"""The temperature is found on at most as many rows and columns."""


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


def expected_confidence(plain: Tensor, views: Tensor, weight: Tensor) -> Tensor:
    """Return how sure of a pixel a prediction should be.

    A network is right about how sure it is of images like those it was trained for, and too sure of
    others: for these its views at a smaller scale know better. Pixels to which the two give
    different labels do not count.

    Args:
        plain: Class probabilities without adaptation ``(C, H, W)``.
        views: Those of the views of one scale.
        weight: Weight of the views, 0 to 1.

    Returns:
        Confidences ``(H, W)``, 0 for a pixel that does not count.
    """
    agree = plain.argmax(dim=0) == views.argmax(dim=0)
    return plain.amax(dim=0).lerp(views.amax(dim=0), weight) * (agree | ~agree.any())


def sampled(values: Tensor, size: Size) -> Tensor:
    """Return some of the values ``(C, H, W)``, evenly spread, for an image of ``size``."""
    places = [min(side, SAMPLE_SIDE) for side in size]
    return F.interpolate(values[None], places, mode="nearest")[0]


def temperature(scores: Tensor, expected: Tensor) -> Tensor:
    """Return what to divide class scores by, so that they are as sure as expected on the mean.

    Args:
        scores: Class scores ``(C, H, W)``.
        expected: ``expected_confidence`` at some of the pixels, see ``sampled``.

    Example:
        >>> scores = torch.tensor([[0.9, 0.8], [0.1, 0.2]]).reshape(2, 1, 2).log()
        >>> scores = scores / temperature(scores, torch.tensor([[0.7, 0.7]]))
        >>> confidence(scores.softmax(dim=0)).round(decimals=3)
        tensor(0.7000)
    """
    sample, counts, goal = sampled(scores, size_of(expected)), expected > 0, expected.sum()
    low, high = (torch.full_like(goal, t) for t in TEMPERATURES)
    for _ in range(BISECTIONS):
        middle = (low * high).sqrt()
        confidences = (sample / middle).softmax(dim=0).amax(dim=0)
        is_too_sure = (confidences * counts).sum() > goal
        low, high = torch.where(is_too_sure, middle, low), torch.where(is_too_sure, high, middle)
    return (low * high).sqrt()


def quality(plain: Tensor, fused: Tensor) -> Tensor:
    """Return how good a mask probably is: an estimate of its mean IoU, 0 to 1.

    It falls where the network is not sure, and where views of different scales contradict each
    other. What chance reaches has quality 0.

    Args:
        plain: Class probabilities without adaptation ``(C, H, W)``.
        fused: Mean class probabilities of all views ``(C, H, W)``.

    Example:
        >>> probs = torch.tensor([0.85, 0.15]).reshape(2, 1, 1)
        >>> quality(probs, probs).round(decimals=3)
        tensor(0.3430)
    """
    sure = (confidence(plain) + confidence(fused)) / 2
    return above_chance(sure, len(plain)).clamp(0, 1) ** 3
