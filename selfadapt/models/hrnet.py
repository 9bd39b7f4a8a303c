"""HRNetV2: four resolutions side by side, all of them seen by the head (Wang et al., 2021).

timm has the backbone, made for classification: where its branches meet, it upsamples by whole
factors, to the nearest neighbour. For segmentation that is bilinear, to whatever size the other
branch has. Corners of the maps are aligned in the authors' code, in mmsegmentation they are not,
and in the released code in the backbone and at the end, but not before the head. The names of the
weights are the authors'.
"""

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfadapt.optional import need

BRANCHES = (1, 2, 3, 4)
"""timm's indices of the four branches; 0 is the stem."""


class HRNetV2(nn.Module):
    """An HRNet with the V2 head: all branches at the highest resolution, two 1x1 convolutions.

    Args:
        backbone: ``hrnet_w18``, ``hrnet_w48`` or another HRNet of timm.
        num_classes: Number of classes.
        corners: Whether upsampling aligns the corners of the maps: ``aligned``, ``free`` or as
            ``released``.
    """

    def __init__(self, backbone: str, num_classes: int, corners: str = "released") -> None:
        super().__init__()
        self.aligned, self.joined_aligned = corners != "free", corners == "aligned"
        self.backbone = branches = hrnet(backbone)
        _take_any_size(branches, self.aligned)
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
        others = [_resized(maps, first.shape[-2:], self.joined_aligned) for maps in others]
        scores = self.head(torch.cat((first, *others), dim=1))
        return _resized(scores, x.shape[-2:], self.aligned)


def _resized(maps: Tensor, size: torch.Size, aligned: bool) -> Tensor:
    return F.interpolate(maps, size, mode="bilinear", align_corners=aligned)


class Exchange(nn.Module):
    """What a module of timm's HRNet becomes: its branches are brought to each other's size."""

    aligned: bool
    branches: nn.ModuleList
    fuse_layers: nn.ModuleList
    fuse_act: nn.Module

    def forward(self, x: list[Tensor]) -> list[Tensor]:
        """Return the branches ``(B, C, h, w)``, the largest first; each has something of all."""
        x = [branch(maps) for branch, maps in zip(self.branches, x, strict=True)]
        return [self.fuse_act(self._met(place, x)) for place in range(len(self.fuse_layers))]

    def _met(self, place: int, x: list[Tensor]) -> Tensor:
        row: Any = self.fuse_layers[place]
        parts = [layer(maps) for layer, maps in zip(row, x, strict=True)]
        larger, smaller = parts[: place + 1], parts[place + 1 :]
        smaller = [_resized(maps, x[place].shape[-2:], self.aligned) for maps in smaller]
        return reduce(torch.add, (*larger, *smaller))


def _take_any_size(backbone: nn.Module, aligned: bool) -> None:
    """Let branches meet at any size; timm's own way is to enlarge them by whole factors."""
    modules: list[Any] = list(backbone.modules())
    for module in modules:
        if getattr(module, "num_branches", 1) > 1:
            module.__class__, module.aligned = Exchange, aligned
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Upsample):
                setattr(module, name, nn.Identity())


def hrnet(name: str, *, pretrained: bool = False) -> Any:
    """Return timm's HRNet as a backbone that gives its four branches."""
    return need("timm", "models").create_model(
        name, pretrained=pretrained, features_only=True, feature_location="", out_indices=BRANCHES
    )
