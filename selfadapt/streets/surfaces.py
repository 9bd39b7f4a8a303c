"""What surfaces look like: lines on the road, slabs, tiles, leaves and grain.

Textures are functions of the place in the street, in metres, so they keep to the perspective by
themselves. An edge is as soft as a pixel is wide: ``cover`` does that.
"""

import numpy as np

from selfadapt.streets.looks import Look
from selfadapt.streets.noise import cloth, grain, luck, sample
from selfadapt.streets.painter import Canvas
from selfadapt.streets.scene import CROSSING, Street
from selfadapt.streets.things import PAINTS

GRAIN = {
    "leaf": (1.5, 13), "grass": (0.7, 14), "asphalt": (0.35, 26), "paving": (0.3, 22),
    "wall": (0.22, 12), "gable": (0.26, 12), "roof": (0.5, 9), "bark": (0.6, 14),
}  # fmt: skip
"""How uneven a paint is, and how many grains it has to a metre."""


class Band:
    """Some rows of a picture: what each pixel shows, and where in the street that is."""

    def __init__(self, street: Street, canvas: Canvas, rows: slice) -> None:
        self.street, self.canvas = street, canvas
        self.number = canvas.number[rows]
        self.up, self.right = canvas.up[rows], canvas.right
        self.contact = canvas.contact[rows]
        camera = street.camera
        sine, cosine = np.array(camera.turn, np.float32)
        right, up, one = canvas.inverse_depth.T.astype(np.float32)
        inverse = one.take(self.number)
        inverse += up.take(self.number) * self.up
        inverse += right.take(self.number) * self.right
        self.depth = 1 / np.maximum(inverse, (1e-4))
        self.x = self.depth * (self.right * cosine + sine) + camera.x
        self.y = self.depth * self.up + camera.height
        self.z = self.depth * (cosine - self.right * sine)
        # width of a pixel on the surface, in metres
        self.pixel = self.depth * (1 / (camera.focal * len(self.right)))
        self.paint = canvas.faces["paint"].astype(np.uint8).take(self.number)

    def where(self, paint: str) -> np.ndarray:
        """Return the flat indices of the pixels with a paint."""
        return np.flatnonzero(self.paint == PAINTS.index(paint))

    def at(self, name: str, places: np.ndarray) -> np.ndarray:
        """Return one of the band's measures at flat indices."""
        return getattr(self, name).take(places)

    def pixel_ahead(self, places: np.ndarray) -> np.ndarray:
        """Return how far a pixel reaches along the ground, in metres."""
        height = 1 / self.street.camera.height
        return self.at("pixel", places) * self.at("depth", places) * height


def cover(half: np.ndarray | float, off: np.ndarray, pixel: np.ndarray) -> np.ndarray:
    """Return how much of a pixel lies within ``half`` of a middle it is ``off`` from, 0 to 1."""
    part = (half - off) / pixel
    part += 0.5
    return np.clip(part, 0, 1, out=part)


def from_middle(value: np.ndarray) -> np.ndarray:
    """Return the distance to the middle between two whole numbers, 0 to 0.5."""
    return np.abs(value - np.floor(value) - 0.5)


def ground_and_grain(band: Band, look: Look, colors: np.ndarray) -> np.ndarray:
    """Return the colour of each pixel's surface ``(3, h, w)``, all but the facades."""
    own = np.stack([color.take(band.number) for color in colors.T.astype(np.float32)])
    own *= _grain(band, look.rough)
    for paint in (_road, _paving, _roofs):
        paint(band, own.reshape(3, -1))
    return own


def _grain(band: Band, rough: float) -> np.ndarray:
    """Return how light each pixel's spot is, around 1."""
    grains = np.zeros((2, len(PAINTS)), np.float32)
    for name, (amount, scale) in GRAIN.items():
        grains[:, PAINTS.index(name)] = amount * rough, scale
    paint = band.canvas.faces["paint"]
    level = (band.canvas.normals[:, 1] > 0.7).astype(np.float32).take(band.number)
    amounts, scales = (values[paint].take(band.number) for values in grains)
    across = (band.x + band.z * (1 - level)) * scales
    other = (band.y + (band.z - band.y) * level) * scales
    amounts /= 1 + 5 * band.pixel
    return np.maximum(1 + amounts * sample(grain(), across, other), 0.1)


def _road(band: Band, own: np.ndarray) -> None:
    """Wear out, mend and mark the road."""
    places = band.where("asphalt")
    x, z = band.at("x", places), band.at("z", places)
    worn = sample(cloth(), x * 20, z * 9)
    mended = sample(cloth(), z * 4 + 57, x * 5 + 99) > 0.62
    tone = (0.72 + 0.56 * worn) * np.where(mended, np.float32(0.7), np.float32(1))
    aside, away = x - 0.8, from_middle(z / 23) * 23
    manhole = cover(0.35, np.sqrt(aside * aside + away * away), band.at("pixel", places))
    tone *= 1 - 0.5 * manhole
    mark = _markings(band, places) * (0.95 - 0.5 * worn)
    for channel in own:
        value = channel.take(places) * tone
        channel[places] = value + mark * (0.7 - value)


def _markings(band: Band, places: np.ndarray) -> np.ndarray:
    """Return where there is white on the road: lines, and the stripes of the crosswalk."""
    street = band.street
    x, z, pixel = band.at("x", places), band.at("z", places), band.at("pixel", places)
    ahead = band.pixel_ahead(places)
    edge = street.half_road - max(street.parking, 0.25)
    dashes = cover(0.07, np.abs(x), pixel) * cover(1.5, from_middle(z / 6) * 6, ahead)
    lines = np.maximum(dashes, cover(0.06, np.abs(np.abs(x) - edge), pixel)) * street.marked
    zebra = cover(1.6, np.abs(z - (street.zebra + 1.6)), ahead)
    stop = cover(0.2, np.abs(z - (street.zebra - 1.2)), ahead) * (x > 0)
    open_road = (z < street.crossing - 1) | (z > street.crossing + CROSSING)
    lines = np.maximum(lines, stop) * open_road * (1 - zebra)
    stripes = cover(0.25, from_middle(x), pixel) * zebra
    return np.maximum(lines, stripes) * (np.abs(x) < street.half_road)


def _paving(band: Band, own: np.ndarray) -> None:
    """Lay slabs on the sidewalk."""
    places = band.where("paving")
    pixel, ahead = band.at("pixel", places), band.pixel_ahead(places)
    across, along = band.at("x", places) / 0.7, band.at("z", places) / 0.7
    joint = np.maximum(
        cover(0.03, 0.35 - 0.7 * from_middle(across), pixel) / (1 + 20 * pixel),
        cover(0.03, 0.35 - 0.7 * from_middle(along), ahead) / (1 + 20 * ahead),
    )
    slab = luck(np.floor(across) * 31 + np.floor(along) * 57) - 0.5
    tone = (1 - 0.4 * joint) * (1 + 0.25 * slab / (1 + ahead))
    for channel in own:
        channel[places] *= tone


def _roofs(band: Band, own: np.ndarray) -> None:
    """Lay rows of tiles on the roofs."""
    places = band.where("roof")
    pixel = band.at("pixel", places)
    row = 0.2 - 0.4 * from_middle(band.at("y", places) / 0.4)
    tone = 1 - 0.35 * cover(0.07, row, pixel) / (1 + 8 * pixel)
    for channel in own:
        channel[places] *= tone
