"""Facades: windows with frames and shutters, doors, shop fronts, lines between the floors."""

import numpy as np

from selfadapt.streets.houses import FACADE
from selfadapt.streets.looks import Look, linear
from selfadapt.streets.noise import hash_uniform
from selfadapt.streets.surfaces import Band, cover, from_middle

WINDOW_LIGHT = linear((255, 214, 150))


class Walls:
    """The pixels of a band that show walls, with their position on the wall in metres."""

    def __init__(self, band: Band) -> None:
        self.indices = band.indices_of("wall")
        self.kind = band.canvas.faces["facade"].take(band.gather("face_index", self.indices))
        self.facades = np.array(band.street.facades, FACADE)
        self.y, self.pixel = band.gather("y", self.indices), band.gather("pixel", self.indices)
        x, z, depth = (band.gather(name, self.indices) for name in ("x", "z", "depth"))
        along = self.get("along")
        self.distance = np.abs(x + (z - x) * along - self.get("start"))
        slant = depth / np.maximum(self.get("plane"), 1)
        self.pixel_along = self.pixel * (1 + (slant - 1) * along)
        self.cell = self.distance / self.get("pitch")
        self.level = (self.y - self.get("base")) / self.get("floor")
        self.off_y = from_middle(self.level) * self.get("floor")
        self.off_x = from_middle(self.cell) * self.get("pitch")
        self.upstairs = (self.level > 0) & (self.level < self.get("floors"))

    def get(self, name: str) -> np.ndarray:
        """Return a parameter of the facade of each pixel, a column of ``FACADE``."""
        return self.facades[name].take(self.kind)

    def columns(self, scale: float, grow: float) -> np.ndarray:
        """Return the coverage by the columns of windows, widened."""
        half = self.get("wide") * self.get("pitch") * (scale / 2)
        return cover(half + grow, self.off_x, self.pixel_along)

    def rows(self, grow: float) -> np.ndarray:
        """Return the coverage by the rows of windows, made taller."""
        half = self.get("tall") * self.get("floor") * 0.5
        return cover(half + grow, self.off_y, self.pixel) * self.upstairs

    def chance(self) -> np.ndarray:
        """Return a random number for each window."""
        return hash_uniform(np.floor(self.cell) * 73 + np.floor(self.level) * 151 + self.kind * 37)

    def shop_window(self) -> np.ndarray:
        """Return the coverage by shop windows."""
        glass = (self.get("shop") > 0) & (self.y > 0.5) & (self.y < self.get("base") - 1)
        return glass * cover(1.35, from_middle(self.distance / 3) * 3, self.pixel_along)

    def shop_sign(self) -> np.ndarray:
        """Return a mask of the boards above shops."""
        above = self.y - self.get("base")
        return (self.get("shop") > 0) & (above > -0.9) & (above < -0.3)

    def door(self) -> np.ndarray:
        """Return the coverage by doors of houses without a shop."""
        beside = cover(0.55, np.abs(self.distance - self.get("door")), self.pixel_along)
        return beside * ((self.y < 2.3) & (self.get("shop") == 0))

    def tone(self) -> np.ndarray:
        """Return the brightness of the wall: darker between floors and near the ground."""
        line = cover(0.1, self.get("floor") / 2 - self.off_y, self.pixel) * (self.level > -0.1)
        foot = np.clip(1 - self.y, 0, 1)
        fade = 1 + 8 * self.pixel
        return (1 - 0.22 * line / fade) * (1 - 0.25 * foot)


def draw_facades(band: Band, look: Look, colors: np.ndarray, glow: np.ndarray) -> None:
    """Draw all walls of a band; at night some windows are lit."""
    walls = Walls(band)
    indices, columns, rows, chance = (
        walls.indices,
        walls.columns(1, 0),
        walls.rows(0),
        walls.chance(),
    )
    bar = cover(0.035, walls.off_x, walls.pixel_along) / (1 + 12 * walls.pixel_along)
    frame = 0.8 * (walls.columns(1, 0.13) * walls.rows(0.13) - columns * rows)
    shutter = walls.columns(1.9, 0) * (1 - columns) * rows * (walls.get("tint") < look.shutters)
    show, door = walls.shop_window(), walls.door()
    window = np.maximum(columns * rows * (1 - 0.8 * bar), show) * (1 - door)
    tone = walls.tone() * (1 - 0.75 * door)
    shine = 0.4 + 1.9 * chance * chance
    sign = walls.shop_sign()
    boards = linear(look.palette["awning"])
    board = boards[(walls.get("tint") * len(boards)).astype(np.int32)].astype(np.float32)
    paints = [linear(look.palette[name][0]) for name in ("trim", "shutter", "glass")]
    for index, channel in enumerate(colors):
        trim, shut, glass = (paint[index] for paint in paints)
        value = channel.take(indices) * tone
        value += frame * (trim - value)
        value += shutter * (shut - value)
        value += sign * (board[:, index] - value)
        value += window * (glass * shine - value)
        channel[indices] = value
    if look.lamps:
        lit = (chance > 1 - (0.5 * look.lamps)) * (0.1 + 0.3 * chance)
        light = window * (lit + 0.25 * show) * look.lamps
        for channel, color in zip(glow, WINDOW_LIGHT, strict=True):
            channel[indices] = light * color
