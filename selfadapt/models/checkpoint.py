"""Self-describing checkpoints.

A checkpoint is a safetensors file whose metadata holds architecture, classes and preprocessing, so
that ``load_model`` needs only the path.
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
from selfadapt.files import atomic_write
from selfadapt.labels import CITYSCAPES_19, CLASS_SPACES
from selfadapt.models.address import is_external
from selfadapt.models.interface import Interface
from selfadapt.models.spec import ModelSpec, find_architecture
from selfadapt.models.weights import Weights, WeightsMismatch, check_fit, load_weights, read_weights
from selfadapt.models.zoo import MODELS

FORMAT = "selfadapt"
N = TypeVar("N", int, float)


def save_model(
    model: nn.Module, path: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> None:
    """Write a network with its architecture, classes and preprocessing to a safetensors file.

    Args:
        model: A network from ``create_model`` or ``load_model``.
        path: The file to write, atomically.
        dtype: Store the weights in this precision. BatchNorm statistics keep theirs: variances
            may overflow in 16 bits.
    """
    spec = getattr(model, "spec", None)
    if not isinstance(spec, ModelSpec):
        raise TypeError(
            "model must come from create_model or load_model, which record its architecture, got "
            f"{type(model).__name__}; save its state_dict with safetensors.torch.save_file"
        )
    if is_external(spec.name):
        raise ValueError(
            f"{spec.name} cannot be rebuilt from a file; save its state_dict with "
            "safetensors.torch.save_file, and load that with create_model(..., weights=FILE)"
        )
    if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
        raise TypeError(f"dtype must be a torch.dtype such as torch.float16, got {dtype!r}")
    space = next((n for n, space in CLASS_SPACES.items() if space.names == spec.classes), None)
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
    with atomic_write(Path(path)) as temporary:
        temporary.write_bytes(serialize(tensors, metadata))


def serialize(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file, deterministic unlike those of the library.

    Example:
        >>> content = serialize({"a": torch.ones(2)}, {"x": "1", "y": "2"})
        >>> content == serialize({"a": torch.ones(2)}, {"y": "2", "x": "1"})
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
        dropout: Dropout rate after every ReLU, instead of the recorded one; 0 disables it.
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
        model: Any = _build(spec, weights)
    except (ValueError, TypeError) as error:
        if isinstance(error, WeightsMismatch):
            raise
        raise ValueError(f"{path} does not describe a valid network: {error}") from error
    if interface is not None:
        model.interface = interface
    load_weights(model, weights, whole=True)
    return model


def _recorded_interface(metadata: Mapping[str, str]) -> Interface | None:
    """Return the preprocessing recorded in a file, or None."""
    try:
        settings = json.loads(metadata.get("interface", "{}"))
    except RecursionError as error:
        raise ValueError("its interface is nested too deeply") from error
    if not isinstance(settings, dict):
        raise ValueError(f"its interface must be names and values, got {shortened(settings)}")
    names = [field.name for field in fields(Interface) if field.name != "output"]
    for name in settings:
        if name not in names:
            raise ValueError(
                f"its interface has no setting {shortened(name)}; known: {', '.join(names)}"
            )
    if not settings:
        return None
    interface = Interface(**settings)
    interface.check_lengths()
    return interface


def _build(spec: ModelSpec, weights: Weights) -> nn.Module:
    """Build a network, after checking on the meta device that the weights fit."""
    try:
        with torch.device("meta"):
            skeleton = spec.build()
    except Exception:  # some networks cannot be built on the meta device
        return spec.build()
    check_fit(skeleton, weights, whole=True)
    return spec.build()


def recorded_spec(weights: Weights) -> ModelSpec:
    """Return the model specification recorded in a file."""
    metadata = weights.metadata
    if "classes" in metadata and weights.classes is None:
        raise ValueError(
            "its classes must be different names, or their number, got "
            f"{shortened(metadata['classes'])}"
        )
    name = "_".join(metadata[key] for key in ("arch", "backbone") if key in metadata)
    choices = find_architecture(name).options
    options = {option: metadata[option] for option in choices if option in metadata}
    if metadata.get("format") != FORMAT:  # other tools have them as part of a longer text
        options = {
            option: next((value for value in choices[option] if value in text), text)
            for option, text in options.items()
        }
    norm, dropout = metadata.get("norm", "bn"), _number(metadata, "dropout", 0.0)
    ours = metadata if metadata.get("format") == FORMAT else {}
    return ModelSpec(
        name, weights.classes or CITYSCAPES_19, options, norm, dropout,
        trained_on=ours.get("trained_on", ""), channels=_number(ours, "channels", 3),
    )  # fmt: skip


def _number(metadata: Mapping[str, str], name: str, default: N) -> N:
    """Return a number of the type of ``default`` from metadata."""
    try:
        return type(default)(metadata.get(name, default))
    except ValueError as error:
        raise ValueError(f"{name} must be a number, got {shortened(metadata[name])}") from error
