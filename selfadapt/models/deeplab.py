"""DeepLabv1 on a ResNet, as the paper uses it: dilated stages and one 1x1 convolution.

The output stride is 8. Three layouts of a dilated ResNet are in use; weights trained with one load
into another without an error, but lose accuracy:

    dilation in layer3, layer4      first block    other blocks
    released code                   1, 1           2, 4
    torchvision                     1, 2           2, 4
    every block                     2, 4           2, 4
"""

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet
from torchvision.models.resnet import BasicBlock, ResNet

from selfadapt.optional import import_optional

Style = Literal["pytorch", "caffe"]
Dilation = Literal["released", "torchvision", "every block"]

FIRST_BLOCK = {"released": (1, 1), "torchvision": (1, 2), "every block": (2, 4)}


class DeepLabV1(nn.Module):
    """A dilated ResNet with a linear classifier at each position.

    Args:
        backbone: ``resnet50``, ``resnet101`` or ``resnet18_slim``.
        num_classes: Number of classes.
        style: Which convolution of a stage's first block has the stride: the 3x3 (``pytorch``) or
            the 1x1 before it (``caffe``).
        dilation: Layout of the dilated stages.
        corners: Upsample with ``align_corners=True`` (``aligned``) or ``False`` (``free``).
    """

    def __init__(
        self,
        backbone: str,
        num_classes: int,
        style: Style = "pytorch",
        dilation: Dilation = "released",
        corners: str = "aligned",
    ) -> None:
        super().__init__()
        self.align_corners = corners == "aligned"
        if backbone == "resnet18_slim":
            self.backbone: ResNet = SlimResNet18()
        else:
            self.backbone = dilated_resnet(backbone, style, dilation)
        self.cls_head = nn.Conv2d(self.backbone.inplanes, num_classes, kernel_size=1)
        nn.init.normal_(self.cls_head.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores ``(B, C, H, W)`` for images ``(B, 3, H, W)``."""
        net = self.backbone
        features = net.maxpool(net.relu(net.bn1(net.conv1(x))))
        features = net.layer4(net.layer3(net.layer2(net.layer1(features))))
        scores = self.cls_head(features).to(x.dtype)  # under autocast: do not upsample in 16 bits
        size = x.shape[-2:]
        return F.interpolate(scores, size, mode="bilinear", align_corners=self.align_corners)


def dilated_resnet(name: str, style: Style, dilation: Dilation) -> ResNet:
    """Return torchvision's ResNet at output stride 8, without its classifier."""
    net: ResNet = getattr(resnet, name)(replace_stride_with_dilation=[False, True, True])
    del net.fc, net.avgpool
    for stage, rate in zip((net.layer3, net.layer4), FIRST_BLOCK[dilation], strict=True):
        stage[0].conv2.dilation = stage[0].conv2.padding = (rate, rate)
    if style == "caffe":
        first = net.layer2[0]
        first.conv1.stride, first.conv2.stride = first.conv2.stride, first.conv1.stride
    return net


class SlimResNet18(ResNet):
    """ResNet-18 of half the width at output stride 8, without its classifier."""

    def __init__(self) -> None:
        super().__init__(BasicBlock, [2, 2, 2, 2])
        del self.fc, self.avgpool
        for stage, rate in ((self.layer3, 2), (self.layer4, 4)):
            first: Any = stage[0]
            first.conv1.stride = first.downsample[0].stride = (1, 1)
            for block in stage:
                block.conv2.dilation = block.conv2.padding = (rate, rate)

    def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Sequential:
        return super()._make_layer(block, planes // 2, *args, **kwargs)


def deeplabv3plus(backbone: str, num_classes: int) -> nn.Module:
    """Return segmentation-models-pytorch's DeepLabv3+ at output stride 8, as the paper uses it.

    The ASPP has dense convolutions, as in the released code; the last 3x3 is separable here.
    """
    smp = import_optional("segmentation_models_pytorch", "models")
    return smp.DeepLabV3Plus(
        encoder_name=backbone, encoder_weights=None, encoder_output_stride=8,
        decoder_aspp_separable=False, classes=num_classes,
    )  # fmt: skip
