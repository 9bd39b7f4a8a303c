from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image as PILImage
from PIL import ImageOps
from test_adapt import NaNWhere, reference_logits, reference_norm
from torch import Tensor, nn

import selfadapt
from conftest import TinyNet, assert_same, random_image, seeded, snapshot
from selfadapt import Interface, View, add_dropout
from selfadapt.baselines import TTA, Ensemble, MCDropout, PredictionBN, SaNOnly, Source
from selfadapt.norm import SaN

MEAN = torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1)
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-5}

Size = tuple[int, int]
Looks = Sequence[tuple[float, bool, bool]]
"""Scale, flip and gray of each view."""


@pytest.fixture
def image() -> Tensor:
    return random_image(19, 26)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def reference_probs(image: Tensor, model: nn.Module, alpha: float) -> Tensor:
    return reference_logits(image, weights_of(model), alpha).softmax(dim=0)


@torch.no_grad()
def plain_probs(model: nn.Module, x: Tensor) -> Tensor:
    """Run a network on an input (C, H, W) that is normalised already."""
    return F.interpolate(model(x[None]), x.shape[-2:], mode="bilinear")[0].softmax(dim=0)


# one forward pass


@pytest.mark.parametrize("mode", ["paper", "official"])
def test_source_is_a_plain_forward_pass(tiny: nn.Module, image: Tensor, mode: Any) -> None:
    expected = plain_probs(tiny, (image - MEAN) / STD)
    result = Source(tiny.train(), mode=mode)(image)
    torch.testing.assert_close(result.probs, expected, **CLOSE)
    assert torch.equal(result.source_probs, result.probs)
    assert (result.fused_probs, result.pseudo_label, result.losses) == (None, None, ())


@pytest.mark.parametrize("mode", ["paper", "official"])
def test_prediction_bn_is_batchnorm_in_training(tiny: nn.Module, image: Tensor, mode: Any) -> None:
    """BatchNorm in training takes the mean and the biased variance of the one image."""
    result = PredictionBN(tiny, mode=mode)(image)
    in_training = plain_probs(seeded(TinyNet).train(), (image - MEAN) / STD)
    torch.testing.assert_close(result.probs, in_training, **CLOSE)
    torch.testing.assert_close(result.probs, reference_probs(image, tiny, 1.0), **CLOSE)
    torch.testing.assert_close(result.source_probs, reference_probs(image, tiny, 0.0), **CLOSE)


def test_prediction_bn_does_not_know_the_source_statistics(tiny: nn.Module, image: Tensor) -> None:
    expected = PredictionBN(tiny)(image).probs
    tiny.norm1.running_mean.add_(3.0)
    tiny.norm2.running_var.mul_(5.0)
    assert torch.equal(PredictionBN(tiny)(image).probs, expected)
    assert not torch.equal(SaNOnly(tiny, alpha=0.9)(image).probs, expected)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_san_mixes_the_statistics(alpha: float, dtype: torch.dtype, image: Tensor) -> None:
    model = seeded(TinyNet).to(dtype)
    result = SaNOnly(model, alpha=alpha)(image)
    torch.testing.assert_close(
        result.probs, reference_probs(image.to(dtype), model, alpha), **CLOSE
    )
    assert torch.allclose(result.probs, result.source_probs, **CLOSE) == (alpha == 0)


def test_san_takes_an_alpha_by_layer(tiny: nn.Module, image: Tensor) -> None:
    weights = weights_of(tiny)
    x = F.conv2d(((image - MEAN) / STD)[None], weights["stem.weight"], stride=2, padding=1)[0]
    x = reference_norm(x, weights, "norm1", 0.7, 1e-5).clamp(min=0)
    x = F.conv2d(x[None], weights["body.weight"], padding=1)[0]
    x = reference_norm(x, weights, "norm2", 0.0, 1e-3).clamp(min=0)
    x = F.conv2d(x[None], weights["head.weight"], weights["head.bias"])
    expected = F.interpolate(x, (19, 26), mode="bilinear")[0].softmax(dim=0)
    torch.testing.assert_close(SaNOnly(tiny, alpha={"norm1": 0.7})(image).probs, expected, **CLOSE)


