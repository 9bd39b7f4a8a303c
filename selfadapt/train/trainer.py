"""Training steps of a network, on one device or distributed over processes."""

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfadapt.models.detect import detect
from selfadapt.models.norms import MIXING_WEIGHTS, BatchInstanceNorm2d
from selfadapt.pseudo import IGNORE
from selfadapt.train.average import WeightAverage
from selfadapt.train.recipe import TrainConfig
from selfadapt.train.statistics import (
    average_statistics,
    batchnorm_layers,
    reset_nonfinite_statistics,
)

MIXING_LR_FACTOR = 10
"""Factor of the learning rate of weights that mix normalisations."""


class Trainer:
    """A network with its optimizer and training step.

    Args:
        config: The recipe.
        fabric: Devices and processes.
        fresh: Skip the initial weights, as a saved state will be loaded.
    """

    def __init__(self, config: TrainConfig, fabric: Any, *, fresh: bool = False) -> None:
        self.config, self.fabric = config, fabric
        torch.manual_seed(config.seed)
        self.model = config.model.build(fresh=fresh)
        self.model.spec = replace(self.model.spec, trained_on=config.source.title)
        _check_finite(self.model, config)
        self.interface = detect(self.model, None)
        if fabric.world_size > 1 and not config.frozen_batchnorm:
            if fabric.device.type == "cuda":
                self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
            else:
                warnings.warn(
                    "BatchNorm statistics are not synchronised between processes, which needs GPUs",
                    stacklevel=2,
                )
        self.model.to(memory_format=torch.channels_last)
        self.optimizer = make_optimizer(self.model, config)
        self._weights = loss_weights(config).to(fabric.device)
        self._network, self._optimizer = fabric.setup(self.model, self.optimizer)
        self.average = WeightAverage(self.model, config.average) if config.average else None

    def step(self, x: Tensor, label: Tensor, lr: float, number: int) -> Tensor:
        """Take step ``number``, and return the loss.

        Args:
            x: The network's input ``(B, 3, H, W)``, this process's share of the batch.
            label: Labels ``(B, H, W)``.
            lr: Learning rate.
            number: Seeds dropout, together with the seed of the recipe.
        """
        seed = crc32(f"{self.config.seed} {number} {self.fabric.global_rank}".encode())
        torch.manual_seed(seed)
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        logits = self.interface.logits(self._network, x)
        by_class = self._weights[: logits.shape[1]]
        total = F.cross_entropy(logits, label, by_class, ignore_index=IGNORE, reduction="sum")
        # Gradients are averaged over processes, which may have different numbers of pixels.
        pixels = self.fabric.all_reduce(self._weights[label].sum(), reduce_op="sum")
        loss = total * self.fabric.world_size / pixels.clamp(min=1e-6)
        self.fabric.backward(loss)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for layer in self.model.modules():
            if isinstance(layer, BatchInstanceNorm2d):
                layer.rho.data.clamp_(0, 1)
        if self.average is not None:
            self.average.update(number)
        return loss.detach()

    def train_mode(self) -> None:
        """Switch to training mode, except for frozen BatchNorm layers."""
        self._network.train()
        if self.config.frozen_batchnorm:
            for layer in batchnorm_layers(self.model):
                layer.eval()

    def averaged(self) -> AbstractContextManager[None]:
        """Use the averaged weights, if configured, in a ``with`` block."""
        return nullcontext() if self.average is None else self.average.applied()

    def share_statistics(self) -> None:
        """Copy the buffers of the first process, which saves the network, to all processes."""
        if self.fabric.world_size > 1:
            for buffer in self.model.buffers():
                torch.distributed.broadcast(buffer, 0)

    def average_statistics(self, inputs: Iterable[Tensor]) -> None:
        """Replace BatchNorm's statistics by their mean over the ``inputs`` of all processes."""
        average_statistics(self.model, partial(self.interface.logits, self.model), inputs)
        for layer in batchnorm_layers(self.model):
            for buffer in (layer.running_mean, layer.running_var):
                assert buffer is not None
                buffer.copy_(self.fabric.all_reduce(buffer, reduce_op="mean"))


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.SGD:
    """Return SGD; weights that mix normalisations have a higher learning rate and no decay."""
    plain: list[nn.Parameter] = []
    mixing: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (mixing if name.rpartition(".")[2] in MIXING_WEIGHTS else plain).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": plain, "lr_factor": 1, "weight_decay": config.weight_decay},
        {"params": mixing, "lr_factor": MIXING_LR_FACTOR, "weight_decay": 0.0},
    ]
    return torch.optim.SGD(
        [group for group in groups if group["params"]], lr=config.lr, momentum=config.momentum
    )


def loss_weights(config: TrainConfig) -> Tensor:
    """Return the weight of each label in the loss ``(256,)``, 0 for ignored labels."""
    weights = torch.zeros(IGNORE + 1)
    for index, name in enumerate(config.model.space.names):
        weights[index] = config.class_weights.get(name, 1)
    return weights


def _check_finite(model: nn.Module, config: TrainConfig) -> None:
    """Check the initial weights, as later errors would not show the cause."""
    start = f"the initial weights, {config.model.weights},"
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"{start} are not finite, see {name}")
    if reset := ", ".join(reset_nonfinite_statistics(model)):
        if config.frozen_batchnorm:
            raise ValueError(
                f"{start} have BatchNorm statistics that are not finite ({reset}) and cannot be "
                "kept; leave out frozen_batchnorm"
            )
        warnings.warn(
            f"{start} have BatchNorm statistics that are not finite: {reset} was reset",
            stacklevel=3,
        )
