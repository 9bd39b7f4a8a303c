"""The page of the demo: one HTML file that needs nothing else, on any screen, light or dark."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from selfadapt.demo.pictures import Picture
from selfadapt.demo.tables import Cell, Chart, Table
from selfadapt.version import __version__


class Scene(NamedTuple):
    """One image: what is seen of it, and what self-adaptation did to it."""

    title: str
    pictures: Sequence[Picture]
    strip: Sequence[Picture]
    """Image, before, after, and the ground truth or what changed."""
    change: Cell
    """Gain in mIoU, or share of the pixels that changed."""


class Section(NamedTuple):
    """A part of the page: a table, and some scenes."""

    title: str
    table: Table
    scenes: Sequence[Scene]
    notes: Sequence[str] = ()


class Top(NamedTuple):
    """What stands first: one image, before and after."""

    strip: Sequence[Picture]
    change: Cell
    caption: str


def page(
    title: str,
    text: str,
    top: Top,
    legend: Sequence[tuple[str, tuple[int, int, int]]],
    chart: Chart,
    verdict: str,
    sections: Sequence[Section],
    footer: str,
    notes: Sequence[str] = (),
) -> str:
    """Return the page.

    Args:
        title: Its heading.
        text: What it is about.
        top: The image that is shown first.
        legend: Classes and their colours.
        chart: The methods side by side.
        verdict: When self-adaptation is worth its time, by the numbers of this run.
        sections: All that follows.
        footer: What the columns mean.
        notes: Notes that concern every image.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("report.html").render(
        title=title, text=text, top=top, legend=legend, chart=chart, verdict=verdict,
        sections=sections, footer=footer, notes=notes, version=__version__,
    )  # fmt: skip
