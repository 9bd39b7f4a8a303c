"""Uploaded images: validated by type and size before any pixel is decoded."""

import io
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from PIL import Image as PILImage
from PIL import UnidentifiedImageError
from torch import Tensor

from selfadapt.checks import check_number
from selfadapt.images import load_image, to_pil
from selfadapt.modes import within_budget
from selfadapt.views import Size, size_of

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
MIN_SIDE = 16
DAMAGED = "this image cannot be read; it may be cut off or damaged"
PIXELS = {"cpu": 384 * 768, "cuda": 1024 * 2048}
"""Default of ``Limits.max_pixels`` by device type; other devices use the value of the CPU."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the size of images."""

    megabytes: float = 20
    """Larger files are refused."""
    megapixels: float = 32
    """Images with more pixels are refused."""
    max_pixels: int = PIXELS["cpu"]
    """Images with more pixels are scaled down."""

    def __post_init__(self) -> None:
        check_number("max_mb", self.megabytes, 0.01, 1024)
        check_number("max_megapixels", self.megapixels, 0.01, 1024)
        check_number("max_pixels", self.max_pixels, MIN_SIDE**2, whole=True)

    @property
    def num_bytes(self) -> int:
        """Maximum size of a file in bytes."""
        return int(self.megabytes * 2**20)


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
    if (num_bytes := Path(path).stat().st_size) > limits.num_bytes:
        raise ValueError(
            f"an image file may have {limits.megabytes:g} MB, this one has "
            f"{num_bytes / 2**20:.1f}; send a smaller one"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PILImage.DecompressionBombWarning)
            with PILImage.open(path, formats=FORMATS) as picture:
                _check_pixels(picture, limits)
                image = _decoded(picture)
                png = _as_png(image, limits) if picture.format == "TIFF" else None
    except UnidentifiedImageError as error:
        raise ValueError(
            f"this is not an image file that can be read; send {', '.join(FORMATS)}"
        ) from error
    except PILImage.DecompressionBombError as error:
        raise ValueError(_too_many(limits)) from error
    except OSError as error:
        raise ValueError(DAMAGED) from error
    return Upload(_scaled_down(image, limits.max_pixels), size_of(image), png)


def _decoded(picture: PILImage.Image) -> Tensor:
    try:
        return load_image(picture)
    except Exception as error:  # decoders raise anything on damaged files
        raise ValueError(DAMAGED) from error


def _as_png(image: Tensor, limits: Limits) -> bytes:
    file = io.BytesIO()
    to_pil(image).save(file, "PNG")
    if file.tell() > limits.num_bytes:
        raise ValueError(
            f"this TIFF has more than {limits.megabytes:g} MB as a PNG; send a smaller one"
        )
    return file.getvalue()


def _check_pixels(picture: PILImage.Image, limits: Limits) -> None:
    width, height = picture.size
    if width * height > limits.megapixels * 1e6:
        raise ValueError(f"{_too_many(limits)}, this one has {width}x{height}; send a smaller one")
    if min(width, height) < MIN_SIDE:
        raise ValueError(
            f"an image must be at least {MIN_SIDE} pixels wide and high, got {width}x{height}"
        )


def _too_many(limits: Limits) -> str:
    return f"an image may have {limits.megapixels:g} million pixels"


def _scaled_down(image: Tensor, max_pixels: int) -> Tensor:
    """Scale an image down to a number of pixels, so that no result is ever larger."""
    small = within_budget(image, "paper", max_pixels)
    if min(size_of(small)) < MIN_SIDE:
        (height, width), (rows, columns) = size_of(image), size_of(small)
        raise ValueError(
            f"this image of {width}x{height} pixels is too narrow: scaled down to the "
            f"limit of this server it would be {columns}x{rows}"
        )
    return small
