"""People, poles, street lamps and traffic signs."""

from dataclasses import dataclass

import numpy as np

from selfadapt.streets.objects import Flat, SceneObject, ring, standing


def person(x: float, y: float, z: float, rng: np.random.Generator) -> SceneObject:
    """Build a person, walking or standing."""
    obj = SceneObject(z)
    tall, broad = rng.uniform(0.87, 1.1), rng.uniform(0.9, 1.2)
    stride, coat = rng.uniform(0, 0.2), rng.uniform(0.6, 0.95)
    skin, hair, top, trousers, shoes = rng.random(5).tolist()
    swing = 0.27 + 0.3 * stride
    parts: list[tuple[str, float, float, Flat]] = []
    for side in (-1, 1):
        foot = side * (0.08 + stride)
        shade = 0.8 if side < 0 else 1.0
        leg = _limb((side * 0.09, 0.88), (foot, 0.05), 0.095, 0.065)
        parts.append(("trousers", trousers, shade, leg))
        shoe = ((foot - 0.08, 0), (foot + 0.11, 0), (foot + 0.09, 0.09), (foot - 0.08, 0.09))
        parts.append(("shoes", shoes, shade, shoe))
        arm = _limb((side * 0.2, 1.38), (side * swing, 0.84), 0.06, 0.045)
        parts.append(("top", top, 0.8, arm))
        parts.append(("skin", skin, 0.95, _round(side * swing, 0.81, 0.045, 0.06)))
    torso = ((-0.19, coat), (0.19, coat), (0.23, 1.36), (0.13, 1.46), (-0.13, 1.46), (-0.23, 1.36))
    parts.append(("top", top, 1.0, torso))
    parts.append(("skin", skin, 0.9, ((-0.05, 1.42), (0.05, 1.42), (0.05, 1.52), (-0.05, 1.52))))
    parts.append(("hair", hair, 1.0, _round(0, 1.63, 0.115, 0.135)))
    parts.append(("skin", skin, 1.0, _round(0, 1.59, 0.09, 0.105)))
    for layer, (paint, tint, shade, corners) in enumerate(parts):
        polygon = [(right * broad * tall, up * tall) for right, up in corners]
        obj.add(standing(polygon, x, y, z), "person", paint, tint, shade, layer)
    return obj


def _limb(start: tuple[float, float], end: tuple[float, float], thick: float, thin: float) -> Flat:
    (x0, y0), (x1, y1) = start, end
    return ((x1 - thin, y1), (x1 + thin, y1), (x0 + thick, y0), (x0 - thick, y0))


def _round(right: float, up: float, half_width: float, half_height: float) -> Flat:
    return tuple((right + half_width * a, up + half_height * b) for a, b in ring(1, 9))


def pole(x: float, y: float, z: float, height: float, width: float) -> SceneObject:
    """Build a plain pole, darker on one side."""
    obj = SceneObject(z)
    foot, top = width / 2, width * 0.4
    for layer, left in enumerate((-1, 0)):
        shaft = ((left * foot, 0), (foot, 0), (top, height), (left * top, height))
        obj.add(standing(shaft, x, y, z), "pole", "metal", 0.3, 1 - 0.25 * layer, layer)
    return obj


def lamp(x: float, y: float, z: float, height: float, reach: float) -> SceneObject:
    """Build a street lamp whose arm reaches over the road, to the left if ``reach`` is negative."""
    obj = pole(x, y, z, height, 0.22)
    side = 1 if reach > 0 else -1
    arm = ((0, 0), (reach, 0.35), (reach, 0.49), (0, 0.16))
    head = ((-0.1, 0.3), (0.75, 0.32), (0.7, 0.5), (-0.1, 0.52))
    bulb = ((0.0, 0.24), (0.65, 0.26), (0.65, 0.33), (0.0, 0.32))
    parts = (
        ("metal", 0.3, arm, 0.0, 1),
        ("metal", 0.5, head, reach, side),
        ("lamp", 0, bulb, reach, side),
    )
    for layer, (paint, tint, corners, away, turn) in enumerate(parts, 2):
        polygon = [(away + turn * right, height + up) for right, up in corners]
        obj.add(standing(polygon, x, y, z), "pole", paint, tint, layer=layer)
    return obj


@dataclass(frozen=True)
class Plate:
    """Plate of a traffic sign: its outline, and the tints of rim, face and symbol."""

    outline: Flat
    rim: float
    face: float
    mark: float


RED, WHITE, BLUE, YELLOW, BLACK = 0.1, 0.3, 0.5, 0.7, 0.9
"""Tints of the paint ``sign``."""
BOARD = ((-0.85, -0.36), (0.85, -0.36), (0.85, 0.36), (-0.85, 0.36))
SQUARE = ((-0.38, -0.38), (0.38, -0.38), (0.38, 0.38), (-0.38, 0.38))
PLATES = (
    Plate(ring(0.42, 14), RED, WHITE, BLACK),
    Plate(ring(0.42, 14), RED, WHITE, WHITE),
    Plate(ring(0.4, 14), RED, BLUE, RED),
    Plate(ring(0.4, 14), WHITE, BLUE, WHITE),
    Plate(((-0.48, -0.32), (0.48, -0.32), (0, 0.52)), RED, WHITE, BLACK),
    Plate(((-0.48, 0.42), (0.48, 0.42), (0, -0.42)), RED, WHITE, WHITE),
    Plate(ring(0.5, 4), WHITE, YELLOW, YELLOW),
    Plate(ring(0.44, 8, 0.5), WHITE, RED, WHITE),
    Plate(SQUARE, WHITE, BLUE, WHITE),
    Plate(BOARD, WHITE, BLUE, WHITE),
    Plate(BOARD, BLACK, YELLOW, BLACK),
    Plate(BOARD, BLACK, WHITE, BLACK),
)


def sign(x: float, y: float, z: float, plate: Plate, height: float) -> SceneObject:
    """Build a traffic sign on a pole."""
    obj = pole(x, y, z, height, 0.13)
    inner = [(0.78 * right, 0.78 * up) for right, up in plate.outline]
    mark = [(2.0 * right, 0.3 * up) for right, up in ring(0.13, 4, 0.5)]
    parts = (plate.outline, plate.rim), (inner, plate.face), (mark, plate.mark)
    for layer, (outline, tint) in enumerate(parts, 2):
        polygon = standing(outline, x, y + height - 0.1, z - 0.02 * layer)
        obj.add(polygon, "traffic sign", "sign", tint, layer=layer)
    return obj
