"""Deterministic noise: seamless tiles, the same on every machine."""

from functools import cache

import numpy as np

TILE = 512
"""Side of the tiles, a power of two."""


def hash_uniform(key: np.ndarray) -> np.ndarray:
    """Return a deterministic pseudo-random number in [0, 1) for each key."""
    return _random_table().take(key.astype(np.int32) & (TILE - 1))


@cache
def _random_table() -> np.ndarray:
    return np.random.default_rng(9).random(TILE).astype(np.float32)


@cache
def cloud_tile() -> np.ndarray:
    """Return a tile of cloudy noise in [0, 1]."""
    rng = np.random.default_rng(7)
    total = np.zeros((TILE, TILE))
    size, weight = 4, 1.0
    while size <= TILE // 2:
        squares = np.kron(rng.random((size, size)) - 0.5, np.ones((TILE // size, TILE // size)))
        total += weight * _smooth(squares, TILE // size)
        size, weight = size * 2, weight * 0.6
    total -= total.min()
    return (total / total.max()).astype(np.float32)


@cache
def grain_tile() -> np.ndarray:
    """Return a tile of fine and coarse grain around 0."""
    fine = np.random.default_rng(8).random((TILE, TILE)) - 0.5
    return (0.5 * fine + 1.2 * _smooth(fine, 2) + 0.8 * (cloud_tile() - 0.5)).astype(np.float32)


def _smooth(tile: np.ndarray, reach: int) -> np.ndarray:
    """Apply a box filter of side ``reach`` twice, with periodic edges."""
    for axis in (0, 1, 0, 1):
        total = np.zeros_like(tile)
        for shift in range(reach):
            total += np.roll(tile, shift, axis)
        tile = total / reach
    return tile


def sample(tile: np.ndarray, across: np.ndarray, along: np.ndarray) -> np.ndarray:
    """Return the values of a periodic tile at the given pixel coordinates."""
    index = along.astype(np.int32)
    index &= TILE - 1
    index *= TILE
    index += across.astype(np.int32) & (TILE - 1)
    return tile.take(index)
