"""What it takes to build a network anew: its name, classes and options."""

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
from selfadapt.patterns import nearest

MAX_WORDS = 200
"""Most characters of what a network was trained on."""


def find_architecture(name: str) -> Architecture:
    """Return the architecture of a name in ``MODELS``, or of an address in another library."""
    if name in MODELS:
        return MODELS[name]
    if architecture := library_architecture(name):
        return architecture
    raise ValueError(
        f"unknown model {shortened(name)};{nearest(name[:MAX_WORDS], MODELS)} "
        f"known: {', '.join(MODELS)}; "
        "or an address such as torchvision:deeplabv3_resnet50, smp:Unet/resnet34, "
        "hf:OWNER/NAME or my_module:my_function"
    )


@dataclass(frozen=True)
class ModelSpec:
    """All it takes to build a network anew."""

    name: str
    classes: tuple[str, ...]
    """Names of the classes; none: not known."""
    options: dict[str, str] = field(default_factory=dict)
    norm: str = "bn"
    """Normalisation in the place of BatchNorm, a name in ``NORMS``."""
    dropout: float = 0.0
    """Rate of dropout after every ReLU; 0: none."""
    trained_on: str = ""
    """The images it was trained on, in words; empty: not known."""
    channels: int = 3
    """Input channels; others than 3 for networks of segmentation-models-pytorch only."""

    def __post_init__(self) -> None:
        check_class_names(self.classes)
        if self.norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {shortened(self.norm)}")
        if self.dropout != 0:
            check_rate(self.dropout)
        check_number("channels", self.channels, 1, MAX_CHANNELS, whole=True)
        if len(self.trained_on) > MAX_WORDS or not self.trained_on.isprintable():
            raise ValueError(
                f"trained_on must be a line of at most {MAX_WORDS} characters, got "
                f"{self.trained_on[:MAX_WORDS]!r}"
            )

    def build(self) -> nn.Module:
        """Build the network, in evaluation mode, with fresh weights."""
        architecture = find_architecture(self.name)
        self._check(architecture)
        options = {name: values[0] for name, values in architecture.options.items()} | self.options
        given = {"in_channels": self.channels} if architecture.any_channels else {}
        model: Any = architecture.build(num_classes=len(self.classes), **options, **given)
        replace(self, options=options).finish(model)
        if architecture.interface is not None:
            model.interface = architecture.interface
        return model.eval()

    def finish(self, model: Any) -> None:
        """Give a network normalisation and dropout as specified, and this specification."""
        replace_batchnorm(model, self.norm)
        if self.dropout:
            add_dropout(model, self.dropout)
        model.spec = self

    def _check(self, architecture: Architecture) -> None:
        if self.channels != 3 and not architecture.any_channels:
            raise ValueError(f"{self.name} takes 3 channels, got {self.channels}")
        for option, value in self.options.items():
            if option not in architecture.options:
                known = (*architecture.options, "norm", "dropout")
                raise ValueError(
                    f"{self.name} has no option {option!r};{nearest(option, known)} "
                    f"known: {', '.join(known)}"
                )
            if value not in architecture.options[option]:
                raise ValueError(
                    f"{option} of {self.name} must be one of "
                    f"{', '.join(map(repr, architecture.options[option]))}, got {shortened(value)}"
                )


def fingerprint(model: nn.Module) -> str:
    """Return a short text that changes with any tensor of a network, its classes and its input."""
    about = getattr(model, "spec", None), getattr(model, "interface", None)
    digest = hashlib.sha256(repr(about).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
