"""Networks of many families, with random weights, that every method must be able to deal with."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import segmentation_models_pytorch as smp
import torchvision.models.segmentation as tv
import transformers as hf
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

import selfadapt
from conftest import TinyNet
from selfadapt.models.norms import replace_batchnorm


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    classes: int = 5
    channels: int = 3
    refused_by: tuple[str, ...] = ()
    """Methods that need something this network has not."""


def torchvision_net(name: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: getattr(tv, name)(weights=None, weights_backbone=None, num_classes=5, **options)


def smp_net(name: str, encoder: str, **options: object) -> Callable[[], nn.Module]:
    options = {"classes": 5, **options}
    return lambda: getattr(smp, name)(encoder_name=encoder, encoder_weights=None, **options)


def segformer() -> nn.Module:
    config = hf.SegformerConfig(
        num_labels=5, hidden_sizes=[8, 16, 20, 32], depths=[1, 1, 1, 1], decoder_hidden_size=16,
        num_attention_heads=[1, 2, 5, 8],
    )  # fmt: skip
    return hf.SegformerForSemanticSegmentation(config)


def upernet() -> nn.Module:
    backbone = hf.SwinConfig(
        embed_dim=12, depths=[1, 1, 1, 1], num_heads=[1, 2, 3, 4], window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = hf.UperNetConfig(
        backbone_config=backbone, num_labels=5, hidden_size=16, auxiliary_channels=8,
        auxiliary_in_channels=48,
    )  # fmt: skip
    return hf.UperNetForSemanticSegmentation(config)


def own(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: selfadapt.create_model(name, classes=5, **options)


FAMILIES = {name.split("_")[0]: name for name in reversed(selfadapt.MODELS)}
"""The first network of each family of our own."""


def with_norm(norm: str) -> nn.Module:
    model = TinyNet(5)
    replace_batchnorm(model, norm)
    return model


def frozen_batchnorm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), FrozenBatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1)
    )


class OwnUNet(nn.Module):
    """A network with a skip connection that fails on odd sizes, as many private ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.deep = nn.Sequential(nn.MaxPool2d(4), nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6))
        self.up = nn.Upsample(scale_factor=4)
        self.last = nn.Conv2d(12, 5, 1)

    def forward(self, x):
        shallow = self.down(x)
        return self.last(nn.functional.relu(self.merge(shallow)))

    def merge(self, shallow):
        import torch

        return torch.cat((shallow, self.up(self.deep(shallow))), dim=1)


SHALLOW: dict[str, Any] = {"encoder_depth": 3, "decoder_channels": (32, 16, 8)}
"""Options of a U-Net of which only the last layer matters."""
NETWORKS = {
    "torchvision deeplabv3_resnet50": Case(torchvision_net("deeplabv3_resnet50", aux_loss=True)),
    "torchvision fcn_resnet50": Case(torchvision_net("fcn_resnet50")),
    "torchvision lraspp": Case(torchvision_net("lraspp_mobilenet_v3_large")),
    "torchvision deeplabv3_mobilenet": Case(torchvision_net("deeplabv3_mobilenet_v3_large")),
    "smp Unet": Case(smp_net("Unet", "resnet18")),
    "smp Unet binary": Case(smp_net("Unet", "resnet18", classes=1, **SHALLOW), classes=2),
    "smp Unet softmax": Case(smp_net("Unet", "resnet18", activation="softmax2d", **SHALLOW)),
    "smp FPN": Case(smp_net("FPN", "mobilenet_v2")),
    "smp DeepLabV3Plus": Case(smp_net("DeepLabV3Plus", "resnet18")),
    "smp PSPNet with labels": Case(
        smp_net("PSPNet", "resnet18", aux_params={"classes": 2, "pooling": "avg"})
    ),
    "timm mobilenetv3": Case(smp_net("Unet", "tu-mobilenetv3_small_050")),
    "timm hrnet": Case(smp_net("FPN", "tu-hrnet_w18_small")),
    "timm convnext": Case(smp_net("FPN", "tu-convnext_atto")),
    "hf SegFormer": Case(segformer),
    "hf UPerNet Swin": Case(upernet),
    **{f"own {name}": Case(own(name)) for name in FAMILIES.values()},
    "toy with BIN": Case(partial(with_norm, "bin")),
    "toy with SN": Case(partial(with_norm, "sn")),
    "toy": Case(lambda: TinyNet(5)),
    "toy binary": Case(lambda: TinyNet(1), classes=2),
    "toy dict": Case(lambda: TinyNet(5, form=lambda y: {"aux": y * 0, "pred": y})),
    "toy tuple": Case(lambda: TinyNet(5, form=lambda y: (y, y * 0))),
    "toy four channels": Case(lambda: TinyNet(5, channels=4), channels=4),
    "toy one channel": Case(lambda: TinyNet(5, channels=1), channels=1),
    "own U-Net": Case(OwnUNet),
    "frozen BatchNorm": Case(frozen_batchnorm, refused_by=("tent",)),
}
