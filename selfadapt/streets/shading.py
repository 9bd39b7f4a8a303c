"""Shading: the light that reaches the camera from each pixel's surface in a look.

Everything is computed in linear light, without transcendental functions per pixel so that images
are the same on every machine, and in bands of rows that fit into the processor's cache.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from selfadapt.streets.effects import add_bloom, add_rain, add_reflections
from selfadapt.streets.facades import draw_facades
from selfadapt.streets.looks import Look, linear
from selfadapt.streets.noise import TILE, cloud_tile, sample
from selfadapt.streets.objects import PAINTS
from selfadapt.streets.painter import Canvas
from selfadapt.streets.scene import Street
from selfadapt.streets.surfaces import Band, surface_colors

BAND_ROWS = 64
"""Rows of a band."""
GROUND = ("asphalt", "paving", "kerb", "grass")
LAMP_COLOR = linear((255, 222, 174))
LIGHT_SOURCES = {"lamp": 5.0, "head light": 3.0, "tail light": 1.6}
"""Brightness of visible light sources, by paint."""


@dataclass
class Lighting:
    """Lighting and weather of one image, sampled from the ranges of its look."""

    sun: float
    rays: tuple[float, float, float]
    """Unit vector towards the sun."""
    ambient: float
    clouds: float
    cloud_shift: tuple[int, int]
    haze: float

    @classmethod
    def sampled(cls, look: Look, rng: np.random.Generator) -> Self:
        """Sample the lighting of a look."""
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
    """Compute the light of a drawn street in a look, ``(3, H, W)``."""
    lighting = Lighting.sampled(look, rng)
    colors = _colors(canvas, look)
    height, width = canvas.face_index.shape
    light = np.empty((3, height, width), np.float32)
    for start in range(0, height, BAND_ROWS):
        rows = slice(start, min(start + BAND_ROWS, height))
        light[:, rows] = _shade_band(Band(street, canvas, rows), look, lighting, colors)
    if look.wet:
        add_reflections(light, street, canvas, look.wet)
    if look.lamps:
        add_bloom(light, look.lamps)
    if look.rain:
        add_rain(light, look.rain, rng)
    return light


def _colors(canvas: Canvas, look: Look) -> np.ndarray:
    """Return the colours of the faces ``(F, 3)``; tints are spread over the colours of a paint."""
    faces = canvas.faces
    colors = np.empty((len(faces), 3))
    for index, name in enumerate(PAINTS):
        indices = np.flatnonzero(faces["paint"] == index)
        choice = linear(look.palette["wall" if name == "gable" else name])
        position = faces["tint"][indices] * len(choice)
        pick = np.minimum(position.astype(int), len(choice) - 1)
        colors[indices] = choice[pick] * (0.85 + 0.3 * (position - pick))[:, None]
    return colors * faces["shade"][:, None]


def _shade_band(band: Band, look: Look, lighting: Lighting, colors: np.ndarray) -> np.ndarray:
    """Compute the light of a band: surfaces under sky, sun and lamps, and haze."""
    light = surface_colors(band, look, colors)
    glow = np.zeros_like(light)
    draw_facades(band, look, light.reshape(3, -1), glow.reshape(3, -1))
    by_sky, by_sun = _face_light(band.canvas, lighting)
    sky = by_sky.take(band.face_index) * _ambient_occlusion(band)
    sun = by_sun.take(band.face_index) * _sun_visibility(band, lighting) if lighting.sun else 0
    lamps = _lamp_light(band, look) if look.lamps else 0
    colors_of_light = linear(look.ambient_color), linear(look.sun_color), LAMP_COLOR
    for index, channel in enumerate(light):
        a, b, c = (color[index] for color in colors_of_light)
        channel *= sky * a + sun * b + lamps * c
    if look.lamps:
        light += glow
        _add_light_sources(light, band, look)
    _apply_haze(light, band, look, lighting)
    _draw_sky(light, band, look, lighting)
    return light


def _face_light(canvas: Canvas, lighting: Lighting) -> tuple[np.ndarray, np.ndarray]:
    """Return the light of sky and sun on each face."""
    x, y, z = canvas.normals.T
    by_sky = lighting.ambient * (0.82 + 0.18 * y)
    a, b, c = lighting.rays
    slope = np.maximum(x * a + y * b + z * c, 0)
    slope[canvas.faces["paint"] == PAINTS.index("leaf")] = 0.55
    return by_sky.astype(np.float32), (lighting.sun * slope).astype(np.float32)


def _ambient_occlusion(band: Band) -> np.ndarray:
    """Return the factor on the ambient light, lower in contact shadows on the ground."""
    ground = np.isin(np.arange(len(PAINTS)), [PAINTS.index(name) for name in GROUND])
    return 1 - 0.65 * band.contact * ground.take(band.paint)


def _sun_visibility(band: Band, lighting: Lighting) -> np.ndarray:
    """Return the visibility of the sun past the houses on its side, 0 to 1."""
    side = 1 if lighting.rays[0] > 0 else -1
    a, b, c = np.array(lighting.rays, np.float32)
    distance_to_wall = (side * band.street.facade_line - band.x) / a
    position = (band.z + distance_to_wall * c + 300).astype(np.int32)
    skyline = band.street.skyline(side)
    over = (band.y + distance_to_wall * b - skyline.take(position, mode="clip")) * 1.5
    shine = np.clip(over + 0.5, 0, 1)
    shine *= 1 - 0.8 * band.contact
    return np.maximum(shine, distance_to_wall < 0.3)


def _lamp_light(band: Band, look: Look) -> np.ndarray:
    """Return the light of the street lamps and of the headlights of the camera car."""
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


def _add_light_sources(light: np.ndarray, band: Band, look: Look) -> None:
    """Add the light of visible lamps and car lights."""
    for name, power in LIGHT_SOURCES.items():
        indices = band.indices_of(name)
        for channel, value in zip(light, linear(look.palette[name][0]), strict=True):
            channel.reshape(-1)[indices] += value * power * look.lamps


def _apply_haze(light: np.ndarray, band: Band, look: Look, lighting: Lighting) -> None:
    """Blend distant surfaces with haze; an eighth power approximates the exponential."""
    through = 1 / (1 + band.depth * (lighting.haze / 8))
    for _ in range(3):
        through *= through
    for channel, veil in zip(light, linear(look.haze_color), strict=True):
        channel -= veil
        channel *= through
        channel += veil


def _draw_sky(light: np.ndarray, band: Band, look: Look, lighting: Lighting) -> None:
    """Draw the sky: a gradient from the horizon to the zenith, with clouds."""
    indices = np.flatnonzero(band.face_index == 0)
    rows, columns = np.divmod(indices, len(band.right))
    up = np.maximum(band.up[rows, 0], 0)
    share = np.minimum(up * 2.2, 1)
    share *= 2 - share
    scale = 1 / (up + 0.2)
    across, along = lighting.cloud_shift
    noise = sample(cloud_tile(), band.right[columns] * scale * 60 + across, scale * 80 + along)
    thick = np.clip((noise - (0.8 - 0.6 * lighting.clouds)) * 4, 0, 1)
    thick *= np.minimum(0.3 + 3 * up, 0.92)
    tone = 0.72 + 0.4 * noise
    colors = linear(look.skyline), linear(look.zenith), linear(look.cloud_color)
    for channel, low, high, cloud in zip(light, *colors, strict=True):
        value = low + share * (high - low)
        value += thick * (cloud * tone - value)
        channel.reshape(-1)[indices] = value
