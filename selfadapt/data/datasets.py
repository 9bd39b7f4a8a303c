"""Open a dataset: find its pairs, select some of them, and note what was left out."""

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from selfadapt.checks import check_not_none, check_number, first_few
from selfadapt.classfile import read_classes
from selfadapt.data.catalog import DatasetInfo
from selfadapt.data.layouts import Listing, Pair
from selfadapt.data.locate import dataset_info, find_listing
from selfadapt.data.reading import read_image_size
from selfadapt.data.samples import Dataset, Streets
from selfadapt.data.tables import class_list_table
from selfadapt.labels import ClassSpace, LabelTable, class_space
from selfadapt.patterns import alternatives
from selfadapt.streets import CLASSES, LOOKS

NUM_STREETS = 500
"""Default number of rendered scenes."""
MAX_TITLE = 100
"""Maximum length of a dataset's title."""
MAX_EXAMPLES = 10
"""Maximum number of examples in a message about many files."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images to use, and where they are."""

    dataset: str
    """Name of the dataset, such as cityscapes; folder for your own images."""
    root: str | None = None
    """The folder of the dataset; streets needs none."""
    split: str = "train"
    """Part of the dataset, such as train or val; for streets a look, such as day."""
    classes: str | list[str] | None = None
    """For folder: the classes of the label files, as the name of a class space or a list."""
    names: str | None = None
    """A text file with the name of a pair in each line: only these are used."""
    scale: float = 1.0
    """Images are resized by this factor."""
    limit: int | None = None
    """Maximum number of pairs; for streets the number of scenes to render."""

    def __post_init__(self) -> None:
        check_not_none(self)
        check_number("scale", self.scale, 0.05, 20)
        if self.limit is not None:
            check_number("limit", self.limit, 1, whole=True)

    @property
    def title(self) -> str:
        """Dataset and split, to display; for your own images the name of their folder."""
        folder = Path(self.root or "").name if self.dataset == "folder" else ""
        title = f"{folder or self.dataset}, {self.split}"
        return "".join(filter(str.isprintable, title))[:MAX_TITLE]

    def open(self, space: str | Sequence[str] | ClassSpace = "cityscapes-19") -> Dataset:
        """Open the dataset with labels in the class space ``space``."""
        return open_dataset(
            self.dataset,
            self.root,
            split=self.split,
            classes=self.classes,
            space=space,
            names=self.names,
            limit=self.limit,
        )


def open_datasets(
    configs: Iterable[DataConfig], space: str | Sequence[str] | ClassSpace
) -> list[Dataset]:
    """Open several datasets; raise FileNotFoundError with all that are missing, not the first."""
    datasets, missing = [], []
    for config in configs:
        try:
            datasets.append(config.open(space))
        except (FileNotFoundError, NotADirectoryError) as error:
            missing.append(str(error))
    if missing:
        raise FileNotFoundError("; ".join(dict.fromkeys(missing)))
    return datasets


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
    """Find the files of a dataset, which are read on access.

    Args:
        dataset: A name in ``DATASETS``.
        root: The folder of the dataset.
        split: Part of the dataset; for ``streets`` a look.
        classes: For ``folder``: the name of a class space, or the class names in the order of their
            ids; None reads them from the lines of classes.txt.
        space: The class space of the labels; pixels of other classes are ignored.
        names: A text file with the names of the pairs to use.
        limit: Maximum number of pairs; for ``streets`` the number of scenes.

    Raises:
        FileNotFoundError: The files do not exist.
        ValueError: The dataset or split is unknown, or has no pair or no class of ``space``.
    """
    info = dataset_info(dataset)
    space = class_space(space)
    if limit is not None:
        check_number("limit", limit, 1, whole=True)
    check_classes(dataset, classes)
    if dataset == "streets":
        if split not in LOOKS:
            raise ValueError(f"streets has no look {split!r}{alternatives(split, LOOKS)}")
        scenes = [f"{split}-{i:05}" for i in range(NUM_STREETS if limit is None else limit)]
        pairs = _select([Pair(scene, Path(scene), Path(scene)) for scene in scenes], names)
        return Streets(
            f"streets/{split}", pairs, space, class_list_table(CLASSES, "selfadapt.streets")
        )
    listing = find_listing(dataset, root, split)
    pairs, notes = usable_pairs(info, listing)
    pairs = _select(pairs, names)[:limit]
    if not pairs:
        raise ValueError(
            f"no image of {dataset}/{split} under {listing.root} has a label: {'; '.join(notes)}"
        )
    table = label_table(dataset, listing, classes)
    return Dataset(f"{dataset}/{split}", pairs, space, table, notes, info.wrong_id)


