"""Tables as text: Markdown, LaTeX, CSV and HTML."""

import csv
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Cell = str | float | None


@dataclass(frozen=True)
class Grid:
    """A table to show: a name for each row, then numbers."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    best: Literal["high", "low"] | None = None
    """Which number of a column is set in bold."""
    digits: int = 2

    def texts(self) -> list[list[tuple[str, bool]]]:
        """Return each cell as text, and whether it is the best of its column."""
        pick = {"high": max, "low": min}.get(self.best or "")
        tops = []
        for column in zip(*self.rows, strict=True):
            numbers = [value for value in column if isinstance(value, float) and value == value]
            tops.append(pick(numbers) if pick and len(numbers) > 1 else None)
        return [
            [
                (self._text(value), top is not None and value == top)
                for value, top in zip(row, tops, strict=True)
            ]
            for row in self.rows
        ]

    def _text(self, value: Cell) -> str:
        if value is None or value != value:
            return "-"
        return f"{value:.{self.digits}f}" if isinstance(value, float) else str(value)


def to_markdown(grid: Grid) -> str:
    """Return a Markdown table."""
    lines = [_bars([*map(_for_markdown, grid.columns)]), _bars(["---"] * len(grid.columns))]
    for row in grid.texts():
        cells = ((_for_markdown(text), best) for text, best in row)
        lines.append(_bars([f"**{text}**" if best else text for text, best in cells]))
    return "\n".join(lines) + "\n"


def to_latex(grid: Grid) -> str:
    """Return a LaTeX tabular, for the package booktabs."""
    ends = " \\\\"
    lines = [f"\\begin{{tabular}}{{l{'r' * (len(grid.columns) - 1)}}}", "\\toprule"]
    lines += [" & ".join(map(_for_latex, grid.columns)) + ends, "\\midrule"]
    for row in grid.texts():
        cells = ((_for_latex(text), best) for text, best in row)
        line = " & ".join(f"\\textbf{{{t}}}" if best else t for t, best in cells) + ends
        lines.append(f"{{}}{line}" if line[0] in "[*" else line)  # not what ends the row before
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def to_csv(grid: Grid) -> str:
    """Return CSV with all digits."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(grid.columns)
    for row in grid.rows:
        writer.writerow("" if value is None or value != value else value for value in row)
    return file.getvalue()


def to_html(grid: Grid) -> str:
    """Return an HTML table."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in grid.columns)
    body = ""
    for row in grid.texts():
        cells = ""
        for text, best in row:
            shown = html.escape(text)
            cells += f"<td>{f'<b>{shown}</b>' if best else shown}</td>"
        body += f"<tr>{cells}</tr>\n"
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'


def _bars(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _for_markdown(text: str) -> str:
    words = {"<": "&lt;", "\n": " ", **{sign: f"\\{sign}" for sign in "\\|*`"}}
    return "".join(words.get(sign, sign) for sign in text)


def _for_latex(text: str) -> str:
    words = {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}
    words |= {"\n": " ", **{sign: f"\\{sign}" for sign in "&%$#_{}"}}
    return "".join(words.get(sign, sign) for sign in text)
