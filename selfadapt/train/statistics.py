"""BatchNorm's statistics, averaged anew over many batches.

Running statistics follow the last few batches of training. Where batches are small or the learning
rate was high until the end, a plain mean over many batches serves inference better.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def batchnorm_layers(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers that keep BatchNorm's running statistics."""
    layers = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return [layer for layer in layers if layer.track_running_stats]


def mend_statistics(model: nn.Module) -> list[str]:
    """Start the statistics anew of layers where they are not finite; return the layers' names.

    They would stay so: a running mean forgets all but infinity. Variances that were saved in 16
    bits overflow, which nobody sees who trains on.
    """
    names = {layer: name for name, layer in model.named_modules()}
    mended = []
    for layer in batchnorm_layers(model):
        if not all(buffer.isfinite().all() for buffer in layer.buffers()):
            layer.reset_running_stats()
            mended.append(names[layer])
    return mended


def average_statistics(
    model: nn.Module, run: Callable[[Tensor], Tensor], inputs: Iterable[Tensor]
) -> None:
    """Replace the running statistics by their mean over ``inputs``; leaves evaluation mode on.

    Args:
        model: The network; dropout is off meanwhile.
        run: Runs it.
        inputs: What to run it on.
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
