"""Check a dataset for missing, damaged or unexpected files by reading every pair."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from rich.bar import Bar
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from selfadapt.data.catalog import DatasetInfo
from selfadapt.data.datasets import MAX_EXAMPLES, check_classes, label_table
from selfadapt.data.layouts import Listing, Pair
from selfadapt.data.locate import available_splits, check_root, dataset_info, find_listing
from selfadapt.data.samples import Dataset, size_error, table_classes
from selfadapt.data.sheet import contact_sheet
from selfadapt.files import atomic_write, check_output
from selfadapt.labels import ClassSpace
from selfadapt.progress import ProgressBar

NOT_IN_TABLE = "not in the table"


@dataclass
class SplitReport:
    """The result for one split."""

    dataset: Dataset
    listing: Listing
    info: DatasetInfo
    counts: tuple[int, ...]
    """Expected numbers of pairs, one for each edition of the dataset."""
    unreadable: list[str] = field(default_factory=list)
    sizes: list[str] = field(default_factory=list)
    unknown_ids: dict[int, list[Path]] = field(default_factory=dict)
    """Raw ids that are not in the table, and the label files with them."""
    pixels: Counter[int] = field(default_factory=Counter)
    """Number of pixels of each raw id."""

    @property
    def problems(self) -> list[str]:
        """The problems: each a line, followed by lines with examples."""
        listing, problems = self.listing, list[str]()
        if self.counts and len(listing.pairs) not in self.counts:
            counts = " or ".join(map(str, self.counts))
            problems.append(f"{len(listing.pairs)} pairs, but there should be {counts}")
        problems += _examples("images have no label", listing.images_without_label)
        problems += _examples("labels have no image", listing.labels_without_image)
        problems += _examples("pairs cannot be read", self.unreadable)
        if not self.info.sizes_differ:
            problems += _examples("pairs differ in size", self.sizes)
        for raw_id, labels in sorted(self.unknown_ids.items()):
            what = f"labels hold id {raw_id}, which is not in the table; {self.dataset.wrong_id}"
            problems += _examples(what, labels)
        return [f"{self.dataset.name}: {problem}" for problem in problems]

    @property
    def notes(self) -> list[str]:
        """What was found, and pairs that are left out because of known differences in size."""
        listing = self.listing
        notes = [f"{len(listing.pairs)} pairs in {listing.root}, labels {listing.layout.labels}"]
        if self.info.sizes_differ:
            what = "pairs differ in size, as is known of this dataset, and are left out"
            notes += _examples(what, self.sizes)
        return [f"{self.dataset.name}: {note}" for note in notes]


@dataclass
class Report:
    """The result for a dataset."""

    splits: list[SplitReport]

    @property
    def problems(self) -> list[str]:
        """The problems of all splits."""
        return [problem for split in self.splits for problem in split.problems]

    @property
    def notes(self) -> list[str]:
        """The notes of all splits."""
        return [note for split in self.splits for note in split.notes]

    @property
    def frequencies(self) -> dict[str, float]:
        """The share of pixels of each class, of ``ignored``, and of ids outside the table."""
        names = [name for split in self.splits for name in split.dataset.space.names]
        shares = dict.fromkeys([*names, "ignored"], 0.0)
        total = sum(split.pixels.total() for split in self.splits)
        for split in self.splits:
            for raw_id, number in split.pixels.items():
                _, name = split.dataset.table.ids.get(raw_id, ("", NOT_IN_TABLE))
                shares[name or "ignored"] = shares.get(name or "ignored", 0.0) + number / total
        return shares


def check_data(
    dataset: str,
    root: str | Path | None,
    *,
    split: str | None = None,
    classes: str | Sequence[str] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Read every pair of a dataset and report what is wrong.

    Args:
        dataset: A name in ``DATASETS``.
        root: The folder of the dataset.
        split: Part of the dataset; None for all that are present.
        classes: For ``folder``: the classes of the label files.
        progress: Called with the number of pairs read and the total.
    """
    if dataset == "streets":
        raise ValueError("streets is rendered, so there are no files to check")
    check_classes(dataset, classes)
    info = dataset_info(dataset)
    splits = available_splits(dataset, check_root(dataset, root)) if split is None else [split]
    if split is None and "all" in splits:
        splits = ["all"]
    reports = []
    # Without any split, the attempt to list one raises the error that explains it.
    for name in splits or [next(iter(info.splits))]:
        listing = find_listing(dataset, root, name)
        table = label_table(dataset, listing, classes)
        space = ClassSpace(tuple(table_classes(table)))
        data = Dataset(f"{dataset}/{name}", listing.pairs, space, table, wrong_id=info.wrong_id)
        reports.append(SplitReport(data, listing, info, info.counts.get(name, ())))
    done, total = 0, sum(len(report.listing.pairs) for report in reports)
    progress(0, total)
    for report in reports:
        for _ in _read_all(report):
            done += 1
            progress(done, total)
    return Report(reports)


