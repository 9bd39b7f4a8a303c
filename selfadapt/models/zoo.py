"""The networks of the paper, and a small one, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn
from torchvision.models import get_weight

from selfadapt.models.deeplab import DeepLabV1, deeplabv3plus
from selfadapt.models.detect import IMAGENET_MEAN, IMAGENET_STD
from selfadapt.models.hrnet import HRNetV2, hrnet
from selfadapt.models.interface import Interface
from selfadapt.models.upernet import swin_tiny, upernet_swin_tiny

StateDict = Mapping[str, Tensor]


def _interface(divisor: int) -> Interface:
    """Return the interface of a network whose input sides must be multiples of ``divisor``."""
    return Interface(
        mean=IMAGENET_MEAN, std=IMAGENET_STD, channels=3, bgr=False, divisor=divisor,
        minimum=divisor, activated=False,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A network that can be created by name."""

    build: Callable[..., nn.Module]
    """Builds the network from ``num_classes``, the options and, if ``any_channels``,
    ``in_channels``."""
    imagenet: Callable[[], StateDict] | None
    """Downloads the ImageNet weights of the backbone; None if there are none."""
    pretrained: Callable[[], tuple[StateDict, tuple[str, ...]]] | None = None
    """Downloads weights and class names of the whole network; None if there are none."""
    any_channels: bool = False
    """It can be built for any number of input channels."""
    backbone: str = "backbone"
    """Path of the backbone module."""
    interface: Interface | None = None
    """Input and output; None: detected."""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Allowed values of each option, the default first."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Names of parts in checkpoints of other libraries -> names here."""
    mmseg: Mapping[str, str] = field(default_factory=dict)
    """Options of mmsegmentation's checkpoints."""
    stride: int | None = None
    """Output stride: size of the image over size of the backbone's highest-resolution output."""
    published: str = ""
    """Published number of parameters, with its source."""


def _torchvision_weights(name: str) -> StateDict:
    return get_weight(name).get_state_dict(progress=False)


def _timm_weights(build: Callable[..., nn.Module]) -> StateDict:
    return build(pretrained=True).state_dict()


RESNET50 = partial(_torchvision_weights, "ResNet50_Weights.IMAGENET1K_V1")
RESNET101 = partial(_torchvision_weights, "ResNet101_Weights.IMAGENET1K_V1")
CORNERS = {"corners": ("aligned", "free")}
HRNET_CORNERS = {"corners": ("released", "aligned", "free")}
DEEPLABV1 = {
    "style": ("pytorch", "caffe"),
    "dilation": ("released", "torchvision", "every block"),
    **CORNERS,
}
FCN_HEAD = {"decode_head.conv_seg": "cls_head"}  # mmsegmentation
HRNET_HEAD = {
    "decode_head.convs.0.conv": "head.0",  # mmsegmentation
    "decode_head.convs.0.bn": "head.1",
    "decode_head.conv_seg": "head.3",
    "last_layer": "head",  # the authors' code
}

MODELS = {
    "deeplabv1_resnet50": Architecture(
        build=partial(DeepLabV1, "resnet50"),
        stride=8,
        published="23.5 M (torchvision, ResNet-50 without its classifier)",
        interface=_interface(1),
        imagenet=RESNET50,
        options=DEEPLABV1,
        renamed=FCN_HEAD,
        mmseg={"dilation": "torchvision", "corners": "free"},
    ),
    "deeplabv1_resnet101": Architecture(
        build=partial(DeepLabV1, "resnet101"),
        stride=8,
        published="42.5 M (torchvision, ResNet-101 without its classifier)",
        interface=_interface(1),
        imagenet=RESNET101,
        options=DEEPLABV1,
        renamed=FCN_HEAD,
        mmseg={"dilation": "torchvision", "corners": "free"},
    ),
    "deeplabv1_resnet18_slim": Architecture(
        build=partial(DeepLabV1, "resnet18_slim"),
        stride=8,
        published="2.8 M (ours: half as wide as ResNet-18)",
        interface=_interface(1),
        imagenet=None,
        options=CORNERS,
    ),
    "deeplabv3plus_resnet50": Architecture(
        build=partial(deeplabv3plus, "resnet50"),
        stride=8,
        published="39.8 M (released code, whose last 3x3 is not separable)",
        backbone="encoder",
        interface=_interface(8),
        imagenet=RESNET50,
    ),
    "deeplabv3plus_resnet101": Architecture(
        build=partial(deeplabv3plus, "resnet101"),
        stride=8,
        published="58.8 M (released code, whose last 3x3 is not separable)",
        backbone="encoder",
        interface=_interface(8),
        imagenet=RESNET101,
    ),
    "hrnet_w18": Architecture(
        build=partial(HRNetV2, "hrnet_w18"),
        stride=4,
        published="9.6 M (mmsegmentation)",
        interface=_interface(1),
        imagenet=partial(_timm_weights, partial(hrnet, "hrnet_w18")),
        options=HRNET_CORNERS,
        renamed=HRNET_HEAD,
        mmseg={"corners": "free"},
    ),
    "hrnet_w48": Architecture(
        build=partial(HRNetV2, "hrnet_w48"),
        stride=4,
        published="65.8 M (the authors)",
        interface=_interface(1),
        imagenet=partial(_timm_weights, partial(hrnet, "hrnet_w48")),
        options=HRNET_CORNERS,
        renamed=HRNET_HEAD,
        mmseg={"corners": "free"},
    ),
    "upernet_swin_tiny": Architecture(
        build=upernet_swin_tiny,
        stride=32,
        published="60 M (Swin's authors, with an auxiliary head and 150 classes)",
        backbone="encoder.model",
        interface=_interface(32),
        imagenet=partial(_timm_weights, swin_tiny),
    ),
}
"""Name -> architecture."""
