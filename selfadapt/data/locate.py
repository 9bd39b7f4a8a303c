"""Locate the files of a dataset split, or explain why they are not found."""

from pathlib import Path

from selfadapt.data.catalog import DATASETS, DatasetInfo
from selfadapt.data.layouts import Listing, list_pairs
from selfadapt.patterns import alternatives, nearest


def dataset_info(dataset: str) -> DatasetInfo:
    """Return the facts about a dataset, by its name."""
    if dataset not in DATASETS:
        raise ValueError(
            f"unknown dataset {dataset!r}{alternatives(dataset, DATASETS)}; "
            "for your own images use 'folder'"
        )
    return DATASETS[dataset]


def find_listing(dataset: str, root: str | Path | None, split: str) -> Listing:
    """Return the files of one split.

    The dataset may also be in a subfolder of ``root``, if only one subfolder has it.

    Raises:
        FileNotFoundError: The files do not exist; the message has the expected patterns.
        NotADirectoryError: ``root`` is a file.
        ValueError: The dataset or split is unknown.
    """
    info = dataset_info(dataset)
    folder = _split_folder(dataset, info, split)
    root = check_root(dataset, root)
    listing = _listing(info, root, folder)
    if listing is not None:
        return listing
    raise FileNotFoundError(_not_found_message(dataset, info, root, split))


def available_splits(dataset: str, root: Path) -> list[str]:
    """Return the splits of a dataset that have files."""
    info = dataset_info(dataset)
    folders = dict(info.splits)
    if dataset == "folder":
        inner = (path.name for path in sorted(root.glob("images/*/")))
        folders |= {name: name for name in inner if not name.startswith(".")}
    return [split for split, folder in folders.items() if _listing(info, root, folder) is not None]


def check_root(dataset: str, root: str | Path | None) -> Path:
    """Return the folder of a dataset, or raise an error if it is not a folder."""
    if root is None:
        raise ValueError(f"the dataset {dataset!r} is read from files: give its folder")
    root = Path(root).expanduser()
    if root.is_file():
        raise NotADirectoryError(f"the dataset {dataset!r} must be a folder, but {root} is a file")
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root} for the dataset {dataset!r}")
    return root


def _split_folder(dataset: str, info: DatasetInfo, split: str) -> str:
    names = ", ".join(info.splits)
    if split in info.withheld:
        raise ValueError(f"the labels of {dataset}/{split} are not public; use {names}")
    if split in info.splits:
        return info.splits[split]
    if dataset == "folder" and split and not set(split) & set("/\\*{}") and split[0] != ".":
        return split
    raise ValueError(
        f"{dataset} has no split {split!r};{nearest(split, info.splits)} available: {names}"
    )


def _listing(info: DatasetInfo, root: Path, folder: str) -> Listing | None:
    """List a split in ``root`` or in its only subfolder with the split, such as bdd100k."""
    listing = _first_layout(info, root, folder)
    if listing is not None:
        return listing
    inner = sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] != ".")
    candidates = [_first_layout(info, path, folder) for path in inner]
    listings = [listing for listing in candidates if listing is not None]
    if len(listings) > 1:
        raise ValueError(
            f"several folders in {root} hold the dataset: "
            f"{', '.join(listing.root.name for listing in listings)}; give one of them"
        )
    return listings[0] if listings else None


def _first_layout(info: DatasetInfo, root: Path, folder: str) -> Listing | None:
    listings = (list_pairs(root, layout, folder) for layout in info.layouts)
    return next((listing for listing in listings if listing is not None), None)


def _not_found_message(dataset: str, info: DatasetInfo, root: Path, split: str) -> str:
    if splits := available_splits(dataset, root):
        return (
            f"there is no split {split!r} of {dataset} under {root}, but there is "
            f"{', '.join(splits)}; {info.missing}".rstrip("; ")
        )
    if any(_first_layout(info, root.parent, f) for f in info.splits.values()):
        return f"{root} is one level too deep for {dataset}; give {root.parent}"
    folder = _split_folder(dataset, info, split)
    patterns = [
        f"{layout.images} with {layout.labels}".replace("{split}", folder)
        for layout in info.layouts
        if folder or "{split}" not in layout.images
    ]
    text = f"there are no images with labels of {dataset}/{split} under {root}; looked for "
    return f"{text}{', or '.join(patterns)}; {info.missing}".rstrip("; ")
