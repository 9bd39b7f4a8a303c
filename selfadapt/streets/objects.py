"""Scene objects of planar faces, in metres: x to the right, y up, z ahead along the street.

A face has a paint, such as ``wall`` or ``tyre``, and a tint in [0, 1) that selects one of the
colours of the paint in a look.
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
        ("corners", "i4"),  # number of points
        ("label", "u1"),
        ("paint", "i4"),
        ("tint", "f8"),
        ("shade", "f8"),  # factor on the colour
        ("layer", "i4"),  # within an object, higher layers are drawn later
        ("closed", "?"),  # part of a closed body: culled from behind
        ("facade", "i4"),  # row in ``Street.facades``, 0: none
    ]
)

Flat = Sequence[tuple[float, float]]
"""Corners of a polygon in a plane."""
Point = tuple[float, float, float]


def label_of(name: str) -> int:
    """Return the label index of a class."""
    return STREETS_9.index(name)


@dataclass
class SceneObject:
    """Faces that are drawn together."""

    distance: float
    """Distance ahead; farther objects are drawn first."""
    rank: int = 2
    """Drawing order: 0 ground, 1 beside the street, 2 in the street."""
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
        """Add a face."""
        self.points.append(np.asarray(points, dtype=float))
        look = label_of(label), PAINTS.index(paint), tint, shade
        self.faces.append((len(points), *look, layer, closed, facade))


def standing(polygon: Iterable[tuple[float, float]], x: float, y: float, z: float) -> list[Point]:
    """Return a polygon of (right, up) corners at a position, facing the camera."""
    return [(x + right, y + up, z) for right, up in polygon]


def lying(x0: float, x1: float, y: float, z0: float, z1: float) -> list[Point]:
    """Return a horizontal rectangle."""
    return [(x0, y, z0), (x1, y, z0), (x1, y, z1), (x0, y, z1)]


def upright(start: tuple[float, float], end: tuple[float, float], low: float, high: float) -> list:
    """Return a vertical rectangle above the line between two (x, z)."""
    (x0, z0), (x1, z1) = start, end
    return [(x0, low, z0), (x1, low, z1), (x1, high, z1), (x0, high, z0)]


@cache
def ring(radius: float, corners: int = 10, turn: float = 0.0) -> tuple[tuple[float, float], ...]:
    """Return the corners of a regular polygon, clockwise from the top, turned by ``turn`` sides."""
    angles = (np.arange(corners) + turn) * (2 * np.pi / corners)
    right, up = radius * np.sin(angles), radius * np.cos(angles)
    return tuple(zip(right.tolist(), up.tolist(), strict=True))
