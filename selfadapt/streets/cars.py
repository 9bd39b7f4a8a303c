"""Cars: an extruded side view with windows, wheels and lights."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from selfadapt.streets.objects import PAINTS, Flat, Point, SceneObject, ring


@dataclass(frozen=True)
class Body:
    """A car's shape. Corners are (along, up) as fractions of length and height, rear at 0."""

    length: float
    width: float
    height: float
    outline: Flat
    """From the lower rear corner over the roof to the lower front corner."""
    panes: tuple[int, ...]
    """Indices of the edges of the outline with the rear window and the windscreen."""
    windows: tuple[Flat, ...]
    """Windows on the side."""
    rear_doors: bool = False
    """Whether there are rear doors with windows, as on vans."""

    def at(self, along: float, up: float, side: float) -> Point:
        """Return a point; ``side`` is -1 (left) to 1 (right). The body narrows towards the roof."""
        half = self.width / 2 * (1 - 0.3 * max(0.0, up - 0.6))
        return side * half, up * self.height, along * self.length

    def cross_face(self, low: np.ndarray, high: np.ndarray, inner: float = 1.0) -> list[Point]:
        """Return the face across the car between two corners of the outline."""
        corners = (low, inner), (low, -inner), (high, -inner), (high, inner)
        return [self.at(along, up, side) for (along, up), side in corners]

    def side_face(
        self, corners: Iterable[tuple[float, float]], side: int, out: float
    ) -> list[Point]:
        """Return a polygon on one side, shifted outwards by ``out``."""
        points = [self.at(along, up, side) for along, up in list(corners)[::side]]
        return [(x + side * out, y, z) for x, y, z in points]

    def end_face(self, left: float, right: float, low: float, high: float, end: int) -> list[Point]:
        """Return a rectangle on the rear (``end`` 0) or the front (1)."""
        z = self.length * end + (0.02 if end else -0.02)
        turn = self.width / 2 * (1 if end else -1)
        corners = [(left, low), (right, low), (right, high), (left, high)]
        return [(turn * x, y * self.height, z) for x, y in corners]


BODIES = (
    Body(  # a hatchback
        4.0, 1.75, 1.48,
        ((0, 0.18), (0, 0.58), (0.1, 0.96), (0.18, 1), (0.56, 1), (0.74, 0.63), (0.97, 0.53),
         (1, 0.42), (1, 0.18)),
        (1, 4),
        (((0.1, 0.64), (0.15, 0.91), (0.36, 0.93), (0.36, 0.64)),
         ((0.39, 0.64), (0.39, 0.93), (0.55, 0.93), (0.68, 0.64))),
    ),
    Body(  # a saloon
        4.7, 1.8, 1.43,
        ((0, 0.2), (0, 0.6), (0.15, 0.66), (0.29, 0.97), (0.36, 1), (0.58, 1), (0.75, 0.66),
         (0.98, 0.54), (1, 0.42), (1, 0.2)),
        (2, 5),
        (((0.22, 0.68), (0.32, 0.92), (0.44, 0.93), (0.44, 0.68)),
         ((0.46, 0.68), (0.46, 0.93), (0.57, 0.93), (0.69, 0.68))),
    ),
    Body(  # an estate car, rather tall
        4.6, 1.9, 1.72,
        ((0, 0.2), (0, 0.6), (0.05, 0.94), (0.1, 1), (0.6, 1), (0.75, 0.67), (0.98, 0.6),
         (1, 0.48), (1, 0.2)),
        (1, 4),
        (((0.08, 0.67), (0.1, 0.91), (0.34, 0.92), (0.34, 0.67)),
         ((0.37, 0.67), (0.37, 0.92), (0.58, 0.92), (0.69, 0.67))),
    ),
    Body(  # a van
        5.2, 2.0, 2.25,
        ((0, 0.13), (0, 0.95), (0.03, 1), (0.74, 1), (0.88, 0.6), (0.99, 0.48), (1, 0.4),
         (1, 0.13)),
        (3,),
        (((0.62, 0.6), (0.62, 0.88), (0.75, 0.88), (0.83, 0.6)),),
        rear_doors=True,
    ),
)  # fmt: skip


def car(
    x: float, z: float, shape: int, tint: float, oncoming: bool = False, parked: bool = False
) -> SceneObject:
    """Build a car; ``z`` is the position of its end nearer to the camera."""
    points, faces = _mesh(shape, parked)
    if oncoming:
        points = points * (-1, 1, -1) + np.array((0, 0, BODIES[shape].length))
    body = PAINTS.index("body")
    painted = [(*face[:3], tint, *face[4:]) if face[2] == body else face for face in faces]
    return SceneObject(z, points=[points + np.array((x, 0, z))], faces=painted)


@cache
def _mesh(shape: int, parked: bool) -> tuple[np.ndarray, list[tuple]]:
    """Return points and faces of a car with its rear at the origin; parked cars have lights off."""
    obj, body = SceneObject(0), BODIES[shape]
    _shell(obj, body)
    for side in (-1, 1):
        _side(obj, body, side)
    _end(obj, body, 0, "tail glass" if parked else "tail light", 0.44)
    _end(obj, body, 1, "head glass" if parked else "head light", 0.38)
    return np.concatenate(obj.points), obj.faces


def _shell(obj: SceneObject, body: Body) -> None:
    """Add rear, roof, bonnet and front with their windows."""
    corners = np.array(body.outline)
    for index, (low, high) in enumerate(pairwise(corners)):
        obj.add(body.cross_face(low, high), "car", "body", shade=0.95, closed=True)
        if index in body.panes:
            rise = high - low
            pane = body.cross_face(low + 0.08 * rise, high - 0.06 * rise, inner=0.88)
            obj.add(pane, "car", "glass", layer=1, closed=True)


def _side(obj: SceneObject, body: Body, side: int) -> None:
    """Add a side with its windows and wheels."""
    obj.add(body.side_face(body.outline, side, 0), "car", "body", closed=True)
    sill = body.side_face(((0, 0.13), (0, 0.28), (1, 0.28), (1, 0.13)), side, 0.01)
    obj.add(sill, "car", "bumper", layer=1, closed=True)
    for window in body.windows:
        obj.add(body.side_face(window, side, 0.02), "car", "glass", layer=2, closed=True)
    for middle in (0.18, 0.8):
        for layer, (radius, paint, tint) in enumerate(((0.33, "tyre", 0), (0.19, "metal", 0.9)), 3):
            wheel = [
                (middle + right / body.length, (0.33 + up) / body.height)
                for right, up in ring(radius, 9)
            ]
            disc = body.side_face(wheel, side, 0.01 * layer)
            obj.add(disc, "car", paint, tint, layer=layer, closed=True)


def _end(obj: SceneObject, body: Body, end: int, lights: str, level: float) -> None:
    """Add bumper, lights and number plate to the rear or the front."""
    panels = [
        ("bumper", (-1, 1, 0.13, 0.3)),
        (lights, (-0.96, -0.62, level, level + 0.1)),
        (lights, (0.62, 0.96, level, level + 0.1)),
        ("plate", (-0.28, 0.28, 0.34, 0.42)),
    ]
    if body.rear_doors and end == 0:
        panels += [("glass", (-0.8, -0.08, 0.6, 0.87)), ("glass", (0.08, 0.8, 0.6, 0.87))]
    for paint, sides in panels:
        obj.add(body.end_face(*sides, end), "car", paint, layer=5, closed=True)
