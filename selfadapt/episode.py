"""An episode: the network as it is for one image, with weights that may be tuned and forgotten.

Nothing is ever written to the model. An episode holds copies of the weights that are tuned and of
the statistics, and runs the model's own code with them in place. Whatever happens, there is nothing
to restore. Weights that are not tuned are read where they are.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from selfadapt.models.interface import Interface

Loss = Callable[[Tensor], Tensor]
"""A loss of the logits ``(1, C, H, W)``."""
Gradients = Sequence[Tensor | None]
"""One for each tuned weight; None where the loss does not depend on it."""


class Episode:
    """A model with its own copy of some weights.

    Half-precision models are run in float32: steps as small as adaptation's would be rounded away.

    Args:
        model: The network, in evaluation mode.
        interface: How to talk to it.
        tuned: Names of the parameters ``step`` may change.
    """

    def __init__(self, model: nn.Module, interface: Interface, tuned: Collection[str] = ()) -> None:
        self.interface = interface
        weights = {name: _wide(value.detach()) for name, value in model.named_parameters()}
        self.tuned = {name: weights[name].clone().requires_grad_() for name in tuned}
        self.buffers = {name: _wide(value).clone() for name, value in model.named_buffers()}
        self._runner = _Runner(model)
        self._state = {
            f"model.{name}": value for name, value in (weights | self.buffers | self.tuned).items()
        }

    def logits(self, image: Tensor) -> Tensor:
        """Return class scores ``(1, C, H, W)`` for a raw image ``(C, H, W)``."""
        return self._run(image, lambda logits: logits)

    def probs(self, image: Tensor) -> Tensor:
        """Return class probabilities ``(C, H, W)`` for a raw image ``(C, H, W)``."""
        return self.logits(image)[0].softmax(dim=0)

    def step(self, image: Tensor, loss: Loss, lr: float) -> Tensor:
        """Take one step of plain gradient descent on a loss of the logits; return that loss."""
        value, gradients = self.gradients(image, loss)
        self.descend(gradients, lr)
        return value

    def gradients(self, image: Tensor, loss: Loss) -> tuple[Tensor, Gradients]:
        """Return a loss of the logits, and its gradients by the tuned weights, in their order."""
        weights = list(self.tuned.values())

        def differentiate(logits: Tensor) -> tuple[Tensor, Gradients]:
            value = loss(logits)
            if not value.requires_grad:
                raise ValueError(
                    "the network's output carries no gradient to the layers to adapt, "
                    f"{next(iter(self.tuned))} and on; does it run under no_grad or detach its "
                    "output? If it does not use these layers, name others with adapt=[...]"
                )
            # With the weights still in place: a checkpointed network runs once more in here.
            return value.detach(), torch.autograd.grad(value, weights, allow_unused=True)

        with torch.enable_grad():
            return self._run(image, differentiate)

    def descend(self, gradients: Gradients, lr: float) -> None:
        """Move the tuned weights against their gradients."""
        for weight, gradient in zip(self.tuned.values(), gradients, strict=True):
            if gradient is not None:
                weight.data.sub_(gradient, alpha=lr)

    def _run(self, image: Tensor, use: Callable[[Tensor], Any]) -> Any:
        """Run the network on an image, and ``use`` its logits while the weights are in place."""
        x = self.interface.normalize(image)
        try:
            return functional_call(
                self._runner, self._state, (lambda model: use(self.interface.logits(model, x)),)
            )
        except RuntimeError as error:
            error.add_note(
                f"while the network ran on an image of {image.shape[-1]}x{image.shape[-2]} pixels; "
                "if it takes certain sizes only, say so with "
                "interface=Interface(divisor=... or size=(H, W))"
            )
            raise


class _Runner(nn.Module):
    """Does any work with a model that functional_call has given other weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[nn.Module], Any]) -> Any:
        return work(self.model)


def _wide(value: Tensor) -> Tensor:
    if value.is_inference():
        value = value.clone()  # an inference tensor could not be saved for the backward pass
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
