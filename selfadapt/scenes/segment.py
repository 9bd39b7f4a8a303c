"""Adapt a network once to a scene, and predict the scene tile by tile.

The network adapts to windows from all over the scene, side by side as one image. Its statistics and
tuned weights are then the same for all tiles: tiles that adapted by themselves would differ where
they meet.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from itertools import product
from math import isqrt, lcm, log2
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from selfadapt.adapted import Adapted, AdaptError, changes_network
from selfadapt.copying import private_copy
from selfadapt.files import atomic_write, make_folder
from selfadapt.method import Method
from selfadapt.methods import Segments
from selfadapt.prefetch import prefetch
from selfadapt.result import ResizedMap, Result
from selfadapt.scenes.reading import OVERVIEW_PIXELS, WindowReader
from selfadapt.scenes.tiles import (
    ALIGNMENT,
    CANVAS_FILES,
    OVERLAP,
    TileCanvas,
    TileGrid,
    Window,
    num_done,
)
from selfadapt.views import Size, size_of

WINDOW_SIDE = 512
"""Side of the windows that a network adapts to: as large as whole images of many datasets."""
MIN_TILE = 128
STATE = "adapted.safetensors"


@dataclass(frozen=True)
class SceneMaps:
    """A segmented scene."""

    label: np.ndarray
    """Most likely class of each pixel ``(H, W)``."""
    confidence: np.ndarray
    """Its probability ``(H, W)``, from 0 to 255."""
    num_classes: int
    notes: tuple[str, ...]
    quality: float | None = None
    """Of the prediction for the windows that the network adapted to, see ``Result``."""
    is_adapted: bool = False
    """The network took gradient steps."""
    source: np.ndarray | None = None
    """Most likely class for the network as trained ``(H, W)``, if the method compares."""
    probs: Tensor | ResizedMap | None = None
    """Class probabilities ``(C, H, W)``, of a scene that was not segmented in tiles."""


def segment_tiles(
    method: Method,
    scene: WindowReader,
    folder: Path,
    *,
    stamp: str = "",
    tile: int | None = None,
    overlap: int = OVERLAP,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> SceneMaps:
    """Segment a scene in tiles, with a network that adapts to it once.

    Args:
        method: The method, whose prediction must be that of a single network.
        scene: The scene.
        folder: Folder for what a process that goes on needs; the label and confidence are in it.
        stamp: Text that changes when the scene does: then everything is done again.
        tile: Side of a tile; None: as large as ``max_pixels`` allows.
        overlap: Number of pixels that neighbouring tiles share.
        show: Called with the numbers of finished and of all tiles.

    Raises:
        ValueError: No single network gives the method's prediction, or adaptation failed.
    """
    stamp_path = folder / "stamp"
    if not stamp_path.is_file() or stamp_path.read_text() != stamp:
        make_folder(folder)
        for name in (STATE, *CANVAS_FILES):  # of another scene
            (folder / name).unlink(missing_ok=True)
        with atomic_write(stamp_path) as temporary:
            temporary.write_text(stamp)
    network = _adapted(method, scene, folder) if changes_network(method) else copy(method)
    network.compare = False
    # Fused kernels and recordings would hide how maps are upsampled.
    network.engine = copy(network.engine)
    network.engine.fast = replace(network.fast, kernels=False, graphs=False)
    side = isqrt(method.max_pixels) if tile is None else tile
    if side < MIN_TILE:
        raise AdaptError(f"tiles need max_pixels of {MIN_TILE**2} or more, got {side**2}")
    fixed = method.interface.size
    alignment = 1 if fixed else lcm(ALIGNMENT, method.interface.divisor or 1)
    side = side // alignment * alignment
    grid = TileGrid(scene.size, fixed or (side, side), overlap, alignment)
    done = num_done(folder)
    canvas = TileCanvas(folder, grid) if done else None
    show(done, len(grid))
    windows = [grid.window(index) for index in range(done, len(grid))]
    with closing(prefetch(scene.read, windows, readers=1)) as images:
        for index, image in enumerate(images, start=done):
            with SceneUpsampling(grid.window(index), scene.size):
                probs = network(image).probs
            canvas = canvas or TileCanvas(folder, grid, len(probs))
            canvas.add(probs)
            show(index + 1, len(grid))
    assert canvas is not None
    _, _, height, width = grid.window(0)
    note = f"segmented in {len(grid)} tiles of {width}x{height} pixels"
    maps = SceneMaps(canvas.label, canvas.confidence, canvas.num_classes, (*scene.notes, note))
    if not isinstance(network, Adapted):
        return maps
    result = network.result
    notes = (*scene.notes, *network.notes, *result.notes, f"adapted to once, and {note}")
    return replace(
        maps, notes=tuple(dict.fromkeys(notes)), quality=result.quality,
        is_adapted=bool(result.losses),
    )  # fmt: skip


def segment_whole(method: Segments, scene: WindowReader) -> SceneMaps:
    """Segment a scene at a size of at most ``max_pixels``, and bring the maps to its own size."""
    first: Any = getattr(method, "members", (method,))[0]  # of an ensemble
    result = method(scene.overview(first.max_pixels))
    kind = np.uint8 if result.num_classes <= 256 else np.uint16
    label, source = result.label.cpu().numpy().astype(kind), result.source_label
    confidence = (result.confidence.clamp(0, 1) * 255).round().byte().cpu().numpy()
    notes, probs = (*scene.notes, *result.notes), result.stored_probs
    if label.shape != scene.size:
        height, width = label.shape
        label, confidence = (nearest(values, scene.size) for values in (label, confidence))
        notes += (f"segmented at {width}x{height}, the image is {scene.size[1]}x{scene.size[0]}",)
        is_scores = isinstance(probs, ResizedMap) and probs.scores
        values = probs.values if isinstance(probs, ResizedMap) else probs
        probs = ResizedMap(values, scene.size, scores=is_scores)
    return SceneMaps(
        label, confidence, result.num_classes, notes, result.quality, bool(result.losses),
        None if source is None else source.cpu().numpy().astype(kind), probs,
    )  # fmt: skip


def nearest(array: np.ndarray, size: Size) -> np.ndarray:
    """Return an array ``(H, W)`` at another size, by its nearest values."""
    rows, columns = (
        np.arange(new) * old // new for new, old in zip(size, array.shape, strict=True)
    )
    return np.asarray(array[rows][:, columns])


class SceneUpsampling(TorchFunctionMode):
    """Upsamples maps of a tile as in the whole scene, where ``align_corners=True`` asks for it.

    That stretches maps such that the outermost pixels of both sizes lie on each other: by a factor
    that depends on the length, so that tiles would not fit together. Networks learn it, and their
    masks are best with it.

    Args:
        window: The window of the tile.
        size: Height and width of the scene.
    """

    def __init__(self, window: Window, size: Size) -> None:
        super().__init__()
        self.axes = list(zip(window[:2], window[2:], size, strict=True))

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is not F.interpolate or not (kwargs or {}).get("align_corners"):
            return result
        maps = args[0] if args else (kwargs or {})["input"]
        grids = []
        for axis, old, new in zip(self.axes, size_of(maps), size_of(result), strict=True):
            start, length, total = axis
            factor = 2 ** round(log2(new / old))
            if old == 1 or factor < 2 or abs(new / old / factor - 1) > 0.05:
                return result  # pooled maps, which say nothing of places
            stride, new_stride = length / old, length / new
            pixels = torch.arange(new, device=maps.device) + round(start / new_stride)
            whole = round(total / stride) - 1, max(1, round(total / new_stride) - 1)
            places = pixels * (whole[0] / whole[1]) - start / stride
            grids.append(2 * places / (old - 1) - 1)
        y, x = torch.meshgrid(*grids, indexing="ij")
        grid = torch.stack([x, y], dim=-1).to(maps.dtype).expand(len(maps), -1, -1, -1)
        return F.grid_sample(maps, grid, padding_mode="border", align_corners=True)


def sample(scene: WindowReader, max_pixels: int) -> Tensor:
    """Return an image ``(C, H, W)`` that stands for a scene: itself if it has few enough pixels.

    Else it has windows from all over the scene, side by side in their order: from each cell of a
    grid the window with the most data, in doubt the one in the middle.
    """
    height, width = scene.size
    if height * width <= max_pixels:
        return scene.read(scene.whole)
    side = min(WINDOW_SIDE, isqrt(max_pixels), height, width)
    number = max_pixels // side**2
    rows = max(1, min(round((number * height / width) ** 0.5), height // side, number))
    columns = max(1, min(number // rows, width // side))
    shares = _valid_shares(scene)
    cells = [
        sorted(_candidates(scene.size, (rows, columns), cell, side), key=shares, reverse=True)
        for cell in product(range(rows), range(columns))
    ]
    rest = sorted((window for cell in cells for window in cell[1:]), key=shares, reverse=True)
    chosen = [cell[0] if shares(cell[0]) > 0 or not rest else rest.pop(0) for cell in cells]
    images = [scene.read(window) for window in chosen]
    lines = [torch.cat(images[i : i + columns], dim=2) for i in range(0, len(images), columns)]
    return torch.cat(lines, dim=1)


def _candidates(size: Size, cells: Size, cell: Size, side: int) -> Iterator[Window]:
    """Yield windows in a cell of a grid, the one in the middle first."""
    ranges = []
    for length, number, index in zip(size, cells, cell, strict=True):
        first, last = index * length // number, (index + 1) * length // number - side
        ranges.append([first + (last - first) * share // 4 for share in (2, 1, 3, 0, 4)])
    for top, left in product(*ranges):
        yield Window(top, left, side, side)


def _valid_shares(scene: WindowReader) -> Callable[[Window], float]:
    """Return a function that estimates which share of a window has data."""
    height, width = scene.size
    scale = min(1.0, (OVERVIEW_PIXELS / (height * width)) ** 0.5)
    size = max(1, int(height * scale)), max(1, int(width * scale))
    valid = scene.valid(scene.whole, size)
    if valid is None:
        return lambda window: 1.0

    def share(window: Window) -> float:
        top, left = int(window.top * scale), int(window.left * scale)
        rows, columns = (max(1, int(side * scale)) for side in window[2:])
        return float(valid[top : top + rows, left : left + columns].float().mean())

    return share


def _adapted(method: Method, scene: WindowReader, folder: Path) -> Adapted:
    """Return a network adapted to a scene; one that a process before has adapted is the same."""
    path = folder / STATE
    if path.is_file():
        return _load(method, path)
    adapted = method.adapt(sample(scene, method.max_pixels))
    _save(adapted, path)
    return adapted


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _save(adapted: Adapted, path: Path) -> None:
    values = {name: value.detach().cpu() for name, value in _tensors(adapted.module).items()}
    content = {
        "share": adapted.share,
        "temperature": adapted.temperature,
        "notes": adapted.notes[len(adapted.method.notes) :],
        "result": {name: getattr(adapted.result, name) for name in ("losses", "quality", "notes")},
    }
    with atomic_write(path) as temporary:
        copies = {name: value.contiguous().clone() for name, value in values.items()}
        try:
            save_file(copies, temporary, {"adapted": json.dumps(content)})
        except SafetensorError as error:
            raise OSError(str(error)) from error


def _load(method: Method, path: Path) -> Adapted:
    module = private_copy(method.model)
    with safe_open(path, "pt") as file:
        content = json.loads(file.metadata()["adapted"])
        for name, value in _tensors(module).items():
            value.data.copy_(file.get_tensor(name))
    losses, quality, notes = (content["result"][name] for name in ("losses", "quality", "notes"))
    result = Result(
        probs=torch.empty(0, 0, 0), losses=tuple(losses), quality=quality, notes=tuple(notes)
    )
    share, temperature = content["share"], content["temperature"]
    return Adapted(method, module, result, share, temperature, tuple(content["notes"]))
