"""Output files for a result: masks for programs, pictures for people."""

import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image as PILImage
from torch import Tensor

from selfadapt.classfile import classes_json
from selfadapt.files import atomic_write, make_folder, would_be_replaced
from selfadapt.images import Image, colored, label_image, overlay, rgb_image
from selfadapt.labels import Classes, Color, predicted_colors, predicted_names
from selfadapt.patterns import alternatives
from selfadapt.predict.legend import heading, legend, legend_below, text_size
from selfadapt.result import ResizedMap, Result, best_of, map_parts
from selfadapt.scenes.geotiff import categories_path

OUTPUTS = {
    "label": "the class of each pixel, as a number",
    "color": "the class of each pixel, in its colour",
    "overlay": "these colours laid over the image",
    "confidence": "how sure the network is of each pixel, from black to white",
    "panel": "image, source prediction, prediction and confidence, side by side",
    "probs": "the probability of every class at each pixel, as a NumPy file (.npz)",
}
"""Kinds of output: for NAME.jpg, NAME_label.png and so on."""
DEFAULT = ("label", "color", "overlay", "confidence")
SHOW_IMAGE = {"overlay", "panel"}
IMAGES_ONLY = {"probs"}
PHOTOGRAPHIC = {"overlay", "confidence", "panel"}
QUICK = {"compress_level": 1, "compress_type": zlib.Z_RLE}
"""PNG compression of photographic content: 3 to 5 times as fast, up to 25 % larger."""
CLASSES, LEGEND = "classes.json", "legend.png"
"""Written once per folder: index, name and colour of each class, and the same as a picture."""


@dataclass(frozen=True)
class Masks:
    """The parts of a result that are written: two or three bytes per pixel, on the CPU."""

    label: Tensor
    """Most likely class ``(H, W)``, uint8; uint16 for more than 256 classes."""
    confidence: Tensor
    """Its probability ``(H, W)``, from 0 to 255."""
    names: tuple[str, ...]
    """Names of the classes."""
    source: Tensor | None = None
    """Most likely class for the network as trained ``(H, W)``, if requested."""
    colors: Sequence[Color] = ()
    """A colour for each class; empty: the default colours."""
    probs: Tensor | ResizedMap | None = None
    """Class probabilities ``(C, H, W)``, if requested."""
    adapted: bool = False
    """The network took gradient steps."""
    ready: torch.cuda.Event | None = None
    """Tells when a GPU has written the masks, where it was not waited for."""

    def __post_init__(self) -> None:
        if not self.colors:
            object.__setattr__(self, "colors", predicted_colors(self.names, len(self.names)))

    def wait(self) -> None:
        """Wait until the masks are there."""
        if self.ready is not None:
            self.ready.synchronize()

    def shares(self) -> list[float]:
        """Return the fraction of pixels of each class."""
        counts = np.bincount(self.label.numpy().ravel(), minlength=len(self.names))
        return [round(float(share), 6) for share in counts / self.label.numel()]


def check_outputs(outputs: Sequence[str]) -> tuple[str, ...]:
    """Return kinds of output in a fixed order; raise ValueError for unknown ones."""
    for kind in outputs:
        if kind not in OUTPUTS:
            raise ValueError(f"unknown output {kind!r}{alternatives(kind, OUTPUTS)}")
    if not outputs:
        raise ValueError(f"outputs must name at least one of {', '.join(OUTPUTS)}")
    return tuple(kind for kind in OUTPUTS if kind in outputs)


def output_paths(
    base: Path, outputs: Sequence[str] = DEFAULT, *, video: bool = False, raster: bool = False
) -> dict[str, Path]:
    """Return the output paths of an image, video or georeferenced image by kind.

    The labels of a video are a folder of PNGs, one for each frame; its other outputs are videos.
    """
    endings = dict.fromkeys(outputs, ".mp4" if video else ".png")
    endings |= {"label": ""} if video else {"probs": ".npz"}
    endings |= dict.fromkeys(("label", "confidence"), ".tif") if raster else {}
    return {kind: base.with_name(f"{base.name}_{kind}{endings[kind]}") for kind in outputs}


