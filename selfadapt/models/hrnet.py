"""HRNetV2: four parallel resolutions that all feed the head (Wang et al., 2021).

The backbone is timm's, which was made for classification and fuses branches by nearest-neighbour
upsampling with integer factors. For segmentation it is replaced by bilinear upsampling to the size
of the other branch. The authors' code uses ``align_corners=True``, mmsegmentation ``False``, and
the released code ``True`` in the backbone and for the output, ``False`` before the head. The names
of the weights are those of the authors.
"""

from functools import reduce
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfadapt.optional import import_optional

BRANCHES = (1, 2, 3, 4)
"""timm's indices of the four branches; 0 is the stem."""


class HRNetV2(nn.Module):
    """An HRNet with the V2 head: all branches at the highest resolution, two 1x1 convolutions.

    Args:
        backbone: ``hrnet_w18``, ``hrnet_w48`` or another HRNet of timm.
        num_classes: Number of classes.
        corners: Upsample with ``align_corners=True`` (``aligned``), ``False`` (``free``), or as in
            the ``released`` code.
    """

    def __init__(self, backbone: str, num_classes: int, corners: str = "released") -> None:
        super().__init__()
        self.align_corners = corners != "free"
        self.head_align_corners = corners == "aligned"
        self.backbone = branches = hrnet(backbone)
        _support_any_size(branches, self.align_corners)
        width = sum(branches.feature_info.channels())
        self.head = nn.Sequential(
            nn.Conv2d(width, width, kernel_size=1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, num_classes, kernel_size=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores ``(B, C, H, W)``."""
        first, *others = self.backbone(x)
        others = [_resize(maps, first.shape[-2:], self.head_align_corners) for maps in others]
        scores = self.head(torch.cat((first, *others), dim=1))
        return _resize(scores, x.shape[-2:], self.align_corners)


def _resize(maps: Tensor, size: torch.Size, align_corners: bool) -> Tensor:
    return F.interpolate(maps, size, mode="bilinear", align_corners=align_corners)


class FusionModule(nn.Module):
    """A multi-resolution module of timm's HRNet, with branches resized to each other's size."""

    align_corners: bool
    branches: nn.ModuleList
    fuse_layers: nn.ModuleList
    fuse_act: nn.Module

    def forward(self, x: list[Tensor]) -> list[Tensor]:
        """Return the fused branches ``(B, C, h, w)``, the largest first."""
        x = [branch(maps) for branch, maps in zip(self.branches, x, strict=True)]
        fused, rows = [], cast(Any, self.fuse_layers)
        for index, row in enumerate(rows):
            parts = [layer(maps) for layer, maps in zip(row, x, strict=True)]
            larger, smaller = parts[: index + 1], parts[index + 1 :]
            smaller = [_resize(maps, x[index].shape[-2:], self.align_corners) for maps in smaller]
            fused.append(self.fuse_act(reduce(torch.add, (*larger, *smaller))))
        return fused


def _support_any_size(backbone: nn.Module, align_corners: bool) -> None:
    """Replace timm's upsampling by integer factors, so that images may have any size."""
    modules: list[Any] = list(backbone.modules())
    for module in modules:
        if getattr(module, "num_branches", 1) > 1:
            module.__class__, module.align_corners = FusionModule, align_corners
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Upsample):
                setattr(module, name, nn.Identity())


def hrnet(name: str, *, pretrained: bool = False) -> Any:
    """Return timm's HRNet as a backbone that returns its four branches."""
    return import_optional("timm", "models").create_model(
        name, pretrained=pretrained, features_only=True, feature_location="", out_indices=BRANCHES
    )
