"""The kernels against plain PyTorch, run by test_fast_kernels.py in Triton's interpreter."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import interpreter  # noqa: F401
from selfadapt import metrics
from selfadapt.engine import counting
from selfadapt.engine.kernels import launch

CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def last(*size: int, seed: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
    """Return random features with the channels last in memory."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator) * scale + mean
    return x.to(memory_format=torch.channels_last)


def row(channels: int, seed: int) -> Tensor:
    return torch.rand(channels, generator=torch.Generator().manual_seed(seed)) + 0.5


def expected(
    x: Tensor,
    rows: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    alpha: float,
    shortcut: Tensor | None,
    relu: bool,
) -> Tensor:
    """Normalise in the obvious way."""
    running_mean, running_var, weight, bias = rows
    image_mean = x.mean(dim=(2, 3), keepdim=True)
    image_var = (x - image_mean).square().mean(dim=(2, 3), keepdim=True)
    mean = (1 - alpha) * running_mean.reshape(1, -1, 1, 1) + alpha * image_mean
    var = (1 - alpha) * running_var.reshape(1, -1, 1, 1) + alpha * image_var
    y = (x - mean) / (var + 1e-3).sqrt()
    y = y if weight is None else y * weight.reshape(1, -1, 1, 1)
    y = y if bias is None else y + bias.reshape(1, -1, 1, 1)
    y = y if shortcut is None else y + shortcut
    return y.relu() if relu else y


SIZES = [(1, 19, 7, 9), (2, 70, 3, 5), (3, 1, 1, 1), (1, 2, 9, 13)]


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("size", SIZES)
def test_features_and_gradients_are_those_of_float64(
    size: tuple[int, ...], alpha: float, joined: bool, relu: bool
) -> None:
    x = last(*size, seed=0, scale=2, mean=1)
    shortcut = last(*size, seed=1) if joined else None
    rows = tuple(row(size[1], seed) for seed in (2, 3, 4, 5))
    slopes = last(*size, seed=6)
    leaves = [t.requires_grad_() for t in (x, *rows[2:], shortcut) if t is not None]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    wide_rows = (rows[0].double(), rows[1].double(), wide[1], wide[2])
    wanted = expected(wide[0], wide_rows, alpha, wide[3] if joined else None, relu)
    wanted_slopes = torch.autograd.grad(wanted, wide, slopes.double())
    before = [r.clone() for r in rows]
    with torch.no_grad():
        vectors = launch.statistics(x, *rows, 1e-3, alpha, None)
    y = launch.Normalize.apply(x, *rows[2:], vectors, alpha, shortcut, relu)
    torch.testing.assert_close(y.double(), wanted, **CLOSE)
    assert launch.channels_are_last(y)
    for found, right in zip(torch.autograd.grad(y, leaves, slopes), wanted_slopes, strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-4)
    for now, then in zip(rows, before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("affine", [(True, False), (False, True), (False, False)])
def test_layers_without_weight_or_bias_are_normalised_too(affine: tuple[bool, bool]) -> None:
    x = last(1, 5, 4, 6, seed=0).requires_grad_()
    rows = [row(5, seed) for seed in (2, 3, 4, 5)]
    rows[2:] = [r if there else None for r, there in zip(rows[2:], affine, strict=True)]
    vectors = launch.statistics(x.detach(), *rows, 1e-3, 0.4, None)
    y = launch.Normalize.apply(x, *rows[2:], vectors, 0.4, None, True)
    wanted = expected(x, tuple(rows), 0.4, None, True)
    torch.testing.assert_close(y, wanted, **CLOSE)
    found, right = (torch.autograd.grad(out.square().sum(), x)[0] for out in (y, wanted))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [(1, 6, 5, 7), (1, 130, 1, 1), (1, 3, 10, 21)])
