"""Overlapping tiles of a scene, and the files in which their predictions are blended."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor

from selfadapt.files import atomic_write
from selfadapt.views import Size

OVERLAP = 320
"""Pixels that neighbouring tiles share. In the middle of them one prediction fades into the other;
what is further out, 128 pixels, is not used: there a network lacks surroundings, and DeepLabv1
ResNet-50 predicts other labels."""
BLEND = 64
"""Pixels over which one prediction fades into the other, in the middle of the overlap."""
ALIGNMENT = 32
"""Tiles start at multiples of this, where downsampling networks start in the whole image, too."""
CANVAS_FILES = (
    "done", "label.npy", "confidence.npy", "below0.npy", "below1.npy", "right0.npy", "right1.npy",
)  # fmt: skip
"""Files of a ``TileCanvas``."""


class Window(NamedTuple):
    """A part of a scene, in pixels."""

    top: int
    left: int
    height: int
    width: int

    @property
    def slices(self) -> tuple[slice, slice]:
        """Rows and columns."""
        rows = slice(self.top, self.top + self.height)
        return rows, slice(self.left, self.left + self.width)


@dataclass(frozen=True)
class Span:
    """The extent of tiles along one axis of a scene."""

    start: int
    """First pixel that the network sees."""
    stop: int
    """End of what the network sees."""
    first: int
    """First pixel of which the prediction is used."""
    last: int
    """End of what is used."""
    blend: int
    """Number of pixels at either end of what is used that are blended with a neighbour."""
    is_first: bool
    is_last: bool

    def weights(self) -> Tensor:
        """Return the weight of each pixel that is used; those of all tiles sum up to 1."""
        ramp = (torch.arange(self.blend) + 0.5) / self.blend
        weights = torch.ones(self.last - self.first)
        if not self.is_first:
            weights[: self.blend] = ramp
        if not self.is_last:
            weights[len(weights) - self.blend :] = 1 - ramp
        return weights


def spans(length: int, tile: int, overlap: int, blend: int, alignment: int) -> list[Span]:
    """Divide an axis into overlapping tiles, evenly; the last one may be shorter.

    Args:
        length: Length of the axis.
        tile: Length of a tile.
        overlap: Number of pixels that neighbours share, at least.
        blend: Number of them that are blended, in the middle.
        alignment: Tiles start at multiples of this.

    Example:
        >>> [(span.start, span.stop) for span in spans(99, 64, 16, 8, alignment=4)]
        [(0, 64), (36, 99)]
        >>> [(span.first, span.last) for span in spans(99, 64, 16, 8, alignment=4)]
        [(0, 54), (46, 99)]
    """
    end = ceil(max(0, length - tile) / alignment)  # where the last tile starts
    number = 1 + ceil(end / max(1, (tile - overlap) // alignment))
    starts = [alignment * (index * end // max(1, number - 1)) for index in range(number)]
    stops = [min(start + tile, length) for start in starts]
    cuts = [(start + stop) // 2 for start, stop in zip(starts[1:], stops, strict=False)]
    firsts = [0, *(cut - blend // 2 for cut in cuts)]
    lasts = [*(cut - blend // 2 + blend for cut in cuts), length]
    return [
        Span(*ends, blend, is_first=index == 0, is_last=index == number - 1)
        for index, ends in enumerate(zip(starts, stops, firsts, lasts, strict=True))
    ]


class TileGrid:
    """The tiles of a scene, row by row.

    Args:
        size: Height and width of the scene.
        tile: Height and width of a tile.
        overlap: Number of pixels that neighbours share.
        alignment: Tiles start at multiples of this.
    """

    def __init__(
        self, size: Size, tile: Size, overlap: int = OVERLAP, alignment: int = ALIGNMENT
    ) -> None:
        self.size = size
        overlap = min(overlap, 3 * min(tile) // 8)
        self.blend = max(1, overlap * BLEND // OVERLAP)
        self.rows, self.columns = (
            spans(length, side, overlap, self.blend, alignment)
            for length, side in zip(size, tile, strict=True)
        )

    def __len__(self) -> int:
        return len(self.rows) * len(self.columns)

    def spans(self, index: int) -> tuple[Span, Span]:
        """Return the rows and columns of a tile."""
        row, column = divmod(index, len(self.columns))
        return self.rows[row], self.columns[column]

    def window(self, index: int) -> Window:
        """Return what the network sees of the scene in a tile."""
        rows, columns = self.spans(index)
        return Window(
            rows.start, columns.start, rows.stop - rows.start, columns.stop - columns.start
        )


class TileCanvas:
    """Label and confidence of a scene, made of tiles that are added in the order of the grid.

    Everything is in files, so that the memory holds one tile at a time, whatever the size of the
    scene, and a process that was killed goes on at its tile.

    Args:
        folder: The folder for the files.
        grid: The tiles.
        num_classes: Number of classes, for the first tile.
    """

    def __init__(self, folder: Path, grid: TileGrid, num_classes: int = 0) -> None:
        self.grid, self._done = grid, folder / "done"
        height, width = grid.size
        kind = np.uint8 if num_classes <= 256 else np.uint16
        self.label = _array(folder / "label.npy", (height, width), kind)
        """Most likely class of each pixel ``(H, W)``."""
        self.confidence = _array(folder / "confidence.npy", (height, width), np.uint8)
        """Its probability ``(H, W)``, from 0 to 255."""
        # What still lacks the tile below, or the one to the right. A tile reads one of two arrays
        # and writes the other, so that it can be added again.
        strip, side = (num_classes, grid.blend, width), (num_classes, height, grid.blend)
        self._below = [_array(folder / f"below{i}.npy", strip, np.float32) for i in (0, 1)]
        self._right = [_array(folder / f"right{i}.npy", side, np.float32) for i in (0, 1)]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self._below[0])

    def add(self, probs: Tensor) -> None:
        """Add the prediction for the next tile, class probabilities ``(C, h, w)`` of its window."""
        index, blend = num_done(self._done.parent), self.grid.blend
        row, column = divmod(index, len(self.grid.columns))
        rows, columns = self.grid.spans(index)
        y, x = slice(rows.first, rows.last), slice(columns.first, columns.last)
        used = probs[:, y.start - rows.start :, x.start - columns.start :]
        used = used[:, : y.stop - y.start, : x.stop - x.start].cpu()
        used = used * rows.weights()[:, None] * columns.weights()
        left = 0 if columns.is_first else blend
        if not columns.is_first:  # this has the part of the tiles above, too
            used[:, :, :blend] += torch.from_numpy(self._right[column % 2][:, y].copy())
        if not rows.is_first:
            above = self._below[row % 2][:, :, x.start + left : x.stop]
            used[:, :blend, left:] += torch.from_numpy(above.copy())
        height = len(used[0]) - (0 if rows.is_last else blend)
        width = len(used[0, 0]) - (0 if columns.is_last else blend)
        confidence, label = used[:, :height, :width].max(dim=0)
        done = slice(y.start, y.start + height), slice(x.start, x.start + width)
        self.label[done] = label.numpy()
        self.confidence[done] = (confidence.clamp(0, 1) * 255).round().byte().numpy()
        below, right = self._below[1 - row % 2], self._right[1 - column % 2]
        if not rows.is_last:
            below[:, :, done[1]] = used[:, height:, :width].numpy()
        if not columns.is_last:
            right[:, y] = used[:, :, width:].numpy()
        for array in (self.label, self.confidence, below, right):
            array.flush()
        with atomic_write(self._done) as temporary:
            temporary.write_text(str(index + 1))


def num_done(folder: Path) -> int:
    """Return the number of tiles that were added to the canvas in a folder."""
    path = folder / "done"
    return int(path.read_text()) if path.is_file() else 0


def _array(path: Path, shape: tuple[int, ...], dtype: type[np.generic]) -> np.memmap:
    """Return an array in a file. Before the first tile is done, the file may be cut off."""
    if num_done(path.parent):
        return open_memmap(path, mode="r+")
    array = open_memmap(path, mode="w+", shape=shape, dtype=dtype)
    if hasattr(os, "posix_fallocate"):  # a disk that fills up later would end the process
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def blocks(size: Size, side: int = 1024) -> Iterator[Window]:
    """Yield windows that cover a size without overlap, row by row.

    Example:
        >>> [tuple(window) for window in blocks((3, 5), side=4)]
        [(0, 0, 3, 4), (0, 4, 3, 1)]
    """
    for top in range(0, size[0], side):
        for left in range(0, size[1], side):
            yield Window(top, left, min(side, size[0] - top), min(side, size[1] - left))
