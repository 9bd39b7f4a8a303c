import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_adapt import NaNWhere, reference_logits
from test_baselines import CLOSE, MAKE_AND_UNDO, MEAN, STD, Looks, paper_looks, weights_of
from torch import Tensor, nn

from conftest import TinyNet, assert_same, random_image, seeded, snapshot
from selfadapt import View
from selfadapt.baselines import SaNOnly
from selfadapt.entropy import MEMO, EntropyMin, InTEnt, Tent, mean_entropy
from selfadapt.norm import SaN

NORMS = ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias")
LATER = ("body.weight", "norm2.weight", "norm2.bias", "head.weight", "head.bias")
EVERYTHING = ("stem.weight", "norm1.weight", "norm1.bias", *LATER)


@pytest.fixture
def image() -> Tensor:
    return random_image(19, 26)


def reference_entropy(probs: Tensor) -> Tensor:
    """Return the entropy of (C, H, W), averaged over the pixels, one pixel at a time."""
    pixels = probs.flatten(1).T
    return sum(-(p * p.log()).sum() for p in pixels) / len(pixels)


def descend(
    weights: dict[str, Tensor], tuned: Sequence[str], loss: Tensor, lr: float
) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(loss, [weights[name] for name in tuned])
    moved = dict(weights)
    for name, gradient in zip(tuned, gradients, strict=True):
        moved[name] = (weights[name] - lr * gradient).detach().requires_grad_()
    return moved


def reference_steps(
    image: Tensor, model: nn.Module, alpha: float, lr: float, steps: int, tuned: Sequence[str]
) -> tuple[list[float], Tensor]:
    """Return the entropy before each step, and the prediction after the last."""
    weights = weights_of(model)
    for name in tuned:
        weights[name].requires_grad_()
    losses = []
    for _ in range(steps):
        entropy = reference_entropy(reference_logits(image, weights, alpha).softmax(dim=0))
        weights = descend(weights, tuned, entropy, lr)
        losses.append(float(entropy.detach()))
    return losses, reference_logits(image, weights, alpha).softmax(dim=0).detach()


def recorded(model: nn.Module) -> list[dict[str, Tensor]]:
    """Take down the weights and statistics of every forward pass from now on."""
    passes: list[dict[str, Tensor]] = []
    model.register_forward_hook(lambda module, *_: passes.append(weights_of(module)))
    return passes


def moved(model: nn.Module, used: dict[str, Tensor]) -> set[str]:
    """Return the names of what was not in that pass what it is in the model."""
    state = model.state_dict()
    return {name for name, value in state.items() if not torch.equal(value, used[name])}


def test_the_entropy_is_the_mean_over_the_pixels() -> None:
    logits = torch.randn((1, 4, 5, 6), generator=torch.Generator().manual_seed(0)) * 3
    expected = reference_entropy(logits[0].softmax(dim=0))
    torch.testing.assert_close(mean_entropy(logits), expected)
    torch.testing.assert_close(mean_entropy(torch.zeros(1, 4, 2, 2)), torch.tensor(math.log(4)))
    sure = torch.tensor([1000.0, 0.0]).reshape(1, 2, 1, 1)
    assert 0 <= mean_entropy(sure) < 1e-30


# Tent


