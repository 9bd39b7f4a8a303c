"""From the name of a dataset, a folder and a split to the files, or to what to do about it."""

from collections.abc import Iterator
from pathlib import Path

from selfadapt.data.catalog import DATASETS, Description
from selfadapt.data.layouts import Listing, list_pairs
from selfadapt.patterns import nearest


def describe(dataset: str) -> Description:
    """Return what is known about the dataset of this name."""
    if dataset not in DATASETS:
        raise ValueError(
            f"unknown dataset {dataset!r};{nearest(dataset, DATASETS)} "
            f"known: {', '.join(DATASETS)}; for images of your own use 'folder'"
        )
    return DATASETS[dataset]


def find_listing(dataset: str, root: str | Path | None, split: str) -> Listing:
    """Return the files of one split.

    A folder that is in ``root`` and holds the dataset does as well, if there is only one.

    Raises:
        FileNotFoundError: The files are not there; the message says what was looked for.
        NotADirectoryError: ``root`` is a file.
        ValueError: There is no such dataset or split.
    """
    description = describe(dataset)
    folder = _split_folder(dataset, description, split)
    root = check_root(dataset, root)
    listing = _listing(description, root, folder)
    if listing is not None:
        return listing
    raise FileNotFoundError(_why_not(dataset, description, root, split))


def splits_there(dataset: str, root: Path) -> list[str]:
    """Return the splits of a dataset that have files."""
    description = describe(dataset)
    return [
        split
        for split, folder in _possible_splits(description, root)
        if _listing(description, root, folder) is not None
    ]


def check_root(dataset: str, root: str | Path | None) -> Path:
    """Return the folder of a dataset, or say what is wrong with it."""
    if root is None:
        raise ValueError(f"the dataset {dataset!r} is read from files: give the folder it lies in")
    root = Path(root).expanduser()
    if root.is_file():
        raise NotADirectoryError(f"the dataset {dataset!r} must be a folder, but {root} is a file")
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root} for the dataset {dataset!r}")
    return root


def _split_folder(dataset: str, description: Description, split: str) -> str:
    if split in description.withheld:
        raise ValueError(
            f"the labels of {dataset}/{split} are not public; use {_names(description)}"
        )
    if split in description.splits:
        return description.splits[split]
    if dataset == "folder" and split and not set(split) & set("/\\*{}") and split[0] != ".":
        return split
    raise ValueError(
        f"{dataset} has no split {split!r};{nearest(split, description.splits)} "
        f"there is {_names(description)}"
    )


def _possible_splits(description: Description, root: Path) -> Iterator[tuple[str, str]]:
    yield from description.splits.items()
    if description is DATASETS["folder"]:
        inner = (path.name for path in sorted(root.glob("images/*/")))
        yield from ((name, name) for name in inner if not name.startswith("."))


def _listing(description: Description, root: Path, folder: str) -> Listing | None:
    """List a split in ``root``, or in the one folder in it that holds it, such as bdd100k."""
    listing = _first_layout(description, root, folder)
    if listing is not None:
        return listing
    inner = sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] != ".")
    listings = [_first_layout(description, path, folder) for path in inner]
    fitting = [listing for listing in listings if listing is not None]
    if len(fitting) > 1:
        raise ValueError(
            f"several folders in {root} hold the dataset: "
            f"{', '.join(listing.root.name for listing in fitting)}; give one of them"
        )
    return fitting[0] if fitting else None


def _first_layout(description: Description, root: Path, folder: str) -> Listing | None:
    listings = (list_pairs(root, layout, folder) for layout in description.layouts)
    return next((listing for listing in listings if listing is not None), None)


def _why_not(dataset: str, description: Description, root: Path, split: str) -> str:
    there = splits_there(dataset, root)
    if there:
        return (
            f"there is no split {split!r} of {dataset} under {root}, but there is "
            f"{', '.join(there)}; {description.missing}".rstrip("; ")
        )
    if any(_first_layout(description, root.parent, f) for f in description.splits.values()):
        return f"{root} is one folder too deep for {dataset}; give {root.parent}"
    folder = _split_folder(dataset, description, split)
    patterns = [
        f"{layout.images} with {layout.labels}".replace("{split}", folder)
        for layout in description.layouts
        if folder or "{split}" not in layout.images
    ]
    text = f"there are no images with labels of {dataset}/{split} under {root}; looked for "
    return f"{text}{', or '.join(patterns)}; {description.missing}".rstrip("; ")


def _names(description: Description) -> str:
    return ", ".join(description.splits)
