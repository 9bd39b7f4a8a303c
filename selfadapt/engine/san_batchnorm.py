"""SaN (``norm.py``, Eq. 7-8) by PyTorch's own BatchNorm kernels.

It takes fewer passes over memory than the reference. Gradients can be taken once. The channels of
several images count as those of one, so that each has its own statistics.

The image's mean ``mu`` and variance are mixed with the source's to ``m`` and ``v``, weighted with
``alpha``. With ``s = 1 / sqrt(v + eps)`` the output is ``(x - m) * s * weight + bias``: BatchNorm's
kernel for evaluation gives it, and gradients as if the statistics were constant. What the image's
share in them adds to the gradient of the input is, over ``n`` pixels,

    - alpha / n * weight * s * (grad_bias + s * grad_weight * (x - mu))
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from selfadapt.norm import SaN, unbiased_var

HALF_DTYPES = (torch.float16, torch.bfloat16)


def normalize(layer: SaN, x: Tensor) -> Tensor | None:
    """Return the output of a SaN layer; None if the kernels do not take its input."""
    running, affine = (layer.running_mean, layer.running_var), (layer.weight, layer.bias)
    tracker = layer.san_tracker
    if (layer.san_alpha == 0 and tracker is None) or not can_mix(x, *running, *affine):
        return None
    if tracker is None:
        if len(x) == 1:
            return MixedNorm.apply(x, *running, *affine, layer.san_alpha, layer.eps)[0]
        vectors = [None if v is None else v.repeat(len(x)) for v in (*running, *affine)]
        channels = x.reshape(1, -1, *x.shape[2:])
        return MixedNorm.apply(channels, *vectors, layer.san_alpha, layer.eps)[0].reshape(x.shape)
    if len(x) > 1:
        return None
    num = x[0, 0].numel()
    if x.is_cuda or num == 1:
        y, mean, var = MixedNorm.apply(x, *running, *affine, 1.0, layer.eps)
        image = mean, unbiased_var(var, num)
    else:  # as it is in training, and so in the released code: equal to the last bit
        image = torch.zeros_like(running[0]), torch.zeros_like(running[1])
        y = F.batch_norm(x, *image, *affine, training=True, momentum=1.0, eps=layer.eps)
    tracker.update(running, image)
    return y


def can_mix(x: Tensor, *vectors: Tensor | None) -> bool:
    """Return True if the kernels take these features, statistics, weight and bias.

    Not under export, compilation or functional transforms, which look at the operations themselves.
    """
    kinds = {vector.dtype for vector in vectors if vector is not None}
    if x.numel() == 0 or len(kinds) != 1 or (len(x) > 1 and not x.is_contiguous()):
        return False
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.onnx.is_in_onnx_export():
        return False
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    (kind,) = kinds
    if x.is_cuda:  # steps have their own kernels
        predicts = not torch.is_grad_enabled()
        return predicts and kind == torch.float32 and x.dtype in (*HALF_DTYPES, torch.float32)
    return x.device.type == "cpu" and kind == x.dtype and kind in (torch.float32, torch.float64)


def image_statistics_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance ``(C,)`` of one image's features ``(1, C, ...)``."""
    if x.is_cuda:
        mean, inverse = torch.batch_norm_stats(x, 1e-20)  # with 0, of 0 it makes 0
        return mean, inverse.pow(-2)
    return torch.batch_norm_update_stats(x, None, None, 0.0)


class MixedNorm(torch.autograd.Function):
    """Normalises one image's features; also returns the image's own mean and variance."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        alpha: float,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise ``x`` ``(1, C, ...)``."""
        image_mean, image_var = image_statistics_of(x)
        # Not lerp, which makes NaN of a variance that overflowed to inf when it was stored in fp16.
        mean = torch.add((1 - alpha) * running_mean, image_mean, alpha=alpha)
        var = torch.add((1 - alpha) * running_var, image_var, alpha=alpha)
        ctx.save_for_backward(x, weight, mean, var, image_mean)
        ctx.alpha, ctx.eps = alpha, eps
        ctx.mark_non_differentiable(image_mean, image_var)
        y = F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
        return y, image_mean, image_var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> Any:
        """Return the gradients of input, weight and bias."""
        x, weight, mean, var, image_mean = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, mean, var, None, None, False, ctx.eps, [True, True, True]
        )
        if ctx.needs_input_grad[0] and ctx.alpha:
            inverse = torch.rsqrt(var + ctx.eps)
            share = -ctx.alpha * inverse / (x.numel() / len(mean))
            if weight is not None:
                share = share * weight
            linear = share * inverse * grad_weight
            shape = (1, -1, *[1] * (x.dim() - 2))
            constant = (share * grad_bias - linear * image_mean).reshape(shape)
            grad_x = grad_x + torch.addcmul(constant, x, linear.reshape(shape)).to(grad_x.dtype)
        needed = ctx.needs_input_grad
        grad_weight = grad_weight if needed[3] else None
        return grad_x, None, None, grad_weight, grad_bias if needed[4] else None, None, None
