"""Tables, bars and the verdict of the demo, for the terminal and for ``pages/demo.html``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from selfadapt.demo.pictures import Picture
from selfadapt.methods import summary_of
from selfadapt.metrics import Score
from selfadapt.result import Result

Tone = Literal["", "best", "good", "bad"]
STYLES = {"": "", "best": "bold cyan", "good": "green", "bad": "red"}


class DemoCell(NamedTuple):
    """A text and its style."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Table:
    """A table with a title, column headings and rows of cells."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[DemoCell, ...]]

    def to_rich(self) -> RichTable:
        """Return the table for the terminal."""
        table = RichTable(title=Text(self.title, "bold"), box=SIMPLE_HEAD, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*(Text(cell.text, STYLES[cell.tone]) for cell in row))
        return table


class Bar(NamedTuple):
    """A bar for one method."""

    method: str
    explanation: str
    length: float
    """Share of the full width."""
    text: str
    change: DemoCell
    cost: str
    best: bool


class Chart(NamedTuple):
    """A bar chart of the methods."""

    title: str
    bars: Sequence[Bar]
    mark: float | None = None
    """Position of a line across all bars, as a share of the width."""
    note: str = ""


class Scene(NamedTuple):
    """One image with its predictions, and the effect of self-adaptation."""

    title: str
    pictures: Sequence[Picture]
    strip: Sequence[Picture]
    """Image, before, after, and the ground truth or what changed."""
    change: DemoCell
    """Gain in mIoU, or share of changed pixels."""


class DemoSection(NamedTuple):
    """A section of the page: a table and its scenes."""

    title: str
    table: Table
    scenes: Sequence[Scene]
    notes: Sequence[str] = ()


class Headline(NamedTuple):
    """The first image of the page, before and after."""

    strip: Sequence[Picture]
    change: DemoCell
    caption: str


class MethodScore(NamedTuple):
    """Accuracy, calibration error and time of a method on images with labels."""

    method: str
    miou: float
    ece: float
    ms: float

    @classmethod
    def of(cls, method: str, score: Score, seconds: Sequence[float]) -> "MethodScore":
        """Compute the scores; the time is the median."""
        return cls(method, score.mean_iou, score.ece, 1000 * median(seconds))


class MethodChange(NamedTuple):
    """Change, confidence and time of a method on an image without labels."""

    method: str
    changed: float
    """Share of pixels whose class differs from the network as trained."""
    confidence: float
    ms: float

    @classmethod
    def of(cls, method: str, result: Result, source: Result) -> "MethodChange":
        """Compare a result with that of the network as trained."""
        changed = (result.label != source.label).double().mean()
        return cls(method, float(changed), float(result.confidence.mean()), 1000 * result.seconds)


def score_table(title: str, rows: Sequence[MethodScore]) -> Table:
    """Return the table of a domain: accuracy, its gain over the source network, error and time.

    Example:
        >>> rows = [MethodScore("source", 0.5, 0.1, 9.0), MethodScore("san", 0.6, 0.04, 11.0)]
        >>> [cell.text for cell in score_table("night", rows).rows[1]]
        ['san', '60.0%', '+10.0', '4.0%', '11 ms']
    """
    source, best = rows[0], max(row.miou for row in rows)
    lowest = min(row.ece for row in rows)
    lines = [
        (
            DemoCell(row.method),
            DemoCell(f"{row.miou:.1%}", "best" if row.miou == best else ""),
            DemoCell("") if row is source else gain(row.miou - source.miou),
            DemoCell(f"{row.ece:.1%}", "best" if row.ece == lowest else ""),
            DemoCell(format_ms(row.ms)),
        )
        for row in rows
    ]
    return Table(title, ("method", "mIoU", "gain", "ECE", "time"), lines)


def mean_scores(looks: Mapping[str, Sequence[MethodScore]]) -> list[MethodScore]:
    """Return the mean of each method over the looks."""
    groups = zip(*looks.values(), strict=True)
    return [MethodScore(group[0].method, *_column_means(group)) for group in groups]


def mean_changes(images: Sequence[Sequence[MethodChange]]) -> list[MethodChange]:
    """Return the mean of each method over the images."""
    groups = zip(*images, strict=True)
    return [MethodChange(group[0].method, *_column_means(group)) for group in groups]


def _column_means(rows: Sequence[MethodScore] | Sequence[MethodChange]) -> list[float]:
    """Return the means of all columns but the first, the method."""
    _, *columns = zip(*rows, strict=True)
    return [fmean(column) for column in columns]


def score_chart(rows: Sequence[MethodScore]) -> Chart:
    """Return a chart of accuracy, with a mark at the network as trained."""
    source, best = rows[0], max(row.miou for row in rows)
    bars = [
        Bar(
            row.method, summary_of(row.method), row.miou, f"{row.miou:.1%}",
            DemoCell("") if row is source else gain(row.miou - source.miou),
            f"ECE {row.ece:.1%}, {format_ms(row.ms)}", row.miou == best,
        )
        for row in rows
    ]  # fmt: skip
    note = (
        "mIoU, its gain over the network as trained (the mark in each bar), calibration error and "
        "time of one image on this machine."
    )
    return Chart("The methods, mean over the looks", bars, source.miou, note)


def change_chart(rows: Sequence[MethodChange]) -> Chart:
    """Return a chart of the share of changed pixels."""
    bars = [
        Bar(
            row.method, summary_of(row.method), row.changed, f"{row.changed:.1%} changed",
            DemoCell(""), format_ms(row.ms), row.method == "self-adapt",
        )
        for row in rows[1:]
    ]  # fmt: skip
    note = (
        "Share of the pixels whose class differs from that of the network as trained, and time of "
        f"one image on this machine; the network as trained takes {format_ms(rows[0].ms)}. More is "
        "not better: there is no ground truth."
    )
    return Chart("The methods", bars, None, note)


def change_table(title: str, rows: Sequence[MethodChange]) -> Table:
    """Return the table of an image without labels."""
    lines = [
        (
            DemoCell(row.method),
            DemoCell(f"{row.changed:.1%}" if number else ""),
            DemoCell(f"{row.confidence:.1%}"),
            DemoCell(format_ms(row.ms)),
        )
        for number, row in enumerate(rows)
    ]
    return Table(title, ("method", "changed", "confidence", "time"), lines)


def score_verdict(rows: Sequence[MethodScore]) -> str:
    """Return whether self-adaptation is worth its time, by accuracy.

    Example:
        >>> rows = [MethodScore("source", 0.5, 0.1, 9), MethodScore("san", 0.6, 0.2, 18),
        ...         MethodScore("self-adapt", 0.55, 0.3, 216)]
        >>> score_verdict(rows).split(":")[0]
        'Not here'
    """
    by_name = {row.method: row for row in rows}
    source, san, adapted = (by_name[name] for name in ("source", "san", "self-adapt"))
    gained, by_san = adapted.miou - source.miou, san.miou - source.miou
    cost = (
        f"self-adaptation takes {adapted.ms / source.ms:.0f} times as long as the network as "
        f"trained ({format_ms(adapted.ms)} instead of {format_ms(source.ms)}) and changes mIoU by "
        f"{points(gained)}; SaN takes {san.ms / source.ms:.1f} times as long and changes it by "
        f"{points(by_san)}"
    )
    if gained <= max(by_san, 0):
        choice = "SaN is enough" if by_san > 0 else "the network as trained is the best choice"
        return f"Not here: {cost}. On these images {choice}."
    text = (
        f"It depends: {cost}. Use self-adaptation where a better mask is worth "
        f"{format_ms(adapted.ms - san.ms)} more for each image"
    )
    if by_san > 0:
        text += (
            f"; SaN, with {by_san / gained:.0%} of the gain, is enough for video, for large "
            "folders without a GPU, and where time is short"
        )
    calibrated = min(rows, key=lambda row: row.ece)
    if calibrated is not adapted:
        text += (
            f". Where probabilities matter more than masks, {calibrated.method} is best calibrated "
            f"here (ECE {calibrated.ece:.1%}, self-adaptation {adapted.ece:.1%})"
        )
    return text + "."


def change_verdict(rows: Sequence[MethodChange]) -> str:
    """Return what self-adaptation costs and changes, for images without labels."""
    by_name = {row.method: row for row in rows}
    source, adapted = by_name["source"], by_name["self-adapt"]
    text = (
        f"Self-adaptation took {adapted.ms / source.ms:.0f} times as long as the network as "
        f"trained ({format_ms(adapted.ms)} instead of {format_ms(source.ms)}) and changed the "
        f"class of {adapted.changed:.1%} of the pixels"
    )
    if san := by_name.get("san"):
        ratio = max(1.0, san.ms / source.ms)  # it cannot be faster
        text += f"; SaN took {ratio:.1f} times as long and changed {san.changed:.1%}"
    return (
        f"{text}. Without labels no number says which is right. Look at the pictures: if before "
        "and after look equally good, one pass is enough; if the prediction after adaptation is "
        "visibly better, the time is worth it for images like these. With a few labelled images, "
        "selfadapt evaluate measures it."
    )


def gain(value: float) -> DemoCell:
    """Return a difference of mIoU in points, with its sign."""
    shown = round(100 * value, 1) + 0.0  # no -0.0
    tone: Tone = "good" if shown > 0 else "bad" if shown < 0 else ""
    return DemoCell(f"{shown:+.1f}", tone)


def points(value: float) -> str:
    """Return a difference of fractions in points, as text.

    Example:
        >>> points(0.184)
        '+18.4 points'
    """
    return f"{100 * value:+.1f} points"


def format_ms(ms: float) -> str:
    """Return a time in milliseconds as text.

    Example:
        >>> format_ms(213.4), format_ms(4467), format_ms(152846)
        ('213 ms', '4.5 s', '153 s')
    """
    if ms < 1000:
        return f"{ms:.0f} ms"
    return f"{ms / 1000:.1f} s" if ms < 100_000 else f"{ms / 1000:.0f} s"
