"""Trees, bushes and hedges."""

import numpy as np

from selfadapt.streets.objects import PAINTS, Point, SceneObject, label_of, lying, standing, upright

CORNERS = 10
"""Number of corners of a clump of leaves."""


def tree(x: float, z: float, height: float, tint: float, rng: np.random.Generator) -> SceneObject:
    """Build a tree: trunk and crown."""
    obj = SceneObject(z)
    radius = height * rng.uniform(0.24, 0.34)
    middle = height - radius
    lean = rng.uniform(-0.03, 0.03) * height
    foot, top = 0.028 * height, 0.02 * height
    trunk = [(-foot, -0.1), (foot, -0.1), (lean + top, middle), (lean - top, middle)]
    obj.add(standing(trunk, x, 0, z), "vegetation", "bark", tint)
    radii = radius, radius * rng.uniform(0.85, 1.2)
    clumps = 32 if z < 25 else 20 if z < 50 else 10
    crown(obj, (x + lean, middle, z), radii, clumps, tint, rng)
    return obj


def bush(
    center: Point, radii: tuple[float, float], clumps: int, tint: float, rng: np.random.Generator
) -> SceneObject:
    """Build a bush: a crown without trunk."""
    obj = SceneObject(center[2])
    crown(obj, center, radii, clumps, tint, rng)
    return obj


def crown(
    obj: SceneObject,
    center: Point,
    radii: tuple[float, float],
    clumps: int,
    tint: float,
    rng: np.random.Generator,
) -> None:
    """Add clumps of leaves in an ellipse: first large ones, then small ones near the rim."""
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
    obj.points.extend(points)
    leaf = CORNERS, label_of("vegetation"), PAINTS.index("leaf"), tint
    layers = enumerate(shade.tolist(), 1)
    obj.faces.extend((*leaf, tone, layer, False, 0) for layer, tone in layers)


def hedge(
    x: float, deep: float, near: float, far: float, height: float, tint: float
) -> SceneObject:
    """Build a clipped hedge along the street, from ``x`` to ``deep`` across."""
    obj = SceneObject(near, rank=1)
    sides = (
        (upright((x, near), (x, far), 0, height), 0.8),
        (upright((x, near), (deep, near), 0, height), 0.9),
        (lying(x, deep, height, near, far), 1.1),
    )
    for points, shade in sides:
        obj.add(points, "vegetation", "leaf", tint, shade)
    return obj
