"""A running mean of a network's weights, which generalises better than where the last step led.

BatchNorm's statistics are averaged with them; counts are taken as they are.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """The mean of the weights a network had, those of late steps counting more.

    Args:
        model: The network, on its device; its weights are changed in place from here on.
        decay: What is left of the mean after a step, once there are many.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._current = model.state_dict()
        self.mean = {name: value.clone() for name, value in self._current.items()}
        """Weights and statistics, by name."""

    def update(self, number: int) -> None:
        """Take in the weights after step ``number``; those of the first are soon forgotten."""
        decay = min(self.decay, (1 + number) / (10 + number))
        means, weights = [], []
        for name, value in self._current.items():
            if value.is_floating_point():
                means.append(self.mean[name])
                weights.append(value)
            else:
                self.mean[name].copy_(value)
        torch._foreach_lerp_(means, weights, 1 - decay)

    def load(self, mean: Mapping[str, Tensor]) -> None:
        """Go on from a mean that was saved."""
        _copy(mean, self.mean)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Give the network the mean; what is done to it there stays with the mean."""
        own = {name: value.clone() for name, value in self._current.items()}
        _copy(self.mean, self._current)
        try:
            yield
        finally:
            _copy(self._current, self.mean)
            _copy(own, self._current)


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, value in target.items():
        value.copy_(source[name])
