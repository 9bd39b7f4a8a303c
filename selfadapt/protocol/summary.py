"""The summary that an evaluation prints at the end."""

from math import isnan, nan
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from selfadapt.metrics import ece
from selfadapt.protocol.results import DomainScores, Results
from selfadapt.protocol.tables import failed_table

MAX_FAILURES = 5


def print_summary(
    results: Results, folder: Path, *, only_tune: bool = False, missing: int = 0
) -> int:
    """Print tuned settings and scores; return 1 if some image could not be segmented, else 0.

    Args:
        results: The rows so far.
        folder: The folder of the run.
        only_tune: Only the validation domain was evaluated.
        missing: Number of rows left to other shares of the run.
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
    for failure in failures[:MAX_FAILURES]:
        console.print(f"not done: {failure}", markup=False, soft_wrap=True)
    if failures:
        details = "" if only_tune else f", see {folder / 'tables' / 'failed.csv'}"
        console.print(
            f"{len(failures)} rows are of images that could not be segmented{details}; use --retry "
            "to try them again", markup=False, soft_wrap=True,
        )  # fmt: skip
    if only_tune:
        path = folder / "chosen.json"
        message = f"the chosen settings are in {path}; run selfadapt evaluate to continue"
    elif missing:
        message = (
            f"this share is done, {missing} rows of others are not; the last share writes the "
            "tables, or the same command without --shard"
        )
    else:
        message = f"rows, settings and tables are in {folder}"
    console.print(message, markup=False, soft_wrap=True)
    return 1 if failures else 0


def summary(results: Results) -> dict[str, Any]:
    """Return the summary as plain data, with None for missing values."""
    scores_of = {
        label: {
            domain: {"mIoU": _number(scores.mean_iou), "ECE": _number(_ece(scores))}
            for domain in results.targets
            for scores in [results.scores(label, domain)]
        }
        for label in results.methods
    }
    return {
        "validation": results.validation,
        "chosen": {label: choice.chosen for label, choice in results.choices.items()},
        "scores": scores_of,
        "failures": _failures(results),
    }


def _number(value: float) -> float | None:
    return None if isnan(value) else value


def _ece(scores: DomainScores) -> float:
    return ece(scores.counts) if scores.counts.confusion.any() else nan


def _table(results: Results) -> Table:
    """Return the mIoU on each target, their mean, and the mean calibration error."""
    domains = results.targets
    mean = ["mean"] if len(domains) > 1 else []
    table = Table("mIoU", *map(escape, domains), *mean, "ECE")
    for label in results.methods:
        scores = [results.scores(label, domain) for domain in domains]
        values = [100 * score.mean_iou for score in scores]
        if mean:
            values.append(results.mean(values))
        calibration = results.mean([100 * _ece(score) for score in scores])
        table.add_row(escape(label), *(f"{v:.2f}" for v in values), f"{calibration:.2f}")
    return table


def _failures(results: Results) -> list[str]:
    rows = failed_table(results).rows
    return [f"{domain}, {image}, {label}: {why}" for label, domain, image, why in rows]
