"""Things are made of flat faces, in metres: x to the right, y up, z ahead along the street.

A face has a paint, such as ``wall`` or ``tyre``, and a tint in [0, 1) that chooses among the
colours the paint has in a look. Nothing here knows any colour.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from selfadapt.labels import STREETS_9

PAINTS = (
    "sky", "asphalt", "paving", "kerb", "grass", "wall", "gable", "roof", "trim", "leaf", "bark",
    "body", "glass", "tyre", "bumper", "tail light", "head light", "tail glass",
    "head glass", "plate", "metal", "lamp",
    "sign", "skin", "hair", "top", "trousers", "shoes", "awning",
)  # fmt: skip

FACE = np.dtype(
    [
        ("corners", "i4"),  # how many points it takes from its thing's points
        ("label", "u1"),
        ("paint", "i4"),
        ("tint", "f8"),
        ("shade", "f8"),  # factor on the colour
        ("layer", "i4"),  # within a thing, higher layers are painted later
        ("closed", "?"),  # part of a closed body, so not seen from behind
        ("facade", "i4"),  # row in the street's table of facades, 0: none
    ]
)

Flat = Sequence[tuple[float, float]]
"""Corners of a figure in a plane."""
Point = tuple[float, float, float]


def label_of(name: str) -> int:
    """Return the label of a class."""
    return STREETS_9.index(name)


@dataclass
class Thing:
    """Some faces that belong together and are painted in one go."""

    distance: float
    """How far ahead it is; farther things are painted first."""
    rank: int = 2
    """0: the ground, 1: what stands beside the street, 2: what stands in it."""
    points: list[np.ndarray] = field(default_factory=list)
    faces: list[tuple] = field(default_factory=list)
    """Rows of ``FACE``."""

    def add(
        self,
        points: Sequence[Point] | np.ndarray,
        label: str,
        paint: str,
        tint: float = 0.0,
        shade: float = 1.0,
        layer: int = 0,
        closed: bool = False,
        facade: int = 0,
    ) -> None:
        """Add one face."""
        self.points.append(np.asarray(points, dtype=float))
        look = label_of(label), PAINTS.index(paint), tint, shade
        self.faces.append((len(points), *look, layer, closed, facade))


def standing(figure: Iterable[tuple[float, float]], x: float, y: float, z: float) -> list[Point]:
    """Stand a figure of (right, up) corners at a place, facing the camera."""
    return [(x + right, y + up, z) for right, up in figure]


def lying(x0: float, x1: float, y: float, z0: float, z1: float) -> list[Point]:
    """Return a level rectangle."""
    return [(x0, y, z0), (x1, y, z0), (x1, y, z1), (x0, y, z1)]


def upright(start: tuple[float, float], end: tuple[float, float], low: float, high: float) -> list:
    """Return a vertical rectangle above the line between two (x, z)."""
    (x0, z0), (x1, z1) = start, end
    return [(x0, low, z0), (x1, low, z1), (x1, high, z1), (x0, high, z0)]


@cache
def ring(radius: float, corners: int = 10, turn: float = 0.0) -> tuple[tuple[float, float], ...]:
    """Return the corners of a regular figure, clockwise from the top, turned by parts of a side."""
    angles = (np.arange(corners) + turn) * (2 * np.pi / corners)
    right, up = radius * np.sin(angles), radius * np.cos(angles)
    return tuple(zip(right.tolist(), up.tolist(), strict=True))
