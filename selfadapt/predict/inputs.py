"""Input files of ``predict``: images and videos from paths, folders and glob patterns."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from glob import escape, glob, has_magic
from pathlib import Path

from selfadapt.scenes import is_raster

IMAGES = (".bmp", ".gif", ".jp2", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Suffixes of images in folders and patterns; a file given explicitly may have any suffix."""
VIDEOS = (
    ".3gp", ".avi", ".flv", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts",
    ".webm", ".wmv",
)  # fmt: skip
"""Suffixes of videos, also of files given explicitly."""


@dataclass(frozen=True)
class Input:
    """A file to segment, and the subfolder of the output folder for its outputs."""

    path: Path
    subfolder: Path = Path()
    """Its folder relative to the fixed part of the pattern that matched it."""
    explicit: bool = False
    """Given as a path, not found in a folder or by a pattern."""

    @property
    def file(self) -> str:
        """The absolute path, which identifies the file in the journal."""
        return os.path.abspath(self.path)

    @property
    def shown(self) -> str:
        """Its name in messages."""
        return str(self.path)

    @property
    def is_video(self) -> bool:
        """Whether the file is a video."""
        return self.path.suffix.lower() in VIDEOS

    @cached_property
    def is_raster(self) -> bool:
        """Whether the file is georeferenced, or too large to be read whole."""
        return is_raster(self.path)

    def stamp(self) -> str:
        """Return a text that changes when the file does."""
        try:
            status = self.path.stat()
        except OSError:
            return "not there"
        return f"{status.st_size} {status.st_mtime_ns}"


def find_inputs(patterns: Iterable[str | Path]) -> list[Input]:
    """Return the images and videos given by paths, folders and patterns, sorted in each folder.

    A pattern contains ``*``, ``?`` or ``[...]``, and ``**`` for folders at any depth; outputs of
    its matches keep their subfolders. An existing file whose name looks like a pattern is taken as
    a file. A file that several links lead to is returned once.

    Example:
        >>> find_inputs(["nowhere/*.png"])
        Traceback (most recent call last):
        ...
        FileNotFoundError: nowhere/*.png matches no image or video
    """
    inputs: dict[str, Input] = {}
    for pattern in patterns:
        for item in _expand(Path(pattern)):
            file = os.path.realpath(item.path) if os.path.exists(item.path) else item.file
            earlier = inputs.setdefault(file, item)
            if earlier.path.is_symlink() and not (earlier.explicit or item.path.is_symlink()):
                inputs[file] = item  # prefer the file to a link to it
    return list(inputs.values())


def _expand(path: Path) -> Iterator[Input]:
    """Yield the inputs of a file, a folder or a pattern."""
    if path.is_dir():
        inputs = [Input(p) for p in sorted(path.iterdir()) if _is_input(p)]
        if not inputs:
            raise FileNotFoundError(f"there are no images in the folder {path}, and no videos")
        yield from inputs
    elif path.exists() or not has_magic(str(path)):
        if not path.exists():
            raise FileNotFoundError(f"there is no image file {path}")
        if not path.is_file():
            raise ValueError(f"an image must be a file, but {path} is a pipe or a device")
        yield Input(path, explicit=True)
    else:
        matches = [match for match in _matches(path) if _is_input(match)]
        if not matches:
            raise FileNotFoundError(f"{path} matches no image or video")
        parts = path.parent.parts
        num_fixed = next((i for i, part in enumerate(parts) if has_magic(part)), len(parts))
        start = Path(*parts[:num_fixed])
        yield from (Input(match, match.parent.relative_to(start)) for match in matches)


def _matches(pattern: Path) -> list[Path]:
    """Return the sorted matches of a pattern; ``**`` enters each folder once, despite links.

    ``glob`` would follow a link to a parent folder forty times, and two such links endlessly.
    """
    if "**" not in pattern.parts:
        return [Path(match) for match in sorted(glob(str(pattern)))]
    index = pattern.parts.index("**")
    rest = pattern.parts[index + 1 :] or ("*",)
    starts = _matches(Path(*pattern.parts[:index]))
    folders = [folder for start in starts for folder in _walk(start)]
    return sorted({match for f in folders for match in _matches(Path(escape(f), *rest))})


def _walk(start: Path) -> Iterator[str]:
    """Yield a folder and all visible folders below it, linked ones last."""
    queue, entered = [str(start)], set()
    while queue:
        for folder, subfolders, _ in os.walk(queue.pop(0)):
            if os.path.realpath(folder) in entered:
                subfolders.clear()
                continue
            entered.add(os.path.realpath(folder))
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            paths = [os.path.join(folder, name) for name in subfolders]
            queue += [path for path in paths if os.path.islink(path)]
            yield folder


def _is_input(path: Path) -> bool:
    """Return True if a path in a folder is a visible image or video file."""
    has_suffix = path.suffix.lower() in IMAGES + VIDEOS
    return has_suffix and not path.name.startswith(".") and not path.is_dir()
