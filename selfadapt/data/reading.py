"""Read images and labels from files.

A label is a PNG file of ids: grayscale of any bit depth, a palette (of which the indices are used,
not the colours), or several 16-bit channels, the first with the id, as in SYNTHIA. Or it is a JSON
file of polygons with names, as in Cityscapes and IDD.
"""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image as PILImage
from PIL import ImageDraw, ImageOps, UnidentifiedImageError
from torchvision.io import ImageReadMode, decode_image, read_file

from selfadapt.images import load_image, readable_formats, to_pil
from selfadapt.labels import LabelTable
from selfadapt.pseudo import IGNORE

PNG_START = b"\x89PNG\r\n\x1a\n"
GRAY, RGB, PALETTE, GRAY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6  # PNG colour types
ORIENTATION = 274  # EXIF tag
TRANSPOSED = (5, 6, 7, 8)


def read_picture(path: Path) -> PILImage.Image:
    """Return an image file in RGB; see ``load_image``."""
    with _path_in_errors(path), PILImage.open(path, formats=readable_formats()) as picture:
        picture.load()
        if picture.mode in ("RGB", "L") and not picture.has_transparency_data:
            return ImageOps.exif_transpose(picture).convert("RGB")
        return to_pil(load_image(picture))


def read_label(path: Path, table: LabelTable | None = None) -> np.ndarray:
    """Return the raw ids ``(H, W)`` of a label file, uint8 or uint16.

    Args:
        path: A PNG file, or a JSON file of polygons.
        table: Has the ids of the names in a JSON file.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged, or has colours instead of ids.
    """
    with _path_in_errors(path):
        if path.suffix == ".json":
            return _draw_polygons(path, table)
        depth, kind = _png_form(path)
        if kind in (RGB, RGB_ALPHA) and depth == 8:
            raise ValueError(
                f"a label must hold the id of a class at each pixel, but {path} holds colours "
                "(8-bit RGB); use the files of ids that come with the dataset, or write a gray PNG"
            )
        if (
            kind in (RGB, RGB_ALPHA, GRAY_ALPHA) and depth == 16
        ):  # PIL would truncate these to 8 bits
            return decode_image(read_file(str(path)), ImageReadMode.UNCHANGED)[0].numpy()
        with PILImage.open(path, formats=("PNG",)) as picture:
            ids = np.array(picture if picture.mode != "LA" else picture.getchannel(0))
        if kind == GRAY and 1 < depth < 8:
            ids //= 255 // (2**depth - 1)  # PIL scales these to 0 to 255
        return ids.astype(np.uint16 if depth == 16 else np.uint8, copy=False)


def read_image_size(path: Path) -> tuple[int, int]:
    """Return the width and height of an image or label, from the header of the file alone."""
    with _path_in_errors(path):
        if path.suffix == ".json":
            annotation = json.loads(path.read_bytes())
            return annotation["imgWidth"], annotation["imgHeight"]
        with PILImage.open(path, formats=readable_formats()) as picture:
            width, height = picture.size
            if "exif" in picture.info and picture.getexif().get(ORIENTATION) in TRANSPOSED:
                width, height = height, width
            return width, height


@contextmanager
def _path_in_errors(path: Path) -> Iterator[None]:
    """Add the path to any error that its reader raises."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no file {path}") from error
    except UnidentifiedImageError as error:
        raise ValueError(f"{path} is not an image file that can be read") from error
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path} cannot be read: {error}") from error
    except KeyError as error:
        raise ValueError(f"{path} is not a file of polygons, it lacks {error}") from error
    except Exception as error:  # decoders of damaged files may raise anything
        raise ValueError(f"{path} cannot be read, it may be cut off or damaged: {error}") from error


def _png_form(path: Path) -> tuple[int, int]:
    """Return the bits per channel and the colour type of a PNG file."""
    with path.open("rb") as file:
        start = file.read(26)
    if len(start) < 26 or not start.startswith(PNG_START):
        raise ValueError(f"a label must be a PNG file, but {path} is not, or is cut off")
    depth, kind = struct.unpack("BB", start[24:])
    return depth, kind


def _draw_polygons(path: Path, table: LabelTable | None) -> np.ndarray:
    """Draw polygons in the order of the file; deleted and empty ones are left out."""
    if table is None:
        raise ValueError(f"the names in {path} need a label table that gives their ids")
    ids = {name: raw_id for raw_id, (name, _) in table.ids.items()}
    annotation = json.loads(path.read_bytes())
    size = annotation["imgWidth"], annotation["imgHeight"]
    max_pixels = PILImage.MAX_IMAGE_PIXELS
    if not all(isinstance(side, int) and side > 0 for side in size) or (
        max_pixels is not None and size[0] * size[1] > max_pixels
    ):
        raise ValueError(f"{path} must be of the size of an image, got {size[0]} x {size[1]}")
    label = PILImage.new("L", size, ids["unlabeled"])
    draw = ImageDraw.Draw(label)
    for shape in annotation["objects"]:
        name, points = shape["label"], [tuple(point) for point in shape["polygon"]]
        if name not in ids:
            name = name.removesuffix("group")  # cargroup: several cars
        if shape.get("deleted") or len(points) < 2:
            continue
        if name not in ids:
            raise ValueError(f"{path} holds the name {name!r}, which is not in {table.origin}")
        if ids[name] != IGNORE:  # names without an id, such as license plates, are not drawn
            draw.polygon(points, fill=ids[name])
    return np.array(label)
