"""The networks of our own, by name: what it takes to build one."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from selfadapt.models.deeplab import DeepLabV1
from selfadapt.models.detect import IMAGENET_MEAN, IMAGENET_STD
from selfadapt.models.interface import Interface
from selfadapt.names import nearest


@dataclass(frozen=True)
class Architecture:
    """A network that can be created by name: how it is built, and its options with their values."""

    build: Callable[..., nn.Module]
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Each option's allowed values, the default first."""


DEEPLABV1 = {
    "style": ("pytorch", "caffe"),
    "dilation": ("released", "torchvision", "every block"),
}

MODELS = {
    "deeplabv1_resnet50": Architecture(partial(DeepLabV1, "resnet50"), DEEPLABV1),
    "deeplabv1_resnet101": Architecture(partial(DeepLabV1, "resnet101"), DEEPLABV1),
}
"""Name -> architecture."""


@dataclass(frozen=True)
class ModelSpec:
    """All it takes to build a network anew: name, classes and options."""

    name: str
    classes: tuple[str, ...]
    options: dict[str, str] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """Build the network, in evaluation mode, with fresh weights."""
        if self.name not in MODELS:
            raise ValueError(
                f"unknown model {self.name!r};{nearest(self.name, MODELS)} "
                f"known: {', '.join(MODELS)}"
            )
        architecture = MODELS[self.name]
        for option, value in self.options.items():
            if option not in architecture.options:
                raise ValueError(
                    f"{self.name} has no option {option!r};{nearest(option, architecture.options)} "
                    f"known: {', '.join(architecture.options)}"
                )
            if value not in architecture.options[option]:
                raise ValueError(
                    f"{option} of {self.name} must be one of "
                    f"{', '.join(map(repr, architecture.options[option]))}, got {value!r}"
                )
        options = {name: values[0] for name, values in architecture.options.items()} | self.options
        model: Any = architecture.build(num_classes=len(self.classes), **options)
        model.spec = replace(self, options=options)
        model.interface = Interface(mean=IMAGENET_MEAN, std=IMAGENET_STD, channels=3)
        model.eval()
        return model
