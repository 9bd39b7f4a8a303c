"""Re-estimate BatchNorm's statistics over many batches ("precise BN").

Running statistics depend on the last few batches of training. With small batches or a high final
learning rate, the plain mean over many batches is better for inference.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def batchnorm_layers(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers with running statistics."""
    layers = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return [layer for layer in layers if layer.track_running_stats]


def reset_nonfinite_statistics(model: nn.Module) -> list[str]:
    """Reset the running statistics of layers where they are not finite; return their names.

    Variances saved in 16 bits may overflow, and a running mean never recovers from infinity.
    """
    names = {layer: name for name, layer in model.named_modules()}
    reset = []
    for layer in batchnorm_layers(model):
        if not all(buffer.isfinite().all() for buffer in layer.buffers()):
            layer.reset_running_stats()
            reset.append(names[layer])
    return reset


def average_statistics(
    model: nn.Module, run: Callable[[Tensor], Tensor], inputs: Iterable[Tensor]
) -> None:
    """Replace running statistics by their mean over ``inputs``; leaves the model in eval mode.

    Args:
        model: The network; dropout is disabled.
        run: Runs the network on an input.
        inputs: The inputs of the network.
    """
    layers = batchnorm_layers(model)
    momentum = [layer.momentum for layer in layers]
    model.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a plain mean
        layer.train()
    with torch.no_grad():
        for x in inputs:
            run(x)
    for layer, value in zip(layers, momentum, strict=True):
        layer.momentum = value
        layer.eval()
