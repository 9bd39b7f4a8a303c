import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

import selfadapt
from conftest import TinyNet, seeded
from selfadapt.models.norms import (
    NORMS,
    BatchInstanceNorm2d,
    SwitchableNorm2d,
    replace_batchnorm,
)
from selfadapt.norm import find_san


def features(seed: int = 0) -> Tensor:
    return torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(seed)) * 2 + 1


def filled(layer: nn.Module) -> nn.Module:
    """Give a layer weights and statistics none of which is trivial."""
    generator = torch.Generator().manual_seed(1)
    for name, value in [*layer.named_parameters(), *layer.named_buffers()]:
        if value.is_floating_point():
            value.data.copy_(torch.rand(value.shape, generator=generator) + (name != "rho") * 0.5)
    return layer


def standardised(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    return (x - mean) / (var + eps) ** 0.5


@pytest.mark.parametrize("training", [True, False])
def test_bin_is_its_formula(training: bool) -> None:
    layer, x = filled(BatchInstanceNorm2d(4, eps=1e-3)), features()
    mean, var = layer.running_mean.clone(), layer.running_var.clone()
    y = layer.train(training)(x)
    for n in range(3):
        for c in range(4):
            if training:
                batch_mean = x[:, c].mean()
                batch_var = ((x[:, c] - batch_mean) ** 2).mean()
            else:
                batch_mean, batch_var = mean[c], var[c]
            own_mean = x[n, c].mean()
            own_var = ((x[n, c] - own_mean) ** 2).mean()
            by_batch = standardised(x[n, c], batch_mean, batch_var, 1e-3)
            by_instance = standardised(x[n, c], own_mean, own_var, 1e-3)
            rho = layer.rho[c]
            expected = (rho * by_batch + (1 - rho) * by_instance) * layer.weight[c] + layer.bias[c]
            torch.testing.assert_close(y[n, c], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_sn_is_its_formula(training: bool) -> None:
    layer, x = filled(SwitchableNorm2d(4, eps=1e-3)), features()
    running_mean, running_var = layer.running_mean.clone(), layer.running_var.clone()
    y = layer.train(training)(x)
    mean_share = layer.mean_weight.exp() / layer.mean_weight.exp().sum()
    var_share = layer.var_weight.exp() / layer.var_weight.exp().sum()
    for n in range(3):
        for c in range(4):
            parts = [x[n, c], x[n], x[:, c]]
            means = [part.mean() for part in parts]
            variances = [((part - part.mean()) ** 2).mean() for part in parts]
            if not training:
                means[2], variances[2] = running_mean[c], running_var[c]
            mean = sum(share * value for share, value in zip(mean_share, means, strict=True))
            var = sum(share * value for share, value in zip(var_share, variances, strict=True))
            expected = standardised(x[n, c], mean, var, 1e-3) * layer.weight[c] + layer.bias[c]
            torch.testing.assert_close(y[n, c], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("norm", ["bin", "sn"])
def test_the_running_statistics_follow_in_training_and_rest_in_evaluation(norm: str) -> None:
    layer, x = NORMS[norm](4, momentum=0.25), features()
    layer.eval()(x)
    assert torch.equal(layer.running_mean, torch.zeros(4))
    layer.train()(x)
    torch.testing.assert_close(layer.running_mean, 0.25 * x.mean(dim=(0, 2, 3)))
    unbiased = norm == "bin"  # as BatchNorm has it; Switchable Normalization has the plain variance
    var = x.var(dim=(0, 2, 3), correction=int(unbiased))
    torch.testing.assert_close(layer.running_var, 0.75 + 0.25 * var)


def test_bin_starts_as_batchnorm_and_keeps_rho_in_range() -> None:
    x = features()
    layer, plain = BatchInstanceNorm2d(4).eval(), nn.BatchNorm2d(4).eval()
    torch.testing.assert_close(layer(x), plain(x))
    layer.rho.data = torch.tensor([-0.5, 0.25, 1.0, 1.5])
    in_range = BatchInstanceNorm2d(4).eval()
    in_range.rho.data = torch.tensor([0.0, 0.25, 1.0, 1.0])
    torch.testing.assert_close(layer(x), in_range(x))
    (layer.train()(x) ** 3).sum().backward()
    assert (layer.rho.grad != 0).all()


@pytest.mark.parametrize("norm", ["bin", "sn"])
def test_two_passes_may_come_before_one_backward_pass(norm: str) -> None:
    layer = filled(NORMS[norm](4)).train()
    (layer(features(0)).pow(3).sum() + layer(features(1)).pow(3).sum()).backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.parametrize("norm", ["bin", "sn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_features_keep_their_type_and_do_not_overflow(norm: str, dtype) -> None:
    layer = filled(NORMS[norm](4)).train()
    x = (400 * features()).to(dtype)
    y = layer(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), layer(x.float()), rtol=0.02, atol=0.02)


def test_sn_is_exact_far_from_zero() -> None:
    x = 3000 + 0.01 * features()
    y = SwitchableNorm2d(4).train()(x)
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("norm", ["bin", "sn"])
def test_gradients_reach_the_mixing_weights(norm: str) -> None:
    layer = filled(NORMS[norm](4)).train()
    (layer(features()) ** 3).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in layer.parameters())


@pytest.mark.parametrize("norm", ["bin", "sn"])
def test_batchnorm_is_replaced_with_its_own_tensors(norm: str) -> None:
    model = seeded(TinyNet)
    before = dict(model.state_dict(keep_vars=True))
    replace_batchnorm(model, norm)
    after = model.state_dict(keep_vars=True)
    assert type(model.norm1) is type(model.norm2) is NORMS[norm]
    assert model.norm2.eps == 1e-3
    assert set(before) <= set(after)
    for name in ("norm1.weight", "norm1.bias", "norm1.running_mean", "norm1.running_var"):
        assert after[name] is before[name]


@pytest.mark.parametrize("training", [True, False])
def test_a_layer_of_two_names_is_replaced_by_one(training: bool) -> None:
    model = nn.ModuleDict({"a": nn.BatchNorm2d(4), "inner": nn.Sequential()}).double()
    model["b"] = model["a"]
    model["inner"].append(model["a"])
    model.train(training)
    replace_batchnorm(model, "bin")
    assert model["a"] is model["b"] is model["inner"][0]
    assert model["a"].training == training
    assert model["a"].rho.dtype == torch.float64


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, track_running_stats=False),
     nn.SyncBatchNorm(4), BatchNormAct2d(4)],
)  # fmt: skip
def test_other_kinds_of_batchnorm_are_refused_and_nothing_is_replaced(layer: nn.Module) -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), layer)
    with pytest.raises(ValueError, match=r"norm='sn' replaces plain BatchNorm2d .* '1'"):
        replace_batchnorm(model, "sn")
    assert type(model[0]) is nn.BatchNorm2d


