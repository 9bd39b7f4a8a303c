"""Networks adapted once and used many times: ``method.adapt(image)``."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_adapt import LATER, reference_norm
from test_auto import reference_auto
from torch import Tensor, nn

from conftest import TinyNet, assert_same, random_image, seeded, snapshot
from networks import NETWORKS
from selfadapt import Adapted, SelfAdapt, View, create_method, load_model, open_model
from selfadapt.norm import SaN
from selfadapt.streets import render
from selfadapt.views import resize

CHEAP = (
    "torchvision lraspp", "smp Unet", "smp Unet binary", "smp Unet softmax", "smp FPN",
    "smp PSPNet with labels", "timm mobilenetv3", "timm convnext", "hf SegFormer",
    "hf UPerNet Swin", "toy", "toy with BIN", "toy binary", "toy dict", "toy tuple",
    "toy four channels", "own U-Net", "frozen BatchNorm",
)  # fmt: skip


def structure(output: Any) -> Any:
    """Return what a network's output is, with a shape in the place of each tensor."""
    if isinstance(output, Tensor):
        return output.shape, output.dtype
    if isinstance(output, dict):
        return type(output), {key: structure(value) for key, value in output.items()}
    if isinstance(output, list | tuple):
        return type(output), [structure(value) for value in output]
    return type(output)


def assert_equal_results(first: Any, second: Any) -> None:
    torch.testing.assert_close(first.probs, second.probs, rtol=0, atol=1e-5)
    assert torch.equal(first.label, second.label)


@pytest.mark.slow
@pytest.mark.parametrize("network", CHEAP)
def test_it_gives_what_the_method_gives_and_is_the_callers_network(network: str) -> None:
    case = NETWORKS[network]
    model = seeded(case.build)
    image = random_image(61, 97, case.channels)
    for mode in ("paper", "official"):
        method = SelfAdapt(model, mode=mode, steps=2, scales=(0.5,))
        before = snapshot(model)
        adapted = method.adapt(image)
        expected, again = method(image), adapted(image)
        assert_equal_results(adapted.result, expected)
        assert_equal_results(again, expected)
        assert adapted.result.losses == expected.losses
        assert torch.equal(again.source_probs, expected.source_probs)
        assert again.losses == ()
        assert adapted.result.notes == expected.notes
        assert again.notes == adapted.notes

        module = adapted.module
        assert not any(isinstance(layer, SaN) for layer in module.modules())
        assert [*map(type, module.modules())] == [*map(type, model.modules())]
        assert not any(layer.training for layer in module.modules())
        x = torch.rand(2, case.channels, 64, 96)
        with torch.no_grad():
            assert structure(module(x)) == structure(seeded(case.build)(x))
        assert_same(before, snapshot(model))
        other = seeded(case.build, seed=1)
        other.load_state_dict(module.state_dict())
        with torch.no_grad():
            scores = [method.interface.scores(network(x)) for network in (module, other)]
        assert torch.equal(*scores)


@pytest.mark.parametrize("name", ["san", "p-bn", "tent", "entropy", "memo"])
@pytest.mark.parametrize("mode", ["paper", "official"])
def test_other_methods_that_change_the_network_give_it(name: str, mode: str, tiny: Any) -> None:
    image, other = random_image(), random_image(40, 33, seed=1)
    method = create_method(name, tiny, mode=mode)
    adapted = method.adapt(image)
    assert_equal_results(adapted(image), method(image))
    assert not torch.allclose(adapted(other).probs, method(other).probs, atol=1e-4)


@pytest.mark.parametrize(("name", "message"), [
    ("source", "changes nothing"), ("tta", "averages several"), ("mc-dropout", "changes nothing"),
    ("intent", "averages several"), ("ensemble", "several networks"),
])  # fmt: skip
def test_methods_without_a_network_of_their_own_say_so(name: str, message: str, tiny: Any) -> None:
    with pytest.raises(ValueError, match=message):
        create_method(name, tiny).adapt(random_image())


