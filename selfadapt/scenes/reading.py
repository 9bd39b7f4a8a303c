"""Scenes: images that are read in windows, from pictures and from georeferenced rasters."""

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from PIL import Image as PILImage
from torch import Tensor

from selfadapt.images import Image, load_image, read_image
from selfadapt.modes import size_within
from selfadapt.optional import import_optional
from selfadapt.scenes.tiles import Window
from selfadapt.views import Size, resize, size_of

DRIVERS = {".tif": "GTiff", ".tiff": "GTiff", ".jp2": "JP2OpenJPEG"}
"""Formats that GDAL may read, by suffix. Others name files and addresses, which it would read."""
MAX_PICTURE_PIXELS = 2 * (PILImage.MAX_IMAGE_PIXELS or 2**62)
"""Beyond this many pixels Pillow opens no image."""
OVERVIEW_PIXELS = 2**20
"""Pixels of the reduced image that windows are chosen on."""
PERCENTILES = 0.02, 0.98
"""Of the values of a band that are not 8-bit; they become 0 and 1."""


class WindowReader(ABC):
    """An image that is read in windows.

    Attributes:
        size: Height and width.
        channels: Number of channels of the windows.
        notes: What a user should know about it.
    """

    size: Size
    channels: int
    notes: tuple[str, ...] = ()

    @abstractmethod
    def read(self, window: Window, size: Size | None = None) -> Tensor:
        """Return a window ``(C, H, W)`` in [0, 1], at its own size or another one."""

    def valid(self, window: Window, size: Size | None = None) -> Tensor | None:
        """Return which pixels of a window ``(H, W)`` are part of the scene; None: all."""
        return None

    def close(self) -> None:  # noqa: B027, an image in memory has none
        """Close the file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def whole(self) -> Window:
        """The window of the whole scene."""
        return Window(0, 0, *self.size)

    def overview(self, max_pixels: int) -> Tensor:
        """Return the scene ``(C, H, W)`` at a reduced size."""
        return self.read(self.whole, size_within(self.size, max_pixels))


class PictureReader(WindowReader):
    """An image in memory, of which windows are cut.

    Args:
        image: The image, see ``load_image``.
        channels: Number of input channels of the network.
    """

    def __init__(self, image: Image, channels: int = 3) -> None:
        if isinstance(image, str | Path) and channels == 3:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PILImage.DecompressionBombWarning)
                self._pixels = read_image(Path(image), large=True)
        else:
            self._pixels = load_image(image, channels)
        self.channels, self.size = channels, size_of(self._pixels)

    def read(self, window: Window, size: Size | None = None) -> Tensor:
        """Return a window ``(C, H, W)`` in [0, 1], at its own size or another one."""
        part = self._pixels[:, *window.slices]
        if size is None or size == size_of(part):
            return load_image(part, self.channels)
        step = max(1, min(old // new for old, new in zip(size_of(part), size, strict=True)) // 2)
        return resize(load_image(part[:, ::step, ::step], self.channels), size).clamp(0, 1)


class RasterReader(WindowReader):
    """A georeferenced image, of which windows are read.

    8-bit values become [0, 1]; of others the range between two percentiles of the whole scene does.

    Args:
        path: A GeoTIFF or JPEG 2000 file.
        channels: Number of input channels of the network.
        bands: Indices of the bands to take, from 1. None: red, green and blue where the file says
            which these are, else the first ones.
    """

    def __init__(self, path: Path, channels: int = 3, bands: Sequence[int] | None = None) -> None:
        self.path, self.channels = path, channels
        self.dataset = _open(path)
        self.size = self.dataset.height, self.dataset.width
        self.bands = self._choose_bands(bands)
        kinds = {self.dataset.dtypes[band - 1] for band in self.bands}
        if any("complex" in kind for kind in kinds):
            raise ValueError(f"{path} must hold real numbers, got bands of {', '.join(kinds)}")
        self._is_8_bit, self._is_float = kinds == {"uint8"}, any("float" in k for k in kinds)
        if not self._is_8_bit:
            low, high = (", ".join(f"{x:g}" for x in ends) for ends in self._ranges.T.tolist())
            self.notes += (
                f"values from {low} to {high}, the 2nd and 98th percentiles of the bands, were "
                "scaled to [0, 1]",
            )

    @property
    def georeference(self) -> dict[str, Any]:
        """CRS, and transform or ground control points, for rasters of the same extent."""
        points, crs = self.dataset.gcps
        if points:
            return {"gcps": points, "crs": crs}
        return {"crs": self.dataset.crs, "transform": self.dataset.transform}

    def read(self, window: Window, size: Size | None = None) -> Tensor:
        """Return a window ``(C, H, W)`` in [0, 1], at its own size or another one."""
        levels = self._read(window, size)
        if self._is_8_bit:
            return levels / 255
        low, high = (ends[:, None, None] for ends in self._ranges.unbind(dim=1))
        return ((levels - low) / (high - low)).nan_to_num_(0.0).clamp_(0, 1)

    def valid(self, window: Window, size: Size | None = None) -> Tensor | None:
        """Return which pixels of a window ``(H, W)`` have data in some band; None: all."""
        flags = (self.dataset.mask_flag_enums[band - 1] for band in self.bands)
        is_masked = not all("all_valid" in {flag.name for flag in of_band} for of_band in flags)
        valid = None
        if is_masked:
            shape = None if size is None else (len(self.bands), *size)
            with _named_errors(self.path):
                masks = self.dataset.read_masks(
                    list(self.bands), window=_window(window), out_shape=shape
                )
            valid = torch.from_numpy(masks > 0).any(dim=0)
        if self._is_float:
            is_finite = self._read(window, size).isfinite().all(dim=0)
            valid = is_finite if valid is None else valid & is_finite
        return valid

    def close(self) -> None:
        """Close the file."""
        self.dataset.close()

    def _choose_bands(self, bands: Sequence[int] | None) -> tuple[int, ...]:
        number, channels = self.dataset.count, self.channels
        if bands is not None:
            check_bands(bands, channels)
            if wrong := [band for band in bands if not 1 <= band <= number]:
                raise ValueError(f"--bands must be from 1 to {number} for {self.path}, got {wrong}")
            return tuple(bands)
        names = [kind.name for kind in self.dataset.colorinterp]
        if "palette" in names:
            raise ValueError(
                f"{self.path} must hold colours or gray values, but its values are the indices of "
                "a palette; convert it: gdal_translate -expand rgb"
            )
        if channels == 3 and {"red", "green", "blue"} <= set(names):
            return tuple(names.index(name) + 1 for name in ("red", "green", "blue"))
        if channels == 3 and number in (1, 2):
            return (1, 1, 1)
        if number < channels:
            raise ValueError(f"{self.path} has {number} bands, and the network takes {channels}")
        if number > channels:
            listed = ", ".join(map(str, range(1, channels + 1)))
            self.notes += (f"the file has {number} bands, and {listed} are taken, see --bands",)
        return tuple(range(1, channels + 1))

    @cached_property
    def _ranges(self) -> Tensor:
        """Values of each band that become 0 and 1 ``(C, 2)``."""
        size = size_within(self.size, OVERVIEW_PIXELS)
        levels, valid = self._read(self.whole, size), self.valid(self.whole, size)
        is_used = levels.isfinite().all(dim=0)
        if valid is not None:
            is_used &= valid
        if not is_used.any():  # as at the edge of a mosaic
            return torch.tensor([[0.0, 1.0]]).repeat(len(levels), 1)
        low, high = np.quantile(levels[:, is_used].numpy(), PERCENTILES, axis=1)
        return torch.from_numpy(np.stack([low, np.where(high > low, high, low + 1)], 1)).float()

    def _read(self, window: Window, size: Size | None) -> Tensor:
        from rasterio.enums import Resampling

        shape = None if size is None else (len(self.bands), *size)
        with _named_errors(self.path):
            levels = self.dataset.read(
                list(self.bands), window=_window(window), out_shape=shape, out_dtype="float32",
                resampling=Resampling.average,
            )  # fmt: skip
        return torch.from_numpy(levels)


def check_bands(bands: Sequence[int], channels: int) -> None:
    """Raise ValueError unless there is a band for each channel of a network."""
    if len(bands) != channels:
        raise ValueError(
            f"--bands must name {channels} bands, as many as the network takes, got {len(bands)}"
        )


def open_scene(image: Image, channels: int, bands: Sequence[int] | None = None) -> WindowReader:
    """Return an image to be read in windows: a raster, or any other image in memory.

    Args:
        image: The image, see ``load_image``.
        channels: Number of input channels of the network.
        bands: Indices of the bands to take of a raster, from 1.
    """
    if isinstance(image, str | os.PathLike) and is_raster(Path(image)):
        return RasterReader(Path(image), channels, bands)
    return PictureReader(image, channels)


def _open(path: Path) -> Any:
    """Return an open file of rasterio."""
    rasterio = import_optional("rasterio", "geo")
    if not path.is_file():
        raise FileNotFoundError(f"there is no image file {path}")
    with _named_errors(path), warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        return rasterio.open(path, driver=DRIVERS[path.suffix.lower()])


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Name the file in errors of GDAL, which say little."""
    from rasterio.errors import RasterioError

    try:
        yield
    except RasterioError as error:
        reason = error.__cause__ or error
        raise ValueError(f"{path} cannot be read, it may be cut off: {reason}") from error


def _window(window: Window) -> Any:
    from rasterio.windows import Window as RasterioWindow

    return RasterioWindow(window.left, window.top, window.width, window.height)


def raster_size(path: Path) -> Size:
    """Return height and width of a georeferenced image."""
    with _open(path) as dataset:
        return dataset.height, dataset.width


def is_raster(path: Path) -> bool:
    """Return True if a file is read in windows by rasterio, and that is installed.

    These are the files that say where on earth they were taken, and those too large for Pillow.
    """
    if path.suffix.lower() not in DRIVERS or find_spec("rasterio") is None:
        return False
    try:
        with _open(path) as dataset:
            is_placed = bool(dataset.gcps[0]) or not dataset.transform.is_identity
            return is_placed or dataset.width * dataset.height > MAX_PICTURE_PIXELS
    except (ValueError, OSError):  # reported when it is segmented
        return False