def test_a_large_image_is_segmented_smaller_and_brought_back(tiny: nn.Module) -> None:
    image = random_image(38, 52)
    small = F.interpolate(image[None], (19, 26), mode="bilinear", antialias=True)[0]
    logits = reference_logits(small, weights_of(tiny), 0.1)
    expected = F.interpolate(logits[None], (38, 52), mode="bilinear")[0].softmax(dim=0)
    result = SaNOnly(tiny, max_pixels=19 * 26)(image)
    torch.testing.assert_close(result.probs, expected, **CLOSE)
    assert "segmented at 26x19, the image is 52x38" in result.notes


# test-time augmentation


def paper_view(image: Tensor, scale: float, flip: bool, gray: bool) -> Tensor:
    size = (round(image.shape[-2] * scale), round(image.shape[-1] * scale))
    view = F.interpolate(image[None], size, mode="bilinear", antialias=scale < 1)[0]
    if gray:
        luma = 0.299 * view[0] + 0.587 * view[1] + 0.114 * view[2]
        view = torch.stack([luma, luma, luma])
    return view.flip(-1) if flip else view


def paper_undo(probs: Tensor, size: Size, scale: float, flip: bool) -> Tensor:
    probs = probs.flip(-1) if flip else probs
    return F.interpolate(probs[None], size, mode="bilinear", antialias=scale > 1)[0]


def official_view(image: Tensor, scale: float, flip: bool, gray: bool) -> Tensor:
    levels = (image * 255).round().byte().permute(1, 2, 0).numpy()
    size = (int(image.shape[-1] * scale), int(image.shape[-2] * scale))
    picture = PILImage.fromarray(levels).resize(size, PILImage.Resampling.BILINEAR)
    if gray:
        picture = picture.convert("L").convert("RGB")
    if flip:
        picture = ImageOps.mirror(picture)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255


def official_undo(probs: Tensor, size: Size, scale: float, flip: bool) -> Tensor:
    probs = probs.flip(-1) if flip else probs
    return F.interpolate(probs[None], size, mode="bilinear", align_corners=True)[0]


MAKE_AND_UNDO = {"paper": (paper_view, paper_undo), "official": (official_view, official_undo)}


def reference_tta(
    image: Tensor, model: nn.Module, alpha: float, looks: Looks, mode: str = "paper"
) -> Tensor:
    make, undo = MAKE_AND_UNDO[mode]
    undone = []
    for scale, flip, gray in looks:
        probs = reference_probs(make(image, scale, flip, gray), model, alpha)
        undone.append(undo(probs, image.shape[-2:], scale, flip))
    return sum(undone) / len(undone)


def paper_looks(scales: Sequence[float]) -> Looks:
    return [(scale, both, both) for scale in scales for both in (False, True)]


@pytest.mark.parametrize("mode", ["paper", "official"])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("scales", [(0.25, 0.5, 0.75), (1.0,), (0.5, 1.5)])
def test_tta_is_the_mean_over_the_views(
    tiny: nn.Module, image: Tensor, mode: Any, alpha: float, scales: tuple[float, ...]
) -> None:
    result = TTA(tiny, alpha=alpha, scales=scales, mode=mode)(image)
    expected = reference_tta(image, tiny, alpha, paper_looks(scales), mode)
    torch.testing.assert_close(result.probs, expected, **CLOSE)
    assert torch.equal(result.fused_probs, result.probs)
    torch.testing.assert_close(result.source_probs, reference_probs(image, tiny, 0.0), **CLOSE)
    assert result.losses == ()


def test_ttas_own_settings_are_the_papers(tiny: nn.Module, image: Tensor) -> None:
    expected = reference_tta(image, tiny, 0.1, paper_looks((0.25, 0.5, 0.75)))
    torch.testing.assert_close(TTA(tiny)(image).probs, expected, **CLOSE)


@pytest.mark.parametrize("mode", ["paper", "official"])
@pytest.mark.parametrize(
    "looks",
    [
        [(1.0, False, False), (1.0, True, False)],
        [(0.75, False, True), (1.3, True, False), (0.5, True, True)],
        [(1.0, True, True)],
    ],
)
def test_tta_takes_any_views(tiny: nn.Module, image: Tensor, mode: Any, looks: Looks) -> None:
    result = TTA(tiny, views=(View(*look) for look in looks), mode=mode)(image)
    expected = reference_tta(image, tiny, 0.1, looks, mode)
    torch.testing.assert_close(result.probs, expected, **CLOSE)