def test_running_statistics_follow_as_in_batchnorms_training(size: tuple[int, ...]) -> None:
    x = last(*size, seed=0, scale=3, mean=-2)
    running = row(size[1], 1), row(size[1], 2)
    weight, bias = row(size[1], 3), row(size[1], 4)
    wanted = [r.clone() for r in running]
    vectors = launch.statistics(x, *running, weight, bias, 1e-3, 0.1, 0.25)
    y = launch.Normalize.apply(x, weight, bias, vectors, 1.0, None, False)
    var, mean = torch.var_mean(x.double(), dim=(0, 2, 3), correction=0)
    num = x[0, 0].numel()
    unbiased = var * num / max(num - 1, 1)
    for now, then, end in zip(running, wanted, (mean, unbiased), strict=True):
        torch.testing.assert_close(now, (then.double().lerp(end, 0.25)).float(), **CLOSE)
    torch.testing.assert_close(vectors[0, 2].double(), mean, **CLOSE)
    torch.testing.assert_close(vectors[0, 5].double(), unbiased, **CLOSE)
    wide = tuple(t.double() for t in (*wanted, weight, bias))
    torch.testing.assert_close(y.double(), expected(x.double(), wide, 1.0, None, False), **CLOSE)


@pytest.mark.parametrize("mean", [0.0, 1000.0, -30000.0])
def test_a_mean_far_from_zero_costs_no_digits(mean: float) -> None:
    x = last(2, 3, 23, 29, seed=0, mean=mean)
    zeros, ones = torch.zeros(3), torch.ones(3)
    vectors = launch.statistics(x, zeros, ones, None, None, 1e-12, 1.0, None)
    var, image_mean = torch.var_mean(x.double(), dim=(2, 3), correction=0)
    torch.testing.assert_close(vectors[:, 2].double(), image_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(vectors[:, 1].double(), var.rsqrt(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("programs", [1, 3, 1056])
def test_the_number_of_chunks_does_not_matter(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MOMENT_PROGRAMS", programs)
    monkeypatch.setattr(launch, "GRADIENT_PROGRAMS", programs)
    monkeypatch.setattr(launch, "SPLITS", max(1, programs // 2))
    x = last(2, 5, 17, 19, seed=0, mean=4).requires_grad_()
    rows = tuple(row(5, seed) for seed in (2, 3, 4, 5))
    with torch.no_grad():
        vectors = launch.statistics(x, *rows, 1e-3, 0.5, None)
    y = launch.Normalize.apply(x, *rows[2:], vectors, 0.5, None, True)
    wanted = expected(x, rows, 0.5, None, True)
    torch.testing.assert_close(y, wanted, **CLOSE)
    found, right = (torch.autograd.grad(out.square().sum(), x)[0] for out in (y, wanted))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_what_is_not_a_number_stays_none() -> None:
    x = last(1, 2, 3, 3, seed=0)
    x[0, 0, 1, 1] = float("nan")
    zeros, ones = torch.zeros(2), torch.ones(2)
    vectors = launch.statistics(x, zeros, ones, None, None, 0.0, 0.0, None)
    y = launch.Normalize.apply(x, None, None, vectors, 0.0, None, True)
    assert torch.equal(y.isnan(), x.isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    x = last(1, 5, 6, 7, seed=0).to(dtype)
    shortcut = last(1, 5, 6, 7, seed=1).to(dtype)
    rows = tuple(row(5, seed) for seed in (2, 3, 4, 5))
    vectors = launch.statistics(x, *rows, 1e-3, 0.5, None)
    y = launch.Normalize.apply(x, *rows[2:], vectors, 0.5, shortcut, True)
    wanted = expected(x.float(), rows, 0.5, shortcut.float(), True)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), wanted, rtol=1e-2, atol=1e-3)


GRIDS = [(4, 5, 13, 17), (1, 3, 8, 24), (3, 3, 3, 3), (2, 2, 1, 1), (5, 2, 5, 16)]


@pytest.mark.parametrize("soft", [(0.0, False), (0.1, False), (0.0, True), (0.3, True)])
@pytest.mark.parametrize("ignored", [0.3, 1.0])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("grid", GRIDS)
def test_the_loss_is_that_of_upsampled_scores(
    grid: tuple[int, ...], aligned: bool, ignored: float, soft: tuple[float, bool]
) -> None:
    smoothing, weighted = soft
    height, width, large_height, large_width = grid
    classes = 5 + height
    scores = 3 * last(1, classes, height, width, seed=0)
    scores.requires_grad_()
    generator = torch.Generator().manual_seed(1)
    label = torch.randint(0, classes, (large_height, large_width), generator=generator)
    label[torch.rand(label.shape, generator=generator) < ignored] = 255
    label[-1, -1] = 3  # one at least counts
    wide = scores.detach().double().requires_grad_()
    upsampled = F.interpolate(
        wide, (large_height, large_width), mode="bilinear", align_corners=aligned
    )
    weight = torch.rand(classes, generator=generator) + 0.1 if weighted else None
    wanted = F.cross_entropy(
        upsampled, label[None], None if weight is None else weight.double(), ignore_index=255,
        label_smoothing=smoothing,
    )  # fmt: skip
    loss = launch.UpsampledCrossEntropy.apply(scores, label, aligned, 255, weight, smoothing)
    torch.testing.assert_close(loss.double(), wanted, **CLOSE)
    (found,), (right,) = (
        torch.autograd.grad(2 * value, t) for value, t in ((loss, scores), (wanted, wide))
    )
    assert found.shape == scores.shape
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-5)


def test_the_ignored_label_may_be_negative_and_scores_large() -> None:
    scores = 200 * last(1, 300, 2, 2, seed=0)
    scores.requires_grad_()
    label = torch.tensor([[-1, 299, 0], [255, -1, 7], [3, 3, -1]])
    wanted = F.cross_entropy(
        F.interpolate(scores, (3, 3), mode="bilinear"), label[None], ignore_index=-1
    )
    loss = launch.UpsampledCrossEntropy.apply(scores, label, False, -1)
    torch.testing.assert_close(loss, wanted, **CLOSE)
    found, right = (torch.autograd.grad(value, scores)[0] for value in (loss, wanted))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_a_label_without_gradient_gives_the_loss() -> None:
    scores = last(1, 4, 2, 3, seed=0)
    label = torch.ones(5, 6, dtype=torch.int64)
    loss = launch.UpsampledCrossEntropy.apply(scores, label, True, 255)
    upsampled = F.interpolate(scores, (5, 6), mode="bilinear", align_corners=True)
    torch.testing.assert_close(loss, F.cross_entropy(upsampled, label[None]), **CLOSE)


@pytest.mark.parametrize("classes", [1, 5, 8, 19])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_of_a_convolution(classes: int, dtype: torch.dtype) -> None:
    pixels = last(1, 6, 4, 5, seed=0)[0].flatten(1).T.to(dtype).requires_grad_()
    weight = torch.randn(classes, 6, generator=torch.Generator().manual_seed(1))
    weight = weight.to(dtype).float().requires_grad_()
    bias = row(classes, 2).requires_grad_()
    scores = launch.Scores.apply(pixels, weight, bias)
    wanted = F.linear(pixels.float(), weight, bias)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, wanted, **CLOSE)
    leaves: list[Any] = [pixels, weight, bias]
    found, right = (torch.autograd.grad(out.square().sum(), leaves) for out in (scores, wanted))
    close = CLOSE if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.3}
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, **close)


def test_what_cannot_be_taken_is_left() -> None:
    x = torch.rand(2, 3, 4, 5)
    assert not launch.channels_are_last(x)
    assert launch.channels_are_last(x.to(memory_format=torch.channels_last))
    assert not launch.channels_are_last(x[0])
    assert not launch.takes_features(x.to(memory_format=torch.channels_last)), "on the CPU"
    assert not launch.takes_scores(x)
    assert not launch.takes_products(x)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int64])
