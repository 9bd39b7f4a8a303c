"""Pixels counted for metrics, in one pass over memory where a GPU has the kernel."""

import torch
from torch import Tensor

from selfadapt.engine.settings import has_kernels
from selfadapt.metrics import BINS, UNIT, Cells, Counts, count
from selfadapt.pseudo import IGNORE


def count_pixels(label: Tensor, probs: Tensor) -> Counts:
    """Count an image, as ``metrics.count`` does."""
    has_kernel = probs.is_cuda and probs.dtype == torch.float32 and has_kernels(probs.device)
    return count(label, probs, _sum_on_gpu if has_kernel else None)


def _sum_on_gpu(label: Tensor, probs: Tensor, cells: Cells) -> Tensor:
    from selfadapt.engine.kernels.counting import add_pixels  # needs Triton

    return add_pixels(label, probs, sum(cells), IGNORE=IGNORE, BINS=BINS, UNIT=UNIT)
