"""Camera model: from light to an image, with blur, colours, noise and tone curve of a look."""

import numpy as np

from selfadapt.streets.effects import blur
from selfadapt.streets.looks import Look


def take_picture(light: np.ndarray, look: Look, rng: np.random.Generator) -> np.ndarray:
    """Convert light ``(3, H, W)`` to an image, uint8 ``(H, W, 3)``."""
    balance = 1 + rng.uniform(-look.balance, look.balance, 3)
    gain = rng.uniform(*look.exposure) * balance * look.cast
    light = light * gain.astype(np.float32)[:, None, None]
    for _ in range(look.blur):
        light = blur(light)
    if look.saturation != 1:
        gray = (light[0] + light[1] + light[2]) * ((1 - look.saturation) / 3)
        light *= look.saturation
        light += gray
    # vignette: darker towards the corners
    down, across = (np.linspace(-1, 1, size, dtype=np.float32) for size in light.shape[1:])
    light *= 1 - look.vignette / 2 * ((down * down)[:, None] + across * across)
    # tone curve: a square root with a soft shoulder, and contrast; about 0 to 1
    np.maximum(light, 0, out=light)
    light *= (1 + light * 0.12) / (1 + light * 0.4)
    screen = np.sqrt(light, out=light)
    screen -= 0.5
    screen *= look.contrast
    screen += 0.5
    np.maximum(screen, 0, out=screen)
    screen += _noise(light.shape, look.noise, rng)
    screen *= 255
    screen += 0.5
    levels = np.clip(screen, 0, 255, out=screen).astype(np.uint8)
    return np.ascontiguousarray(levels.transpose(1, 2, 0))


def _noise(shape: tuple[int, ...], strength: float, rng: np.random.Generator) -> np.ndarray:
    """Return noise of a standard deviation: a sum of two uniform bytes, close to Gaussian."""
    samples = rng.integers(0, 256, (2, *shape), dtype=np.uint8)
    total = samples[0].astype(np.float32)
    total += samples[1]
    total -= 255
    total *= strength / 104.5
    return total
