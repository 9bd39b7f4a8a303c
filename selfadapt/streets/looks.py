"""Looks: the appearance of the streets by day, at dusk, in haze, at night, in another town.

A look defines light, air, colours and camera. Colours are sRGB-like, 0 to 255; pairs are ranges
that are sampled for each image.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

Color = tuple[float, float, float]
Range = tuple[float, float]


def linear(color: Color | tuple[Color, ...]) -> np.ndarray:
    """Convert display colours, 0 to 255, to linear light, 0 to 1."""
    value = np.asarray(color, dtype=np.float32) / 255
    return value * value


PALETTE: dict[str, tuple[Color, ...]] = {
    "sky": ((255, 255, 255),),
    "asphalt": ((104, 104, 107),),
    "paving": ((158, 153, 146),),
    "kerb": ((182, 180, 174),),
    "grass": ((104, 128, 66),),
    "wall": (
        (196, 178, 150), (172, 110, 88), (206, 200, 190), (150, 148, 146), (212, 190, 128),
        (138, 150, 128), (184, 160, 140), (120, 86, 72), (168, 178, 186), (222, 212, 198),
    ),
    "roof": ((128, 66, 50), (92, 84, 82), (148, 86, 62), (74, 74, 80)),
    "trim": ((214, 208, 198), (170, 162, 150)),
    "leaf": (
        (84, 118, 54), (66, 104, 50), (104, 130, 62), (78, 110, 70), (120, 132, 58),
        (92, 120, 48), (172, 128, 50), (168, 92, 46),
    ),
    "bark": ((92, 76, 60), (112, 98, 84)),
    "body": (
        (200, 202, 204), (40, 42, 46), (120, 124, 128), (160, 36, 34), (40, 66, 120),
        (236, 236, 232), (72, 92, 66), (150, 130, 104), (92, 96, 102), (190, 120, 40),
    ),
    "glass": ((52, 60, 68),),
    "tyre": ((30, 30, 32),),
    "bumper": ((44, 44, 46),),
    "tail light": ((176, 26, 24),),
    "head light": ((226, 228, 224),),
    "tail glass": ((150, 30, 28),),
    "head glass": ((206, 208, 206),),
    "plate": ((226, 226, 214),),
    "metal": ((112, 116, 116), (136, 140, 140), (86, 90, 88), (168, 170, 172)),
    "lamp": ((220, 220, 210),),
    "sign": ((194, 32, 36), (238, 238, 234), (36, 84, 164), (240, 196, 40), (36, 36, 38)),
    "skin": ((224, 178, 150), (196, 146, 112), (142, 98, 72), (100, 68, 50)),
    "hair": ((60, 44, 32), (34, 30, 28), (128, 96, 56), (150, 146, 140)),
    "top": (
        (176, 48, 44), (48, 62, 96), (208, 204, 196), (60, 60, 62), (74, 104, 82), (204, 158, 64),
        (128, 134, 142), (120, 70, 100), (90, 140, 176),
    ),
    "trousers": ((44, 52, 76), (40, 40, 42), (126, 114, 94), (84, 88, 94), (104, 74, 56)),
    "shoes": ((36, 34, 34), (196, 192, 186), (92, 62, 44)),
    "awning": ((168, 48, 44), (60, 96, 72), (212, 196, 160), (52, 74, 116)),
    "shutter": ((70, 96, 78),),
}  # fmt: skip

SOUTH: dict[str, tuple[Color, ...]] = PALETTE | {
    "asphalt": ((172, 156, 132),),
    "paving": ((204, 164, 126),),
    "kerb": ((226, 216, 196),),
    "grass": ((168, 150, 88),),
    "wall": (
        (228, 160, 84), (208, 112, 74), (238, 222, 186), (222, 146, 118), (150, 170, 160),
        (232, 194, 132), (182, 100, 74), (244, 234, 214), (120, 146, 170),
    ),
    "roof": ((190, 104, 66), (204, 128, 88)),
    "trim": ((246, 240, 226), (196, 150, 110)),
    "leaf": ((122, 124, 78), (138, 136, 92), (100, 112, 74), (150, 142, 92)),
    "bark": ((150, 126, 100),),
    "shutter": ((62, 104, 112),),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Look:
    """Appearance of a street in an image."""

    about: str
    """Short description."""
    palette: Mapping[str, tuple[Color, ...]] = field(default_factory=lambda: PALETTE)
    """Colours by paint."""
    shutters: float = 0.15
    """Share of the houses with shutters."""
    rough: float = 1.0
    """Factor on the grain of surfaces."""
    sun: Range = (1.0, 1.5)
    """Strength of the sun."""
    sun_color: Color = (255, 244, 224)
    sun_height: Range = (0.6, 1.6)
    """Slope of the sun's rays: 1 is 45 degrees."""
    ambient: Range = (0.46, 0.66)
    """Strength of the ambient light of the sky."""
    ambient_color: Color = (216, 232, 255)
    zenith: Color = (94, 146, 214)
    """Colour of the sky at the zenith."""
    skyline: Color = (196, 216, 236)
    """Colour of the sky at the horizon."""
    clouds: Range = (0.1, 0.7)
    """Cloud cover, 0 to 1."""
    cloud_color: Color = (240, 242, 246)
    haze: Range = (0.0005, 0.002)
    """Extinction of light by the air, per metre."""
    haze_color: Color = (206, 218, 232)
    wet: float = 0.0
    """Strength of reflections on the road, 0 to 1."""
    rain: float = 0.0
    """Strength of rain streaks, 0 to 1."""
    lamps: float = 0.0
    """Strength of street lamps, headlights and lit windows."""
    exposure: Range = (0.95, 1.35)
    balance: float = 0.05
    """Maximum deviation of the white balance."""
    cast: Color = (1.0, 1.0, 1.0)
    """Factors on red, green and blue."""
    saturation: float = 1.0
    """0 is black and white."""
    contrast: float = 1.12
    """Slope of the tone curve."""
    blur: int = 1
    """Number of blur passes."""
    noise: float = 0.012
    """Standard deviation of the sensor noise."""
    vignette: float = 0.1
    """Darkening of the corners."""


