"""Look for what is missing, broken or unexpected in a dataset: every pair is read."""

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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from selfadapt.data.catalog import Description
from selfadapt.data.datasets import SHOWN, check_classes, table_of
from selfadapt.data.finding import check_root, describe, find_listing, splits_there
from selfadapt.data.layouts import Listing, Pair
from selfadapt.data.samples import Dataset, classes_of, size_error
from selfadapt.data.sheet import contact_sheet
from selfadapt.files import check_output, written_whole
from selfadapt.labels import ClassSpace

UNKNOWN = "not in the table"


@dataclass
class SplitReport:
    """What was found in one split."""

    dataset: Dataset
    listing: Listing
    description: Description
    counts: tuple[int, ...]
    """How many pairs there should be; any of these."""
    unreadable: list[str] = field(default_factory=list)
    sizes: list[str] = field(default_factory=list)
    unknown_ids: dict[int, list[Path]] = field(default_factory=dict)
    """Raw ids that are not in the table, and the labels that hold them."""
    pixels: Counter[int] = field(default_factory=Counter)
    """How many pixels each raw id has."""

    @property
    def problems(self) -> list[str]:
        """What is wrong: a line for each kind, then lines with examples."""
        listing, found = self.listing, []
        if self.counts and len(listing.pairs) not in self.counts:
            counts = " or ".join(map(str, self.counts))
            found.append(f"{len(listing.pairs)} pairs, but there should be {counts}")
        found += _examples("images have no label", listing.images_without_label)
        found += _examples("labels have no image", listing.labels_without_image)
        found += _examples("pairs cannot be read", self.unreadable)
        if not self.description.sizes_differ:
            found += _examples("pairs differ in size", self.sizes)
        for raw_id, labels in sorted(self.unknown_ids.items()):
            what = f"labels hold id {raw_id}, which is not in the table; {self.dataset.wrong_id}"
            found += _examples(what, labels)
        return [f"{self.dataset.name}: {problem}" for problem in found]

    @property
    def notes(self) -> list[str]:
        """What was found, and what is known to be wrong and is left out by itself."""
        listing = self.listing
        found = [f"{len(listing.pairs)} pairs in {listing.root}, labels {listing.layout.labels}"]
        if self.description.sizes_differ:
            found += _examples("pairs differ in size, as is known, and are left out", self.sizes)
        return [f"{self.dataset.name}: {note}" for note in found]


@dataclass
class Report:
    """What was found in a dataset."""

    splits: list[SplitReport]

    @property
    def problems(self) -> list[str]:
        """What is wrong; nothing if all is well."""
        return [problem for split in self.splits for problem in split.problems]

    @property
    def notes(self) -> list[str]:
        """What else was found."""
        return [note for split in self.splits for note in split.notes]

    @property
    def frequencies(self) -> dict[str, float]:
        """The share of pixels of each class, of ``ignored``, and of ids outside the table."""
        names = [name for split in self.splits for name in split.dataset.space.names]
        shares = dict.fromkeys([*names, "ignored"], 0.0)
        total = sum(split.pixels.total() for split in self.splits)
        for split in self.splits:
            for raw_id, number in split.pixels.items():
                _, name = split.dataset.table.ids.get(raw_id, ("", UNKNOWN))
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
        root: The folder the dataset lies in.
        split: Part of the dataset; None takes all there are.
        classes: Of ``folder``: the classes of the label files.
        progress: Called with the number of pairs read, and of all pairs.
    """
    if dataset == "streets":
        raise ValueError("streets is drawn, so there are no files to check")
    check_classes(dataset, classes)
    splits = _splits(dataset, root) if split is None else [split]
    reports = [_listed(dataset, root, name, classes) for name in splits]
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
    say: Callable[[Report], None] | None = None,
) -> int:
    """Check a dataset, say what was found, and return 0 if all is well, else 1.

    Args:
        dataset: A name in ``DATASETS``.
        root: The folder the dataset lies in.
        split: Part of the dataset; None takes all there are.
        classes: Of ``folder``: the classes of the label files.
        output: An image to write, with some pairs to look at.
        overwrite: Replace the image if it is there.
        say: Takes what was found. None: it is printed.
    """
    if output is not None:
        check_output(output, overwrite=overwrite)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(dataset)
        report = check_data(
            dataset,
            root,
            split=split,
            classes=classes,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    (say or print_report)(report)
    if output is not None and any(len(part.dataset) for part in report.splits):
        sheet = contact_sheet([part.dataset for part in report.splits])
        with written_whole(output) as aside:
            sheet.save(aside, format="PNG")
    return 1 if report.problems else 0


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the problems, what else was found, and the share of each class."""
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
    console.print("something is wrong" if report.problems else "all is well")


def _splits(dataset: str, root: str | Path | None) -> list[str]:
    there = splits_there(dataset, check_root(dataset, root))
    if "all" in there:
        return ["all"]
    return there or [next(iter(describe(dataset).splits))]  # not there either: that is explained


def _listed(
    dataset: str, root: str | Path | None, split: str, classes: str | Sequence[str] | None
) -> SplitReport:
    description = describe(dataset)
    listing = find_listing(dataset, root, split)
    table = table_of(dataset, listing, classes)
    space = ClassSpace(tuple(classes_of(table)))
    pairs = Dataset(
        f"{dataset}/{split}", listing.pairs, space, table, wrong_id=description.wrong_id
    )
    return SplitReport(pairs, listing, description, description.counts.get(split, ()))


@dataclass
class _Findings:
    """What was found in one pair."""

    unreadable: str | None = None
    size: str | None = None
    pixels: dict[int, int] = field(default_factory=dict)


def _read_all(report: SplitReport) -> Iterator[None]:
    """Read the pairs in threads: decoders leave the lock, so that is as fast as processes."""
    pool = ThreadPoolExecutor()
    pairs = report.listing.pairs
    found = pool.map(partial(_read, report.dataset), pairs)
    try:
        for pair, findings in zip(pairs, found, strict=True):
            _add(report, pair, findings)
            yield
    finally:  # whoever stops early does not wait for the rest
        pool.shutdown(wait=False, cancel_futures=True)


def _read(dataset: Dataset, pair: Pair) -> _Findings:
    try:
        image, raw = dataset.read(pair)
    except (ValueError, OSError) as error:
        return _Findings(unreadable=str(error))
    label_size = (raw.shape[1], raw.shape[0])
    size = None if image.size == label_size else size_error(pair, image.size, label_size)
    numbers = np.bincount(raw.ravel())
    pixels = {int(raw_id): int(numbers[raw_id]) for raw_id in numbers.nonzero()[0]}
    return _Findings(size=size, pixels=pixels)


def _add(report: SplitReport, pair: Pair, findings: _Findings) -> None:
    if findings.unreadable:
        report.unreadable.append(findings.unreadable)
    if findings.size:
        report.sizes.append(findings.size)
    report.pixels.update(findings.pixels)
    for raw_id in findings.pixels.keys() - report.dataset.table.ids.keys():
        report.unknown_ids.setdefault(raw_id, []).append(pair.label)


def _examples(what: str, things: Sequence[object]) -> list[str]:
    """Return how many things there are and a line for each of the first; nothing if none."""
    lines = [f"{len(things)} {what}", *map(str, things[:SHOWN])]
    if len(things) > SHOWN:
        lines.append(f"and {len(things) - SHOWN} more")
    return ["\n  ".join(lines)] if things else []
