"""Monte-Carlo dropout: dropout after every ReLU (Gal and Ghahramani, 2016; paper Table 2b).

``add_dropout`` builds it into a network that is to be trained with it. ``DropoutAfterReLU`` puts it
into a network for the length of a ``with`` block, wherever a ReLU is computed, and changes nothing.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

RELUS = {F.relu, F.relu_, F.relu6, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}


def check_rate(rate: float) -> None:
    """Raise ValueError unless this is a dropout rate."""
    if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 < rate < 1:
        raise ValueError(f"the dropout rate must lie between 0 and 1, got {rate!r}")


def add_dropout(model: nn.Module, rate: float = 0.1) -> int:
    """Put dropout after every ReLU (or ReLU6) layer of ``model``, in place; return their number.

    No name in the state_dict changes. A network that has dropout after its ReLUs already gets the
    new rate there.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
        >>> add_dropout(model, 0.1)
        1
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_rate(rate)
    layers: dict[nn.Module, ReLUWithDropout] = {}
    for module in list(model.modules()):
        if isinstance(module, ReLUWithDropout):
            module.dropout.p = rate
            layers[module.relu] = module
            continue
        for name, child in list(module._modules.items()):  # a layer may have several names
            if child is not None and type(child) in (nn.ReLU, nn.ReLU6):
                layers.setdefault(child, ReLUWithDropout(child, rate))
                setattr(module, name, layers[child])
    if not layers:
        raise ValueError(
            "dropout goes after ReLU layers, and this network has none; does it call F.relu "
            "instead? Then build dropout into it by hand"
        )
    return len(layers)


class ReLUWithDropout(nn.Module):
    """A ReLU followed by dropout."""

    def __init__(self, relu: nn.Module, rate: float) -> None:
        super().__init__()
        self.relu = relu
        self.dropout = nn.Dropout(rate)
        self.train(relu.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return ReLU of ``x``, then dropout."""
        return self.dropout(self.relu(x))


def dropout_layers(model: nn.Module) -> list[_DropoutNd]:
    """Return the dropout layers of a network whose rate is not 0."""
    layers = (module for module in model.modules() if isinstance(module, _DropoutNd))
    return [layer for layer in layers if layer.p > 0]


class DropoutAfterReLU(TorchFunctionMode):
    """Follows every ReLU that is computed inside a ``with`` block, by layer or by function.

    Example:
        >>> with DropoutAfterReLU(0.5) as dropout:
        ...     y = nn.ReLU()(torch.ones(2, 2)) + torch.ones(2, 2).relu()
        >>> dropout.num
        2
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.num = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, and drop some of what a ReLU returns."""
        output = func(*args, **(kwargs or {}))
        if func not in RELUS:
            return output
        self.num += 1
        return F.dropout(output, self.rate, training=True)


def random_state(device: torch.device) -> Tensor:
    """Return the state of a device's random number generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


_LOCK = threading.RLock()


def _renew_lock() -> None:
    """Replace the lock after a fork: the thread that held it is not in the child."""
    global _LOCK
    _LOCK = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Let random numbers start from ``seed``; outside, they go on as if none had been drawn.

    There is one source of random numbers for all threads, so they wait for each other.
    """
    devices = [device] if device.type == "cuda" else []
    with _LOCK, torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
