"""Batches of the source domain, in a reproducible order.

The order of an epoch and the augmentation of each image depend only on the seed, the epoch and the
image. A run can therefore resume at any step, and the number of processes does not matter.
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
from selfadapt.train.augment import (
    AugmentConfig,
    ColorChange,
    change_colors,
    crop_pair,
    draw_augmentation,
)


class Batch(NamedTuple):
    """Cropped images with labels, before colour augmentation."""

    images: Tensor
    """``(B, 3, H, W)``, uint8."""
    labels: Tensor
    """``(B, H, W)``, uint8."""
    colors: list[ColorChange]
    """Colour augmentation to apply to each image."""

    def to_device(self, device: torch.device, interface: Interface) -> tuple[Tensor, Tensor]:
        """Return the network's input ``(B, 3, H, W)`` and labels ``(B, H, W)``, int64."""
        images = self.images.to(device, non_blocking=True)
        labels = self.labels.to(device, non_blocking=True)
        images = interface.normalize(change_colors(images, self.colors))
        return images.contiguous(memory_format=torch.channels_last), labels.long()


@dataclass(frozen=True)
class BatchOrder:
    """The images of each step of a run, and the share of this process."""

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
        """Number of full batches in an epoch; remaining images are dropped from the epoch."""
        return self.num_images // self.batch

    def steps(self, start: int, stop: int) -> Iterator[list[tuple[int, int]]]:
        """Yield for each step the epoch and index of the images of this process."""
        share = self.batch // self.world
        epoch, order = -1, np.empty(0, np.int64)
        for step in range(start, stop):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                order = np.random.default_rng([self.seed, epoch]).permutation(self.num_images)
            first = step % self.steps_per_epoch * self.batch + self.rank * share
            yield [(epoch, int(index)) for index in order[first : first + share]]


@dataclass(frozen=True)
class _BatchSampler:
    """The steps of a run as the batch sampler of a DataLoader."""

    order: BatchOrder
    start: int
    stop: int

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self.order.steps(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start


class _CropDataset(TorchDataset[Any]):
    """Reads, crops and flips images, given epoch and index."""

    def __init__(self, dataset: Dataset, config: AugmentConfig, seed: int) -> None:
        self.dataset = dataset
        self.config = config
        self.seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        try:
            sample = self.dataset[key[1]]
            rng = np.random.default_rng([self.seed, *key])
            change = draw_augmentation(rng, self.config, sample.image.size)
            return *crop_pair(sample.image, sample.label, change, self.config.crop), change.colors
        except Exception as error:  # returned, since a worker would wrap it in its traceback
            return error


def _collate(samples: list[Any]) -> Batch | Exception:
    if error := next((sample for sample in samples if isinstance(sample, Exception)), None):
        return error
    images, labels, colors = zip(*samples, strict=True)
    return Batch(torch.stack(images), torch.stack(labels), list(colors))


def exit_with_parent(_: int) -> None:
    """Make a worker exit together with its parent, however that ends, and not before.

    A terminal signals all processes at once: workers ignore it, and the parent stops them.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    """Wait for the end of the parent, then exit without sending the remaining batches."""
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
    """Yield the batches of steps ``start`` to ``stop``, prefetched by worker processes."""
    loader = DataLoader(
        _CropDataset(dataset, config, order.seed),
        batch_sampler=_BatchSampler(order, start, stop),
        collate_fn=_collate,
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=4 if workers else None,
        worker_init_fn=exit_with_parent,
    )
    yield from load(loader)


def load(loader: Iterable[Any]) -> Iterator[Any]:
    """Iterate over a DataLoader, whose dataset returns errors; raise those, and explain others.

    Raises:
        OSError: A worker was killed.
    """
    try:
        for item in loader:
            if isinstance(item, Exception):
                raise item
            yield item
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise OSError(
            "a process that reads images was killed, usually for lack of memory; use fewer with "
            "--machine.workers. The same command (without --overwrite) continues from the last "
            "saved state"
        ) from error
