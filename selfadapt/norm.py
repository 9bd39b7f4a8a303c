"""Self-adaptive normalisation (SaN): mix source and image statistics (paper Eq. 7-8).

A network trained on one domain carries that domain's mean and variance in every BatchNorm layer.
SaN blends them with the statistics of the one image at hand:

    mean = (1 - alpha) * source_mean + alpha * image_mean        (the same for var)

``alpha = 0`` is the source model unchanged (t-BN); ``alpha = 1`` ignores the source (p-BN).

A layer becomes a SaN layer by a change of its class alone. Its parameters, buffers, hooks, flags
and state_dict keys stay the very objects they were, so a checkpoint loads before or after, a module
that is used twice needs no care, and taking SaN out again leaves no trace.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.ops import FrozenBatchNorm2d

from selfadapt.checks import first_few
from selfadapt.patterns import matches, nearest

Alpha = float | Mapping[str, float]
"""One alpha for every layer, or an alpha by name pattern; the first pattern that matches counts."""

# Layers whose forward is the normalisation and nothing else. Any other subclass may do more, such
# as timm's fused activation: its own forward is kept, and given a rescaled input that has the same
# result.
STANDARD_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, FrozenBatchNorm2d,
)  # fmt: skip

Backend = Callable[["SaN", Tensor], Tensor | None]
"""Computes a SaN layer of ``STANDARD_NORMS`` in another way; None where it cannot."""


@dataclass(frozen=True)
class ForwardContext:
    """What SaN layers know of the forward pass they are in."""

    num_images: int | None = None
    """Images in the batch. Some networks put windows or tokens of an image into the batch."""
    backend: Backend | None = None
    """Computes layers in the place of the reference in this module."""
    recorded: "dict[SaN, list[tuple[Tensor, Tensor]]] | None" = None
    """Filled with the mixed mean and variance ``(C,)`` of each layer, once for each use."""


_context: ContextVar[ForwardContext] = ContextVar("context", default=ForwardContext())  # noqa: B039


@contextmanager
def forward_context(num_images: int, backend: Backend | None) -> Iterator[None]:
    """Set the context of the forward passes in a ``with`` block."""
    token = _context.set(replace(_context.get(), num_images=num_images, backend=backend))
    try:
        yield
    finally:
        _context.reset(token)


@contextmanager
def record_statistics() -> Iterator[dict["SaN", list[tuple[Tensor, Tensor]]]]:
    """Record the mixed mean and variance ``(C,)`` of SaN layers at each use in a ``with`` block.

    Each forward pass must be of one image, without a backend.
    """
    recorded: dict[SaN, list[tuple[Tensor, Tensor]]] = {}
    token = _context.set(replace(_context.get(), recorded=recorded))
    try:
        yield recorded
    finally:
        _context.reset(token)


Update = tuple[Tensor, Tensor, Tensor, Tensor]
"""Running mean and variance of a layer, and the image's mean and unbiased variance."""


class StatisticsTracker:
    """Updates running statistics towards those of the image, as BatchNorm does in training.

    Args:
        momentum: Weight of the image statistics in each update.
    """

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum
        self.updates: list[Update] = []
        """The updates so far, in their order."""

    def update(self, running: tuple[Tensor, Tensor], image: tuple[Tensor, Tensor]) -> None:
        """Move running mean and variance towards those of the image."""
        self.replay_updates([(*running, *image)])
        self.updates.append((*running, *image))

    def replay_updates(self, updates: Sequence[Update]) -> None:
        """Apply updates again, for layers that are not run again."""
        for running, image in ((0, 2), (1, 3)):
            starts = [update[running] for update in updates]
            ends = [update[image] for update in updates]
            if len(set(map(id, starts))) < len(starts):  # a layer that is used more than once
                for start, end in zip(starts, ends, strict=True):
                    start.lerp_(end, self.momentum)
            elif starts:
                torch._foreach_lerp_(starts, ends, self.momentum)


