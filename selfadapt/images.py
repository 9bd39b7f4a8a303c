"""Load images of any form as tensors, and convert tensors and masks to PIL images."""

import base64
import io
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as PILImage
from PIL import ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile
from torch import Tensor

from selfadapt.pseudo import IGNORE
from selfadapt.views import Size, View

Image = str | os.PathLike[str] | PILImage.Image | np.ndarray | Tensor
"""A path, a PIL image, an array (H, W, C) or (H, W), or a tensor (C, H, W)."""
Device = torch.device | str | None
MANY_CHANNELS = 16
"""An image with more channels, for a network with fewer, is probably a volume."""
ONE_IMAGE_ADVICE = (
    "images have two dimensions and are adapted to one at a time: segment several images one by "
    "one, and a volume slice by slice, [method(volume[z]) for z in range(len(volume))]"
)
SUBFILE_TYPE, COPY, MASK = 254, 1, 4
"""TIFF tag with the type of a frame, and its bits for a reduced copy and for a mask."""
RANGE_TOLERANCE = 1e-3
"""Tolerance for float values outside of [0, 1], as after interpolation."""


def load_image(
    image: Image,
    channels: int = 3,
    *,
    normalized: bool = False,
    device: Device = None,
) -> Tensor:
    """Return ``image`` as a float tensor ``(channels, H, W)``, in [0, 1] unless ``normalized``.

    EXIF orientation is applied, palettes are converted to RGB, transparent images are composited on
    white, 16-bit images are scaled, and gray images are repeated for colour networks.

    Args:
        image: A path, a PIL image, a uint8 or float array ``(H, W, C)`` or ``(H, W)``, or a uint8
            or float tensor ``(C, H, W)``. Float values lie in [0, 1].
        channels: Number of input channels of the network.
        normalized: The image is a float tensor that is already normalised, with any values.
        device: Device of the result; None: that of a tensor, else the CPU.

    Raises:
        FileNotFoundError: The file does not exist.
        TypeError: The type is not supported.
        ValueError: The file is not readable, or channels, values or sizes are invalid.
    """
    if normalized and not (isinstance(image, Tensor) and image.is_floating_point()):
        raise TypeError(
            "normalized=True takes a float tensor (C, H, W) that was normalised with the network's "
            f"mean and deviation, got {_describe(image)}; leave normalized out for raw images"
        )
    if isinstance(image, str | os.PathLike):
        return _to_unit_range(_from_file(Path(image), channels, device))
    if isinstance(image, PILImage.Image):
        return _to_unit_range(_from_pil(image, channels, device))
    if isinstance(image, np.ndarray):
        image = _from_array(image)
    if isinstance(image, Tensor):
        return _check_tensor(image, channels, normalized, device)
    raise TypeError(
        "an image must be a path, a PIL image, an array (H, W, C) or a tensor (C, H, W), "
        f"got {_describe(image)}"
    )


def read_image(image: Image, channels: int = 3, *, large: bool = False) -> Tensor:
    """Return an image as a tensor on the CPU, uint8 if that is lossless; a tensor as it is.

    Compared to float32 this takes a quarter of the memory and of the transfer to a GPU.
    ``load_image`` returns the same values for the tensor as for the image.

    Args:
        image: As for ``load_image``.
        channels: Number of channels of a file or a PIL image.
        large: A file may have twice as many pixels as usual, the most that Pillow opens.
    """
    if isinstance(image, str | os.PathLike):
        return _from_file(Path(image), channels, None, large)
    if isinstance(image, PILImage.Image):
        return _from_pil(image, channels, None)
    return _from_array(image) if isinstance(image, np.ndarray) else image


def count_frames(path: Path) -> int:
    """Return the number of frames in a TIFF, GIF, WebP or PNG file; 1 for any other file.

    Reduced copies of the first frame, as in the pyramids of aerial images, do not count.
    """
    try:
        with PILImage.open(path, formats=("TIFF", "GIF", "WEBP", "PNG")) as picture:
            number: int = getattr(picture, "n_frames", 1)
            if not isinstance(picture, TiffImageFile):
                return number
            num_copies = 0
            for index in range(1, number):
                picture.seek(index)
                num_copies += bool(picture.tag_v2.get(SUBFILE_TYPE, 0) & (COPY | MASK))
            return number - num_copies
    except Exception:  # another format, or damaged, which raises when it is read
        return 1


def _to_unit_range(image: Tensor) -> Tensor:
    """Convert uint8 values to [0, 1]."""
    return image / 255 if image.dtype == torch.uint8 else image