def check_classes(dataset: str, classes: str | Sequence[str] | None) -> None:
    """Raise ValueError if classes are given for a dataset with a label table."""
    if classes is not None and dataset != "folder":
        raise ValueError(f"classes are given for 'folder' only, not for {dataset!r}")


def label_table(dataset: str, listing: Listing, classes: str | Sequence[str] | None) -> LabelTable:
    """Return the label table of a listing, for ``folder`` made from ``classes``."""
    if dataset != "folder":
        return listing.layout.table
    if classes is not None:
        return class_list_table(class_space(classes).names, "the list of classes")
    path = listing.root / "classes.txt"
    if not path.is_file():
        raise FileNotFoundError(
            f"the classes of the labels under {listing.root} must be given: as the name of a "
            f"class space, as a list, or in the lines of {path}"
        )
    return class_list_table(list(read_classes(path)), str(path))


def usable_pairs(info: DatasetInfo, listing: Listing) -> tuple[list[Pair], list[str]]:
    """Return the pairs to use, and notes on what was left out and why.

    Sizes are compared, from the headers of the files, only if some are known to differ.
    """
    notes = []
    for what, paths in (
        ("images have no label", listing.images_without_label),
        ("labels have no image", listing.labels_without_image),
    ):
        if paths:
            notes.append(f"left out: {len(paths)} {what}: {first_few(paths, MAX_EXAMPLES)}")
    pairs = list(listing.pairs)
    if info.sizes_differ:
        with ThreadPoolExecutor() as pool:
            same = list(pool.map(_have_same_size, pairs))
        differing = [pair.name for pair, equal in zip(pairs, same, strict=True) if not equal]
        pairs = [pair for pair, equal in zip(pairs, same, strict=True) if equal]
        if differing:
            notes.append(
                f"left out: {len(differing)} images differ in size from their labels: "
                f"{', '.join(differing)}"
            )
    return pairs, notes


def _have_same_size(pair: Pair) -> bool:
    try:
        return read_image_size(pair.image) == read_image_size(pair.label)
    except (ValueError, OSError):
        return True  # a damaged file raises its error when it is read


def _select(pairs: list[Pair], names: str | Path | None) -> list[Pair]:
    """Return the pairs named in a file, in the order of ``pairs``."""
    if names is None:
        return pairs
    path = Path(names).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} with the names of pairs")
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a text file in UTF-8: {error}") from error
    selected = [line.strip() for line in lines if line.strip()]
    if duplicates := [name for name, times in Counter(selected).items() if times > 1]:
        twice = first_few(duplicates, MAX_EXAMPLES)
        raise ValueError(f"each pair must be named once, but {path} has {twice} twice")
    available = {pair.name for pair in pairs}
    unknown = [name for name in selected if name not in available]
    if unknown or not selected:
        example = f"; an example of a name is {pairs[0].name}" if pairs else ""
        got = first_few(unknown, MAX_EXAMPLES) or "no name"
        raise ValueError(f"{path} must name pairs, got {got}{example}")
    chosen = set(selected)
    return [pair for pair in pairs if pair.name in chosen]
