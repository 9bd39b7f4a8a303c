"""Estimates of the time and memory for an image on a CPU, measured on a small sample of noise."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from selfadapt.engine import Network
from selfadapt.views import size_of

LARGE_PIXELS = 2**20
"""Minimum number of pixels for which the free memory is checked."""
SAMPLE_SIZE = 256
"""Height and width of the noise sample: a ResNet-50 takes a second or two for it. On smaller ones,
the deep layers of many networks take twice as long per pixel as on a photograph."""
MAX_SECONDS, MAX_RUNS = 0.3, 4
"""Timing stops after this many seconds or runs, but not before two runs. The fastest run counts,
since the first one includes warm-up, and others may be slowed down on a busy machine."""


@dataclass(frozen=True)
class Rates:
    """Cost of a network per pixel on this machine."""

    forward: float
    """Seconds for a forward pass."""
    step: float
    """Seconds for a step that reuses the frozen layers' outputs."""
    scores: float
    """Bytes for the class scores."""
    saved: float
    """Bytes that a step saves for its backward pass."""


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of an image."""

    seconds: float
    plain_seconds: float
    """Seconds for one forward pass of the network as trained."""
    step_seconds: float
    """Seconds for one step of adaptation; 0 for methods without steps."""
    num_bytes: float
    """Memory in addition to the network."""


def measure(make: Callable[[], Network], image: Tensor) -> Rates:
    """Measure a network on a small image ``(C, H, W)``.

    Args:
        make: Creates the network with the parameters that steps tune.
        image: Noise of a size that the network takes.
    """
    network, pixels = make(), image[0].numel()
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def seconds(run: Callable[[], object]) -> float:
        times: list[float] = []
        while len(times) < 2 or (len(times) < MAX_RUNS and sum(times) < MAX_SECONDS):
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
        step = seconds(take_step)  # the first step has also computed what later ones reuse
    weights = sum(value.nbytes for value in network.model.parameters())
    kept = max(0, sum(saved.values()) - weights)
    return Rates(forward / pixels, step / pixels, scores[-1].nbytes / pixels, kept / pixels)


def estimate(rates: Rates, pixels: float, passes: float, steps: float) -> Estimate:
    """Return the cost of an image with this number of pixels, forward passes and steps."""
    plain, step = pixels * rates.forward, pixels * rates.step
    kept = 4 * rates.scores + (rates.saved if steps else 0)  # scores, probabilities, their sum
    return Estimate(passes * plain + steps * step, plain, step if steps else 0.0, pixels * kept)


def check_memory(image: Tensor, cost_of: Callable[[int, int], Estimate], max_pixels: int) -> None:
    """Raise ValueError if there is not enough memory for a large image on a CPU.

    Args:
        image: The image ``(C, H, W)``.
        cost_of: Returns the estimated cost for a height and width.
        max_pixels: Number of pixels that larger images are scaled down to.
    """
    if image.is_cuda or image[0].numel() < LARGE_PIXELS:
        return
    height, width = size_of(image)
    try:
        needed = cost_of(height, width).num_bytes
    except Exception:  # the network may not take small images
        return
    free = free_memory()
    if free is not None and needed > free:
        raise ValueError(
            f"an image of {width}x{height} pixels needs about {_size_text(needed)} of memory with "
            f"this network and method, but {_size_text(free)} are free; lower --max-pixels, in "
            f"Python max_pixels, which is {max_pixels}, or use a method with a single pass, such "
            "as san"
        )


def free_memory() -> int | None:
    """Return the free memory in bytes; None if the system does not tell."""
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


def _size_text(num_bytes: float) -> str:
    """Return a memory size in MB, from 1 GB on in GB.

    Example:
        >>> _size_text(40 * 2**20), _size_text(1.5 * 2**30)
        ('40 MB', '1.5 GB')
    """
    megabytes = num_bytes / 2**20
    return f"{megabytes:.0f} MB" if megabytes < 1024 else f"{megabytes / 1024:.1f} GB"
