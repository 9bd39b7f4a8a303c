"""Networks of other libraries, by address.

    torchvision:NAME      such as torchvision:deeplabv3_resnet50
    smp:KIND/ENCODER      such as smp:Unet/resnet34; timm's encoders are called tu-NAME
    smp:FOLDER            what smp's save_pretrained wrote
    hf:OWNER/NAME         a network on the Hugging Face hub, or hf:FOLDER
    MODULE:FUNCTION       a function of your own that returns a network

MODULE:FUNCTION runs arbitrary code, so it requires ``trust=True``. No file can request it.
"""

import inspect
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torchvision.models import get_model, get_model_weights, segmentation

from selfadapt.checks import check_number
from selfadapt.models.interface import MAX_CHANNELS
from selfadapt.models.zoo import Architecture, StateDict
from selfadapt.optional import import_optional
from selfadapt.own import import_own, not_trusted
from selfadapt.patterns import alternatives, nearest

ADDRESS = re.compile(r"(torchvision|smp):(.+)")
MAX_LAYERS = 1000
MAX_REASON = 1000
"""Maximum length of an error message of another library."""
EXTERNAL = re.compile(r"hf:.+|(?!torchvision:|smp:)[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_external(name: str) -> bool:
    """Return True if a name refers to a network that is loaded as it is, not built here."""
    return EXTERNAL.fullmatch(name) is not None or _smp_folder(name) is not None


def _smp_folder(name: str) -> Path | None:
    folder = Path(name.removeprefix("smp:")).expanduser()
    return folder if name.startswith("smp:") and (folder / "config.json").is_file() else None


def library_architecture(address: str) -> Architecture | None:
    """Return the architecture at a torchvision or smp address, or None for other names."""
    match = ADDRESS.fullmatch(address)
    if match is None:
        return None
    return _torchvision(match[2]) if match[1] == "torchvision" else _smp(match[2])


def _torchvision(name: str) -> Architecture:
    names = torchvision.models.list_models(segmentation)
    if name not in names:
        raise ValueError(
            f"torchvision has no segmentation network {name!r}{alternatives(name, names)}"
        )
    build = partial(get_model, name, weights=None, weights_backbone=None)

    def imagenet() -> StateDict:
        return get_model(name, weights=None, weights_backbone="DEFAULT").backbone.state_dict()

    def pretrained() -> tuple[StateDict, tuple[str, ...]]:
        weights: Any = get_model_weights(name).DEFAULT
        return weights.get_state_dict(progress=False), tuple(weights.meta["categories"])

    return Architecture(build=build, imagenet=imagenet, pretrained=pretrained)


def _is_encoder(smp: Any, name: str) -> bool:
    return name in smp.encoders.get_encoder_names() or re.fullmatch(r"tu-[\w.]+", name) is not None


def _smp(name: str) -> Architecture:
    smp = import_optional("segmentation_models_pytorch", "models")
    kinds = {kind.__name__.lower(): kind for kind in smp.MODEL_ARCHITECTURES_MAPPING.values()}
    kind, slash, encoder = name.partition("/")
    if kind.lower() not in kinds:
        names = [kind.__name__ for kind in kinds.values()]
        raise ValueError(
            f"segmentation-models-pytorch has no architecture {kind!r}{alternatives(kind, names)}"
        )
    encoders = smp.encoders.get_encoder_names()
    if not slash or not _is_encoder(smp, encoder):
        raise ValueError(
            f"an address in smp must name an encoder, as smp:{kind}/resnet34 does, and it has no "
            f"{encoder!r};{nearest(encoder, encoders)} timm's encoders are called tu-NAME"
        )

    def build(num_classes: int, encoder_weights: str | None = None, in_channels: int = 3) -> Any:
        network = kinds[kind.lower()]
        try:
            return network(
                encoder_name=encoder, encoder_weights=encoder_weights, classes=num_classes,
                in_channels=in_channels,
            )  # fmt: skip
        except (KeyError, RuntimeError, ValueError) as error:  # an encoder may not fit
            raise ValueError(f"smp:{name} cannot be built: {error}") from error

    def imagenet() -> StateDict:
        return build(1, "imagenet").encoder.state_dict()

    return Architecture(build=build, imagenet=imagenet, any_channels=True, backbone="encoder")


def open_folder(address: str) -> nn.Module:
    """Load a network that smp's ``save_pretrained`` wrote to a folder."""
    smp = import_optional("segmentation_models_pytorch", "models")
    folder = Path(str(_smp_folder(address)))
    try:
        settings = json.loads((folder / "config.json").read_text())
        encoder = settings.get("encoder_name")
        _check_depths(settings)
        check_number("in_channels", settings.get("in_channels", 3), 1, MAX_CHANNELS, whole=True)
        kind = smp.MODEL_ARCHITECTURES_MAPPING.get(str(settings.get("_model_class")).lower())
        arguments = {k: v for k, v in settings.items() if not k.startswith("_")}
        if not _is_encoder(smp, str(encoder)):  # it may be a URL, which would be downloaded
            raise ValueError(f"there is no encoder {encoder!r}")
        _check_size(lambda: kind(**{**arguments, "encoder_weights": None}), folder)
        return smp.from_pretrained(folder, strict=True, encoder_weights=None).eval()
    except Exception as error:  # the libraries raise many kinds of errors
        reason = _reason(error)
    raise ValueError(f"{address} cannot be opened: {reason}")


def _check_depths(settings: Any) -> None:
    """Raise ValueError if a configuration asks for an unreasonable number of layers."""
    for name, value in settings.items():
        numbers = value if isinstance(value, list | tuple) else [value]
        for number in numbers if re.search("depth|layer|block", str(name)) else ():
            if isinstance(number, int):
                check_number(str(name), number, -MAX_LAYERS, MAX_LAYERS)
        if isinstance(value, dict) and "config" in str(name):
            _check_depths(value)


def _check_size(build: Callable[[], nn.Module], folder: Path) -> None:
    """Raise ValueError if a network is larger than its files, before memory is allocated."""
    try:
        with torch.device("meta"):
            num_values = sum(value.numel() for value in build().state_dict().values())
    except Exception:  # some networks cannot be built on the meta device
        return
    files = (path for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".safetensors"))
    num_bytes = sum(path.stat().st_size for path in files)
    if num_values > 2 * num_bytes > 0:  # some buffers are computed, not stored
        raise ValueError(
            f"its config.json describes a network of {num_values} values, but its weights have "
            f"{num_bytes} bytes"
        )