def _from_file(path: Path, channels: int, device: Device, large: bool = False) -> Tensor:
    if path.is_dir():
        raise ValueError(f"an image file is needed, but {path} is a folder")
    if not path.exists():
        raise FileNotFoundError(f"there is no image file {path}")
    if not path.is_file():
        raise ValueError(f"an image must be a file, but {path} is a pipe or a device")
    try:
        with PILImage.open(path, formats=readable_formats()) as picture:
            limit = PILImage.MAX_IMAGE_PIXELS
            is_over = limit is not None and picture.width * picture.height > limit
            if is_over and not large:
                raise ValueError(
                    f"{path} has more pixels than one image may have: {picture.width} x "
                    f"{picture.height}, and {limit} is the most"
                )
            return _from_pil(picture, channels, device, in_place=True)
    except UnidentifiedImageError as error:
        raise ValueError(f"{path} is not an image file that can be read") from error
    except PILImage.DecompressionBombError as error:
        raise ValueError(
            f"{path} has more pixels than one image may have; a TIFF may be larger, with "
            "pip install 'selfadapt[geo]'"
        ) from error
    except ValueError:
        raise
    except PermissionError as error:
        raise ValueError(f"{path} may not be read: {error.strerror}") from error
    except Exception as error:  # decoders of damaged files may raise anything
        raise ValueError(f"{path} cannot be read, it may be cut off or damaged: {error}") from error


@cache
def readable_formats() -> tuple[str, ...]:
    """Return the supported formats of PIL, without EPS, which runs an external program."""
    PILImage.init()
    return tuple(name for name in PILImage.OPEN if name != "EPS")


def _from_pil(
    picture: PILImage.Image, channels: int, device: Device, in_place: bool = False
) -> Tensor:
    if 0 in picture.size:
        raise ValueError(f"an image must have pixels, got a picture of size {picture.size}")
    in_memory = picture.format is None
    if in_place:
        ImageOps.exif_transpose(picture, in_place=True)
    else:
        picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I"):  # 16-bit gray; "I" from memory may have 8-bit values
        levels = np.asarray(picture).astype(np.float32)
        if picture.mode == "I" and in_memory and levels.max() <= 255:
            levels *= 257
        if levels.min() < 0 or levels.max() > 65535:
            raise ValueError(
                "an integer image must hold 16-bit values, got values from "
                f"{levels.min():.0f} to {levels.max():.0f}"
            )
        return _with_channels(torch.from_numpy(levels / 65535)[None].to(device), channels)
    if picture.mode == "F":
        return _check_tensor(torch.from_numpy(np.array(picture))[None], channels, False, device)
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        white = PILImage.new("RGBA", picture.size, "white")
        picture = PILImage.alpha_composite(white, picture)
    if channels not in (1, 3):
        raise ValueError(
            f"this network takes {channels} channels, but an image file has colour or gray; "
            f"give a tensor ({channels}, H, W) or an array (H, W, {channels})"
        )
    mode = "L" if channels == 1 else "RGB"
    levels = np.array(picture if picture.mode == mode else picture.convert(mode))
    levels = levels.reshape(*levels.shape[:2], channels)
    return torch.from_numpy(levels).to(device).permute(2, 0, 1)


def _from_array(image: np.ndarray) -> Tensor:
    image = np.asarray(image)  # np.matrix always has two dimensions
    if image.ndim == 2:
        image = image[..., None]
    if image.ndim != 3:
        raise ValueError(
            f"an image array must have the shape (H, W, C), got {image.shape}; {ONE_IMAGE_ADVICE}"
        )
    if image.shape[2] > 8 and image.shape[0] <= 4:
        raise ValueError(
            f"an image array must have the shape (H, W, C), got {image.shape}, which looks like "
            "(C, H, W); use a torch tensor for that, or image.transpose(1, 2, 0)"
        )
    if image.dtype.kind == "u" and image.dtype.itemsize == 2:
        image = image.astype(np.float32) / 65535
    if image.dtype != np.uint8 and not np.issubdtype(image.dtype, np.floating):
        raise TypeError(f"an image array must be uint8, uint16 or float, got {image.dtype}")
    return torch.from_numpy(image.astype(image.dtype.newbyteorder("="))).permute(2, 0, 1)


def _check_tensor(image: Tensor, channels: int, normalized: bool, device: Device) -> Tensor:
    if image.dim() == 4 and len(image) == 1:
        image = image[0]
    if image.dim() != 3 or 0 in image.shape:
        raise ValueError(
            f"an image tensor must have the shape ({channels}, H, W), got {tuple(image.shape)}; "
            f"{ONE_IMAGE_ADVICE}"
        )
    if image.shape[-1] in (1, 3, 4) and channels in (1, 3) and image.shape[0] > 4:
        raise ValueError(
            f"an image tensor must have the shape ({channels}, H, W), got {tuple(image.shape)}, "
            "which looks like (H, W, C); use image.permute(2, 0, 1)"
        )
    image = image.to(device, non_blocking=image.is_pinned())
    if image.dtype in (torch.uint8, torch.uint16):
        image = image.float() / (255 if image.dtype == torch.uint8 else 65535)
        return _with_channels(image, channels, normalized)
    if not image.is_floating_point():
        raise TypeError(f"an image tensor must be uint8 or float, got {image.dtype}")
    image = image.detach().to(torch.float32)
    if image.is_inference():
        image = image.clone()  # inference tensors cannot be used in autograd
    if not torch.isfinite(image).all():
        raise ValueError("an image must hold finite numbers, but there are NaN or infinite values")
    low, high = image.aminmax()
    if not normalized and (low < 0 or high > 1):
        if low < -RANGE_TOLERANCE or high > 1 + RANGE_TOLERANCE:
            raise ValueError(
                f"a float image must lie in [0, 1], got values from {low:.3g} to {high:.3g}; "
                "divide 8-bit values by 255, or say normalized=True if they are normalised already"
            )
        image = image.clamp(0, 1)
    return _with_channels(image, channels, normalized)


