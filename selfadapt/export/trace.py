"""Record a method of one forward pass as a graph."""

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

FORWARD = ("source", "p-bn", "san")
"""Methods that are one forward pass."""
OTHERS = {
    "tta": "segments many views of an image, at sizes of their own",
    "intent": "segments an image several times and weighs the results",
    "mc-dropout": "draws random numbers",
    "ensemble": "runs several networks",
}
"""What the other methods do instead, unless it is gradient steps."""
SIZES: tuple[Size, ...] = ((97, 203), (160, 128), (224, 289), (130, 75))
"""Heights and widths the files are checked at; the graph is recorded at the first."""


class Settings(TypedDict, total=False):
    """What is exported, see ``trace``."""

    method: str
    alpha: Alpha | None
    size: Size | None
    interface: Interface | None


@dataclass(frozen=True)
class Trace:
    """A method as a graph, and what it has to give."""

    program: torch.export.ExportedProgram
    images: list[Tensor]
    """Images ``(1, C, H, W)`` to check a file with."""
    probs: list[Tensor]
    """What the method gives for them here, ``(1, classes, H, W)``."""
    about: dict[str, Any]
    """What is written into a file beside the graph."""
    notes: tuple[str, ...]
    """What a user should know."""
    size: Size | None
    """The only height and width the graph takes; None: any."""


def check_exportable(method: str) -> None:
    """Raise ValueError unless the method is one forward pass."""
    settings_of(method)  # is there such a method?
    if method not in FORWARD:
        instead = OTHERS.get(method, "takes gradient steps for each image")
        raise ValueError(
            f"the method {method!r} {instead}, which one pass of a graph cannot do; "
            f"methods to export: {', '.join(FORWARD)}"
        )


def trace(
    model: nn.Module,
    *,
    method: str = "san",
    alpha: Alpha | None = None,
    size: Size | None = None,
    interface: Interface | None = None,
) -> Trace:
    """Record a method of one forward pass as a graph.

    A copy of the network is recorded, on the CPU and in float32.

    Args:
        model: Any segmentation network. It is never written to.
        method: ``san``, ``source`` or ``p-bn``.
        alpha: Weight of the image statistics in SaN, 0 to 1; or weights by name pattern. None: the
            method's own.
        size: The only height and width the graph is to take. None: any.
        interface: What the network takes and gives, where that is not detected.
    """
    check_exportable(method)
    if size is not None:
        _check_size(size)
    sizes = SIZES if size is None else (size,) * 2
    settings: dict[str, Any] = {} if alpha is None else {"alpha": alpha}
    most = max(height * width for height, width in sizes)
    segment: Any = create_method(
        method, model, interface=interface, compare=False, fast=False, max_pixels=most, **settings
    )
    num = segment.interface.channels or 3
    images = [_noise(num, size, seed) for seed, size in enumerate(sizes)]
    probs = [segment(image[0]).probs[None].float().cpu() for image in images]
    program = _record(segment, images[0], dynamic=size is None)
    run = program.module()  # which refuses sizes it was not recorded for
    for image in images:
        with explained(size, at=image):
            run(image)
    return Trace(program, images, probs, _about(segment, method), segment.notes, size)


def _record(segment: Method, image: Tensor, *, dynamic: bool) -> torch.export.ExportedProgram:
    with explained(None):
        network = private_copy(segment.model).cpu().float()
    convert(network, segment.san)
    forward = Forward(network, segment.interface).eval().requires_grad_(False)
    free = torch.export.Dim.DYNAMIC
    shapes = ({2: free, 3: free},) if dynamic else None
    size = None if dynamic else size_of(image)
    with torch.no_grad(), _free_sizes(), explained(size):
        return torch.export.export(forward, (image,), dynamic_shapes=shapes, strict=False)


@contextmanager
def _free_sizes() -> Iterator[None]:
    """Keep PyTorch's shape rules from deciding by the size of the image at hand.

    Its rule for pooling asks whether a division leaves a rest only to correct a sign, which sizes
    do not have.
    """
    oblivious = fx_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with oblivious, patch.object(torch._meta_registrations, "div_rtn", operator.floordiv):
        yield


def _noise(channels: int, size: Size, seed: int) -> Tensor:
    """Return an image ``(1, C, H, W)`` of smooth noise in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand((1, channels, 9, 12), generator=generator)
    return F.interpolate(coarse, size, mode="bilinear")


def _about(segment: Method, method: str) -> dict[str, Any]:
    alpha: Any = segment.alpha
    by_layer = isinstance(alpha, Mapping)
    alpha = {name: float(value) for name, value in alpha.items()} if by_layer else float(alpha)
    spec = getattr(segment.model, "spec", None)
    return {
        "selfadapt_version": __version__,
        "method": method,
        "alpha": alpha,
        "network": getattr(spec, "name", type(segment.model).__name__),
        "classes": list(getattr(spec, "classes", ())),
    }


def _check_size(size: Size) -> None:
    if len(size) != 2:
        raise ValueError(f"size must be a height and a width in pixels, got {size!r}")
    for length in size:
        check_number("a height or width", length, 1, whole=True)


@contextmanager
def explained(size: Size | None, at: Tensor | None = None) -> Iterator[None]:
    """Quieten the exporters; whatever goes wrong in there is said in one line.

    Args:
        size: The only size there is to be a graph for; None: any.
        at: The image that is tried.
    """
    was = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    except (MemoryError, OSError):
        raise
    except Exception as error:
        sizes = "any size" if size is None else size_text(size)
        tried = "" if at is None or size is not None else f", it fails at {size_text(size_of(at))}"
        raise ValueError(
            f"this network cannot be exported for images of {sizes}{tried}: {_cause(error)}"
            + advice(size)
        ) from error
    finally:
        logging.disable(was)


def _cause(error: BaseException) -> str:
    """Return in one line what went wrong first."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {shorten(str(error), 240, placeholder=' ...')}"


def size_text(size: Size) -> str:
    """Return a size as it is written elsewhere, width first."""
    return f"{size[1]}x{size[0]}"


def advice(size: Size | None) -> str:
    """Return what may help where a graph for any size fails."""
    return "; give the one size it is for, such as --size 1024x512" if size is None else ""
