"""An episode: the network as it is for one image, with weights that may be tuned and forgotten.

Nothing is ever written to the model. An episode holds copies of the weights that are tuned and of
the statistics, and runs the model's own code with them in place. Whatever happens, there is nothing
to restore. Weights that are not tuned are read where they are.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from selfadapt.fast import PLAIN, Fast
from selfadapt.fast.reuse import Reuse
from selfadapt.models.interface import Interface
from selfadapt.norm import Drift, SaN, images_in_batch, normalizing_with

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
        fast: Shortcuts to take.
        copies: Copy all weights: the network writes to them when it is run.
    """

    def __init__(
        self,
        model: nn.Module,
        interface: Interface,
        tuned: Collection[str] = (),
        fast: Fast = PLAIN,
        *,
        copies: bool = False,
    ) -> None:
        self.interface, self.fast = interface, fast
        weights = {name: _wide(value.detach()) for name, value in model.named_parameters()}
        if gone := [name for name in tuned if name not in weights]:
            raise ValueError(f"the network had {gone[0]} when this method was made: make it anew")
        if copies:
            weights = {name: value.clone() for name, value in weights.items()}
        self.device = next(iter(weights.values()), torch.empty(0)).device
        self._chosen = _autocasts(self.device)  # by the caller
        half = None if self._chosen else fast.half(self.device)
        self._last = fast.keeps_channels_last(self.device)
        self.tuned = {
            name: self._laid_out(weights[name].clone()).requires_grad_() for name in tuned
        }
        self.buffers = {name: _wide(value).clone() for name, value in model.named_buffers()}
        weights |= {
            name: self._laid_out(weights[name], half)
            for name in _kernels_of_convolutions(model)
            if name in weights and name not in self.tuned
        }
        self._runner = _Runner(model)
        self._state = {
            f"model.{name}": value for name, value in (weights | self.buffers | self.tuned).items()
        }
        self._reuse: Reuse | None = None
        self._reused_for: tuple[Tensor, Tensor, Drift | None] | None = None

    def logits(self, image: Tensor) -> Tensor:
        """Return class scores ``(1, C, H, W)`` for a raw image ``(C, H, W)``, or for several."""
        return self._run(image, lambda logits: logits)

    def probs(self, image: Tensor) -> Tensor:
        """Return class probabilities ``(C, H, W)`` for a raw image ``(C, H, W)``.

        Several images ``(B, C, H, W)`` give as many maps.
        """
        probs = self.logits(image).softmax(dim=1)
        return probs if image.dim() == 4 else probs[0]

    def step(self, image: Tensor, loss: Loss, lr: float) -> Tensor:
        """Take one step of plain gradient descent on a loss of the logits; return that loss."""
        value, gradients = self.gradients(image, loss, again=True)
        self.descend(gradients, lr)
        return value

    def gradients(self, image: Tensor, loss: Loss, again: bool = False) -> tuple[Tensor, Gradients]:
        """Return a loss of the logits, and its gradients by the tuned weights, in their order.

        Args:
            image: A raw image.
            loss: The loss.
            again: Gradients for this image will be asked for again, after a step.
        """
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
            return self._run(image, differentiate, again=again and self.fast.reuse)

    def descend(self, gradients: Gradients, lr: float) -> None:
        """Move the tuned weights against their gradients."""
        pairs = zip(self.tuned.values(), gradients, strict=True)
        moving = [(weight.data, gradient) for weight, gradient in pairs if gradient is not None]
        if moving:
            torch._foreach_add_(*map(list, zip(*moving, strict=True)), alpha=-lr)

    def _run(self, image: Tensor, use: Callable[[Tensor], Any], again: bool = False) -> Any:
        """Run the network on an image, and ``use`` its logits while the weights are in place.

        Args:
            image: A raw image.
            use: What is done with the logits.
            again: The network will be run on this image again, with other tuned weights.
        """
        x, reuse = self._input(image, again)

        def work(model: nn.Module) -> Any:
            return use(self.interface.finish(model(x), image))

        try:
            with self._shortcuts(reuse), images_in_batch(len(x)):
                return functional_call(self._runner, self._state, (work,))
        except (RuntimeError, AssertionError, LookupError, AttributeError, TypeError) as error:
            size = f"{image.shape[-1]}x{image.shape[-2]}"
            error.add_note(f"while the network ran on an image of {size} pixels; {_advice(error)}")
            raise

    def _input(self, image: Tensor, again: bool) -> tuple[Tensor, Reuse | None]:
        """Return the network's input for an image, and what is known of a run on it before."""
        drift = _drift_of(self._runner.model)
        if self._reused_for is not None and self._reuse is not None and self._reuse.usable:
            for_image, x, for_drift = self._reused_for
            if for_image is image and for_drift is drift:
                return x, self._reuse
        x = self.interface.prepare(self.interface.normalize(image))
        if self._last:
            x = x.contiguous(memory_format=torch.channels_last)
        if not again or (self._reuse is not None and not self._reuse.usable):
            return x, None
        names = self.tuned if drift is None else (*self.tuned, *self.buffers)
        changing = {id(self._state[f"model.{name}"]) for name in names}
        constants = [value for value in self._state.values() if id(value) not in changing]
        self._reused_for = image, x, drift
        self._reuse = Reuse(
            self._runner.model, self.tuned, [x, *constants], drift,
            partial(_precision, self.device, self.fast, self._chosen, steps=False),
        )  # fmt: skip
        return x, self._reuse

    @contextmanager
    def _shortcuts(self, reuse: Reuse | None) -> Iterator[None]:
        with ExitStack() as stack:
            steps = torch.is_grad_enabled()
            stack.enter_context(_precision(self.device, self.fast, self._chosen, steps=steps))
            if self.fast.fuses(self.device):
                from selfadapt.fast.fused import fusing  # needs Triton, which only GPUs have

                stack.enter_context(fusing())
            else:
                stack.enter_context(normalizing_with(lambda *_: None))
            if reuse is not None:
                stack.enter_context(reuse.running())
            yield

    def _laid_out(self, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        layout = torch.channels_last if self._last and weight.dim() == 4 else torch.preserve_format
        return weight.to(dtype=dtype or weight.dtype, memory_format=layout)


class _Runner(nn.Module):
    """Does any work with a model that functional_call has given other weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[nn.Module], Any]) -> Any:
        return work(self.model)


def _precision(
    device: torch.device, fast: Fast, chosen: bool, *, steps: bool
) -> AbstractContextManager[Any]:
    """Set the kind of numbers a network computes with, unless the caller has ``chosen`` one."""
    half = None if chosen else fast.half(device, steps=steps)
    if half is None:
        return nullcontext()
    return torch.autocast(device.type, half, cache_enabled=False)


def _kernels_of_convolutions(model: nn.Module) -> list[str]:
    modules = model.named_modules()
    return [f"{name}.weight" for name, module in modules if isinstance(module, nn.Conv2d)]


def _advice(error: Exception) -> str:
    if "use_reentrant" in str(error):
        return "no gradients pass such checkpoints: set use_reentrant=False in the network"
    if "should be the same" in str(error):
        return "it casts its input itself, but is run in float32: give model.float() without that"
    called = "" if isinstance(error, RuntimeError) else "it is called as model(images); "
    return called + (
        "if it takes certain sizes only, say so with interface=Interface(divisor=... or "
        "size=(H, W))"
    )


def _drift_of(model: nn.Module) -> Drift | None:
    return next((m.san_drift for m in model.modules() if isinstance(m, SaN)), None)


def _autocasts(device: torch.device) -> bool:
    """Say whether the caller has chosen the kind of numbers to compute with."""
    return device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)


def _wide(value: Tensor) -> Tensor:
    if value.is_inference():
        value = value.clone()  # an inference tensor could not be saved for the backward pass
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def described(error: Exception) -> str:
    """Return in one line what a network raised, with the advice that was added to it."""
    said, _, _ = f"{type(error).__name__}: {error}".partition("\n")
    return "; ".join([said, *dict.fromkeys(getattr(error, "__notes__", ()))])