class SaN:
    """A converted BatchNorm layer: in evaluation it mixes in the statistics of each image.

    In training mode the layer is unchanged.

    Attributes:
        san_alpha: Weight of the image statistics.
        san_tracker: None, or updates the running statistics. Then the layer normalises with image
            statistics alone, as BatchNorm does in training.
        san_base: The class the layer had before.
    """

    san_alpha: float = 0.0
    san_tracker: StatisticsTracker | None = None
    san_base: type[nn.Module]
    training: bool
    running_mean: Tensor
    running_var: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Normalise ``(B, C, ...)`` features, each sample with its own statistics.

        Other arguments are passed on to BatchNorm layers of other libraries.
        """
        x = input
        usual = isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == len(self.running_mean)
        if self.training or args or kwargs or not usual:
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        num_images = _context.get().num_images
        if num_images is None or x.shape[0] == num_images:
            return self._normalize(x)
        if num_images > 1:
            raise RuntimeError("several images cannot be told apart: a batch is not what went in")
        whole = x.transpose(0, 1).reshape(1, x.shape[1], -1, *x.shape[3:])  # parts as pixels
        whole = self._normalize(whole)
        return whole.reshape(x.shape[1], len(x), *x.shape[2:]).transpose(0, 1)

    def _normalize(self, x: Tensor) -> Tensor:
        backend, is_standard = _context.get().backend, self.san_base in STANDARD_NORMS
        if backend is not None and is_standard and (y := backend(self, x)) is not None:
            return y
        if self.san_alpha == 0 and self.san_tracker is None:
            return super().forward(x)  # type: ignore[misc]
        mean, var = self._mixed_statistics(x)  # (B, C)
        if is_standard:
            scale = torch.rsqrt(var + self.eps)
            if self.weight is not None:
                scale = scale * self.weight
            shift = -mean * scale
            if self.bias is not None:
                shift = shift + self.bias
            return _affine(x, scale, shift)
        # The layer will subtract its mean and divide by its deviation: compensate for that.
        scale = torch.sqrt((self.running_var.to(var) + self.eps) / (var + self.eps))
        x = _affine(x, scale, self.running_mean - mean * scale)
        if self.san_tracker is None:
            return super().forward(x)  # type: ignore[misc]
        running = self.running_mean, self.running_var
        try:  # the backward pass needs the present statistics, and a layer may be used twice
            self.running_mean, self.running_var = (buffer.clone() for buffer in running)
            return super().forward(x)  # type: ignore[misc]
        finally:
            self.running_mean, self.running_var = running

    def _mixed_statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pixels = x.reshape(*x.shape[:2], -1)  # (B, C, pixels)
        pixels = pixels.to(torch.promote_types(x.dtype, torch.float32))
        image_var, image_mean = torch.var_mean(pixels, dim=-1, correction=0)
        if self.san_tracker is None:
            alpha = self.san_alpha
            mean = (1 - alpha) * self.running_mean.to(image_mean) + alpha * image_mean
            var = (1 - alpha) * self.running_var.to(image_var) + alpha * image_var
            if (recorded := _context.get().recorded) is not None:
                recorded.setdefault(self, []).append((mean[0], var[0]))
            return mean, var
        num = pixels.shape[-1]
        with torch.no_grad():  # BatchNorm's rule: the running variance is the unbiased one
            unbiased = unbiased_var(image_var.mean(dim=0), num)
            running = self.running_mean, self.running_var
            image = image_mean.mean(dim=0).to(running[0]), unbiased.to(running[1])
            self.san_tracker.update(running, image)
        return image_mean, image_var

    def extra_repr(self) -> str:
        """Show alpha beside what the layer shows of itself."""
        inner = super().extra_repr()  # type: ignore[misc]
        return f"{inner}, alpha={self.san_alpha:g}" if inner else f"alpha={self.san_alpha:g}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.san_base,), self.__dict__


def unbiased_var(var: Tensor, num: int) -> Tensor:
    """Return the unbiased variance of ``num`` numbers whose biased variance this is."""
    return var * (num / max(num - 1, 1))


def _affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return ``x * scale + shift`` in the dtype of ``x``, with (B, C) factors."""
    shape = (*scale.shape, *[1] * (x.dim() - 2))
    return torch.addcmul(shift.reshape(shape), x, scale.reshape(shape)).to(x.dtype)


