"""Trees, bushes and hedges."""

import numpy as np

from selfadapt.streets.things import PAINTS, Point, Thing, label_of, lying, standing, upright

CORNERS = 10
"""Corners of a clump of leaves."""


def tree(x: float, z: float, height: float, tint: float, rng: np.random.Generator) -> Thing:
    """Grow a tree: a trunk and a crown."""
    thing = Thing(z)
    radius = height * rng.uniform(0.24, 0.34)
    middle = height - radius
    lean = rng.uniform(-0.03, 0.03) * height
    foot, top = 0.028 * height, 0.02 * height
    trunk = [(-foot, -0.1), (foot, -0.1), (lean + top, middle), (lean - top, middle)]
    thing.add(standing(trunk, x, 0, z), "vegetation", "bark", tint)
    radii = radius, radius * rng.uniform(0.85, 1.2)
    clumps = 32 if z < 25 else 20 if z < 50 else 10
    crown(thing, (x + lean, middle, z), radii, clumps, tint, rng)
    return thing


def bush(
    center: Point, radii: tuple[float, float], clumps: int, tint: float, rng: np.random.Generator
) -> Thing:
    """Grow a crown that has no trunk."""
    thing = Thing(center[2])
    crown(thing, center, radii, clumps, tint, rng)
    return thing


def crown(
    thing: Thing,
    center: Point,
    radii: tuple[float, float],
    clumps: int,
    tint: float,
    rng: np.random.Generator,
) -> None:
    """Add clumps of leaves in an ellipse: first large ones, then small ones towards the rim."""
    small = np.arange(clumps) >= clumps / 2
    angle = rng.uniform(0, 2 * np.pi, clumps)
    spread = np.sqrt(rng.random(clumps)) * np.where(small, 0.5, 0.8) + np.where(small, 0.5, 0)
    right, up = spread * np.sin(angle), 0.9 * spread * np.cos(angle)
    size = rng.uniform(0.32, 0.5, clumps) * np.where(small, 0.45, 1)
    rim = size[:, None] * rng.uniform(0.72, 1.12, (clumps, CORNERS))
    turn = np.arange(CORNERS) * (2 * np.pi / CORNERS)
    points = np.empty((clumps, CORNERS, 3))
    points[..., 0] = center[0] + radii[0] * (right[:, None] + rim * np.sin(turn))
    points[..., 1] = center[1] + radii[1] * (up[:, None] + rim * np.cos(turn))
    points[..., 1] = np.maximum(points[..., 1], 0)
    points[..., 2] = center[2]
    shade = 0.72 + 0.35 * up + small * rng.uniform(-0.2, 0.25, clumps)
    thing.points.extend(points)
    leaf = CORNERS, label_of("vegetation"), PAINTS.index("leaf"), tint
    layers = enumerate(shade.tolist(), 1)
    thing.faces.extend((*leaf, tone, layer, False, 0) for layer, tone in layers)


def hedge(x: float, deep: float, near: float, far: float, height: float, tint: float) -> Thing:
    """Grow a clipped hedge along the street, from ``x`` to ``deep`` away from it."""
    thing = Thing(near, rank=1)
    sides = (
        (upright((x, near), (x, far), 0, height), 0.8),
        (upright((x, near), (deep, near), 0, height), 0.9),
        (lying(x, deep, height, near, far), 1.1),
    )
    for points, shade in sides:
        thing.add(points, "vegetation", "leaf", tint, shade)
    return thing
