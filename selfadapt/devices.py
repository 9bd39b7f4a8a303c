"""Devices, CPU cores and torchrun."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def refuse_torchrun(verb: str) -> None:
    """Raise ValueError if torchrun has started several processes."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            f"selfadapt {verb} does not support torchrun; start processes with --shard i/n, each "
            "on a GPU of its own with CUDA_VISIBLE_DEVICES"
        )


def num_cores() -> int:
    """Return the number of cores for this process, shared with others of torchrun."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, cores // max(1, int(processes) if processes.isdecimal() else 1))


@contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """Compute with a number of threads in a ``with`` block."""
    previous = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def find_device(name: str) -> torch.device:
    """Return a device by name; ``auto`` selects a GPU if available."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.zeros(1, device=name).device
        if device.type == "meta":
            raise RuntimeError("tensors on the meta device have no values")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"there is no device {name!r} here, use --device cpu") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
