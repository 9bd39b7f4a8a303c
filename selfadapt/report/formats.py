"""Tables in Markdown, LaTeX and CSV."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from selfadapt.files import csv_cell

Cell = str | float | None
NUMBER_TEXT = re.compile(r"-|[-+]\d+\.\d+( \[[-+\d., ]+\])?")
"""A number as text: none, or a change with its interval."""


@dataclass(frozen=True)
class Grid:
    """A table: the first column names the row, the others are numbers."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    best: Literal["high", "low"] | None = None
    """Which value of each column is set in bold."""
    digits: int = 2

    def texts(self) -> list[list[tuple[str, str]]]:
        """Return the text of each cell, and its style: ``best`` in its column, or none."""
        pick = {"high": max, "low": min}.get(self.best or "")
        best_values = []
        for column in zip(*self.rows, strict=True):
            numbers = [value for value in column if isinstance(value, float) and value == value]
            best_values.append(pick(numbers) if pick and len(numbers) > 1 else None)
        return [
            [
                (self._text(value), "best" if best is not None and value == best else "")
                for value, best in zip(row, best_values, strict=True)
            ]
            for row in self.rows
        ]

    def _text(self, value: Cell) -> str:
        if value is None or value != value:
            return "-"
        return f"{value:.{self.digits}f}" if isinstance(value, float) else str(value)


def to_markdown(grid: Grid) -> str:
    """Return a Markdown table."""
    header = [_escape_markdown(column) for column in grid.columns]
    lines = [_markdown_row(header), _markdown_row(["---"] * len(header))]
    for row in grid.texts():
        cells = ((_escape_markdown(text), best) for text, best in row)
        lines.append(_markdown_row([f"**{text}**" if best else text for text, best in cells]))
    return "\n".join(lines) + "\n"


def to_latex(grid: Grid) -> str:
    """Return a LaTeX tabular, for the package booktabs."""
    end = " \\\\"
    lines = [f"\\begin{{tabular}}{{l{'r' * (len(grid.columns) - 1)}}}", "\\toprule"]
    lines += [" & ".join(map(_escape_latex, grid.columns)) + end, "\\midrule"]
    for row in grid.texts():
        cells = ((_escape_latex(text), best) for text, best in row)
        line = " & ".join(f"\\textbf{{{t}}}" if best else t for t, best in cells) + end
        # after \\, LaTeX would read a leading [ or * as an argument
        lines.append(f"{{}}{line}" if line[0] in "[*" else line)
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def to_csv(grid: Grid) -> str:
    """Return CSV with full precision."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(csv_cell, grid.columns))
    for row in grid.rows:
        writer.writerow(
            "" if value is None or value != value
            else value if isinstance(value, str) and NUMBER_TEXT.fullmatch(value)
            else csv_cell(value)
            for value in row
        )  # fmt: skip
    return file.getvalue()


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escape_markdown(text: str) -> str:
    escapes = {"<": "&lt;", "\n": " ", **{char: f"\\{char}" for char in "\\|*`"}}
    return "".join(escapes.get(char, char) for char in text)


def _escape_latex(text: str) -> str:
    escapes = {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}
    escapes |= {"\n": " ", **{char: f"\\{char}" for char in "&%$#_{}"}}
    return "".join(escapes.get(char, char) for char in text)
