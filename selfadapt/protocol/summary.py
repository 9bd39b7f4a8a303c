"""What an evaluation says on the terminal when it is done."""

from math import isnan, nan
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from selfadapt.metrics import ece
from selfadapt.protocol.results import Results, Scores
from selfadapt.protocol.tables import failed_table

SHOWN = 5


def print_summary(
    results: Results, folder: Path, *, only_tune: bool = False, missing: int = 0
) -> int:
    """Print what was chosen and what came out; return 1 if some image was not segmented, else 0.

    Args:
        results: The rows so far.
        folder: The folder of the run.
        only_tune: There are rows of the validation domain alone.
        missing: Rows that other shares of the run have still to write.
    """
    console = Console(highlight=False)
    for label, choice in results.choices.items():
        if choice.tried:
            chosen = ", ".join(f"{name} {value}" for name, value in choice.chosen.items())
            best = max(score for _, score in choice.tried)
            console.print(
                f"{label}: {chosen} of {len(choice.tried)} tried, mIoU {100 * best:.2f} on "
                f"{results.validation}", markup=False,
            )  # fmt: skip
    if not only_tune and not missing:
        console.print(_table(results))
    failures = _failures(results)
    for failure in failures[:SHOWN]:
        console.print(f"not done: {failure}", markup=False, soft_wrap=True)
    if failures:
        see = "" if only_tune else f", see {folder / 'tables' / 'failed.csv'}"
        console.print(
            f"{len(failures)} rows are of images that could not be segmented{see}; --retry tries "
            "them again", markup=False, soft_wrap=True,
        )  # fmt: skip
    if only_tune:
        said = (
            f"what was chosen is in {folder / 'chosen.json'}; selfadapt evaluate goes on from here"
        )
    elif missing:
        said = (
            f"this share is done, {missing} rows of others are not; the last share writes the "
            "tables, or the same command without --shard"
        )
    else:
        said = f"rows, settings and tables are in {folder}"
    console.print(said, markup=False, soft_wrap=True)
    return 1 if failures else 0


def summary(results: Results) -> dict[str, Any]:
    """Return the same as plain data; what has no value is None."""
    scores = {
        label: {
            domain: {"mIoU": _number(one.mean_iou), "ECE": _number(_calibration(one))}
            for domain in results.targets
            for one in [results.scores(label, domain)]
        }
        for label in results.methods
    }
    return {
        "validation": results.validation,
        "chosen": {label: choice.chosen for label, choice in results.choices.items()},
        "scores": scores,
        "failures": _failures(results),
    }


def _number(value: float) -> float | None:
    return None if isnan(value) else value


def _calibration(scores: Scores) -> float:
    return ece(scores.counts) if scores.counts.confusion.any() else nan


def _table(results: Results) -> Table:
    """Return mIoU on each target, their mean, and the calibration error."""
    domains = results.targets
    mean = ["mean"] if len(domains) > 1 else []
    table = Table("mIoU", *map(escape, domains), *mean, "ECE")
    for label in results.methods:
        scores = [results.scores(label, domain) for domain in domains]
        values = [100 * one.mean_iou for one in scores]
        if mean:
            values.append(results.mean(values))
        calibration = results.mean([100 * _calibration(one) for one in scores])
        table.add_row(escape(label), *(f"{v:.2f}" for v in values), f"{calibration:.2f}")
    return table


def _failures(results: Results) -> list[str]:
    rows = failed_table(results).rows
    return [f"{domain}, {image}, {label}: {why}" for label, domain, image, why in rows]
