"""Create any network by name or address, with weights if wanted."""

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from typing import Any, TypeVar

from torch import nn

from selfadapt.labels import CITYSCAPES_19, Classes, class_names
from selfadapt.models.address import is_foreign, open_folder, open_function, open_hub
from selfadapt.models.checkpoint import load_model, recorded_spec
from selfadapt.models.spec import ModelSpec, find_architecture
from selfadapt.models.trained import TRAINED
from selfadapt.models.weights import Weights, best_fit, input_channels, put_weights, read_weights
from selfadapt.models.zoo import MODELS

T = TypeVar("T")

SHIPPED = {"streets": "weights/streets.safetensors"}
"""Networks that come with the package."""
SHIPPED_TRAINED_ON = "rendered streets by day (the built-in world), not photographs"


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
        classes: Number of classes, the name of a class space, or the class names. None: as the
            weights have them, else ``cityscapes-19``.
        weights: A file with weights, of the whole network or of its backbone alone; or
            ``imagenet``, to fetch weights of the backbone. None: fresh weights, but those a network
            of torchvision or Hugging Face was published with, where no classes are given.
        norm: Normalisation to build it with: ``bn``, ``bin`` or ``sn``.
        dropout: Rate of dropout after every ReLU, for Monte-Carlo dropout; 0: none.
        trust: Run the function at ``MODULE:FUNCTION``.
        **options: Options of the architecture, such as ``style="caffe"``.

    Returns:
        The network. It carries ``spec`` (name, classes, options), and ``interface``
        (preprocessing) where that is known; ``save_model`` writes both beside the weights.

    Example:
        >>> model = create_model("deeplabv1_resnet50", classes=3, style="caffe")
        >>> model.spec.classes
        ('class 0', 'class 1', 'class 2')
    """
    if not isinstance(name, str):
        raise TypeError(f"a network has a name or an address, got {name!r}")
    spec = ModelSpec(name, () if classes is None else class_names(classes), options, norm, dropout)
    return _created(spec, weights, trust=trust)


def open_model(
    place: str | os.PathLike[str],
    *,
    classes: int | str | Classes | None = None,
    weights: str | os.PathLike[str] | None = None,
    trust: bool = False,
) -> nn.Module:
    """Open a trained network, from a file saved by ``save_model`` or by name or address.

    Args:
        place: A file, the folder of a training run, or what ``create_model`` takes as its name;
            ``streets`` for the small network that comes with the package.
        classes: As in ``create_model``. A file of ``save_model`` needs none of these.
        weights: A file with weights of the whole network, where it has none of its own.
        trust: Run the function at ``MODULE:FUNCTION``.
    """
    name = os.fspath(place)
    if name in SHIPPED:
        model: Any = load_model(str(files("selfadapt") / SHIPPED[name]))
        model.spec = replace(model.spec, trained_on=SHIPPED_TRAINED_ON)
        _check_describes_itself(name, model, classes, weights)
        return model
    if os.path.isfile(best := os.path.join(name, "best.safetensors")):
        name = best  # the folder of a training run
    if os.path.isfile(name):
        model = load_model(name)
        _check_describes_itself(name, model, classes, weights)
        return model
    if ":" not in name and name not in MODELS and (os.sep in name or "." in name):
        raise FileNotFoundError(f"there is no file {name}")
    published = is_foreign(name) or (find_architecture(name).pretrained and classes is None)
    if weights in (None, "imagenet") and not published:
        raise ValueError(
            f"{name} comes without weights: give those of the whole network, weights=FILE or "
            "--weights FILE"
        )
    spec = ModelSpec(name, () if classes is None else class_names(classes))
    model = _created(spec, weights, trust=trust, whole=True)
    if weights is None and name in TRAINED:
        model.spec = replace(model.spec, trained_on=TRAINED[name].trained_on)
    return model


def _check_describes_itself(
    name: str, model: Any, classes: int | str | Classes | None, weights: object
) -> None:
    if classes is not None and class_names(classes) == model.spec.classes:
        classes = None  # said once more, perhaps with colours
    given = {"classes": classes, "weights": weights}
    if needless := [setting for setting, value in given.items() if value is not None]:
        raise ValueError(f"{name} describes its network itself: leave out {', '.join(needless)}")


def _created(
    spec: ModelSpec,
    weights: str | os.PathLike[str] | None,
    *,
    trust: bool,
    whole: bool = False,
) -> Any:
    """Create a network; where ``spec`` names no classes, those of the weights count."""
    if is_foreign(spec.name):
        return _foreign(spec, None if weights is None else read_weights(weights), trust=trust)
    stored = _stored(spec, weights)
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
    if not classes and (found := best_fit(model, stored.tensors).num_classes()):
        model = replace(spec, classes=class_names(found[0])).build()
    if not put_weights(model, stored, whole=whole) and weights != "imagenet":
        warnings.warn(f"{weights} is of the backbone alone: the head is new", stacklevel=3)
    _compare_options(model.spec, stored)
    return model


def _foreign(spec: ModelSpec, stored: Weights | None, *, trust: bool) -> nn.Module:
    """Open a network that is not built here, and give it what is asked for."""
    if spec.options:
        raise ValueError(f"{spec.name} takes no options, got {', '.join(spec.options)}")
    if spec.name.startswith("hf:"):
        model, known = open_hub(spec.name)
        if spec.classes and len(spec.classes) != len(known):
            raise ValueError(
                f"{spec.name} has {len(known)} classes, but {len(spec.classes)} are asked for"
            )
    elif spec.name.startswith("smp:"):
        model, known = open_folder(spec.name), ()
    else:
        model, known = open_function(spec.name, len(spec.classes) or None, trust=trust), ()
    replace(spec, classes=spec.classes or known).finish(model)
    if stored is not None:
        put_weights(model, stored, whole=True)
    return model


def _stored(spec: ModelSpec, weights: str | os.PathLike[str] | None) -> Weights | None:
    """Get the weights that are asked for."""
    architecture = find_architecture(spec.name)
    if weights == "imagenet":
        if architecture.imagenet is None:
            raise ValueError(f"there are no ImageNet weights for {spec.name}; leave weights out")
        origin = f"the ImageNet weights for {spec.name}"
        return Weights(tensors=_fetched(origin, architecture.imagenet), origin=origin)
    if weights is not None:
        return read_weights(weights)
    if spec.classes or architecture.pretrained is None:
        return None
    tensors, classes = _fetched(f"the weights of {spec.name}", architecture.pretrained)
    return Weights(tensors=tensors, classes=classes, origin=spec.name)


def _fetched(what: str, fetch: Callable[[], T]) -> T:
    try:
        return fetch()
    except ModuleNotFoundError:
        raise
    except Exception as error:  # each library fails in its own way
        reason = str(error).partition("\n")[0]
        raise OSError(
            f"{what} could not be fetched ({type(error).__name__}: {reason}); "
            "where there is no connection, give weights=FILE"
        ) from error


def _compare_options(spec: ModelSpec, stored: Weights) -> None:
    """Warn where a file was saved with other options: it fits, and gives other predictions."""
    try:
        saved = recorded_spec(stored)
    except ValueError:  # it does not say, or not in words known here
        return
    there, here = ({**each.options, "norm": each.norm} for each in (saved, spec))
    for option, value in there.items():
        if option in here and value != here[option]:
            warnings.warn(
                f"{stored.origin} was saved with {option}={value!r}, but is used with "
                f"{option}={here[option]!r}",
                stacklevel=4,
            )
