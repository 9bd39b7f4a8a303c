"""What a network takes and gives: any segmentation network behind one call.

Networks differ in the mean and deviation their input is normalised with, in the sizes they accept,
and in the form and size of what they return. An ``Interface`` knows these for one network, so that
everything else deals with raw images and with class scores ``(B, C, H, W)`` at the input's size.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
OUTPUT_KEYS = ("out", "logits", "pred")
DIVISORS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class Interface:
    """How to talk to one network. What is None is found out from the network by ``of``.

    Example:
        >>> interface = Interface(mean=(0.5,) * 3, std=(0.5,) * 3).of(nn.Conv2d(3, 2, 1))
        >>> interface.channels, interface.divisor
        (3, 1)
    """

    mean: tuple[float, ...] | None = None
    """Mean of each input channel, of values in [0, 1]."""
    std: tuple[float, ...] | None = None
    """Standard deviation of each input channel."""
    channels: int | None = None
    """Number of input channels."""
    bgr: bool | None = None
    """The network takes blue first."""
    divisor: int | None = None
    """Height and width must be multiples of this; images are padded, and predictions cut."""
    output: Callable[[Any], Tensor] | None = None
    """Takes class scores ``(B, C, h, w)`` out of what the network returns; None: by its form."""
    activated: bool | None = None
    """The network returns probabilities, not scores."""

    def of(self, model: nn.Module) -> "Interface":
        """Fill in what is None from what ``model`` is known for, or shows when it is tried."""
        known = _known(model)
        channels = self.channels or known.channels or _first_channels(model)
        default = known if known.mean else _default_normalisation(channels)
        full = replace(
            self,
            channels=channels,
            mean=self.mean or default.mean,
            std=self.std or default.std,
            bgr=bool(known.bgr) if self.bgr is None else self.bgr,
        )
        full._check()
        return full._tried(model)

    def _check(self) -> None:
        mean, std = self.mean or (), self.std or ()
        if not len(mean) == len(std) == self.channels:
            raise ValueError(
                f"mean and std must have one number for each of the {self.channels} input "
                f"channels, got {len(mean)} and {len(std)}"
            )
        if any(deviation <= 0 for deviation in std):
            raise ValueError(f"std must be positive, got {std}")

    def _tried(self, model: nn.Module) -> "Interface":
        """Try the network on small noise: which sizes does it take, and what does it return?"""
        for divisor in (self.divisor,) if self.divisor else DIVISORS:
            # Odd at every level of a network that halves, whichever way it rounds.
            size = divisor * (128 // divisor + 1), divisor * max(128 // divisor - 1, 1)
            tried = replace(self, divisor=divisor, activated=bool(self.activated))
            try:
                output = self._raw(model, _noise(model, self.channels or 3, size))
            except (RuntimeError, ValueError, IndexError, AssertionError):
                continue
            if self.activated is None and self.output is None:
                return replace(tried, activated=_is_activated(model, output))
            return tried
        return replace(self, divisor=self.divisor or 1, activated=bool(self.activated))

    def _raw(self, model: nn.Module, x: Tensor) -> Tensor:
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with lent(model), torch.inference_mode(False), torch.no_grad():
            return self._scores(functional_call(model, buffers, (x,)))

    def normalize(self, image: Tensor) -> Tensor:
        """Turn a raw image ``(C, H, W)`` in [0, 1] into the network's input ``(1, C, H, W)``."""
        mean, std = self._statistics(image)
        image = (image - mean) / std
        return (image.flip(0) if self.bgr else image)[None]

    def denormalize(self, image: Tensor) -> Tensor:
        """Turn the network's input ``(C, H, W)`` into a raw image ``(C, H, W)``."""
        mean, std = self._statistics(image)
        return (image.flip(0) if self.bgr else image) * std + mean

    def _statistics(self, image: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (
            torch.tensor(numbers, dtype=image.dtype, device=image.device).reshape(-1, 1, 1)
            for numbers in (self.mean, self.std)
        )
        return mean, std

    def logits(self, network: Callable[[Tensor], Any], x: Tensor) -> Tensor:
        """Return class scores ``(B, C, H, W)`` of ``network`` for its input ``x`` ``(B, 3, H, W)``.

        One output channel, usual for foreground against background, becomes two classes.
        """
        height, width = x.shape[-2:]
        right, below = (-width) % (self.divisor or 1), (-height) % (self.divisor or 1)
        if right or below:
            x = F.pad(x, (0, right, 0, below), mode="replicate")
        logits = self._scores(network(x)).to(torch.promote_types(x.dtype, torch.float32))
        if self.activated:
            logits = logits.logit(1e-6) if logits.shape[1] == 1 else logits.clamp_min(1e-6).log()
        if logits.shape[1] == 1:
            logits = torch.cat((torch.zeros_like(logits), logits), dim=1)
        if logits.shape[-2:] != x.shape[-2:]:
            logits = F.interpolate(logits, x.shape[-2:], mode="bilinear", align_corners=False)
        return logits[..., :height, :width]

    def _scores(self, output: Any) -> Tensor:
        scores = (self.output or main_output)(output)
        if not isinstance(scores, Tensor) or scores.dim() != 4 or not scores.is_floating_point():
            found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise TypeError(
                f"the network must return class scores (B, C, H, W), got {found}; "
                "give interface=Interface(output=...) to take them out of what it returns"
            )
        return scores


def main_output(output: Any) -> Any:
    """Take the class scores out of what a network returns: a tensor, dict, object or sequence.

    Example:
        >>> main_output({"out": [1, 2], "aux": 3})
        1
    """
    if isinstance(output, Mapping):
        key = next((key for key in OUTPUT_KEYS if key in output), None)
        if key is None and len(output) == 1:
            key = next(iter(output))
        if key is None:
            raise TypeError(
                f"the network returns {sorted(map(str, output))}, none of which is called "
                f"{' or '.join(OUTPUT_KEYS)}; give interface=Interface(output=...) to choose"
            )
        return main_output(output[key])
    if isinstance(output, list | tuple) and output:
        return main_output(output[0])
    if hasattr(output, "logits"):
        return main_output(output.logits)
    return output


@contextmanager
def lent(model: nn.Module) -> Iterator[None]:
    """Lend a model out in evaluation mode; on leaving, every module is as it was.

    That goes for each module's flags, hooks and attributes: some networks set such on themselves
    when they are run. Tensors are not looked after: nobody writes to them, see ``Episode``.
    """
    before = [(module, _tables(module)) for module in model.modules()]
    try:
        for module, _ in before:
            module.training = False
        yield
    finally:
        for _, tables in before:
            for table, content in tables:
                _restore(table, content)


def _tables(module: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return a module's attributes and the tables among them, each with a copy of its content."""
    attributes = module.__dict__
    tables = [attributes, *(value for value in attributes.values() if isinstance(value, dict))]
    return [(table, dict(table)) for table in tables]


def _restore(table: dict[str, Any], content: dict[str, Any]) -> None:
    """Put a table back without a moment in which something is missing."""
    for name, value in content.items():
        if name not in table or table[name] is not value:
            table[name] = value
    for name in table.keys() - content.keys():
        del table[name]


def _noise(model: nn.Module, channels: int, size: tuple[int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((1, channels, *size), generator=generator)
    return noise.to(next((p for p in model.parameters() if p.is_floating_point()), noise))


def _is_activated(model: nn.Module, scores: Tensor) -> bool:
    """Recognise probabilities: classes that sum to one, or a closing sigmoid."""
    if scores.shape[1] == 1:
        return isinstance(list(model.modules())[-1], nn.Sigmoid)
    sums = scores.float().sum(dim=1)
    return bool((scores >= 0).all() and torch.allclose(sums, torch.ones_like(sums), atol=1e-2))


def _default_normalisation(channels: int) -> Interface:
    if channels == 3:
        return Interface(mean=IMAGENET_MEAN, std=IMAGENET_STD)
    return Interface(mean=(0.0,) * channels, std=(1.0,) * channels)


def _first_channels(model: nn.Module) -> int:
    convolutions = (m for m in model.modules() if isinstance(m, nn.Conv2d))
    first = next(convolutions, None)
    # A head that is registered ahead of its backbone would show feature channels here.
    return first.in_channels if first and first.in_channels <= 16 else 3


def _known(model: nn.Module) -> Interface:
    """Look up what the network's library records of its input."""
    if isinstance(own := getattr(model, "interface", None), Interface):
        return own
    config = getattr(model, "config", None)
    if hasattr(config, "_name_or_path"):
        return _known_to_transformers(config)
    if isinstance(config, Mapping) and "encoder_name" in config:
        name = config["encoder_name"]
        if name.startswith(("inception", "xception")):
            return Interface(mean=(0.5,) * 3, std=(0.5,) * 3)
        if name.startswith("dpn"):
            return Interface(mean=(124 / 255, 117 / 255, 104 / 255), std=(1 / (0.0167 * 255),) * 3)
    for module in model.modules():
        timm = getattr(module, "pretrained_cfg", None)
        if isinstance(timm, Mapping) and timm.get("mean") and timm.get("std"):
            return Interface(mean=tuple(timm["mean"]), std=tuple(timm["std"]))
    return Interface()


def _known_to_transformers(config: Any) -> Interface:
    """Read the image processor's file where the model came from a folder or is in the cache."""
    channels = getattr(config, "num_channels", None)
    name = str(config._name_or_path or "")
    path: Any = Path(name) / "preprocessor_config.json"
    if name and not path.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            path = try_to_load_from_cache(name, "preprocessor_config.json")
        except HFValidationError:
            path = None
    if not name or not isinstance(path, str | Path):
        return Interface(channels=channels)
    rules = json.loads(Path(path).read_text())
    bgr = bool(rules.get("do_flip_channel_order"))
    if not rules.get("do_normalize", "image_mean" in rules):
        return Interface(channels=channels, mean=(0.0,) * 3, std=(1.0,) * 3, bgr=bgr)
    mean, std = rules.get("image_mean", IMAGENET_MEAN), rules.get("image_std", IMAGENET_STD)
    return Interface(channels=channels, mean=tuple(mean), std=tuple(std), bgr=bgr)
