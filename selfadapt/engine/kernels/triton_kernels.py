"""GPU kernels with few passes over memory, written in Triton.

Features are ``(B, C, H, W)`` with the channels last in memory: rows of C numbers, one for each of
the P = H * W pixels of a sample.

    moments    mean and spread of every channel, in chunks of pixels        one read
    combine    the chunks together, mixed with the source statistics        small
    apply      scale, shift, the sum with a shortcut, ReLU                   one read, one write

and the same again for gradients. Spread is summed up around the first pixel's value, so that a
mean far from zero loses no digits. The cross-entropy of upsampled scores never makes the large map:
the pixels between four neighbouring scores are processed together.
"""

import triton
import triton.language as tl

COUNTS = ["pixels", "chunk", "splits", "samples"]
"""Numbers that a kernel is not specialized for."""


@triton.jit(do_not_specialize=COUNTS)
def moments(x, chunks, pixels, channels, chunk, splits, P: tl.constexpr, C: tl.constexpr):
    """Write mean and sum of squared deviations of each channel, chunk by chunk."""
    split, sample = tl.program_id(0), tl.program_id(2)
    c = tl.program_id(1) * C + tl.arange(0, C)
    valid = c < channels
    first = split * chunk
    last = tl.minimum(first + chunk, pixels)
    x += (sample.to(tl.int64) * pixels + first) * channels
    pivot = tl.load(x + c, mask=valid, other=0).to(tl.float32)
    p = tl.arange(0, P)
    at = p[:, None] * channels + c[None, :]
    total = tl.zeros((P, C), tl.float32)
    square = tl.zeros((P, C), tl.float32)
    for start in range(first, last, P):
        inside = (start + p < last)[:, None] & valid[None, :]
        value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
        x += P * channels
        value = tl.where(inside, value - pivot[None, :], 0.0)
        total += value
        square += value * value
    number = (last - first).to(tl.float32)
    offset = tl.sum(total, 0) / number
    spread = tl.sum(square, 0) - offset * offset * number
    chunks += (sample * 2 * splits + split) * channels + c
    tl.store(chunks, pivot + offset, mask=valid)
    tl.store(chunks + splits * channels, spread, mask=valid)


