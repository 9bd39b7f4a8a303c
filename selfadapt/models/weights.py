"""Read weights from files, and load them into networks.

Only tensors are read: no code is ever run from a checkpoint. Wrappers such as ``state_dict`` and
prefixes such as ``module.`` are removed, and names of the released code and of mmsegmentation are
mapped to ours. The tensors are matched with original and with normalised names, to the whole
network and to its backbone, and the best match is used.
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

from selfadapt.checks import first_few, shortened
from selfadapt.labels import CLASS_SPACES, class_names
from selfadapt.models.norms import MIXING_WEIGHTS
from selfadapt.models.spec import ModelSpec
from selfadapt.models.zoo import MODELS, StateDict

WRAPPERS = ("state_dict", "model_state_dict", "model")
PREFIXES = ("module.", "model.", "_orig_mod.")
AUXILIARY = (
    "auxiliary_head.", "aux_head.", "aux_classifier.", "classification_head.", "data_preprocessor.",
    "fc.", "backbone.fc.",
)  # fmt: skip
"""Prefixes of unused tensors of a checkpoint, such as auxiliary and classification heads."""
CLASSIFIERS = (
    "classifier.", "head.", "norm.", "incre_modules.", "downsamp_modules.", "final_layer.",
)  # fmt: skip
"""Prefixes of unused tensors of a backbone's checkpoint."""
OPTIONAL = ("num_batches_tracked", *(f".{name}" for name in MIXING_WEIGHTS))
"""Suffixes of tensors that a checkpoint need not have."""


class WeightsMismatch(ValueError):
    """Weights do not fit a network."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Tensors by name, with the metadata of their file."""

    tensors: StateDict
    origin: str
    """Source of the weights, for messages."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None
    """Recorded names of the classes, or None."""


def read_weights(path: str | os.PathLike[str]) -> Weights:
    """Read the tensors of a checkpoint."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no weights file {path}")
    metadata: dict[str, str] = {}
    content: Any
    with path.open("rb") as file:
        start = file.read(9)  # of safetensors: the length of a header, then the header
    has_header = start[8:] == b"{" and int.from_bytes(start[:8], "little") < path.stat().st_size
    if has_header or path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt") as stored:
                metadata = stored.metadata() or {}
                content = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
        except (AttributeError, LookupError, RuntimeError, TypeError) as error:
            raise ValueError(f"{path} has an unsupported dtype: {error}") from error
    else:
        content = _load_pickle(path)
    classes = _recorded_classes(metadata, content)
    tensors = _unwrap(content, path)
    return Weights(tensors=tensors, origin=str(path), metadata=metadata, classes=classes)


def _load_pickle(path: Path) -> Any:
    """Load a checkpoint of ``torch.save`` that has only tensors, numbers, text and containers."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:  # torch.save never compresses
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ValueError(
                    f"{path} is a compressed archive, and no checkpoint of torch.save; unpack it"
                )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kinds of tensors that are rejected below
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything
        kind = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it holds {kind[1]}" if kind else "it may be damaged, or hold a pickled model"
    # Not chained: the original error suggests running the code in the file.
    raise ValueError(
        f"{path} cannot be loaded as tensors alone, and nothing else is loaded for safety; "
        f"{reason}: save its state_dict() instead"
    )


def _recorded_classes(metadata: Mapping[str, str], content: Any) -> tuple[str, ...] | None:
    """Return the class names in the metadata of our files or of mmsegmentation."""
    meta = content.get("meta") if isinstance(content, Mapping) else None
    meta = meta if isinstance(meta, Mapping) else {}
    dataset = meta.get("dataset_meta")
    names = dataset.get("classes") if isinstance(dataset, Mapping) else meta.get("CLASSES")
    try:
        if classes := metadata.get("classes"):
            return class_names(classes if classes in CLASS_SPACES else json.loads(classes))
        return class_names(tuple(names)) if isinstance(names, list | tuple) else None
    except (ValueError, TypeError, RecursionError):  # other tools may use these keys differently
        return None


def _unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    for _ in range(len(WRAPPERS)):  # tensors may be nested, but not arbitrarily deep
        if isinstance(content, Mapping):
            keys = (*WRAPPERS, *(key for key in content if not _tensors(content)))
            inner = [content[key] for key in keys if isinstance(content.get(key), Mapping)]
            content = max(inner, key=lambda part: len(_tensors(part))) if inner else content
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} must contain tensors by name, got {type(content).__name__}")
    if not (tensors := _tensors(content)):
        raise ValueError(f"{path} contains no tensors by name, got {shortened(list(content)[:5])}")
    return tensors


def _tensors(content: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {
        key: value
        for key, value in content.items()
        if isinstance(key, str) and isinstance(value, Tensor)
    }


def _normalise_names(tensors: StateDict) -> StateDict:
    """Remove prefixes of wrappers, and the released code's wrapper of BatchNorm."""
    while prefix := next((p for p in PREFIXES if all(n.startswith(p) for n in tensors)), None):
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    alphas = {f"{name.removesuffix('.batch_norm.weight')}.alpha" for name in tensors}
    return {
        name.replace(".batch_norm.", "."): value
        for name, value in tensors.items()
        if name not in alphas
    }


