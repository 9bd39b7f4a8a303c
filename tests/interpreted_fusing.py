"""Tensors that are computed later, run by test_fast_kernels.py in Triton's interpreter."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interpreter import Counted, as_on_a_gpu  # noqa: F401
from selfadapt.engine.kernels.fused import DeferredTensor, Normalized, Upsampled, fusing
from selfadapt.engine.reuse import Reuse
from selfadapt.norm import image_statistics, san

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def kernels(as_on_a_gpu: dict[str, Counted]) -> Iterator[dict[str, Counted]]:  # noqa: F811
    with fusing(1):
        yield as_on_a_gpu


def features(seed: int = 0, size: tuple[int, ...] = (1, 3, 4, 5)) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(memory_format=torch.channels_last)


def layer(seed: int = 0) -> nn.Module:
    norm = nn.BatchNorm2d(3).eval()
    generator = torch.Generator().manual_seed(seed)
    for tensor in (norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var):
        tensor.uniform_(0.5, 1.5, generator=generator)
    return norm


def now(x: Tensor) -> Tensor:
    return x.materialize() if isinstance(x, DeferredTensor) else x


def in_place_relu_module(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
    nn.ReLU(inplace=True)(a)
    return a


def relu_and_itself(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
    return a.relu() - a + F.relu(a, False)


def used_after_joining(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
    total = a + s
    a.relu_()
    return total.relu() * a


def in_place_sum_then_more(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
    alias = a
    a += s
    a += b
    a.mul_(2)
    return a.relu_() + alias


def changed_after_computing(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
    c = a * 1
    a.relu_()
    return torch.cat([a, c], dim=1)[:, :3] + a


USES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "alone": lambda a, b, s: a * 1,
    "F.relu": lambda a, b, s: F.relu(a),
    "F.relu in place": lambda a, b, s: F.relu(a, inplace=True) + a,
    "F.relu in place by position": lambda a, b, s: F.relu(a, True) + a,
    "torch.relu": lambda a, b, s: torch.relu(a) - a,
    "torch.relu_": lambda a, b, s: torch.relu_(a) - a,
    "relu_": lambda a, b, s: a.relu_() * a,
    "ReLU in place": in_place_relu_module,
    "relu, then itself": relu_and_itself,
    "sum": lambda a, b, s: a + s,
    "sum the other way round": lambda a, b, s: s + a,
    "torch.add": lambda a, b, s: torch.add(s, a).relu(),
    "weighted sum": lambda a, b, s: torch.add(a, s, alpha=3),
    "sum of two": lambda a, b, s: (a + b).relu(),
    "sum with itself": lambda a, b, s: a + a,
    "sum of a list": lambda a, b, s: sum([a, b, s]),
    "sum of three": lambda a, b, s: F.relu(a + s + b + s),
    "sum with a number": lambda a, b, s: (a + 1) + (2 + b),
    "sum with a row": lambda a, b, s: a + s[:, :, :1, :1],
    "sum with a row in place": lambda a, b, s: a.add_(s[..., :1]) + a,
    "sum with float64": lambda a, b, s: (a + s.double()).float(),
    "sum with other memory": lambda a, b, s: (a + s.contiguous()).relu(),
    "in place sum": lambda a, b, s: a.add_(s).relu_(),
    "in place sum of two": lambda a, b, s: a.add_(b).relu() + a,
    "in place sum onto a tensor": lambda a, b, s: (s * 1).add_(a).relu_(),
    "in place sum, then more": in_place_sum_then_more,
    "used after joining": used_after_joining,
    "changed after computing": changed_after_computing,
    "product": lambda a, b, s: a * s - b / 2,
    "in a list": lambda a, b, s: torch.stack([a, b, s]).sum(dim=0),
    "by keyword": lambda a, b, s: torch.add(input=a, other=b),
    "taken apart": lambda a, b, s: a[:, 1:] * b.flip(1)[:, :2],
    "convolution": lambda a, b, s: F.conv2d(a, torch.ones(2, 3, 1, 1), torch.ones(2)),
    "wide convolution": lambda a, b, s: F.conv2d(a, torch.ones(2, 3, 1, 1)) * 2,
    "strided convolution": lambda a, b, s: F.conv2d(a, torch.ones(2, 3, 1, 1), stride=2),
    "pooling": lambda a, b, s: F.max_pool2d(a, 2) + F.avg_pool2d(b, 2),
    "normalised again": lambda a, b, s: layer(5)(a).relu(),
}


@pytest.mark.parametrize("use", USES)
def test_what_is_computed_later_is_the_same(use: str) -> None:
    results = []
    for joining in (True, False):
        x, shortcut = features(0).requires_grad_(), features(1).requires_grad_()
        norms = layer(1), layer(2)
        model = nn.ModuleList(norms)
        with san(model, 0.3):
            a, b = (norm(x) for norm in norms)
            assert isinstance(a, Normalized)
            result = now(USES[use](*((a, b) if joining else (now(a), now(b))), shortcut))
        leaves = [x, shortcut, *model.parameters()]
        slopes = torch.autograd.grad(result.square().sum(), leaves, allow_unused=True)
        results.append([result, *slopes])
    for found, wanted in zip(*results, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize(
    ("use", "passes"),
    [("F.relu", 1), ("sum", 1), ("torch.add", 1), ("in place sum", 1), ("sum of two", 2)],
)
def test_what_joins_takes_no_pass_of_its_own(
    use: str, passes: int, kernels: dict[str, Counted]
) -> None:
    model = nn.ModuleList([layer(1), layer(2)])
    with san(model, 0.3), torch.no_grad():
        a, b = (norm(features()) for norm in model)
        assert kernels["apply"].starts == 0
        now(USES[use](a, b, features(1)))
    assert kernels["apply"].starts == passes


def test_facts_are_known_without_computing(kernels: dict[str, Counted]) -> None:
    model = nn.Sequential(layer())
    with san(model, 0.3):
        y = model(features())
    assert y.shape == y.size() == (1, 3, 4, 5)
    assert (y.dtype, y.device.type, y.dim(), y.ndim) == (torch.float32, "cpu", 4, 4)
    assert (y.numel(), len(y), y.size(1)) == (60, 1, 3)
    assert y.is_floating_point()
    assert not y.is_cuda
    assert y.value is None
    assert kernels["apply"].starts == 0
    assert y.requires_grad
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert y.value is not None


def test_running_statistics_follow_once_however_often_it_is_computed() -> None:
    rows = []
    for joining in (True, False):
        model = nn.Sequential(layer())
        with torch.no_grad(), san(model, 0.3), image_statistics(model, 0.1) as tracker:
            y = model(features())
            if joining:
                y.relu(), y + features(1), y * 2
            assert len(tracker.updates) == 1
        rows.append((model[0].running_mean, model[0].running_var))
    for found, wanted in zip(*rows, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("changed", ["input", "shortcut"])
def test_a_part_that_changes_before_it_is_used_is_an_error(changed: str) -> None:
    model, x, shortcut = nn.Sequential(layer()), features(), features(1)
    with torch.no_grad(), san(model, 0.3):
        y = model(x) + shortcut
        (x if changed == "input" else shortcut).relu_()
        with pytest.raises(RuntimeError, match="still computed from was changed in place"):
            y.relu()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_gradients_pass_through_functions_of_somebodys_own() -> None:
    model, x = nn.Sequential(layer()), features().requires_grad_()
    with san(model, 0.3):
        found = Doubled.apply(model(x))
        wanted = model(x).materialize() * 2
    assert found.requires_grad
    (one,), (other,) = (torch.autograd.grad(y.square().sum(), x) for y in (found, wanted))
    torch.testing.assert_close(one, other, **CLOSE)


def test_functions_of_somebodys_own_are_as_before_afterwards() -> None:
    before = torch.autograd.Function.apply.__func__
    with fusing(1):
        with fusing(1):
            pass
        assert torch.autograd.Function.apply.__func__ is before
    assert Doubled.apply(torch.ones(1)) == 2


def test_a_layer_with_weights_far_apart_in_memory_is_left_alone() -> None:
    model = nn.Sequential(layer())
    with san(model, 0.3), torch.no_grad():
        wanted = model(features()).materialize()
        model[0].weight = nn.Parameter(model[0].weight.repeat_interleave(2)[::2])
        found = model(features())
    assert not isinstance(found, DeferredTensor)
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize(
    "use",
    [
        lambda y, label: F.cross_entropy(y, label, ignore_index=255),
        lambda y, label: F.cross_entropy(y.to(y.dtype)[..., :9, :11], label, ignore_index=255),
        lambda y, label: F.cross_entropy(y, label, ignore_index=255, reduction="sum"),
        lambda y, label: F.cross_entropy(y, label, ignore_index=255, label_smoothing=0.1),
        lambda y, label: F.cross_entropy(y, label, torch.rand(3) + 1, ignore_index=255),
        lambda y, label: F.cross_entropy(y[..., :8, :], label[:, :8], ignore_index=255),
        lambda y, label: y.log_softmax(dim=1).mean() + y.relu().sum() + y.max(),
    ],
)
@pytest.mark.parametrize("aligned", [True, False])
def test_upsampled_scores_are_the_same(use: Callable[..., Tensor], aligned: bool) -> None:
    label = torch.randint(0, 3, (1, 9, 11), generator=torch.Generator().manual_seed(0))
    label[:, 2:4] = 255
    results = []
    for joining in (True, False):
        torch.manual_seed(0)
        x = features().requires_grad_()
        y = F.interpolate(x, size=(9, 11), mode="bilinear", align_corners=aligned)
        assert isinstance(y, Upsampled)
        loss = use(y if joining else y.materialize(), label)
        results.append((loss.detach(), *torch.autograd.grad(loss, x)))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.1}, {"weight": torch.ones(3)}])
def test_a_cross_entropy_that_joins_makes_no_large_map(
    settings: dict[str, Any], kernels: dict[str, Counted]
) -> None:
    y = F.interpolate(features().requires_grad_(), size=(9, 11), mode="bilinear")
    label = torch.zeros(1, 9, 11, dtype=torch.int64)
    F.cross_entropy(y.to(torch.float32)[..., :9, :11], label, **settings)
    assert kernels["cell_losses"].starts == 1
    assert y.value is None


@pytest.mark.parametrize("aligned", [False, True])
def test_whole_factors_are_sizes(kernels: dict[str, Counted], aligned: bool) -> None:
    x, label = features().requires_grad_(), torch.zeros(1, *features().shape[-2:]).long()
    label = label.repeat_interleave(4, 1).repeat_interleave(4, 2)
    results = []
    for off in (False, True):
        with torch._C.DisableTorchFunction() if off else nullcontext():
            y = F.interpolate(x, scale_factor=4.0, mode="bilinear", align_corners=aligned)
            loss = F.cross_entropy(y, label)
        results.append((loss.detach(), *torch.autograd.grad(loss, x)))
    assert kernels["cell_losses"].starts == 1
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize(
    "how",
    [
        {"scale_factor": 1.5, "mode": "bilinear"},
        {"size": (3, 9), "mode": "bilinear"},
        {"size": (9, 9), "mode": "nearest"},
        {"size": (9, 9), "mode": "bilinear", "antialias": True},
        {"size": 9, "mode": "bilinear"},
    ],
)
def test_other_resampling_is_done_at_once(how: dict[str, Any]) -> None:
    x = features().requires_grad_()
    found = F.interpolate(x, **how)
    assert type(found) is Tensor
    with torch._C.DisableTorchFunction():
        assert torch.equal(found, F.interpolate(x, **how))


def test_gradients_pass_from_a_layer_to_scores_that_were_upsampled() -> None:
    x, model = features().requires_grad_(), nn.Sequential(layer())
    with san(model, 0.3):
        y = model(F.interpolate(x, size=(9, 11), mode="bilinear")).relu()
    assert torch.autograd.grad(y.square().sum(), x)[0].abs().sum() > 0


@pytest.mark.parametrize("use", ["F.relu", "relu_", "changed after computing", "in place sum"])
def test_constants_that_are_computed_later_are_reused(use: str) -> None:
    model = nn.ModuleList([layer(1), layer(2), nn.Conv2d(3, 3, 1)])
    x, shortcut = features(), features(1)
    reuse = Reuse(model, ["2.weight"], [x, shortcut, *model[:2].parameters()])
    with san(model, 0.3), torch.no_grad():
        wanted = now(USES[use](*(norm(x) for norm in model[:2]), shortcut))
        for _ in range(3):
            with reuse.running():
                found = USES[use](*(norm(x) for norm in model[:2]), shortcut)
            torch.testing.assert_close(now(found), wanted, **CLOSE)
    assert reuse.usable == (use != "changed after computing")