def test_what_fails_is_an_error(tiny: nn.Module, image: Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be adapted to this image"):
        SelfAdapt(tiny, mode="paper", loss=lambda logits, _: logits.sum() / 0).adapt(image)
    with pytest.raises(ValueError, match="leave out budget_ms"):
        SelfAdapt(tiny, budget_ms=100).adapt(image)
    adapted = SelfAdapt(tiny, steps=1).adapt(image)
    with pytest.raises(ValueError, match="changes nothing"):
        adapted.adapt(image)
    with pytest.raises(TypeError, match="save its state_dict"):
        adapted.save(tmp_path / "tiny.safetensors")


# statistics


def reference_statistics(
    image: Tensor, weights: dict[str, Tensor], alpha: float
) -> dict[str, Tensor]:
    """Return what SaN normalises an image with in TinyNet, a channel after the other."""
    interface = TinyNet.interface
    x = F.conv2d(interface.normalize(image), weights["stem.weight"], stride=2, padding=1)[0]
    statistics: dict[str, Tensor] = {}
    for name, eps in (("norm1", 1e-5), ("norm2", 1e-3)):
        for kind in ("mean", "var"):
            key = f"{name}.running_{kind}"
            of_image = [float(z.mean() if kind == "mean" else z.var(correction=0)) for z in x]
            mixed = [(1 - alpha) * float(s) + alpha * i for s, i in zip(weights[key], of_image)]  # noqa: B905
            statistics[key] = torch.tensor(mixed, dtype=x.dtype)
        if name == "norm1":
            x = reference_norm(x, weights, "norm1", alpha, eps).clamp(min=0)
            x = F.conv2d(x[None], weights["body.weight"], padding=1)[0]
    return statistics


def test_a_tile_is_normalised_as_the_image_adapted_to(tiny: nn.Module) -> None:
    image = random_image(48, 64)
    module = create_method("san", tiny, alpha=0.3).adapt(image).module
    weights = tiny.state_dict()
    statistics = reference_statistics(image, weights, 0.3)
    for key, value in statistics.items():
        torch.testing.assert_close(module.state_dict()[key], value, rtol=0, atol=1e-5)
    tile = tiny.interface.normalize(0.2 * image[:, :20, 30:])
    with torch.no_grad():
        x = tile
        for conv, norm, eps in ((tiny.stem, "norm1", 1e-5), (tiny.body, "norm2", 1e-3)):
            mean, var = (statistics[f"{norm}.running_{kind}"] for kind in ("mean", "var"))
            scale = weights[f"{norm}.weight"] / (var + eps).sqrt()
            shift = weights[f"{norm}.bias"] - mean * scale
            x = (conv(x) * scale.reshape(-1, 1, 1) + shift.reshape(-1, 1, 1)).relu()
        torch.testing.assert_close(module(tile), tiny.head(x), rtol=0, atol=1e-5)
        both = module(torch.cat((tile, tile.flip(-1))))  # what else is in the batch is nothing
        torch.testing.assert_close(both[:1], module(tile))


class Twice(nn.Module):
    """A network that uses a layer for two scales of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        small = F.avg_pool2d(x, 2).clamp(min=0)
        y = self.norm(self.conv(x)) + F.interpolate(self.norm(self.conv(small)), x.shape[-2:])
        return self.head(y.relu())


def test_a_layer_that_is_used_twice_gets_the_mean_and_a_note(image: Tensor) -> None:
    model = seeded(Twice)
    method = create_method("p-bn", model)
    adapted = method.adapt(image)
    x = method.interface.normalize(image)
    with torch.no_grad():
        uses = [model.conv(x), model.conv(F.avg_pool2d(x, 2).clamp(min=0))]
    mean = sum(y.mean(dim=(0, 2, 3)) for y in uses) / 2
    var = sum(y.var(dim=(0, 2, 3), correction=0) for y in uses) / 2
    torch.testing.assert_close(adapted.module.norm.running_mean, mean)
    torch.testing.assert_close(adapted.module.norm.running_var, var)
    assert "norm: used several times" in adapted.notes[-1]
    assert adapted(image).notes == adapted.notes


class Windows(nn.Module):
    """A network that puts the quarters of an image into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        height, width = x.shape[2] // 2, x.shape[3] // 2
        x = x.unflatten(3, (2, width)).unflatten(2, (2, height)).permute(0, 2, 4, 1, 3, 5)
        x = self.norm(x.flatten(0, 2)).relu().unflatten(0, (-1, 2, 2))
        return self.head(x.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3))


