"""Equations 7 and 8 by each backend, against the reference and the formula."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from selfadapt.engine import Network
from selfadapt.engine.san_batchnorm import MixedNorm, can_mix, image_statistics_of
from selfadapt.engine.settings import NO_OPTIMIZATIONS, Plan
from selfadapt.models.detect import detect
from selfadapt.norm import find_san

SHAPES = [(4, 7), (1, 1), (9,), (3, 4, 2)]


def features(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.randn((1, 5, *shape), generator=generator) + 3).to(dtype)


def vectors(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(5, generator=generator).to(dtype) + 0.5 for _ in range(4)]


def reference(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, alpha: float
) -> Tensor:
    rows = []
    for c in range(x.shape[1]):
        pixels = x[0, c]
        image_mean = pixels.mean()
        mixed_mean = (1 - alpha) * mean[c] + alpha * image_mean
        mixed_var = (1 - alpha) * var[c] + alpha * ((pixels - image_mean) ** 2).mean()
        row = (pixels - mixed_mean) / torch.sqrt(mixed_var + 1e-3)
        row = row if weight is None else row * weight[c]
        rows.append(row if bias is None else row + bias[c])
    return torch.stack(rows)[None]


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients_are_those_of_the_formula(
    shape: Sequence[int], plain: bool, alpha: float
) -> None:
    x = features(shape).requires_grad_()
    mean, var, weight, bias = vectors()
    affine = (None, None) if plain else (weight.requires_grad_(), bias.requires_grad_())
    leaves = [leaf for leaf in (x, *affine) if leaf is not None]
    expected = reference(x, mean, var, *affine, alpha)
    found, image_mean, image_var = MixedNorm.apply(x, mean, var, *affine, alpha, 1e-3)
    torch.testing.assert_close(found, expected)
    slopes = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).double()
    for one, other in zip(
        torch.autograd.grad(found, leaves, slopes),
        torch.autograd.grad(expected, leaves, slopes),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    pixels = x.detach().flatten(2)
    torch.testing.assert_close(image_mean, pixels.mean(dim=(0, 2)))
    torch.testing.assert_close(image_var, pixels.var(dim=2, correction=0)[0])


def test_a_frozen_layer_passes_the_gradient_on() -> None:
    x = features((4, 7)).requires_grad_()
    (found,) = torch.autograd.grad(MixedNorm.apply(x, *vectors(), 0.3, 1e-3)[0].square().sum(), x)
    (wanted,) = torch.autograd.grad(reference(x, *vectors(), 0.3).square().sum(), x)
    torch.testing.assert_close(found, wanted)


def test_a_mean_far_from_zero_costs_no_digits() -> None:
    x = (features((40, 50), torch.float32) - 3) * 1e-3 + 100
    _, var = image_statistics_of(x)
    torch.testing.assert_close(var, x.double().flatten(2).var(dim=2, correction=0)[0].float())


def test_what_the_kernels_do_not_take_is_left() -> None:
    x, own = features((4, 7), torch.float32), vectors(torch.float32)
    assert can_mix(x, *own)
    assert can_mix(x, *own[:2], None, None)
    assert can_mix(torch.cat((x, x)), *own)
    assert not can_mix(torch.cat((x, x)).to(memory_format=torch.channels_last), *own)
    assert not can_mix(x.double(), *own)
    assert not can_mix(x.half(), *own)
    assert not can_mix(x, own[0].double(), *own[1:])
    assert not can_mix(x[..., :0], *own)


GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)
BACKENDS = {
    "san_batchnorm": ("cpu", replace(NO_OPTIMIZATIONS, san_batchnorm=True)),
    "san_batchnorm on a GPU": ("cuda", replace(NO_OPTIMIZATIONS, san_batchnorm=True)),
    "kernels": ("cuda", replace(NO_OPTIMIZATIONS, kernels=True, channels_last=True)),
}


@pytest.mark.parametrize("drifts", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if device == "cpu" else GPU)
        for name, (device, _) in BACKENDS.items()
    ],
)
def test_each_backend_gives_what_the_reference_in_norm_gives(
    name: str,
    alpha: float,
    drifts: bool,
    tiny: nn.Module,
    image: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    device, fast = torch.device(BACKENDS[name][0]), BACKENDS[name][1]
    model, image = tiny.to(device), image.to(device)
    assert fast.plan(device).running

    def compute(plan: Plan) -> list[Tensor]:
        network = Network(
            model, detect(model), find_san(model, alpha), ["head.weight", "norm1.weight"], plan
        )
        with torch.no_grad():
            with network.image_statistics(0.1) if drifts else nullcontext():
                network.step(image, lambda logits: logits.square().mean(), lr=0.1)
                network.step(image, lambda logits: logits.square().mean(), lr=0.1)
            return [*network.tuned.values(), *network.buffers.values(), network.logits(image)]

    for found, expected in zip(
        compute(fast.plan(device)), compute(NO_OPTIMIZATIONS.plan(device)), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
