"""Create a network by name, with weights from a file if wanted."""

import os
from collections.abc import Sequence

from torch import nn

from selfadapt.labels import class_names
from selfadapt.models.checkpoint import load_weights
from selfadapt.models.spec import ModelSpec


def create_model(
    name: str,
    *,
    classes: int | str | Sequence[str] = "cityscapes-19",
    weights: str | os.PathLike[str] | None = None,
    **options: str,
) -> nn.Module:
    """Create a network of our own, in evaluation mode.

    Args:
        name: A name in ``MODELS``.
        classes: Number of classes, the name of a class space, or the class names.
        weights: File with weights: of the whole network, or of its backbone alone.
        **options: Options of the architecture, such as ``style="caffe"``.

    Returns:
        The network. It carries ``spec`` (name, classes, options) and ``interface``
        (preprocessing), which ``save_model`` writes beside the weights.

    Example:
        >>> model = create_model("deeplabv1_resnet50", classes=3, style="caffe")
        >>> model.spec.classes
        ('class 0', 'class 1', 'class 2')
    """
    model = ModelSpec(name, class_names(classes), options).build()
    if weights is not None:
        load_weights(model, weights)
    return model
