"""Networks in files that describe themselves.

A saved network is a safetensors file whose metadata names its architecture, classes and
preprocessing, so that ``load_model`` needs nothing but the path.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor, nn

from selfadapt.checks import shortened
from selfadapt.files import written_whole
from selfadapt.labels import CITYSCAPES_19, CLASS_SPACES
from selfadapt.models.address import is_foreign
from selfadapt.models.interface import Interface
from selfadapt.models.spec import ModelSpec, find_architecture
from selfadapt.models.weights import DoesNotFit, Weights, check_fit, put_weights, read_weights
from selfadapt.models.zoo import MODELS, Architecture

FORMAT = "selfadapt"
N = TypeVar("N", int, float)


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
    if is_foreign(spec.name):
        raise ValueError(
            f"{spec.name} cannot be built anew from a file; save its state_dict with "
            "safetensors.torch.save_file, and load that with create_model(..., weights=FILE)"
        )
    if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
        raise TypeError(f"dtype must be a torch.dtype such as torch.float16, got {dtype!r}")
    space = next((n for n, known in CLASS_SPACES.items() if known.names == spec.classes), None)
    interface = vars(getattr(model, "interface", Interface()))
    metadata = {
        "format": FORMAT,
        "arch": spec.name,
        "classes": space or json.dumps(spec.classes),
        "interface": json.dumps(
            {k: v for k, v in interface.items() if v is not None and k != "output"}
        ),
        "norm": spec.norm,
        "dropout": repr(spec.dropout),
        "channels": str(spec.channels),
        **({"trained_on": spec.trained_on} if spec.trained_on else {}),
        **spec.options,
    }
    buffers = {name for name, _ in model.named_buffers()}
    tensors = {
        name: (value if dtype is None or name in buffers else value.to(dtype)).contiguous()
        for name, value in model.state_dict().items()
    }
    with written_whole(Path(path)) as aside:
        aside.write_bytes(packed(tensors, metadata))


def packed(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors file: the same bytes for the same content, unlike the library's own.

    Example:
        >>> one = packed({"a": torch.ones(2)}, {"x": "1", "y": "2"})
        >>> one == packed({"a": torch.ones(2)}, {"y": "2", "x": "1"})
        True
    """
    content = save(dict(tensors), metadata=dict(metadata))
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:end]), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + content[end:]


def load_model(path: str | os.PathLike[str], *, dropout: float | None = None) -> nn.Module:
    """Load a network saved by ``save_model``, in evaluation mode and float32.

    Args:
        path: The file.
        dropout: Rate of dropout after every ReLU, whatever the file says; 0: none.
    """
    weights = read_weights(path)
    metadata = weights.metadata
    if "arch" not in metadata:
        raise ValueError(
            f"{path} holds weights but does not name its architecture; load it with "
            "create_model(NAME, weights=PATH), on the command line --model NAME --weights PATH; "
            f"NAME is one of {', '.join(MODELS)}, or an address"
        )
    try:
        spec = recorded_spec(weights)
        spec = spec if dropout is None else replace(spec, dropout=dropout)
        interface = _recorded_interface(metadata)
        model: Any = _built(spec, weights)
    except (ValueError, TypeError) as error:
        if isinstance(error, DoesNotFit):
            raise
        raise ValueError(
            f"{path} describes its network in a way not known here: {error}"
        ) from error
    if interface is not None:
        model.interface = interface
    put_weights(model, weights, whole=True)
    return model


def _recorded_interface(metadata: Mapping[str, str]) -> Interface | None:
    """Return the preprocessing that a file records, if it does."""
    try:
        settings = json.loads(metadata.get("interface", "{}"))
    except RecursionError as error:
        raise ValueError("its interface is nested too deeply") from error
    if not isinstance(settings, dict):
        raise ValueError(f"its interface must be names and values, got {shortened(settings)}")
    known = [field.name for field in fields(Interface) if field.name != "output"]
    for name in settings:
        if name not in known:
            raise ValueError(
                f"its interface has no setting {shortened(name)}; known: {', '.join(known)}"
            )
    if not settings:
        return None
    interface = Interface(**settings)
    for numbers in (interface.mean, interface.std):
        if None not in (numbers, interface.channels) and len(numbers or ()) != interface.channels:
            raise ValueError(
                f"mean and std must have one number for each of {interface.channels} channels, "
                f"got {shortened(numbers)}"
            )
    return interface


def _built(spec: ModelSpec, weights: Weights) -> nn.Module:
    """Build a network; one that is not that of the weights is refused before it takes memory."""
    try:
        with torch.device("meta"):
            skeleton = spec.build()
    except Exception:  # some encoders need numbers while they are built; or it cannot be built
        return spec.build()
    check_fit(skeleton, weights, whole=True)
    return spec.build()


def recorded_spec(weights: Weights) -> ModelSpec:
    """Return the specification of the network that a file was saved from."""
    metadata = weights.metadata
    if "classes" in metadata and weights.classes is None:
        raise ValueError(
            "its classes must be their names, which differ, or their number, got "
            f"{shortened(metadata['classes'])}"
        )
    name = "_".join(metadata[key] for key in ("arch", "backbone") if key in metadata)
    options = _recorded_options(metadata, find_architecture(name))
    norm, dropout = metadata.get("norm", "bn"), _number(metadata, "dropout", 0.0)
    own = metadata if metadata.get("format") == FORMAT else {}
    return ModelSpec(
        name, weights.classes or CITYSCAPES_19, options, norm, dropout,
        trained_on=own.get("trained_on", ""), channels=_number(own, "channels", 3),
    )  # fmt: skip


def _number(metadata: Mapping[str, str], name: str, default: N) -> N:
    """Return a number of the kind of ``default``."""
    try:
        return type(default)(metadata.get(name, default))
    except ValueError as error:
        raise ValueError(f"{name} must be a number, got {shortened(metadata[name])}") from error


def _recorded_options(metadata: Mapping[str, str], architecture: Architecture) -> dict[str, str]:
    """Return the options that the metadata names; other makers name them among other words."""
    given = {option: metadata[option] for option in architecture.options if option in metadata}
    if metadata.get("format") == FORMAT:
        return given
    known = architecture.options
    return {
        option: next((value for value in known[option] if value in text), text)
        for option, text in given.items()
    }
