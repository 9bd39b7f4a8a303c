"""Open a dataset: find its pairs, choose among them, and say what was left out."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from selfadapt.checks import check_given, check_number
from selfadapt.data.catalog import Description
from selfadapt.data.finding import describe, find_listing
from selfadapt.data.layouts import Listing, Pair
from selfadapt.data.reading import size_of_file
from selfadapt.data.samples import Dataset, Streets
from selfadapt.data.tables import class_list_table
from selfadapt.labels import ClassSpace, LabelTable, class_space
from selfadapt.patterns import nearest
from selfadapt.streets import CLASSES, LOOKS

NUM_STREETS = 500
"""How many scenes a look of the built-in world has unless it is said."""
MAX_TITLE = 100
"""Most characters of a dataset's title."""
SHOWN = 10
"""How many examples are named where many files have the same fault."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images to take, and from where."""

    dataset: str
    """Name of the dataset, such as cityscapes; folder for images of your own."""
    root: str | None = None
    """The folder the dataset lies in; streets needs none."""
    split: str = "train"
    """Part of the dataset, such as train or val; of streets a look, such as day."""
    classes: str | list[str] | None = None
    """Of folder: the classes of the label files, by name of a class space or one by one."""
    names: str | None = None
    """A text file with the name of one pair in each line: only these are taken."""
    scale: float = 1.0
    """Images are scaled by this factor before a network sees them."""
    limit: int | None = None
    """Only the first so many pairs are taken; of streets so many scenes are rendered."""

    def __post_init__(self) -> None:
        check_given(self)
        check_number("scale", self.scale, 0.05, 20)
        if self.limit is not None:
            check_number("limit", self.limit, 1, whole=True)

    @property
    def title(self) -> str:
        """Name and split, for people; of images of one's own the name of their folder."""
        own = Path(self.root or "").name if self.dataset == "folder" else ""
        title = f"{own or self.dataset}, {self.split}"
        return "".join(filter(str.isprintable, title))[:MAX_TITLE]

    def open(self, space: str | Sequence[str] | ClassSpace = "cityscapes-19") -> Dataset:
        """Return the dataset with labels in the class space ``space``."""
        return open_dataset(
            self.dataset,
            self.root,
            split=self.split,
            classes=self.classes,
            space=space,
            names=self.names,
            limit=self.limit,
        )


def open_dataset(
    dataset: str,
    root: str | Path | None = None,
    *,
    split: str = "train",
    classes: str | Sequence[str] | None = None,
    space: str | Sequence[str] | ClassSpace = "cityscapes-19",
    names: str | Path | None = None,
    limit: int | None = None,
) -> Dataset:
    """Find the files of a dataset; they are read later, one pair at a time.

    Args:
        dataset: A name in ``DATASETS``.
        root: The folder the dataset lies in.
        split: Part of the dataset; of ``streets`` a look.
        classes: Of ``folder``: the name of a class space, or the names of the classes by id; else
            they are read from classes.txt, one in each line.
        space: The classes that labels are given in; what is not in it is ignored.
        names: A text file with the names of the pairs to take.
        limit: How many pairs to take at most; of ``streets`` how many scenes there are.

    Raises:
        FileNotFoundError: The files are not there.
        ValueError: There is no such dataset or split, no pair, or no class in common.
    """
    description = describe(dataset)
    space = class_space(space)
    if limit is not None:
        check_number("limit", limit, 1, whole=True)
    check_classes(dataset, classes)
    if dataset == "streets":
        return _open_streets(split, space, names, NUM_STREETS if limit is None else limit)
    listing = find_listing(dataset, root, split)
    pairs, notes = usable_pairs(description, listing)
    pairs = _named(pairs, names)[:limit]
    if not pairs:
        raise ValueError(
            f"no image of {dataset}/{split} under {listing.root} has a label: {'; '.join(notes)}"
        )
    table = table_of(dataset, listing, classes)
    return Dataset(f"{dataset}/{split}", pairs, space, table, notes, description.wrong_id)


