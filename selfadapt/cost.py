"""What an image will take on a CPU, from a small piece of noise: time, and memory."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from selfadapt.engine import Network
from selfadapt.views import size_of

LARGE = 2**20
"""From so many pixels on it is checked whether there is enough memory."""
PIECE = 256
"""Sides of the piece in pixels: a ResNet-50 takes a second or two for it. On a smaller one the deep
layers of many networks take twice as long for a pixel as on a photograph."""
ENOUGH, MOST_RUNS = 0.3, 4
"""Seconds and runs, after either of which no more than two runs are timed. The fastest counts: the
first one also prepares, and on a busy machine some wait for their turn."""


@dataclass(frozen=True)
class Rates:
    """What one pixel costs a network on this machine."""

    forward: float
    """Seconds of a forward pass."""
    step: float
    """Seconds of a step, with what is reused."""
    scores: float
    """Bytes of the class scores."""
    saved: float
    """Bytes that a step keeps for its backward pass."""


@dataclass(frozen=True)
class Estimate:
    """What an image will take, about."""

    seconds: float
    plain_seconds: float
    """One forward pass of the network as trained."""
    step_seconds: float
    """One step of adaptation; 0 for methods that take none."""
    num_bytes: float
    """Memory beside the network."""


def measure(make: Callable[[], Network], image: Tensor) -> Rates:
    """Measure a network on a small image ``(C, H, W)``.

    Args:
        make: Makes the network, with the parameters that steps tune.
        image: Noise, of a size the network takes.
    """
    network, pixels = make(), image[0].numel()
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def seconds(run: Callable[[], object]) -> float:
        times: list[float] = []
        while len(times) < 2 or (len(times) < MOST_RUNS and sum(times) < ENOUGH):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return min(times)

    def take_step() -> None:
        network.step(image, lambda logits: logits.square().mean(), lr=1e-12)

    scores = [torch.empty(0)]
    forward, step = seconds(lambda: scores.append(network.logits(image))), 0.0
    if network.tuned:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            take_step()
        step = seconds(take_step)  # the first one has also run what is reused
    weights = sum(value.nbytes for value in network.model.parameters())
    kept = max(0, sum(saved.values()) - weights)
    return Rates(forward / pixels, step / pixels, scores[-1].nbytes / pixels, kept / pixels)


def estimate(rates: Rates, pixels: float, passes: float, steps: float) -> Estimate:
    """Return what an image of so many pixels takes, with so many forward passes and steps."""
    plain, step = pixels * rates.forward, pixels * rates.step
    kept = 4 * rates.scores + (rates.saved if steps else 0)  # scores, probabilities, their sum
    return Estimate(passes * plain + steps * step, plain, step if steps else 0.0, pixels * kept)


def check_memory(image: Tensor, estimate: Callable[[int, int], Estimate], max_pixels: int) -> None:
    """Raise ValueError where there is not enough memory for a large image on a CPU.

    Args:
        image: The image ``(C, H, W)``.
        estimate: Returns what an image of a height and width takes.
        max_pixels: What images are scaled down to.
    """
    if image.is_cuda or image[0].numel() < LARGE:
        return
    height, width = size_of(image)
    try:
        needed = estimate(height, width).num_bytes
    except Exception:  # it may take no small image
        return
    free = free_memory()
    if free is not None and needed > free:
        gigabytes, left = f"{needed / 2**30:.1f} GB", f"{free / 2**30:.1f} GB"
        raise ValueError(
            f"an image of {width}x{height} pixels takes about {gigabytes} with this network and "
            f"method, and {left} are free; lower max_pixels, which is {max_pixels}, or take a "
            "method of one pass, such as san"
        )


def free_memory() -> int | None:
    """Return how many bytes of memory are free, where the system says so."""
    try:
        with open("/proc/meminfo") as file:
            sizes = dict(line.split(":", 1) for line in file)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def duration(seconds: float) -> str:
    """Return a time as people say it.

    Example:
        >>> duration(0.25), duration(21.4), duration(480)
        ('0.2 s', '21 s', '8 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