@pytest.mark.parametrize(("alpha", "steps"), [(0.1, 3), (0.0, 2), (1.0, 3), (0.5, 1), (0.1, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tent_descends_the_entropy_by_scale_and_shift(
    image: Tensor, alpha: float, steps: int, dtype: torch.dtype
) -> None:
    model = seeded(TinyNet).to(dtype)
    result = Tent(model, alpha=alpha, steps=steps, lr=0.5)(image)
    losses, probs = reference_steps(image.to(dtype), model, alpha, 0.5, steps, NORMS)
    assert result.losses == pytest.approx(losses, abs=1e-5)
    torch.testing.assert_close(result.probs, probs, **CLOSE)
    source = reference_logits(image.to(dtype), weights_of(model), 0.0).softmax(dim=0)
    torch.testing.assert_close(result.source_probs, source, **CLOSE)
    without = reference_logits(image.to(dtype), weights_of(model), alpha).softmax(dim=0)
    assert torch.allclose(result.probs, without, rtol=0, atol=1e-3) == (steps == 0)
    assert (result.fused_probs, result.pseudo_label) == (None, None)


def test_tents_own_settings(tiny: nn.Module, image: Tensor) -> None:
    method = Tent(tiny)
    result = method(image)
    losses, probs = reference_steps(image, tiny, 0.1, method.lr, 10, NORMS)
    assert result.losses == pytest.approx(losses, abs=1e-5)
    torch.testing.assert_close(result.probs, probs, **CLOSE)


def test_tent_moves_scale_and_shift_alone(tiny: nn.Module, image: Tensor) -> None:
    method = Tent(tiny, steps=2, lr=0.5)
    assert set(method.selection.names) == set(NORMS)
    assert method.notes == ()
    passes = recorded(tiny)
    method(image)
    assert len(passes) == 4
    assert [moved(tiny, used) for used in passes] == [set(), set(), set(NORMS), set(NORMS)]
    assert moved(tiny, passes[-1]) == set(NORMS)


def train_by_entropy(
    twin: nn.Module, x: Tensor, tuned: Sequence[nn.Parameter], lr: float, steps: int
) -> list[float]:
    """Minimise the entropy with PyTorch's own optimizer; return it before each step."""
    optimizer = torch.optim.SGD(tuned, lr=lr)
    losses = []
    for _ in range(steps):
        logits = F.interpolate(twin(x), x.shape[-2:], mode="bilinear")[0]
        loss = reference_entropy(logits.softmax(dim=0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1.0])
def test_official_tent_is_batchnorm_in_training_with_drift(image: Tensor, alpha: float) -> None:
    """In the loop BatchNorm as in train(); at the end SaN with the statistics that followed."""
    model, twin = seeded(TinyNet), seeded(TinyNet).train()
    passes = recorded(model)
    result = Tent(model, mode="official", alpha=alpha, steps=4, lr=0.5)(image)
    tuned = [*twin.norm1.parameters(), *twin.norm2.parameters()]
    losses = train_by_entropy(twin, ((image - MEAN) / STD)[None], tuned, 0.5, 4)
    probs = reference_logits(image, weights_of(twin), alpha).softmax(dim=0)
    assert result.losses == pytest.approx(losses, abs=1e-5)
    torch.testing.assert_close(result.probs, probs, **CLOSE)
    statistics = {f"norm{i}.running_{kind}" for i in (1, 2) for kind in ("mean", "var")}
    assert moved(model, passes[-1]) == {*NORMS, *statistics}


def test_official_tent_without_a_step_is_san(tiny: nn.Module, image: Tensor) -> None:
    result = Tent(tiny, mode="official", steps=0, alpha=0.3)(image)
    expected = reference_logits(image, weights_of(tiny), 0.3).softmax(dim=0)
    torch.testing.assert_close(result.probs, expected, **CLOSE)
    assert result.losses == ()


def test_tent_tunes_what_was_frozen_in_training(tiny: nn.Module, image: Tensor) -> None:
    expected = Tent(tiny, steps=2)(image).probs
    tiny.requires_grad_(False)
    assert torch.equal(Tent(tiny, steps=2)(image).probs, expected)
    assert not tiny.norm1.weight.requires_grad


class LayerNormOverChannels(nn.LayerNorm):
    """LayerNorm over the channels of (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def norm_net(*norms: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *norms, nn.ReLU(), nn.Conv2d(8, 3, 1))


@pytest.mark.parametrize("mode", ["paper", "official"])
@pytest.mark.parametrize(
    "norms",
    [
        lambda: (nn.GroupNorm(2, 8),),
        lambda: (LayerNormOverChannels(8),),
        lambda: (nn.GroupNorm(2, 8), LayerNormOverChannels(8)),
        lambda: (nn.InstanceNorm2d(8, affine=True),),
    ],
)
def test_without_batchnorm_tent_tunes_other_norms(
    image: Tensor, norms: Callable[[], tuple[nn.Module, ...]], mode: Any
) -> None:
    model, twin = (seeded(lambda: norm_net(*norms())) for _ in range(2))
    method = Tent(model, steps=3, lr=0.5, mode=mode)
    named = twin.named_parameters()
    tuned = {name: p for name, p in named if not isinstance(twin[int(name[0])], nn.Conv2d)}
    assert set(method.selection.names) == set(tuned)
    passes = recorded(model)
    result = method(image)
    x = ((image - MEAN) / STD)[None]
    losses = train_by_entropy(twin, x, list(tuned.values()), 0.5, 3)
    assert result.losses == pytest.approx(losses, abs=1e-5)
    torch.testing.assert_close(result.probs, twin(x)[0].softmax(dim=0).detach(), **CLOSE)
    assert moved(model, passes[-1]) == set(tuned)
    assert any("those of other normalisation layers are tuned" in note for note in result.notes)
    assert any("SaN changes nothing" in note for note in result.notes)


def test_a_norm_by_another_name_is_one_too() -> None:
    class Calm(nn.GroupNorm):
        pass

    model = seeded(lambda: norm_net(Calm(2, 8)))
    assert set(Tent(model).selection.names) == {"1.weight", "1.bias"}


def test_next_to_batchnorm_other_norms_stay(image: Tensor) -> None:
    model = seeded(lambda: norm_net(nn.GroupNorm(2, 8), nn.BatchNorm2d(8)))
    assert set(Tent(model).selection.names) == {"2.weight", "2.bias"}
    assert not [note for note in Tent(model).notes if "tuned" in note]


def test_a_batchnorm_without_scale_and_shift_leaves_the_others() -> None:
    model = seeded(lambda: norm_net(nn.GroupNorm(2, 8), nn.BatchNorm2d(8, affine=False)))
    method = Tent(model)
    assert set(method.selection.names) == {"1.weight", "1.bias"}
    assert "those of other normalisation layers are tuned" in method.notes[-1]


@pytest.mark.parametrize(
    "norms",
    [
        lambda: (),
        lambda: (nn.BatchNorm2d(8, affine=False),),
        lambda: (nn.InstanceNorm2d(8), nn.GroupNorm(2, 8, affine=False)),
    ],
)
def test_a_network_without_scale_and_shift_is_refused(
    norms: Callable[[], tuple[nn.Module, ...]],
) -> None:
    model = seeded(lambda: norm_net(*norms()))
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"tunes the scale and shift .* this network has none"):
        Tent(model)
    assert_same(before, snapshot(model))


def test_scale_and_shift_that_two_layers_share_are_tuned_once(image: Tensor) -> None:
    def tied() -> nn.Module:
        model = norm_net(nn.BatchNorm2d(8), nn.BatchNorm2d(8))
        model[2].weight, model[2].bias = model[1].weight, model[1].bias
        return model

    model, twin = seeded(tied), seeded(tied)
    result = Tent(model, steps=3, lr=0.2, alpha=0.0)(image)
    x = ((image - MEAN) / STD)[None]
    losses = train_by_entropy(twin, x, [*twin[1].parameters()], 0.2, 3)
    assert result.losses == pytest.approx(losses, abs=1e-5)
    torch.testing.assert_close(result.probs, twin(x)[0].softmax(dim=0).detach(), **CLOSE)


# entropy on the layers self-adaptation tunes


@pytest.mark.parametrize(
    ("adapt", "tuned"),
    [
        (["body", "norm2", "head"], LATER),
        (["stem"], ("stem.weight",)),
        ("norm1", ("norm1.weight", "norm1.bias")),
        (["*"], EVERYTHING),
        (None, ("head.weight", "head.bias")),
    ],
)
@pytest.mark.parametrize(("alpha", "steps"), [(0.1, 3), (1.0, 2)])
def test_entropy_descends_by_the_chosen_layers(
    tiny: nn.Module, image: Tensor, adapt: Any, tuned: Sequence[str], alpha: float, steps: int
) -> None:
    method = EntropyMin(tiny, adapt=adapt, alpha=alpha, steps=steps, lr=0.1)
    passes = recorded(tiny)
    result = method(image)
    losses, probs = reference_steps(image, tiny, alpha, 0.1, steps, tuned)
    assert result.losses == pytest.approx(losses, abs=1e-5)
    torch.testing.assert_close(result.probs, probs, **CLOSE)
    assert moved(tiny, passes[-1]) == set(tuned)
    assert any("last third of its layers" in note for note in result.notes) == (adapt is None)


def test_entropys_own_settings(tiny: nn.Module, image: Tensor) -> None:
    method = EntropyMin(tiny)
    result = method(image)
    losses, probs = reference_steps(image, tiny, 0.1, method.lr, 10, ("head.weight", "head.bias"))
    assert result.losses == pytest.approx(losses, abs=1e-5)
    torch.testing.assert_close(result.probs, probs, **CLOSE)


def test_official_entropy_is_batchnorm_in_training_with_drift(image: Tensor) -> None:
    model, twin = seeded(TinyNet), seeded(TinyNet).train()
    method = EntropyMin(model, mode="official", alpha=0.2, steps=4, lr=0.2, adapt=["body", "head"])
    result = method(image)
    tuned = [*twin.body.parameters(), *twin.head.parameters()]
    losses = train_by_entropy(twin, ((image - MEAN) / STD)[None], tuned, 0.2, 4)
    assert result.losses == pytest.approx(losses, abs=1e-5)
    probs = reference_logits(image, weights_of(twin), 0.2).softmax(dim=0)
    torch.testing.assert_close(result.probs, probs, **CLOSE)


@pytest.mark.parametrize("method", [Tent, EntropyMin, MEMO])
def test_the_entropy_falls(tiny: nn.Module, image: Tensor, method: Any) -> None:
    losses = method(tiny, steps=6, lr=0.05)(image).losses
    assert len(losses) == 6
    assert list(losses) == sorted(losses, reverse=True)


def test_a_large_image_is_adapted_to_smaller_and_brought_back(tiny: nn.Module) -> None:
    image = random_image(38, 52)
    small = F.interpolate(image[None], (19, 26), mode="bilinear", antialias=True)[0]
    result = Tent(tiny, steps=2, lr=0.5, max_pixels=19 * 26)(image)
    losses, probs = reference_steps(small, tiny, 0.1, 0.5, 2, NORMS)
    assert result.losses == pytest.approx(losses, abs=1e-5)
    enlarged = F.interpolate(probs.log()[None], (38, 52), mode="bilinear")[0].softmax(dim=0)
    torch.testing.assert_close(result.probs, enlarged, **CLOSE)
    assert "segmented at 26x19, the image is 52x38" in result.notes


# MEMO


def reference_memo(
    image: Tensor,
    model: nn.Module,
    alpha: float,
    lr: float,
    steps: int,
    looks: Looks,
    tuned: Sequence[str],
    mode: str = "paper",
) -> tuple[list[float], Tensor]:
    """Keep the graph of all views at once; return the losses and the last prediction."""
    make, undo = MAKE_AND_UNDO[mode]
    weights = weights_of(model)
    for name in tuned:
        weights[name].requires_grad_()
    losses = []
    for _ in range(steps):
        undone = []
        for scale, flip, gray in looks:
            logits = reference_logits(make(image, scale, flip, gray), weights, alpha)
            undone.append(undo(logits.softmax(dim=0), image.shape[-2:], scale, flip))
        entropy = reference_entropy(sum(undone) / len(undone))
        weights = descend(weights, tuned, entropy, lr)
        losses.append(float(entropy.detach()))
    return losses, reference_logits(image, weights, alpha).softmax(dim=0).detach()


@pytest.mark.parametrize("mode", ["paper", "official"])
@pytest.mark.parametrize(
    ("alpha", "steps", "scales", "adapt", "tuned"),
    [
        (0.1, 1, (0.25, 0.5, 0.75), ["body", "norm2", "head"], LATER),
        (0.1, 4, (0.5, 0.75), ["*"], EVERYTHING),
        (0.0, 2, (0.5, 1.5), ["stem", "head"], ("stem.weight", "head.weight", "head.bias")),
        (1.0, 3, (1.0,), ["norm1", "norm2"], NORMS),
        (0.3, 0, (0.5,), ["head"], ("head.weight", "head.bias")),
    ],
)
def test_memo_is_one_graph_of_all_views(
    tiny: nn.Module,
    image: Tensor,
    mode: Any,
    alpha: float,
    steps: int,
    scales: tuple[float, ...],
    adapt: list[str],
    tuned: Sequence[str],
) -> None:
    method = MEMO(tiny, alpha=alpha, steps=steps, scales=scales, adapt=adapt, lr=0.3, mode=mode)
    passes = recorded(tiny)
    result = method(image)
    looks = paper_looks(scales)
    losses, probs = reference_memo(image, tiny, alpha, 0.3, steps, looks, tuned, mode)
    assert result.losses == pytest.approx(losses, abs=1e-5)
    torch.testing.assert_close(result.probs, probs, **CLOSE)
    assert moved(tiny, passes[-1]) == (set(tuned) if steps else set())


def test_memo_in_double_precision(image: Tensor) -> None:
    model = seeded(TinyNet).double()
    result = MEMO(model, steps=3, lr=0.5, scales=(0.5, 0.75), adapt=["*"])(image)
    losses, probs = reference_memo(
        image.double(), model, 0.1, 0.5, 3, paper_looks((0.5, 0.75)), EVERYTHING
    )
    assert result.losses == pytest.approx(losses, abs=1e-5)
    torch.testing.assert_close(result.probs, probs, **CLOSE)


def test_memos_own_settings(tiny: nn.Module, image: Tensor) -> None:
    method = MEMO(tiny)
    result = method(image)
    looks = paper_looks((0.25, 0.5, 0.75))
    losses, probs = reference_memo(
        image, tiny, 0.1, method.lr, 1, looks, ("head.weight", "head.bias")
    )
    assert result.losses == pytest.approx(losses, abs=1e-5)
    torch.testing.assert_close(result.probs, probs, **CLOSE)
    assert any("last third of its layers" in note for note in result.notes)


def test_memo_takes_any_views(tiny: nn.Module, image: Tensor) -> None:
    looks = [(1.0, False, False), (1.0, True, False), (0.7, False, True)]
    views = (View(*look) for look in looks)
    result = MEMO(tiny, views=views, steps=2, lr=0.3, adapt=["*"])(image)
    losses, probs = reference_memo(image, tiny, 0.1, 0.3, 2, looks, EVERYTHING)
    assert result.losses == pytest.approx(losses, abs=1e-5)
    torch.testing.assert_close(result.probs, probs, **CLOSE)


def test_memo_with_the_image_alone_is_entropy(tiny: nn.Module, image: Tensor) -> None:
    settings: dict[str, Any] = {"steps": 3, "lr": 0.3, "adapt": ["*"]}
    result = MEMO(tiny, views=View(), **settings)(image)
    expected = EntropyMin(tiny, **settings)(image)
    assert result.losses == pytest.approx(expected.losses, abs=1e-5)
    torch.testing.assert_close(result.probs, expected.probs, **CLOSE)


# InTEnt


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def reference_intent(image: Tensor, model: nn.Module, alphas: Sequence[float]) -> Tensor:
    weights = weights_of(model)
    predictions, entropies = [], []
    for alpha in alphas:
        probs = reference_logits(image, weights, alpha).softmax(dim=0)
        by_class: dict[int, list[float]] = {}
        for pixel in probs.flatten(1).T.tolist():
            entropy = -sum(p * math.log(p) for p in pixel)
            by_class.setdefault(pixel.index(max(pixel)), []).append(entropy)
        predictions.append(probs)
        entropies.append(mean([mean(pixels) for pixels in by_class.values()]))
    scores = [-entropy for entropy in entropies]
    span = max(scores) - min(scores)
    stretched = [(score - min(scores)) / span for score in scores]
    total = sum(map(math.exp, stretched))
    return sum(math.exp(s) / total * p for s, p in zip(stretched, predictions, strict=True))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_intent_weighs_six_alphas_by_their_entropy(seed: int) -> None:
    model, image = seeded(TinyNet, seed), random_image(19, 26, seed=seed)
    result = InTEnt(model)(image)
    expected = reference_intent(image, model, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0))
    torch.testing.assert_close(result.probs, expected, **CLOSE)
    assert len(result.label.unique()) > 1
    source = reference_logits(image, weights_of(model), 0.0).softmax(dim=0)
    torch.testing.assert_close(result.source_probs, source, **CLOSE)
    assert result.notes == ()


@pytest.mark.parametrize("alphas", [(0.0, 1.0), [0.9, 0.1, 0.5], (0, 1)])
@pytest.mark.parametrize("mode", ["paper", "official"])
def test_intent_takes_any_alphas(
    tiny: nn.Module, image: Tensor, alphas: Sequence[float], mode: Any
) -> None:
    result = InTEnt(tiny, alphas=alphas, mode=mode)(image)
    torch.testing.assert_close(result.probs, reference_intent(image, tiny, alphas), **CLOSE)


def test_the_surest_alpha_weighs_e_times_the_least_sure(tiny: nn.Module, image: Tensor) -> None:
    first, second = (SaNOnly(tiny, alpha=alpha)(image).probs for alpha in (0.0, 1.0))
    mixed = InTEnt(tiny, alphas=(0.0, 1.0))(image).probs
    share = ((mixed - second) * (first - second)).sum() / (first - second).square().sum()
    likely = [math.e / (1 + math.e), 1 / (1 + math.e)]
    assert min(abs(float(share) - value) for value in likely) < 1e-4


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_a_single_alpha_is_san(tiny: nn.Module, image: Tensor, alpha: float) -> None:
    result = InTEnt(tiny, alphas=[alpha])(image)
    expected = reference_logits(image, weights_of(tiny), alpha).softmax(dim=0)
    torch.testing.assert_close(result.probs, expected, **CLOSE)


def test_entropies_that_are_all_equal_weigh_the_same(image: Tensor) -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 3, 3, padding=1)))
    result = InTEnt(model)(image)
    x = ((image - MEAN) / STD)[None]
    torch.testing.assert_close(result.probs, model(x)[0].softmax(dim=0).detach(), **CLOSE)
    assert any("SaN changes nothing" in note for note in result.notes)


@pytest.mark.parametrize("bias", [[0.0, 0.0, 0.0], [1000.0, 0.0, 0.0]])
def test_no_doubt_and_nothing_but_doubt_are_no_trouble(
    tiny: nn.Module, image: Tensor, bias: list[float]
) -> None:
    tiny.head.weight.data.zero_()
    tiny.head.bias.data.copy_(torch.tensor(bias))
    expected = torch.tensor(bias).softmax(dim=0).reshape(3, 1, 1).expand(3, 19, 26)
    torch.testing.assert_close(InTEnt(tiny)(image).probs, expected, **CLOSE)


def test_intent_of_a_large_image_is_brought_back(tiny: nn.Module) -> None:
    image = random_image(38, 52)
    small = F.interpolate(image[None], (19, 26), mode="bilinear", antialias=True)[0]
    probs = reference_intent(small, tiny, (0.0, 0.5))
    expected = F.interpolate(probs[None], (38, 52), mode="bilinear")[0]
    result = InTEnt(tiny, alphas=(0.0, 0.5), max_pixels=19 * 26)(image)
    torch.testing.assert_close(result.probs, expected, **CLOSE)


# a class that is ruled out


@pytest.mark.parametrize("mode", ["paper", "official"])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (Tent, {"steps": 3, "lr": 0.3}),
        (EntropyMin, {"steps": 3, "lr": 0.3, "adapt": ["*"]}),
        (MEMO, {"steps": 3, "lr": 0.3, "adapt": ["*"], "scales": (0.5, 0.75)}),
        (InTEnt, {}),
    ],
)
def test_a_class_that_is_ruled_out_might_as_well_not_be_there(
    image: Tensor, method: Any, settings: dict[str, Any], mode: Any
) -> None:
    class RuledOut(nn.Module):
        def forward(self, scores: Tensor) -> Tensor:
            return torch.cat((scores, torch.full_like(scores[:, :1], float("-inf"))), dim=1)

    model, twin = (seeded(lambda: norm_net(nn.BatchNorm2d(8))) for _ in range(2))
    result = method(model.append(RuledOut()), mode=mode, **settings)(image)
    expected = method(twin, mode=mode, **settings)(image)
    assert (result.probs[3] == 0).all()
    torch.testing.assert_close(result.probs[:3], expected.probs, **CLOSE)
    assert result.losses == pytest.approx(expected.losses, abs=1e-5)
    assert result.notes == expected.notes


# fallbacks


def under_san(network: nn.Module, _: Tensor) -> bool:
    return isinstance(network.norm1, SaN)


def fails_once_tuned() -> nn.Module:
    """Return a network that is sound as it is, and gives NaN with any other weights."""
    model = seeded(lambda: NaNWhere(lambda *_: False))
    before = weights_of(model)
    model.broken = lambda network, _: any(
        not torch.equal(value, before[name]) for name, value in network.named_parameters()
    )
    return model


@pytest.mark.parametrize("mode", ["paper", "official"])
@pytest.mark.parametrize("method", [Tent, EntropyMin, MEMO])
@pytest.mark.parametrize("steps", [1, 3])
def test_steps_that_lead_astray_fall_back_to_san(
    image: Tensor, method: Any, mode: Any, steps: int
) -> None:
    model = fails_once_tuned()
    result = method(model, alpha=0.3, steps=steps, mode=mode)(image)
    assert "not finite" in result.notes[-1]
    assert ": this is the prediction with SaN, without adaptation" in result.notes[-1]
    expected = reference_logits(image, weights_of(model), 0.3).softmax(dim=0)
    torch.testing.assert_close(result.probs, expected, **CLOSE)
    assert [math.isfinite(loss) for loss in result.losses] == [True, False, False][:steps]


@pytest.mark.parametrize("mode", ["paper", "official"])
def test_steps_that_explode_fall_back_to_san(tiny: nn.Module, image: Tensor, mode: Any) -> None:
    result = EntropyMin(tiny, lr=3e38, adapt=["*"], alpha=0.3, mode=mode)(image)
    assert "not finite" in result.notes[-1]
    assert ": this is the prediction with SaN, without adaptation" in result.notes[-1]
    expected = reference_logits(image, weights_of(tiny), 0.3).softmax(dim=0)
    torch.testing.assert_close(result.probs, expected, **CLOSE)


def test_a_view_that_fails_leaves_san_of_memo(image: Tensor) -> None:
    model = seeded(lambda: NaNWhere(lambda _, x: x.shape[-1] < 10))
    result = MEMO(model, alpha=0.3)(image)
    assert "not finite" in result.notes[-1]
    assert ": this is the prediction with SaN, without adaptation" in result.notes[-1]
    expected = reference_logits(image, weights_of(model), 0.3).softmax(dim=0)
    torch.testing.assert_close(result.probs, expected, **CLOSE)


@pytest.mark.parametrize("method", [Tent, EntropyMin, MEMO])
def test_where_san_fails_too_the_source_prediction_is_given(method: Any, image: Tensor) -> None:
    model = seeded(lambda: NaNWhere(under_san))
    result = method(model, steps=1)(image)
    assert "this is the prediction of the network as trained" in result.notes[-1]
    expected = reference_logits(image, weights_of(model), 0.0).softmax(dim=0)
    torch.testing.assert_close(result.probs, expected, **CLOSE)


@pytest.mark.parametrize("method", [Tent, EntropyMin, MEMO, InTEnt])
def test_a_broken_network_is_said_to_be(method: Any, image: Tensor) -> None:
    model = seeded(lambda: NaNWhere(lambda *_: True))
    with pytest.raises(ValueError, match=r"for this image (is|are) not finite"):
        method(model)(image)


def broken_at(*alphas: float) -> Callable[[nn.Module, Tensor], bool]:
    return lambda network, _: getattr(network.norm1, "san_alpha", None) in alphas


def test_alphas_that_fail_are_left_out_of_the_mean(image: Tensor) -> None:
    model = seeded(lambda: NaNWhere(broken_at(0.6, 1.0)))
    result = InTEnt(model)(image)
    expected = reference_intent(image, model, (0.0, 0.2, 0.4, 0.8))
    torch.testing.assert_close(result.probs, expected, **CLOSE)


def test_alphas_that_are_left_out_are_noted(image: Tensor) -> None:
    result = InTEnt(seeded(lambda: NaNWhere(broken_at(0.6, 1.0))))(image)
    assert any("finite" in note for note in result.notes)


def test_where_every_alpha_fails_the_source_prediction_is_given(image: Tensor) -> None:
    model = seeded(lambda: NaNWhere(under_san))
    result = InTEnt(model, alphas=(0.2, 0.4))(image)
    expected = reference_logits(image, weights_of(model), 0.0).softmax(dim=0)
    torch.testing.assert_close(result.probs, expected, **CLOSE)
    assert "this is the prediction of the network as trained" in result.notes[-1]
