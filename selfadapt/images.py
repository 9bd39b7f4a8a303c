"""Images in, pictures out: any form of image as one tensor, and masks as a person can see them."""

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

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
"""An image with more channels than this, for a network that takes fewer, may be a volume."""
ONE_IMAGE = (
    "images have two dimensions and are adapted to one at a time: segment several images one after "
    "the other, and a volume slice by slice, [method(volume[z]) for z in range(len(volume))]"
)
SUBFILE_TYPE, COPY, MASK = 254, 1, 4
"""Tag of a TIFF that says what a picture in it is, and its bits for a smaller copy and a mask."""
ROUNDING = 1e-3
"""How far the values of a float image may lie outside of [0, 1], as resizing leaves them."""


def load_image(
    image: Image,
    channels: int = 3,
    *,
    normalized: bool = False,
    device: Device = None,
) -> Tensor:
    """Return ``image`` as a float tensor ``(channels, H, W)``, in [0, 1] unless ``normalized``.

    Files and PIL images look as in a viewer: EXIF rotation is applied, palettes are resolved,
    transparency is laid on white, 16-bit gray is scaled down, gray is repeated for colour networks.

    Args:
        image: A path, a PIL image, a uint8 or float array ``(H, W, C)`` or ``(H, W)``, or a uint8
            or float tensor ``(C, H, W)``. Float values lie in [0, 1].
        channels: Number of channels the network takes.
        normalized: The values of a float tensor are normalised already and may be any number.
        device: Where the tensor is wanted; None: where it is, on the CPU for all but tensors.

    Raises:
        FileNotFoundError: There is no such file.
        TypeError: Not a form of image.
        ValueError: Not a readable image, or one with other channels, values or sizes.
    """
    if normalized and not (isinstance(image, Tensor) and image.is_floating_point()):
        raise TypeError(
            "normalized=True takes a float tensor (C, H, W) with the network's mean and deviation "
            f"taken out, got {_describe(image)}; leave normalized out for raw images"
        )
    if isinstance(image, str | os.PathLike):
        return _unit(_from_file(Path(image), channels, device))
    if isinstance(image, PILImage.Image):
        return _unit(_from_pil(image, channels, device))
    if isinstance(image, np.ndarray):
        image = _from_array(image)
    if isinstance(image, Tensor):
        return _check_tensor(image, channels, normalized, device)
    raise TypeError(
        "an image must be a path, a PIL image, an array (H, W, C) or a tensor (C, H, W), "
        f"got {_describe(image)}"
    )


def read_image(image: Path | PILImage.Image) -> Tensor:
    """Return a file or a PIL image ``(3, H, W)``, as bytes where they hold all of it.

    They take a quarter of the memory, and of the time to a GPU, where ``load_image`` makes the same
    numbers of them as of the image.
    """
    return _from_file(image, 3, None) if isinstance(image, Path) else _from_pil(image, 3, None)


def num_pictures(path: Path) -> int:
    """Return how many pictures a TIFF, GIF, WebP or PNG has; 1 for any other file.

    Smaller copies of the first one, as in the pyramids of aerial images, do not count.
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
    except Exception:  # not one of these, or damaged, which is said where it is read
        return 1


def _unit(image: Tensor) -> Tensor:
    """Return bytes as numbers in [0, 1]."""
    return image / 255 if image.dtype == torch.uint8 else image


def _from_file(path: Path, channels: int, device: Device) -> Tensor:
    if path.is_dir():
        raise ValueError(f"an image file is needed, but {path} is a folder")
    if not path.exists():
        raise FileNotFoundError(f"there is no image file {path}")
    if not path.is_file():
        raise ValueError(f"an image must be a file, but {path} is a pipe or a device")
    try:
        with PILImage.open(path, formats=readable_formats()) as picture:
            most = PILImage.MAX_IMAGE_PIXELS
            if most is not None and picture.width * picture.height > most:
                raise ValueError(
                    f"{path} has more pixels than one image may have: {picture.width} x "
                    f"{picture.height}, and {most} is the most"
                )
            return _from_pil(picture, channels, device)
    except UnidentifiedImageError as error:
        raise ValueError(f"{path} is not an image file that can be read") from error
    except PILImage.DecompressionBombError as error:
        raise ValueError(f"{path} has more pixels than one image may have") from error
    except ValueError:
        raise
    except PermissionError as error:
        raise ValueError(f"{path} may not be read: {error.strerror}") from error
    except Exception as error:  # decoders of damaged files fail in any way
        raise ValueError(f"{path} cannot be read, it may be cut off or damaged: {error}") from error


@cache
def readable_formats() -> tuple[str, ...]:
    """Return the kinds of files that are read: all that need no other program, as EPS does."""
    PILImage.init()
    return tuple(name for name in PILImage.OPEN if name != "EPS")


def _from_pil(picture: PILImage.Image, channels: int, device: Device) -> Tensor:
    if 0 in picture.size:
        raise ValueError(f"an image must have pixels, got a picture of size {picture.size}")
    in_memory = picture.format is None
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I"):  # 16 bits of gray; "I" that is from no file may also have 8
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
            f"this network takes {channels} channels, but a picture is read in colour or gray; "
            f"give a tensor ({channels}, H, W) or an array (H, W, {channels})"
        )
    levels = np.array(picture.convert("L" if channels == 1 else "RGB"))
    levels = levels.reshape(*levels.shape[:2], channels)
    return torch.from_numpy(levels).to(device).permute(2, 0, 1)


def _from_array(image: np.ndarray) -> Tensor:
    image = np.asarray(image)  # a matrix has two dimensions, whatever one does
    if image.ndim == 2:
        image = image[..., None]
    if image.ndim != 3:
        raise ValueError(
            f"an image array must have the shape (H, W, C), got {image.shape}; {ONE_IMAGE}"
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
            f"{ONE_IMAGE}"
        )
    if image.shape[-1] in (1, 3, 4) and channels in (1, 3) and image.shape[0] > 4:
        raise ValueError(
            f"an image tensor must have the shape ({channels}, H, W), got {tuple(image.shape)}, "
            "which looks like (H, W, C); use image.permute(2, 0, 1)"
        )
    image = image.to(device)
    if image.dtype in (torch.uint8, torch.uint16):
        image = image.float() / (255 if image.dtype == torch.uint8 else 65535)
        return _with_channels(image, channels, normalized)
    if not image.is_floating_point():
        raise TypeError(f"an image tensor must be uint8 or float, got {image.dtype}")
    image = image.detach().to(torch.float32)
    if image.is_inference():
        image = image.clone()  # an inference tensor could not enter the backward pass
    if not torch.isfinite(image).all():
        raise ValueError("an image must hold finite numbers, but there are NaN or infinite values")
    low, high = image.aminmax()
    if not normalized and (low < 0 or high > 1):
        if low < -ROUNDING or high > 1 + ROUNDING:
            raise ValueError(
                f"a float image must lie in [0, 1], got values from {low:.3g} to {high:.3g}; "
                "divide 8-bit values by 255, or say normalized=True if they are normalised already"
            )
        image = image.clamp(0, 1)
    return _with_channels(image, channels, normalized)


def _with_channels(image: Tensor, channels: int, normalized: bool = False) -> Tensor:
    if normalized:  # such numbers are no colours: nothing can be made of them
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
        advice = "if it takes others, say so with interface=Interface(channels=...)"
        if len(image) > MANY_CHANNELS and channels <= MANY_CHANNELS:
            advice = ONE_IMAGE
        raise ValueError(
            f"this network takes {channels} channels, got an image with {len(image)}; {advice}"
        )
    return image


def _describe(thing: object) -> str:
    if isinstance(thing, Tensor | np.ndarray):
        return f"{type(thing).__name__} {tuple(thing.shape)} of {thing.dtype}"
    return type(thing).__name__


def enlarged(image: PILImage.Image, scale: float) -> PILImage.Image:
    """Resize a picture by a factor, with PIL's bilinear filter."""
    if scale == 1:
        return image
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, PILImage.Resampling.BILINEAR)


