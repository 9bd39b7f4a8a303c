"""Tables of the demo, for the terminal and for the page."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from selfadapt.metrics import Score
from selfadapt.result import Result

Tone = Literal["", "best", "good", "bad"]
STYLES = {"": "", "best": "bold cyan", "good": "green", "bad": "red"}


class Cell(NamedTuple):
    """A text, and how it is to look."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Table:
    """A title, a line of headings, and lines of cells."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]

    def to_rich(self) -> RichTable:
        """Return the table as the terminal shows it."""
        table = RichTable(title=Text(self.title, "bold"), box=SIMPLE_HEAD, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*(Text(cell.text, STYLES[cell.tone]) for cell in row))
        return table

    def to_html(self) -> str:
        """Return the table as the page shows it."""
        head = "".join(f"<th>{html.escape(column)}</th>" for column in self.columns)
        body = "".join("<tr>" + "".join(map(_to_html, row)) + "</tr>\n" for row in self.rows)
        return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'


def _to_html(cell: Cell) -> str:
    tone = f' class="{cell.tone}"' if cell.tone else ""
    return f"<td{tone}>{html.escape(cell.text)}</td>"


class Standing(NamedTuple):
    """How a method does on a domain."""

    method: str
    miou: float
    ece: float
    ms: float

    @classmethod
    def of(cls, method: str, score: Score, seconds: Sequence[float]) -> "Standing":
        """Return what images with labels say of a method; its time is the median."""
        return cls(method, score.mean_iou, score.ece, 1000 * median(seconds))


class Change(NamedTuple):
    """What a method does to an image without label."""

    method: str
    agreement: float
    """Share of pixels that have the source network's class."""
    confidence: float
    ms: float

    @classmethod
    def of(cls, method: str, result: Result, source: Result) -> "Change":
        """Return how a result differs from that of the network as trained."""
        same = (result.label == source.label).double().mean()
        return cls(method, float(same), float(result.confidence.mean()), 1000 * result.seconds)


def standings(title: str, rows: Sequence[Standing]) -> Table:
    """Return the table of a domain: accuracy, its gain over the source network, error and time.

    Example:
        >>> rows = [Standing("source", 0.5, 0.1, 9.0), Standing("san", 0.6, 0.04, 11.0)]
        >>> [cell.text for cell in standings("night", rows).rows[1]]
        ['san', '60.0%', '+10.0', '4.0%', '11']
    """
    start, best = rows[0].miou, max(row.miou for row in rows)
    sure = min(row.ece for row in rows)
    lines = [
        (
            Cell(row.method),
            Cell(f"{row.miou:.1%}", "best" if row.miou == best else ""),
            _gain(row.miou - start, own=row is rows[0]),
            Cell(f"{row.ece:.1%}", "best" if row.ece == sure else ""),
            Cell(f"{row.ms:.0f}"),
        )
        for row in rows
    ]
    return Table(title, ("method", "mIoU", "gain", "ECE", "ms"), lines)


def across(looks: Mapping[str, Sequence[Standing]]) -> Table:
    """Return the table of the means over looks."""
    rows = [
        Standing(group[0].method, *(fmean(column) for column in list(zip(*group, strict=True))[1:]))
        for group in zip(*looks.values(), strict=True)
    ]
    return standings(f"mean over {', '.join(looks)}", rows)


def changes(title: str, rows: Sequence[Change]) -> Table:
    """Return the table of an image without label."""
    lines = [
        (
            Cell(row.method),
            Cell(f"{row.agreement:.1%}"),
            Cell(f"{row.confidence:.1%}"),
            Cell(f"{row.ms:.0f}"),
        )
        for row in rows
    ]
    return Table(title, ("method", "agrees with source", "confidence", "ms"), lines)


def _gain(gain: float, *, own: bool) -> Cell:
    if own:
        return Cell("")
    points = round(100 * gain, 1) + 0.0  # no -0.0
    tone: Tone = "good" if points > 0 else "bad" if points < 0 else ""
    return Cell(f"{points:+.1f}", tone)
