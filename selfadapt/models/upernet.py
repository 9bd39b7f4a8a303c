"""UPerNet on Swin-T: pyramid pooling and a feature pyramid over a transformer (Xiao et al., 2018).

The network is segmentation-models-pytorch's, with timm's Swin set to take images of any size. Swin
normalises with LayerNorm, which keeps no statistics of the source domain: SaN acts on the decoder.
"""

from torch import nn

from selfadapt.optional import need

SWIN_TINY = "swin_tiny_patch4_window7_224"
ANY_SIZE = {"strict_img_size": False, "always_partition": True}


def upernet_swin_tiny(num_classes: int) -> nn.Module:
    """Return UPerNet with 512 decoder channels, as in the Swin paper."""
    smp = need("segmentation_models_pytorch", "models")
    return smp.UPerNet(
        encoder_name=f"tu-{SWIN_TINY}", encoder_weights=None, decoder_channels=512,
        classes=num_classes, **ANY_SIZE,
    )  # fmt: skip


def swin_tiny(*, pretrained: bool = False) -> nn.Module:
    """Return the backbone alone, under the names it has inside UPerNet."""
    return need("timm", "models").create_model(
        SWIN_TINY, pretrained=pretrained, features_only=True, **ANY_SIZE
    )
