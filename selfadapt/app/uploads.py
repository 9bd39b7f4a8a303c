"""Uploaded images: validated by type and size before any pixel is decoded."""

import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from PIL import Image as PILImage
from PIL import UnidentifiedImageError
from PIL.TiffImagePlugin import (
    IMAGELENGTH,
    IMAGEWIDTH,
    TILELENGTH,
    TILEWIDTH,
    TiffImageFile,
)
from torch import Tensor

from selfadapt.app.limits import MAX_SCANS, MAX_SEGMENTS, MAX_TILES, MIN_SIDE, Limits
from selfadapt.images import encode, load_image, to_pil
from selfadapt.modes import size_within, within_budget
from selfadapt.views import Size, size_of

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
DAMAGED = "this image cannot be read; it may be cut off or damaged"
MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])", re.DOTALL)
"""A JPEG marker that has a segment, and the end of the image."""


@dataclass(frozen=True)
class Upload:
    """An uploaded image."""

    image: Tensor
    """The image to segment, raw ``(3, H, W)``, scaled down to ``max_pixels``."""
    size: Size
    """Height and width of the original image."""
    png: bytes | None = None
    """The original image as a PNG if browsers cannot show its format."""


def read_upload(path: str | os.PathLike[str], limits: Limits) -> Upload:
    """Read an uploaded image file; error messages do not contain its path.

    Raises:
        ValueError: The file is too large, too small or not an image.
    """
    with Path(path).open("rb") as file:
        image, kind = decode(file, limits)
    png = _as_png(image, limits) if kind == "TIFF" else None
    return Upload(within_budget(image, "paper", limits.max_pixels), size_of(image), png)


def decode(file: IO[bytes], limits: Limits) -> tuple[Tensor, str]:
    """Return the image in a file, raw ``(3, H, W)`` at its own size, and its format.

    Raises:
        ValueError: The file is too large, too small or not an image.
    """
    if (num_bytes := file.seek(0, os.SEEK_END)) > limits.num_bytes:
        raise ValueError(
            f"an image file may have {limits.megabytes:g} MB, this one has "
            f"{num_bytes / 2**20:.1f}; send a smaller one"
        )
    file.seek(0)
    _check_scans(file)
    file.seek(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PILImage.DecompressionBombWarning)
            with PILImage.open(file, formats=FORMATS) as picture:
                _check_pixels(picture, limits)
                if isinstance(picture, TiffImageFile):
                    _check_tiles(picture, limits)
                return _decoded(picture), str(picture.format)
    except UnidentifiedImageError as error:
        raise ValueError(
            f"this is not an image file that can be read; send {', '.join(FORMATS)}"
        ) from error
    except PILImage.DecompressionBombError as error:
        raise ValueError(_too_many(limits)) from error
    except OSError as error:
        raise ValueError(DAMAGED) from error


def _decoded(picture: PILImage.Image) -> Tensor:
    try:
        return load_image(picture)
    except Exception as error:  # decoders raise anything on damaged files
        raise ValueError(DAMAGED) from error


def _as_png(image: Tensor, limits: Limits) -> bytes:
    png = encode(to_pil(image), "PNG")
    if len(png) > limits.num_bytes:
        raise ValueError(
            f"this TIFF has more than {limits.megabytes:g} MB as a PNG; send a smaller one"
        )
    return png


def _check_scans(file: IO[bytes]) -> None:
    """Raise ValueError if a file is a JPEG of many scans, which would take minutes to decode."""
    if file.read(3) != b"\xff\xd8\xff":
        return
    content = b"\xff" + file.read()
    num_scans, position = 0, 0
    for _ in range(MAX_SEGMENTS):
        marker = MARKER.search(content, position)
        if marker is None or marker[1] == b"\xd9":
            break
        num_scans += marker[1] == b"\xda"
        # A segment, such as a thumbnail, may contain bytes that look like markers.
        position = marker.end() + int.from_bytes(content[marker.end() : marker.end() + 2], "big")
    else:
        raise ValueError(DAMAGED)
    if num_scans > MAX_SCANS:
        raise ValueError(
            f"this JPEG has {num_scans} scans, it may have {MAX_SCANS}; save it as a baseline JPEG"
        )


def _check_pixels(picture: PILImage.Image, limits: Limits) -> None:
    width, height = picture.size
    if width * height > limits.megapixels * 1e6:
        raise ValueError(f"{_too_many(limits)}, this one has {width}x{height}; send a smaller one")
    if min(width, height) < MIN_SIDE:
        raise ValueError(
            f"an image must be at least {MIN_SIDE} pixels wide and high, got {width}x{height}"
        )
    # Scaled down here, so that no result is ever larger.
    rows, columns = size_within((height, width), limits.max_pixels)
    if min(rows, columns) < MIN_SIDE:
        raise ValueError(
            f"this image of {width}x{height} pixels is too narrow: scaled down to the "
            f"limit of this server it would be {columns}x{rows}"
        )


def _check_tiles(picture: TiffImageFile, limits: Limits) -> None:
    """Raise ValueError if tiles or strips are much larger than the image, or cover it twice."""
    tags, pieces = picture.tag_v2, picture.tile[: MAX_TILES + 1]
    width, height = (tags[tag] for tag in (IMAGEWIDTH, IMAGELENGTH))  # before any rotation
    columns, rows = tags.get(TILEWIDTH, 1), tags.get(TILELENGTH, 1)
    if not all(isinstance(side, int) and side > 0 for side in (columns, rows)):
        raise ValueError(DAMAGED)
    # Tiles at the edges are as large as the others.
    decoded = -(-width // columns) * columns * -(-height // rows) * rows
    boxes = [piece.extents or (0, 0, width, height) for piece in pieces]
    covered = sum((right - left) * (low - top) for left, top, right, low in boxes)
    if (
        decoded > 2 * limits.megapixels * 1e6
        or covered > len(picture.getbands()) * width * height
        or len(pieces) > MAX_TILES
    ):
        raise ValueError(
            "the tiles of this TIFF have many more pixels than the image; save it without tiles"
        )


def _too_many(limits: Limits) -> str:
    return f"an image may have {limits.megapixels:g} million pixels"