def run_check(
    dataset: str,
    root: str | Path | None = None,
    *,
    split: str | None = None,
    classes: str | Sequence[str] | None = None,
    output: Path | None = None,
    overwrite: bool = False,
    show: Callable[[Report], None] | None = None,
) -> int:
    """Check a dataset, report the result, and return 0 without problems, else 1.

    Args:
        dataset: A name in ``DATASETS``.
        root: The folder of the dataset.
        split: Part of the dataset; None for all that are present.
        classes: For ``folder``: the classes of the label files.
        output: Image file to write a contact sheet of some pairs to.
        overwrite: Replace an existing image file.
        show: Receives the report. None: it is printed.
    """
    if output is not None:
        check_output(output, overwrite=overwrite)
    with ProgressBar(dataset) as bar:
        report = check_data(dataset, root, split=split, classes=classes, progress=bar.update)
    (show or print_report)(report)
    if output is not None and any(len(part.dataset) for part in report.splits):
        sheet = contact_sheet([part.dataset for part in report.splits])
        with atomic_write(output) as temporary:
            sheet.save(temporary, format="PNG")
    return 1 if report.problems else 0


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the problems, the notes, and the share of each class."""
    console = console or Console(highlight=False)
    for problem in report.problems:
        console.print(f"problem: {problem}", markup=False, soft_wrap=True)
    for note in report.notes:
        console.print(note, markup=False, soft_wrap=True)
    shares = report.frequencies
    chart = Table.grid(padding=(0, 1))
    for name, share in shares.items():
        chart.add_row(
            escape(name), f"{share:.2%}", Bar(max(*shares.values(), 1e-9), 0, share, width=40)
        )
    console.print(chart)
    console.print("problems found" if report.problems else "no problems")


def _read_all(report: SplitReport) -> Iterator[None]:
    """Read the pairs in threads: decoders release the GIL, so these are as fast as processes."""
    pool = ThreadPoolExecutor()
    pairs = report.listing.pairs
    checks = pool.map(partial(_read, report.dataset), pairs)
    try:
        for pair, check in zip(pairs, checks, strict=True):
            if isinstance(check, Exception):
                report.unreadable.append(str(check))
            else:
                size, pixels = check
                report.sizes += [size] if size else []
                report.pixels.update(pixels)
                for raw_id in pixels.keys() - report.dataset.table.ids.keys():
                    report.unknown_ids.setdefault(raw_id, []).append(pair.label)
            yield
    finally:  # if the caller stops early, do not wait for the rest
        pool.shutdown(wait=False, cancel_futures=True)


def _read(dataset: Dataset, pair: Pair) -> tuple[str, dict[int, int]] | Exception:
    """Return the error if the sizes of a pair differ, else "", and the pixels of each raw id."""
    try:
        image, raw = dataset.read(pair)
    except (ValueError, OSError) as error:
        return error
    label_size = (raw.shape[1], raw.shape[0])
    size = "" if image.size == label_size else size_error(pair, image.size, label_size)
    counts = np.bincount(raw.ravel())
    pixels = {int(raw_id): int(counts[raw_id]) for raw_id in counts.nonzero()[0]}
    return size, pixels


def _examples(what: str, items: Sequence[object]) -> list[str]:
    """Return the number of items with a line for each of the first; empty without items."""
    lines = [f"{len(items)} {what}", *map(str, items[:MAX_EXAMPLES])]
    if len(items) > MAX_EXAMPLES:
        lines.append(f"and {len(items) - MAX_EXAMPLES} more")
    return ["\n  ".join(lines)] if items else []
