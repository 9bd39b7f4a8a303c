"""Weights in files: tensors only, no code is ever run from a checkpoint.

A saved network is a safetensors file whose metadata names its architecture, classes and
preprocessing, so that ``load_model`` needs nothing but the path. Weights alone, the released code's
checkpoints among them, load into a network made by ``create_model``.
"""

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from selfadapt.files import written_whole
from selfadapt.labels import CLASS_SPACES, class_names
from selfadapt.models.interface import Interface
from selfadapt.models.spec import MODELS, ModelSpec

FORMAT = "selfadapt"
WRAPPINGS = ("state_dict", "model_state_dict", "model")
PREFIXES = ("module.", "model.", "_orig_mod.")


def save_model(
    model: nn.Module, path: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> None:
    """Write a network with its architecture, classes and preprocessing to a safetensors file.

    Args:
        model: A network from ``create_model`` or ``load_model``.
        path: The file; it is replaced only when the new one is complete.
        dtype: Store the weights in this precision. BatchNorm statistics always stay as they are:
            their variances do not fit into 16 bits.
    """
    spec = getattr(model, "spec", None)
    if not isinstance(spec, ModelSpec):
        raise TypeError(
            "only a network from create_model or load_model knows its architecture, got "
            f"{type(model).__name__}; save its state_dict with safetensors.torch.save_file"
        )
    if not (dtype is None or isinstance(dtype, torch.dtype)):
        raise TypeError(f"dtype must be a torch.dtype such as torch.float16, got {dtype!r}")
    space = next((name for name, names in CLASS_SPACES.items() if names == spec.classes), None)
    interface = {name: value for name, value in vars(model.interface).items() if name != "output"}
    metadata = {
        "format": FORMAT,
        "arch": spec.name,
        "classes": space or json.dumps(spec.classes),
        "interface": json.dumps({k: v for k, v in interface.items() if v is not None}),
        **spec.options,
    }
    buffers = {name for name, _ in model.named_buffers()}
    tensors = {
        name: (value if dtype is None or name in buffers else value.to(dtype)).contiguous()
        for name, value in model.state_dict().items()
    }
    content = save(tensors, metadata=metadata)
    with written_whole(Path(path)) as aside:
        aside.write_bytes(content)


def load_model(path: str | os.PathLike[str]) -> nn.Module:
    """Load a network saved by ``save_model``, in evaluation mode and float32."""
    tensors, metadata = read_tensors(path)
    if "arch" not in metadata:
        raise ValueError(
            f"{path} holds weights but does not name its architecture; load it with "
            f"create_model(NAME, classes=..., weights=PATH), NAME one of {', '.join(MODELS)}"
        )
    try:
        model: Any = _spec_of(metadata, path).build()
        if "interface" in metadata:
            model.interface = Interface(**json.loads(metadata["interface"]))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} describes its network in a way not known here: {error}"
        ) from error
    _put_weights(model, tensors, path, backbone_alone=False)
    return model


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load weights from a file into ``model``: of all of it, or of its backbone alone.

    Warns where the file was saved from a network with other options: the same weights fit, and give
    other predictions.
    """
    tensors, metadata = read_tensors(path)
    _put_weights(model, tensors, path, backbone_alone=True)
    spec = getattr(model, "spec", None)
    if isinstance(spec, ModelSpec) and "arch" in metadata:
        for option, value in _options_of(metadata, spec.name).items():
            if value != spec.options[option]:
                warnings.warn(
                    f"{path} was saved with {option}={value!r}, but is used with "
                    f"{option}={spec.options[option]!r}",
                    stacklevel=3,
                )


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors of a checkpoint by plain names, and its metadata.

    Wrappings such as ``state_dict`` and ``module.`` are taken off, and the released code's names
    of normalisation layers are made those of BatchNorm.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no weights file {path}")
    metadata: dict[str, str] = {}
    if path.suffix == ".safetensors" or _looks_like_safetensors(path):
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                content: Any = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    else:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged pickle fails in any way
            raise ValueError(
                f"{path} cannot be loaded as tensors alone, and nothing else is loaded for safety; "
                "it may be damaged, or hold a pickled model: save its state_dict() instead"
            ) from error
    return _plain_names(_unwrapped(content, path)), metadata


def _looks_like_safetensors(path: Path) -> bool:
    """Say whether a file starts as safetensors do: the length of a JSON header, and the header."""
    with path.open("rb") as file:
        start = file.read(9)
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") < path.stat().st_size


def _unwrapped(content: Any, path: Path) -> dict[str, Tensor]:
    for _ in range(len(WRAPPINGS)):  # a file may wrap its tensors in several layers, not forever
        if isinstance(content, Mapping):
            inner = [content[key] for key in WRAPPINGS if isinstance(content.get(key), Mapping)]
            content = inner[0] if inner else content
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} must hold tensors by name, got {type(content).__name__}")
    tensors = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(f"{path} holds no tensors by name, but {list(content)[:5]}")
    return tensors


def _plain_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    while prefix := next((p for p in PREFIXES if all(n.startswith(p) for n in tensors)), None):
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    alphas = {f"{name.removesuffix('.batch_norm.weight')}.alpha" for name in tensors}
    return {
        name.replace(".batch_norm.", "."): value
        for name, value in tensors.items()
        if name not in alphas
    }


def _spec_of(metadata: Mapping[str, str], path: str | os.PathLike[str]) -> ModelSpec:
    name = "_".join(metadata[key] for key in ("arch", "backbone") if key in metadata)
    if name not in MODELS:
        raise ValueError(
            f"{path} is of the architecture {name!r}, which is not known here; "
            f"known: {', '.join(MODELS)}"
        )
    classes = metadata.get("classes", "cityscapes-19")
    names = CLASS_SPACES.get(classes) or class_names(json.loads(classes))
    return ModelSpec(name, names, _options_of(metadata, name))


def _options_of(metadata: Mapping[str, str], name: str) -> dict[str, str]:
    """Return the options of an architecture that the metadata names.

    Files of other makers may name them among other words.
    """
    given = {option: metadata[option] for option in MODELS[name].options if option in metadata}
    if metadata.get("format") == FORMAT:
        return given
    known = MODELS[name].options
    return {
        option: next((value for value in known[option] if value in text), text)
        for option, text in given.items()
    }


def _put_weights(
    model: nn.Module,
    tensors: dict[str, Tensor],
    path: str | os.PathLike[str],
    *,
    backbone_alone: bool,
) -> None:
    target = model
    if backbone_alone and not set(tensors) & set(model.state_dict()):
        target = getattr(model, "backbone", model)
    # A backbone's ImageNet classifier may come along, as in the released checkpoints.
    tensors = {n: v for n, v in tensors.items() if not n.startswith(("fc.", "backbone.fc."))}
    expected = target.state_dict()
    missing = [n for n in expected if n not in tensors and not n.endswith("num_batches_tracked")]
    extra = [name for name in tensors if name not in expected]
    if missing or extra:
        raise ValueError(
            f"{path} does not fit this network: {_listed('it lacks', missing)}"
            f"{_listed('it has too much', extra)}is it of another architecture?"
        )
    for name, value in tensors.items():
        if value.shape != expected[name].shape:
            raise ValueError(
                f"{path} does not fit this network: {name} has the shape {tuple(value.shape)}, "
                f"but {tuple(expected[name].shape)} is needed; is the number of classes right?"
            )
    target.load_state_dict(tensors, strict=False)


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what} {', '.join(names[:3])}{more}; "
