"""A dataset of pairs of an image and a label, read and mapped to classes on access."""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image as PILImage

from selfadapt.data.layouts import Pair
from selfadapt.data.reading import read_label, read_picture
from selfadapt.labels import ClassSpace, LabelTable
from selfadapt.pseudo import IGNORE
from selfadapt.streets import render

WRONG_ID = "is this the right dataset, and are these its files of ids?"
"""Default advice if a label has an id that is not in the table."""


class Sample(NamedTuple):
    """An image with its label."""

    name: str
    image: PILImage.Image
    """RGB."""
    label: np.ndarray
    """Train ids ``(H, W)``, uint8; 255 is ignored."""


class Dataset:
    """Pairs of an image and a label, read on access.

    Args:
        name: Dataset and split, such as ``cityscapes/val``.
        pairs: Paths of the images and labels.
        space: The classes of the labels.
        table: The meaning of the raw ids in the label files.
        notes: Notes on what was left out.
        wrong_id: Advice if a raw id is not in the table.
    """

    def __init__(
        self,
        name: str,
        pairs: Sequence[Pair],
        space: ClassSpace,
        table: LabelTable,
        notes: Sequence[str] = (),
        wrong_id: str = WRONG_ID,
    ) -> None:
        self.name = name
        self.pairs = tuple(pairs)
        self.space = space
        self.table = table
        self.notes = tuple(notes)
        self.wrong_id = wrong_id
        self._train_ids = table.lookup(space)
        self._is_known = np.isin(np.arange(len(self._train_ids)), list(table.ids))
        if (self._train_ids == IGNORE).all():
            raise ValueError(
                f"{name} has no class of the requested ones: it has "
                f"{', '.join(table_classes(table))}, requested are {', '.join(space.names)}"
            )

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample:
        pair = self.pairs[index]
        image, raw = self.read(pair)
        if image.size != raw.shape[::-1]:
            raise ValueError(size_error(pair, image.size, raw.shape[::-1]))
        if not self._is_known[raw].all():
            ids = sorted(set(self.table.ids) - {IGNORE})
            raise ValueError(
                f"label {pair.label} holds id {self.unknown_ids(raw)[0]}, but the ids of "
                f"{self.name} go from {ids[0]} to {ids[-1]}; {self.wrong_id}"
            )
        return Sample(pair.name, image, self._train_ids[raw])

    def fingerprint(self) -> str:
        """Return a short text that changes with the image names and the meaning of label ids.

        The content of the files is left out, so that a damaged file can be repaired.
        """
        content = [pair.name for pair in self.pairs], sorted(self.table.ids.items())
        return f"{len(self)} of {self.name}, {zlib.crc32(repr(content).encode()):08x}"

    def read(self, pair: Pair) -> tuple[PILImage.Image, np.ndarray]:
        """Return the image and the raw ids of a pair, without checks."""
        return read_picture(pair.image), read_label(pair.label, self.table)

    def unknown_ids(self, raw: np.ndarray) -> list[int]:
        """Return the raw ids that are not in the table."""
        return np.unique(raw[~self._is_known[raw]]).tolist()


class Streets(Dataset):
    """Rendered street scenes of one look; the paths are names only."""

    def read(self, pair: Pair) -> tuple[PILImage.Image, np.ndarray]:
        """Render a scene, which depends only on its look and number."""
        look, number = pair.name.rsplit("-", 1)
        seed = (zlib.crc32(look.encode()) + int(number)) % 2**32
        image, label = render(look, seed)
        return PILImage.fromarray(image), label


def size_error(pair: Pair, image: tuple[int, int], label: tuple[int, int]) -> str:
    """Return the message for a pair that differs in size, given widths and heights."""
    sizes = f"{image[0]}x{image[1]} and {label[0]}x{label[1]}"
    return f"image and label differ in size: {pair.image} and {pair.label}: {sizes}"


def table_classes(table: LabelTable) -> list[str]:
    """Return the classes of a table."""
    return list(dict.fromkeys(name for _, name in table.ids.values() if name is not None))
