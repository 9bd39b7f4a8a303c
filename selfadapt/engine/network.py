"""A network for one image: a private copy of the caller's, with weights that may be tuned."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from math import inf
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from selfadapt.copying import STANDARD, private_copy
from selfadapt.engine import san_batchnorm
from selfadapt.engine.reuse import Reuse, version
from selfadapt.engine.settings import NO_OPTIMIZATIONS, Plan
from selfadapt.models.interface import Interface
from selfadapt.norm import (
    SaNReport,
    StatisticsTracker,
    convert,
    forward_context,
    image_statistics,
    record_statistics,
)
from selfadapt.pseudo import fuse
from selfadapt.steps import StepRule, gradient_descent
from selfadapt.views import Size, View, size_of, undo_together

LossOfLogits = Callable[[Tensor], Tensor]
"""A loss of the logits ``(1, C, H, W)``."""
Gradients = Sequence[Tensor | None]
"""The gradient of each tuned weight; None where the loss does not depend on it."""
OnStep = Callable[[int, float], None]
"""Called with the number of a step, from 1, and the loss before it."""


class OnStepError(Exception):
    """Carries what ``on_step`` raised past the fall-backs for errors of the network."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Network:
    """A private copy of a network, for one image.

    Half-precision models are run in float32: steps as small as adaptation's would be rounded away.

    Args:
        model: The network. It is copied, and never modified.
        interface: What it takes and gives.
        san: The layers that mix in the image's statistics, and how much.
        tuned: Names of the parameters ``step`` may change.
        plan: The optimizations that run. None: none.
        on_step: Called after each step.
        fallbacks: Filled with the reason why an optimization was given up, by its name.
    """

    def __init__(
        self,
        model: nn.Module,
        interface: Interface,
        san: SaNReport | None = None,
        tuned: Collection[str] = (),
        plan: Plan | None = None,
        on_step: OnStep | None = None,
        fallbacks: dict[str, str] | None = None,
    ) -> None:
        self.device = next(model.parameters(), torch.empty(0)).device
        self.plan = plan = NO_OPTIMIZATIONS.plan(self.device) if plan is None else plan
        self.interface, self.on_step = interface, on_step
        self.fallbacks = {} if fallbacks is None else fallbacks
        kernels = {
            f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Conv2d)
        }

        def new_tensor(name: str, value: Tensor) -> Tensor:
            dtype = value.dtype
            if dtype in (torch.float16, torch.bfloat16):
                dtype = torch.float32
            if plan.predict is not None and name in kernels and name not in tuned:
                dtype = plan.predict
            last = plan.runs("channels_last") and value.dim() == 4
            last = last and (name in kernels or name in tuned)
            layout = torch.channels_last if last else torch.preserve_format
            return torch.empty_like(value, dtype=dtype, memory_format=layout)

        self.model = private_copy(model, new_tensor)
        parameters = dict(self.model.named_parameters())
        if missing := [name for name in tuned if name not in parameters]:
            raise ValueError(
                f"the network had {missing[0]} when this method was created: create it again"
            )
        self.tuned = {name: parameters[name].requires_grad_() for name in tuned}
        self.buffers = dict(self.model.named_buffers())
        if san is not None:
            self.set_alpha(san)
        self.num_steps = 0
        self.deadline = inf
        """Time by ``time.perf_counter`` after which a method should not start another step."""
        self._tracker: StatisticsTracker | None = None
        self._reuse: Reuse | None = None
        self._reused_for: tuple[Tensor, int, Tensor, StatisticsTracker | None] | None = None
        self._in_loss = False

    def __del__(self) -> None:
        """Free the memory of a network that refers to itself, before garbage is collected."""
        model = self.__dict__.pop("model", None)
        self.__dict__.clear()
        if model is None:
            return
        alive, model = ref(model), None
        if (model := alive()) is None:
            return
        for module in model.modules():
            for value in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                value.data = value.new_empty(0)
            for name in vars(module).keys() - STANDARD:
                del module.__dict__[name]

    def set_alpha(self, san: SaNReport) -> None:
        """Convert the layers that ``san`` lists to SaN with its alphas."""
        convert(self.model, san)

    def logits(self, image: Tensor) -> Tensor:
        """Return class scores ``(1, C, H, W)`` for a raw image ``(C, H, W)``, or for several."""
        return self._run(image, lambda logits: logits)

    def probs(self, image: Tensor) -> Tensor:
        """Return class probabilities ``(C, H, W)`` for a raw image ``(C, H, W)``.

        Several images ``(B, C, H, W)`` give as many maps.
        """
        probs = self.logits(image).softmax(dim=1)
        return probs if image.dim() == 4 else probs[0]

    def mean_probs(self, image: Tensor, views: Iterable[View], size: Size | None = None) -> Tensor:
        """Return the mean prediction over views (Eq. 1) in the image plane, or at another size.

        Args:
            image: A raw image ``(C, H, W)``, or several ``(B, C, H, W)``, which give as many maps.
            views: The views.
            size: Height and width of the mean; None: those of the image.
        """
        views, size = list(views), size or size_of(image)
        images = image if image.dim() == 4 else image[None]
        together = self.plan.runs("batches")
        groups: dict[Any, list[View]] = {}
        for index, view in enumerate(views):
            groups.setdefault(view.size(size_of(image)) if together else index, []).append(view)

        def sums() -> Iterator[Tensor]:
            for group in groups.values():
                probs = self.probs(torch.stack([v.make(each) for v in group for each in images]))
                planes = probs.unflatten(0, (len(group), len(images))).flatten(1, 2)
                yield from undo_together(group, planes, size)

        mean = fuse(sums(), len(views))  # the images' classes are planes of one map
        return mean if image.dim() == 3 else mean.unflatten(0, (len(images), -1))

    def step(
        self, image: Tensor, loss: LossOfLogits, lr: float, rule: StepRule = gradient_descent
    ) -> Tensor:
        """Take one step on a loss of the logits; return that loss."""
        value, gradients = self.gradients(image, loss, again=True)
        self.descend(gradients, value, lr, rule)
        return value

    def gradients(
        self, image: Tensor, loss: LossOfLogits, again: bool = False
    ) -> tuple[Tensor, Gradients]:
        """Return a loss of the logits, and its gradients by the tuned weights, in their order.

        Args:
            image: A raw image.
            loss: The loss.
            again: Gradients for this image will be computed again, after a step.
        """
        weights = list(self.tuned.values())
        if not weights:
            raise ValueError(
                "this method takes steps and tunes no layers: its constructor must call "
                "self._select_layers(adapt)"
            )

        def differentiate(logits: Tensor) -> tuple[Tensor, Gradients]:
            self._in_loss = True
            value = loss(logits)
            if not isinstance(value, Tensor) or value.numel() != 1:
                shape = tuple(value.shape) if isinstance(value, Tensor) else repr(value)
                raise TypeError(f"a loss must return a tensor with one number, got {shape}")
            self._in_loss = False
            if not value.requires_grad:
                raise ValueError(
                    "the network's output carries no gradient to the layers to adapt, "
                    f"{next(iter(self.tuned))} and on; does it run under no_grad or detach its "
                    "output? If it does not use these layers, choose others with --adapt, in "
                    "Python adapt=[...]"
                )
            return value.detach(), torch.autograd.grad(value, weights, allow_unused=True)

        with torch.enable_grad():
            return self._run(image, differentiate, again=again and self.plan.runs("reuse"))

    def descend(
        self,
        gradients: Gradients,
        loss: Tensor,
        lr: float,
        rule: StepRule = gradient_descent,
    ) -> None:
        """Move the tuned weights against their gradients; call ``on_step``."""
        pairs = zip(self.tuned.values(), gradients, strict=True)
        moving = [(weight.data, gradient) for weight, gradient in pairs if gradient is not None]
        if moving:
            rule([weight for weight, _ in moving], [gradient for _, gradient in moving], lr)
        self.num_steps += 1
        if self.on_step is not None:
            try:
                self.on_step(self.num_steps, float(loss))
            except Exception as error:
                raise OnStepError(error) from error

    @contextmanager
    def image_statistics(self, momentum: float) -> Iterator[None]:
        """Normalise with image statistics alone, and let the running statistics follow them."""
        with image_statistics(self.model, momentum) as self._tracker:
            yield
        self._tracker = None

    def mixed_statistics(self, image: Tensor) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """Return the statistics that SaN normalises a raw image with, by name of the layer.

        The network must run without optimizations.

        Returns:
            Mean and variance ``(C,)`` at each use of the layer.
        """
        with record_statistics() as recorded:
            self.logits(image)
        layers: dict[Any, str] = {layer: name for name, layer in self.model.named_modules()}
        return {layers[layer]: uses for layer, uses in recorded.items()}

    def _run(self, image: Tensor, use: Callable[[Tensor], Any], again: bool = False) -> Any:
        """Run the network on an image, and ``use`` its logits.

        Args:
            image: A raw image.
            use: Function of the logits.
            again: The network will be run on this image again, with other tuned weights.
        """
        x, reuse = self._input(image, again)
        try:
            with ExitStack() as stack:
                half = self.plan.adapt if torch.is_grad_enabled() else self.plan.predict
                stack.enter_context(_autocast(self.device.type, half))
                if self.plan.runs("kernels"):
                    from selfadapt.engine.kernels.fused import fusing  # needs Triton

                    stack.enter_context(fusing(len(x)))
                else:
                    has_backend = self.plan.runs("san_batchnorm")
                    backend = san_batchnorm.normalize if has_backend else None
                    stack.enter_context(forward_context(len(x), backend))
                if reuse is not None:
                    stack.enter_context(reuse.running())
                return use(self.interface.finish(self.model(x), image))
        except (RuntimeError, AssertionError, LookupError, AttributeError, TypeError) as error:
            if self._in_loss:
                raise
            size = f"{image.shape[-1]}x{image.shape[-2]}"
            error.add_note(f"while the network ran on an image of {size} pixels; {_advice(error)}")
            raise

    def _input(self, image: Tensor, again: bool) -> tuple[Tensor, Reuse | None]:
        """Return the network's input for an image, and the ``Reuse`` of an earlier run on it."""
        if self._reused_for is not None and self._reuse is not None and self._reuse.usable:
            for_image, its_version, x, for_tracker = self._reused_for
            is_same = for_image is image and its_version == version(image)
            if is_same and for_tracker is self._tracker:
                return x, self._reuse
        x = self.interface.prepare(self.interface.normalize(image))
        if self.plan.runs("channels_last"):
            x = x.contiguous(memory_format=torch.channels_last)
        if self._reuse is not None and not self._reuse.usable:
            self.fallbacks["reuse"] = "the network changes what does not depend on the tuned layers"
            return x, None
        if not again:
            return x, None
        frozen = [value for name, value in self.model.named_parameters() if name not in self.tuned]
        buffers = self.buffers.values() if self._tracker is None else ()
        self._reused_for = image, version(image), x, self._tracker
        self._reuse = Reuse(
            self.model, self.tuned, [x, *frozen, *buffers], self._tracker,
            partial(_autocast, self.device.type, self.plan.predict),
        )  # fmt: skip
        return x, self._reuse


def _autocast(device: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Compute in a 16-bit dtype, or as the caller's autocast says.

    Autocast keeps 16-bit copies of weights; after a step they would be outdated.
    """
    if device not in ("cpu", "cuda"):
        return nullcontext()
    if dtype is not None:
        return torch.autocast(device, dtype, cache_enabled=False)
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return torch.autocast(device, dtype, enabled=enabled, cache_enabled=False)


def _advice(error: Exception) -> str:
    if "use_reentrant" in str(error):
        return "gradients do not pass such checkpoints: set use_reentrant=False in the network"
    if "should be the same" in str(error):
        return "it casts its input itself, but is run in float32: give model.float() without that"
    called = "" if isinstance(error, RuntimeError) else "it is called as model(images); "
    return called + (
        "if it takes certain sizes only, say so with interface=Interface(divisor=... or "
        "size=(H, W))"
    )


def described(error: Exception) -> str:
    """Return an error of a network in one line, with the advice in its notes."""
    message, _, _ = f"{type(error).__name__}: {error}".partition("\n")
    return "; ".join([message, *dict.fromkeys(getattr(error, "__notes__", ()))])
