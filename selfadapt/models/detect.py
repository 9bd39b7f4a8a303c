"""Find out what a network takes and gives, from what its library records and by trying it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from selfadapt.models.interface import Interface, lent

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

DIVISORS = (1, 2, 4, 8, 16, 32, 64)
MINIMUMS = (1, 8, 16, 32, 64, 128, 256, 512)
COMMON_SIZES = (224, 256, 384, 448, 512, 518, 640, 768, 1024)
REFUSALS = (RuntimeError, ValueError, IndexError, AssertionError)
"""What networks raise at a size they do not take."""


def detect(model: nn.Module, given: Interface | None = None) -> Interface:
    """Return the interface of ``model``; what is ``given`` stands, what is None is found out.

    Example:
        >>> interface = detect(nn.Conv2d(3, 2, 1))
        >>> interface.channels, interface.divisor, interface.mean
        (3, 1, (0.485, 0.456, 0.406))
    """
    given = given or Interface()
    known = _known(model)
    channels = given.channels or known.channels or _first_channels(model)
    default = known if known.mean else _default_normalisation(channels)
    interface = replace(
        given,
        channels=channels,
        mean=given.mean or default.mean,
        std=given.std or default.std,
        bgr=bool(known.bgr) if given.bgr is None else given.bgr,
    )
    mean, std = interface.mean or (), interface.std or ()
    if not len(mean) == len(std) == channels:
        raise ValueError(
            f"mean and std must have one number for each of the {channels} input channels, "
            f"got {len(mean)} and {len(std)}"
        )
    if any(deviation <= 0 for deviation in std):
        raise ValueError(f"std must be positive, got {std}")
    return _tried(model, interface)


# by trying it


def _tried(model: nn.Module, interface: Interface) -> Interface:
    """Run the network on noise: which sizes does it take, and does it return probabilities?

    A network that takes no size at all is left to fail, with its own words, on a real image.
    """
    sizes, scores = next(_accepted_sizes(model, interface), ({"divisor": 1, "minimum": 1}, None))
    activated = bool(interface.activated)
    if interface.activated is None and interface.output is None and scores is not None:
        activated = _is_activated(model, scores)
    return replace(interface, activated=activated, **sizes)


def _accepted_sizes(
    model: nn.Module, interface: Interface
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Yield size rules the network keeps, with its scores: a divisor if any, or one fixed size."""
    fixed = [] if interface.size is None else [interface.size]
    for base in () if fixed else (128, 512):
        for divisor in (interface.divisor,) if interface.divisor else DIVISORS:
            # Odd at every level of a network that halves, whichever way it rounds.
            size = divisor * (base // divisor + 1), divisor * max(base // divisor - 1, 1)
            if (scores := _try(model, interface, size)) is not None:
                minimum = interface.minimum or _minimum(model, interface, divisor)
                yield {"divisor": divisor, "minimum": minimum}, scores
    for size in fixed or [(side, side) for side in (*_recorded_sides(model), *COMMON_SIZES)]:
        if (scores := _try(model, interface, size)) is not None:
            yield {"size": size}, scores


def _minimum(model: nn.Module, interface: Interface, divisor: int) -> int:
    """Return the smallest side of an image the network takes, among powers of two."""
    for minimum in MINIMUMS:
        side = minimum + (-minimum) % divisor
        if _try(model, interface, (side, side)) is not None:
            return side
    return MINIMUMS[-1]


def _try(model: nn.Module, interface: Interface, size: tuple[int, int]) -> Tensor | None:
    """Return the network's scores for noise of the given size, or None where it refuses."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((1, interface.channels or 3, *size), generator=generator)
    noise = noise.to(next((p for p in model.parameters() if p.is_floating_point()), noise))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with lent(model), torch.inference_mode(False), torch.no_grad():
        try:
            output = functional_call(model, buffers, (noise,))
        except REFUSALS:
            return None
    return interface.scores(output)


def _is_activated(model: nn.Module, scores: Tensor) -> bool:
    """Recognise probabilities: classes that sum to one, or a closing sigmoid."""
    if scores.shape[1] == 1:
        return isinstance(list(model.modules())[-1], nn.Sigmoid)
    sums = scores.float().sum(dim=1)
    return bool((scores >= 0).all() and torch.allclose(sums, torch.ones_like(sums), atol=1e-2))


# from what its library records


def _known(model: nn.Module) -> Interface:
    """Look up what the network's library records of its input."""
    if isinstance(own := getattr(model, "interface", None), Interface):
        return own
    config = getattr(model, "config", None)
    if hasattr(config, "_name_or_path"):
        return _known_to_transformers(config)
    if isinstance(config, Mapping) and "encoder_name" in config:  # segmentation-models-pytorch
        name = config["encoder_name"]
        if name.startswith(("inception", "xception")):
            return Interface(mean=(0.5,) * 3, std=(0.5,) * 3)
        if name.startswith("dpn"):
            return Interface(mean=(124 / 255, 117 / 255, 104 / 255), std=(1 / (0.0167 * 255),) * 3)
    for timm in _timm_configs(model):
        if timm.get("mean") and timm.get("std"):
            return Interface(mean=tuple(timm["mean"]), std=tuple(timm["std"]))
    return Interface()


def _known_to_transformers(config: Any) -> Interface:
    """Read the image processor's file where the model came from a folder or is in the cache."""
    channels = getattr(config, "num_channels", None)
    rules = _processor_rules(str(config._name_or_path or ""))
    if rules is None:
        return Interface(channels=channels)
    bgr = bool(rules.get("do_flip_channel_order"))
    if not rules.get("do_normalize", "image_mean" in rules):
        return Interface(channels=channels, mean=(0.0,) * 3, std=(1.0,) * 3, bgr=bgr)
    mean, std = rules.get("image_mean", IMAGENET_MEAN), rules.get("image_std", IMAGENET_STD)
    return Interface(channels=channels, mean=tuple(mean), std=tuple(std), bgr=bgr)


def _processor_rules(name: str) -> dict[str, Any] | None:
    if not name:
        return None
    path: Any = Path(name) / "preprocessor_config.json"
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            path = try_to_load_from_cache(name, "preprocessor_config.json")
        except HFValidationError:
            return None
    return json.loads(Path(path).read_text()) if isinstance(path, str | Path) else None


def _timm_configs(model: nn.Module) -> Iterator[Mapping[str, Any]]:
    for module in model.modules():
        config = getattr(module, "pretrained_cfg", None)
        if isinstance(config, Mapping):
            yield config


def _recorded_sides(model: nn.Module) -> Iterator[int]:
    """Yield the sides of the square images the network was made for, where that is recorded."""
    side = getattr(getattr(model, "config", None), "image_size", None)
    if isinstance(side, int):
        yield side
    for config in _timm_configs(model):
        yield config.get("input_size", (3, 224, 224))[-1]


def _default_normalisation(channels: int) -> Interface:
    if channels == 3:
        return Interface(mean=IMAGENET_MEAN, std=IMAGENET_STD)
    return Interface(mean=(0.0,) * channels, std=(1.0,) * channels)


def _first_channels(model: nn.Module) -> int:
    convolutions = (m for m in model.modules() if isinstance(m, nn.Conv2d))
    first = next(convolutions, None)
    # A head that is registered ahead of its backbone would show feature channels here.
    return first.in_channels if first and first.in_channels <= 16 else 3
