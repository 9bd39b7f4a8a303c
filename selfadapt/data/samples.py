"""A dataset: pairs of an image and a label that are read, and mapped to classes, when asked for."""

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
"""What is likely wrong when a label holds an id that its table does not have."""


class Sample(NamedTuple):
    """An image with its label."""

    name: str
    image: PILImage.Image
    """RGB."""
    label: np.ndarray
    """Train ids ``(H, W)``, uint8; 255 is ignored."""


class Dataset:
    """Pairs of an image and a label, read when asked for.

    Args:
        name: Dataset and split, such as ``cityscapes/val``.
        pairs: Where the images and labels lie.
        space: The classes of the samples' labels.
        table: What the raw ids in the label files mean.
        notes: What was left out, and why.
        wrong_id: What is likely wrong when a raw id is not in the table.
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
        self._known = np.isin(np.arange(len(self._train_ids)), list(table.ids))
        if (self._train_ids == IGNORE).all():
            raise ValueError(
                f"no class of {name} is among the classes asked for; it has "
                f"{', '.join(classes_of(table))}, asked for are {', '.join(space.names)}"
            )

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample:
        pair = self.pairs[index]
        image, raw = self.read(pair)
        if image.size != raw.shape[::-1]:
            raise ValueError(size_error(pair, image.size, raw.shape[::-1]))
        if not self._known[raw].all():
            raise ValueError(self._id_error(pair, raw))
        return Sample(pair.name, image, self._train_ids[raw])

    def read(self, pair: Pair) -> tuple[PILImage.Image, np.ndarray]:
        """Return the image and the raw ids of a pair as they are in its files."""
        return read_picture(pair.image), read_label(pair.label, self.table)

    def unknown_ids(self, raw: np.ndarray) -> list[int]:
        """Return the raw ids that the table does not have."""
        return np.unique(raw[~self._known[raw]]).tolist()

    def _id_error(self, pair: Pair, raw: np.ndarray) -> str:
        known = sorted(set(self.table.ids) - {IGNORE})
        return (
            f"label {pair.label} holds id {self.unknown_ids(raw)[0]}, but the ids of {self.name} "
            f"go from {known[0]} to {known[-1]}; {self.wrong_id}"
        )


class Streets(Dataset):
    """Scenes of the built-in world in one look, drawn when asked for; the paths are names only."""

    def read(self, pair: Pair) -> tuple[PILImage.Image, np.ndarray]:
        """Draw a scene; it depends on its look and number alone."""
        look, number = pair.name.rsplit("-", 1)
        seed = (zlib.crc32(look.encode()) + int(number)) % 2**32
        image, label = render(look, seed)
        return PILImage.fromarray(image), label


def size_error(pair: Pair, image: tuple[int, int], label: tuple[int, int]) -> str:
    """Return what to say about a pair that differs in size, given widths and heights."""
    sizes = f"{image[0]}x{image[1]} and {label[0]}x{label[1]}"
    return f"image and label differ in size: {pair.image} and {pair.label}: {sizes}"


def classes_of(table: LabelTable) -> list[str]:
    """Return the classes that some raw id of a table counts as."""
    return list(dict.fromkeys(name for _, name in table.ids.values() if name is not None))
