"""Houses: walls with window patterns, roofs and awnings."""

from dataclasses import dataclass

import numpy as np

from selfadapt.streets.objects import SceneObject, upright

FACADE = np.dtype(
    [
        ("along", "f4"),  # 1: the wall runs along the street, 0: across
        ("start", "f4"),  # origin of the coordinate along the wall, on x or z
        ("plane", "f4"),  # distance to the side of the camera
        ("base", "f4"),  # height of the lowest floor with windows
        ("floor", "f4"),  # height of a floor
        ("floors", "f4"),  # number of floors
        ("pitch", "f4"),  # distance between windows
        ("wide", "f4"),  # share of the pitch that is window
        ("tall", "f4"),  # share of the floor that is window
        ("shop", "f4"),  # 1: there is a shop on the ground floor
        ("door", "f4"),  # position of the door
        ("tint", "f4"),
    ]
)
"""Parameters of the window pattern of a wall, in metres."""

NO_FACADE = (0.0,) * len(FACADE.names or ())


@dataclass(frozen=True)
class Plot:
    """Position and height of a house."""

    side: int
    """-1: on the left, 1: on the right."""
    x: float
    """Position of the front."""
    near: float
    far: float
    height: float


def facade(
    rng: np.random.Generator,
    height: float,
    start: float,
    plane: float | None = None,
    shop: bool = False,
) -> tuple[float, ...]:
    """Sample the pattern of a wall, a row of ``FACADE``; only fronts have a ``plane``."""
    base = rng.uniform(3.4, 4.2) if shop else rng.uniform(0.4, 0.9)
    floor = rng.uniform(2.6, 3.3)
    floors = max(1.0, (height - base - 0.2) // floor)
    floor = max(2.0, min(floor, height - base - 0.2))
    ribbon = rng.random() < 0.2
    wide = rng.uniform(0.75, 0.92) if ribbon else rng.uniform(0.35, 0.6)
    pitch, tall = rng.uniform(1.8, 3.4), rng.uniform(0.45, 0.65)
    door = rng.uniform(1.5, 6) if plane else -9.0
    position = (1.0, start, plane) if plane else (0.0, start, 1.0)
    return (*position, base, floor, floors, pitch, wide, tall, float(shop), door, rng.random())


def house(
    plot: Plot, front: int, flank: int, gabled: bool, awning: bool, rng: np.random.Generator
) -> SceneObject:
    """Build a house: front and visible flank, with a roof or a cornice.

    Args:
        plot: Position and height.
        front: Row of its front in the table of facades.
        flank: Row of its flank; 0: no windows.
        gabled: Whether there is a pitched roof.
        awning: Whether there is an awning over the sidewalk.
        rng: Source of the remaining random parameters.
    """
    obj = SceneObject(plot.near, rank=1)
    x, height = plot.x, plot.height
    back = x + plot.side * rng.uniform(8, 13)
    tint, roof = rng.random(2).tolist()
    wall = upright((x, plot.near), (x, plot.far), 0, height)
    obj.add(wall, "building", "wall", tint, layer=2, facade=front)
    wall = upright((x, plot.near), (back, plot.near), 0, height)
    paint = "wall" if flank else "gable"
    obj.add(wall, "building", paint, tint, 0.97, layer=2, facade=flank)
    if gabled:
        _pitched_roof(obj, plot, back, rng.uniform(2, 4), tint, roof)
    else:
        out = x - plot.side * 0.25
        cornice = upright((out, plot.near), (out, plot.far), height - 0.1, height + 0.35)
        obj.add(cornice, "building", "trim", tint, layer=3)
    if awning:
        _awning(obj, plot, rng.uniform(0.8, 1.3), rng.random())
    return obj


def _pitched_roof(
    obj: SceneObject, plot: Plot, back: float, rise: float, tint: float, roof: float
) -> None:
    ridge, top = (plot.x + back) / 2, plot.height + rise
    gable = [
        (plot.x, plot.height, plot.near),
        (ridge, top, plot.near),
        (back, plot.height, plot.near),
    ]
    obj.add(gable, "building", "gable", tint, 0.97, layer=2)
    eave, low, near = plot.x - plot.side * 0.35, plot.height - 0.25, plot.near - 0.3
    slope = [(eave, low, near), (eave, low, plot.far), (ridge, top, plot.far), (ridge, top, near)]
    obj.add(slope, "building", "roof", roof, layer=3)


def _awning(obj: SceneObject, plot: Plot, reach: float, tint: float) -> None:
    out, near = plot.x - plot.side * reach, plot.near + 0.6
    far = max(near + 0.9, plot.far - 0.6)
    cloth = [(plot.x, 3.3, near), (plot.x, 3.3, far), (out, 2.6, far), (out, 2.6, near)]
    obj.add(cloth, "building", "awning", tint, layer=4)
    cheek = [(plot.x, 3.3, near), (out, 2.6, near), (plot.x, 2.6, near)]
    obj.add(cheek, "building", "awning", tint, 0.8, layer=5)
    obj.add(upright((out, near), (out, far), 2.35, 2.6), "building", "awning", tint, 0.9, layer=6)