def test_parts_of_an_image_in_the_batch_are_normalised_as_the_image(image: Tensor) -> None:
    method = create_method("san", seeded(Windows), alpha=0.5)
    adapted = method.adapt(image)
    assert_equal_results(adapted(image), method(image))
    assert adapted.notes == method.notes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_it_has_the_dtype_of_the_callers(dtype: torch.dtype, image: Tensor) -> None:
    model = seeded(TinyNet).to(dtype)
    method = SelfAdapt(model, mode="paper", steps=2)
    adapted = method.adapt(image)
    for (name, value), expected in zip(
        adapted.module.state_dict().items(), model.state_dict().values(), strict=True
    ):
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape), name
    if dtype == torch.float64:
        torch.testing.assert_close(adapted(image).probs, method(image).probs, rtol=0, atol=1e-12)


# auto mode, and views of the prediction


@pytest.mark.parametrize(("alpha", "seed"), [(0.1, 0), (1.0, 3), (0.1, 9), (1.0, 8), (0.1, 64)])
def test_in_auto_mode_it_lies_between_the_three_that_are_averaged(alpha: float, seed: int) -> None:
    model, image = seeded(TinyNet, seed=seed).double(), random_image(24, 31, seed=seed).double()
    adapted = SelfAdapt(model, alpha=alpha, steps=3, adapt=LATER).adapt(image)
    expected = reference_auto(image, model, alpha, 3)
    share = expected["share"]
    weights = model.state_dict()
    for name in LATER:
        weights[name] = weights[name] + share * (expected["weights"][name].detach() - weights[name])
    mixed = alpha * (share + (1 - share) * expected["san"])
    weights |= reference_statistics(image, weights, mixed)
    for name, value in adapted.module.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-5)
    assert adapted.share == pytest.approx(share if expected["losses"] else 0)
    assert adapted.temperature == pytest.approx(expected["temperature"], rel=1e-4)
    torch.testing.assert_close(adapted.result.probs, expected["probs"], rtol=0, atol=1e-5)


def test_final_views_are_taken_with_it() -> None:
    tiny, image = seeded(TinyNet, seed=64), random_image(24, 31, seed=64)
    adapted = SelfAdapt(tiny, steps=2, adapt=LATER, final_scales=(0.5,)).adapt(image)

    def logits(x: Tensor) -> Tensor:
        with torch.no_grad():
            scores = adapted.module(tiny.interface.normalize(x))
        return F.interpolate(scores, x.shape[-2:], mode="bilinear")[0]

    small = View(0.5).make(image)
    gray = (0.299 * small[0] + 0.587 * small[1] + 0.114 * small[2]).expand(3, -1, -1)
    views = logits(small).softmax(dim=0), logits(gray.flip(-1)).softmax(dim=0).flip(-1)
    mean = sum(resize(probs, (24, 31)) for probs in views) / 2
    assert 0 < adapted.share < 1
    probs = logits(image).softmax(dim=0).lerp(mean, adapted.share / 2)
    expected = (probs.log() / adapted.temperature).softmax(dim=0)
    torch.testing.assert_close(adapted(image).probs, expected, rtol=0, atol=1e-5)


# life


