"""Neighbouring operations in one pass over memory, on a GPU.

A SaN layer is mostly followed by a ReLU, or by the sum with a shortcut and a ReLU; the scores of a
network by upsampling and a cross-entropy. Computed separately, each reads and writes all of its
input. Here the first of them returns a tensor that is not computed yet. The next operation is
either fused with it, or finds it computed as usual. So no network has to be known, or changed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from selfadapt.engine import san_batchnorm
from selfadapt.engine.kernels import launch
from selfadapt.norm import SaN, forward_context

RELUS = {F.relu, torch.relu, Tensor.relu, F.relu_, torch.relu_, Tensor.relu_}
IN_PLACE_RELUS = {F.relu_, torch.relu_, Tensor.relu_}
SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__}
IN_PLACE_SUMS = {Tensor.add_, Tensor.__iadd__}
PROPERTIES = ("shape", "dtype", "device", "ndim", "is_cuda", "layout")
FACTS = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__,
    *(getattr(Tensor, name).__get__ for name in PROPERTIES),
}  # fmt: skip
"""Metadata queries that need no value."""
CLASSIFIER = 64
"""A 1x1 convolution with a bias and no more outputs than these counts as a classifier."""


class DeferredTensor(Tensor):
    """A tensor that is computed when it is needed."""

    value: Tensor | None
    """The result, once it is computed."""

    @staticmethod
    def __new__(cls, parts: Sequence[Any], size: Sequence[int], *args: Any) -> "DeferredTensor":
        """Make a tensor without storage, with the dtype and device of the first part."""
        needs_grad = any(part.requires_grad for part in parts if part is not None)
        return Tensor._make_wrapper_subclass(
            cls, torch.Size(size), dtype=parts[0].dtype, device=parts[0].device,
            requires_grad=needs_grad and torch.is_grad_enabled(),
        )  # fmt: skip

    def __init__(self, parts: Sequence[Any], size: Sequence[int]) -> None:
        self.value = None
        self.changes = 0
        self.parts = parts
        self._versions = [part._version for part in parts if part is not None]

    @property
    def version(self) -> int:
        """How often it was changed in place, as ``_version`` of other tensors."""
        return self.changes + (0 if self.value is None else self.value._version)

    def compute(self) -> Tensor:
        """Return the result without any fusion."""
        raise NotImplementedError

    def fuse_with(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the result of a function fused with this one, or NotImplemented."""
        return NotImplemented

    def materialize(self) -> Tensor:
        """Return this tensor, computed."""
        if self.value is None:
            self.value = self.compute_checked()
        return self.value

    def compute_checked(self, **kwargs: Any) -> Tensor:
        """Compute; raise RuntimeError if an input was changed in place meanwhile."""
        if self._versions != [part._version for part in self.parts if part is not None]:
            raise RuntimeError("a tensor that others are still computed from was changed in place")
        with torch._C.DisableTorchFunction():
            return self.compute(**kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for arg in args:
            if isinstance(arg, DeferredTensor) and arg.value is None:
                result = arg.fuse_with(func, args, kwargs)
                if result is not NotImplemented:
                    return result
        args, kwargs = tree_map_only(DeferredTensor, DeferredTensor.materialize, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse what bypassed ``__torch_function__``: there is no storage to work on."""
        raise RuntimeError(f"{func} got a tensor that is not computed yet")


class Normalized(DeferredTensor):
    """Output of a SaN layer, to be fused with ReLU and the sum with a shortcut."""

    def __init__(self, parts: Sequence[Any], size: Sequence[int], alpha: float) -> None:
        super().__init__(parts, size)  # input, weight, bias, statistics, shortcut
        self.alpha = alpha

    def compute(self, relu: bool = False) -> Tensor:
        """Normalise, add the shortcut, and apply ReLU on request."""
        return launch.Normalize.apply(*self.parts[:4], self.alpha, self.parts[4], relu)

    def fuse_with(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Fuse with ReLU and sums."""
        if func in RELUS:
            inplace = func in IN_PLACE_RELUS or kwargs.get("inplace") or args[1:] == (True,)
            result = self.compute_checked(relu=True)
            if inplace:
                self.value, self.changes = result, self.changes + 1
            return result
        if func in SUMS and len(args) == 2 and not kwargs and self.parts[4] is None:
            other = args[1] if args[0] is self else args[0]
            if other is self or not isinstance(other, Tensor) or other.shape != self.shape:
                return NotImplemented
            if func in IN_PLACE_SUMS and args[0] is not self:
                return NotImplemented
            other = other.materialize() if isinstance(other, DeferredTensor) else other
            if other.dtype != self.dtype or not launch.channels_are_last(other):
                return NotImplemented
            parts = (*self.parts[:4], other)
            if func in IN_PLACE_SUMS:
                self.parts, self.changes = parts, self.changes + 1
                self._versions.append(other._version)
                return self
            return Normalized(parts, self.shape, self.alpha)
        return NotImplemented


class Upsampled(DeferredTensor):
    """Scores upsampled to the size of the image, to be fused with a cross-entropy."""

    def __init__(self, parts: Sequence[Any], size: Sequence[int], aligned: bool) -> None:
        super().__init__(parts, size)
        (self.scores,), self.aligned = parts, aligned

    def compute(self) -> Tensor:
        """Upsample."""
        return F.interpolate(
            self.scores, self.shape[-2:], mode="bilinear", align_corners=self.aligned
        )

    def fuse_with(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Fuse with a cross-entropy; return self for operations that change nothing."""
        if func is Tensor.to and not kwargs and args[1:] == (self.dtype,):
            return self
        if func is Tensor.__getitem__ and _takes_all(args[1], self.shape):
            return self
        if func is F.cross_entropy and len(args) == 2 and args[0] is self:
            target, weight = args[1], kwargs["weight"]
            fits = target.dtype == torch.int64 and target.shape == (1, *self.shape[-2:])
            fits = fits and (weight is None or weight.dtype == torch.float32)
            if fits and kwargs["reduction"] == "mean":
                weight = None if weight is None else weight.detach().contiguous()
                return launch.UpsampledCrossEntropy.apply(
                    self.scores, target[0], self.aligned, kwargs["ignore_index"], weight,
                    kwargs["label_smoothing"],
                )  # fmt: skip
        return NotImplemented


def _takes_all(index: Any, shape: torch.Size) -> bool:
    """Return True if ``[..., :height, :width]`` is all there is."""
    if not isinstance(index, tuple) or len(index) != 3 or index[0] is not Ellipsis:
        return False
    return all(
        isinstance(part, slice) and part == slice(None, length)
        for part, length in zip(index[1:], shape[-2:], strict=True)
    )


class Fusing(TorchFunctionMode):
    """Fuses operations where that is faster; everything else runs as usual."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function, or an equivalent of it."""
        kwargs = kwargs or {}
        if func is F.interpolate and (deferred := _upsampled(*args, **kwargs)) is not None:
            return deferred
        if func is F.interpolate and kwargs["mode"] == "bilinear":
            return _in_full_precision(func, *args, **kwargs)
        if func is torch.conv2d and (result := _as_product(*args, **kwargs)) is not None:
            return result
        return func(*args, **kwargs)


def _in_full_precision(interpolate: Callable[..., Tensor], x: Tensor, **kwargs: Any) -> Tensor:
    """Upsample what may be scores in float32: interpolating 16-bit numbers loses precision."""
    if x.dim() == 4 and x.shape[1] <= launch.MAX_CLASSES and x.dtype in launch.HALF_DTYPES:
        x = x.float()
    return interpolate(x, **kwargs)


def _upsampled(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor | None:
    if type(input) is not Tensor or not input.requires_grad or not launch.takes_scores(input):
        return None
    if mode != "bilinear" or antialias:
        return None
    if size is None and isinstance(scale_factor, int | float) and scale_factor == int(scale_factor):
        size = tuple(length * int(scale_factor) for length in input.shape[-2:])
    if not isinstance(size, tuple) or len(size) != 2:
        return None
    if size[0] < input.shape[-2] or size[1] < input.shape[-1]:
        return None
    return Upsampled([input], (*input.shape[:2], *size), bool(align_corners))


def _as_product(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """Return a 1x1 convolution as the matrix product it is."""
    is_pointwise = weight.shape[-2:] == (1, 1) and groups == 1
    is_dense = stride in (1, (1, 1)) and padding in (0, (0, 0))
    if not (is_pointwise and is_dense and input.dim() == 4 and launch.takes_products(input)):
        return None
    if isinstance(input, DeferredTensor):
        input = input.materialize()
    if not launch.channels_are_last(input):
        return None
    pixels, weight = input.permute(0, 2, 3, 1), weight.flatten(1)
    if bias is None or len(weight) > CLASSIFIER:
        return F.linear(pixels, weight, bias).permute(0, 3, 1, 2)
    scores = launch.Scores.apply(pixels.flatten(0, 2), weight, bias)
    return scores.unflatten(0, pixels.shape[:3]).permute(0, 3, 1, 2)


def normalize(layer: SaN, x: Tensor) -> Tensor | None:
    """Return the output of a SaN layer, deferred; None if no kernel takes its input."""
    x = x.materialize() if isinstance(x, DeferredTensor) else x
    tracker = layer.san_tracker
    running = layer.running_mean, layer.running_var
    rows = [row for row in (*running, layer.weight, layer.bias) if row is not None]
    is_taken = launch.takes_features(x) and all(row.is_contiguous() for row in rows)
    if not is_taken or (tracker is not None and len(x) > 1):
        return san_batchnorm.normalize(layer, x)
    momentum = None if tracker is None else tracker.momentum
    with torch.no_grad():
        vectors = launch.statistics(
            x, *running, layer.weight, layer.bias, layer.eps, layer.san_alpha, momentum
        )
    if tracker is not None:
        tracker.updates.append((*running, vectors[0, 2], vectors[0, 5]))
    alpha = layer.san_alpha if tracker is None else 1.0
    return Normalized((x, layer.weight, layer.bias, vectors, None), x.shape, alpha)


_apply = Function.__dict__["apply"].__func__
_lock = Lock()
_fusing = 0


def _apply_computed(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    """Materialize the arguments of a custom autograd function: modes do not see its call."""
    args, kwargs = tree_map_only(DeferredTensor, DeferredTensor.materialize, (args, kwargs))
    return _apply(cls, *args, **kwargs)


@contextmanager
def _materialized_arguments() -> Iterator[None]:
    global _fusing
    with _lock:
        _fusing += 1
        Function.apply = classmethod(_apply_computed)  # type: ignore[assignment]
    try:
        yield
    finally:
        with _lock:
            _fusing -= 1
            if not _fusing:
                Function.apply = classmethod(_apply)  # type: ignore[assignment]


@contextmanager
def fusing(num_images: int) -> Iterator[None]:
    """Fuse operations in a ``with`` block that runs a network on ``num_images`` images."""
    with _materialized_arguments(), Fusing(), forward_context(num_images, normalize):
        yield