def check_classes(dataset: str, classes: str | Sequence[str] | None) -> None:
    """Refuse classes for a dataset whose labels have a table already."""
    if classes is not None and dataset != "folder":
        raise ValueError(f"classes are given for 'folder' only, not for {dataset!r}")


def table_of(dataset: str, listing: Listing, classes: str | Sequence[str] | None) -> LabelTable:
    """Return what the labels of a listing mean; those of ``folder`` are given by ``classes``."""
    if dataset != "folder":
        return listing.layout.table
    if classes is not None:
        return class_list_table(class_space(classes).names, "the list of classes")
    path = listing.root / "classes.txt"
    if not path.is_file():
        raise FileNotFoundError(
            f"the classes of the labels under {listing.root} must be given: by name of a class "
            f"space, as a list, or one in each line of {path}"
        )
    names = _lines(path)
    if twice := [name for name, times in Counter(names).items() if name and times > 1]:
        raise ValueError(f"each line of {path} must name another class, got {some(twice)} twice")
    if "" in names:
        raise ValueError(
            f"each line of {path} must name the class of an id, but line {names.index('') + 1} is "
            "empty; name a class that is not there as well"
        )
    return class_list_table(class_space(names).names, str(path))


def usable_pairs(description: Description, listing: Listing) -> tuple[list[Pair], list[str]]:
    """Return the pairs to take, and notes of what was left out and why.

    Sizes are compared, by the headers of the files, only where some are known to differ.
    """
    notes = []
    for what, lacking in (
        ("images have no label", listing.images_without_label),
        ("labels have no image", listing.labels_without_image),
    ):
        if lacking:
            notes.append(f"left out: {len(lacking)} {what}: {some(lacking)}")
    pairs = list(listing.pairs)
    if description.sizes_differ:
        with ThreadPoolExecutor() as pool:
            fits = list(pool.map(_fits, pairs))
        differing = [pair.name for pair, fit in zip(pairs, fits, strict=True) if not fit]
        pairs = [pair for pair, fit in zip(pairs, fits, strict=True) if fit]
        if differing:
            notes.append(
                f"left out: {len(differing)} images differ in size from their labels: "
                f"{', '.join(differing)}"
            )
    return pairs, notes


def some(things: Sequence[object]) -> str:
    """Return the first few of many, and how many more there are."""
    more = f" and {len(things) - SHOWN} more" if len(things) > SHOWN else ""
    return ", ".join(map(str, things[:SHOWN])) + more


def _fits(pair: Pair) -> bool:
    try:
        return size_of_file(pair.image) == size_of_file(pair.label)
    except (ValueError, OSError):
        return True  # damaged: reading it says so


def _named(pairs: list[Pair], names: str | Path | None) -> list[Pair]:
    """Return the pairs that a file names, in their own order."""
    if names is None:
        return pairs
    path = Path(names).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} with the names of pairs")
    wanted = [line for line in _lines(path) if line]
    twice = [name for name, times in Counter(wanted).items() if times > 1]
    if twice:
        raise ValueError(f"each pair must be named once, but {path} has {some(twice)} twice")
    known = {pair.name for pair in pairs}
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        example = f"; names are such as {pairs[0].name}" if pairs else ""
        raise ValueError(f"{path} must name pairs, got {some(unknown) or 'no name'}{example}")
    chosen = set(wanted)
    return [pair for pair in pairs if pair.name in chosen]


def _open_streets(look: str, space: ClassSpace, names: str | Path | None, number: int) -> Dataset:
    if look not in LOOKS:
        raise ValueError(
            f"streets has no look {look!r};{nearest(look, LOOKS)} known: {', '.join(LOOKS)}"
        )
    scenes = [f"{look}-{index:05}" for index in range(number)]
    pairs = _named([Pair(scene, Path(scene), Path(scene)) for scene in scenes], names)
    table = class_list_table(CLASSES, "selfadapt.streets")
    return Streets(f"streets/{look}", pairs, space, table)


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text("utf-8-sig").rstrip().splitlines()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a text file in UTF-8: {error}") from error
