"""Pixels counted by class and confidence, in one pass over the probabilities on a GPU (Triton)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

PIXELS = 256
"""Pixels that a program counts."""
PARTS = 64
"""Copies of the sums that neighbouring pixels take in turn, so that few additions collide."""
MAX_CELLS = 2**22
"""Cells of all parts together, unless there is only one part."""


@triton.jit(do_not_specialize=["pixels", "parts"])
def count_pixels(
    probs, label, sums, pixels, parts, classes, cells,
    IGNORE: tl.constexpr, BINS: tl.constexpr, UNIT: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Add each pixel to its cell by true and predicted class, and to that by confidence.

    Pixels without a class or with NaN as probability count for an extra class, the last.
    """
    p = tl.program_id(0) * P + tl.arange(0, P)
    inside = p < pixels
    best = tl.load(probs + p, mask=inside, other=0)
    predicted = tl.zeros((P,), tl.int32)
    for c in range(1, classes):
        probs += pixels
        prob = tl.load(probs + p, mask=inside, other=0)
        better = (prob > best) | (prob != prob)
        predicted = tl.where(better, c, predicted)
        best = tl.where(better, prob, best)
    true = tl.load(label + p, mask=inside, other=IGNORE).to(tl.int32)
    labelled = inside & (true != IGNORE)
    fits = (true >= 0) & (true < classes) & (best == best)
    true = tl.where(fits, true, classes)
    best = tl.where(fits, best, 0.0).to(tl.float64)
    bin_index = tl.minimum(tl.maximum((best * BINS).to(tl.int32), 0), BINS - 1)
    above = best * UNIT + 0.5
    units = above.to(tl.int64)
    units -= ((units.to(tl.float64) == above) & (units % 2 == 1)).to(tl.int64)  # halves to even
    sums += p % parts * cells
    ones = labelled.to(tl.int64)
    hit = (predicted == true).to(tl.int32)
    bin_index += true * BINS
    tl.atomic_add(sums + true * classes + predicted, ones, mask=labelled, sem="relaxed")
    sums += (classes + 1) * classes
    tl.atomic_add(sums + bin_index * 2 + hit, ones, mask=labelled, sem="relaxed")
    sums += (classes + 1) * BINS * 2
    tl.atomic_add(sums + bin_index, units, mask=labelled, sem="relaxed")


def add_pixels(label: Tensor, probs: Tensor, cells: int, **constants: int) -> Tensor:
    """Return the sums over an image's pixels ``(cells,)``, as ``metrics.count`` has them.

    Args:
        label: True classes ``(H, W)``.
        probs: Class probabilities ``(C, H, W)``, float32.
        cells: How many sums there are.
        constants: Compile-time constants of the kernel.
    """
    parts = max(1, min(PARTS, MAX_CELLS // cells))
    sums = torch.zeros(parts, cells, dtype=torch.int64, device=probs.device)
    with torch.cuda.device_of(probs):
        count_pixels[(-(-label.numel() // PIXELS),)](
            probs.contiguous(), label.contiguous(), sums, label.numel(), parts, len(probs),
            cells, P=PIXELS, **constants,
        )  # fmt: skip
    return sums.sum(dim=0)
