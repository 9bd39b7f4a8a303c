"""Evaluation on the validation domain for each alpha of SaN."""

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from selfadapt.data import Dataset
from selfadapt.images import load_image, rescale
from selfadapt.metrics import confusion_matrix
from selfadapt.models.interface import Interface
from selfadapt.norm import converted, find_san
from selfadapt.train.loader import exit_with_parent, load

MAX_BATCH_PIXELS = 4 * 2**20
"""Maximum number of pixels in a batch of images of the same size."""


def confusion_by_alpha(
    model: nn.Module,
    interface: Interface,
    dataset: Dataset,
    alphas: Sequence[float],
    *,
    scale: float = 1.0,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
) -> Tensor:
    """Count pixels by true and predicted class, for each alpha.

    Args:
        model: The network, in evaluation mode.
        interface: Its input and output.
        dataset: The validation domain.
        alphas: Values of SaN's alpha.
        scale: Images are resized by this factor, and probabilities back to the size of the label.
        rank: Index of this process.
        world: Number of processes that share the images.
        workers: Number of processes that read images.

    Returns:
        Counts ``(alphas, C, C)``, int64, on the network's device.
    """
    device = next(model.parameters()).device
    num_classes = len(dataset.space.names)
    counts = torch.zeros(len(alphas), num_classes, num_classes, dtype=torch.int64, device=device)
    reports = [find_san(model, alpha) for alpha in alphas]
    for images, label in _read(dataset, scale, range(rank, len(dataset), world), workers):
        x, label = interface.normalize(images.to(device)), label.to(device)
        for count, report in zip(counts, reports, strict=True):
            with converted(model, report), torch.no_grad():
                probs = interface.logits(model, x).softmax(dim=1)
            if probs.shape[-2:] != label.shape[-2:]:
                probs = F.interpolate(probs, label.shape[-2:], mode="bilinear")
            count += confusion_matrix(label, probs.argmax(dim=1), num_classes)
    return counts


def _read(
    dataset: Dataset, scale: float, indices: Sequence[int], workers: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rescaled images ``(B, 3, H, W)`` in [0, 1] with labels ``(B, h, w)``."""
    loader: DataLoader[Any] = DataLoader(
        _SampleDataset(dataset), batch_size=None, sampler=indices, num_workers=workers,
        collate_fn=_identity, worker_init_fn=exit_with_parent,
    )  # fmt: skip
    for (width, height), group in groupby(load(loader), key=lambda sample: sample.image.size):
        batch_size = max(1, int(MAX_BATCH_PIXELS / (width * height * scale**2)))
        while batch := list(islice(group, batch_size)):
            images = [load_image(rescale(sample.image, scale)) for sample in batch]
            labels = [torch.from_numpy(sample.label) for sample in batch]
            yield torch.stack(images), torch.stack(labels).long()


class _SampleDataset(TorchDataset[Any]):
    """Reads images and labels; returns errors, as a worker would wrap raised ones."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            return error


def _identity(sample: Any) -> Any:
    return sample
