"""Pictures of the demo as data URIs: an image before and after adaptation."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image as PILImage
from torch import Tensor

from selfadapt.images import colored, data_uri, encode, to_pil
from selfadapt.labels import class_colors
from selfadapt.pseudo import IGNORE
from selfadapt.result import Result

RAMP = ((24, 20, 66), (38, 130, 142), (250, 226, 90))
"""Colours of confidence 0, 0.5 and 1."""
FIXED, BROKEN, CHANGED, UNCHANGED = (46, 160, 67), (215, 58, 73), (230, 160, 40), (128, 128, 128)


class Picture(NamedTuple):
    """A caption, and a picture as a data URI."""

    text: str
    source: str


def comparison_pictures(
    image: Tensor,
    before: Result,
    after: Result,
    classes: Sequence[str],
    label: Tensor | None = None,
) -> list[Picture]:
    """Return pictures of image, predictions, confidence, change, and the ground truth if given.

    Args:
        image: Raw ``(3, H, W)``.
        before: Result of the network as trained.
        after: Result after adaptation.
        classes: Names of the classes.
        label: True classes ``(H, W)``.
    """
    colors = class_colors(classes)
    pictures = [
        Picture("image", _jpeg(to_pil(image))),
        Picture("network as trained", _png(colored(before.label, colors))),
        Picture("after self-adaptation", _png(colored(after.label, colors))),
    ]
    if label is not None:
        pictures.append(Picture("ground truth", _png(colored(label, colors))))
    pictures.append(Picture("confidence after, bright: sure", _jpeg(confidence(after.confidence))))
    text = "changed pixels, orange"
    if label is not None:
        text = "change, green: to right, red: to wrong, orange: from wrong to wrong"
    return [*pictures, Picture(text, _png(change(before.label, after.label, label)))]


def confidence(values: Tensor) -> PILImage.Image:
    """Color a confidence map ``(H, W)`` in [0, 1] from dark to bright.

    Example:
        >>> confidence(torch.tensor([[0.0, 0.5, 1.0]])).getpixel((1, 0))
        (38, 130, 142)
    """
    levels = values.cpu().double().numpy()
    stops = np.linspace(0, 1, len(RAMP))
    bands = [np.interp(levels, stops, band) for band in zip(*RAMP, strict=True)]
    return PILImage.fromarray(np.stack(bands, axis=-1).round().astype(np.uint8))


def change(before: Tensor, after: Tensor, label: Tensor | None = None) -> PILImage.Image:
    """Color where two labels differ; with ground truth, also whether for better or worse."""
    kind = (before != after).long()
    if label is not None:
        kind = torch.where((after == label) & (before != label), 2, kind)
        kind = torch.where((after != label) & (before == label) & (label != IGNORE), 3, kind)
    return colored(kind, (UNCHANGED, CHANGED, FIXED, BROKEN))


def strip(pictures: Sequence[Picture], *, labelled: bool) -> list[Picture]:
    """Select image, before, after, and ground truth or change from ``comparison_pictures``."""
    return [*pictures[:3], pictures[3] if labelled else pictures[-1]]


def visible_classes(labels: Iterable[Tensor], classes: Sequence[str]) -> set[str]:
    """Return the names of the classes that occur in labels."""
    indices = torch.cat([label.flatten().unique() for label in labels])
    return {classes[index] for index in indices.tolist()}


def legend(
    classes: Sequence[str], shown: Iterable[str] | None = None
) -> list[tuple[str, tuple[int, int, int]]]:
    """Return the classes to show in the legend, each with its colour."""
    colors = dict(zip(classes, class_colors(classes), strict=True))
    return [(name, colors[name]) for name in (classes if shown is None else shown)]


def _png(picture: PILImage.Image) -> str:
    return data_uri(encode(picture, "PNG", optimize=True), "PNG")


def _jpeg(picture: PILImage.Image) -> str:
    return data_uri(encode(picture, "JPEG", quality=88), "JPEG")
