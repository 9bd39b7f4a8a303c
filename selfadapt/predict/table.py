"""``predictions.csv``: what came of each file, on one line."""

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfadapt.files import atomic_write
from selfadapt.journal import Row

COLUMNS = (
    "file", "output", "status", "reason", "frames", "width", "height", "ms", "notes",
)  # fmt: skip
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a cell starts with that spreadsheets run; such a text gets a ' in front."""


def write_table(
    path: Path, rows: Sequence[Row], names: Mapping[str, str], classes: Sequence[str]
) -> None:
    """Write a line for each row, with the share of the pixels that each class has.

    Args:
        path: The table.
        rows: What came of the files.
        names: What the outputs of each file start with.
        classes: Names of the classes; none: not known so far.
    """
    with (
        atomic_write(path) as aside,
        aside.open("w", newline="", errors="surrogateescape") as file,
    ):
        file.write(_line([*COLUMNS, *(f"share_{name}" for name in classes)]))
        for row in rows:
            file.write(_line(_cells(row, names, classes)))


def append_to_table(path: Path, row: Row, names: Mapping[str, str], classes: Sequence[str]) -> None:
    """Append the line of a row to a table, which several processes may do at once."""
    line = _line(_cells(row, names, classes)).encode(errors="surrogateescape")
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:  # removed by somebody; it is written anew at the end
        return
    try:
        os.write(file, line)
    finally:
        os.close(file)


def _line(cells: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(
        [
            f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell
            for cell in cells
        ]
    )
    return text.getvalue()


def _cells(row: Row, names: Mapping[str, str], classes: Sequence[str]) -> list[Any]:
    about = {
        "output": names[row["file"]],
        "status": "failed" if "error" in row else "done",
        "reason": row.get("error", ""),
        "notes": "; ".join(row.get("notes", ())),
    }
    cells = [about.get(column, row.get(column, "")) for column in COLUMNS]
    return [*cells, *row.get("shares", [""] * len(classes))]
