"""Painting by numbers: every pixel gets the number of the face it shows.

Faces are flat, so on each the inverse of the depth is a linear function of the pixel; with the
number of its face, a pixel therefore also has its place in the street.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from selfadapt.streets.scene import Camera, Street
from selfadapt.streets.things import FACE, label_of

NEAR = 0.8
"""Faces that reach nearer to the camera are left out, in metres."""


@dataclass
class Canvas:
    """Which face each pixel shows, and where the faces lie."""

    number: np.ndarray
    """Number of the face ``(H, W)``; 0 is the sky."""
    faces: np.ndarray
    """The faces by number, ``FACE``."""
    normals: np.ndarray
    """Where they face, in the street's directions ``(F, 3)``."""
    inverse_depth: np.ndarray
    """Factors of (right, up, 1) that give 1 / depth ``(F, 3)``."""
    contact: np.ndarray
    """How dark the ground is below what stands on it ``(H, W)``, 0 to 1."""
    right: np.ndarray
    """How far right each column looks, as a slope ``(W,)``."""
    up: np.ndarray
    """How far up each row looks ``(H, 1)``."""

    @property
    def label(self) -> np.ndarray:
        """Return the label ``(H, W)``, uint8."""
        return self.faces["label"].take(self.number)


class Projection:
    """From the street to the pixels of an image."""

    def __init__(self, camera: Camera, height: int, width: int) -> None:
        self.camera, self.height, self.width = camera, height, width
        self.focal = camera.focal * width
        self.horizon = camera.horizon * height

    def seen(self, points: np.ndarray) -> np.ndarray:
        """Return points ``(N, 3)`` as the camera has them: right, up, ahead."""
        sine, cosine = self.camera.turn
        x, y, z = (points - (self.camera.x, self.camera.height, 0)).T
        return np.stack([x * cosine - z * sine, y, x * sine + z * cosine], axis=1)

    def turned_back(self, directions: np.ndarray) -> np.ndarray:
        """Return directions the camera has in those of the street."""
        sine, cosine = self.camera.turn
        x, y, z = directions.T
        return np.stack([x * cosine + z * sine, y, z * cosine - x * sine], axis=1)

    def pixels(self, seen: np.ndarray) -> np.ndarray:
        """Return columns and rows ``(N, 2)``."""
        scale = self.focal / np.maximum(seen[:, 2], 0.05)
        column = self.width / 2 - 0.5 + scale * seen[:, 0]
        row = self.horizon - 0.5 - scale * seen[:, 1]
        return np.stack([column, row], axis=1)

    def rays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return how far right each column looks, and how far up each row."""
        right = (np.arange(self.width) + 0.5 - self.width / 2) / self.focal
        up = (self.horizon - 0.5 - np.arange(self.height)) / self.focal
        return right.astype(np.float32), up.astype(np.float32)[:, None]


def paint(street: Street, height: int, width: int) -> Canvas:
    """Paint all faces of a street, from far to near."""
    projection = Projection(street.camera, height, width)
    things = sorted(street.things, key=lambda thing: (thing.rank, -thing.distance))
    points = [array.reshape(-1, 3) for thing in things for array in thing.points]
    seen = projection.seen(np.concatenate(points))
    pixels = projection.pixels(seen)
    faces = np.array([face for thing in things for face in thing.faces], FACE)
    owner = np.repeat(np.arange(len(things)), [len(thing.faces) for thing in things])
    first = np.cumsum(faces["corners"]) - faces["corners"]
    normals, inverse_depth, facing = _planes(seen, first)
    visible = _inside(pixels, first, height, width) & (facing | ~faces["closed"])
    visible &= np.minimum.reduceat(seen[:, 2], first) > NEAR
    depth = np.add.reduceat(seen[:, 2], first) / faces["corners"]
    order = np.lexsort((-depth, faces["layer"], owner))
    order = order[visible[order]]
    last = first + faces["corners"]
    right, up = projection.rays()
    sky = np.array([(0, label_of("sky"), 0, 0, 1, 0, False, 0)], FACE)
    return Canvas(
        number=_filled(pixels, first[order], last[order], height, width),
        faces=np.concatenate([sky, faces[order]]),
        normals=np.concatenate([np.zeros((1, 3)), projection.turned_back(normals[order])]),
        inverse_depth=np.concatenate([[(0, 0, 1e-4)], inverse_depth[order]]),
        contact=_contact(street, projection),
        right=right,
        up=up,
    )


def _planes(seen: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the faces' normals towards the camera, inverse depths, and whether they face it.

    A normal is the sum over the edges of the cross product of their ends (Newell's way), so a
    face that is slightly bent gets its mean direction.
    """
    last = np.append(first[1:], len(seen)) - 1
    following = np.arange(1, len(seen) + 1)
    following[last] = first
    (a, b, c), (d, e, f) = seen.T, seen[following].T
    edges = np.stack([b * f - c * e, c * d - a * f, a * e - b * d], axis=1)
    normal = np.add.reduceat(edges, first)
    x, y, z = normal.T
    normal /= np.maximum(np.sqrt(x * x + y * y + z * z), 1e-9)[:, None]
    x, y, z = (normal * np.add.reduceat(seen, first)).T / (last - first + 1)
    distance = x + y + z
    facing = distance < 0
    inverse = normal / np.where(np.abs(distance) < 1e-6, 1e-6, distance)[:, None]
    return np.where(facing[:, None], normal, -normal), inverse, facing


def _inside(pixels: np.ndarray, first: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return which faces reach into the image and are not too small to see."""
    low, high = np.minimum.reduceat(pixels, first), np.maximum.reduceat(pixels, first)
    inside = (high > 0).all(axis=1) & (low < (width, height)).all(axis=1)
    return inside & ((high - low).max(axis=1) > 0.7)


def _filled(
    pixels: np.ndarray, first: np.ndarray, last: np.ndarray, height: int, width: int
) -> np.ndarray:
    """Fill the faces in turn with 1, 2, 3, ... ``(H, W)``."""
    picture = Image.new("I", (width, height))
    draw = ImageDraw.Draw(picture)
    values = pixels.ravel().tolist()
    spans = zip((2 * first).tolist(), (2 * last).tolist(), strict=True)
    for number, (start, end) in enumerate(spans, 1):
        draw.polygon(values[start:end], fill=number)
    return np.asarray(picture).astype(np.intp)


def _contact(street: Street, projection: Projection) -> np.ndarray:
    """Darken the ground where things stand, softly."""
    picture = Image.new("L", (projection.width, projection.height))
    draw = ImageDraw.Draw(picture)
    seen = projection.seen(
        np.array([point for spot in street.spots for point in spot] or [(0, 0, 0)])
    )
    pixels = projection.pixels(seen)
    start = 0
    for spot in street.spots:
        end = start + len(spot)
        if seen[start:end, 2].min() > NEAR:
            draw.polygon(pixels[start:end].ravel().tolist(), fill=255)
        start = end
    blurred = picture.filter(ImageFilter.BoxBlur(projection.height / 128))
    return np.asarray(blurred, dtype=np.float32) / 255
