"""Find out what a network takes and gives, from what its library records and by trying it."""

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
    """Raise TypeError or ValueError for what cannot be adapted."""
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
            "this network segments volumes (it has Conv3d layers), and images of two dimensions "
            "are what is adapted to here: take a network of Conv2d layers, and volumes slice by "
            "slice, [method(volume[z]) for z in range(len(volume))]"
        )
    if any(t.is_meta for t in tensors):
        raise ValueError("this model has weights on the meta device, which hold no numbers")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the network behind torch.compile or a wrapper for several devices."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrapped(model.module)
    return model


def detect(model: nn.Module, given: Interface | None = None) -> Interface:
    """Return the interface of ``model``; what is ``given`` stands, what is None is found out.

    Example:
        >>> interface = detect(nn.Conv2d(3, 2, 1))
        >>> interface.channels, interface.divisor, interface.mean
        (3, 1, (0.485, 0.456, 0.406))
    """
    given = Interface() if given is None else given
    if not isinstance(given, Interface):
        raise TypeError(f"interface must be an Interface, got {type(given).__name__}")
    interface = _filled(given, _known(model))
    interface = replace(interface, bgr=bool(interface.bgr), **_tried(model, interface))
    if given.mean is None and given.std is None and len(interface.mean or ()) != interface.channels:
        interface = replace(interface, mean=None, std=None)  # recorded for other channels
    return _with_normalisation(interface)


def is_normalisation_said(model: nn.Module, given: Interface | None, channels: int) -> bool:
    """Return True if it is known how the input is normalised, not only assumed."""
    said = _filled(Interface() if given is None else given, _known(model))
    return all(len(numbers or ()) == channels for numbers in (said.mean, said.std))


def _filled(interface: Interface, other: Interface) -> Interface:
    """Return an interface with what it leaves open taken from another."""
    left = [field.name for field in fields(Interface) if getattr(interface, field.name) is None]
    return replace(interface, **{name: getattr(other, name) for name in left})


def _with_normalisation(interface: Interface) -> Interface:
    """Fill in ImageNet's mean and deviation for colour, none for other channels; check them."""
    channels = interface.channels or 3
    default_mean, default_std = (0.0,) * channels, (1.0,) * channels
    if channels == 3:
        default_mean, default_std = IMAGENET_MEAN, IMAGENET_STD
    mean, std = interface.mean or default_mean, interface.std or default_std
    if not len(mean) == len(std) == channels:
        raise ValueError(
            f"mean and std must have one number for each of the {channels} input channels, "
            f"got {len(mean)} and {len(std)}"
        )
    if any(deviation <= 0 for deviation in std):
        raise ValueError(f"std must be positive, got {std}")
    return replace(interface, mean=mean, std=std)


# by trying it


class Probe:
    """Runs a private copy of a network on noise."""

    def __init__(self, model: nn.Module) -> None:
        self.model = private_copy(model).requires_grad_(False)
        weights = (p for p in self.model.parameters() if p.is_floating_point())
        self._weight = next(weights, torch.empty(0))

    def scores(
        self, interface: Interface, size: Size, contrast: float = 1.0, altered: Any = None
    ) -> Tensor | None:
        """Return the scores for noise of the given size, or None where the network refuses.

        The noise may have another contrast, and be altered in places.
        """
        with torch.inference_mode(False), torch.no_grad():
            try:
                output = self._run(interface, size, contrast, altered)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # networks refuse a size in many ways
                return None
            scores = interface.scores(output)
        return scores if scores.numel() else None

    def sees_all(self, interface: Interface, size: Size, scores: Tensor) -> bool:
        """Return True if scores depend on the last row and the last column of an image."""
        if bool((scores == scores.flatten()[0]).all()):
            return True  # as far as one can tell
        for last in ((..., -1, slice(None)), (..., -1)):
            other = self.scores(interface, size, altered=last)
            if other is not None and _identical(other, scores):
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

    def used(self, interface: Interface) -> list[str]:
        """Return the parameters that scores depend on, in the order of their use.

        Auxiliary heads are not among them. Where it cannot be determined there are none.
        """
        order: dict[str, int] = {}
        values = {n: p for n, p in self.model.named_parameters() if p.is_floating_point()}
        with torch.inference_mode(False), torch.enable_grad():
            try:
                for value in values.values():
                    value.requires_grad_()
                for name, module in self.model.named_modules():
                    module.register_forward_pre_hook(partial(_count_run, order, name))
                scores = interface.scores(self._run(interface, usual_size(interface)))
                slopes = torch.autograd.grad(scores.sum(), list(values.values()), allow_unused=True)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # scripted modules take no hooks, others no gradients
                return []
        places, place = {}, 0
        for name, slope in zip(values, slopes, strict=True):
            place = order.get(name.rpartition(".")[0], place)  # some run no layer for it
            if slope is not None:
                places[name] = place
        return sorted(places, key=places.__getitem__)


def usual_size(interface: Interface, side: int = 64) -> Size:
    """Return a size that the network takes, with sides of about ``side`` pixels."""
    side = max(side, interface.minimum or 1)
    side += -side % (interface.divisor or 1)
    return interface.size or (side, side)


