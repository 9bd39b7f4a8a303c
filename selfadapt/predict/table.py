"""``predictions.csv``: what came of each file, on one line."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfadapt.files import written_whole
from selfadapt.journal import Row

COLUMNS = (
    "file", "output", "status", "reason", "frames", "width", "height", "ms", "notes",
)  # fmt: skip


def write_table(
    path: Path, rows: Sequence[Row], names: Mapping[str, str], classes: Sequence[str]
) -> None:
    """Write a line for each row, with the share of the pixels that each class has."""
    with (
        written_whole(path) as aside,
        aside.open("w", newline="", errors="surrogateescape") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*COLUMNS, *(f"share_{name}" for name in classes)])
        for row in rows:
            writer.writerow([*_cells(row, names), *row.get("shares", [""] * len(classes))])


def _cells(row: Row, names: Mapping[str, str]) -> list[Any]:
    about = {
        "output": names[row["file"]],
        "status": "failed" if "error" in row else "done",
        "reason": row.get("error", ""),
        "notes": "; ".join(row.get("notes", ())),
    }
    return [about.get(column, row.get(column, "")) for column in COLUMNS]
