"""Effects on the whole picture: reflections on wet ground, rain, bloom."""

import numpy as np

from selfadapt.streets.noise import grain_tile, sample
from selfadapt.streets.objects import PAINTS
from selfadapt.streets.painter import Canvas
from selfadapt.streets.scene import Street


def add_reflections(light: np.ndarray, street: Street, canvas: Canvas, wet: float) -> None:
    """Add reflections of houses and sky on the wet ground, with ripples."""
    camera = street.camera
    height, width = canvas.face_index.shape
    sine, cosine = camera.turn
    sideways = np.abs(canvas.right * cosine + sine)
    wall = np.minimum(street.facade_line / np.maximum(sideways, 1e-3), street.end)
    foot = camera.horizon * height + camera.focal * width * camera.height / wall
    paint = canvas.faces["paint"][canvas.face_index]
    for name, amount in (("asphalt", 0.4), ("paving", 0.2)):
        indices = np.flatnonzero(paint == PAINTS.index(name))
        rows, columns = np.divmod(indices, width)
        ripple = sample(grain_tile(), columns, rows) * (height / 10)
        above = np.clip(2 * foot[columns] - rows + ripple, 0, height - 1).astype(np.int32)
        source = above * width + columns
        for channel in light.reshape(3, -1):
            mirrored = channel.take(source) * (amount * wet)
            channel[indices] = channel.take(indices) * (1 - 0.4 * wet) + mirrored


def add_rain(light: np.ndarray, strength: float, rng: np.random.Generator) -> None:
    """Add rain: short bright streaks all over the picture."""
    height, width = light.shape[1:]
    top, left = (rng.random((400, 2)) * (height, width)).astype(np.intp).T
    rows = np.minimum(top[:, None] + np.arange(max(2, height // 16)), height - 1)
    streaks = light[:, rows, left[:, None]]
    light[:, rows, left[:, None]] = streaks + strength * (0.5 - streaks)


def add_bloom(light: np.ndarray, strength: float) -> None:
    """Add a glow around bright spots, blurred in a downscaled copy of the picture."""
    height, width = light.shape[1:]
    halvings = max(1, height // 64).bit_length() - 1
    step = 2**halvings
    inner = light[:, : height // step * step, : width // step * step]
    glow = np.maximum(inner - 0.9, 0)
    for _ in range(halvings):
        glow = (glow[:, ::2] + glow[:, 1::2]) * 0.5
        glow = (glow[:, :, ::2] + glow[:, :, 1::2]) * 0.5
    for _ in range(3):
        glow = blur(glow)
    for _ in range(halvings):
        glow = blur(glow.repeat(2, axis=1).repeat(2, axis=2))
    inner += glow * (1.6 * strength)


def blur(light: np.ndarray) -> np.ndarray:
    """Blur an image with the kernel 1 2 1 in both directions; edges are replicated."""
    result = np.empty_like(light)
    for channel, mixed in zip(light, result, strict=True):
        wide = np.pad(channel, 1, mode="edge")
        for _ in range(2):
            wide = wide[1:] + wide[:-1]
            wide = wide[:, 1:] + wide[:, :-1]
        np.multiply(wide, 1 / 16, out=mixed)
    return result
