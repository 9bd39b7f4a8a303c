"""Painter's algorithm: compute the index of the face that each pixel shows.

Faces are planar, so the inverse depth on a face is a linear function of the pixel; the index of the
face therefore also gives the position of a pixel in the street.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from selfadapt.streets.objects import FACE, label_of
from selfadapt.streets.scene import Camera, Street

NEAR = 0.8
"""Near plane in metres; faces that cross it are omitted."""


@dataclass
class Canvas:
    """The visible face of each pixel, and the planes of the faces."""

    face_index: np.ndarray
    """Index of the visible face ``(H, W)``; 0 is the sky."""
    faces: np.ndarray
    """The faces, dtype ``FACE``."""
    normals: np.ndarray
    """Normals in street coordinates ``(F, 3)``."""
    inverse_depth: np.ndarray
    """Factors of (right, up, 1) that give 1 / depth ``(F, 3)``."""
    contact: np.ndarray
    """Contact shadows on the ground ``(H, W)``, 0 to 1."""
    right: np.ndarray
    """Slope of the ray of each column to the right ``(W,)``."""
    up: np.ndarray
    """Slope of the ray of each row upwards ``(H, 1)``."""

    @property
    def label(self) -> np.ndarray:
        """Return the label ``(H, W)``, uint8."""
        return self.faces["label"].take(self.face_index)


class Projection:
    """Projection from street coordinates to pixels."""

    def __init__(self, camera: Camera, height: int, width: int) -> None:
        self.camera, self.height, self.width = camera, height, width
        self.focal = camera.focal * width
        self.horizon = camera.horizon * height

    def to_camera(self, points: np.ndarray) -> np.ndarray:
        """Convert points ``(N, 3)`` to camera coordinates: right, up, ahead."""
        sine, cosine = self.camera.turn
        x, y, z = (points - (self.camera.x, self.camera.height, 0)).T
        return np.stack([x * cosine - z * sine, y, x * sine + z * cosine], axis=1)

    def to_street(self, directions: np.ndarray) -> np.ndarray:
        """Convert directions from camera to street coordinates."""
        sine, cosine = self.camera.turn
        x, y, z = directions.T
        return np.stack([x * cosine + z * sine, y, z * cosine - x * sine], axis=1)

    def project(self, camera_points: np.ndarray) -> np.ndarray:
        """Project camera coordinates to columns and rows ``(N, 2)``."""
        scale = self.focal / np.maximum(camera_points[:, 2], 0.05)
        column = self.width / 2 - 0.5 + scale * camera_points[:, 0]
        row = self.horizon - 0.5 - scale * camera_points[:, 1]
        return np.stack([column, row], axis=1)

    def rays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the slopes of the rays, of columns to the right and of rows upwards."""
        right = (np.arange(self.width) + 0.5 - self.width / 2) / self.focal
        up = (self.horizon - 0.5 - np.arange(self.height)) / self.focal
        return right.astype(np.float32), up.astype(np.float32)[:, None]


def paint(street: Street, height: int, width: int) -> Canvas:
    """Draw all faces of a street, from far to near."""
    projection = Projection(street.camera, height, width)
    objects = sorted(street.objects, key=lambda obj: (obj.rank, -obj.distance))
    points = [array.reshape(-1, 3) for obj in objects for array in obj.points]
    camera_points = projection.to_camera(np.concatenate(points))
    pixels = projection.project(camera_points)
    faces = np.array([face for obj in objects for face in obj.faces], FACE)
    owner = np.repeat(np.arange(len(objects)), [len(obj.faces) for obj in objects])
    first = np.cumsum(faces["corners"]) - faces["corners"]
    normals, inverse_depth, facing = _planes(camera_points, first)
    visible = _is_visible(pixels, first, height, width) & (facing | ~faces["closed"])
    visible &= np.minimum.reduceat(camera_points[:, 2], first) > NEAR
    depth = np.add.reduceat(camera_points[:, 2], first) / faces["corners"]
    order = np.lexsort((-depth, faces["layer"], owner))
    order = order[visible[order]]
    last = first + faces["corners"]
    right, up = projection.rays()
    sky = np.array([(0, label_of("sky"), 0, 0, 1, 0, False, 0)], FACE)
    return Canvas(
        face_index=_rasterise(pixels, first[order], last[order], height, width),
        faces=np.concatenate([sky, faces[order]]),
        normals=np.concatenate([np.zeros((1, 3)), projection.to_street(normals[order])]),
        inverse_depth=np.concatenate([[(0, 0, 1e-4)], inverse_depth[order]]),
        contact=_contact_shadows(street, projection),
        right=right,
        up=up,
    )


def _planes(
    camera_points: np.ndarray, first: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the normals towards the camera, the inverse depths, and which faces are front-facing.

    Normals are computed by Newell's method, the sum of the cross products of the ends of the edges;
    a face that is not quite planar gets its mean normal.
    """
    last = np.append(first[1:], len(camera_points)) - 1
    following = np.arange(1, len(camera_points) + 1)
    following[last] = first
    (a, b, c), (d, e, f) = camera_points.T, camera_points[following].T
    edges = np.stack([b * f - c * e, c * d - a * f, a * e - b * d], axis=1)
    normal = np.add.reduceat(edges, first)
    x, y, z = normal.T
    normal /= np.maximum(np.sqrt(x * x + y * y + z * z), 1e-9)[:, None]
    x, y, z = (normal * np.add.reduceat(camera_points, first)).T / (last - first + 1)
    distance = x + y + z
    facing = distance < 0
    inverse = normal / np.where(np.abs(distance) < 1e-6, 1e-6, distance)[:, None]
    return np.where(facing[:, None], normal, -normal), inverse, facing


def _is_visible(pixels: np.ndarray, first: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return which faces intersect the image and are not too small to see."""
    low, high = np.minimum.reduceat(pixels, first), np.maximum.reduceat(pixels, first)
    inside = (high > 0).all(axis=1) & (low < (width, height)).all(axis=1)
    return inside & ((high - low).max(axis=1) > 0.7)


def _rasterise(
    pixels: np.ndarray, first: np.ndarray, last: np.ndarray, height: int, width: int
) -> np.ndarray:
    """Fill the faces in order with 1, 2, 3, ... ``(H, W)``."""
    picture = Image.new("I", (width, height))
    draw = ImageDraw.Draw(picture)
    values = pixels.ravel().tolist()
    spans = zip((2 * first).tolist(), (2 * last).tolist(), strict=True)
    for number, (start, end) in enumerate(spans, 1):
        draw.polygon(values[start:end], fill=number)
    return np.asarray(picture).astype(np.intp)


def _contact_shadows(street: Street, projection: Projection) -> np.ndarray:
    """Return soft contact shadows of the objects on the ground ``(H, W)``."""
    picture = Image.new("L", (projection.width, projection.height))
    draw = ImageDraw.Draw(picture)
    camera_points = projection.to_camera(
        np.array([point for shadow in street.shadows for point in shadow] or [(0, 0, 0)])
    )
    pixels = projection.project(camera_points)
    start = 0
    for shadow in street.shadows:
        end = start + len(shadow)
        if camera_points[start:end, 2].min() > NEAR:
            draw.polygon(pixels[start:end].ravel().tolist(), fill=255)
        start = end
    blurred = picture.filter(ImageFilter.BoxBlur(projection.height / 128))
    return np.asarray(blurred, dtype=np.float32) / 255