# matching names


@dataclass(frozen=True)
class Fit:
    """How tensors fit a module: missing, unexpected and misshaped tensors."""

    module: nn.Module
    tensors: StateDict
    missing: list[str]
    extra: list[str]
    misshaped: list[str]

    @property
    def num_problems(self) -> int:
        """Number of tensors that do not fit."""
        return len(self.missing) + len(self.extra) + len(self.misshaped)

    def num_classes(self) -> tuple[int, int] | None:
        """Return the numbers of classes of tensors and module if only these differ, else None."""
        expected = self.module.state_dict()
        shapes = {(self.tensors[name].shape, expected[name].shape) for name in self.misshaped}
        counts = {(given[0], needed[0]) for given, needed in shapes if given and needed}
        if self.missing or self.extra or any(given[1:] != needed[1:] for given, needed in shapes):
            return None
        return counts.pop() if len(counts) == 1 else None


def best_fit(model: nn.Module, tensors: StateDict, *, whole: bool = False) -> Fit:
    """Return the best fit of tensors to ``model`` or, unless ``whole``, to its backbone."""
    fits = list(_fits(model, tensors))
    best = min(fits, key=lambda fit: fit.num_problems)
    if best.num_problems and not best.num_classes():
        for part in _parts(tensors):  # the file may also have a loss, or a moving average
            fits += [fit for fit in _fits(model, part) if not fit.num_problems or fit.num_classes()]
    if not whole:
        fits += [fit for fit in _backbone_fits(model, tensors) if not fit.num_problems]
    return min(fits, key=lambda fit: fit.num_problems)


def _parts(tensors: StateDict) -> list[StateDict]:
    """Group tensors by the first part of their names, which is removed."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        first, _, rest = name.partition(".")
        parts.setdefault(first, {})[rest] = value
    return list(parts.values())


def _fits(model: nn.Module, tensors: StateDict) -> Iterator[Fit]:
    yield _fit(model, tensors, AUXILIARY)
    tensors = _normalise_names(tensors)
    yield _fit(model, tensors, AUXILIARY)
    name = getattr(getattr(model, "spec", None), "name", None)
    if name in MODELS:
        yield _fit(
            model, _rename_parts(tensors, MODELS[name].renamed, model.state_dict()), AUXILIARY
        )


def _backbone_fits(model: nn.Module, tensors: StateDict) -> Iterator[Fit]:
    name = getattr(getattr(model, "spec", None), "name", None)
    paths = (MODELS[name].backbone,) if name in MODELS else ("backbone", "encoder")
    modules = dict(model.named_modules())
    normalised = _rename_stages(_normalise_names(tensors))
    for backbone in (modules[path] for path in paths if path in modules):
        yield _fit(backbone, normalised, AUXILIARY + CLASSIFIERS)
        if len(parts := _parts(normalised)) == 1:  # all names share a prefix, such as encoder
            yield _fit(backbone, _rename_stages(parts[0]), AUXILIARY + CLASSIFIERS)


def _rename_stages(tensors: StateDict) -> StateDict:
    """Rename the stages of timm's transformers as in its backbones."""
    return {re.sub(r"^layers\.(\d+)\.", r"layers_\1.", n): v for n, v in tensors.items()}


