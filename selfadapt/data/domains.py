"""Names of domains, and comparison of domains."""

from pathlib import Path

from selfadapt.data.catalog import DATASETS
from selfadapt.data.datasets import DataConfig
from selfadapt.patterns import alternatives


def overlap(target: str, data: DataConfig) -> bool:
    """Return True if a target domain and ``data`` have images in common."""
    if data.root and same_folder(target, data.root, nested=data.dataset == "folder"):
        return True
    dataset, _, split = target.partition("/")
    families = {dataset, dataset.partition("-")[0]}  # acdc-fog and acdc-night are parts of acdc
    if data.dataset not in families and dataset != data.dataset.partition("-")[0]:
        return False
    if not split or dataset not in DATASETS:
        return dataset != "folder"
    folders = DATASETS[dataset].splits
    a, b = folders.get(split, split), folders.get(data.split, data.split)
    return a == b or "" in (a, b)


def check_target(target: str) -> None:
    """Raise ValueError for an unknown target domain: a misspelled one would protect nothing."""
    is_dataset = target.partition("/")[0] in DATASETS and target != "folder"
    if not (is_dataset or target.startswith(("/", "~", ".")) or Path(target).is_dir()):
        raise ValueError(
            f"a target must be DATASET, DATASET/SPLIT or a folder, got {target!r}"
            f"{alternatives(target, DATASETS)}"
        )


def same_folder(first: str, second: str, *, nested: bool) -> bool:
    """Return True if two folders are equal or, if ``nested``, one is the parent of the other."""
    a, b = (Path(path).expanduser().resolve() for path in (first, second))
    return a == b or (nested and (a.parent == b or b.parent == a))


def domain_label(data: DataConfig) -> str:
    """Return dataset, split and folder of a domain as text."""
    return f"{data.dataset}/{data.split}" + (f" in {data.root}" if data.root else "")
