"""Trace a method of one forward pass as a graph."""

import logging
import operator
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from textwrap import shorten
from typing import Any, TypedDict
from unittest.mock import patch

import torch
import torch.fx.experimental._config as fx_config
import torch.nn.functional as F
from torch import Tensor, nn

from selfadapt.checks import check_number
from selfadapt.copying import private_copy
from selfadapt.export.forward import Forward
from selfadapt.method import Method
from selfadapt.methods import create_method, settings_of
from selfadapt.models.interface import Interface
from selfadapt.norm import Alpha, convert
from selfadapt.version import __version__
from selfadapt.views import Size, size_of

EXPORTABLE = ("source", "p-bn", "san")
"""Methods of one forward pass."""
CHECK_SIZES: tuple[Size, ...] = ((97, 203), (160, 128), (224, 289), (130, 75))
"""Heights and widths to check a file at; the graph is traced at the first."""


BATCH = (1.0, 0.3, 0.7)
"""Contrasts of the images of a batch: with other statistics, each image tells if it is mixed."""


class ExportSettings(TypedDict, total=False):
    """Keyword arguments of ``trace``."""

    method: str
    alpha: Alpha | None
    size: Size | None
    batch: bool
    interface: Interface | None


@dataclass(frozen=True)
class Trace:
    """A traced method with its expected outputs."""

    program: torch.export.ExportedProgram
    images: list[Tensor]
    """Images ``(B, C, H, W)`` to check a file with."""
    probs: list[Tensor]
    """Probabilities of the method for each of these images, ``(B, classes, H, W)``."""
    metadata: dict[str, Any]
    """Metadata to store in a file."""
    notes: tuple[str, ...]
    """Notes of the method for the user."""
    size: Size | None
    """The only height and width the graph accepts; None: any."""
    batch: bool
    """The graph takes any number of images, not only one."""


def check_exportable(method: str) -> None:
    """Raise ValueError unless the method is a single forward pass."""
    settings_of(method)  # raises ValueError for an unknown method
    if method not in EXPORTABLE:
        raise ValueError(
            f"the method {method!r} takes gradient steps, segments an image several times or draws "
            "random numbers, so it cannot be exported as one forward pass; methods to export: "
            f"{', '.join(EXPORTABLE)}"
        )


def trace(
    model: nn.Module,
    *,
    method: str = "san",
    alpha: Alpha | None = None,
    size: Size | None = None,
    batch: bool = False,
    interface: Interface | None = None,
) -> Trace:
    """Trace a method of one forward pass as a graph.

    A copy of the network is traced, on the CPU and in float32.

    Args:
        model: Any segmentation network. It is not modified.
        method: ``san``, ``source`` or ``p-bn``.
        alpha: Weight of the image statistics in SaN, 0 to 1; or weights by name pattern. None: the
            default of the method.
        size: The only height and width the graph accepts. None: any.
        batch: The graph takes any number of images of one size, each with its own statistics.
            False: one image.
        interface: Interface of the network, if it is not detected.
    """
    check_exportable(method)
    if size is not None:
        _check_size(size)
    sizes = CHECK_SIZES if size is None else (size,) * 2
    settings: dict[str, Any] = {} if alpha is None else {"alpha": alpha}
    max_pixels = max(height * width for height, width in sizes)
    segmenter: Any = create_method(
        method,
        model,
        interface=interface,
        compare=False,
        fast=False,
        max_pixels=max_pixels,
        **settings,
    )
    channels = segmenter.interface.channels or 3
    images = [_noise(channels, size, seed) for seed, size in enumerate(sizes)]
    if batch:  # several images, and one
        for index in range(0, len(images), 2):
            images[index] = torch.cat([images[index] * share for share in BATCH])
    probs = [
        torch.stack([segmenter(image).probs for image in several]).float().cpu()
        for several in images
    ]
    program = _record(segmenter, images[0], dynamic=size is None, batch=batch)
    run = program.module()  # raises an error for sizes it was not traced for
    for image in images:
        with exporter_errors(size, batch, image):
            run(image)
    metadata = _metadata(segmenter, method)
    return Trace(program, images, probs, metadata, segmenter.notes, size, batch)


def _record(
    segmenter: Method, image: Tensor, *, dynamic: bool, batch: bool
) -> torch.export.ExportedProgram:
    with exporter_errors(None):
        network = private_copy(segmenter.model).cpu().float()
    convert(network, segmenter.san)
    forward = Forward(network, segmenter.interface).eval().requires_grad_(False)
    dynamic_dim = torch.export.Dim.DYNAMIC
    free = (0,) * batch + (2, 3) * dynamic
    shapes = (dict.fromkeys(free, dynamic_dim),) if free else None
    size = None if dynamic else size_of(image)
    with torch.no_grad(), _size_oblivious(), exporter_errors(size, batch):
        return torch.export.export(forward, (image,), dynamic_shapes=shapes, strict=False)


@contextmanager
def _size_oblivious() -> Iterator[None]:
    """Keep PyTorch's shape rules from specialising the graph to the size of the traced image.

    The rule for pooling tests the remainder of a division, only to handle negative sizes.
    """
    patched_config = fx_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with patched_config, patch.object(torch._meta_registrations, "div_rtn", operator.floordiv):
        yield


def _noise(channels: int, size: Size, seed: int) -> Tensor:
    """Return an image ``(1, C, H, W)`` of smooth noise in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand((1, channels, 9, 12), generator=generator)
    return F.interpolate(coarse, size, mode="bilinear")


def _metadata(segmenter: Method, method: str) -> dict[str, Any]:
    alpha: Any = segmenter.alpha
    by_layer = isinstance(alpha, Mapping)
    alpha = {name: float(value) for name, value in alpha.items()} if by_layer else float(alpha)
    spec = getattr(segmenter.model, "spec", None)
    return {
        "selfadapt_version": __version__,
        "method": method,
        "alpha": alpha,
        "network": getattr(spec, "name", type(segmenter.model).__name__),
        "classes": list(getattr(spec, "classes", ())),
    }


def _check_size(size: Size) -> None:
    if len(size) != 2:
        raise ValueError(f"size must be a height and a width in pixels, got {size!r}")
    for length in size:
        check_number("a height or width", length, 1, whole=True)


@contextmanager
def exporter_errors(
    size: Size | None, batch: bool = False, image: Tensor | None = None
) -> Iterator[None]:
    """Silence the exporters and turn their errors into a ValueError of one line.

    Args:
        size: The only size of the graph; None: any.
        batch: The graph takes any number of images.
        image: The image that the graph is run on.
    """
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    except (MemoryError, OSError):
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = f"{type(cause).__name__}: {shorten(str(cause), 240, placeholder=' ...')}"
        sizes = "any size" if size is None else size_text(size)
        failed_at = ""
        if image is not None and size is None:
            failed_at = f", it fails at {size_text(size_of(image))}"
        raise ValueError(
            f"this network cannot be exported for images of {sizes}{failed_at}: {reason}"
            + hint(size, batch)
        ) from error
    finally:
        logging.disable(previous)


def size_text(size: Size) -> str:
    """Return a size as text, width first."""
    return f"{size[1]}x{size[0]}"


def hint(size: Size | None, batch: bool) -> str:
    """Return a suggestion for graphs of any size or of any number of images."""
    ways = ["without --batch"] * batch + ["a fixed size, such as --size 1024x512"] * (not size)
    return f"; try {' or '.join(ways)}" if ways else ""