def _reason(error: Exception) -> str:
    """Return why another library could not load a network.

    Advice to run the code in its files is replaced: such code is never run here.
    """
    text = str(error)
    if "trust_remote_code" in text:
        return (
            "it needs code that comes with it, which is not run; give a function of your own that "
            "builds it, MODULE:FUNCTION, and its weights"
        )
    if "weights_only" in text or "torch.load" in text:
        return "its weights contain more than tensors and are not loaded; save them as safetensors"
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."


def open_hub(address: str) -> tuple[nn.Module, tuple[str, ...]]:
    """Load a network from the Hugging Face hub or a folder; return it and its class names."""
    transformers = import_optional("transformers", "hf")
    name = address.removeprefix("hf:")
    folder = Path(name).expanduser()
    if not folder.is_dir() and (name.startswith((".", "/", "~")) or name.count("/") != 1):
        raise FileNotFoundError(f"there is no folder {name}, and on the hub it is hf:OWNER/NAME")
    name = str(folder) if folder.is_dir() else name
    try:
        local = {"local_files_only": folder.is_dir(), "trust_remote_code": False}
        config = transformers.AutoConfig.from_pretrained(name, **local)
        if folder.is_dir() and getattr(config, "use_pretrained_backbone", False):
            raise ValueError("its backbone is not in the folder (use_pretrained_backbone)")
        _check_depths(config.to_dict())
        kinds = (
            transformers.AutoModelForSemanticSegmentation,
            transformers.AutoModelForUniversalSegmentation,
        )
        kind = next((kind for kind in kinds if type(config) in kind._model_mapping), None)
        if kind is None:
            raise ValueError(f"a {config.model_type} network does not segment images")
        if folder.is_dir():
            _check_size(lambda: kind.from_config(config), folder)
        model, loaded = kind.from_pretrained(name, output_loading_info=True, **local)
        if missing := sorted(loaded["missing_keys"]):
            raise ValueError(f"it lacks weights of a segmentation network, such as {missing[0]}")
        names = tuple(str(config.id2label[index]) for index in sorted(config.id2label))
        return model.eval(), names
    except Exception as error:  # the libraries raise many kinds of errors
        reason = _reason(error)
        if isinstance(error, OSError) and not folder.is_dir():
            first_line = reason.partition("\n")[0].rstrip(".")
            reason = (
                f"it could not be fetched ({first_line}); without a connection, save it on another "
                "machine with save_pretrained and give hf:FOLDER"
            )
    raise ValueError(f"{address} cannot be opened: {reason}")


def open_function(address: str, num_classes: int | None, *, trust: bool) -> nn.Module:
    """Return the network built by ``MODULE:FUNCTION``."""
    if trust is not True:
        raise not_trusted(address)
    function = import_own(address)
    parameters = inspect.signature(function).parameters
    names = [name for name in ("num_classes", "classes") if name in parameters]
    try:
        model = function(**({} if num_classes is None else dict.fromkeys(names, num_classes)))
    except (Exception, SystemExit) as error:
        raise ValueError(f"{address} failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{address} must return a torch.nn.Module, it returned {type(model).__name__}"
        )
    return model.eval()
