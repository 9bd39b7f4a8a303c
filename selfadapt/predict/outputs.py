"""What is written of a result: masks for programs, pictures for people."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image as PILImage
from torch import Tensor

from selfadapt.files import make_folder, written_whole
from selfadapt.images import Image, colored, load_image, overlay, to_pil
from selfadapt.labels import class_colors, predicted_names
from selfadapt.names import nearest
from selfadapt.result import Result

OUTPUTS = {
    "label": "the class of each pixel, as a number",
    "color": "the class of each pixel, in its colour",
    "overlay": "these colours laid over the image",
    "confidence": "how sure the network is of each pixel, from black to white",
    "panel": "image, source prediction, prediction and confidence, side by side",
}
"""What can be written for NAME.jpg: NAME_label.png and so on."""
DEFAULT = ("label", "color", "overlay", "confidence")
QUICK = {"overlay": 1, "confidence": 1, "panel": 1}
"""Compression of what varies as a photograph does: 3 to 5 times as fast, up to a quarter larger."""


@dataclass(frozen=True)
class Masks:
    """What is kept of a result: two or three bytes for each pixel, on the CPU."""

    label: Tensor
    """Most likely class ``(H, W)``, uint8; uint16 for more than 256 classes."""
    confidence: Tensor
    """Its probability ``(H, W)``, from 0 to 255."""
    names: tuple[str, ...]
    """The classes."""
    source: Tensor | None = None
    """Most likely class for the network as trained ``(H, W)``, if that was asked for."""

    def shares(self) -> list[float]:
        """Return the share of the pixels that each class has."""
        counts = np.bincount(self.label.numpy().ravel(), minlength=len(self.names))
        return [round(float(share), 6) for share in counts / self.label.numel()]


def check_outputs(outputs: Sequence[str]) -> tuple[str, ...]:
    """Return kinds of output in their usual order, or raise ValueError for what is none."""
    for kind in outputs:
        if kind not in OUTPUTS:
            raise ValueError(
                f"unknown output {kind!r};{nearest(kind, OUTPUTS)} known: {', '.join(OUTPUTS)}"
            )
    if not outputs:
        raise ValueError(f"outputs must name at least one of {', '.join(OUTPUTS)}")
    return tuple(kind for kind in OUTPUTS if kind in outputs)


def output_paths(
    base: Path, outputs: Sequence[str] = DEFAULT, *, video: bool = False
) -> dict[str, Path]:
    """Return the files written for one image or video, by what they show.

    The labels of a video are a folder of PNGs, one for each frame; all else of it is videos.
    """
    endings = dict.fromkeys(outputs, ".mp4" if video else ".png")
    if video:
        endings["label"] = ""
    return {kind: base.with_name(f"{base.name}_{kind}{endings[kind]}") for kind in outputs}


def masks_of(result: Result, classes: Sequence[str] | None = None) -> Masks:
    """Return what is written of a result; the work is done where the result is."""
    names = predicted_names(classes, len(result.probs))
    kind = torch.uint8 if len(names) <= 256 else torch.uint16
    confidence = (result.confidence.clamp(0, 1) * 255).round().byte()
    source = None
    if result.source_probs is not None:
        source = result.source_probs.argmax(dim=0).to(kind).cpu()
    return Masks(result.label.to(kind).cpu(), confidence.cpu(), names, source)


def pictures_of(masks: Masks, image: Image, outputs: Sequence[str]) -> dict[str, PILImage.Image]:
    """Return the pictures of an image, by what they show."""
    painted = colored(masks.label, class_colors(masks.names))
    pictures = {"color": painted}
    if "label" in outputs:
        pictures["label"] = PILImage.fromarray(masks.label.numpy())
    if "confidence" in outputs:
        pictures["confidence"] = PILImage.fromarray(masks.confidence.numpy())
    if "overlay" in outputs:
        pictures["overlay"] = overlay(_in_color(image), painted)
    if "panel" in outputs:
        pictures["panel"] = panel(masks, to_pil(_in_color(image)), painted)
    return {kind: pictures[kind] for kind in outputs}


def _in_color(image: Image) -> Tensor:
    """Return an image as it can be shown; of more channels than a picture has, the first three."""
    if isinstance(image, Tensor) and image.dim() == 3 and len(image) not in (1, 3, 4):
        image = image[:3] if len(image) > 3 else image[:1]
    return load_image(image)


def panel(masks: Masks, image: PILImage.Image, painted: PILImage.Image) -> PILImage.Image:
    """Return image, source prediction, prediction and confidence, side by side.

    What the network as trained predicts is black where there is nothing of it.
    """
    source = PILImage.new("RGB", image.size)
    if masks.source is not None:
        source = colored(masks.source, class_colors(masks.names))
    confidence = PILImage.fromarray(masks.confidence.numpy()).convert("RGB")
    return side_by_side(image, source, painted, confidence)


def side_by_side(*pictures: PILImage.Image) -> PILImage.Image:
    """Return pictures of the same height in a row."""
    row = PILImage.new("RGB", (sum(one.width for one in pictures), pictures[0].height))
    left = 0
    for one in pictures:
        row.paste(one, (left, 0))
        left += one.width
    return row


def write_result(
    result: Result | Masks,
    image: Image,
    base: Path,
    classes: Sequence[str] | None = None,
    outputs: Sequence[str] = DEFAULT,
) -> None:
    """Write what is asked for of a result: its label, colours, overlay, confidence or panel."""
    masks = masks_of(result, classes) if isinstance(result, Result) else result
    make_folder(base.parent)
    paths = output_paths(base, outputs)
    for kind, picture in pictures_of(masks, image, outputs).items():
        write_png(picture, paths[kind], kind)


def write_png(picture: PILImage.Image, path: Path, kind: str) -> None:
    """Write a picture that shows some kind of output."""
    level = {"compress_level": QUICK[kind]} if kind in QUICK else {}
    with written_whole(path) as aside:
        picture.save(aside, format="PNG", **level)
