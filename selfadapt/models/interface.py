"""Preprocessing and postprocessing of a network.

Networks differ in the mean and deviation their input is normalised with, in the sizes they accept,
and in the form and size of their output. An ``Interface`` describes these for one network, so that
all other code works with raw images and with class scores ``(B, C, H, W)`` at the input's size.
``detect.py`` determines the interface of a network.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from selfadapt.checks import check_number, shortened
from selfadapt.views import constant

OUTPUT_KEYS = ("out", "logits", "pred")
MAX_CHANNELS = 1024
MAX_SIDE = 2048
"""Upper limit of ``divisor`` and ``minimum``, which images are padded to."""
MAX_PIXELS = 2**23
"""Upper limit of the pixels of ``size``, which images are resized to."""
MAX_VALUE = 1e6
"""Upper limit of mean and deviation, which are of values in [0, 1]."""
MIN_LOGIT = -1e30
"""Replaces minus infinity, which becomes NaN when interpolation multiplies it by 0."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """Describes the input and output of a network. Fields that are None are detected.

    Example:
        >>> interface = Interface(mean=(0.5,) * 3, std=(0.5,) * 3)
        >>> interface.normalize(torch.ones(3, 1, 1)).flatten().tolist()
        [1.0, 1.0, 1.0]
    """

    mean: tuple[float, ...] | None = None
    """Mean of each input channel, of values in [0, 1]; in the order red, green, blue even if
    ``bgr``."""
    std: tuple[float, ...] | None = None
    """Standard deviation of each input channel, as ``mean``."""
    channels: int | None = None
    """Number of input channels."""
    bgr: bool | None = None
    """The network expects the channel order blue, green, red."""
    divisor: int | None = None
    """Height and width must be multiples of this: images are padded, predictions cropped."""
    minimum: int | None = None
    """Height and width must be at least this: images are padded, predictions cropped."""
    size: tuple[int, int] | None = None
    """The only accepted height and width: images are resized, and predictions resized back."""
    output: Callable[[Any], Tensor] | None = None
    """Extracts class scores ``(B, C, h, w)`` from the output of the network; None: automatic."""
    activated: bool | Literal["sigmoid"] | None = None
    """The network returns probabilities, not scores; ``sigmoid``: independent for each class."""

    def __post_init__(self) -> None:
        for name in ("mean", "std", "size"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, str) or not isinstance(value, Sequence)):
                example = "(480, 640)" if name == "size" else "(0.5, 0.5, 0.5)"
                raise TypeError(f"{name} must be a tuple such as {example}, got {shortened(value)}")
            if value is not None and not all(map(_is_number, value)):
                raise ValueError(
                    f"{name} must be finite numbers up to {MAX_VALUE:g}, got {shortened(value)}"
                )
            object.__setattr__(self, name, None if value is None else tuple(value))
        if self.std is not None and any(deviation < 1 / MAX_VALUE for deviation in self.std):
            raise ValueError(
                f"std must be positive, {1 / MAX_VALUE:g} or more, got {shortened(self.std)}"
            )
        limits = {"channels": MAX_CHANNELS, "divisor": MAX_SIDE, "minimum": MAX_SIDE}
        for name, limit in limits.items():
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 1, limit, whole=True)
        if self.size is not None and not (
            len(self.size) == 2
            and all(isinstance(n, Integral) and n > 0 for n in self.size)
            and self.size[0] * self.size[1] <= MAX_PIXELS
        ):
            raise ValueError(
                f"size must be a height and a width in pixels, {MAX_PIXELS} pixels at most, got "
                f"{shortened(self.size)}"
            )
        if self.bgr not in (None, False, True):
            raise ValueError(f"bgr must be True or False, got {shortened(self.bgr)}")
        if self.output is not None and not callable(self.output):
            raise TypeError(
                "output must be a function of the output of the network, such as "
                f"lambda output: output['out'], got {self.output!r}"
            )
        if self.activated not in (None, False, True, "sigmoid"):
            raise ValueError(
                f"activated must be True, False or 'sigmoid', got {shortened(self.activated)}"
            )

    def check_lengths(self) -> None:
        """Raise ValueError unless mean and std, if given, have a number for each channel."""
        for name in ("mean", "std"):
            values = getattr(self, name)
            if None not in (values, self.channels) and len(values) != self.channels:
                raise ValueError(
                    f"{name} must have one number for each of the {self.channels} input channels, "
                    f"got {shortened(values)}"
                )

    def normalize(self, image: Tensor) -> Tensor:
        """Convert a raw image ``(C, H, W)`` or ``(B, C, H, W)`` in [0, 1] to the network's input.

        The result always has a batch dimension.
        """
        mean, std = self._statistics(image)
        image = (image - mean) / std
        image = image.flip(-3) if self.bgr else image
        return image if image.dim() == 4 else image[None]

    def denormalize(self, image: Tensor) -> Tensor:
        """Convert the network's input ``(C, H, W)`` back to a raw image ``(C, H, W)``."""
        mean, std = self._statistics(image)
        return (image.flip(0) if self.bgr else image) * std + mean

    def _statistics(self, image: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (constant(numbers or (), image) for numbers in (self.mean, self.std))
        return mean.reshape(-1, 1, 1), std.reshape(-1, 1, 1)

    def logits(self, network: Callable[[Tensor], Any], x: Tensor) -> Tensor:
        """Return class scores ``(B, C, H, W)`` of ``network`` for its input ``x`` ``(B, 3, H, W)``.

        A single output channel, usual for binary segmentation, becomes two classes.
        """
        return self.finish(network(self.prepare(x)), x)

    def prepare(self, x: Tensor) -> Tensor:
        """Resize or pad an input ``(B, 3, H, W)`` to a size that the network accepts."""
        if self.size is not None:
            return F.interpolate(x, self.size, mode="bilinear", antialias=True)
        padding = [self._padding(length) for length in x.shape[:-3:-1]]
        return F.pad(x, (0, padding[0], 0, padding[1]), mode="replicate") if any(padding) else x

    def finish(self, output: Any, x: Tensor) -> Tensor:
        """Return class scores at the size of ``x`` ``(..., H, W)`` from the network's output."""
        height, width = x.shape[-2:]
        logits = self.class_logits(output)
        size = (height, width)
        if self.size is None:
            size = (height + self._padding(height), width + self._padding(width))
        if logits.shape[-2:] != size:
            logits = logits.clamp_min(MIN_LOGIT)
            logits = F.interpolate(logits, size, mode="bilinear", align_corners=False)
        return logits[..., :height, :width]

    def class_logits(self, output: Any) -> Tensor:
        """Return a score for every class ``(B, C, h, w)`` from the network's output."""
        logits = self.scores(output)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.activated == "sigmoid" or (self.activated and logits.shape[1] == 1):
            logits = logits.logit(1e-6)
        elif self.activated:
            logits = logits.clamp_min(1e-6).log()
        if logits.shape[1] == 1:
            logits = torch.cat((torch.zeros_like(logits), logits), dim=1)
        return logits

    def _padding(self, length: int) -> int:
        """Return the number of pixels to pad a dimension of an image with."""
        target = max(length, self.minimum or 1)
        return target + (-target) % (self.divisor or 1) - length

    def scores(self, output: Any) -> Tensor:
        """Extract the class scores ``(B, C, h, w)`` from the output of the network."""
        try:
            scores = (self.output or main_output)(output)
        except (LookupError, AttributeError) as error:
            raise TypeError(
                f"output= failed with {error!r} on what the network returns, "
                f"which is {type(output).__name__}"
            ) from error
        if not isinstance(scores, Tensor) or scores.dim() != 4 or not scores.is_floating_point():
            kind = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise TypeError(
                f"the network must return class scores (B, C, H, W), got {kind}; "
                "give interface=Interface(output=...) to take them out of what it returns"
            )
        return scores


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and abs(value) <= MAX_VALUE  # type: ignore[operator]


def main_output(output: Any) -> Any:
    """Extract the class scores from a network's output: a tensor, dict, object or sequence.

    Example:
        >>> main_output({"out": [1, 2], "aux": 3})
        1
    """
    if isinstance(output, Mapping):
        if "class_queries_logits" in output and "masks_queries_logits" in output:
            return _mask_scores(output["class_queries_logits"], output["masks_queries_logits"])
        key = next((key for key in OUTPUT_KEYS if key in output), None)
        if key is None and len(output) == 1:
            key = next(iter(output))
        if key is None:
            raise TypeError(
                f"the network returns {sorted(map(str, output))}, none of which is called "
                f"{' or '.join(OUTPUT_KEYS)}; give interface=Interface(output=...) to choose"
            )
        return main_output(output[key])
    if not isinstance(output, Tensor):
        for key in OUTPUT_KEYS:
            if hasattr(output, key):
                return main_output(getattr(output, key))
    if isinstance(output, list | tuple) and output:
        return main_output(output[0])
    return output


def _mask_scores(classes: Tensor, masks: Tensor) -> Tensor:
    """Return scores ``(B, C, h, w)`` of networks that classify masks, such as Mask2Former.

    Each of Q queries has class scores ``(B, Q, C + 1)``, the last for no object, and a mask
    ``(B, Q, h, w)``. The score of a class is the log of the sum of its masks, weighted by their
    probability of being that class.
    """
    probs = classes.softmax(dim=-1)[..., :-1]
    return torch.einsum("bqc,bqhw->bchw", probs, masks.sigmoid()).clamp_min(1e-6).log()
