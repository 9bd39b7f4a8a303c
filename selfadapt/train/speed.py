"""Measure the throughput of reading images and of the network."""

import copy
import time
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from selfadapt.pseudo import IGNORE

if TYPE_CHECKING:
    from selfadapt.train.loop import TrainingRun


DATA_SECONDS = 3.0
"""Seconds for which the reading of images is measured."""


@dataclass(frozen=True)
class Speed:
    """Images per second, over all processes."""

    data: float
    """Reading and augmenting images on the device, without the network."""
    model: float
    """Forward and backward pass, with images already on the device."""

    def __str__(self) -> str:
        return f"data alone {self.data:.1f} images/s, model alone {self.model:.1f} images/s"

    def share(self, reached: float) -> str:
        """Return the speed of a run relative to the slower of the two, as text."""
        slower = min(self.data, self.model)
        return f"{100 * reached / slower:.0f} % of the slower of data and model alone ({self})"


class Meter:
    """Measures images per second."""

    def __init__(self, batch: int) -> None:
        self.batch, self.num, self.start = batch, 0, time.perf_counter()

    def step(self) -> None:
        """Count a batch."""
        self.num += self.batch

    @property
    def images_per_s(self) -> float:
        """Images per second so far."""
        return self.num / (time.perf_counter() - self.start)


def measure_speed(run: "TrainingRun") -> Speed:
    """Measure both for a few seconds, on a copy of the network."""
    inputs = run.inputs(0, 10**6)
    for _ in islice(inputs, 4 * run.workers):  # skip prefetched batches
        pass
    _synchronize(run.fabric.device)
    meter = Meter(run.config.batch)
    while time.perf_counter() - meter.start < DATA_SECONDS:
        next(inputs)
        meter.step()
    _synchronize(run.fabric.device)
    return Speed(meter.images_per_s, _model_speed(run))


def _model_speed(run: "TrainingRun") -> float:
    model = copy.deepcopy(run.trainer.model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    x, label = next(run.inputs(0, 1))
    warm_up, num = (5, 20) if x.is_cuda else (1, 2)
    for step in range(warm_up + num):
        if step == warm_up:
            _synchronize(x.device)
            meter = Meter(run.config.batch)
        with run.fabric.autocast():
            logits = run.trainer.interface.logits(model, x)
        F.cross_entropy(logits, label, ignore_index=IGNORE).backward()
        optimizer.step()
        optimizer.zero_grad()
    meter.num = num * run.config.batch
    _synchronize(x.device)
    return meter.images_per_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
