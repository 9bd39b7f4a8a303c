"""Label and confidence of a georeferenced scene as GeoTIFF files that fit over it."""

import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from selfadapt.files import atomic_write, make_folder
from selfadapt.labels import Color
from selfadapt.optional import import_optional
from selfadapt.scenes.reading import RasterReader
from selfadapt.scenes.tiles import blocks

BLOCK = 512
"""Side of the blocks in a file."""


def categories_path(path: Path) -> Path:
    """Return the file beside a raster in which GDAL looks for the names of its values."""
    return path.with_name(f"{path.name}.aux.xml")


def write_geotiff(
    array: np.ndarray,
    path: Path,
    scene: RasterReader,
    work: Path,
    *,
    nodata: int,
    names: Sequence[str] = (),
    colors: Sequence[Color] = (),
) -> None:
    """Write an array ``(H, W)`` as a cloud-optimised GeoTIFF with the georeference of a scene.

    Args:
        array: The values, in memory or in a file.
        path: The file to write.
        scene: The scene.
        work: Folder for temporary files, which is removed afterwards.
        nodata: Value of the pixels that have no data in the scene.
        names: Names of the values; they are written beside the file, where GDAL looks for them.
        colors: Colours of the values.
    """
    rasterio = import_optional("rasterio", "geo")
    from rasterio._err import CPLE_BaseError
    from rasterio.shutil import copy
    from rasterio.windows import Window

    kind = np.uint8 if nodata <= 255 else np.uint16
    profile: dict[str, Any] = {
        "driver": "GTiff", "height": array.shape[0], "width": array.shape[1], "count": 1,
        "dtype": kind, "tiled": True, "blockxsize": BLOCK, "blockysize": BLOCK,
        "compress": "DEFLATE", "BIGTIFF": "IF_SAFER", "nodata": nodata, **scene.georeference,
    }  # fmt: skip
    make_folder(work)
    plain, result = work / "plain.tif", work / "result.tif"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
            with rasterio.open(plain, "w", **profile) as dataset:
                if colors and kind is np.uint8:
                    dataset.write_colormap(1, {i: (*color, 255) for i, color in enumerate(colors)})
                for window in blocks(scene.size, 4 * BLOCK):
                    values, valid = array[window.slices].astype(kind), scene.valid(window)
                    if valid is not None:
                        values[~valid.numpy()] = nodata
                    top, left, height, width = window
                    dataset.write(values, 1, window=Window(left, top, width, height))
            copy(
                plain, result, driver="COG", compress="DEFLATE", blocksize=BLOCK,
                overview_resampling="MODE" if names else "AVERAGE", bigtiff="IF_SAFER",
            )  # fmt: skip
    except (rasterio.errors.RasterioError, CPLE_BaseError) as error:  # such as a full disk
        raise OSError(f"{path} could not be written ({error.__cause__ or error})") from error
    with atomic_write(path) as temporary:
        shutil.copyfile(result, temporary)
    if names:
        categories = "".join(f"<Category>{escape(name)}</Category>" for name in names)
        band = f'<PAMRasterBand band="1"><CategoryNames>{categories}</CategoryNames>'
        with atomic_write(categories_path(path)) as temporary:
            temporary.write_text(f"<PAMDataset>{band}</PAMRasterBand></PAMDataset>\n")