def test_tent_leaves_the_mixing_weights_alone() -> None:
    model = seeded(TinyNet)
    replace_batchnorm(model, "bin")
    names = {name.split(".")[-1] for name in selfadapt.create_method("tent", model).selection.names}
    assert names == {"weight", "bias"}


def test_san_leaves_other_normalisations_alone_and_says_so() -> None:
    model = seeded(TinyNet)
    replace_batchnorm(model, "sn")
    report = find_san(model, 0.1)
    assert report.skipped == dict.fromkeys(("norm1", "norm2"), "SwitchableNorm2d is not BatchNorm")


@pytest.mark.parametrize("norm", ["bin", "sn"])
def test_a_network_is_built_saved_and_loaded_with_it(norm: str, tmp_path) -> None:
    model = seeded(lambda: selfadapt.create_model("hrnet_w18", classes=3, norm=norm))
    selfadapt.save_model(model, tmp_path / "net.safetensors")
    loaded = selfadapt.load_model(tmp_path / "net.safetensors")
    assert loaded.spec.norm == norm
    x = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))


def test_weights_of_the_batchnorm_network_start_a_bin_network_that_is_its_equal(tmp_path) -> None:
    plain = seeded(lambda: selfadapt.create_model("hrnet_w18", classes=3))
    selfadapt.save_model(plain, tmp_path / "net.safetensors")
    with pytest.warns(UserWarning, match="saved with norm='bn', but is used with norm='bin'"):
        model = selfadapt.create_model(
            "hrnet_w18", weights=tmp_path / "net.safetensors", norm="bin"
        )
    x = torch.rand(1, 3, 32, 32).double()
    with torch.no_grad():
        torch.testing.assert_close(model.double()(x), plain.double()(x))


def test_an_unknown_normalisation_is_refused() -> None:
    with pytest.raises(ValueError, match="norm must be one of bn, bin, sn, got 'gn'"):
        selfadapt.create_model("deeplabv1_resnet50", norm="gn")