def masks_of(
    result: Result, classes: Classes | None = None, *, probs: bool = False, wait: bool = True
) -> Masks:
    """Return the parts of a result that are written, computed on the device of the result.

    Args:
        result: The result.
        classes: Names of its classes, with colours if it is a mapping.
        probs: Include the probabilities. Those of large images stay at their stored size, and are
            resized while they are written, a few classes at a time.
        wait: Wait for a GPU. False: ``Masks.wait`` does.
    """
    names = predicted_names(classes, result.num_classes)
    kind = torch.uint8 if len(names) <= 256 else torch.uint16
    confidence, label = best_of(result.stored_probs)
    source, ready = result.source_label, None
    fetch = partial(Tensor.to, device="cpu", non_blocking=not wait)
    masks = fetch(label.to(kind)), fetch((confidence.clamp(0, 1) * 255).round().byte())
    source = None if source is None else fetch(source.to(kind))
    if label.is_cuda and not wait:
        ready = torch.cuda.Event(blocking=True)
        ready.record(torch.cuda.current_stream(label.device))
    return Masks(
        label=masks[0],
        confidence=masks[1],
        names=names,
        source=source,
        ready=ready,
        colors=predicted_colors(classes, len(names)),
        probs=result.stored_probs.cpu() if probs else None,
        adapted=bool(result.losses),
    )


def pictures_of(
    masks: Masks, image: Image | None, outputs: Sequence[str]
) -> dict[str, PILImage.Image]:
    """Return the pictures of an image by kind."""
    pictures: dict[str, PILImage.Image] = {}
    shown = None
    if set(outputs) & SHOW_IMAGE:
        if image is None:
            raise ValueError(f"the image is needed to write {' and '.join(sorted(SHOW_IMAGE))}")
        shown = rgb_image(image, (masks.label.shape[0], masks.label.shape[1]))
    if "label" in outputs:
        pictures["label"] = label_image(masks.label, masks.colors)
    if "confidence" in outputs:
        pictures["confidence"] = PILImage.fromarray(masks.confidence.numpy())
    if {"color", "overlay"} & set(outputs):
        pictures["color"] = colored(masks.label, masks.colors)
    if "overlay" in outputs and shown is not None:
        pictures["overlay"] = overlay(shown, pictures["color"])
    if "panel" in outputs and shown is not None:
        pictures["panel"] = panel(masks, shown, masks.names, masks.colors)
    return {kind: pictures[kind] for kind in outputs if kind in pictures}


def panel(
    masks: Masks | None, image: PILImage.Image, names: Sequence[str], colors: Sequence[Color]
) -> PILImage.Image:
    """Return photo, source prediction, prediction and confidence with headings and a legend.

    Missing parts are black. Panels of images of one size with the same classes have one size, as
    the frames of a video must.
    """
    shown = dict.fromkeys(("photo", "as trained", "prediction", "confidence"))
    pictures: dict[str, PILImage.Image | None] = {**shown, "photo": image}
    labels: list[np.ndarray] = []
    if masks is not None:
        labels = [label.numpy() for label in (masks.source, masks.label) if label is not None]
        pictures["prediction"] = colored(masks.label, colors)
        pictures["confidence"] = PILImage.fromarray(masks.confidence.numpy()).convert("RGB")
        if masks.source is not None:
            pictures["as trained"] = colored(masks.source, colors)
    size = text_size(image.height)
    black = PILImage.new("RGB", image.size)
    columns = []
    for text, picture in pictures.items():
        if text == "prediction" and masks is not None and masks.adapted:
            text = "adapted"
        columns.append(below(heading(text, image.width, size), picture or black))
    row = side_by_side(*columns)
    return below(row, legend_below(names, colors, labels, row.width, size))


def side_by_side(*pictures: PILImage.Image) -> PILImage.Image:
    """Return pictures of the same height in a row."""
    width = sum(picture.width for picture in pictures)
    row = PILImage.new("RGB", (width, pictures[0].height))
    left = 0
    for picture in pictures:
        row.paste(picture, (left, 0))
        left += picture.width
    return row


def below(*pictures: PILImage.Image) -> PILImage.Image:
    """Return pictures of the same width in a column."""
    height = sum(picture.height for picture in pictures)
    column = PILImage.new("RGB", (pictures[0].width, height))
    top = 0
    for picture in pictures:
        column.paste(picture, (0, top))
        top += picture.height
    return column


def write_result(
    result: Result | Masks,
    image: Image | None,
    base: Path,
    classes: Classes | None = None,
    outputs: Sequence[str] = DEFAULT,
) -> None:
    """Write some kinds of output of a result, see ``OUTPUTS``; overlay and panel need the image."""
    masks = result
    if isinstance(result, Result):
        masks = masks_of(result, classes, probs="probs" in outputs)
    assert isinstance(masks, Masks)
    make_folder(base.parent)
    paths = output_paths(base, outputs)
    for kind, picture in pictures_of(masks, image, outputs).items():
        write_png(picture, paths[kind], kind)
    if "probs" in outputs and masks.probs is not None:
        write_probs(masks.probs, masks.names, paths["probs"])


