"""Folder layouts of datasets: a path pattern for images and one for labels.

In a pattern ``*`` is any text within a name, ``**`` any folders, ``{png,jpg}`` a choice, and
``{split}`` the folder of the split. An image and a label form a pair if their wildcards match the
same text, which is the name of the pair.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from selfadapt.labels import LabelTable
from selfadapt.optional import import_optional


@dataclass(frozen=True)
class Pair:
    """The paths of an image and its label."""

    name: str
    image: Path
    label: Path


@dataclass(frozen=True)
class Layout:
    """A folder layout of a dataset, with the table of its labels."""

    images: str
    labels: str
    table: LabelTable
    split_file: str | None = None
    """A file that lists the numbers of the images of each split."""

    def has(self, root: Path, folder: str) -> bool:
        """Return True if this layout can have the split ``folder`` ("" for no split folder)."""
        if folder and self.split_file and "{split}" not in self.images:
            return (root / self.split_file).is_file()
        return ("{split}" in self.images) == bool(folder)


@dataclass(frozen=True)
class Listing:
    """The files of one split of a dataset."""

    root: Path
    layout: Layout
    pairs: tuple[Pair, ...]
    images_without_label: tuple[Path, ...]
    labels_without_image: tuple[Path, ...]


def list_pairs(root: Path, layout: Layout, folder: str) -> Listing | None:
    """Return the files of a split in natural order; None without images or without labels."""
    if not layout.has(root, folder):
        return None
    images = find_files(root, layout.images.replace("{split}", folder))
    labels = find_files(root, layout.labels.replace("{split}", folder)) if images else {}
    if layout.split_file and folder:
        path = root / layout.split_file
        try:  # split.mat of GTA has the numbers of each split
            lists = import_optional("scipy", "data").io.loadmat(path)
            numbers = {int(number) for number in lists[f"{folder}Ids"].ravel()}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} does not hold the lists trainIds, valIds, testIds") from error
        images, labels = (
            {
                name: path
                for name, path in files.items()
                if name.isdecimal() and int(name) in numbers
            }
            for files in (images, labels)
        )
    if not images or not labels:
        return None
    return Listing(
        root,
        layout,
        tuple(Pair(name, images[name], labels[name]) for name in images if name in labels),
        tuple(path for name, path in images.items() if name not in labels),
        tuple(path for name, path in labels.items() if name not in images),
    )


def find_files(root: Path, pattern: str) -> dict[str, Path]:
    """Return the files under ``root`` that match ``pattern``, by the text of its wildcards.

    Hidden files are left out. The files are in the natural order of the texts.
    """
    files: dict[str, Path] = {}
    for path, texts in _walk(str(root), pattern.split("/"), ()):
        name = "/".join(texts)
        if name in files:
            raise ValueError(
                f"there must be one file for each name, but {files[name]} and {path} are both "
                f"{name!r}; remove one of them"
            )
        files[name] = Path(path)
    return {name: files[name] for name in sorted(files, key=natural_key)}


def natural_key(text: str) -> tuple[list[str | int], str]:
    """Return a sort key that orders numbers in a text by their value.

    Example:
        >>> sorted(["b1", "a10", "a9"], key=natural_key)
        ['a9', 'a10', 'b1']
    """
    parts = re.split(r"(\d+)", text, flags=re.ASCII)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], text


def _walk(
    folder: str, parts: Sequence[str], texts: tuple[str, ...]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    part, rest = parts[0], parts[1:]
    if part == "**":
        yield from _walk(folder, rest, texts)
        for entry in _entries(folder):
            if entry.is_dir():
                yield from _walk(entry.path, parts, (*texts, entry.name))
    elif rest and "*" not in part and "{" not in part:
        yield from _walk(os.path.join(folder, part), rest, texts)
    else:
        for entry in _entries(folder):
            match = _regex(part).fullmatch(entry.name)
            if match and rest and entry.is_dir():
                yield from _walk(entry.path, rest, (*texts, *match.groups()))
            elif match and not rest and entry.is_file():
                yield entry.path, (*texts, *match.groups())


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []


@cache
def _regex(part: str) -> re.Pattern[str]:
    text = re.escape(part).replace(r"\*", "(.*)").replace(r"\{", "(?i:").replace(r"\}", ")")
    return re.compile(text.replace(",", "|"))
