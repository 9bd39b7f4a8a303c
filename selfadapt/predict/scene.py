"""Large and georeferenced images: segmented in tiles where they do not fit whole."""

import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image as PILImage

from selfadapt.adapted import AdaptError
from selfadapt.data.reading import read_image_size
from selfadapt.files import make_folder
from selfadapt.images import Image, label_image
from selfadapt.labels import Classes, predicted_colors, predicted_names
from selfadapt.method import Method
from selfadapt.methods import Segments
from selfadapt.models.spec import fingerprint
from selfadapt.modes import MAX_PIXELS, size_within
from selfadapt.predict.inputs import Input
from selfadapt.predict.outputs import (
    DEFAULT,
    Masks,
    check_classes,
    new_paths,
    pictures_of,
    write_classes,
    write_png,
    write_probs,
)
from selfadapt.predict.stream import Segmented
from selfadapt.result import Result
from selfadapt.scenes import (
    RasterReader,
    SceneMaps,
    WindowReader,
    blocks,
    check_bands,
    nearest,
    open_scene,
    segment_tiles,
    segment_whole,
)
from selfadapt.scenes.geotiff import write_geotiff
from selfadapt.views import Size

Large = Literal["tiles", "shrink"]
LARGE_FACTOR = 4
"""Images of more than this many times ``max_pixels``, or its default where that is more, are
segmented in tiles unless asked otherwise."""
PICTURES = ("color", "overlay", "panel")
"""Outputs for people, which are reduced to two megapixels; others have the size of the scene."""
ShowTiles = Callable[[int, int], None]
"""Called with the numbers of finished and of all tiles."""


@dataclass(frozen=True, kw_only=True)
class SceneResult:
    """A scene whose outputs are written."""

    paths: dict[str, Path]
    """The files by kind."""
    height: int
    width: int
    shares: list[float]
    """Fraction of pixels of each class, of those that have data."""
    quality: float | None
    """How good the label probably is, see ``Result``."""
    notes: tuple[str, ...]
    """What a user should know about this result."""
    seconds: float
    """Time the call took."""


def segment_scene(
    method: Method,
    image: Image,
    folder: str | os.PathLike[str],
    *,
    name: str | None = None,
    outputs: Sequence[str] = DEFAULT,
    classes: Classes | None = None,
    bands: Sequence[int] | None = None,
    large: Large = "tiles",
    overwrite: bool = False,
    show: ShowTiles = lambda done, total: None,
) -> SceneResult:
    """Segment an image of any size, and write what ``selfadapt predict`` writes of it.

    An image of more than ``max_pixels`` is adapted to once and segmented in tiles. A call for a
    file that was killed goes on where it was when it is made again. A GeoTIFF gives GeoTIFF files.

    Args:
        method: The method.
        image: The image: a GeoTIFF, which is read in windows, or anything else that methods take.
        folder: Where to write; it is made if need be.
        name: What the names of the files start with. None: the name of the image file.
        outputs: Kinds of output, see ``selfadapt predict``.
        classes: Names of the classes, or colours by name. None: as the network knows them.
        bands: Indices of the bands of a GeoTIFF to take, from 1. None: red, green and blue.
        large: ``tiles``; or ``shrink``: scale the image down to ``max_pixels``.
        overwrite: Replace files that are there.
        show: Called with the numbers of finished and of all tiles.

    Raises:
        ValueError: The image cannot be read, or the method cannot segment tiles.
    """
    path = Path(image) if isinstance(image, str | os.PathLike) else None
    if large not in ("tiles", "shrink"):
        raise ValueError(f"large must be tiles or shrink, got {large!r}")
    channels = method.interface.channels or 3
    classes = classes or getattr(getattr(method.model, "spec", None), "classes", None)
    folder = Path(folder)
    with open_scene(image, channels, bands) as scene:
        base, paths = new_paths(
            folder, name, image, outputs, raster=isinstance(scene, RasterReader),
            overwrite=overwrite,
        )  # fmt: skip
        if classes is not None:
            check_classes(
                folder, tuple(classes), predicted_colors(classes, len(classes)),
                overwrite=overwrite,
            )  # fmt: skip
        settings = f"{fingerprint(method.model)} {method!r} {bands}"  # another one starts again
        stamp = f"{Input(path).stamp() if path else secrets.token_hex()} {settings}"
        work = base.with_name(f".{base.name}.tiles")
        result = write_scene(method, scene, paths, work, classes, large, stamp=stamp, show=show)
    names = predicted_names(classes, len(result.shares))
    colors = predicted_colors(classes, len(names))
    check_classes(folder, names, colors, overwrite=overwrite)
    write_classes(folder, names, colors)
    return result