def save_result(
    result: Result,
    folder: Path,
    image: Image | None,
    *,
    name: str | None = None,
    outputs: Sequence[str] | None = None,
    classes: Classes | None = None,
    overwrite: bool = False,
) -> dict[str, Path]:
    """Write a result and its classes to a folder; see ``Result.save``."""
    if outputs is None:
        outputs = [kind for kind in DEFAULT if image is not None or kind not in SHOW_IMAGE]
    names = predicted_names(classes, result.num_classes)
    colors = predicted_colors(classes, len(names))
    base, paths = new_paths(folder, name, image, outputs, overwrite=overwrite)
    check_classes(folder, names, colors, overwrite=overwrite)
    write_result(result, image, base, classes, tuple(paths))
    write_classes(folder, names, colors)
    return paths


def new_paths(
    folder: Path,
    name: str | None,
    image: Image | None,
    outputs: Sequence[str],
    *,
    raster: bool = False,
    overwrite: bool,
) -> tuple[Path, dict[str, Path]]:
    """Return the prefix and the paths of the outputs of an image, which replace no file.

    Args:
        folder: The folder.
        name: Prefix of the names; None: the name of the image file.
        image: The image.
        outputs: Kinds of output, or one of them.
        raster: The image is georeferenced.
        overwrite: They may replace files.
    """
    outputs = check_outputs([outputs] if isinstance(outputs, str) else outputs)
    if name is None:
        name = Path(image).stem if isinstance(image, str | os.PathLike) else "image"
    if name != Path(name).name or not name:
        raise ValueError(f"name must be a prefix of file names without folders, got {name!r}")
    paths = output_paths(folder / name, outputs, raster=raster)
    for path in (*paths.values(), *map(categories_path, paths.values() if raster else ())):
        if path.exists() and not overwrite:
            raise would_be_replaced(path)
    return folder / name, paths


def check_classes(
    folder: Path, names: Sequence[str], colors: Sequence[Color], *, overwrite: bool
) -> None:
    """Raise FileExistsError if the classes of a folder would be replaced by others."""
    path = folder / CLASSES
    if path.exists() and not overwrite and not _has_text(path, classes_json(names, colors)):
        raise would_be_replaced(path)


def write_png(picture: PILImage.Image, path: Path, kind: str) -> None:
    """Write a picture of some kind of output as PNG."""
    with atomic_write(path) as temporary:
        picture.save(temporary, format="PNG", **(QUICK if kind in PHOTOGRAPHIC else {}))


def write_probs(probs: Tensor | ResizedMap, names: Sequence[str], path: Path) -> None:
    """Write ``probs`` ``(C, H, W)`` as float16 and the names of the classes to an ``.npz`` file."""
    with atomic_write(path) as temporary, open_npz(temporary) as archive:
        add_probs(archive, probs)
        add_array(archive, "classes", np.array(names))


def open_npz(file: Path | IO[bytes]) -> zipfile.ZipFile:
    """Return a new ``.npz`` file with fast compression."""
    return zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1)


def add_array(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    """Add an array to an ``.npz`` file."""
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, array, allow_pickle=False)


def add_probs(archive: zipfile.ZipFile, probs: Tensor | ResizedMap) -> None:
    """Add ``probs`` ``(C, H, W)`` as float16 to an ``.npz`` file, a few classes at a time."""
    header: dict[str, Any] = {"descr": "<f2", "fortran_order": False, "shape": tuple(probs.shape)}
    with archive.open("probs.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for part in map_parts(probs):
            levels = part.to(torch.float16).cpu().contiguous().numpy()
            file.write(levels.astype("<f2", copy=False).data)


def write_classes(folder: Path, names: Sequence[str], colors: Sequence[Color]) -> None:
    """Write the index, name and colour of each class, as JSON and as a legend."""
    text = classes_json(names, colors)
    if (folder / LEGEND).exists() and _has_text(folder / CLASSES, text):
        return
    write_png(legend(names, colors), folder / LEGEND, "legend")
    with atomic_write(folder / CLASSES) as temporary:
        temporary.write_text(text)


def _has_text(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(errors="replace") == text
