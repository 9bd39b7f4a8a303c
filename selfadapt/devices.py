"""Where to compute."""

import os

import torch


def refuse_torchrun(verb: str) -> None:
    """Raise ValueError in one of several processes that torchrun has started."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            f"selfadapt {verb} is not shared by torchrun; start processes with --shard i/n, each "
            "on a GPU of its own with CUDA_VISIBLE_DEVICES"
        )


def num_cores() -> int:
    """Return how many cores there are for this process, and each that torchrun started with it."""
    known = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    started = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, cores // max(1, int(started) if started.isdecimal() else 1))


def find_device(name: str) -> torch.device:
    """Return a device by name; ``auto`` takes a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.zeros(1, device=name).device
        if device.type == "meta":
            raise RuntimeError("the meta device holds no numbers")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"there is no device {name!r} here, use --device cpu") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
