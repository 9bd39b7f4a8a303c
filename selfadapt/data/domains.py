"""Domains by name, and whether two of them are the same."""

from pathlib import Path

from selfadapt.data.catalog import DATASETS
from selfadapt.data.datasets import DataConfig
from selfadapt.patterns import nearest


def overlap(target: str, data: DataConfig) -> bool:
    """Return True if a target domain and ``data`` have images in common."""
    if data.root and same_folder(target, data.root, nested=data.dataset == "folder"):
        return True
    dataset, _, split = target.partition("/")
    families = {dataset, dataset.partition("-")[0]}  # acdc-fog is of acdc, as acdc-night is
    if data.dataset not in families and dataset != data.dataset.partition("-")[0]:
        return False
    if not split or dataset not in DATASETS:
        return dataset != "folder"
    folders = DATASETS[dataset].splits
    one, other = folders.get(split, split), folders.get(data.split, data.split)
    return one == other or "" in (one, other)


def check_target(target: str) -> None:
    """Refuse a target domain that can be none: a misspelled one would protect nothing."""
    known = target.partition("/")[0] in DATASETS and target != "folder"
    if not (known or target.startswith(("/", "~", ".")) or Path(target).is_dir()):
        raise ValueError(
            f"a target must be DATASET, DATASET/SPLIT or a folder, got {target!r};"
            f"{nearest(target, DATASETS)} known: {', '.join(DATASETS)}"
        )


def same_folder(one: str, other: str, *, nested: bool) -> bool:
    """Return True if two folders are the same, or if ``nested`` one lies in the other."""
    a, b = (Path(path).expanduser().resolve() for path in (one, other))
    return a == b or (nested and (a.parent == b or b.parent == a))


def spelled(data: DataConfig) -> str:
    """Return what a domain is called: dataset and split, and the folder it lies in."""
    return f"{data.dataset}/{data.split}" + (f" in {data.root}" if data.root else "")
