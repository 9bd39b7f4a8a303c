"""The kernels as differentiable functions."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from selfadapt.engine.kernels import triton_kernels as kernels

MOMENTS, SUMS = (32, 64), (64, 64)
"""Pixels and channels per program of a reduction kernel: measured on an H200."""
TILE = (32, 128)
"""Pixels and channels per program of the other kernels."""
GRADIENT_PROGRAMS, MOMENT_PROGRAMS = 528, 1056
"""Programs of the reduction kernels: four and eight on each processor of an H200."""
SPLITS = 256
"""Chunks that the pixels of a sample are divided into, at most."""
HALF_DTYPES = (torch.bfloat16, torch.float16)
MAX_CLASSES = 256
"""More scores than these are upsampled as usual."""


def channels_are_last(x: Tensor) -> bool:
    """Return True if features lie in memory as the kernels need it."""
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


def takes_features(x: Tensor) -> bool:
    """Return True if features can be normalised by the kernels."""
    kinds = (*HALF_DTYPES, torch.float32)
    return x.is_cuda and x.dtype in kinds and x.numel() > 0 and channels_are_last(x)


def takes_scores(scores: Tensor) -> bool:
    """Return True if the kernels can take the cross-entropy of scores once they are upsampled."""
    return (
        scores.is_cuda and scores.dtype == torch.float32
        and scores.dim() == 4 and len(scores) == 1 and scores.shape[1] <= MAX_CLASSES
    )  # fmt: skip


def takes_products(x: Tensor) -> bool:
    """Return True if 1x1 convolutions are faster as matrix products."""
    return x.is_cuda and x.dtype in HALF_DTYPES and torch.is_autocast_enabled("cuda")


def _tiles(x: Tensor) -> tuple[int, tuple[int, int, int]]:
    """Return how many channels a program takes, and how many programs there are."""
    samples, channels, height, width = x.shape
    block = min(TILE[1], _power(channels))
    return block, (-(-height * width // TILE[0]), -(-channels // block), samples)


def _chunks(
    x: Tensor, tile: tuple[int, int], programs: int
) -> tuple[int, int, tuple[int, int, int]]:
    """Return how many channels and pixels a program takes that adds up, and how many there are."""
    samples, channels, height, width = x.shape
    pixels = height * width
    block = min(tile[1], _power(channels))
    blocks = -(-channels // block)
    splits = max(1, min(SPLITS, programs // (blocks * samples)))
    chunk = -(-pixels // (splits * tile[0])) * tile[0]
    return block, chunk, (-(-pixels // chunk), blocks, samples)


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def statistics(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    alpha: float,
    momentum: float | None,
) -> Tensor:
    """Return the statistics of a normalisation for each sample: ``(B, 6, C)``.

    These are mean, 1 / deviation, the image's own mean, scale, shift, and where running statistics
    follow the image, the image's unbiased variance.
    """
    samples, channels, height, width = x.shape
    block, chunk, grid = _chunks(x, MOMENTS, MOMENT_PROGRAMS)
    pixels, splits = height * width, grid[0]
    vectors = torch.empty(samples, 6, channels, device=x.device)
    chunks = vectors
    mixed = alpha > 0 or momentum is not None
    if mixed:
        chunks = torch.empty(samples, 2, splits, channels, device=x.device)
        kernels.moments[grid](x, chunks, pixels, channels, chunk, splits, P=MOMENTS[0], C=block)
    few = min(16, block)
    kernels.combine[-(-channels // few), samples](
        chunks, running_mean, running_var, running_mean if weight is None else weight,
        running_mean if bias is None else bias, vectors, pixels, channels, chunk, splits,
        float(alpha), float(eps), float(momentum or 0),
        MIXED=mixed, UPDATES=momentum is not None, WEIGHT=weight is not None, BIAS=bias is not None,
        S=_power(splits), C=few,
    )  # fmt: skip
    return vectors


class Normalize(torch.autograd.Function):
    """Scale, shift, the sum with a shortcut, and ReLU."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        vectors: Tensor,
        alpha: float,
        shortcut: Tensor | None,
        relu: bool,
    ) -> Tensor:
        """Return the normalised features."""
        y = torch.empty_like(x)
        block, grid = _tiles(x)
        kernels.apply[grid](
            x, x if shortcut is None else shortcut, y, vectors, x[0, 0].numel(), x.shape[1],
            SHORTCUT=shortcut is not None, RELU=relu, P=TILE[0], C=block,
        )  # fmt: skip
        ctx.save_for_backward(x, y if relu and shortcut is not None else None, vectors)
        ctx.alpha, ctx.relu, ctx.shortcut = alpha, relu, shortcut is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of input, weight, bias and shortcut."""
        x, y, vectors = ctx.saved_tensors
        gradient = gradient.to(x.dtype).contiguous(memory_format=torch.channels_last)
        samples, channels, height, width = x.shape
        block, chunk, grid = _chunks(x, SUMS, GRADIENT_PROGRAMS)
        pixels, splits = height * width, grid[0]
        grad_x = grad_weight = grad_bias = None
        grad_shortcut = gradient if ctx.shortcut else None
        relu, masking = ctx.relu, ctx.relu and ctx.shortcut
        if masking:
            grad_shortcut = torch.empty_like(x)
        y = x if y is None else y
        chunks = torch.empty(samples, 2, splits, channels, device=x.device)
        kernels.gradient_sums[grid](
            gradient, x, y, gradient if grad_shortcut is None else grad_shortcut, vectors, chunks,
            pixels, channels, chunk, splits,
            SHORTCUT=ctx.shortcut, RELU=relu, P=SUMS[0], C=block,
        )  # fmt: skip
        terms = torch.empty(samples, 2, channels, device=x.device)
        grad_affine = torch.empty(2, channels, device=x.device)
        few = min(16, block)
        kernels.gradient_combine[(-(-channels // few),)](
            chunks, vectors, terms, grad_affine[0], grad_affine[1], samples, pixels, channels,
            splits, float(ctx.alpha), S=_power(splits), C=few,
        )  # fmt: skip
        if ctx.needs_input_grad[1]:
            grad_weight = grad_affine[0]
        if ctx.needs_input_grad[2]:
            grad_bias = grad_affine[1]
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x)
            block, grid = _tiles(x)
            kernels.gradient_apply[grid](  # after masking, ReLU is applied already
                grad_shortcut if masking else gradient, x, y, grad_x, vectors, terms, pixels,
                channels, SHORTCUT=ctx.shortcut, RELU=relu and not masking, P=TILE[0], C=block,
            )  # fmt: skip
        return grad_x, grad_weight, grad_bias, None, None, grad_shortcut, None


class Scores(torch.autograd.Function):
    """A 1x1 convolution to a few classes ``(P, in) -> (P, out)``, with scores in float32.

    Matrix products want sizes that are multiples of 8, unlike 19 classes: it is padded.
    """

    @staticmethod
    def forward(ctx: Any, pixels: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the scores."""
        number = len(weight)
        padded = pixels.new_zeros(number + -number % 8, weight.shape[1])
        padded[:number] = weight
        ctx.save_for_backward(pixels, padded)
        return _product(pixels, padded.T)[:, :number] + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of pixels, weight and bias."""
        pixels, padded = ctx.saved_tensors
        number = gradient.shape[1]
        grad_scores = pixels.new_zeros(len(pixels), len(padded))
        grad_scores[:, :number] = gradient
        grad_pixels = grad_scores @ padded if ctx.needs_input_grad[0] else None
        return grad_pixels, _product(grad_scores.T, pixels)[:number], gradient.sum(dim=0)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a matrix product in float32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _positions(
    small: int, large: int, aligned: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return where the pixels of each cell start, and how far each pixel is into its cell."""
    at = torch.arange(large, device=device, dtype=torch.float32)
    if aligned:
        at = at * ((small - 1) / (large - 1) if large > 1 else 0.0)
    else:
        at = ((at + 0.5) * (small / large) - 0.5).clamp_min(0)
    cell = at.to(torch.int32).clamp_max(small - 1)
    cells = torch.arange(small + 1, device=device, dtype=torch.int32)
    return torch.searchsorted(cell, cells, out_int32=True), at - cell


class UpsampledCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of scores ``(1, C, h, w)``, upsampled to the size of a label."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, label: Tensor, aligned: bool, ignore: int,
        weight: Tensor | None = None, smoothing: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """Return the loss, as ``F.cross_entropy`` does; its gradient is computed with it."""
        _, classes, height, width = scores.shape
        rows = scores[0].permute(1, 2, 0).contiguous()
        first_y, part_y = _positions(height, label.shape[0], aligned, scores.device)
        first_x, part_x = _positions(width, label.shape[1], aligned, scores.device)
        losses = torch.empty(height * width, device=scores.device)
        corners = torch.empty(height * width, 4, classes, device=scores.device)
        block = max(16, _power(classes))
        soft = weight is not None or smoothing > 0
        if soft and weight is None:
            weight = torch.ones(classes, device=scores.device)
        kernels.cell_losses[width, height](
            rows, label, first_y, first_x, part_y, part_x, weight, losses, corners, height, width,
            label.shape[1], classes, ignore, smoothing, SOFT=soft, K=max(4, 1024 // block), C=block,
            num_warps=1,
        )  # fmt: skip
        kept = label != ignore
        count = kept.sum() if weight is None else (weight[label.where(kept, 0)] * kept).sum()
        count = count.masked_fill(count == 0, 1)  # no labels, no loss
        if scores.requires_grad:
            grad_scores = torch.empty(height, width, classes, device=scores.device)
            kernels.gather_corners[width, height](
                corners, grad_scores, count, height, width, classes, C=block
            )
            ctx.save_for_backward(grad_scores)
        return losses.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient of the scores."""
        (grad_scores,) = ctx.saved_tensors
        return (grad_scores * gradient).permute(2, 0, 1)[None], *[None] * 5
