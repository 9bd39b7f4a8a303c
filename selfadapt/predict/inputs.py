"""What is meant by the words of a user: image files, videos, folders and patterns."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from glob import escape, glob, has_magic
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
    keeps its folders. A file whose name looks like a pattern is that file. One that several links
    lead to is there once.

    Example:
        >>> find_inputs(["nowhere/*.png"])
        Traceback (most recent call last):
        ...
        FileNotFoundError: nowhere/*.png matches no image or video
    """
    inputs: dict[str, Input] = {}
    for word in words:
        for one in _meant(word):
            file = os.path.realpath(one.path) if os.path.exists(one.path) else one.file
            earlier = inputs.setdefault(file, one)
            if earlier.path.is_symlink() and not (earlier.named or one.path.is_symlink()):
                inputs[file] = one  # the file itself rather than a link to it
    return list(inputs.values())


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
        matches = [match for match in _matches(path) if _counts(match)]
        inside = [Input(match, match.parent.relative_to(_start(path))) for match in matches]
        if not inside:
            raise FileNotFoundError(f"{path} matches no image or video")
        yield from inside


def _matches(pattern: Path) -> list[Path]:
    """Return what a pattern matches, sorted; ``**`` enters each folder once, however it is linked.

    ``glob`` would follow a link to a folder above it forty times, and two of them for ever.
    """
    if "**" not in pattern.parts:
        return [Path(match) for match in sorted(glob(str(pattern)))]
    at = pattern.parts.index("**")
    rest = pattern.parts[at + 1 :] or ("*",)
    folders = [folder for start in _matches(Path(*pattern.parts[:at])) for folder in _tree(start)]
    found = [match for folder in folders for match in _matches(Path(escape(folder), *rest))]
    return sorted(set(found))


def _tree(start: Path) -> Iterator[str]:
    """Yield a folder and all in it that are not hidden, those that links lead to last."""
    waiting, entered = [str(start)], set()
    while waiting:
        for folder, inside, _ in os.walk(waiting.pop(0)):
            if os.path.realpath(folder) in entered:
                inside.clear()
                continue
            entered.add(os.path.realpath(folder))
            inside[:] = sorted(name for name in inside if not name.startswith("."))
            paths = [os.path.join(folder, name) for name in inside]
            waiting += [path for path in paths if os.path.islink(path)]
            yield folder


def _counts(path: Path) -> bool:
    """Say whether a file that was not named itself is an image or a video."""
    known = path.suffix.lower() in IMAGES + VIDEOS
    return known and not path.name.startswith(".") and not path.is_dir()


def _start(pattern: Path) -> Path:
    """Return the folder at which a pattern starts to be one."""
    parts = pattern.parent.parts
    plain = next((number for number, part in enumerate(parts) if has_magic(part)), len(parts))
    return Path(*parts[:plain])
