"""The page of the demo: a self-contained HTML file for all screen sizes, light or dark."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from selfadapt.demo.pictures import Picture
from selfadapt.demo.tables import Chart, DemoCell, Table
from selfadapt.version import __version__


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


def page(
    title: str,
    text: str,
    headline: Headline,
    legend: Sequence[tuple[str, tuple[int, int, int]]],
    chart: Chart,
    verdict: str,
    sections: Sequence[DemoSection],
    footer: str,
    notes: Sequence[str] = (),
) -> str:
    """Render the page.

    Args:
        title: Heading of the page.
        text: Introduction.
        headline: The image shown first.
        legend: Classes and their colours.
        chart: Comparison of the methods.
        verdict: Whether self-adaptation is worth its time, by the results of this run.
        sections: The sections below.
        footer: Meaning of the columns.
        notes: Notes that apply to every image.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("report.html").render(
        title=title, text=text, headline=headline, legend=legend, chart=chart, verdict=verdict,
        sections=sections, footer=footer, notes=notes, version=__version__,
    )  # fmt: skip
