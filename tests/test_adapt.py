import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import selfadapt
from conftest import TinyNet, assert_same, random_image, seeded, snapshot
from selfadapt import SelfAdapt, View
from selfadapt.baselines import SaNOnly
from selfadapt.models.detect import IMAGENET_MEAN, IMAGENET_STD
from selfadapt.norm import SaN

# the paper's equations, the slow and obvious way, for TinyNet


def reference_norm(z: Tensor, weights: dict[str, Tensor], name: str, alpha: float, eps: float):
    channels = []
    for c in range(z.shape[0]):
        image_mean = z[c].mean()
        image_var = ((z[c] - image_mean) ** 2).mean()
        mean = (1 - alpha) * weights[f"{name}.running_mean"][c] + alpha * image_mean
        var = (1 - alpha) * weights[f"{name}.running_var"][c] + alpha * image_var
        bar = (z[c] - mean) / torch.sqrt(var + eps)
        channels.append(weights[f"{name}.weight"][c] * bar + weights[f"{name}.bias"][c])
    return torch.stack(channels)


def reference_logits(image: Tensor, weights: dict[str, Tensor], alpha: float) -> Tensor:
    mean, std = (torch.tensor(v).to(image).reshape(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    x = F.conv2d(((image - mean) / std)[None], weights["stem.weight"], stride=2, padding=1)[0]
    x = reference_norm(x, weights, "norm1", alpha, 1e-5).clamp(min=0)
    x = F.conv2d(x[None], weights["body.weight"], padding=1)[0]
    x = reference_norm(x, weights, "norm2", alpha, 1e-3).clamp(min=0)
    x = F.conv2d(x[None], weights["head.weight"], weights["head.bias"])
    return F.interpolate(x, image.shape[-2:], mode="bilinear", align_corners=False)[0]


def reference_self_adaptation(
    image: Tensor,
    model: nn.Module,
    alpha: float,
    psi: float,
    lr: float,
    steps: int,
    scales: tuple[float, ...],
    tuned: tuple[str, ...],
) -> dict[str, Any]:
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    height, width = image.shape[-2:]
    aligned = []
    for scale in scales:
        size = (round(height * scale), round(width * scale))
        small = F.interpolate(image[None], size, mode="bilinear", antialias=scale < 1)[0]
        plain = reference_logits(small, weights, alpha).softmax(dim=0)
        gray = 0.299 * small[0] + 0.587 * small[1] + 0.114 * small[2]
        flipped = torch.stack([gray, gray, gray]).flip(-1)
        other = reference_logits(flipped, weights, alpha).softmax(dim=0).flip(-1)
        for probs in (plain, other):
            size = (height, width)
            undone = F.interpolate(probs[None], size, mode="bilinear", antialias=scale > 1)
            aligned.append(undone[0])
    fused = sum(aligned) / len(aligned)
    label = torch.full((height, width), 255)
    for j in range(height):
        for k in range(width):
            best = int(fused[:, j, k].argmax())
            if fused[best, j, k] >= psi * fused[best].max():
                label[j, k] = best
    for name in tuned:
        weights[name].requires_grad_()
    losses = []
    for _ in range(steps):
        log_probs = reference_logits(image, weights, alpha).log_softmax(dim=0)
        kept = [(j, k) for j in range(height) for k in range(width) if label[j, k] != 255]
        loss = -sum(log_probs[label[j, k], j, k] for j, k in kept) / len(kept)
        gradients = torch.autograd.grad(loss, [weights[name] for name in tuned])
        for name, gradient in zip(tuned, gradients, strict=True):
            weights[name] = (weights[name] - lr * gradient).detach().requires_grad_()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        probs = reference_logits(image, weights, alpha).softmax(dim=0)
        source = reference_logits(image, dict(model.state_dict()), 0.0).softmax(dim=0)
    return {"fused": fused, "label": label, "losses": losses, "probs": probs, "source": source}


LATER = ("body.weight", "norm2.weight", "norm2.bias", "head.weight", "head.bias")


@pytest.mark.parametrize(
    ("alpha", "scales", "steps", "psi", "lr"),
    [
        (0.1, (0.25, 0.5, 0.75), 3, 0.7, 0.05),
        (0.0, (0.5, 1.0), 2, 0.5, 0.1),
        (0.4, (0.75,), 5, 0.9, 0.02),
        (1.0, (0.5, 1.5), 2, 1.0, 0.05),
        (0.1, (0.25, 0.5, 0.75), 0, 0.7, 0.05),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_paper_mode_is_the_papers_equations(alpha, scales, steps, psi, lr, dtype) -> None:
    model = seeded(TinyNet).to(dtype)
    image = random_image(19, 26)
    method = SelfAdapt(
        model, mode="paper", alpha=alpha, psi=psi, lr=lr, steps=steps, scales=scales,
        adapt=["body", "norm2", "head"],
    )  # fmt: skip
    result = method(image)
    expected = reference_self_adaptation(
        image.to(dtype), model, alpha, psi, lr, steps, scales, LATER
    )
    close = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(result.fused_probs, expected["fused"], **close)
    assert torch.equal(result.pseudo_label, expected["label"])
    assert result.losses == pytest.approx(expected["losses"], abs=1e-5)
    torch.testing.assert_close(result.probs, expected["probs"], **close)
    torch.testing.assert_close(result.source_probs, expected["source"], **close)


# official mode


def test_official_mode_is_batchnorm_in_training_with_drift(image: Tensor) -> None:
    """Inside the loop: model.train(); at the end: SaN with the statistics that followed."""
    model, twin = seeded(TinyNet), seeded(TinyNet)
    result = SelfAdapt(model, mode="official", steps=4, alpha=0.2, adapt=["body", "head"])(image)
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    x = ((image - mean) / std)[None]
    twin.train()
    optimizer = torch.optim.SGD([*twin.body.parameters(), *twin.head.parameters()], lr=0.05)
    losses = []
    for _ in range(4):
        logits = F.interpolate(twin(x), image.shape[-2:], mode="bilinear")
        loss = F.cross_entropy(logits, result.pseudo_label[None], ignore_index=255)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    twin.eval()
    with torch.no_grad(), selfadapt.san(twin, 0.2):
        probs = F.interpolate(twin(x), image.shape[-2:], mode="bilinear")[0].softmax(dim=0)
    assert result.losses == pytest.approx(losses, rel=1e-4)
    torch.testing.assert_close(result.probs, probs, rtol=0, atol=1e-5)


def test_official_mode_has_the_released_cap() -> None:
    model = seeded(TinyNet)
    result = SelfAdapt(model, mode="official", steps=1, scales=(0.1,))(torch.rand(3, 3000, 800))
    assert tuple(result.label.shape) == (3000, 800)
    assert "segmented at 2048x1024, the image is 800x3000" in result.notes


# what a call leaves behind, and where it may be made


@pytest.mark.parametrize("mode", ["paper", "official"])
def test_the_model_comes_back_bit_by_bit(tiny: nn.Module, image: Tensor, mode: Any) -> None:
    tiny.norm1.train()
    tiny.stem.weight.requires_grad_(False)
    tiny.head.weight.grad = torch.ones_like(tiny.head.weight)
    tiny.body.register_forward_hook(lambda *_: None)
    before = snapshot(tiny)
    SelfAdapt(tiny, mode=mode, steps=2)(image)
    assert_same(before, snapshot(tiny))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("moment", [1, 7, 8, 10])
@pytest.mark.parametrize("mode", ["paper", "official"])
def test_the_model_comes_back_after_an_exception(
    tiny: nn.Module, image: Tensor, mode: Any, moment: int, error: type[BaseException]
) -> None:
    method = SelfAdapt(tiny, mode=mode, steps=3)
    expected = method(image)
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == moment:
            raise error("in the middle")

    handle = tiny.body.register_forward_hook(fail)
    before = snapshot(tiny)
    with pytest.raises(error, match="in the middle"):
        method(image)
    assert_same(before, snapshot(tiny))
    handle.remove()
    assert torch.equal(method(image).probs, expected.probs)


def test_a_buffer_that_changes_in_evaluation_is_left_alone(tiny: nn.Module, image: Tensor) -> None:
    tiny.register_buffer("calls", torch.zeros(()))
    tiny.register_forward_pre_hook(lambda module, _: module.calls.add_(1) and None)
    SelfAdapt(tiny, steps=1)(image)
    assert tiny.calls == 0


def test_nothing_is_carried_from_image_to_image(tiny: nn.Module, image: Tensor) -> None:
    method = SelfAdapt(tiny, steps=2)
    first = method(image)
    method(random_image(41, 23, seed=5))
    again = method(image)
    for field in ("probs", "fused_probs", "source_probs", "pseudo_label"):
        assert torch.equal(getattr(first, field), getattr(again, field))
    assert first.losses == again.losses


def test_the_caller_may_be_inside_no_grad_or_inference_mode(tiny: nn.Module, image: Tensor) -> None:
    method = SelfAdapt(tiny, steps=2)
    expected = method(image).probs
    with torch.no_grad():
        assert torch.equal(method(image).probs, expected)
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        result = SelfAdapt(tiny, steps=2)(image.clone())
        assert torch.is_inference_mode_enabled()
    assert torch.equal(result.probs, expected)
    assert not result.probs.requires_grad


def test_a_model_made_in_inference_mode_adapts_too(tiny: nn.Module, image: Tensor) -> None:
    with torch.inference_mode():
        model = seeded(TinyNet)
    expected = SelfAdapt(tiny, steps=2, adapt=["body"])(image).probs
    assert torch.equal(SelfAdapt(model, steps=2, adapt=["body"])(image).probs, expected)


class Stateful(TinyNet):
    """A network that remembers what it saw, in a plain tensor, a list and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = torch.zeros(())
        self.seen: list[Tensor] = []
        self.sizes: dict[str, int] = {}

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.trace.add_(x.mean())
        self.seen.append(x)
        self.sizes[str(x.shape)] = len(self.seen)
        self.latest = x
        return super().forward(x + self.trace)


@pytest.mark.parametrize("mode", ["paper", "official"])
def test_what_a_network_remembers_is_forgotten(mode: Any, image: Tensor) -> None:
    model = seeded(Stateful)
    before = snapshot(model)
    method = SelfAdapt(model, mode=mode, steps=2)
    first, again = method(image), method(image)
    assert torch.equal(first.probs, again.probs)
    assert (float(model.trace), model.seen, model.sizes) == (0, [], {})
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("mode", ["paper", "official"])
def test_a_checkpointed_network_adapts_as_without(mode: Any, image: Tensor) -> None:
    class Checkpointed(TinyNet):
        def forward(self, x: Tensor) -> Any:
            x = self.norm1(self.stem(x)).relu()
            x = checkpoint(lambda y: self.norm2(self.body(y)).relu(), x, use_reentrant=False)
            return self.head(x)

    model = seeded(Checkpointed)
    before = snapshot(model)
    settings: dict[str, Any] = {"steps": 4, "lr": 0.3, "adapt": ["*"]}
    result = SelfAdapt(model, mode=mode, **settings)(image)
    assert_same(before, snapshot(model))
    if mode == "paper":
        expected = SelfAdapt(seeded(TinyNet), mode=mode, **settings)(image)
        assert result.losses == pytest.approx(expected.losses, abs=1e-5)


@pytest.mark.parametrize("mode", ["paper", "official"])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, BatchNormAct2d])
def test_a_layer_may_be_used_twice(mode: Any, norm: type[nn.Module], image: Tensor) -> None:
    class Twice(TinyNet):
        def __init__(self) -> None:
            super().__init__()
            self.norm1 = norm(6)
            self.body = nn.Conv2d(6, 6, 1)

        def forward(self, x: Tensor) -> Any:
            x = self.norm1(self.body(self.norm1(self.stem(x))))
            return self.head(torch.cat((x, x[:, :2]), dim=1))

    model = seeded(Twice)
    before = snapshot(model)
    result = SelfAdapt(model, mode=mode, steps=3, lr=0.01, adapt=["*"])(image)
    assert list(result.losses) == sorted(result.losses, reverse=True)
    assert_same(before, snapshot(model))


def test_a_scripted_part_keeps_its_flag(image: Tensor) -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(8, 3, 1), nn.Dropout(0.5)))
    model = nn.Sequential(seeded(lambda: TinyNet(8)), scripted).train()
    SelfAdapt(model, steps=1, adapt=["0"])(image)
    assert all(module.training for module in model.modules())


def test_autocast_of_the_caller_is_kept_and_the_steps_work(tiny: nn.Module, image: Tensor) -> None:
    method = SelfAdapt(tiny, mode="paper", steps=3, adapt=["*"], lr=0.1)
    expected = method(image).losses
    with torch.autocast("cpu", torch.bfloat16):
        losses = method(image).losses
        assert torch.is_autocast_enabled("cpu")
    assert losses != expected
    assert losses == pytest.approx(expected, abs=0.02)


def test_threads_wait_for_each_other(tiny: nn.Module, image: Tensor) -> None:
    method = SelfAdapt(tiny.train(), mode="official", steps=3)
    expected = method(image).probs
    before = snapshot(tiny)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: method(image).probs, range(8)))
    assert all(torch.equal(probs, expected) for probs in results)
    assert_same(before, snapshot(tiny))


def test_random_numbers_are_not_drawn(tiny: nn.Module, image: Tensor) -> None:
    state = torch.get_rng_state()
    SelfAdapt(tiny, steps=1)(image)
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_stays_off(image: Tensor) -> None:
    model = seeded(lambda: nn.Sequential(TinyNet(8), nn.Dropout(0.5), nn.Conv2d(8, 3, 1))).train()
    for mode in ("paper", "official"):
        method = SelfAdapt(model, mode=mode, steps=2)
        assert torch.equal(method(image).probs, method(image).probs)


def test_adapting_changes_the_prediction_and_lowers_the_loss(image: Tensor) -> None:
    model = seeded(TinyNet)
    result = SelfAdapt(model, mode="paper", steps=8)(image)
    assert list(result.losses) == sorted(result.losses, reverse=True)
    unadapted = SelfAdapt(model, mode="paper", steps=0)(image)
    assert not torch.equal(result.probs, unadapted.probs)
    torch.testing.assert_close(result.confidence, result.probs.amax(dim=0))
    assert result.seconds > 0


def test_before_and_after_start_from_the_network_as_trained(tiny: nn.Module, image: Tensor) -> None:
    expected = SelfAdapt(tiny, steps=1)(image)
    selfadapt.apply_san(tiny, 1.0)
    result = SelfAdapt(tiny, steps=1)(image)
    assert torch.equal(result.source_probs, expected.source_probs)
    assert torch.equal(result.probs, expected.probs)


def test_a_network_that_draws_random_numbers_is_repeatable(image: Tensor) -> None:
    class Noisy(TinyNet):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x + torch.randn_like(x))

    model = seeded(Noisy)
    state = torch.get_rng_state()
    method = SelfAdapt(model, steps=2)
    assert "draws random numbers" in str(method.notes)
    first = method(image)
    torch.rand(3)
    assert torch.equal(method(image).probs, first.probs)
    torch.set_rng_state(state)
    method(image)
    assert torch.equal(torch.get_rng_state(), state)


# guards


def san_probs(model: nn.Module, image: Tensor) -> Tensor:
    return SelfAdapt(model, mode="paper", steps=0)(image).probs


@pytest.mark.parametrize("fast", [True, False])
def test_without_a_pseudo_label_statistics_alone_follow_as_in_the_released_code(
    tiny: nn.Module, image: Tensor, fast: bool
) -> None:
    before = snapshot(tiny)
    method = SelfAdapt(tiny, mode="official", psi=1.0, steps=3, fast=fast)
    result = method(image)
    assert result.losses == (0.0,) * 3
    assert "no pixel is confident enough" in result.notes[-1]
    assert_same(before, snapshot(tiny))
    x = method.interface.normalize(image)
    with torch.no_grad():
        for _ in range(3):
            tiny.train()(x)
        with selfadapt.san(tiny.eval(), 0.1):
            scores = F.interpolate(tiny(x), image.shape[-2:], mode="bilinear")
    torch.testing.assert_close(result.probs, scores[0].softmax(dim=0), rtol=0, atol=1e-5)
    unmoved = SelfAdapt(tiny, mode="official", psi=1.0, steps=0)(image)
    assert not [note for note in unmoved.notes if "sure enough" in note]


def test_an_exploding_loss_falls_back_to_san(tiny: nn.Module, image: Tensor) -> None:
    result = SelfAdapt(tiny, mode="paper", lr=3e38, adapt=["*"])(image)
    assert not all(map(math.isfinite, result.losses))
    assert "lr may be too high: this is the prediction with SaN" in result.notes[-1]
    assert torch.equal(result.probs, san_probs(tiny, image))


class NaNWhere(TinyNet):
    """A network that returns NaN where it is told to."""

    def __init__(self, broken: Callable[[nn.Module, Tensor], bool]) -> None:
        super().__init__()
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (float("nan") if self.broken(self, x) else 1.0)


def test_a_rising_loss_is_noted(tiny: nn.Module, image: Tensor) -> None:
    model = seeded(TinyNet, seed=3)
    result = SelfAdapt(model, mode="paper", lr=30.0, steps=2, adapt=["*"])(image)
    assert result.losses[1] > result.losses[0]
    assert "the loss rose from" in result.notes[-1]
    assert "the loss rose" not in str(SelfAdapt(tiny, mode="paper", steps=2)(image).notes)


def test_a_loss_that_rises_a_little_is_not_noted(image: Tensor) -> None:
    model = seeded(TinyNet, seed=3)
    result = SelfAdapt(model, mode="paper", lr=8.0, steps=2, adapt=["*"])(image)
    assert 1 < result.losses[1] / result.losses[0] < 1.5
    assert "the loss rose" not in str(result.notes)


def test_views_the_network_cannot_digest_fall_back_to_san(image: Tensor) -> None:
    model = seeded(lambda: NaNWhere(lambda _, x: x.shape[-1] < 20))
    result = SelfAdapt(model)(image)
    assert "the views' predictions are not finite" in result.notes[-1]
    assert result.fused_probs is result.pseudo_label is None
    assert torch.equal(result.probs, san_probs(model, image))


def test_a_source_prediction_that_is_not_finite_is_left_out(image: Tensor) -> None:
    model = seeded(lambda: NaNWhere(lambda net, _: not isinstance(net.norm1, SaN)))
    result = SelfAdapt(model, steps=1)(image)
    assert result.source_probs is None
    assert "the source network's prediction is not finite" in result.notes
    assert torch.isfinite(result.probs).all()


def test_a_class_that_is_ruled_out_is_no_trouble(image: Tensor) -> None:
    class Masked(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.tensor([0.0, 0.0, float("-inf")]).reshape(1, 3, 1, 1)
            return super().forward(x) + mask

    model = seeded(lambda: nn.Sequential(Masked(3, 3, 1)))
    result = SelfAdapt(model, steps=2)(image)
    assert not [note for note in result.notes if "finite" in note]
    assert (result.probs[2] == 0).all()


def test_where_san_fails_too_the_source_prediction_is_given(image: Tensor) -> None:
    model = seeded(lambda: NaNWhere(lambda net, _: isinstance(net.norm1, SaN)))
    result = SelfAdapt(model, steps=1)(image)
    assert "this is the prediction of the network as trained" in result.notes[-1]
    assert torch.equal(result.probs, result.source_probs)


def test_a_network_that_is_broken_is_said_to_be(image: Tensor) -> None:
    model = seeded(lambda: NaNWhere(lambda *_: True))
    with pytest.raises(ValueError, match="the network's own prediction for this image is not"):
        SelfAdapt(model, steps=1)(image)


def test_large_images_are_scaled_down_and_brought_back(tiny: nn.Module) -> None:
    image = random_image(60, 90)
    result = SelfAdapt(tiny, steps=1, max_pixels=30 * 45)(image)
    assert tuple(result.probs.shape) == (3, 60, 90)
    assert tuple(result.pseudo_label.shape) == (60, 90)
    assert tuple(result.source_probs.shape) == tuple(result.fused_probs.shape) == (3, 60, 90)
    assert set(result.pseudo_label.unique().tolist()) <= {0, 1, 2, 255}
    assert "segmented at 45x30, the image is 90x60" in result.notes
    torch.testing.assert_close(result.probs.sum(dim=0), torch.ones(60, 90))


# settings


def test_the_label_of_a_large_image_needs_no_map_of_all_classes() -> None:
    class LargestTensor(TorchDispatchMode):
        num_bytes = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            output = function(*args, **(kwargs or {}))
            sizes = [leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            self.num_bytes = max(self.num_bytes, *sizes, 0)
            return output

    method = SaNOnly(nn.Conv2d(3, 1000, 1, stride=8), max_pixels=64 * 64, compare=False)
    with LargestTensor() as largest:
        result = method(torch.rand(3, 400, 512))
        assert result.label.shape == result.confidence.shape == (400, 512)
    assert largest.num_bytes <= 2**28 < 1000 * 400 * 512 * 4


def test_comparing_is_optional(tiny: nn.Module, image: Tensor) -> None:
    plain, compared = SelfAdapt(tiny, compare=False)(image), SelfAdapt(tiny)(image)
    assert plain.source_probs is None
    assert torch.equal(plain.probs, compared.probs)


def test_any_views_by_argument(tiny: nn.Module, image: Tensor) -> None:
    views = [View(1.0), View(0.5, flip=True), View(1.5, gray=True)]
    for mode in ("paper", "official"):
        method = SelfAdapt(tiny, views=views, mode=mode, steps=1)
        assert [(v.scale, v.flip, v.gray) for v in method.views] == [
            (1.0, False, False), (0.5, True, False), (1.5, False, True),
        ]  # fmt: skip
        assert isinstance(method(image).probs, Tensor)


def test_a_view_is_taken_once(tiny: nn.Module) -> None:
    assert len(SelfAdapt(tiny, scales=(0.5, 0.5)).views) == 2
    assert len(SelfAdapt(tiny, scales=0.5).views) == 2
    assert len(SelfAdapt(tiny, views=View(0.5)).views) == 1


def test_views_of_ones_own_kind_are_kept(tiny: nn.Module, image: Tensor) -> None:
    made = []

    class Darker(View):
        def make(self, image: Tensor) -> Tensor:
            made.append(self)
            return super().make(image) * 0.5

    for mode in ("paper", "official"):
        SelfAdapt(tiny, views=(Darker(s) for s in (0.5, 1.0)), mode=mode, steps=1)(image)
    assert len(made) == 4


def test_each_mode_has_its_own_learning_rate(tiny: nn.Module) -> None:
    assert SelfAdapt(tiny, mode="official").lr == 0.05
    assert SelfAdapt(tiny, mode="paper").lr < 0.05
    assert SelfAdapt(tiny, mode="auto").lr == 0.08
    assert SelfAdapt(tiny, lr=0.3).lr == 0.3


def test_normalised_tensors_give_the_same(tiny: nn.Module, image: Tensor) -> None:
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    method = SelfAdapt(tiny, steps=2)
    result = method((image - mean) / std, normalized=True)
    torch.testing.assert_close(result.probs, method(image).probs, rtol=0, atol=1e-4)


def test_a_half_precision_model_adapts_in_full(image: Tensor) -> None:
    model = seeded(TinyNet)
    half = seeded(TinyNet).half()
    before = snapshot(half)
    result = SelfAdapt(half, steps=3)(image)
    assert_same(before, snapshot(half))
    assert result.probs.dtype == torch.float32
    torch.testing.assert_close(
        result.probs, SelfAdapt(model, steps=3)(image).probs, rtol=0, atol=0.02
    )


def test_a_model_without_batchnorm_still_adapts(image: Tensor) -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 1)))
    result = SelfAdapt(model, steps=3)(image)
    assert any("SaN changes nothing" in note for note in result.notes)
    assert result.losses[-1] < result.losses[0]


def test_more_than_255_classes(image: Tensor) -> None:
    result = SelfAdapt(seeded(lambda: TinyNet(300)), steps=1, psi=0.9)(image)
    assert int(result.pseudo_label.min()) == -1
    assert result.losses


def test_a_model_wrapped_for_several_devices_is_unwrapped(tiny: nn.Module, image: Tensor) -> None:
    expected = SelfAdapt(tiny, steps=1)(image).probs
    assert torch.equal(SelfAdapt(nn.DataParallel(tiny), steps=1)(image).probs, expected)


def test_printing_says_what_will_be_done(tiny: nn.Module, image: Tensor) -> None:
    text = repr(SelfAdapt(tiny, alpha={"norm1": 0.3, "*": 0.1}))
    for part in (
        "TinyNet, alpha={'norm1': 0.3",
        "steps=5",
        "mode='auto'",
        "0.25 flipped gray",
        "0.485",
    ):
        assert part in text
    result = SelfAdapt(tiny, mode="paper", steps=2)(image)
    assert repr(result).startswith("Result(48x32, 3 classes, 2 steps")


def test_a_compiled_model_is_adapted_behind_its_compiler(tiny: nn.Module, image: Tensor) -> None:
    compiled = torch.compile(tiny, backend="eager")
    expected = SelfAdapt(tiny, steps=1)(image).probs
    assert torch.equal(SelfAdapt(compiled, steps=1)(image).probs, expected)


@pytest.mark.parametrize("max_pixels", [None, 400])
def test_a_class_masked_with_minus_infinity_stays_out_at_any_size(max_pixels: int | None) -> None:
    def masked(scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.tensor([False, True, False])[:, None, None], -torch.inf)

    settings = {"alpha": 0.5, "steps": 2, "max_pixels": max_pixels}
    method = SelfAdapt(seeded(lambda: TinyNet(form=masked), seed=3), **settings)
    result = method(random_image(33, 47))
    assert torch.isfinite(result.probs).all()
    assert result.probs[1].max() == 0
    assert len(result.losses) == 2
    assert max(result.losses) < 10
