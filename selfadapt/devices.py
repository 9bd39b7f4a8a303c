"""Where to compute."""

import os

import torch


def process_number() -> tuple[int, int]:
    """Return the number of this process, and how many share the work, as torchrun says it."""
    texts = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not all(text.isdecimal() for text in texts) or not int(texts[0]) < int(texts[1]):
        raise ValueError(
            "RANK must be the number of this process, from 0, and WORLD_SIZE how many there are, "
            f"got {texts[0]!r} and {texts[1]!r}; unset both, or let torchrun set them"
        )
    return int(texts[0]), int(texts[1])


def num_cores() -> int:
    """Return how many cores there are for this process, and each that torchrun started with it."""
    known = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    started = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, cores // max(1, int(started) if started.isdecimal() else 1))


def find_device(name: str) -> torch.device:
    """Return a device by name; ``auto`` takes a GPU if there is one.

    Among the processes that torchrun starts, each takes the GPU of its own number.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        device = torch.zeros(1, device=name).device
        if device.type == "meta":
            raise RuntimeError("the meta device holds no numbers")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"there is no device {name!r} here, use --device cpu") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