def colored(label: Tensor, colors: Sequence[Sequence[int]]) -> PILImage.Image:
    """Paint each class of ``label`` ``(H, W)`` in its colour; other labels stay black."""
    return PILImage.fromarray(_palette(colors)[label.cpu().numpy()])


def label_image(label: Tensor, colors: Sequence[Sequence[int]]) -> PILImage.Image:
    """Return ``label`` ``(H, W)`` as an image whose values are the classes.

    With up to 256 classes it has a palette (mode P), so that viewers show the colours while
    ``np.asarray`` gives the classes; with more it is gray of 16 bits.
    """
    if len(colors) > 256:
        return PILImage.fromarray(label.cpu().numpy().astype(np.uint16))
    image = PILImage.fromarray(label.cpu().numpy().astype(np.uint8))
    image.putpalette(_palette(colors)[:256].tobytes())  # with all 256, a pixel has 8 bits
    return image


def _palette(colors: Sequence[Sequence[int]]) -> np.ndarray:
    palette = np.zeros((max(len(colors), IGNORE) + 1, 3), np.uint8)
    palette[: len(colors)] = colors
    return palette


def overlay(
    image: Tensor | PILImage.Image, mask: PILImage.Image, opacity: float = 0.5
) -> PILImage.Image:
    """Lay a painted mask over an image in RGB, or ``(C, H, W)`` in [0, 1]."""
    return PILImage.blend(to_pil(image) if isinstance(image, Tensor) else image, mask, opacity)


def rgb_image(image: Image, size: Size | None = None) -> PILImage.Image:
    """Return any form of image in RGB, to look at; of many channels, the first three.

    Raises:
        ValueError: It has not the height and width ``size``, or is no image.
    """
    picture = _rgb(image)
    if size is not None and picture.size != (size[1], size[0]):
        raise ValueError(
            f"the image must have the size of the result, {size[1]}x{size[0]} pixels, got "
            f"{picture.width}x{picture.height}: is it the image that was segmented?"
        )
    return picture


def _rgb(image: Image) -> PILImage.Image:
    if isinstance(image, np.ndarray):
        image = _from_array(image)
    if isinstance(image, Tensor) and image.dim() == 3 and len(image) not in (1, 3, 4):
        image = image[:3] if len(image) > 3 else image[:1]
    if isinstance(image, str | os.PathLike):
        image = _from_file(Path(image), 3, None)
    if isinstance(image, PILImage.Image):
        image = _from_pil(image, 3, None)
    if isinstance(image, Tensor) and image.dtype == torch.uint8 and len(image) == 3:
        return PILImage.fromarray(image.permute(1, 2, 0).cpu().numpy())
    return to_pil(load_image(image))


def to_pil(image: Tensor) -> PILImage.Image:
    """Return ``(C, H, W)`` or ``(H, W)`` in [0, 1] as an RGB picture."""
    image = image.reshape(-1, *image.shape[-2:])
    image = image[:3] if len(image) >= 3 else image[:1]
    image = image.expand(3, -1, -1)
    levels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    return PILImage.fromarray(levels)