@cache
def _san_class(base: type[nn.Module]) -> type[nn.Module]:
    members: dict[str, Any] = {"__module__": __name__, "san_base": base}
    if not hasattr(base, "eps"):
        members["eps"] = 1e-5  # of those that write it into their code; layers' own come first
    return type(f"SaN{base.__name__}", (SaN, base), members)


def _rebuild(base: type[nn.Module]) -> nn.Module:
    san_class = _san_class(base)  # type: ignore[arg-type]
    return san_class.__new__(san_class)


@dataclass(frozen=True)
class SaNReport:
    """The layers of a model that SaN converts, and those it skips with the reason."""

    converted: dict[str, float] = field(default_factory=dict)
    """Name and alpha of each converted layer."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Name of each skipped normalisation layer, and why."""

    def __str__(self) -> str:
        num = len(self.converted)
        text = f"SaN mixes the statistics of {num} BatchNorm layer{'s' if num > 1 else ''}"
        if self.skipped:
            text += f" in {', '.join(dict.fromkeys(n.split('.')[0] for n in self.converted))}"
        if not self.converted:
            text = "this model has no BatchNorm layer with running statistics: SaN changes nothing"
        reasons: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            text += f"; skipped {len(names)}, first {names[0]!r} ({reason})"
        return text


def check_alpha(alpha: Alpha) -> None:
    """Raise ValueError unless every alpha lies in [0, 1]."""
    if isinstance(alpha, Mapping) and not (alpha and all(isinstance(key, str) for key in alpha)):
        raise ValueError(f"alpha by layer must map name patterns to numbers, got {alpha!r}")
    for value in alpha.values() if isinstance(alpha, Mapping) else (alpha,):
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= 1:
            raise ValueError(
                "alpha must lie in [0, 1] (0: source statistics, 1: image statistics), "
                f"got {value!r}"
            )


