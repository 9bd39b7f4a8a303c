from typing import Any

import pytest
import torch

from conftest import TinyNet, assert_same, random_image, seeded, snapshot
from selfadapt import METHODS, Fast, SelfAdapt, create_method

EXACT = Fast(precision="fp32")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("mode", ["paper", "official"])
def test_the_gpu_gives_what_the_cpu_gives(mode: Any) -> None:
    image = random_image(97, 203)
    model = seeded(TinyNet)
    expected = SelfAdapt(model, mode=mode, steps=5)(image)
    model.cuda()
    before = snapshot(model)
    result = SelfAdapt(model, mode=mode, steps=5, fast=EXACT)(image)
    assert_same(before, snapshot(model))
    assert result.probs.is_cuda
    torch.testing.assert_close(result.probs.cpu(), expected.probs, rtol=0, atol=1e-3)
    assert result.losses == pytest.approx(expected.losses, rel=1e-3)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "mc-dropout"])
def test_every_method_gives_what_it_gives_on_the_cpu(name: str) -> None:
    image = random_image(97, 203)
    model = seeded(TinyNet)
    expected = create_method(name, model)(image)
    model.cuda()
    before = snapshot(model)
    result = create_method(name, model, fast=EXACT)(image)
    assert_same(before, snapshot(model))
    torch.testing.assert_close(result.probs.cpu(), expected.probs, rtol=0, atol=1e-3)


def test_dropout_on_the_gpu_is_repeatable_and_leaves_random_numbers_alone() -> None:
    model = seeded(TinyNet).cuda()
    method = create_method("mc-dropout", model, passes=3)
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    first = method(random_image())
    torch.cuda.manual_seed(5)
    again = method(random_image())
    assert torch.equal(first.probs, again.probs)
    assert torch.equal(torch.get_rng_state(), states[0])
    torch.cuda.set_rng_state(states[1])
    method(random_image())
    assert torch.equal(torch.cuda.get_rng_state(), states[1])


def test_an_ensemble_may_lie_on_several_devices() -> None:
    models = [seeded(TinyNet, seed=seed) for seed in (0, 1)]
    expected = create_method("ensemble", models)(random_image())
    models[1].cuda()
    result = create_method("ensemble", models, fast=EXACT)(random_image())
    torch.testing.assert_close(result.probs, expected.probs, rtol=0, atol=1e-3)


def test_running_out_of_memory_leaves_no_trace() -> None:
    model = seeded(lambda: TinyNet(150)).cuda()
    method = SelfAdapt(model, mode="paper", steps=1, scales=(0.1,), max_pixels=10**9, compare=False)
    before = snapshot(model)
    method(random_image())  # constants are made once
    used = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2e9 / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            method(torch.rand(3, 4000, 4000))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_same(before, snapshot(model))
    assert torch.cuda.memory_allocated() == used
    method(random_image())