class LargeImages:
    """How ``predict`` deals with large and with georeferenced images.

    Args:
        method: The method.
        large: What to do with images of more than ``max_pixels``. None: tiles for those of more
            than eight megapixels, if the method can; the others are scaled down.
        bands: Indices of the bands to take of georeferenced images.
    """

    def __init__(
        self, method: Segments, large: Large | None = None, bands: Sequence[int] | None = None
    ) -> None:
        if large not in (None, "tiles", "shrink"):
            raise ValueError(f"--large must be tiles or shrink, got {large!r}")
        has_budget = getattr(method, "budget_ms", None) is not None
        self._has_tiles = isinstance(method, Method) and method.is_single_network and not has_budget
        if large == "tiles" and not self._has_tiles:
            raise ValueError(
                "--large tiles needs a method whose prediction is that of one network, not a mean "
                f"over several, and no time budget; got {type(method).__name__}"
            )
        self.channels = method.interface.channels or 3  # type: ignore[attr-defined]
        if bands is not None:
            check_bands(bands, self.channels)
        self.method, self.large, self.bands = method, large, bands

    def max_pixels(self) -> float:
        """Return the number of pixels beyond which an image is segmented in tiles."""
        if not self._has_tiles or not isinstance(self.method, Method) or self.large == "shrink":
            return inf
        if self.large is None and self.method.mode == "official":
            return inf  # the released code scales down
        if self.large == "tiles":
            return self.method.max_pixels
        return LARGE_FACTOR * max(self.method.max_pixels, MAX_PIXELS)  # fewer are for speed

    def is_scene(self, item: Input) -> bool:
        """Return True if a file is georeferenced, or to be segmented in tiles."""
        if not item.path.is_file():  # a pipe would block
            return False
        try:
            return item.is_raster or prod(read_image_size(item.path)) > self.max_pixels()
        except (ValueError, OSError):  # reported when it is read
            return False

    def segment(
        self,
        item: Input,
        paths: dict[str, Path],
        work: Path,
        classes: Classes | None,
        stamp: str,
        show: ShowTiles,
    ) -> Segmented:
        """Segment a file that ``is_scene`` and write its outputs, see ``write_scene``."""
        with open_scene(item.path, self.channels, self.bands) as scene:
            large = self.large if prod(scene.size) > self.max_pixels() else "shrink"
            result = write_scene(
                self.method, scene, paths, work, classes, large, stamp=stamp, show=show
            )
        maps = torch.empty(len(result.shares), 0, 0)
        summary = Result(
            probs=maps, quality=result.quality, notes=result.notes, seconds=result.seconds
        )
        return Segmented(summary, result.width, result.height, result.shares)


