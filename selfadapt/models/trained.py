"""Published networks of torchvision and Hugging Face.

``open_model`` takes the addresses; weights are downloaded once, to the cache of the library.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

OTHER_NETWORKS = "for other kinds of images see selfadapt models --trained"


@dataclass(frozen=True)
class TrainedNetwork:
    """Facts about a published network, known before the download."""

    trained_on: str
    """Description of the training images."""
    num_classes: int
    megabytes: int
    """Size of the download in MB."""
    licence: str
    """Licence of the weights; the training images may have further terms."""
    purpose: str
    """What it segments."""


_COCO = "photographs of COCO, with the labels of Pascal VOC"
_CITYSCAPES = "photographs from a car by day in cities in Germany and around it (Cityscapes)"
_ADE20K = "photographs of all kinds, indoors and outdoors (ADE20K)"
_BSD = "BSD-3-Clause"
_NVIDIA = "NVIDIA Source Code License for SegFormer: non-commercial research and evaluation only"

TRAINED = {
    "torchvision:lraspp_mobilenet_v3_large": TrainedNetwork(
        _COCO, 21, 13, _BSD, "people, animals, vehicles, furniture: the smallest and fastest"
    ),
    "torchvision:deeplabv3_mobilenet_v3_large": TrainedNetwork(
        _COCO, 21, 44, _BSD, "people, animals, vehicles, furniture: fast on a CPU"
    ),
    "torchvision:deeplabv3_resnet50": TrainedNetwork(
        _COCO, 21, 168, _BSD, "people, animals, vehicles, furniture: accurate"
    ),
    "torchvision:deeplabv3_resnet101": TrainedNetwork(
        _COCO, 21, 245, _BSD, "people, animals, vehicles, furniture: the most accurate"
    ),
    "hf:nvidia/segformer-b0-finetuned-cityscapes-1024-1024": TrainedNetwork(
        _CITYSCAPES, 19, 15, _NVIDIA, "streets seen from a car: small and fast"
    ),
    "hf:nvidia/segformer-b2-finetuned-cityscapes-1024-1024": TrainedNetwork(
        _CITYSCAPES, 19, 110, _NVIDIA, "streets seen from a car: accurate"
    ),
    "hf:nvidia/segformer-b5-finetuned-cityscapes-1024-1024": TrainedNetwork(
        _CITYSCAPES, 19, 339, _NVIDIA, "streets seen from a car: the most accurate"
    ),
    "hf:nvidia/segformer-b0-finetuned-ade-512-512": TrainedNetwork(
        _ADE20K, 150, 15, _NVIDIA, "any scene, rooms and landscapes: small and fast"
    ),
    "hf:nvidia/segformer-b2-finetuned-ade-512-512": TrainedNetwork(
        _ADE20K, 150, 110, _NVIDIA, "any scene, rooms and landscapes: accurate"
    ),
    "hf:openmmlab/upernet-convnext-tiny": TrainedNetwork(
        _ADE20K, 150, 241, "MIT", "any scene, rooms and landscapes: free to use"
    ),
    "hf:mattmdjaga/segformer_b2_clothes": TrainedNetwork(
        "photographs of people, for their clothes (ATR)", 18, 110,
        "MIT on its page; it was made from NVIDIA's SegFormer, which is non-commercial",
        "clothes, hair, face and limbs of people",
    ),
    "hf:restor/tcd-segformer-mit-b0": TrainedNetwork(
        "aerial images of 10 cm a pixel from all over the world (Restor TCD)", 2, 15,
        "made from NVIDIA's SegFormer and CC BY-NC images: non-commercial",
        "cover of trees seen from the air",
    ),
}  # fmt: skip
"""Address for ``open_model`` -> facts about the network."""


def trained_on(networks: Iterable[nn.Module]) -> list[str]:
    """Return a line for each description of training images that networks record."""
    specs = (getattr(network, "spec", None) for network in networks)
    texts = dict.fromkeys(text for spec in specs if (text := getattr(spec, "trained_on", "")))
    return [f"the network was trained on {text}" for text in texts]
