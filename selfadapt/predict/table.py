"""``predictions.csv``: the outcome of each file, one per row."""

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfadapt.files import atomic_write, csv_cell, open_own
from selfadapt.journal import Row

COLUMNS = (
    "file", "output", "status", "reason", "frames", "width", "height", "ms", "quality", "notes",
)  # fmt: skip


def write_table(
    path: Path, rows: Sequence[Row], names: Mapping[str, str], classes: Sequence[str]
) -> None:
    """Write the table of some rows, with the fraction of pixels of each class.

    Args:
        path: The table.
        rows: The rows of the journal.
        names: Prefix of the output names of each file.
        classes: Names of the classes; empty: not known yet.
    """
    with (
        atomic_write(path) as temporary,
        temporary.open("w", newline="", errors="surrogateescape") as file,
    ):
        file.write(_line([*COLUMNS, *(f"share_{name}" for name in classes)]))
        for row in rows:
            file.write(_line(_cells(row, names, classes)))


def append_to_table(path: Path, row: Row, names: Mapping[str, str], classes: Sequence[str]) -> None:
    """Append a row to a table; several processes may do so at the same time."""
    line = _line(_cells(row, names, classes)).encode(errors="surrogateescape")
    try:
        file = open_own(path, os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:  # removed by someone; it is written again at the end
        return
    try:
        os.write(file, line)
    finally:
        os.close(file)


def _line(cells: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(map(csv_cell, cells))
    return text.getvalue()


def _cells(row: Row, names: Mapping[str, str], classes: Sequence[str]) -> list[Any]:
    values = {
        "output": names[row["file"]],
        "status": "failed" if "error" in row else "done",
        "reason": row.get("error", ""),
        "notes": "; ".join(row.get("notes", ())),
    }
    cells = [values.get(column, row.get(column, "")) for column in COLUMNS]
    return [*cells, *row.get("shares", [""] * len(classes))]
