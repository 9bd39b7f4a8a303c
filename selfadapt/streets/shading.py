"""Light and air: from the painted numbers to the light that reaches the camera in one look.

All is computed in linear light, with exact operations only (no sines or powers per pixel), so that
every machine gives the same image; and in bands of rows, which fit into the processor's cache.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from selfadapt.streets.effects import bloom, drops, mirror
from selfadapt.streets.facades import paint_facades
from selfadapt.streets.looks import Look, linear
from selfadapt.streets.noise import TILE, cloth, sample
from selfadapt.streets.painter import Canvas
from selfadapt.streets.scene import Street
from selfadapt.streets.surfaces import Band, ground_and_grain
from selfadapt.streets.things import PAINTS

ROWS = 64
"""Rows to a band."""
GROUND = ("asphalt", "paving", "kerb", "grass")
LAMP_COLOR = linear((255, 222, 174))
BRIGHT = {"lamp": 5.0, "head light": 3.0, "tail light": 1.6}
"""How strongly the lights themselves shine."""


@dataclass
class Moment:
    """The light of one image, drawn from the ranges of its look."""

    sun: float
    rays: tuple[float, float, float]
    """Towards the sun, of length 1."""
    ambient: float
    clouds: float
    cloud_shift: tuple[int, int]
    haze: float

    @classmethod
    def drawn(cls, look: Look, rng: np.random.Generator) -> Self:
        """Draw a moment."""
        side = 1 if rng.random() < 0.5 else -1
        rays = np.array(
            [side * rng.uniform(0.4, 1), rng.uniform(*look.sun_height), rng.uniform(-1, 0.7)]
        )
        rays /= np.sqrt((rays * rays).sum())
        return cls(
            sun=rng.uniform(*look.sun),
            rays=(float(rays[0]), float(rays[1]), float(rays[2])),
            ambient=rng.uniform(*look.ambient),
            clouds=rng.uniform(*look.clouds),
            cloud_shift=(int(rng.integers(TILE)), int(rng.integers(TILE))),
            haze=rng.uniform(*look.haze),
        )


def shade(street: Street, canvas: Canvas, look: Look, rng: np.random.Generator) -> np.ndarray:
    """Return the light of a painted street in a look, ``(3, H, W)``."""
    moment = Moment.drawn(look, rng)
    colors = _colors(canvas, look)
    height, width = canvas.number.shape
    light = np.empty((3, height, width), np.float32)
    for start in range(0, height, ROWS):
        rows = slice(start, min(start + ROWS, height))
        light[:, rows] = _lit(Band(street, canvas, rows), look, moment, colors)
    if look.wet:
        mirror(light, street, canvas, look.wet)
    if look.lamps:
        bloom(light, look.lamps)
    if look.rain:
        drops(light, look.rain, rng)
    return light


def _colors(canvas: Canvas, look: Look) -> np.ndarray:
    """Return the faces' colours ``(F, 3)``: each paint's tints are spread over its colours."""
    faces = canvas.faces
    colors = np.empty((len(faces), 3))
    for index, name in enumerate(PAINTS):
        mine = np.flatnonzero(faces["paint"] == index)
        choice = linear(look.palette["wall" if name == "gable" else name])
        place = faces["tint"][mine] * len(choice)
        pick = np.minimum(place.astype(int), len(choice) - 1)
        colors[mine] = choice[pick] * (0.85 + 0.3 * (place - pick))[:, None]
    return colors * faces["shade"][:, None]


def _lit(band: Band, look: Look, moment: Moment, colors: np.ndarray) -> np.ndarray:
    """Return the light of a band: surfaces under sky, sun and lamps, seen through the air."""
    light = ground_and_grain(band, look, colors)
    glow = np.zeros_like(light)
    paint_facades(band, look, light.reshape(3, -1), glow.reshape(3, -1))
    by_sky, by_sun = _light_on_faces(band.canvas, moment)
    sky = by_sky.take(band.number) * _near_contact(band)
    sun = by_sun.take(band.number) * _sunny(band, moment) if moment.sun else 0
    lamps = _lamps(band, look) if look.lamps else 0
    colors_of_light = linear(look.ambient_color), linear(look.sun_color), LAMP_COLOR
    for index, channel in enumerate(light):
        a, b, c = (color[index] for color in colors_of_light)
        channel *= sky * a + sun * b + lamps * c
    if look.lamps:
        light += glow
        _switch_on(light, band, look)
    _air(light, band, look, moment)
    _sky(light, band, look, moment)
    return light


def _light_on_faces(canvas: Canvas, moment: Moment) -> tuple[np.ndarray, np.ndarray]:
    """Return how strongly sky and sun light each face."""
    x, y, z = canvas.normals.T
    by_sky = moment.ambient * (0.82 + 0.18 * y)
    a, b, c = moment.rays
    slope = np.maximum(x * a + y * b + z * c, 0)
    slope[canvas.faces["paint"] == PAINTS.index("leaf")] = 0.55
    return by_sky.astype(np.float32), (moment.sun * slope).astype(np.float32)


def _near_contact(band: Band) -> np.ndarray:
    """Return how much of the sky's light reaches the ground beside what stands on it."""
    ground = np.isin(np.arange(len(PAINTS)), [PAINTS.index(name) for name in GROUND])
    return 1 - 0.65 * band.contact * ground.take(band.paint)