def test_tta_with_the_image_alone_is_san(tiny: nn.Module, image: Tensor) -> None:
    result = TTA(tiny, views=View(), alpha=0.3)(image)
    assert torch.equal(result.probs, SaNOnly(tiny, alpha=0.3)(image).probs)


def test_a_view_that_is_given_twice_counts_once(tiny: nn.Module, image: Tensor) -> None:
    twice = TTA(tiny, scales=(0.5, 0.5, 0.75))(image).probs
    assert torch.equal(twice, TTA(tiny, scales=(0.5, 0.75))(image).probs)


def test_tta_flips_only_where_there_is_no_colour() -> None:
    model = seeded(lambda: TinyNet(channels=4))
    image = random_image(19, 26, channels=4)
    result = TTA(model, scales=(1.0,), alpha=0.0)(image)
    expected = (plain_probs(model, image) + plain_probs(model, image.flip(-1)).flip(-1)) / 2
    torch.testing.assert_close(result.probs, expected, **CLOSE)
    assert "input channels: 4, so no view is turned gray" in result.notes


def test_tta_of_a_large_image_is_brought_back(tiny: nn.Module) -> None:
    image = random_image(38, 52)
    small = F.interpolate(image[None], (19, 26), mode="bilinear", antialias=True)[0]
    fused = reference_tta(small, tiny, 0.1, paper_looks((0.5,)))
    expected = F.interpolate(fused[None], (38, 52), mode="bilinear")[0]
    result = TTA(tiny, scales=(0.5,), max_pixels=19 * 26)(image)
    torch.testing.assert_close(result.probs, expected, **CLOSE)


# Monte-Carlo dropout


def dropped(x: Tensor, rate: float, by_channel: bool = False) -> Tensor:
    """Zero values, or whole channels, at a rate, and make up for it in the others."""
    mask = torch.empty(len(x), 1, 1) if by_channel else torch.empty_like(x)
    return x * mask.bernoulli_(1 - rate) / (1 - rate)


