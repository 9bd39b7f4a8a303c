"""What a run will take on a CPU, said before it begins, and what would be faster."""

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from selfadapt.cost import PIECE, duration
from selfadapt.methods import Segments
from selfadapt.views import Size

LONG = 10.0
"""Seconds an image from which on it is said what would be faster."""
FEW_STEPS = 3
LEAST_PIXELS = 100_000
"""An image is not to be made smaller than this: little would be seen on it."""
WORTH_IT = 0.75
"""The most of the time that what is called faster may take."""


def image_seconds(method: Segments, size: Size) -> float | None:
    """Return what an image will take, about; None where that is not known.

    On a GPU the first images are slow and all others fast, and some networks take no small image.
    """
    members: tuple[Any, ...] = getattr(method, "members", (method,))
    parameter = next(members[0].model.parameters(), torch.empty(0))
    if parameter.device.type != "cpu":
        return None
    try:
        estimate = method.estimate(*size)  # type: ignore[attr-defined]
    except Exception:  # of the network, which is said where an image is segmented
        return None
    budget_ms = getattr(method, "budget_ms", None)
    if budget_ms is None:
        return float(estimate.seconds)
    return float(min(estimate.seconds, budget_ms / 1000 + estimate.plain_seconds))


def is_short(sizes: Mapping[Size, float]) -> bool:
    """Return True for so few pixels that measuring would take as long as the run."""
    return sum(height * width * number for (height, width), number in sizes.items()) < PIECE**2


def total_seconds(method: Segments, sizes: Mapping[Size, float]) -> float | None:
    """Return what so many images of some sizes will take, about; None where that is not known."""
    if is_short(sizes):
        return None
    times = [(image_seconds(method, size), number) for size, number in sizes.items()]
    return None if None in dict(times) else sum((each or 0.0) * number for each, number in times)


def forecast(name: str, method: Segments, sizes: Mapping[Size, float]) -> list[str]:
    """Return lines on what a run will take, and on what would be faster where an image takes long.

    Args:
        name: The method's name.
        method: The method.
        sizes: How many images there are of each size.
    """
    total = total_seconds(method, sizes)
    if total is None:
        return []
    height, width = Counter(sizes).most_common(1)[0][0]
    seconds = image_seconds(method, (height, width)) or 0.0
    num_images = round(sum(sizes.values()))
    text = (
        f"{name}: an image of {width}x{height} pixels takes about {duration(seconds)} on this CPU"
    )
    if num_images > 1:
        text += f", all {num_images} take about {duration(total)}"
    ways = faster(method, (height, width)) if seconds > LONG else {}
    quick = {way: time for way, time in ways.items() if time < WORTH_IT * seconds}
    if not quick:
        return [text]
    listed = ", ".join(f"{way} ({duration(time)} an image)" for way, time in quick.items())
    return [text, f"faster: {listed}"]


def faster(method: Segments, size: Size) -> dict[str, float]:
    """Return flags that make a method faster, and what an image of a size takes with them."""
    if getattr(method, "budget_ms", None) is not None or not hasattr(method, "max_pixels"):
        return {}  # it is in time, or an ensemble
    height, width = size
    estimate = method.estimate(height, width)  # type: ignore[attr-defined]
    ways = {"--method san": estimate.plain_seconds}
    if getattr(method, "steps", 0) > FEW_STEPS:
        short: Any = copy.copy(method)
        short.steps = FEW_STEPS
        ways[f"--steps {FEW_STEPS}"] = short.estimate(height, width).seconds
    fewer = min(height * width, method.max_pixels) // 4
    if getattr(method, "mode", "") == "paper" and fewer >= LEAST_PIXELS:
        shrunk = (fewer / (height * width)) ** 0.5
        smaller = round(height * shrunk), round(width * shrunk)
        time = method.estimate(*smaller).seconds  # type: ignore[attr-defined]
        ways[f"--max-pixels {float(f'{fewer:.2g}'):.0f}"] = time
    return ways