def write_scene(
    method: Segments,
    scene: WindowReader,
    paths: dict[str, Path],
    work: Path,
    classes: Classes | None,
    large: Large | None,
    *,
    stamp: str,
    show: ShowTiles,
) -> SceneResult:
    """Segment a scene and write its outputs.

    Args:
        method: The method.
        scene: The scene.
        paths: Output paths by kind.
        work: Folder for what is needed to go on; it is removed at the end.
        classes: Names of the classes, with colours if they are a mapping.
        large: What to do if the scene does not fit whole; None: tiles if the method can.
        stamp: Text that changes when the scene does.
        show: Called with the numbers of finished and of all tiles.
    """
    start = time.perf_counter()
    height, width = scene.size
    notes: tuple[str, ...] = ()
    maps = None
    is_whole = not isinstance(method, Method) or height * width <= method.max_pixels
    if isinstance(method, Method) and large != "shrink" and not is_whole:
        if "probs" in paths:
            raise ValueError(
                "probs are written of images that are segmented whole, not in tiles: leave out "
                "probs, or use --large shrink"
            )
        try:
            maps = segment_tiles(method, scene, work, stamp=stamp, show=show)
        except ValueError as error:
            shutil.rmtree(work, ignore_errors=True)
            if large == "tiles" or not isinstance(error, AdaptError):
                raise
            notes = (f"not segmented in tiles: {error}",)
    maps = segment_whole(method, scene) if maps is None else maps
    make_folder(next(iter(paths.values())).parent)
    size = size_within(scene.size, MAX_PIXELS)
    if _write(maps, scene, paths, work, classes, size) and size != scene.size:
        notes += (f"pictures are reduced to {size[1]}x{size[0]}, label and confidence are not",)
    shares = _shares(maps, scene)
    shutil.rmtree(work, ignore_errors=True)
    return SceneResult(
        paths=paths, height=height, width=width, shares=shares, quality=maps.quality,
        notes=(*maps.notes, *notes), seconds=time.perf_counter() - start,
    )  # fmt: skip


def _write(
    maps: SceneMaps,
    scene: WindowReader,
    paths: dict[str, Path],
    work: Path,
    classes: Classes | None,
    size: Size,
) -> bool:
    """Write the outputs of a scene, pictures at a size; return True if there are pictures."""
    names = predicted_names(classes, maps.num_classes)
    colors = predicted_colors(classes, maps.num_classes)
    nodata = 255 if maps.num_classes <= 255 else 65535
    if isinstance(scene, RasterReader):
        if "label" in paths:
            write_geotiff(
                maps.label, paths["label"], scene, work, nodata=nodata, names=names, colors=colors
            )
        if "confidence" in paths:
            write_geotiff(maps.confidence, paths["confidence"], scene, work, nodata=0)
    else:
        if "label" in paths:
            label = label_image(torch.from_numpy(np.asarray(maps.label)), colors)
            write_png(label, paths["label"], "label")
        if "confidence" in paths:
            picture = PILImage.fromarray(maps.confidence)
            write_png(picture, paths["confidence"], "confidence")
    if "probs" in paths and maps.probs is not None:
        write_probs(maps.probs, names, paths["probs"])
    kinds = [kind for kind in paths if kind in PICTURES]
    if kinds:
        small, valid = nearest(maps.label, size), scene.valid(scene.whole, size)
        if valid is not None and maps.num_classes <= 255:
            small[~valid.numpy()] = nodata  # black
        confidence = torch.from_numpy(nearest(maps.confidence, size))
        source = None if maps.source is None else torch.from_numpy(nearest(maps.source, size))
        masks = Masks(
            torch.from_numpy(small), confidence, names, source, colors, adapted=maps.is_adapted
        )
        for kind, shown in pictures_of(masks, scene.overview(MAX_PIXELS), kinds).items():
            write_png(shown, paths[kind], kind)
    return bool(kinds)


def _shares(maps: SceneMaps, scene: WindowReader) -> list[float]:
    """Return the fraction of pixels of each class, of those that have data."""
    counts = np.zeros(maps.num_classes, np.int64)
    for window in blocks(scene.size, 4096):
        values, valid = maps.label[window.slices], scene.valid(window)
        used = values.ravel() if valid is None else values[valid.numpy()]
        counts += np.bincount(used, minlength=maps.num_classes)
    total = max(1, int(counts.sum()))
    return [round(count / total, 6) for count in counts.tolist()]
