"""An episode: the network as it is for one image, with weights that may be tuned and forgotten.

The model itself is never written to. An episode holds copies of the weights that are tuned and of
the statistics, and runs the model's own code with them in place. Whatever happens, there is nothing
to restore.
"""

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from selfadapt.models.interface import Interface


class Episode:
    """A model with its own copy of some weights.

    Half-precision models are run in float32: steps as small as adaptation's would be rounded away.

    Args:
        model: The network, in evaluation mode.
        interface: How to talk to it.
        tuned: Names of the parameters ``step`` may change.
    """

    def __init__(self, model: nn.Module, interface: Interface, tuned: Collection[str] = ()) -> None:
        self.model = model
        self.interface = interface
        tensors = {name: _wide(value.detach()) for name, value in model.named_parameters()}
        self.tuned = {name: tensors[name].clone().requires_grad_() for name in tuned}
        self.buffers = {name: _wide(value).clone() for name, value in model.named_buffers()}
        self._state = tensors | self.buffers | self.tuned

    def logits(self, image: Tensor) -> Tensor:
        """Return class scores ``(1, C, H, W)`` for a raw image ``(C, H, W)``."""
        network = partial(functional_call, self.model, self._state)
        x = self.interface.normalize(image)
        try:
            return self.interface.logits(network, x)
        except RuntimeError as error:
            error.add_note(
                f"while the network ran on an image of {_size(image)} pixels; if it takes certain "
                "sizes only, say so with interface=Interface(divisor=... or size=(H, W))"
            )
            raise

    def probs(self, image: Tensor) -> Tensor:
        """Return class probabilities ``(C, H, W)`` for a raw image ``(C, H, W)``."""
        return self.logits(image)[0].softmax(dim=0)

    def step(self, loss: Tensor, lr: float) -> None:
        """Take one step of plain gradient descent on the tuned weights."""
        if not loss.requires_grad:
            raise ValueError(
                "the network's output carries no gradient to the layers to adapt, "
                f"{next(iter(self.tuned))} and on; does it run under no_grad or detach its output? "
                "If it does not use these layers, name others with adapt=[...]"
            )
        weights = list(self.tuned.values())
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                if gradient is not None:
                    weight.sub_(gradient, alpha=lr)


def _wide(value: Tensor) -> Tensor:
    if value.is_inference():
        value = value.clone()  # an inference tensor could not be saved for the backward pass
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _size(image: Tensor) -> str:
    return f"{image.shape[-1]}x{image.shape[-2]}"
