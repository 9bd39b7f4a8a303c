"""Determine the interface of a network from the records of its library and by running it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from selfadapt.copying import private_copy
from selfadapt.models.interface import Interface
from selfadapt.views import Size

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

DIVISORS = (1, 2, 4, 8, 14, 16, 28, 32, 64)
MINIMUMS = (1, 8, 16, 32, 64, 128, 256, 512)
COMMON_SIZES = (224, 256, 320, 384, 448, 480, 512, 518, 640, 768, 1024)


def check_model(model: nn.Module) -> None:
    """Raise TypeError or ValueError if a model cannot be adapted."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "a TorchScript model cannot be adapted, its weights are fixed; give the nn.Module "
            "it was made from"
        )
    tensors = [*model.parameters(), *model.buffers()]
    if any(isinstance(t, nn.UninitializedParameter | nn.UninitializedBuffer) for t in tensors):
        raise ValueError("this model has lazy layers without weights yet; run it on an image once")
    kinds = {type(module) for module in model.modules()}
    if nn.Conv3d in kinds and nn.Conv2d not in kinds:
        raise ValueError(
            "this network segments volumes (it has Conv3d layers), but only images of two "
            "dimensions are supported: use a network of Conv2d layers, and segment volumes slice "
            "by slice, [method(volume[z]) for z in range(len(volume))]"
        )
    if any(t.is_meta for t in tensors):
        raise ValueError("this model has weights on the meta device, which have no values")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the network behind torch.compile or a wrapper for several devices."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrapped(model.module)
    return model


def detect(model: nn.Module, given: Interface | None = None) -> Interface:
    """Return the interface of ``model``; fields that are None in ``given`` are determined.

    Example:
        >>> interface = detect(nn.Conv2d(3, 2, 1))
        >>> interface.channels, interface.divisor, interface.mean
        (3, 1, (0.485, 0.456, 0.406))
    """
    given = Interface() if given is None else given
    if not isinstance(given, Interface):
        raise TypeError(f"interface must be an Interface, got {type(given).__name__}")
    interface = _merge(given, _recorded(model))
    interface = replace(interface, bgr=bool(interface.bgr), **_probe(model, interface))
    if given.mean is None and given.std is None and len(interface.mean or ()) != interface.channels:
        interface = replace(interface, mean=None, std=None)  # recorded for other channels
    channels = interface.channels or 3
    mean, std = (0.0,) * channels, (1.0,) * channels
    if channels == 3:
        mean, std = IMAGENET_MEAN, IMAGENET_STD
    interface = replace(interface, mean=interface.mean or mean, std=interface.std or std)
    interface.check_lengths()
    return interface


def is_normalisation_known(model: nn.Module, given: Interface | None, channels: int) -> bool:
    """Return True if mean and deviation are given or recorded, False if they are assumed."""
    interface = _merge(Interface() if given is None else given, _recorded(model))
    return all(len(values or ()) == channels for values in (interface.mean, interface.std))


def _merge(interface: Interface, other: Interface) -> Interface:
    """Fill the fields of an interface that are None from another."""
    missing = [field.name for field in fields(Interface) if getattr(interface, field.name) is None]
    return replace(interface, **{name: getattr(other, name) for name in missing})


# by running it


class Probe:
    """Runs a private copy of a network on noise."""

    def __init__(self, model: nn.Module) -> None:
        self.model = private_copy(model).requires_grad_(False)
        weights = (p for p in self.model.parameters() if p.is_floating_point())
        self._weight = next(weights, torch.empty(0))

    def scores(
        self, interface: Interface, size: Size, contrast: float = 1.0, altered: Any = None
    ) -> Tensor | None:
        """Return the scores for noise of the given size, or None if the network raises an error.

        Args:
            interface: The channels of the input, and how scores are taken out of the output.
            size: Height and width.
            contrast: Standard deviation of the noise.
            altered: Index of the noise values that 1 is added to; None: no values.
        """
        with torch.inference_mode(False), torch.no_grad():
            try:
                output = self._run(interface, size, contrast, altered)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # networks reject a size with many kinds of errors
                return None
            scores = interface.scores(output)
        return scores if scores.numel() else None

    def sees_all(self, interface: Interface, size: Size, scores: Tensor) -> bool:
        """Return True if scores depend on both the last row and the last column of an image."""
        if bool((scores == scores.flatten()[0]).all()):
            return True  # constant scores, nothing can be concluded
        for last in ((..., -1, slice(None)), (..., -1)):
            other = self.scores(interface, size, altered=last)
            if other is not None and torch.equal(other.nan_to_num(), scores.nan_to_num()):
                return False
        return True

    def _run(
        self, interface: Interface, size: Size, contrast: float = 1.0, altered: Any = None
    ) -> Any:
        generator = torch.Generator().manual_seed(0)
        shape = 1, interface.channels or 3, *size
        noise = contrast * torch.randn(shape, generator=generator, device="cpu")
        if altered is not None:
            noise[altered] += 1
        return self.model(noise.to(self._weight))

    def used_parameters(self, interface: Interface) -> list[str]:
        """Return the parameters that scores depend on, in the order of their use.

        This excludes auxiliary heads. The list is empty if it cannot be determined.
        """
        order: dict[str, int] = {}
        values = {n: p for n, p in self.model.named_parameters() if p.is_floating_point()}
        with torch.inference_mode(False), torch.enable_grad():
            try:
                for value in values.values():
                    value.requires_grad_()
                for name, module in self.model.named_modules():
                    module.register_forward_pre_hook(partial(_record_order, order, name))
                scores = interface.scores(self._run(interface, accepted_size(interface)))
                gradients = torch.autograd.grad(
                    scores.sum(), list(values.values()), allow_unused=True
                )
            except torch.OutOfMemoryError:
                raise
            except Exception:  # scripted modules have no hooks, others no gradients
                return []
        positions, position = {}, 0
        for name, gradient in zip(values, gradients, strict=True):
            # Parameters that are used without running their module follow the one before.
            position = order.get(name.rpartition(".")[0], position)
            if gradient is not None:
                positions[name] = position
        return sorted(positions, key=positions.__getitem__)