def test_other_images_have_the_size_limit_and_the_notes(tiny: nn.Module, image: Tensor) -> None:
    adapted = SelfAdapt(tiny, mode="paper", steps=1, max_pixels=2000).adapt(image)
    result = adapted(random_image(64, 96, seed=1))
    assert tuple(result.label.shape) == (64, 96)
    assert any("segmented at" in note for note in result.notes)
    normalized = adapted(tiny.interface.normalize(image)[0], normalized=True)
    torch.testing.assert_close(normalized.probs, adapted(image).probs)
    assert isinstance(adapted, Adapted)
    assert "2 steps" in repr(SelfAdapt(tiny, steps=2, mode="paper").adapt(image))
    assert "Adapted with TinyNet" in str(adapted.explain())
    assert adapted.estimate(32, 48).seconds > 0


def test_nothing_is_carried_over(tiny: nn.Module) -> None:
    method = SelfAdapt(tiny, mode="paper", steps=3, alpha=0.4)
    first, second = random_image(), random_image(40, 56, seed=5)
    alone = method(second)
    one = method.adapt(first)
    kept = {name: value.clone() for name, value in one.module.state_dict().items()}
    two = method.adapt(second)
    assert torch.equal(method(second).probs, alone.probs)
    one(second)
    two(first)
    for name, value in one.module.state_dict().items():
        assert torch.equal(value, kept[name])
    with torch.no_grad():
        for value in (*two.module.parameters(), *two.module.buffers()):
            value.zero_()
    assert_equal_results(one(first), method(first))


def test_several_threads_adapt_and_use_networks_of_one_method() -> None:
    method = SelfAdapt(seeded(TinyNet), mode="official", steps=3)
    images = [random_image(seed=seed) for seed in range(8)]
    expected = [method(image) for image in images]
    with ThreadPoolExecutor(4) as pool:
        networks = list(pool.map(method.adapt, images))
        again = list(pool.map(lambda adapted, image: adapted(image), networks, images))
    for result, other in zip(expected, again, strict=True):
        assert_equal_results(result, other)
    alone = networks[0](images[1])
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(networks[0], images[1:2] * 8):
            assert torch.equal(result.probs, alone.probs)


def test_it_lives_as_long_as_it_is_held(image: Tensor) -> None:
    method = SelfAdapt(seeded(TinyNet), steps=2)
    adapted = method.adapt(image)
    adapted(image)
    module = adapted.module
    alive = weakref.ref(adapted), weakref.ref(module)
    del adapted
    gc.collect()
    assert alive[0]() is None
    with torch.no_grad():
        assert module(torch.rand(1, 3, 16, 16)).isfinite().all()
    del module
    gc.collect()
    assert alive[1]() is None


def test_a_saved_one_gives_the_same(tmp_path: Path) -> None:
    image, _ = render("rain", seed=3, height=64, width=128)
    method = SelfAdapt(open_model("streets"), mode="paper", steps=2)
    adapted = method.adapt(image)
    adapted.save(tmp_path / "adapted.safetensors")
    loaded = load_model(tmp_path / "adapted.safetensors")
    assert loaded.spec == method.model.spec
    other, _ = render("rain", seed=4, height=64, width=128)
    for picture in (image, other):
        expected, result = adapted(picture), create_method("source", loaded)(picture)
        torch.testing.assert_close(result.probs, expected.probs)
        assert torch.equal(result.label, expected.label)
        assert result.classes == expected.classes


def test_sliding_windows_of_monai_take_it(tiny: nn.Module) -> None:
    inferers = pytest.importorskip("monai.inferers")
    image = random_image(64, 96)
    module = SelfAdapt(tiny, mode="paper", steps=2).adapt(image).module
    x = tiny.interface.normalize(image)
    full = nn.Sequential(module, nn.Upsample(scale_factor=2)).eval()
    with torch.no_grad():
        scores = inferers.sliding_window_inference(x, (32, 32), 4, full, overlap=0)
        for row in (0, 32):
            for column in (0, 32, 64):
                area = ..., slice(row, row + 32), slice(column, column + 32)
                torch.testing.assert_close(scores[area], full(x[area]))