@pytest.mark.parametrize("size", [(19, 37, 53), (2, 1, 1), (5, 16, 16)])
def test_pixels_are_counted_as_without_the_kernel(
    size: tuple[int, int, int], kind: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    probs = (torch.randn(size, generator=generator) * 2).softmax(dim=0)
    probs[:, 0, 0] = torch.eye(size[0])[0]  # sure
    probs[:, -1, -1] = 1 / size[0]  # the first of equals
    label = torch.randint(size[0] + 1, size[1:], generator=generator)
    label[label == size[0]] = 255
    expected = metrics.count(label.to(kind), probs)
    found = metrics.count(label.to(kind), probs, counting._sum_on_gpu)
    for name, value in vars(expected).items():
        assert torch.equal(getattr(found, name), value), name


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("what", ["label", "first", "last"])
def test_what_cannot_be_counted_is_refused(what: str, kernel: bool) -> None:
    probs, label = torch.rand(3, 4, 5).softmax(dim=0), torch.full((4, 5), 2)
    label[0, 0] = 255
    if what == "label":
        label[1, 1] = 7
    else:
        probs[0 if what == "first" else 2, 1, 1] = torch.nan
    with pytest.raises(ValueError, match="1 pixels cannot be counted: labels must be 0 to 2 or"):
        metrics.count(label, probs, counting._sum_on_gpu if kernel else None)