def accepted_size(interface: Interface, side: int = 64) -> Size:
    """Return a size that the network accepts, with sides of about ``side`` pixels."""
    side = max(side, interface.minimum or 1)
    side += -side % (interface.divisor or 1)
    return interface.size or (side, side)


@contextmanager
def record_original_runs(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield a list of the original modules of ``model`` that this thread runs in the block."""
    modules, runs, thread = set(model.modules()), list[nn.Module](), get_ident()

    def count(module: nn.Module, _: Any) -> None:
        if module in modules and get_ident() == thread:
            runs.append(module)

    with register_module_forward_pre_hook(count):
        yield runs


def _record_order(order: dict[str, int], name: str, *_: Any) -> None:
    order.setdefault(name, len(order))


def _probe(model: nn.Module, interface: Interface) -> dict[str, Any]:
    """Run the network on noise to determine channels, accepted sizes and form of the output.

    A network that fails on all sizes raises its own error on the first real image.
    """
    if None not in (interface.channels, interface.minimum, interface.divisor, interface.activated):
        return {}  # nothing to determine
    probe = Probe(model)
    if interface.channels:
        counts = [interface.channels]
    else:  # that of the first convolution is the most likely
        of_layers = [m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)]
        counts = list(dict.fromkeys([*of_layers[:1], 3, 1, 4, *of_layers[1:4]]))
    attempts = [(channels, rule) for channels in counts for rule in _divisor_rules(interface, 128)]
    attempts += [(counts[0], rule) for rule in _divisor_rules(interface, 512)]
    attempts += [(counts[0], rule) for rule in _fixed_rules(model, interface)]
    accepted = _first_accepted(probe, interface, attempts)
    if accepted is None:
        return {"channels": counts[0], "divisor": 1, "activated": bool(interface.activated)}
    channels, size, rule, scores = accepted
    attempt = replace(interface, channels=channels)
    if "divisor" in rule:
        rule["minimum"] = _minimum(probe, attempt, rule["divisor"], scores.shape[1])
    if interface.activated is None:
        rule["activated"] = _is_activated(probe, attempt, scores, size)
    return {"channels": channels, **rule}


def _first_accepted(
    probe: Probe, interface: Interface, attempts: Sequence[tuple[int, tuple[Size, dict[str, Any]]]]
) -> tuple[int, Size, dict[str, Any], Tensor] | None:
    """Return the first channels, size and rule that the network accepts, and its scores.

    Networks of patches silently crop to whole patches: a larger divisor, with which they see the
    whole image, is preferred.
    """
    cropped = None
    for channels, (size, rule) in attempts:
        if cropped is not None and ("divisor" not in rule or max(size) > 2 * max(cropped[1])):
            break
        attempt = replace(interface, channels=channels)
        if (scores := probe.scores(attempt, size)) is not None:
            accepted = channels, size, rule, scores
            if interface.divisor or "divisor" not in rule or probe.sees_all(attempt, size, scores):
                return accepted
            cropped = cropped or accepted
    return cropped


def _divisor_rules(interface: Interface, base: int) -> Iterator[tuple[Size, dict[str, Any]]]:
    """Yield a size of about ``base`` to try for each divisor, and the rule if it is accepted."""
    if interface.size is None:
        for divisor in (interface.divisor,) if interface.divisor else DIVISORS:
            # Odd at every level of a network that halves, whether it rounds up or down.
            size = divisor * (base // divisor + 1), divisor * max(base // divisor - 1, 1)
            yield size, {"divisor": divisor}


def _fixed_rules(model: nn.Module, interface: Interface) -> Iterator[tuple[Size, dict[str, Any]]]:
    """Yield sizes that may be the only one accepted, or whose sides may be the divisor."""
    if interface.size is not None:
        yield interface.size, {"size": interface.size}
        return
    for side in (*_recorded_sides(model), *COMMON_SIZES):
        if interface.divisor is None:  # sides may have to be multiples of it
            yield (side, 2 * side), {"divisor": side}
        yield (side, side), {"size": (side, side)}


def _minimum(probe: Probe, interface: Interface, divisor: int, num_classes: int) -> int:
    """Return the smallest side that the network accepts, among powers of two."""
    for minimum in (interface.minimum,) if interface.minimum else MINIMUMS:
        side = minimum + (-minimum) % divisor
        if (scores := probe.scores(interface, (side, side))) is not None:
            if scores.shape[1] != num_classes:
                raise TypeError(
                    "the network's number of classes changes with the size of the image, from "
                    f"{num_classes} to {scores.shape[1]}: scores must be (B, C, H, W), with the "
                    "classes second; give interface=Interface(output=...) to put them there"
                )
            return side
    return interface.minimum or 1


def _is_activated(
    probe: Probe, interface: Interface, scores: Tensor, size: Size
) -> bool | Literal["sigmoid"]:
    """Recognise probabilities: they sum to one over the classes, or always lie in [0, 1]."""
    sums = scores.float().sum(dim=1)
    if scores.shape[1] > 1 and torch.allclose(sums, torch.ones_like(sums), atol=1e-2):
        return bool((scores >= 0).all())
    strong = probe.scores(interface, size, contrast=1000.0)  # moves scores far out of [0, 1]
    if strong is None or torch.equal(strong, scores):  # a constant head shows nothing
        return False
    inside = all(bool(((values >= 0) & (values <= 1)).all()) for values in (scores, strong))
    return "sigmoid" if inside else False


# from the records of its library


def _recorded(model: nn.Module) -> Interface:
    """Return the interface that the network records, completed from its library."""
    interface, from_library = getattr(model, "interface", None), _recorded_by_library(model)
    return _merge(interface, from_library) if isinstance(interface, Interface) else from_library


def _recorded_by_library(model: nn.Module) -> Interface:
    """Return the preprocessing that the network's library records."""
    config = getattr(model, "config", None)
    if hasattr(config, "_name_or_path"):
        return _recorded_by_transformers(config)
    if isinstance(config, Mapping) and "encoder_name" in config:  # segmentation-models-pytorch
        name = config["encoder_name"]
        if name.startswith(("inception", "xception")):
            return Interface(mean=(0.5,) * 3, std=(0.5,) * 3)
        if name.startswith("dpn"):
            return Interface(mean=(124 / 255, 117 / 255, 104 / 255), std=(1 / (0.0167 * 255),) * 3)
        if not name.startswith("tu-"):
            return Interface(mean=IMAGENET_MEAN, std=IMAGENET_STD)
    if type(model).__module__.startswith("torchvision."):
        return Interface(mean=IMAGENET_MEAN, std=IMAGENET_STD)
    for timm in _timm_configs(model):
        if timm.get("mean") and timm.get("std"):
            return Interface(mean=tuple(timm["mean"]), std=tuple(timm["std"]))
    return Interface()


def _recorded_by_transformers(config: Any) -> Interface:
    """Return the settings of the image processor in the model's folder or the cache."""
    channels = getattr(config, "num_channels", None)
    settings = _processor_settings(str(config._name_or_path or ""))
    if settings is None:
        return Interface(channels=channels)
    bgr = bool(settings.get("do_flip_channel_order"))
    by_default = "image_mean" in settings and "image_processor_type" not in settings
    if not settings.get("do_normalize", by_default):
        return Interface(channels=channels, mean=(0.0,) * 3, std=(1.0,) * 3, bgr=bgr)
    mean, std = settings.get("image_mean", IMAGENET_MEAN), settings.get("image_std", IMAGENET_STD)
    return Interface(channels=channels, mean=tuple(mean), std=tuple(std), bgr=bgr)


def _processor_settings(name: str) -> dict[str, Any] | None:
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
    if not isinstance(path, str | Path):
        return None
    try:
        return json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _timm_configs(model: nn.Module) -> Iterator[Mapping[str, Any]]:
    for module in model.modules():
        config = getattr(module, "pretrained_cfg", None)
        if isinstance(config, Mapping):
            yield config


def _recorded_sides(model: nn.Module) -> Iterator[int]:
    """Yield the recorded sides of the square images the network was made for."""
    side = getattr(getattr(model, "config", None), "image_size", None)
    if isinstance(side, int):
        yield side
    for config in _timm_configs(model):
        yield config.get("input_size", (3, 224, 224))[-1]
