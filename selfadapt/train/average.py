"""Exponential moving average (EMA) of a network's weights.

BatchNorm's statistics are averaged as well; integer buffers are copied.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """Exponential moving average of the weights of a network.

    Args:
        model: The network, on its device; its weights must only be changed in place.
        decay: Decay of the average, reached after a warm-up.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._current = model.state_dict()
        self.mean = {name: value.clone() for name, value in self._current.items()}
        """Averaged weights and statistics, by name."""

    def update(self, number: int) -> None:
        """Update the average with the weights after step ``number``."""
        # Warm-up: the weights of the first steps are soon forgotten.
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
        """Restore a saved average."""
        _copy(mean, self.mean)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the average as weights of the network; changes in the block apply to the average."""
        weights = {name: value.clone() for name, value in self._current.items()}
        _copy(self.mean, self._current)
        try:
            yield
        finally:
            _copy(self._current, self.mean)
            _copy(weights, self._current)


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, value in target.items():
        value.copy_(source[name])
