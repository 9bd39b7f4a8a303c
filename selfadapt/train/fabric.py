"""Devices and processes, through Lightning Fabric."""

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from selfadapt.devices import num_cores
from selfadapt.optional import need

if TYPE_CHECKING:
    from selfadapt.train.recipe import TrainConfig


def make_fabric(config: "TrainConfig") -> Any:
    """Start the processes of a run; each of them returns from here."""
    fabric_library = need("lightning_fabric", "train")
    machine = config.machine
    devices, nodes = machine.devices, machine.nodes
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started them and knows their number
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // devices
    elif nodes > 1:
        raise ValueError(f"a run on several machines is started with torchrun, got nodes {nodes}")
    accelerator = {"gpu": "cuda"}.get(machine.accelerator, machine.accelerator)
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU here; use --machine.accelerator cpu")
    if accelerator == "cuda" and devices != "auto" and devices > torch.cuda.device_count():
        raise ValueError(
            f"there are {torch.cuda.device_count()} GPUs here, but devices is {devices}"
        )
    if devices == "auto" and accelerator == "cpu":
        devices = 1
    if accelerator == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True  # crops have one size
    fabric = fabric_library.Fabric(
        accelerator=accelerator, devices=devices, num_nodes=nodes, precision=config.precision,
        strategy="auto" if devices == nodes == 1 else "ddp",
    )  # fmt: skip
    fabric.launch()
    return fabric


def num_workers(given: int | None, world: int) -> int:
    """Return how many processes read images for each training process."""
    if given is not None:
        return given
    started = 1 if "LOCAL_WORLD_SIZE" in os.environ else world  # by torchrun, which is counted
    return max(1, min(16, num_cores() // started))


@contextmanager
def lost_processes(world: int) -> Iterator[None]:
    """Tell in words that another of the processes that share a run is gone."""
    try:
        yield
    except RuntimeError as error:
        if world == 1 or not re.search(r"gloo|nccl|connection (closed|reset)", str(error), re.I):
            raise
        raise OSError(
            "another process of this training ended, or cannot be reached "
            f"({str(error).splitlines()[0]}); the same command (without --overwrite) goes on from "
            "the last saved state"
        ) from error


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Take down Ctrl-C and a request to end instead of breaking off; a second one breaks off.

    Yields a function that says whether there was one.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, _: object) -> None:
        asked.set()
        signal.signal(number, before[signal.Signals(number)])

    try:
        for number in before:
            signal.signal(number, ask)
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
