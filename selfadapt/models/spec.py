"""Specification of a network: its name, classes and options."""

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from selfadapt.checks import check_number, shortened
from selfadapt.dropout import add_dropout, check_rate
from selfadapt.labels import check_class_names
from selfadapt.models.address import library_architecture
from selfadapt.models.interface import MAX_CHANNELS
from selfadapt.models.norms import NORMS, replace_batchnorm
from selfadapt.models.zoo import MODELS, Architecture
from selfadapt.patterns import alternatives

CHECKPOINTS = (".safetensors", ".pth", ".pt", ".ckpt", ".bin", ".tar")
MAX_DESCRIPTION = 200
"""Maximum length of ``ModelSpec.trained_on``."""


def find_architecture(name: str) -> Architecture:
    """Return the architecture of a name in ``MODELS`` or an address in another library."""
    if name in MODELS:
        return MODELS[name]
    if architecture := library_architecture(name):
        return architecture
    if name.endswith(CHECKPOINTS):
        raise FileNotFoundError(f"there is no file {shortened(name)}")
    names = ("streets", *MODELS)
    raise ValueError(
        f"unknown model {shortened(name)}{alternatives(name[:MAX_DESCRIPTION], names)}; or an "
        "address such as torchvision:deeplabv3_resnet50, smp:Unet/resnet34, "
        "hf:OWNER/NAME or my_module:my_function"
    )


@dataclass(frozen=True)
class ModelSpec:
    """The settings that a network is built from."""

    name: str
    classes: tuple[str, ...]
    """Names of the classes; empty if unknown."""
    options: dict[str, str] = field(default_factory=dict)
    norm: str = "bn"
    """Normalisation layers, a name in ``NORMS``."""
    dropout: float = 0.0
    """Dropout rate after every ReLU; 0 disables it."""
    trained_on: str = ""
    """Description of the training images; empty if unknown."""
    channels: int = 3
    """Input channels; other than 3 only for networks of segmentation-models-pytorch."""

    def __post_init__(self) -> None:
        check_class_names(self.classes)
        if self.norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {shortened(self.norm)}")
        if self.dropout != 0:
            check_rate(self.dropout)
        check_number("channels", self.channels, 1, MAX_CHANNELS, whole=True)
        if len(self.trained_on) > MAX_DESCRIPTION or not self.trained_on.isprintable():
            raise ValueError(
                f"trained_on must be a line of at most {MAX_DESCRIPTION} characters, got "
                f"{self.trained_on[:MAX_DESCRIPTION]!r}"
            )

    def build(self) -> nn.Module:
        """Build the network, in evaluation mode, with randomly initialised weights."""
        architecture = find_architecture(self.name)
        self._check(architecture)
        options = {name: values[0] for name, values in architecture.options.items()} | self.options
        channels = {"in_channels": self.channels} if architecture.any_channels else {}
        model: Any = architecture.build(num_classes=len(self.classes), **options, **channels)
        replace(self, options=options).finish(model)
        if architecture.interface is not None:
            model.interface = architecture.interface
        return model.eval()

    def finish(self, model: Any) -> None:
        """Apply normalisation and dropout to a network, and attach this specification."""
        replace_batchnorm(model, self.norm)
        if self.dropout:
            add_dropout(model, self.dropout)
        model.spec = self

    def _check(self, architecture: Architecture) -> None:
        if self.channels != 3 and not architecture.any_channels:
            raise ValueError(f"{self.name} takes 3 channels, got {self.channels}")
        for option, value in self.options.items():
            if option not in architecture.options:
                names = (*architecture.options, "norm", "dropout")
                raise ValueError(
                    f"{self.name} has no option {option!r}{alternatives(option, names)}"
                )
            if value not in architecture.options[option]:
                raise ValueError(
                    f"{option} of {self.name} must be one of "
                    f"{', '.join(map(repr, architecture.options[option]))}, got {shortened(value)}"
                )


def fingerprint(model: nn.Module) -> str:
    """Return a hash of the tensors, specification and interface of a network."""
    settings = getattr(model, "spec", None), getattr(model, "interface", None)
    digest = hashlib.sha256(repr(settings).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
