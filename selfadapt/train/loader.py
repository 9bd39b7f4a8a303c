"""Batches of the source domain, the same ones in the same order however they are read.

The order of an epoch and the changes to each image follow from the seed, the epoch and the image
alone. So a run can go on from any step, and several processes that share the batches train as one.
"""

import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import parent_process
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from selfadapt.data import Dataset
from selfadapt.models.interface import Interface
from selfadapt.train.augment import AugmentConfig, Colors, cropped, draw_change, recolored


class Batch(NamedTuple):
    """Crops as they were read."""

    images: Tensor
    """``(B, 3, H, W)``, uint8."""
    labels: Tensor
    """``(B, H, W)``, uint8."""
    colors: list[Colors]
    """What is still to be done to their colours."""

    def to_device(self, device: torch.device, interface: Interface) -> tuple[Tensor, Tensor]:
        """Return the network's input ``(B, 3, H, W)`` and labels ``(B, H, W)``, int64."""
        images = self.images.to(device, non_blocking=True)
        labels = self.labels.to(device, non_blocking=True)
        images = interface.normalize(recolored(images, self.colors))
        return images.contiguous(memory_format=torch.channels_last), labels.long()


@dataclass(frozen=True)
class BatchOrder:
    """Which images make up each step of a run, and which of them are this process's."""

    num_images: int
    batch: int
    seed: int
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.num_images < self.batch:
            raise ValueError(
                f"a batch has {self.batch} images, but there are only {self.num_images} to train on"
            )
        if self.batch % self.world:
            raise ValueError(
                f"batch must be a multiple of the {self.world} processes that share it, "
                f"got {self.batch}"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in an epoch; the few images that are left wait for another epoch."""
        return self.num_images // self.batch

    def steps(self, start: int, stop: int) -> Iterator[list[tuple[int, int]]]:
        """Yield for each step the epoch and number of this process's images."""
        share = self.batch // self.world
        epoch, order = -1, np.empty(0, np.int64)
        for step in range(start, stop):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                order = np.random.default_rng([self.seed, epoch]).permutation(self.num_images)
            first = step % self.steps_per_epoch * self.batch + self.rank * share
            yield [(epoch, int(number)) for number in order[first : first + share]]


@dataclass(frozen=True)
class _Steps:
    """The steps of a run, as a DataLoader takes them."""

    order: BatchOrder
    start: int
    stop: int

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self.order.steps(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start


class _Crops(TorchDataset[Any]):
    """Reads, crops and flips images, given epoch and number."""

    def __init__(self, dataset: Dataset, config: AugmentConfig, seed: int) -> None:
        self.dataset = dataset
        self.config = config
        self.seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        try:
            sample = self.dataset[key[1]]
            rng = np.random.default_rng([self.seed, *key])
            change = draw_change(rng, self.config, sample.image.size)
            return *cropped(sample.image, sample.label, change, self.config.crop), change.colors
        except Exception as error:  # sent on as it is: a worker would wrap it into its traceback
            return error


def _collated(samples: list[Any]) -> Batch | Exception:
    if broken := next((sample for sample in samples if isinstance(sample, Exception)), None):
        return broken
    images, labels, colors = zip(*samples, strict=True)
    return Batch(torch.stack(images), torch.stack(labels), list(colors))


def follow_parent(_: int) -> None:
    """Let a worker end with the process that it reads for, however that ends, and not before.

    All processes of a terminal are asked to stop together: it is the parent that ends workers.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Wait for the end of the parent; what is still to be sent is for nobody then."""
    if (parent := parent_process()) is not None:
        parent.join()
    os._exit(1)


def read_batches(
    dataset: Dataset,
    config: AugmentConfig,
    order: BatchOrder,
    start: int,
    stop: int,
    *,
    workers: int = 0,
    pin: bool = False,
) -> Iterator[Batch]:
    """Yield the batches of steps ``start`` to ``stop``, read ahead by worker processes."""
    loader = DataLoader(
        _Crops(dataset, config, order.seed),
        batch_sampler=_Steps(order, start, stop),
        collate_fn=_collated,
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=4 if workers else None,
        worker_init_fn=follow_parent,
    )
    for batch in watched(loader):
        if isinstance(batch, Exception):
            raise batch
        yield batch


def watched(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield what workers read; say so where one of them was killed."""
    try:
        yield from loader
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise OSError(
            "a process that reads images was killed, usually for want of memory; use fewer with "
            "--machine.workers. The same command (without --overwrite) goes on from the last state"
        ) from error
