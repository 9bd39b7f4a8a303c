"""Forecast of the time of a run on a CPU, with settings that would be faster."""

import copy
from collections import Counter
from collections.abc import Mapping
from math import inf
from typing import Any

import torch

from selfadapt.budget import PRESETS
from selfadapt.cost import SAMPLE_SIZE
from selfadapt.methods import Segments
from selfadapt.progress import duration
from selfadapt.views import Size, paper_views

SLOW_IMAGE_S = 10.0
"""Seconds per image from which on faster settings are suggested."""
FEW_STEPS = 3
MIN_PIXELS = 100_000
"""Minimum number of pixels for suggestions: smaller images lose too much detail."""
TILES_AREA = 1.7
"""Pixels of all tiles of a scene relative to its own: tiles overlap."""
MAX_TIME_RATIO = 0.75
"""Maximum time of a suggestion relative to the current settings."""


def image_seconds(method: Segments, size: Size, tiles_from: float = inf) -> float | None:
    """Return the estimated seconds for an image; None if unknown.

    On a GPU only the first images are slow, and some networks do not take the small sample.

    Args:
        method: The method.
        size: Height and width.
        tiles_from: Images of more pixels are segmented in tiles.
    """
    members: tuple[Any, ...] = getattr(method, "members", (method,))
    parameter = next(members[0].model.parameters(), torch.empty(0))
    if parameter.device.type != "cpu":
        return None
    try:
        estimate = method.estimate(*size)  # type: ignore[attr-defined]
    except Exception:  # of the network; it is reported when an image is segmented
        return None
    pixels = size[0] * size[1]
    if pixels > tiles_from:
        max_pixels, passes = method.max_pixels, method.prediction_passes()  # type: ignore[attr-defined]
        tiles = TILES_AREA * pixels / max_pixels
        return float(estimate.seconds + tiles * passes * estimate.plain_seconds)
    budget_ms = getattr(method, "budget_ms", None)
    if budget_ms is None:
        return float(estimate.seconds)
    return float(min(estimate.seconds, budget_ms / 1000 + estimate.plain_seconds))


def is_short(sizes: Mapping[Size, float]) -> bool:
    """Return True if measuring would take as long as a run on these images."""
    return (
        sum(height * width * number for (height, width), number in sizes.items()) < SAMPLE_SIZE**2
    )


def total_seconds(
    method: Segments, sizes: Mapping[Size, float], tiles_from: float = inf
) -> float | None:
    """Return the estimated seconds for images, given their number by size; None if unknown."""
    if is_short(sizes):
        return None
    total = 0.0
    for size, number in sizes.items():
        seconds = image_seconds(method, size, tiles_from)
        if seconds is None:
            return None
        total += seconds * number
    return total


def forecast(
    name: str, method: Segments, sizes: Mapping[Size, float], tiles_from: float = inf
) -> list[str]:
    """Return a line on the time of a run, and one on faster settings if an image takes long.

    Args:
        name: The method's name.
        method: The method.
        sizes: Number of images of each size.
        tiles_from: Images of more pixels are segmented in tiles.
    """
    total = total_seconds(method, sizes, tiles_from)
    if total is None:
        return []
    height, width = Counter(sizes).most_common(1)[0][0]
    seconds = image_seconds(method, (height, width), tiles_from) or 0.0
    num_images = round(sum(sizes.values()))
    text = (
        f"{name}: an image of {width}x{height} pixels takes about {duration(seconds)} on this CPU"
    )
    if num_images > 1:
        text += f", all {num_images} take about {duration(total)}"
    ways = {}
    if seconds > SLOW_IMAGE_S:
        ways = faster(method, (height, width))
        if height * width > tiles_from:
            ways = {"--large shrink": image_seconds(method, (height, width)) or 0.0}
    quick = {way: time for way, time in ways.items() if time < MAX_TIME_RATIO * seconds}
    if not quick:
        return [text]
    listed = ", ".join(f"{way} ({duration(time)} an image)" for way, time in quick.items())
    return [text, f"faster: {listed}"]


def faster(method: Segments, size: Size) -> dict[str, float]:
    """Return flags that make a method faster, with the seconds for an image of this size."""
    if getattr(method, "budget_ms", None) is not None or not hasattr(method, "max_pixels"):
        return {}  # it keeps a time budget, or it is an ensemble
    height, width = size
    estimate = method.estimate(height, width)  # type: ignore[attr-defined]
    ways = {"--method san": estimate.plain_seconds}
    short: Any
    if getattr(method, "steps", 0) > FEW_STEPS:
        short = copy.copy(method)
        short.steps = FEW_STEPS
        ways[f"--steps {FEW_STEPS}"] = short.estimate(height, width).seconds
    if getattr(method, "mode", "") == "auto" and getattr(method, "preset", "") is None:
        short, settings = copy.copy(method), PRESETS["cpu"]
        short.steps, short.step_scale = settings["steps"], settings["step_scale"]
        short.views = paper_views(settings["scales"])
        short._final_views = paper_views(settings["final_scales"])
        ways["--preset cpu"] = short.estimate(height, width).seconds
    fewer = min(height * width, method.max_pixels) // 4
    if getattr(method, "mode", "") == "paper" and fewer >= MIN_PIXELS:
        shrunk = (fewer / (height * width)) ** 0.5
        smaller = round(height * shrunk), round(width * shrunk)
        time = method.estimate(*smaller).seconds  # type: ignore[attr-defined]
        ways[f"--max-pixels {float(f'{fewer:.2g}'):.0f}"] = time
    return ways
