"""Devices and processes, with Lightning Fabric."""

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from selfadapt.devices import num_cores
from selfadapt.optional import import_optional

if TYPE_CHECKING:
    from selfadapt.train.recipe import TrainConfig


def make_fabric(config: "TrainConfig") -> Any:
    """Launch the processes of a run; the function returns in each of them."""
    fabric_library = import_optional("lightning_fabric", "train")
    machine = config.machine
    devices, nodes = machine.devices, machine.nodes
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun
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
        torch.backends.cudnn.benchmark = True  # all crops have the same size
    fabric = fabric_library.Fabric(
        accelerator=accelerator, devices=devices, num_nodes=nodes, precision=config.precision,
        strategy="auto" if devices == nodes == 1 else "ddp",
    )  # fmt: skip
    fabric.launch()
    return fabric


def num_workers(requested: int | None, world: int) -> int:
    """Return the number of processes that read images for each training process."""
    if requested is not None:
        return requested
    # num_cores() already divides by the processes that torchrun starts.
    processes = 1 if "LOCAL_WORLD_SIZE" in os.environ else world
    return max(1, min(16, num_cores() // processes))


@contextmanager
def explain_lost_processes(world: int) -> Iterator[None]:
    """Convert errors of a lost connection to another process into an OSError with advice."""
    try:
        yield
    except RuntimeError as error:
        if world == 1 or not re.search(r"gloo|nccl|connection (closed|reset)", str(error), re.I):
            raise
        raise OSError(
            "another process of this training ended, or cannot be reached "
            f"({str(error).splitlines()[0]}); the same command (without --overwrite) continues "
            "from the last saved state"
        ) from error


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Defer the first SIGINT or SIGTERM; a second signal has its usual effect.

    Yields a function that returns True once a signal was received.
    """
    received = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield received.is_set
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def receive(number: int, _: object) -> None:
        received.set()
        signal.signal(number, handlers[signal.Signals(number)])

    try:
        for number in handlers:
            signal.signal(number, receive)
        yield received.is_set
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
