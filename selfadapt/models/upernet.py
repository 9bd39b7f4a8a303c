"""UPerNet on Swin-T: pyramid pooling and a feature pyramid over a transformer (Xiao et al., 2018).

The network is that of segmentation-models-pytorch, with timm's Swin accepting images of any size.
Swin normalises with LayerNorm, which has no running statistics: SaN applies to the decoder only.
"""

from torch import nn

from selfadapt.optional import import_optional

SWIN_TINY = "swin_tiny_patch4_window7_224"
ANY_SIZE = {"strict_img_size": False, "always_partition": True}


def upernet_swin_tiny(num_classes: int) -> nn.Module:
    """Return UPerNet with 512 decoder channels, as in the Swin paper."""
    smp = import_optional("segmentation_models_pytorch", "models")
    return smp.UPerNet(
        encoder_name=f"tu-{SWIN_TINY}", encoder_weights=None, decoder_channels=512,
        classes=num_classes, **ANY_SIZE,
    )  # fmt: skip


def swin_tiny(*, pretrained: bool = False) -> nn.Module:
    """Return the backbone, with the parameter names it has in UPerNet."""
    return import_optional("timm", "models").create_model(
        SWIN_TINY, pretrained=pretrained, features_only=True, **ANY_SIZE
    )
