"""What is meant by the words of a user: image files, videos, folders and patterns."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path

IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""What counts as an image in a folder; a file that is named may have any other suffix."""
VIDEOS = (
    ".3gp", ".avi", ".flv", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts",
    ".webm", ".wmv",
)  # fmt: skip
"""What is a video, wherever it is."""


@dataclass(frozen=True)
class Input:
    """A file to segment, and where below the output folder its outputs go."""

    path: Path
    place: Path = Path()
    """Its folder, seen from where the pattern that found it starts."""
    named: bool = False
    """It was named itself, not found in a folder."""

    @property
    def file(self) -> str:
        """The path in full, by which the journal knows the file."""
        return os.path.abspath(self.path)

    @property
    def is_video(self) -> bool:
        """Whether it has frames."""
        return self.path.suffix.lower() in VIDEOS

    def stamp(self) -> str:
        """Return a text that changes when the file does."""
        try:
            status = self.path.stat()
        except OSError:
            return "not there"
        return f"{status.st_size} {status.st_mtime_ns}"


def find_inputs(words: Iterable[str | Path]) -> list[Input]:
    """Return the files meant by files, folders and patterns, those of a folder sorted by name.

    A pattern has ``*``, ``?`` or ``[...]``, and ``**`` for folders at any depth; what it finds
    keeps its folders. A file whose name looks like a pattern is that file.

    Example:
        >>> find_inputs(["nowhere/*.png"])
        Traceback (most recent call last):
        ...
        FileNotFoundError: nowhere/*.png matches no image or video
    """
    found: dict[str, Input] = {}
    for word in words:
        for one in _meant(word):
            found.setdefault(one.file, one)
    return list(found.values())


def _meant(word: str | Path) -> Iterator[Input]:
    path = Path(word)
    if path.is_dir():
        inside = [Input(p) for p in sorted(path.iterdir()) if _counts(p)]
        if not inside:
            raise FileNotFoundError(f"there are no images in the folder {path}, and no videos")
        yield from inside
    elif path.exists() or not has_magic(str(path)):
        if not path.exists():
            raise FileNotFoundError(f"there is no image file {path}")
        if not path.is_file():
            raise ValueError(f"an image must be a file, but {path} is a pipe or a device")
        yield Input(path, named=True)
    else:
        matches = map(Path, sorted(glob(str(path), recursive=True)))
        inside = [Input(p, p.parent.relative_to(_start(path))) for p in matches if _counts(p)]
        if not inside:
            raise FileNotFoundError(f"{path} matches no image or video")
        yield from inside


def _counts(path: Path) -> bool:
    """Say whether a file that was not named itself is an image or a video."""
    known = path.suffix.lower() in IMAGES + VIDEOS
    return known and not path.name.startswith(".") and not path.is_dir()


def _start(pattern: Path) -> Path:
    """Return the folder at which a pattern starts to be one."""
    parts = pattern.parent.parts
    plain = next((number for number, part in enumerate(parts) if has_magic(part)), len(parts))
    return Path(*parts[:plain])