@contextmanager
def runs_original(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield a list of the modules of ``model`` itself that this thread runs in a ``with`` block."""
    modules, runs, thread = set(model.modules()), list[nn.Module](), get_ident()

    def count(module: nn.Module, _: Any) -> None:
        if module in modules and get_ident() == thread:
            runs.append(module)

    with register_module_forward_pre_hook(count):
        yield runs


def _count_run(order: dict[str, int], name: str, *_: Any) -> None:
    order.setdefault(name, len(order))


def _identical(one: Tensor, other: Tensor) -> bool:
    """Return True if tensors have the same numbers, where NaN is one."""
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())


def _tried(model: nn.Module, interface: Interface) -> dict[str, Any]:
    """Run the network on noise: which channels and sizes does it take, what does it return?

    A network that takes no size at all is left to fail, with its own words, on a real image.
    """
    if None not in (interface.channels, interface.minimum, interface.divisor, interface.activated):
        return {}  # all of it is known
    probe = Probe(model)
    counts = [interface.channels] if interface.channels else _likely_channels(model)
    attempts = [(channels, rule) for channels in counts for rule in _divisor_rules(interface, 128)]
    attempts += [(counts[0], rule) for rule in _divisor_rules(interface, 512)]
    attempts += [(counts[0], rule) for rule in _fixed_rules(model, interface)]
    taken = _first_taken(probe, interface, attempts)
    if taken is None:
        return {"channels": counts[0], "divisor": 1, "activated": bool(interface.activated)}
    channels, size, rule, scores = taken
    attempt = replace(interface, channels=channels)
    if "divisor" in rule:
        rule["minimum"] = _minimum(probe, attempt, rule["divisor"], scores.shape[1])
    if interface.activated is None:
        rule["activated"] = _is_activated(probe, attempt, scores, size)
    return {"channels": channels, **rule}


def _first_taken(
    probe: Probe, interface: Interface, attempts: Sequence[tuple[int, tuple[Size, dict[str, Any]]]]
) -> tuple[int, Size, dict[str, Any], Tensor] | None:
    """Return the first channels, size and rule that the network takes, and its scores.

    Networks of patches cut off what is no whole patch, without a word: a larger divisor, with which
    they see all of an image, is better.
    """
    cut = None
    for channels, (size, rule) in attempts:
        if cut is not None and ("divisor" not in rule or max(size) > 2 * max(cut[1])):
            break
        attempt = replace(interface, channels=channels)
        if (scores := probe.scores(attempt, size)) is not None:
            taken = channels, size, rule, scores
            if interface.divisor or "divisor" not in rule or probe.sees_all(attempt, size, scores):
                return taken
            cut = cut or taken
    return cut


def _divisor_rules(interface: Interface, base: int) -> Iterator[tuple[Size, dict[str, Any]]]:
    """Yield a size of about ``base`` to try for each divisor, and the rule it would show."""
    if interface.size is None:
        for divisor in (interface.divisor,) if interface.divisor else DIVISORS:
            # Odd at every level of a network that halves, whichever way it rounds.
            size = divisor * (base // divisor + 1), divisor * max(base // divisor - 1, 1)
            yield size, {"divisor": divisor}


def _fixed_rules(model: nn.Module, interface: Interface) -> Iterator[tuple[Size, dict[str, Any]]]:
    """Yield sizes that may be the only one the network takes, or what its sides are made of."""
    if interface.size is not None:
        yield interface.size, {"size": interface.size}
        return
    for side in (*_recorded_sides(model), *COMMON_SIZES):
        if interface.divisor is None:  # it may be that sides must be its multiples
            yield (side, 2 * side), {"divisor": side}
        yield (side, side), {"size": (side, side)}


def _minimum(probe: Probe, interface: Interface, divisor: int, num_classes: int) -> int:
    """Return the smallest side of an image the network takes, among powers of two."""
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
    """Recognise probabilities: classes that sum to one, or such that never leave [0, 1]."""
    sums = scores.float().sum(dim=1)
    if scores.shape[1] > 1 and torch.allclose(sums, torch.ones_like(sums), atol=1e-2):
        return bool((scores >= 0).all())
    strong = probe.scores(interface, size, contrast=1000.0)  # drives scores far out, not these
    if strong is None or torch.equal(strong, scores):  # a head that is all zeros says nothing
        return False
    inside = all(bool(((values >= 0) & (values <= 1)).all()) for values in (scores, strong))
    return "sigmoid" if inside else False


# from what its library records


def _known(model: nn.Module) -> Interface:
    """Look up what the network says of its input, and else its library."""
    own = getattr(model, "interface", None)
    recorded = _recorded(model)
    return _filled(own, recorded) if isinstance(own, Interface) else recorded


def _recorded(model: nn.Module) -> Interface:
    """Look up what the network's library records of its input."""
    config = getattr(model, "config", None)
    if hasattr(config, "_name_or_path"):
        return _known_to_transformers(config)
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


def _known_to_transformers(config: Any) -> Interface:
    """Read the image processor's file where the model came from a folder or is in the cache."""
    channels = getattr(config, "num_channels", None)
    rules = _processor_rules(str(config._name_or_path or ""))
    if rules is None:
        return Interface(channels=channels)
    bgr = bool(rules.get("do_flip_channel_order"))
    by_default = "image_mean" in rules and "image_processor_type" not in rules
    if not rules.get("do_normalize", by_default):
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
    """Yield the sides of the square images the network was made for, where that is recorded."""
    side = getattr(getattr(model, "config", None), "image_size", None)
    if isinstance(side, int):
        yield side
    for config in _timm_configs(model):
        yield config.get("input_size", (3, 224, 224))[-1]


def _likely_channels(model: nn.Module) -> list[int]:
    """Return the numbers of input channels to try: the first convolution's, then colour, ..."""
    counts = [m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)]
    return list(dict.fromkeys([*counts[:1], 3, 1, 4, *counts[1:4]]))
