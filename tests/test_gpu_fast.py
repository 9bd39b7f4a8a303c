"""The optimizations on a GPU: the same results, from recordings that notice what changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PILImage
from torch import Tensor, nn

import selfadapt
from conftest import TinyNet, assert_same, random_image, seeded, snapshot
from selfadapt import SelfAdapt, View, create_method
from selfadapt.engine import Fast
from selfadapt.images import to_pil
from selfadapt.predict import predict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FP32 = Fast(precision="fp32")


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def slim() -> nn.Module:
    return selfadapt.create_model("deeplabv1_resnet18_slim", classes=5)


def assert_near(found: selfadapt.Result, expected: selfadapt.Result) -> None:
    torch.testing.assert_close(found.probs, expected.probs, rtol=0, atol=1e-3)
    assert (found.label == expected.label).float().mean() >= 0.999
    assert found.losses == pytest.approx(expected.losses, abs=1e-3)


@pytest.mark.parametrize("mode", ["auto", "paper", "official"])
@pytest.mark.parametrize("method", ["self-adapt", "tent", "entropy", "memo", "tta", "san"])
@pytest.mark.parametrize("build", [TinyNet, slim])
def test_shortcuts_lead_to_the_same(build: Any, method: str, mode: Any) -> None:
    model, image = seeded(build).cuda(), random_image(97, 130)
    settings: dict[str, Any] = {"mode": mode}
    if method in ("self-adapt", "tent", "entropy", "memo"):
        settings |= {"steps": 3, "lr": 1e-3, "alpha": 0.5}
    expected = create_method(method, model, fast=False, **settings)(image)
    before = snapshot(model)
    segment = create_method(method, model, fast=FP32, **settings)
    for _ in range(3):
        assert_near(segment(image), expected)
        assert_same(before, snapshot(model))
    assert not [note for note in segment.engine.notes if "optimizations" in note]
    assert not segment.engine.graphs.trouble


@pytest.mark.parametrize("mode", ["paper", "official"])
@pytest.mark.parametrize("method", ["source", "p-bn", "san", "tta"])
@pytest.mark.parametrize("build", [TinyNet, slim])
def test_batches_give_what_single_images_give(build: Any, method: str, mode: Any) -> None:
    model = seeded(build).cuda()
    images = [random_image(97, 130, seed=seed) * (1 - seed % 3 / 3) for seed in range(9)]
    slow = create_method(method, model, fast=False, mode=mode)
    expected = [slow(image) for image in images]
    before = snapshot(model)
    segment: Any = create_method(method, model, fast=FP32, mode=mode)
    for found, single in zip(segment.map(images, batch_size=3), expected, strict=True):
        assert_near(found, single)  # the third batch is a replay
    assert_same(before, snapshot(model))
    assert [key[0] for key in segment.engine.graphs._recordings] == [(3, 3, 97, 130)]
    assert not segment.engine.graphs.trouble
    assert not segment.engine.notes
    for found, single in zip(slow.map(images, batch_size=4), expected, strict=True):
        assert_near(found, single)


def test_16_bit_batches_are_near_and_written_alike(tmp_path: Path) -> None:
    model = seeded(slim).cuda()
    paths = [tmp_path / f"{seed:02}.png" for seed in range(30)]
    for seed, path in enumerate(paths):
        to_pil(random_image(96, 128, seed=seed % 5)).save(path)
    segment = create_method("san", model, compare=False)
    single = [segment(path) for path in paths[:5]]
    results = list(segment.map(paths, batch_size=8))
    for seed, found in enumerate(results):
        assert (found.label == single[seed % 5].label).float().mean() >= 0.99
    bases = [tmp_path / "out" / path.stem for path in paths]
    for (_, outcome), base, found in zip(
        predict(segment, paths, bases), bases, results, strict=True
    ):
        assert not isinstance(outcome, Exception)
        label = np.asarray(PILImage.open(base.with_name(f"{base.name}_label.png")))
        assert (label == found.label.cpu().numpy()).mean() >= 0.99
    assert (8, 3, 96, 128) in [key[0] for key in segment.engine.graphs._recordings]


@pytest.mark.parametrize("switch", ["reuse", "channels_last", "kernels", "batches", "graphs"])
def test_each_shortcut_can_be_left_out(switch: str) -> None:
    model, image = seeded(slim).cuda(), random_image(64, 80)
    settings = {"steps": 2, "lr": 1e-3}
    expected = SelfAdapt(model, mode="paper", fast=False, **settings)(image)
    fast = Fast(precision="fp32", **{switch: False})
    assert_near(SelfAdapt(model, mode="paper", fast=fast, **settings)(image), expected)


@pytest.mark.parametrize("precision", ["auto", "bf16"])
def test_16_bits_are_near(precision: Any) -> None:
    model, image = seeded(TinyNet).cuda(), random_image(97, 130)
    expected = SelfAdapt(model, mode="paper", fast=False, steps=3)(image)
    result = SelfAdapt(model, mode="paper", fast=Fast(precision=precision), steps=3)(image)
    torch.testing.assert_close(result.probs, expected.probs, rtol=0, atol=0.05)
    assert (result.label == expected.label).float().mean() >= 0.98


def test_the_third_image_of_a_size_is_a_replay() -> None:
    method = SelfAdapt(seeded(TinyNet).cuda(), mode="paper", steps=2, fast=FP32)
    images = [random_image(40, 48, seed=seed) for seed in range(2)]
    first = [method(image) for image in images]
    assert len(method.engine.graphs._recordings) == 1
    again = [method(image) for image in images]
    for one, other in zip(first, again, strict=True):
        assert_near(other, one)
    assert not torch.equal(again[0].probs, again[1].probs), "one was written over"


def recorded(model: nn.Module, image: Tensor) -> SelfAdapt:
    method = SelfAdapt(model, mode="paper", steps=2, lr=1e-3, fast=FP32)
    for _ in range(3):
        method(image)
    assert method.engine.graphs._recordings
    return method


def plainly(model: nn.Module, image: Tensor) -> selfadapt.Result:
    return SelfAdapt(model, mode="paper", steps=2, lr=1e-3, fast=False)(image)


def test_weights_changed_in_place_are_seen_by_a_replay() -> None:
    model, image = seeded(TinyNet).cuda(), random_image()
    method = recorded(model, image)
    before = method(image)
    with torch.no_grad():
        model.stem.weight.mul_(0.5)
        model.norm2.running_mean.add_(0.3)
        model.head.bias.add_(torch.tensor([1.0, -1.0, 0.0], device="cuda"))
    after = method(image)
    assert (after.probs - before.probs).abs().max() > 1e-2
    assert_near(after, plainly(model, image))


@pytest.mark.parametrize("assign", [False, True])
def test_weights_that_are_loaded_are_seen_by_a_replay(assign: bool) -> None:
    model, image = seeded(TinyNet).cuda(), random_image()
    method = recorded(model, image)
    others = seeded(TinyNet, seed=1).cuda().state_dict()
    model.load_state_dict(others, assign=assign)
    assert_near(method(image), plainly(model, image))


def test_a_layer_that_is_replaced_is_noticed() -> None:
    model, image = seeded(TinyNet).cuda(), random_image()
    method = recorded(model, image)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model.body = nn.Conv2d(6, 8, 3, padding=1, bias=False).cuda()
    assert_near(method(image), plainly(model, image))


def test_a_hook_sees_every_run() -> None:
    model, image = seeded(TinyNet).cuda(), random_image()
    method = recorded(model, image)
    expected = method(image)
    runs: list[int] = []
    handle = model.head.register_forward_hook(lambda *_: runs.append(1))
    assert_near(method(image), expected)
    assert runs
    seen = len(runs)
    method(image)
    assert len(runs) == 2 * seen
    handle.remove()
    assert_near(method(image), expected)


def test_memory_does_not_grow_with_the_number_of_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfadapt.engine.graphs.MAX_RECORDINGS", 3)
    method = SelfAdapt(seeded(TinyNet).cuda(), mode="paper", steps=2, views=[View(0.5)])
    used = []
    for number in range(12):
        image = random_image(64 + 8 * (number % 6), 96 - 8 * (number % 5))
        for _ in range(3):
            method(image)
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
        assert len(method.engine.graphs._recordings) == min(3, number + 1)
    assert max(used[6:]) <= 1.5 * max(used[:6]) + 2**20


class Waiting(TinyNet):
    """Looks at what it computes, which a recording cannot do."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y * (1.0 if y.max().item() > -1e9 else 0.0)


def test_a_network_that_cannot_be_recorded_is_run_as_ever() -> None:
    model, image = seeded(Waiting).cuda(), random_image()
    method = SelfAdapt(model, mode="paper", steps=2, lr=1e-3, fast=FP32)
    before = snapshot(model)
    for _ in range(4):
        assert_near(method(image), plainly(model, image))
        assert_same(before, snapshot(model))
    assert method.engine.graphs.trouble
    assert not method.engine.graphs._recordings
    assert_near(recorded(seeded(TinyNet).cuda(), image)(image), plainly(model, image))
