"""What the page of the demo shows; ``pages/demo.html`` is its template."""

from collections.abc import Sequence
from typing import NamedTuple

from selfadapt.demo.pictures import Picture
from selfadapt.demo.tables import DemoCell, Table


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