def reference_passes(
    image: Tensor,
    model: nn.Module,
    alpha: float,
    passes: int,
    seed: int,
    first: Callable[[Tensor], Tensor],
    second: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the mean over passes of TinyNet with something random after each ReLU."""
    weights = weights_of(model)
    total = torch.zeros(3, *image.shape[-2:])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(passes):
            x = ((image - MEAN) / STD)[None]
            x = F.conv2d(x, weights["stem.weight"], stride=2, padding=1)[0]
            x = first(reference_norm(x, weights, "norm1", alpha, 1e-5).clamp(min=0))
            x = F.conv2d(x[None], weights["body.weight"], padding=1)[0]
            x = second(reference_norm(x, weights, "norm2", alpha, 1e-3).clamp(min=0))
            x = F.conv2d(x[None], weights["head.weight"], weights["head.bias"])
            total += F.interpolate(x, image.shape[-2:], mode="bilinear")[0].softmax(dim=0)
    return total / passes


class DropoutNet(TinyNet):
    """TinyNet as one would train it with dropout, of two kinds."""

    def __init__(self, rates: tuple[float, float] = (0.3, 0.2)) -> None:
        super().__init__()
        self.drop1 = nn.Dropout(rates[0])
        self.drop2 = nn.Dropout2d(rates[1])

    def forward(self, x: Tensor) -> Any:
        x = self.drop1(self.norm1(self.stem(x)).relu())
        x = self.drop2(self.norm2(self.body(x)).relu())
        return self.head(x)


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"passes": 4, "seed": 0}, (0.3, 0.2)),
        ({"passes": 1, "seed": 7}, (0.3, 0.2)),
        ({"passes": 3, "seed": 1, "alpha": 0.4}, (0.3, 0.2)),
        ({"passes": 3, "seed": 2, "rate": 0.6}, (0.6, 0.6)),
    ],
)
def test_mc_dropout_is_the_mean_over_passes(
    image: Tensor, settings: dict[str, Any], rates: tuple[float, float]
) -> None:
    model = seeded(DropoutNet)
    result = MCDropout(model, **settings)(image)
    expected = reference_passes(
        image,
        model,
        settings.get("alpha", 0.0),
        settings["passes"],
        settings["seed"],
        lambda x: dropped(x, rates[0]),
        lambda x: dropped(x, rates[1], by_channel=True),
    )
    torch.testing.assert_close(result.probs, expected, **CLOSE)
    assert not torch.allclose(result.probs, result.source_probs, rtol=0, atol=1e-3)
    assert result.notes == ()


def test_a_dropout_layer_of_rate_zero_stays_off(image: Tensor) -> None:
    model = seeded(lambda: DropoutNet((0.0, 0.2)))
    result = MCDropout(model, passes=3, rate=0.5)(image)
    expected = reference_passes(
        image, model, 0.0, 3, 0, lambda x: x, lambda x: dropped(x, 0.5, by_channel=True)
    )
    torch.testing.assert_close(result.probs, expected, **CLOSE)


class ReLUNet(TinyNet):
    """TinyNet with any form of ReLU."""

    def __init__(self, *relus: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.relu1, self.relu2 = relus

    def forward(self, x: Tensor) -> Any:
        x = self.relu1(self.norm1(self.stem(x)))
        x = self.relu2(self.norm2(self.body(x)))
        return self.head(x)


shared = nn.ReLU()
RELUS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "layers": (nn.ReLU(), nn.ReLU(inplace=True)),
    "one layer used twice": (shared, shared),
    "functions": (F.relu, torch.relu),
    "functions in place": (lambda x: F.relu(x, inplace=True), torch.relu_),
    "methods": (lambda x: x.relu(), lambda x: x.relu_()),
    "a layer and a function": (nn.ReLU(), F.relu),
}


@pytest.mark.parametrize("form", RELUS)
@pytest.mark.parametrize(
    "settings",
    [
        {"passes": 3, "seed": 0},
        {"passes": 2, "seed": 5, "rate": 0.4},
        {"passes": 2, "seed": 1, "alpha": 0.3},
    ],
)
def test_a_network_without_dropout_gets_it_after_each_relu(
    image: Tensor, form: str, settings: dict[str, Any]
) -> None:
    model = seeded(lambda: ReLUNet(*RELUS[form]))
    before = snapshot(model)
    result = MCDropout(model, **settings)(image)
    rate = settings.get("rate", 0.1)
    expected = reference_passes(
        image,
        model,
        settings.get("alpha", 0.0),
        settings["passes"],
        settings["seed"],
        lambda x: dropped(x, rate),
        lambda x: dropped(x, rate),
    )
    torch.testing.assert_close(result.probs, expected, **CLOSE)
    assert f"so {rate:g} is put after each of its 2 ReLUs" in result.notes[-1]
    assert_same(before, snapshot(model))


def test_dropout_layers_of_rate_zero_count_for_none(image: Tensor) -> None:
    model = seeded(lambda: DropoutNet((0.0, 0.0)))
    result = MCDropout(model, passes=2)(image)
    assert "so 0.1 is put after each of its 2 ReLUs" in result.notes[-1]
    assert torch.equal(result.probs, MCDropout(seeded(TinyNet), passes=2)(image).probs)


def test_a_network_trained_with_add_dropout_takes_its_own(image: Tensor) -> None:
    model = seeded(lambda: ReLUNet(nn.ReLU(), nn.ReLU()))
    expected = MCDropout(model, passes=3, rate=0.25)(image).probs
    add_dropout(model, 0.25)
    result = MCDropout(model, passes=3)(image)
    assert torch.equal(result.probs, expected)
    assert result.notes == ()


@pytest.mark.parametrize("build", [TinyNet, DropoutNet])
def test_the_seed_alone_decides(image: Tensor, build: Callable[[], nn.Module]) -> None:
    model = seeded(build)
    method = MCDropout(model, passes=3, seed=4)
    first = method(image).probs
    torch.manual_seed(11)
    method(random_image(23, 17))
    assert torch.equal(method(image).probs, first)
    assert torch.equal(MCDropout(model, passes=3, seed=4)(image).probs, first)
    assert not torch.equal(MCDropout(model, passes=3, seed=5)(image).probs, first)
    assert not torch.equal(MCDropout(model, passes=2, seed=4)(image).probs, first)


def rates_of(model: nn.Module) -> list[float]:
    return [layer.p for layer in model.modules() if hasattr(layer, "p")]


@pytest.mark.parametrize("build", [TinyNet, DropoutNet])
@pytest.mark.parametrize("training", [False, True])
def test_mc_dropout_leaves_the_dice_and_the_network(
    image: Tensor, build: Callable[[], nn.Module], training: bool
) -> None:
    model = seeded(build).train(training)
    before, dice = snapshot(model), torch.get_rng_state()
    rates = rates_of(model)
    method = MCDropout(model, passes=2, rate=0.5)
    assert torch.equal(torch.get_rng_state(), dice)
    method(image)
    assert torch.equal(torch.get_rng_state(), dice)
    assert_same(before, snapshot(model))
    assert rates_of(model) == rates


@pytest.mark.parametrize("num", [1, 4])
def test_threads_do_not_take_each_others_numbers(image: Tensor, num: int) -> None:
    networks = [seeded(TinyNet, seed) for seed in range(num)]
    methods = [MCDropout(networks[i % num], passes=20, seed=i) for i in range(4)]
    expected = [method(image).probs for method in methods]
    dice = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda method: method(image).probs, methods * 3))
    assert all(map(torch.equal, found, expected * 3))
    assert torch.equal(torch.get_rng_state(), dice)


def test_mc_dropout_needs_something_to_drop() -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.GELU(), nn.Conv2d(4, 3, 1)))
    before, dice = snapshot(model), torch.get_rng_state()
    with pytest.raises(ValueError, match=r"needs dropout layers, or ReLUs .* has neither"):
        MCDropout(model)
    assert_same(before, snapshot(model))
    assert torch.equal(torch.get_rng_state(), dice)


# ensembles


def members(num: int = 3) -> list[nn.Module]:
    return [seeded(TinyNet, seed) for seed in range(num)]


@pytest.mark.parametrize("alpha", [0.0, 0.2])
def test_an_ensemble_is_the_mean_of_its_networks(image: Tensor, alpha: float) -> None:
    networks = members()
    result = Ensemble(networks, alpha=alpha)(image)
    expected = sum(reference_probs(image, network, alpha) for network in networks) / 3
    source = sum(reference_probs(image, network, 0.0) for network in networks) / 3
    torch.testing.assert_close(result.probs, expected, **CLOSE)
    torch.testing.assert_close(result.source_probs, source, **CLOSE)
    assert result.fused_probs is None
    assert result.seconds > 0


@pytest.mark.parametrize("mode", ["paper", "official"])
def test_an_ensemble_with_tta_is_the_mean_of_means(image: Tensor, mode: Any) -> None:
    networks = members(2)
    method = Ensemble(networks, alpha=0.2, tta=True, scales=(0.5, 0.75), mode=mode)
    looks = paper_looks((0.5, 0.75))
    expected = sum(reference_tta(image, network, 0.2, looks, mode) for network in networks) / 2
    result = method(image)
    torch.testing.assert_close(result.probs, expected, **CLOSE)
    assert torch.equal(result.fused_probs, result.probs)


def test_an_ensembles_views_may_come_from_a_generator(image: Tensor) -> None:
    networks = members(2)
    looks = [(1.0, True, False), (0.5, False, True)]
    result = Ensemble(networks, tta=True, views=(View(*look) for look in looks))(image)
    expected = sum(reference_tta(image, network, 0.1, looks) for network in networks) / 2
    torch.testing.assert_close(result.probs, expected, **CLOSE)


def test_an_ensemble_takes_one_view_as_tta_does(tiny: nn.Module, image: Tensor) -> None:
    expected = TTA(tiny, views=View(0.5))(image).probs
    assert torch.equal(Ensemble(tiny, tta=True, views=View(0.5))(image).probs, expected)


@pytest.mark.parametrize("form", [lambda m: m, lambda m: [m], lambda m: iter((m, m))])
def test_one_network_alone_is_san(tiny: nn.Module, image: Tensor, form: Any) -> None:
    result = Ensemble(form(tiny), alpha=0.3)(image)
    expected = SaNOnly(tiny, alpha=0.3)(image)
    assert torch.equal(result.probs, expected.probs)
    assert torch.equal(result.source_probs, expected.source_probs)


def test_networks_of_other_classes_are_refused(tiny: nn.Module, image: Tensor) -> None:
    method = Ensemble([tiny, seeded(lambda: TinyNet(4))])
    with pytest.raises(ValueError, match=r"must have the same classes, got 3 and 4 of them"):
        method(image)


def test_networks_of_the_same_classes_in_another_order_are_refused() -> None:
    models = [
        selfadapt.create_model("smp:FPN/mobilenet_v2", classes=classes)
        for classes in (["road", "car"], ["car", "road"])
    ]
    with pytest.raises(ValueError, match="the same classes, got road, car and car, road"):
        Ensemble(models)


def test_dropout_that_is_never_used_does_not_count(image: Tensor) -> None:
    model = seeded(TinyNet)
    model.unused = nn.Dropout(0.5)
    method = MCDropout(model)
    assert "this network uses no dropout layer, so 0.1 is put after each of its 2 ReLUs" in str(
        method.notes
    )
    assert not torch.equal(method(image).probs, method(image).source_probs)


def test_an_ensemble_needs_networks() -> None:
    for none in ((), [], iter(())):
        with pytest.raises(ValueError, match="an ensemble needs at least one network, got none"):
            Ensemble(none)


@pytest.mark.parametrize("wrong", [None, 3, "resnet", [3], [nn.Identity, None]])
def test_an_ensemble_is_of_networks(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        Ensemble(wrong)


class Normalised(TinyNet):
    """A network that says how its input is normalised."""

    def __init__(self, mean: float, std: float) -> None:
        super().__init__()
        self.interface = Interface(mean=(mean,) * 3, std=(std,) * 3)


def test_each_network_normalises_a_raw_image_its_own_way(image: Tensor) -> None:
    networks = [
        seeded(lambda: Normalised(0.5, 0.25), 1),
        seeded(lambda: Normalised(0.0, 1.0), 2),
        seeded(TinyNet, 3),
    ]
    inputs = [(image - 0.5) / 0.25, image, (image - MEAN) / STD]
    expected = sum(map(plain_probs, networks, inputs)) / 3
    torch.testing.assert_close(Ensemble(networks, alpha=0.0)(image).probs, expected, **CLOSE)


def test_each_network_takes_a_normalised_image_as_it_is(image: Tensor) -> None:
    networks = [seeded(lambda: Normalised(0.5, 0.25), 1), seeded(TinyNet, 3)]
    x = (image - MEAN) / STD
    expected = (plain_probs(networks[0], x) + plain_probs(networks[1], x)) / 2
    result = Ensemble(networks, alpha=0.0)(x, normalized=True)
    torch.testing.assert_close(result.probs, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tta", [False, True])
def test_a_normalised_image_gives_an_ensemble_the_same(image: Tensor, tta: bool) -> None:
    method = Ensemble(members(2), tta=tta)
    result = method((image - MEAN) / STD, normalized=True)
    torch.testing.assert_close(result.probs, method(image).probs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_gray_and_a_colour_network_each_see_what_they_take(
    image: Tensor, order: tuple[int, int]
) -> None:
    both = [seeded(TinyNet), seeded(lambda: TinyNet(channels=1))]
    networks = [both[i] for i in order]
    luma = 0.299 * image[0] + 0.587 * image[1] + 0.114 * image[2]
    expected = (plain_probs(both[0], (image - MEAN) / STD) + plain_probs(both[1], luma[None])) / 2
    torch.testing.assert_close(Ensemble(networks, alpha=0.0)(image).probs, expected, **CLOSE)


def test_an_ensemble_reads_a_file(image: Tensor, tmp_path: Path) -> None:
    levels = (image * 255).round().byte().permute(1, 2, 0).numpy()
    PILImage.fromarray(levels).save(tmp_path / "a.png")
    method = Ensemble(members(2))
    torch.testing.assert_close(method(tmp_path / "a.png").probs, method(image).probs, **CLOSE)
    with pytest.raises(FileNotFoundError, match=r"there is no image file .*b\.png"):
        method(tmp_path / "b.png")


def test_an_ensemble_says_each_thing_once(image: Tensor) -> None:
    networks = [
        seeded(lambda: nn.Sequential(nn.Conv2d(3, 3, 3, padding=1)), seed) for seed in (0, 1)
    ]
    result = Ensemble(networks)(image)
    assert len(result.notes) == 2
    assert "nothing says how this network's input is normalised" in result.notes[0]
    assert "SaN changes nothing" in result.notes[1]


def test_an_ensemble_leaves_its_networks_alone(image: Tensor) -> None:
    networks = [network.train() for network in members(2)]
    before = [snapshot(network) for network in networks]
    Ensemble(networks, tta=True, scales=(0.5,))(image)
    for network, was in zip(networks, before, strict=True):
        assert_same(was, snapshot(network))


def test_printing_an_ensemble_says_how_many(image: Tensor) -> None:
    assert repr(Ensemble(members(3))).startswith("Ensemble of 3, each\nSaNOnly(TinyNet, alpha=0.1")


# fallbacks


def under_san(network: nn.Module, _: Tensor) -> bool:
    return isinstance(network.norm1, SaN)


@pytest.mark.parametrize("method", [SaNOnly, PredictionBN, TTA, MCDropout, Ensemble])
def test_where_san_fails_the_source_prediction_is_given(method: Any, image: Tensor) -> None:
    model = seeded(lambda: NaNWhere(under_san))
    settings = {"alpha": 0.1} if method is MCDropout else {}
    result = method(model, **settings)(image)
    assert "this is the prediction of the network as trained" in result.notes[-1]
    torch.testing.assert_close(result.probs, reference_probs(image, model, 0.0), **CLOSE)


@pytest.mark.parametrize("method", [Source, SaNOnly, PredictionBN, TTA, MCDropout, Ensemble])
def test_a_broken_network_is_said_to_be(method: Any, image: Tensor) -> None:
    model = seeded(lambda: NaNWhere(lambda *_: True))
    with pytest.raises(ValueError, match="the network's own prediction for this image is not"):
        method(model)(image)


@pytest.mark.parametrize("mode", ["paper", "official"])
def test_one_view_that_fails_leaves_san(image: Tensor, mode: Any) -> None:
    model = seeded(lambda: NaNWhere(lambda _, x: x.shape[-1] < 10))
    result = TTA(model, alpha=0.3, mode=mode)(image)
    assert result.notes == (
        "the views' predictions are not finite: this is the prediction with SaN, "
        "without adaptation",
    )
    assert result.fused_probs is None
    torch.testing.assert_close(result.probs, reference_probs(image, model, 0.3), **CLOSE)


class FailsInPass(DropoutNet):
    """A network that returns NaN in one pass with dropout, and only then."""

    def __init__(self, broken: int) -> None:
        super().__init__()
        self.broken, self.passes = broken, 0

    def forward(self, x: Tensor) -> Any:
        self.passes += self.drop1.training
        failed = self.drop1.training and self.passes == self.broken
        return super().forward(x) * (float("nan") if failed else 1.0)


def test_one_pass_that_fails_leaves_san(image: Tensor) -> None:
    model = seeded(lambda: FailsInPass(3))
    dice = torch.get_rng_state()
    result = MCDropout(model, passes=4, alpha=0.3)(image)
    assert "the prediction is not finite: this is the prediction with SaN" in result.notes[-1]
    torch.testing.assert_close(result.probs, reference_probs(image, model, 0.3), **CLOSE)
    assert torch.equal(torch.get_rng_state(), dice)
    assert MCDropout(model, passes=2, alpha=0.3)(image).notes == ()


def test_a_member_that_fails_gives_its_source_prediction(image: Tensor) -> None:
    sound, broken = seeded(TinyNet), seeded(lambda: NaNWhere(under_san), 1)
    result = Ensemble([sound, broken], alpha=0.2)(image)
    expected = (reference_probs(image, sound, 0.2) + reference_probs(image, broken, 0.0)) / 2
    torch.testing.assert_close(result.probs, expected, **CLOSE)
    assert "this is the prediction of the network as trained" in result.notes[-1]


def test_without_every_source_prediction_there_is_none(image: Tensor) -> None:
    broken = seeded(lambda: NaNWhere(lambda *args: not under_san(*args)), 1)
    result = Ensemble([seeded(TinyNet), broken])(image)
    assert result.source_probs is None
    assert "the source network's prediction is not finite" in result.notes


def test_the_result_of_an_ensemble_knows_its_image(tiny: nn.Module, image: Tensor) -> None:
    result = Ensemble([tiny, tiny])(image)
    assert result.image is image
    assert result.overlay().size == (image.shape[2], image.shape[1])
