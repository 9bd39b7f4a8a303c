"""Weights in files: how they are read, and how they find their place in a network.

Tensors only: no code is ever run from a checkpoint. Names are made plain: wrappings such as
``state_dict`` and ``module.`` come off, the released code's and mmsegmentation's names become ours.
The tensors are tried under their own and under plain names, as the whole network and as its
backbone alone, and the best fit counts.
"""

import json
import os
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from selfadapt.checks import shortened
from selfadapt.labels import CLASS_SPACES, class_names
from selfadapt.models.norms import MIXING
from selfadapt.models.spec import ModelSpec
from selfadapt.models.zoo import MODELS, StateDict

WRAPPINGS = ("state_dict", "model_state_dict", "model")
PREFIXES = ("module.", "model.", "_orig_mod.")
AUXILIARY = (
    "auxiliary_head.", "aux_head.", "aux_classifier.", "classification_head.", "data_preprocessor.",
    "fc.", "backbone.fc.",
)  # fmt: skip
"""What a checkpoint may have too much: heads for training and for classification, and the like."""
CLASSIFIERS = (
    "classifier.", "head.", "norm.", "incre_modules.", "downsamp_modules.", "final_layer.",
)  # fmt: skip
"""What a backbone's checkpoint may have too much."""
NOT_NEEDED = ("num_batches_tracked", *(f".{name}" for name in MIXING))
"""What a checkpoint may lack."""


class DoesNotFit(ValueError):
    """Weights are not those of a network."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Tensors by name, and what their file says about them."""

    tensors: StateDict
    origin: str
    """Where they are from, for messages."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None
    """Names of the classes, where the file has them."""


def read_weights(path: str | os.PathLike[str]) -> Weights:
    """Read the tensors of a checkpoint."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no weights file {path}")
    metadata: dict[str, str] = {}
    content: Any
    if _looks_like_safetensors(path) or path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                content = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
        except (AttributeError, LookupError, RuntimeError, TypeError) as error:
            raise ValueError(f"{path} holds a kind of number not known here: {error}") from error
    else:
        content = _unpickled(path)
    classes = _recorded_classes(metadata, content)
    tensors = _unwrapped(content, path)
    return Weights(tensors=tensors, origin=str(path), metadata=metadata, classes=classes)


def _unpickled(path: Path) -> Any:
    """Load a checkpoint of ``torch.save``; nothing but tensors, numbers, text and containers."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:  # torch.save compresses nothing
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ValueError(
                    f"{path} is a compressed archive, and no checkpoint of torch.save; unpack it"
                )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kinds of tensors that are refused below
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle fails in any way
        kind = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it holds {kind[1]}" if kind else "it may be damaged, or hold a pickled model"
    # Not chained: the error advises to run whatever code the file holds.
    raise ValueError(
        f"{path} cannot be loaded as tensors alone, and nothing else is loaded for safety; "
        f"{reason}: save its state_dict() instead"
    )


def _looks_like_safetensors(path: Path) -> bool:
    """Return True if a file starts as safetensors do: the length of a header, and the header."""
    with path.open("rb") as file:
        start = file.read(9)
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") < path.stat().st_size


def _recorded_classes(metadata: Mapping[str, str], content: Any) -> tuple[str, ...] | None:
    """Return the class names in the metadata of our own files or of mmsegmentation's."""
    meta = content.get("meta") if isinstance(content, Mapping) else None
    meta = meta if isinstance(meta, Mapping) else {}
    dataset = meta.get("dataset_meta")
    names = dataset.get("classes") if isinstance(dataset, Mapping) else meta.get("CLASSES")
    try:
        if classes := metadata.get("classes"):
            named = classes if classes in CLASS_SPACES else json.loads(classes)
            return class_names(named)
        return class_names(tuple(names)) if isinstance(names, list | tuple) else None
    except (
        ValueError,
        TypeError,
        RecursionError,
    ):  # other people may mean something else by these words
        return None


def _unwrapped(content: Any, path: Path) -> dict[str, Tensor]:
    for _ in range(len(WRAPPINGS)):  # a file may wrap its tensors in several layers, not forever
        if isinstance(content, Mapping):
            keys = (*WRAPPINGS, *(key for key in content if not _tensors(content)))
            inner = [content[key] for key in keys if isinstance(content.get(key), Mapping)]
            content = max(inner, key=lambda part: len(_tensors(part))) if inner else content
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} must hold tensors by name, got {type(content).__name__}")
    if not (tensors := _tensors(content)):
        raise ValueError(f"{path} holds no tensors by name, but {shortened(list(content)[:5])}")
    return tensors


