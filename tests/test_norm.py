import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

import selfadapt
from conftest import TinyNet, assert_same, random_image, seeded, snapshot
from selfadapt.norm import SaN, converted, find_san, image_statistics


def naive_san(layer: nn.Module, x: Tensor, alpha: float) -> Tensor:
    """Eq. 7-8, one sample and channel at a time."""
    out = torch.empty_like(x)
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            z = x[b, c].double()
            mean = (1 - alpha) * layer.running_mean[c].double() + alpha * z.mean()
            image_var = ((z - z.mean()) ** 2).mean()
            var = (1 - alpha) * layer.running_var[c].double() + alpha * image_var
            y = (z - mean) / torch.sqrt(var + layer.eps)
            if layer.weight is not None:
                y = y * layer.weight[c].double() + layer.bias[c].double()
            out[b, c] = y.to(x.dtype)
    return out


class Scaled(nn.BatchNorm2d):
    """A BatchNorm of someone else's that does more than normalise."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh() * 2


LAYERS = {
    "BatchNorm2d": lambda: nn.BatchNorm2d(5),
    "eps": lambda: nn.BatchNorm2d(5, eps=0.01),
    "no affine": lambda: nn.BatchNorm2d(5, affine=False),
    "momentum None": lambda: nn.BatchNorm2d(5, momentum=None),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(5),
    "frozen": lambda: FrozenBatchNorm2d(5),
    "fused activation": lambda: BatchNormAct2d(5),
    "own subclass": lambda: Scaled(5),
}
TAILS = {"fused activation": F.relu, "own subclass": lambda y: y.tanh() * 2}


def layer_of(kind: str) -> nn.Module:
    layer = seeded(LAYERS[kind])
    if getattr(layer, "weight", None) is not None:
        layer.weight.data.uniform_(0.5, 1.5)
    return layer


@pytest.fixture
def x() -> Tensor:
    return torch.randn((2, 5, 6, 7), generator=torch.Generator().manual_seed(1)) * 2 + 1


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 1.0])
def test_san_is_the_formula(kind: str, alpha: float, x: Tensor) -> None:
    layer = layer_of(kind)
    expected = TAILS.get(kind, lambda y: y)(naive_san(layer, x, alpha))
    with selfadapt.san(nn.Sequential(layer), alpha):
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_alpha_zero_is_the_source_model_bit_by_bit(kind: str, x: Tensor) -> None:
    model = nn.Sequential(layer_of(kind))
    expected = model(x)
    with selfadapt.san(model, 0.0):
        assert torch.equal(model(x), expected)


def test_alpha_one_is_instance_normalisation(x: Tensor) -> None:
    layer = layer_of("BatchNorm2d")
    with selfadapt.san(nn.Sequential(layer), 1.0):
        expected = F.instance_norm(x, weight=layer.weight, bias=layer.bias, eps=layer.eps)
        torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("kind", LAYERS)
def test_no_image_of_a_batch_influences_another(kind: str, x: Tensor) -> None:
    model = nn.Sequential(layer_of(kind))
    with selfadapt.san(model, 0.7):
        together = model(x)
        alone = torch.cat([model(sample[None]) for sample in x])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_one_pixel_map_works_at_batch_size_one(kind: str) -> None:
    layer = layer_of(kind)
    x = torch.randn(1, 5, 1, 1)
    with selfadapt.san(nn.Sequential(layer), 0.3):
        expected = TAILS.get(kind, lambda y: y)(naive_san(layer, x, 0.3))
        torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("kind", LAYERS)
def test_training_mode_is_untouched(kind: str, x: Tensor) -> None:
    plain, mixed = layer_of(kind).train(), layer_of(kind).train()
    mixed.load_state_dict(plain.state_dict())
    selfadapt.apply_san(nn.Sequential(mixed), 0.5)
    assert torch.equal(plain(x), mixed(x))
    for name, value in plain.state_dict().items():
        assert torch.equal(value, mixed.state_dict()[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_half_with_statistics_in_full(dtype: torch.dtype, x: Tensor) -> None:
    layer = layer_of("BatchNorm2d").to(dtype)
    with selfadapt.san(nn.Sequential(layer), 0.4):
        y = layer(x.to(dtype))
    assert y.dtype == dtype
    expected = naive_san(layer, x.to(dtype).float(), 0.4)
    torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=0.02)


def test_large_half_values_do_not_overflow() -> None:
    layer = nn.BatchNorm2d(1).half().eval()
    with selfadapt.san(nn.Sequential(layer), 1.0):
        y = layer(torch.tensor([[[[-6000.0, 6000.0]]]]).half())
    torch.testing.assert_close(y.float(), torch.tensor([[[[-1.0, 1.0]]]]), atol=1e-2, rtol=0)


def test_state_dict_keys_stay_and_checkpoints_load_before_and_after(tiny: nn.Module) -> None:
    keys = list(tiny.state_dict())
    other = seeded(TinyNet, seed=1).state_dict()
    selfadapt.apply_san(tiny, 0.2)
    assert list(tiny.state_dict()) == keys
    tiny.load_state_dict(other)
    selfadapt.remove_san(tiny)
    assert list(tiny.state_dict()) == keys
    assert all(torch.equal(value, other[name]) for name, value in tiny.state_dict().items())


def test_taking_it_out_leaves_no_trace(tiny: nn.Module) -> None:
    before = snapshot(tiny)
    selfadapt.apply_san(tiny, 0.2)
    assert isinstance(tiny.norm1, SaN)
    assert isinstance(tiny.norm1, nn.BatchNorm2d)
    assert "alpha=0.2" in repr(tiny)
    selfadapt.remove_san(tiny)
    assert_same(before, snapshot(tiny))


def test_the_block_gives_back_what_it_found(tiny: nn.Module) -> None:
    selfadapt.apply_san(tiny, 0.2)
    before = snapshot(tiny)
    with pytest.raises(RuntimeError, match="input to conv2d"), selfadapt.san(tiny, 0.9):
        tiny(torch.rand(3, 3))
    assert tiny.norm1.san_alpha == 0.2
    assert_same(before, snapshot(tiny))


def test_a_shared_layer_is_converted_once() -> None:
    norm = nn.BatchNorm2d(3)
    model = nn.Sequential(norm, nn.ReLU(), norm)
    report = selfadapt.apply_san(model, 0.5)
    assert list(report.converted) == ["0"]
    assert model[2] is model[0] is norm
    selfadapt.remove_san(model)
    assert type(norm) is nn.BatchNorm2d


def test_copies_and_pickles_keep_san(tiny: nn.Module, image: Tensor) -> None:
    selfadapt.apply_san(tiny, 0.3)
    expected = tiny(image[None])
    tiny.form = nn.Identity()  # a lambda cannot be pickled
    file = io.BytesIO()
    torch.save(tiny, file)
    file.seek(0)
    for twin in (
        copy.deepcopy(tiny),
        pickle.loads(pickle.dumps(tiny)),
        torch.load(file, weights_only=False),
    ):
        assert torch.equal(twin(image[None]), expected)
        selfadapt.remove_san(twin)
        assert type(twin.norm1) is nn.BatchNorm2d
    assert isinstance(tiny.norm1, SaN)


def test_alpha_by_layer(tiny: nn.Module) -> None:
    report = selfadapt.apply_san(tiny, {"norm2": 0.7, "norm*": 0.2})
    assert report.converted == {"norm1": 0.2, "norm2": 0.7}
    report = selfadapt.apply_san(tiny, {"norm2": 0.0})
    assert report.converted == {"norm2": 0.0}
    assert report.skipped == {"norm1": "no pattern of alpha names it"}


def test_it_says_what_it_left_and_why() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(3, track_running_stats=False), nn.GroupNorm(1, 3), nn.LazyBatchNorm2d()
    )
    with pytest.warns(UserWarning, match="no BatchNorm layer with running statistics"):
        report = selfadapt.apply_san(model)
    assert not report.converted
    assert "nothing to mix" in report.skipped["0"]
    assert "GroupNorm is not BatchNorm" in report.skipped["1"]
    assert "has not seen an input yet" in report.skipped["2"]
    assert "SaN changes nothing" in str(report)
    assert "of 1 BatchNorm layer" in str(find_san(nn.Sequential(nn.BatchNorm2d(2)), 0.1))


@pytest.mark.parametrize("kind", LAYERS)
def test_image_statistics_are_batchnorm_in_training(kind: str, x: Tensor) -> None:
    layer = layer_of(kind)
    mean, var = layer.running_mean.clone(), layer.running_var.clone()
    weight, bias = (None, None) if kind == "no affine" else (layer.weight, layer.bias)
    model = nn.Sequential(layer)
    with converted(model, find_san(model, 0.1)), image_statistics(model, momentum=0.1):
        result = [layer(x[:1]) for _ in range(3)][-1].detach()
    for _ in range(3):
        expected = F.batch_norm(x[:1], mean, var, weight, bias, True, 0.1, layer.eps)
    expected = TAILS.get(kind, lambda y: y)(expected)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.running_mean, mean)
    torch.testing.assert_close(layer.running_var, var)


def test_a_layer_with_an_alpha_of_its_own_keeps_it(x: Tensor) -> None:
    class Weighted(nn.BatchNorm2d):
        def __init__(self) -> None:
            super().__init__(5)
            self.alpha = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.alpha

    model = nn.Sequential(seeded(Weighted))
    before = snapshot(model)
    expected = naive_san(model[0], x, 0.3) * 0.5
    selfadapt.apply_san(model, 0.3)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    selfadapt.remove_san(model)
    assert_same(before, snapshot(model))


def test_a_layer_changed_since_is_not_taken_apart() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3))
    selfadapt.apply_san(model)
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    with pytest.raises(TypeError, match="undo that first, it may be a parametrization"):
        selfadapt.remove_san(model)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    selfadapt.remove_san(model)
    assert type(model[0]) is nn.BatchNorm2d


def test_gradients_flow_through_the_image_statistics() -> None:
    layer = seeded(lambda: nn.BatchNorm2d(2)).double()
    x = random_image(4, 5, channels=2).double()[None].requires_grad_()
    with selfadapt.san(nn.Sequential(layer), 0.5):
        assert torch.autograd.gradcheck(layer, x)


def test_second_derivatives_of_san_are_right() -> None:
    model = nn.Sequential(seeded_norm()).double()
    x = torch.randn(1, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    with selfadapt.san(model, 0.5):
        assert torch.autograd.gradgradcheck(model, x)


def test_san_can_be_traced_and_differentiated_by_functions() -> None:
    model, x = nn.Sequential(seeded_norm()), torch.randn(1, 3, 4, 5)
    with selfadapt.san(model, 0.5):
        expected = model(x)
        with torch.no_grad():
            torch.testing.assert_close(torch.jit.trace(model, x)(x), expected)
            torch.testing.assert_close(model(x), expected)
        slopes = torch.func.grad(lambda x: model(x).square().sum())(x)
        _, change = torch.func.jvp(lambda x: model(x).square().sum(), (x,), (x,))
        torch.testing.assert_close(change, (slopes * x).sum())


def seeded_norm() -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(3).eval()
    norm.running_mean.copy_(torch.tensor([0.1, -0.2, 0.3]))
    norm.running_var.copy_(torch.tensor([0.5, 1.0, 2.0]))
    return norm