def _with_channels(image: Tensor, channels: int, normalized: bool = False) -> Tensor:
    if normalized:  # normalised values cannot be converted as colours
        return _checked_channels(image, channels)
    if len(image) == 4 and channels == 3:
        image = image[:3] * image[3:] + (1 - image[3:])  # transparency on white
    if len(image) == 1 and channels == 3:
        image = image.expand(3, -1, -1)
    if len(image) == 3 and channels == 1:
        image = View(gray=True).make(image)[:1]
    return _checked_channels(image, channels)


def _checked_channels(image: Tensor, channels: int) -> Tensor:
    if len(image) != channels:
        advice = "if it takes another number, give interface=Interface(channels=...)"
        if len(image) > MANY_CHANNELS and channels <= MANY_CHANNELS:
            advice = ONE_IMAGE_ADVICE
        raise ValueError(
            f"this network takes {channels} channels, got an image with {len(image)}; {advice}"
        )
    return image


def _describe(value: object) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} {tuple(value.shape)} of {value.dtype}"
    return type(value).__name__


def rescale(image: PILImage.Image, scale: float) -> PILImage.Image:
    """Resize an image by a factor, with PIL's bilinear filter."""
    if scale == 1:
        return image
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, PILImage.Resampling.BILINEAR)


def colored(label: Tensor, colors: Sequence[Sequence[int]]) -> PILImage.Image:
    """Return ``label`` ``(H, W)`` with each class in its colour, other values in black."""
    if label.dtype == torch.uint8 and len(colors) <= 256:  # ten times as fast
        return label_image(label, colors).convert("RGB")
    return PILImage.fromarray(_palette(colors)[label.cpu().numpy()])


def label_image(label: Tensor, colors: Sequence[Sequence[int]]) -> PILImage.Image:
    """Return ``label`` ``(H, W)`` as an image whose values are the class indices.

    With up to 256 classes it has a palette (mode P), so that viewers show the colours while
    ``np.asarray`` returns the classes; with more it is 16-bit gray.
    """
    if len(colors) > 256:
        return PILImage.fromarray(label.cpu().numpy().astype(np.uint16))
    image = PILImage.fromarray(label.cpu().numpy().astype(np.uint8))
    image.putpalette(_palette(colors)[:256].tobytes())  # a full palette keeps 8 bits per pixel
    return image


def _palette(colors: Sequence[Sequence[int]]) -> np.ndarray:
    palette = np.zeros((max(len(colors), IGNORE) + 1, 3), np.uint8)
    palette[: len(colors)] = colors
    return palette


def overlay(
    image: Tensor | PILImage.Image, mask: PILImage.Image, opacity: float = 0.5
) -> PILImage.Image:
    """Blend a coloured mask with an RGB image, or a tensor ``(C, H, W)`` in [0, 1]."""
    return PILImage.blend(to_pil(image) if isinstance(image, Tensor) else image, mask, opacity)


def rgb_image(image: Image, size: Size | None = None) -> PILImage.Image:
    """Return any form of image in RGB; of more than four channels, the first three.

    Raises:
        ValueError: The image is invalid, or its height and width are not ``size``.
    """
    if isinstance(image, np.ndarray):
        image = _from_array(image)
    if isinstance(image, Tensor) and image.dim() == 3 and len(image) not in (1, 3, 4):
        image = image[:3] if len(image) > 3 else image[:1]
    if isinstance(image, str | os.PathLike):
        image = _from_file(Path(image), 3, None)
    if isinstance(image, PILImage.Image):
        image = _from_pil(image, 3, None)
    if isinstance(image, Tensor) and image.dtype == torch.uint8 and len(image) == 3:
        picture = PILImage.fromarray(image.permute(1, 2, 0).cpu().numpy())
    else:
        picture = to_pil(load_image(image))
    if size is not None and picture.size != (size[1], size[0]):
        raise ValueError(
            f"the image must have the size of the result, {size[1]}x{size[0]} pixels, got "
            f"{picture.width}x{picture.height}: is it the image that was segmented?"
        )
    return picture


def to_pil(image: Tensor) -> PILImage.Image:
    """Return a tensor ``(C, H, W)`` or ``(H, W)`` in [0, 1] as an RGB image."""
    image = image.reshape(-1, *image.shape[-2:])
    image = image[:3] if len(image) >= 3 else image[:1]
    image = image.expand(3, -1, -1)
    levels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    return PILImage.fromarray(levels)


def encode(picture: PILImage.Image, image_format: str, **options: Any) -> bytes:
    """Return the content of an image file."""
    file = io.BytesIO()
    picture.save(file, image_format, **options)
    return file.getvalue()


def data_uri(content: bytes, image_format: str) -> str:
    """Return an image file as the address of a picture inside a page."""
    return f"data:image/{image_format.lower()};base64,{base64.b64encode(content).decode()}"