def _tensors(content: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {
        key: value
        for key, value in content.items()
        if isinstance(key, str) and isinstance(value, Tensor)
    }


def _plain_names(tensors: StateDict) -> StateDict:
    """Take the wrappers' parts of the names off, and the released code's around BatchNorm."""
    while prefix := next((p for p in PREFIXES if all(n.startswith(p) for n in tensors)), None):
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    alphas = {f"{name.removesuffix('.batch_norm.weight')}.alpha" for name in tensors}
    return {
        name.replace(".batch_norm.", "."): value
        for name, value in tensors.items()
        if name not in alphas
    }


# finding their place


@dataclass(frozen=True)
class Fit:
    """How well tensors fit a module: what is missing, too much, or of another shape."""

    module: nn.Module
    tensors: StateDict
    missing: list[str]
    extra: list[str]
    misshaped: list[str]

    @property
    def num_problems(self) -> int:
        """How much does not fit."""
        return len(self.missing) + len(self.extra) + len(self.misshaped)

    def num_classes(self) -> tuple[int, int] | None:
        """Return the classes the tensors have and those needed, if nothing else does not fit."""
        expected = self.module.state_dict()
        shapes = {(self.tensors[name].shape, expected[name].shape) for name in self.misshaped}
        numbers = {(there[0], here[0]) for there, here in shapes if there and here}
        if self.missing or self.extra or any(there[1:] != here[1:] for there, here in shapes):
            return None
        return numbers.pop() if len(numbers) == 1 else None


def best_fit(model: nn.Module, tensors: StateDict, *, whole: bool = False) -> Fit:
    """Return how tensors fit ``model`` best: as all of it or, unless ``whole``, its backbone."""
    fits = list(_fits(model, tensors))
    best = min(fits, key=lambda fit: fit.num_problems)
    if best.num_problems and not best.num_classes():
        for part in _parts(tensors):  # a network beside a loss, or beside a moving average of it
            fits += [fit for fit in _fits(model, part) if not fit.num_problems or fit.num_classes()]
    if not whole:
        fits += [fit for fit in _backbone_fits(model, tensors) if not fit.num_problems]
    return min(fits, key=lambda fit: fit.num_problems)


def _parts(tensors: StateDict) -> list[StateDict]:
    """Return the tensors below each first part of the names, without it."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        first, _, rest = name.partition(".")
        parts.setdefault(first, {})[rest] = value
    return list(parts.values())


def _fits(model: nn.Module, tensors: StateDict) -> Iterator[Fit]:
    yield _fit(model, tensors, AUXILIARY)
    tensors = _plain_names(tensors)
    yield _fit(model, tensors, AUXILIARY)
    name = getattr(getattr(model, "spec", None), "name", None)
    if name in MODELS:
        yield _fit(model, _renamed(tensors, MODELS[name].renamed, model.state_dict()), AUXILIARY)


def _backbone_fits(model: nn.Module, tensors: StateDict) -> Iterator[Fit]:
    name = getattr(getattr(model, "spec", None), "name", None)
    paths = (MODELS[name].backbone,) if name in MODELS else ("backbone", "encoder")
    modules = dict(model.named_modules())
    plain = _staged(_plain_names(tensors))
    for backbone in (modules[path] for path in paths if path in modules):
        yield _fit(backbone, plain, AUXILIARY + CLASSIFIERS)
        if len(parts := _parts(plain)) == 1:  # all of it below one name, such as encoder
            yield _fit(backbone, _staged(parts[0]), AUXILIARY + CLASSIFIERS)


def _staged(tensors: StateDict) -> StateDict:
    """Give the stages of a transformer of timm the names they have in a backbone."""
    return {re.sub(r"^layers\.(\d+)\.", r"layers_\1.", n): v for n, v in tensors.items()}


def _renamed(tensors: StateDict, parts: Mapping[str, str], expected: StateDict) -> StateDict:
    """Give tensors of other people's checkpoints our names."""
    renamed: dict[str, Tensor] = {}
    for name, value in tensors.items():
        old = next((part for part in parts if name.startswith(f"{part}.")), None)
        if old is not None:
            name = parts[old] + name.removeprefix(old)
        elif f"backbone.{name}" in expected:
            name = f"backbone.{name}"
        renamed[name] = value
    bias = "head.0.bias"  # mmsegmentation has none ahead of BatchNorm
    if bias in expected and any(name.startswith("decode_head.") for name in tensors):
        renamed.setdefault(bias, torch.zeros(len(expected[bias])))
    return renamed


def _fit(module: nn.Module, tensors: StateDict, not_needed: tuple[str, ...]) -> Fit:
    expected = module.state_dict()
    tensors = {
        name: value
        for name, value in tensors.items()
        # A convolution among the classifiers is the head of another segmentation network.
        if name in expected
        or not name.startswith(not_needed)
        or (name.startswith(("classifier.", "head.")) and value.dim() > 2)
    }
    return Fit(
        module,
        tensors,
        missing=[n for n in expected if n not in tensors and not n.endswith(NOT_NEEDED)],
        extra=[n for n in tensors if n not in expected],
        misshaped=[n for n in tensors if n in expected and tensors[n].shape != expected[n].shape],
    )


def input_channels(model: nn.Module, tensors: StateDict) -> int | None:
    """Return how many channels the first convolution of ``model`` has among the tensors."""
    kernels = (name for name, value in model.named_parameters() if value.dim() == 4)
    kernel = _plain_names(tensors).get(next(kernels, ""))
    return kernel.shape[1] if kernel is not None and kernel.dim() == 4 else None


def put_weights(model: nn.Module, weights: Weights, *, whole: bool = False) -> bool:
    """Load weights into a network or, unless ``whole``, its backbone; or say what does not fit.

    Buffers that only count batches, and the mixing weights of BIN and SN, may be missing.

    Returns:
        Whether these were weights of the whole network.
    """
    fit = check_fit(model, weights, whole=whole)
    try:
        fit.module.load_state_dict(fit.tensors, strict=False)
    except Exception as error:  # tensors without numbers, sparse ones and the like
        reason = " ".join(str(error).split())
        raise ValueError(f"{weights.origin} cannot be put into this network: {reason}") from error
    values = fit.module.state_dict()
    broken = [name for name in fit.tensors if not values[name].isfinite().all()]
    if broken:
        warnings.warn(
            f"{weights.origin} is damaged: {_listed('not finite are', broken)}variances that are "
            "saved in 16 bits overflow",
            stacklevel=4,
        )
    return fit.module is model


def check_fit(model: nn.Module, weights: Weights, *, whole: bool = False) -> Fit:
    """Return how weights fit a network or, unless ``whole``, its backbone.

    Raises:
        DoesNotFit: They do not fit, or are no numbers of this kind; says what is wrong.
    """
    fit = best_fit(model, weights.tensors, whole=whole)
    if fit.num_problems:
        raise DoesNotFit(f"{weights.origin} does not fit this network: {_explained(fit, weights)}")
    expected = fit.module.state_dict()
    for name, tensor in fit.tensors.items():
        if expected[name].is_floating_point() and not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise DoesNotFit(
                f"{weights.origin} must hold weights in floating point, but {name} is {kind}: "
                "quantised weights are to be saved as they were before"
            )
    return fit


def _explained(fit: Fit, weights: Weights) -> str:
    if num_classes := fit.num_classes():
        there, here = num_classes
        return f"it has {there} classes, but {here} are asked for; give classes={there}"
    problems = _listed("it lacks", fit.missing) + _listed("it has too much", fit.extra)
    if fit.misshaped and not (fit.missing or fit.extra):
        name = fit.misshaped[0]
        shape, needed = fit.tensors[name].shape, fit.module.state_dict()[name].shape
        problems += f"{name} has the shape {tuple(shape)}, but {tuple(needed)} is needed; "
    return problems + _suggestion(weights.tensors)


def _suggestion(tensors: StateDict) -> str:
    """Return which of our networks the tensors look like, if any."""
    fits = {}
    for name in MODELS:
        try:
            with torch.device("meta"):
                model = ModelSpec(name, class_names("cityscapes-19")).build()
        except ModuleNotFoundError:
            continue
        fits[name] = best_fit(model, tensors).num_problems
    name = min(fits, key=lambda name: fits[name])
    if fits[name] > len(tensors) / 10:
        return f"it is none of {', '.join(MODELS)} either"
    return f"it is closest to {name!r}"


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what} {', '.join(names[:3])}{more}; "