def find_san(model: nn.Module, alpha: Alpha) -> SaNReport:
    """Return what ``apply_san`` would do to ``model``, without doing it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_alpha(alpha)
    report = SaNReport()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            if "BatchNorm" in module.original_name:
                report.skipped[name] = "compiled by TorchScript"
        elif isinstance(getattr(module, "running_mean", None), nn.UninitializedBuffer):
            report.skipped[name] = f"{kind} has not seen an input yet"
        elif _has_source_statistics(module) and "forward" in vars(module):
            report.skipped[name] = f"{kind} has a replaced forward"
        elif _has_source_statistics(module):
            value = _alpha_of(name, alpha)
            if value is None:
                report.skipped[name] = "no pattern of alpha names it"
            else:
                report.converted[name] = value
        elif isinstance(module, _BatchNorm):
            report.skipped[name] = f"{kind} keeps no running statistics, so there is nothing to mix"
        elif "Norm" in kind and next(module.children(), None) is None:
            report.skipped[name] = f"{kind} is not BatchNorm"
    if isinstance(alpha, Mapping):
        layers = [*report.converted, *report.skipped]
        for pattern in alpha:
            if not any(matches(name, pattern) for name in layers):
                guess = nearest(pattern, {part for name in layers for part in name.split(".")})
                raise ValueError(
                    f"alpha names no normalisation layer with {pattern!r};{guess} "
                    f"the layers are {first_few(layers, 6)}"
                )
    return report


def is_batchnorm(module: nn.Module) -> bool:
    """Return True for BatchNorm layers, also the frozen and fused ones of other libraries."""
    kind = type(module).__name__
    return isinstance(module, _BatchNorm) or "BatchNorm" in kind or "ABN" in kind


def _has_source_statistics(module: nn.Module) -> bool:
    if not is_batchnorm(module):
        return False
    return isinstance(getattr(module, "running_mean", None), Tensor) and isinstance(
        getattr(module, "running_var", None), Tensor
    )


def _alpha_of(name: str, alpha: Alpha) -> float | None:
    if not isinstance(alpha, Mapping):
        return alpha
    return next((value for pattern, value in alpha.items() if matches(name, pattern)), None)


def apply_san(model: nn.Module, alpha: Alpha = 0.1) -> SaNReport:
    """Put SaN into every BatchNorm layer of ``model``, in place, until ``remove_san``.

    Called again, it sets the new alpha. Weights, statistics and state_dict keys stay as they are.

    Args:
        model: Any module tree.
        alpha: Weight of the image statistics in [0, 1]; or a mapping from name patterns to such
            weights, for layers by name.

    Returns:
        What was converted and what was left, and why.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        >>> print(apply_san(model, alpha=0.1))
        SaN mixes the statistics of 1 BatchNorm layer
        >>> remove_san(model)
    """
    report = find_san(model, alpha)
    if not report.converted:
        warnings.warn(str(report), stacklevel=2)
    convert(model, report)
    return report


def convert(model: nn.Module, report: SaNReport) -> None:
    """Convert the layers that ``report`` lists to SaN with its alphas."""
    for name, alpha in report.converted.items():
        module = model.get_submodule(name)
        if not isinstance(module, SaN):
            if not _has_source_statistics(module):
                raise ValueError(
                    f"{name} was a BatchNorm layer when this method was created: create it again"
                )
            module.__class__ = _san_class(type(module))  # type: ignore[arg-type]
        module.__dict__["san_alpha"] = float(alpha)


def remove_san(model: nn.Module) -> None:
    """Undo ``apply_san``: every layer of ``model`` is again what it was before."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, SaN):
            if type(module) is not _san_class(module.san_base):  # type: ignore[arg-type]
                raise TypeError(
                    f"a layer is of the class {type(module).__name__} since SaN was applied to it; "
                    "undo that first, it may be a parametrization"
                )
            module.__dict__.pop("san_alpha", None)
            module.__class__ = module.san_base  # type: ignore[assignment]


@contextmanager
def san(model: nn.Module, alpha: Alpha = 0.1) -> Iterator[SaNReport]:
    """Apply SaN to ``model`` in a ``with`` block, and undo it afterwards.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm2d(3)).eval()
        >>> with san(model, alpha=1.0):
        ...     y = model(torch.rand(2, 3, 8, 8))
        >>> bool(y.mean(dim=(2, 3)).abs().max() < 1e-5)
        True
    """
    report = find_san(model, alpha)
    if not report.converted:
        warnings.warn(str(report), stacklevel=3)
    with converted(model, report):
        yield report


@contextmanager
def converted(model: nn.Module, report: SaNReport) -> Iterator[None]:
    """Convert the layers that ``report`` lists for the length of a ``with`` block."""
    layers = [model.get_submodule(name) for name in report.converted]
    before = [(layer, type(layer), layer.__dict__.get("san_alpha")) for layer in layers]

    def restore() -> None:
        for layer, kind, layer_alpha in before:
            layer.__class__ = kind
            layer.__dict__.pop("san_alpha", None)
            if layer_alpha is not None:
                layer.__dict__["san_alpha"] = layer_alpha

    try:
        convert(model, report)
        yield
    finally:
        try:
            restore()
        except BaseException:  # Ctrl-C in the middle of it
            restore()
            raise


@contextmanager
def image_statistics(model: nn.Module, momentum: float) -> Iterator[StatisticsTracker]:
    """Let SaN layers use image statistics alone, and update their running statistics.

    This is BatchNorm's training mode for a single image. Unlike that mode it takes 1x1 maps (their
    variance is 0), needs no process group for SyncBatchNorm, and leaves dropout off.
    """
    layers = [module for module in model.modules() if isinstance(module, SaN)]
    tracker = StatisticsTracker(momentum)
    try:
        for layer in layers:
            layer.san_tracker = tracker
        yield tracker
    finally:
        for layer in layers:
            layer.__dict__.pop("san_tracker", None)
