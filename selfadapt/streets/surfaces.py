"""Procedural textures: road markings, paving slabs, roof tiles and grain.

Textures are functions of the position in the street, in metres, so perspective needs no extra code.
Edges are antialiased over the width of a pixel by ``cover``.
"""

import numpy as np

from selfadapt.streets.looks import Look
from selfadapt.streets.noise import cloud_tile, grain_tile, hash_uniform, sample
from selfadapt.streets.objects import PAINTS
from selfadapt.streets.painter import Canvas
from selfadapt.streets.scene import CROSSING, Street

GRAIN = {
    "leaf": (1.5, 13), "grass": (0.7, 14), "asphalt": (0.35, 26), "paving": (0.3, 22),
    "wall": (0.22, 12), "gable": (0.26, 12), "roof": (0.5, 9), "bark": (0.6, 14),
}  # fmt: skip
"""Strength of the grain by paint, and grains per metre."""


class Band:
    """Rows of a picture: the face of each pixel, and its position in the street."""

    def __init__(self, street: Street, canvas: Canvas, rows: slice) -> None:
        self.street, self.canvas = street, canvas
        self.face_index = canvas.face_index[rows]
        self.up, self.right = canvas.up[rows], canvas.right
        self.contact = canvas.contact[rows]
        camera = street.camera
        sine, cosine = np.array(camera.turn, np.float32)
        right, up, constant = canvas.inverse_depth.T.astype(np.float32)
        inverse = constant.take(self.face_index)
        inverse += up.take(self.face_index) * self.up
        inverse += right.take(self.face_index) * self.right
        self.depth = 1 / np.maximum(inverse, (1e-4))
        self.x = self.depth * (self.right * cosine + sine) + camera.x
        self.y = self.depth * self.up + camera.height
        self.z = self.depth * (cosine - self.right * sine)
        # width of a pixel on the surface, in metres
        self.pixel = self.depth * (1 / (camera.focal * len(self.right)))
        self.paint = canvas.faces["paint"].astype(np.uint8).take(self.face_index)

    def indices_of(self, paint: str) -> np.ndarray:
        """Return the flat indices of the pixels with a paint."""
        return np.flatnonzero(self.paint == PAINTS.index(paint))

    def gather(self, name: str, indices: np.ndarray) -> np.ndarray:
        """Return an attribute of the band at flat indices."""
        return getattr(self, name).take(indices)

    def pixel_ahead(self, indices: np.ndarray) -> np.ndarray:
        """Return the length of a pixel along the ground, in metres."""
        height = 1 / self.street.camera.height
        return self.gather("pixel", indices) * self.gather("depth", indices) * height


def cover(half: np.ndarray | float, off: np.ndarray, pixel: np.ndarray) -> np.ndarray:
    """Return how much of a pixel at distance ``off`` an interval of half width ``half`` covers."""
    part = (half - off) / pixel
    part += 0.5
    return np.clip(part, 0, 1, out=part)


def from_middle(value: np.ndarray) -> np.ndarray:
    """Return the distance to the nearest half-integer, 0 to 0.5."""
    return np.abs(value - np.floor(value) - 0.5)


def surface_colors(band: Band, look: Look, face_colors: np.ndarray) -> np.ndarray:
    """Return the surface colour of each pixel ``(3, h, w)``, without facades."""
    colors = np.stack([color.take(band.face_index) for color in face_colors.T.astype(np.float32)])
    colors *= _grain_factor(band, look.rough)
    for paint in (_draw_road, _draw_paving, _draw_roofs):
        paint(band, colors.reshape(3, -1))
    return colors


