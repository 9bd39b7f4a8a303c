"""HRNetV2: four resolutions side by side, all of them seen by the head (Wang et al., 2021).

timm has the backbone, made for classification: it adds up its branches by nearest-neighbour
upsampling. For segmentation it is bilinear, with aligned corners in the authors' code and in the
released code, without in mmsegmentation. The names of the weights are theirs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfadapt.extras import need

BRANCHES = (1, 2, 3, 4)
"""timm's indices of the four branches; 0 is the stem."""


class HRNetV2(nn.Module):
    """An HRNet with the V2 head: all branches at the highest resolution, two 1x1 convolutions.

    Args:
        backbone: ``hrnet_w18``, ``hrnet_w48`` or another HRNet of timm.
        num_classes: Number of classes.
        corners: Whether upsampling aligns the corners of the maps: ``aligned`` or ``free``.
    """

    def __init__(self, backbone: str, num_classes: int, corners: str = "aligned") -> None:
        super().__init__()
        self.aligned = corners == "aligned"
        self.backbone = branches = hrnet(backbone)
        for module in self.backbone.modules():
            if isinstance(module, nn.Upsample):
                module.mode, module.align_corners = "bilinear", self.aligned
        width = sum(branches.feature_info.channels())
        self.head = nn.Sequential(
            nn.Conv2d(width, width, kernel_size=1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, num_classes, kernel_size=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores ``(B, C, H, W)`` for images whose sides are multiples of 32."""
        first, *others = self.backbone(x)
        others = [self._resized(branch, first.shape[-2:]) for branch in others]
        return self._resized(self.head(torch.cat((first, *others), dim=1)), x.shape[-2:])

    def _resized(self, maps: Tensor, size: torch.Size) -> Tensor:
        return F.interpolate(maps, size, mode="bilinear", align_corners=self.aligned)


def hrnet(name: str, *, pretrained: bool = False) -> Any:
    """Return timm's HRNet as a backbone that gives its four branches."""
    return need("timm", "models").create_model(
        name, pretrained=pretrained, features_only=True, feature_location="", out_indices=BRANCHES
    )