@triton.jit(do_not_specialize=COUNTS)
def combine(
    chunks, running_mean, running_var, weight, bias, vectors, pixels, channels, chunk, splits,
    alpha, eps, momentum,
    MIXED: tl.constexpr, UPDATES: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    S: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write mean, 1 / deviation, image mean, scale and shift of each channel."""
    sample = tl.program_id(1)
    c = tl.program_id(0) * C + tl.arange(0, C)
    valid = c < channels
    mean = tl.load(running_mean + c, mask=valid, other=0).to(tl.float32)
    var = tl.load(running_var + c, mask=valid, other=1).to(tl.float32)
    image_mean = mean
    if MIXED:
        s = tl.arange(0, S)
        is_chunk = (s < splits)[:, None] & valid[None, :]
        number = tl.minimum(chunk, pixels - s * chunk).to(tl.float32)[:, None]
        at = (sample * 2 * splits + s)[:, None] * channels + c[None, :]
        means = tl.load(chunks + at, mask=is_chunk, other=0)
        spreads = tl.load(chunks + splits * channels + at, mask=is_chunk, other=0)
        image_mean = tl.sum(tl.where(is_chunk, means * number, 0.0), 0) / pixels
        off = means - image_mean[None, :]
        image_var = tl.sum(tl.where(is_chunk, spreads + off * off * number, 0.0), 0) / pixels
        image_var = tl.maximum(image_var, 0.0)
        if UPDATES:
            unbiased = image_var * (pixels / tl.maximum(pixels - 1, 1).to(tl.float32))
            new_mean = mean + momentum * (image_mean - mean)
            new_var = var + momentum * (unbiased - var)
            tl.store(running_mean + c, new_mean, mask=valid)
            tl.store(running_var + c, new_var, mask=valid)
            mean, var = image_mean, image_var
            tl.store(vectors + (sample * 6 + 5) * channels + c, unbiased, mask=valid)
        else:
            mean = (1 - alpha) * mean + alpha * image_mean
            var = (1 - alpha) * var + alpha * image_var
    inverse = 1 / tl.sqrt(var + eps)
    scale = inverse
    if WEIGHT:
        scale *= tl.load(weight + c, mask=valid, other=1).to(tl.float32)
    shift = -mean * scale
    if BIAS:
        shift += tl.load(bias + c, mask=valid, other=0).to(tl.float32)
    vectors += sample * 6 * channels + c
    tl.store(vectors, mean, mask=valid)
    tl.store(vectors + channels, inverse, mask=valid)
    tl.store(vectors + 2 * channels, image_mean, mask=valid)
    tl.store(vectors + 3 * channels, scale, mask=valid)
    tl.store(vectors + 4 * channels, shift, mask=valid)


@triton.jit(do_not_specialize=COUNTS)
def apply(
    x, shortcut, y, vectors, pixels, channels,
    SHORTCUT: tl.constexpr, RELU: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write ``x * scale + shift``, with a shortcut added and ReLU applied on request."""
    sample = tl.program_id(2)
    c = tl.program_id(1) * C + tl.arange(0, C)
    p = tl.arange(0, P)
    first = tl.program_id(0) * P
    valid = c < channels
    inside = (first + p < pixels)[:, None] & valid[None, :]
    start = (sample.to(tl.int64) * pixels + first) * channels
    at = p[:, None] * channels + c[None, :]
    vectors += sample * 6 * channels + c
    scale = tl.load(vectors + 3 * channels, mask=valid, other=0)
    shift = tl.load(vectors + 4 * channels, mask=valid, other=0)
    value = tl.load(x + start + at, mask=inside, other=0).to(tl.float32)
    value = value * scale[None, :] + shift[None, :]
    if SHORTCUT:
        value += tl.load(shortcut + start + at, mask=inside, other=0).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + start + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def kept_gradient(
    gradient, x, y, at, inside, scale, shift, SHORTCUT: tl.constexpr, RELU: tl.constexpr
):
    """Return the gradient behind ReLU, and the feature before the normalisation."""
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    grad = tl.load(gradient + at, mask=inside, other=0).to(tl.float32)
    if RELU:
        if SHORTCUT:
            is_positive = tl.load(y + at, mask=inside, other=0) > 0
        else:
            is_positive = value * scale[None, :] + shift[None, :] > 0
        grad = tl.where(is_positive, grad, 0.0)
    return grad, value


@triton.jit(do_not_specialize=COUNTS)
def gradient_sums(
    gradient, x, y, masked, vectors, chunks, pixels, channels, chunk, splits,
    SHORTCUT: tl.constexpr, RELU: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the sums of gradient and of gradient times deviation, chunk by chunk."""
    split, sample = tl.program_id(0), tl.program_id(2)
    c = tl.program_id(1) * C + tl.arange(0, C)
    valid = c < channels
    first = split * chunk
    last = tl.minimum(first + chunk, pixels)
    vector = vectors + sample * 6 * channels + c
    mean = tl.load(vector, mask=valid, other=0)
    scale = tl.load(vector + 3 * channels, mask=valid, other=0)
    shift = tl.load(vector + 4 * channels, mask=valid, other=0)
    total = tl.zeros((P, C), tl.float32)
    product = tl.zeros((P, C), tl.float32)
    p = tl.arange(0, P)
    at = p[:, None] * channels + c[None, :]
    for start in range(first, last, P):
        inside = (start + p < last)[:, None] & valid[None, :]
        row = (sample.to(tl.int64) * pixels + start) * channels
        grad, value = kept_gradient(
            gradient + row, x + row, y + row, at, inside, scale, shift, SHORTCUT, RELU
        )
        if SHORTCUT and RELU:
            tl.store(masked + row + at, grad.to(masked.dtype.element_ty), mask=inside)
        total += grad
        product += grad * (value - mean[None, :])
    chunks += (sample * 2 * splits + split) * channels + c
    tl.store(chunks, tl.sum(total, 0), mask=valid)
    tl.store(chunks + splits * channels, tl.sum(product, 0), mask=valid)


@triton.jit(do_not_specialize=COUNTS)
def gradient_combine(
    chunks, vectors, terms, weight_gradient, bias_gradient, samples, pixels, channels, splits,
    alpha, S: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the gradients of weight and bias, and what the statistics add to that of the input.

    The latter is ``-alpha / pixels * scale * (total + inverse**2 * product * (x - mean))``, as in
    ``san_batchnorm.py``: ``scale`` is ``weight * s``, ``inverse`` is ``s``, and the sums ``total``
    and ``product`` are ``grad_bias`` and ``grad_weight / s``.
    """
    c = tl.program_id(0) * C + tl.arange(0, C)
    valid = c < channels
    s = tl.arange(0, S)
    is_chunk = (s < splits)[:, None] & valid[None, :]
    grad_weight = tl.zeros((C,), tl.float32)
    grad_bias = tl.zeros((C,), tl.float32)
    for sample in range(samples):
        at = (sample * 2 * splits + s)[:, None] * channels + c[None, :]
        total = tl.sum(tl.load(chunks + at, mask=is_chunk, other=0), 0)
        product = tl.sum(tl.load(chunks + splits * channels + at, mask=is_chunk, other=0), 0)
        vector = vectors + sample * 6 * channels + c
        inverse = tl.load(vector + channels, mask=valid, other=0)
        scale = tl.load(vector + 3 * channels, mask=valid, other=0)
        grad_weight += inverse * product
        grad_bias += total
        share = -scale * alpha / pixels
        tl.store(terms + sample * 2 * channels + c, share * total, mask=valid)
        tl.store(
            terms + (sample * 2 + 1) * channels + c,
            share * inverse * inverse * product, mask=valid,
        )  # fmt: skip
    tl.store(weight_gradient + c, grad_weight, mask=valid)
    tl.store(bias_gradient + c, grad_bias, mask=valid)


@triton.jit(do_not_specialize=COUNTS)
def gradient_apply(
    gradient, x, y, out, vectors, terms, pixels, channels,
    SHORTCUT: tl.constexpr, RELU: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the input."""
    sample = tl.program_id(2)
    c = tl.program_id(1) * C + tl.arange(0, C)
    p = tl.arange(0, P)
    first = tl.program_id(0) * P
    valid = c < channels
    inside = (first + p < pixels)[:, None] & valid[None, :]
    row = (sample.to(tl.int64) * pixels + first) * channels
    at = p[:, None] * channels + c[None, :]
    vector = vectors + sample * 6 * channels + c
    image_mean = tl.load(vector + 2 * channels, mask=valid, other=0)
    scale = tl.load(vector + 3 * channels, mask=valid, other=0)
    shift = tl.load(vector + 4 * channels, mask=valid, other=0)
    constant_term = tl.load(terms + sample * 2 * channels + c, mask=valid, other=0)
    linear_term = tl.load(terms + (sample * 2 + 1) * channels + c, mask=valid, other=0)
    grad, value = kept_gradient(
        gradient + row, x + row, y + row, at, inside, scale, shift, SHORTCUT, RELU
    )
    deviation = value - image_mean[None, :]
    result = scale[None, :] * grad + constant_term[None, :] + linear_term[None, :] * deviation
    tl.store(out + row + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def cell_losses(
    scores, label, first_y, first_x, part_y, part_x, weight, losses, corners, height, width,
    label_width, classes, ignore, smoothing, SOFT: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write loss and gradients of one cell: the pixels between four neighbouring scores.

    ``SOFT``: labels are smoothed, and classes have weights.
    """
    cell_x, cell_y = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, C)
    valid = c < classes
    if SOFT:
        spread = smoothing / classes * tl.load(weight + c, mask=valid, other=0)
    right = tl.minimum(cell_x + 1, width - 1)
    below = tl.minimum(cell_y + 1, height - 1)
    a = tl.load(scores + (cell_y * width + cell_x) * classes + c, mask=valid, other=0)
    b = tl.load(scores + (cell_y * width + right) * classes + c, mask=valid, other=0)
    d = tl.load(scores + (below * width + cell_x) * classes + c, mask=valid, other=0)
    e = tl.load(scores + (below * width + right) * classes + c, mask=valid, other=0)
    y0, y1 = tl.load(first_y + cell_y), tl.load(first_y + cell_y + 1)
    x0, x1 = tl.load(first_x + cell_x), tl.load(first_x + cell_x + 1)
    across = x1 - x0
    number = (y1 - y0) * across
    total = tl.zeros((K,), tl.float32)
    grad_a = tl.zeros((C,), tl.float32)
    grad_b = tl.zeros((C,), tl.float32)
    grad_d = tl.zeros((C,), tl.float32)
    grad_e = tl.zeros((C,), tl.float32)
    for start in range(0, number, K):
        k = start + tl.arange(0, K)
        in_cell = k < number
        y = y0 + k // tl.maximum(across, 1)
        x = x0 + k % tl.maximum(across, 1)
        down = tl.load(part_y + y, mask=in_cell, other=0)
        over = tl.load(part_x + x, mask=in_cell, other=0)
        wanted = tl.load(label + y * label_width + x, mask=in_cell, other=ignore)
        counts = in_cell & (wanted != ignore)
        upper = (1 - over)[:, None] * a[None, :] + over[:, None] * b[None, :]
        lower = (1 - over)[:, None] * d[None, :] + over[:, None] * e[None, :]
        score = (1 - down)[:, None] * upper + down[:, None] * lower
        score = tl.where(valid[None, :], score, float("-inf"))
        most = tl.max(score, 1)
        power = tl.exp(score - most[:, None])
        norm = tl.sum(power, 1)
        hit = c[None, :] == wanted[:, None]
        if SOFT:
            label_weight = (1 - smoothing) * tl.load(weight + wanted, mask=counts, other=0)
            target = tl.where(hit, label_weight[:, None], 0.0) + spread[None, :]
            mass = tl.sum(target, 1)
            chosen = tl.sum(target * tl.where(valid[None, :], score, 0.0), 1)
            total += tl.where(counts, mass * (tl.log(norm) + most) - chosen, 0.0)
            grad = mass[:, None] * power / norm[:, None] - target
        else:
            chosen = tl.sum(tl.where(hit, score, 0.0), 1)
            total += tl.where(counts, tl.log(norm) + most - chosen, 0.0)
            grad = power / norm[:, None] - tl.where(hit, 1.0, 0.0)
        grad = tl.where(counts[:, None], grad, 0.0)
        grad_a += tl.sum(grad * ((1 - down) * (1 - over))[:, None], 0)
        grad_b += tl.sum(grad * ((1 - down) * over)[:, None], 0)
        grad_d += tl.sum(grad * (down * (1 - over))[:, None], 0)
        grad_e += tl.sum(grad * (down * over)[:, None], 0)
    cell = cell_y * width + cell_x
    tl.store(losses + cell, tl.sum(total, 0))
    corners += cell * 4 * classes + c
    tl.store(corners, grad_a, mask=valid)
    tl.store(corners + classes, grad_b, mask=valid)
    tl.store(corners + 2 * classes, grad_d, mask=valid)
    tl.store(corners + 3 * classes, grad_e, mask=valid)


@triton.jit
def gather_corners(corners, out, count, height, width, classes, C: tl.constexpr):
    """Add up the gradients of the four cells around each score, divided by the number of pixels."""
    x, y = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, C)
    valid = c < classes
    left, above = tl.maximum(x - 1, 0), tl.maximum(y - 1, 0)
    center = corners + (y * width + x) * 4 * classes + c
    total = tl.load(center, mask=valid, other=0)
    beside = corners + (y * width + left) * 4 * classes + c
    over = corners + (above * width + x) * 4 * classes + c
    across = corners + (above * width + left) * 4 * classes + c
    total += tl.load(beside + classes, mask=valid & (x > 0), other=0)
    total += tl.load(over + 2 * classes, mask=valid & (y > 0), other=0)
    total += tl.load(across + 3 * classes, mask=valid & (x > 0) & (y > 0), other=0)
    end_x, end_y = x == width - 1, y == height - 1  # past the last row or column scores repeat
    total += tl.load(center + classes, mask=valid & end_x, other=0)
    total += tl.load(center + 2 * classes, mask=valid & end_y, other=0)
    total += tl.load(center + 3 * classes, mask=valid & end_x & end_y, other=0)
    total += tl.load(over + 3 * classes, mask=valid & end_x & (y > 0), other=0)
    total += tl.load(beside + 3 * classes, mask=valid & end_y & (x > 0), other=0)
    total /= tl.load(count).to(tl.float32)
    tl.store(out + (y * width + x) * classes + c, total, mask=valid)