def _sunny(band: Band, moment: Moment) -> np.ndarray:
    """Say where the sun shines past the row of houses on its side, 0 to 1."""
    side = 1 if moment.rays[0] > 0 else -1
    a, b, c = np.array(moment.rays, np.float32)
    way = (side * band.street.facade_line - band.x) / a
    place = (band.z + way * c + 300).astype(np.int32)
    skyline = band.street.skyline(side)
    over = (band.y + way * b - skyline.take(place, mode="clip")) * 1.5
    shine = np.clip(over + 0.5, 0, 1)
    shine *= 1 - 0.8 * band.contact
    return np.maximum(shine, way < 0.3)


def _lamps(band: Band, look: Look) -> np.ndarray:
    """Return the light of the street lamps and of the camera car's headlights."""
    street = band.street
    total = np.zeros_like(band.depth)
    every = street.lamp_every
    for side in (-1, 1):
        phase = (band.z - street.first_lamp(side)) / every
        ahead = (phase - np.floor(phase + 0.5)) * every
        across = band.x - side * (street.half_road - 1)
        down = band.y - street.lamp_height
        total += 12 / (12 + ahead * ahead + across * across + down * down)
    beam = np.clip(1.5 - 2.2 * np.abs(band.right), 0, 1) * np.clip(1.4 - 0.8 * band.y, 0.1, 1)
    total += 1.2 * beam * 80 / (80 + band.depth * band.depth)
    return total * (0.9 * look.lamps)


def _switch_on(light: np.ndarray, band: Band, look: Look) -> None:
    """Let lamps and the lights of cars shine."""
    for name, power in BRIGHT.items():
        places = band.where(name)
        for channel, value in zip(light, linear(look.palette[name][0]), strict=True):
            channel.reshape(-1)[places] += value * power * look.lamps


def _air(light: np.ndarray, band: Band, look: Look, moment: Moment) -> None:
    """Veil what is far; the eighth power of a quotient stands for the exponential."""
    through = 1 / (1 + band.depth * (moment.haze / 8))
    for _ in range(3):
        through *= through
    for channel, veil in zip(light, linear(look.haze_color), strict=True):
        channel -= veil
        channel *= through
        channel += veil


def _sky(light: np.ndarray, band: Band, look: Look, moment: Moment) -> None:
    """Spread the sky from the horizon upwards, with clouds."""
    places = np.flatnonzero(band.number == 0)
    rows, columns = np.divmod(places, len(band.right))
    up = np.maximum(band.up[rows, 0], 0)
    share = np.minimum(up * 2.2, 1)
    share *= 2 - share
    scale = 1 / (up + 0.2)
    across, along = moment.cloud_shift
    noise = sample(cloth(), band.right[columns] * scale * 60 + across, scale * 80 + along)
    thick = np.clip((noise - (0.8 - 0.6 * moment.clouds)) * 4, 0, 1)
    thick *= np.minimum(0.3 + 3 * up, 0.92)
    tone = 0.72 + 0.4 * noise
    colors = linear(look.skyline), linear(look.zenith), linear(look.cloud_color)
    for channel, low, high, cloud in zip(light, *colors, strict=True):
        value = low + share * (high - low)
        value += thick * (cloud * tone - value)
        channel.reshape(-1)[places] = value