DAY = Look(about="a clear or partly clouded day")

LOOKS: dict[str, Look] = {
    "day": DAY,
    "dusk": replace(
        DAY,
        about="after sunset, the sky still bright",
        sun=(0.1, 0.3), sun_color=(255, 170, 110), sun_height=(0.15, 0.4),
        ambient=(0.38, 0.52), ambient_color=(206, 200, 232),
        zenith=(70, 84, 136), skyline=(240, 176, 138), cloud_color=(190, 150, 160),
        haze=(0.001, 0.003), haze_color=(196, 160, 156),
        lamps=0.35, noise=0.025, exposure=(0.95, 1.25),
    ),
    "haze": replace(
        DAY,
        about="a hazy morning",
        sun=(0.1, 0.4), ambient=(0.5, 0.7), ambient_color=(236, 236, 232),
        zenith=(186, 194, 202), skyline=(208, 208, 204), clouds=(0.0, 0.2),
        haze=(0.012, 0.026), haze_color=(208, 208, 204), saturation=0.85,
    ),
    "night": replace(
        DAY,
        about="a lit street at night",
        sun=(0.0, 0.0), ambient=(0.08, 0.13), ambient_color=(166, 186, 232),
        zenith=(28, 34, 58), skyline=(76, 70, 86), clouds=(0.1, 0.5), cloud_color=(66, 62, 78),
        haze=(0.001, 0.003), haze_color=(56, 54, 66),
        lamps=1.0, noise=0.03, exposure=(1.2, 1.6), vignette=0.2,
    ),
    "rain": replace(
        DAY,
        about="under rain clouds, the road wet",
        sun=(0.0, 0.0), ambient=(0.45, 0.65), ambient_color=(222, 232, 242),
        zenith=(142, 150, 158), skyline=(190, 194, 198), clouds=(0.8, 1.0),
        cloud_color=(146, 152, 160), haze=(0.008, 0.015), haze_color=(182, 188, 194),
        wet=1.0, rain=0.35, lamps=0.2, saturation=0.6, noise=0.018, blur=2, exposure=(0.9, 1.2),
    ),
    "south": replace(
        DAY,
        about="another town: other houses, road and plants, in warm light",
        palette=SOUTH, shutters=0.85, rough=1.8,
        sun=(1.4, 1.9), sun_color=(255, 230, 190), ambient=(0.36, 0.46),
        zenith=(64, 124, 206), skyline=(226, 218, 198), haze=(0.003, 0.006),
        haze_color=(230, 214, 186),
    ),
    "old camera": replace(
        DAY,
        about="by day, through an old camera: noise, blur, a colour cast",
        cast=(1.12, 1.0, 0.72), saturation=0.75, contrast=1.3, blur=4, noise=0.06, vignette=0.45,
        exposure=(0.7, 1.1),
    ),
}  # fmt: skip