def _rename_parts(tensors: StateDict, parts: Mapping[str, str], expected: StateDict) -> StateDict:
    """Map the names of tensors in checkpoints of other libraries to ours."""
    renamed: dict[str, Tensor] = {}
    for name, value in tensors.items():
        old = next((part for part in parts if name.startswith(f"{part}.")), None)
        if old is not None:
            name = parts[old] + name.removeprefix(old)
        elif f"backbone.{name}" in expected:
            name = f"backbone.{name}"
        renamed[name] = value
    bias = "head.0.bias"  # mmsegmentation has no bias before BatchNorm
    if bias in expected and any(name.startswith("decode_head.") for name in tensors):
        renamed.setdefault(bias, torch.zeros(len(expected[bias])))
    return renamed


def _fit(module: nn.Module, tensors: StateDict, unused: tuple[str, ...]) -> Fit:
    expected = module.state_dict()
    tensors = {
        name: value
        for name, value in tensors.items()
        # A convolution among the classifiers is the head of another segmentation network.
        if name in expected
        or not name.startswith(unused)
        or (name.startswith(("classifier.", "head.")) and value.dim() > 2)
    }
    return Fit(
        module,
        tensors,
        missing=[n for n in expected if n not in tensors and not n.endswith(OPTIONAL)],
        extra=[n for n in tensors if n not in expected],
        misshaped=[n for n in tensors if n in expected and tensors[n].shape != expected[n].shape],
    )


def input_channels(model: nn.Module, tensors: StateDict) -> int | None:
    """Return the number of input channels of the first convolution of ``model`` in the tensors."""
    kernels = (name for name, value in model.named_parameters() if value.dim() == 4)
    kernel = _normalise_names(tensors).get(next(kernels, ""))
    return kernel.shape[1] if kernel is not None and kernel.dim() == 4 else None


def load_weights(model: nn.Module, weights: Weights, *, whole: bool = False) -> bool:
    """Load weights into a network or, unless ``whole``, its backbone.

    Buffers that count batches, and the mixing weights of BIN and SN, may be missing.

    Returns:
        True if these are weights of the whole network.

    Raises:
        WeightsMismatch: The weights do not fit.
    """
    fit = check_fit(model, weights, whole=whole)
    try:
        fit.module.load_state_dict(fit.tensors, strict=False)
    except Exception as error:  # meta tensors, sparse tensors and others
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{weights.origin} cannot be loaded into this network: {reason}"
        ) from error
    values = fit.module.state_dict()
    damaged = [name for name in fit.tensors if not values[name].isfinite().all()]
    if damaged:
        warnings.warn(
            f"{weights.origin} is damaged: {_list('not finite are', damaged)}variances may "
            "overflow when they are saved in 16 bits",
            stacklevel=4,
        )
    return fit.module is model


def check_fit(model: nn.Module, weights: Weights, *, whole: bool = False) -> Fit:
    """Return how weights fit a network or, unless ``whole``, its backbone.

    Raises:
        WeightsMismatch: They do not fit, or are not in floating point.
    """
    fit = best_fit(model, weights.tensors, whole=whole)
    if fit.num_problems:
        raise WeightsMismatch(
            f"{weights.origin} does not fit this network: {_explain(fit, weights)}"
        )
    expected = fit.module.state_dict()
    for name, tensor in fit.tensors.items():
        if expected[name].is_floating_point() and not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise WeightsMismatch(
                f"{weights.origin} must hold weights in floating point, but {name} is {kind}: "
                "give the weights from before quantisation"
            )
    return fit


def _explain(fit: Fit, weights: Weights) -> str:
    if num_classes := fit.num_classes():
        given, needed = num_classes
        return (
            f"it has {given} classes, but {needed} are requested; give --classes {given}, in "
            f"Python classes={given}"
        )
    problems = _list("it lacks", fit.missing) + _list("it has unexpected", fit.extra)
    if fit.misshaped and not (fit.missing or fit.extra):
        name = fit.misshaped[0]
        shape, expected = fit.tensors[name].shape, fit.module.state_dict()[name].shape
        problems += f"{name} has the shape {tuple(shape)}, but {tuple(expected)} is needed; "
    return problems + _suggest_model(weights.tensors)


def _suggest_model(tensors: StateDict) -> str:
    """Return which network of ``MODELS`` the tensors fit best."""
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
        return f"it does not fit any of {', '.join(MODELS)} either"
    return f"it is closest to {name!r}"


def _list(what: str, names: list[str]) -> str:
    return f"{what} {first_few(names, 3)}; " if names else ""