def _grain_factor(band: Band, rough: float) -> np.ndarray:
    """Return the factor of the grain on each pixel, about 1."""
    grains = np.zeros((2, len(PAINTS)), np.float32)
    for name, (amount, scale) in GRAIN.items():
        grains[:, PAINTS.index(name)] = amount * rough, scale
    paint = band.canvas.faces["paint"]
    level = (band.canvas.normals[:, 1] > 0.7).astype(np.float32).take(band.face_index)
    amounts, scales = (values[paint].take(band.face_index) for values in grains)
    across = (band.x + band.z * (1 - level)) * scales
    vertical = (band.y + (band.z - band.y) * level) * scales
    amounts /= 1 + 5 * band.pixel
    return np.maximum(1 + amounts * sample(grain_tile(), across, vertical), 0.1)


def _draw_road(band: Band, colors: np.ndarray) -> None:
    """Draw wear, patches, manholes and markings on the road."""
    indices = band.indices_of("asphalt")
    x, z = band.gather("x", indices), band.gather("z", indices)
    worn = sample(cloud_tile(), x * 20, z * 9)
    mended = sample(cloud_tile(), z * 4 + 57, x * 5 + 99) > 0.62
    tone = (0.72 + 0.56 * worn) * np.where(mended, np.float32(0.7), np.float32(1))
    aside, away = x - 0.8, from_middle(z / 23) * 23
    manhole = cover(0.35, np.sqrt(aside * aside + away * away), band.gather("pixel", indices))
    tone *= 1 - 0.5 * manhole
    mark = _markings(band, indices) * (0.95 - 0.5 * worn)
    for channel in colors:
        value = channel.take(indices) * tone
        channel[indices] = value + mark * (0.7 - value)


def _markings(band: Band, indices: np.ndarray) -> np.ndarray:
    """Return the coverage by white markings: lines, and the stripes of the crosswalk."""
    street = band.street
    x, z, pixel = (
        band.gather("x", indices),
        band.gather("z", indices),
        band.gather("pixel", indices),
    )
    ahead = band.pixel_ahead(indices)
    edge = street.half_road - max(street.parking, 0.25)
    dashes = cover(0.07, np.abs(x), pixel) * cover(1.5, from_middle(z / 6) * 6, ahead)
    lines = np.maximum(dashes, cover(0.06, np.abs(np.abs(x) - edge), pixel)) * street.marked
    zebra = cover(1.6, np.abs(z - (street.zebra + 1.6)), ahead)
    stop = cover(0.2, np.abs(z - (street.zebra - 1.2)), ahead) * (x > 0)
    open_road = (z < street.crossing - 1) | (z > street.crossing + CROSSING)
    lines = np.maximum(lines, stop) * open_road * (1 - zebra)
    stripes = cover(0.25, from_middle(x), pixel) * zebra
    return np.maximum(lines, stripes) * (np.abs(x) < street.half_road)


def _draw_paving(band: Band, colors: np.ndarray) -> None:
    """Draw slabs on the sidewalk."""
    indices = band.indices_of("paving")
    pixel, ahead = band.gather("pixel", indices), band.pixel_ahead(indices)
    across, along = band.gather("x", indices) / 0.7, band.gather("z", indices) / 0.7
    joint = np.maximum(
        cover(0.03, 0.35 - 0.7 * from_middle(across), pixel) / (1 + 20 * pixel),
        cover(0.03, 0.35 - 0.7 * from_middle(along), ahead) / (1 + 20 * ahead),
    )
    slab = hash_uniform(np.floor(across) * 31 + np.floor(along) * 57) - 0.5
    tone = (1 - 0.4 * joint) * (1 + 0.25 * slab / (1 + ahead))
    for channel in colors:
        channel[indices] *= tone


def _draw_roofs(band: Band, colors: np.ndarray) -> None:
    """Draw rows of tiles on the roofs."""
    indices = band.indices_of("roof")
    pixel = band.gather("pixel", indices)
    row = 0.2 - 0.4 * from_middle(band.gather("y", indices) / 0.4)
    tone = 1 - 0.35 * cover(0.07, row, pixel) / (1 + 8 * pixel)
    for channel in colors:
        channel[indices] *= tone
