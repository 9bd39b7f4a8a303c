"""Create networks by name or address, and load weights into them."""

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from typing import Any, TypeVar

from torch import nn

from selfadapt.labels import CITYSCAPES_19, Classes, class_names
from selfadapt.models.address import is_external, open_folder, open_function, open_hub
from selfadapt.models.checkpoint import load_model, recorded_spec
from selfadapt.models.spec import ModelSpec, find_architecture
from selfadapt.models.trained import TRAINED
from selfadapt.models.weights import Weights, best_fit, input_channels, load_weights, read_weights
from selfadapt.models.zoo import MODELS

T = TypeVar("T")

SHIPPED = "streets"
"""The network that is part of the package."""
SHIPPED_TRAINED_ON = "synthetic street scenes rendered in daylight, not photographs"


def create_model(
    name: str,
    *,
    classes: int | str | Classes | None = None,
    weights: str | os.PathLike[str] | None = None,
    norm: str = "bn",
    dropout: float = 0.0,
    trust: bool = False,
    **options: str,
) -> nn.Module:
    """Create a network, in evaluation mode.

    Args:
        name: A name in ``MODELS``, or an address: ``torchvision:NAME``, ``smp:KIND/ENCODER``
            or ``smp:FOLDER``, ``hf:OWNER/NAME`` or ``hf:FOLDER``, ``MODULE:FUNCTION``.
        classes: Number of classes, the name of a class space, or the class names. None: those of
            the weights, else ``cityscapes-19``.
        weights: A file with weights of the whole network or of its backbone, or ``imagenet`` to
            download those of the backbone. None: the published weights of a torchvision or Hugging
            Face network if no classes are given, else random initialisation.
        norm: Normalisation layers: ``bn``, ``bin`` or ``sn``.
        dropout: Dropout rate after every ReLU, for Monte-Carlo dropout; 0 disables it.
        trust: Allow running the function at ``MODULE:FUNCTION``.
        **options: Options of the architecture, such as ``style="caffe"``.

    Returns:
        The network, with the attributes ``spec`` (name, classes, options) and, if known,
        ``interface`` (preprocessing); ``save_model`` stores both with the weights.

    Example:
        >>> model = create_model("deeplabv1_resnet50", classes=3, style="caffe")
        >>> model.spec.classes
        ('class 0', 'class 1', 'class 2')
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be the name or address of a network, got {name!r}")
    spec = ModelSpec(name, () if classes is None else class_names(classes), options, norm, dropout)
    return _create(spec, weights, trust=trust)


def open_model(
    place: str | os.PathLike[str],
    *,
    classes: int | str | Classes | None = None,
    weights: str | os.PathLike[str] | None = None,
    trust: bool = False,
) -> nn.Module:
    """Load a trained network, from a file saved by ``save_model``, by name or by address.

    Args:
        place: A file, the folder of a training run, or what ``create_model`` takes as its name;
            ``streets`` for the small network of the package.
        classes: As in ``create_model``; not for files of ``save_model``, which record them.
        weights: A file with weights of the whole network, for networks without their own.
        trust: Allow running the function at ``MODULE:FUNCTION``.
    """
    name = os.fspath(place)
    if name == SHIPPED:
        model: Any = load_model(str(files("selfadapt") / "weights/streets.safetensors"))
        model.spec = replace(model.spec, trained_on=SHIPPED_TRAINED_ON)
        _check_no_arguments(name, model, classes, weights)
        return model
    if os.path.isfile(best := os.path.join(name, "best.safetensors")):
        name = best  # the folder of a training run
    if os.path.isfile(name):
        model = load_model(name)
        _check_no_arguments(name, model, classes, weights)
        return model
    if ":" not in name and name not in MODELS and (os.sep in name or "." in name):
        raise FileNotFoundError(f"there is no file {name}")
    published = is_external(name) or (find_architecture(name).pretrained and classes is None)
    if weights in (None, "imagenet") and not published:
        raise ValueError(
            f"{name} comes without weights: give those of the whole network, weights=FILE or "
            "--weights FILE"
        )
    spec = ModelSpec(name, () if classes is None else class_names(classes))
    model = _create(spec, weights, trust=trust, whole=True)
    if weights is None and name in TRAINED:
        model.spec = replace(model.spec, trained_on=TRAINED[name].trained_on)
    return model


def _check_no_arguments(
    name: str, model: Any, classes: int | str | Classes | None, weights: object
) -> None:
    """Raise ValueError for arguments that contradict a self-describing checkpoint."""
    if classes is not None and class_names(classes) == model.spec.classes:
        classes = None  # repeats the recorded names, perhaps to give their colours
    arguments = {"classes": classes, "weights": weights}
    if redundant := [key for key, value in arguments.items() if value is not None]:
        raise ValueError(
            f"{name} records its own architecture and classes: leave out {', '.join(redundant)}"
        )


def _create(
    spec: ModelSpec,
    weights: str | os.PathLike[str] | None,
    *,
    trust: bool,
    whole: bool = False,
) -> Any:
    """Create a network; without classes in ``spec``, it has those of the weights."""
    if is_external(spec.name):
        return _open_external(spec, None if weights is None else read_weights(weights), trust=trust)
    stored = _read_or_download(spec, weights)
    if stored is None:
        return replace(spec, classes=spec.classes or CITYSCAPES_19).build()
    if any("decode_head." in name for name in stored.tensors):  # mmsegmentation
        spec = replace(spec, options=dict(find_architecture(spec.name).mmseg) | spec.options)
    classes = spec.classes or stored.classes
    model: Any = replace(spec, classes=classes or CITYSCAPES_19).build()
    channels = input_channels(model, stored.tensors)
    if find_architecture(spec.name).any_channels and channels not in (None, spec.channels):
        spec = replace(spec, channels=channels)
        model = replace(spec, classes=classes or CITYSCAPES_19).build()
    if not classes and (counts := best_fit(model, stored.tensors).num_classes()):
        model = replace(spec, classes=class_names(counts[0])).build()
    if not load_weights(model, stored, whole=whole) and weights != "imagenet":
        warnings.warn(
            f"{weights} has the backbone only: the head is randomly initialised", stacklevel=3
        )
    _warn_if_options_differ(model.spec, stored)
    return model


def _open_external(spec: ModelSpec, stored: Weights | None, *, trust: bool) -> nn.Module:
    """Load a network that is not built here, and apply ``spec`` and weights to it."""
    if spec.options:
        raise ValueError(f"{spec.name} takes no options, got {', '.join(spec.options)}")
    if spec.name.startswith("hf:"):
        model, names = open_hub(spec.name)
        if spec.classes and len(spec.classes) != len(names):
            raise ValueError(
                f"{spec.name} has {len(names)} classes, but {len(spec.classes)} are requested"
            )
    elif spec.name.startswith("smp:"):
        model, names = open_folder(spec.name), ()
    else:
        model, names = open_function(spec.name, len(spec.classes) or None, trust=trust), ()
    replace(spec, classes=spec.classes or names).finish(model)
    if stored is not None:
        load_weights(model, stored, whole=True)
    return model


def _read_or_download(spec: ModelSpec, weights: str | os.PathLike[str] | None) -> Weights | None:
    """Return the requested weights; None for random initialisation."""
    architecture = find_architecture(spec.name)
    if weights == "imagenet":
        if architecture.imagenet is None:
            raise ValueError(f"there are no ImageNet weights for {spec.name}; leave weights out")
        origin = f"the ImageNet weights for {spec.name}"
        return Weights(tensors=_download(origin, architecture.imagenet), origin=origin)
    if weights is not None:
        return read_weights(weights)
    if spec.classes or architecture.pretrained is None:
        return None
    tensors, classes = _download(f"the weights of {spec.name}", architecture.pretrained)
    return Weights(tensors=tensors, classes=classes, origin=spec.name)


def _download(what: str, download: Callable[[], T]) -> T:
    try:
        return download()
    except ModuleNotFoundError:
        raise
    except Exception as error:  # the libraries raise many kinds of errors
        reason = str(error).partition("\n")[0]
        raise OSError(
            f"{what} could not be fetched ({type(error).__name__}: {reason}); "
            "without a connection, give weights=FILE"
        ) from error


def _warn_if_options_differ(spec: ModelSpec, stored: Weights) -> None:
    """Warn if a file was saved with other options: it fits, but predictions differ."""
    try:
        saved = recorded_spec(stored)
    except ValueError:  # the options are not recorded, or cannot be interpreted
        return
    theirs, ours = ({**each.options, "norm": each.norm} for each in (saved, spec))
    for option, value in theirs.items():
        if option in ours and value != ours[option]:
            warnings.warn(
                f"{stored.origin} was saved with {option}={value!r}, but is used with "
                f"{option}={ours[option]!r}",
                stacklevel=4,
            )
