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


def _takes(divisor: int) -> Interface:
    """Return the interface of a network that takes sides of such multiples."""
    return Interface(
        mean=IMAGENET_MEAN, std=IMAGENET_STD, channels=3, bgr=False, divisor=divisor,
        minimum=divisor, activated=False,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A network that can be created by name."""

    build: Callable[..., nn.Module]
    """Takes ``num_classes`` and the options; ``in_channels`` where ``any_channels``."""
    imagenet: Callable[[], StateDict] | None
    """Gets the backbone's ImageNet weights, where there are such."""
    pretrained: Callable[[], tuple[StateDict, tuple[str, ...]]] | None = None
    """Gets weights of the whole network and the names of its classes, where there are such."""
    any_channels: bool = False
    """It can be built for images of any number of channels."""
    backbone: str = "backbone"
    """Where in the network its backbone is."""
    interface: Interface | None = None
    """Preprocessing; None: found out."""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Each option's allowed values, the default first."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """What parts are called in other people's checkpoints, and here."""
    mmseg: Mapping[str, str] = field(default_factory=dict)
    """Options that mmsegmentation's checkpoints were trained with."""
    stride: int | None = None
    """Output stride: the image's size over that of the backbone's finest last features."""
    published: str = ""
    """Number of parameters others report, and who."""


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
        interface=_takes(1),
        imagenet=RESNET50,
        options=DEEPLABV1,
        renamed=FCN_HEAD,
        mmseg={"dilation": "torchvision", "corners": "free"},
    ),
    "deeplabv1_resnet101": Architecture(
        build=partial(DeepLabV1, "resnet101"),
        stride=8,
        published="42.5 M (torchvision, ResNet-101 without its classifier)",
        interface=_takes(1),
        imagenet=RESNET101,
        options=DEEPLABV1,
        renamed=FCN_HEAD,
        mmseg={"dilation": "torchvision", "corners": "free"},
    ),
    "deeplabv1_resnet18_slim": Architecture(
        build=partial(DeepLabV1, "resnet18_slim"),
        stride=8,
        published="2.8 M (ours: half as wide as ResNet-18)",
        interface=_takes(1),
        imagenet=None,
        options=CORNERS,
    ),
    "deeplabv3plus_resnet50": Architecture(
        build=partial(deeplabv3plus, "resnet50"),
        stride=8,
        published="39.8 M (released code, whose last 3x3 is not separable)",
        backbone="encoder",
        interface=_takes(8),
        imagenet=RESNET50,
    ),
    "deeplabv3plus_resnet101": Architecture(
        build=partial(deeplabv3plus, "resnet101"),
        stride=8,
        published="58.8 M (released code, whose last 3x3 is not separable)",
        backbone="encoder",
        interface=_takes(8),
        imagenet=RESNET101,
    ),
    "hrnet_w18": Architecture(
        build=partial(HRNetV2, "hrnet_w18"),
        stride=4,
        published="9.6 M (mmsegmentation)",
        interface=_takes(1),
        imagenet=partial(_timm_weights, partial(hrnet, "hrnet_w18")),
        options=HRNET_CORNERS,
        renamed=HRNET_HEAD,
        mmseg={"corners": "free"},
    ),
    "hrnet_w48": Architecture(
        build=partial(HRNetV2, "hrnet_w48"),
        stride=4,
        published="65.8 M (the authors)",
        interface=_takes(1),
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
        interface=_takes(32),
        imagenet=partial(_timm_weights, swin_tiny),
    ),
}
"""Name -> architecture."""
