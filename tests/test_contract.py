"""What every method keeps for every network."""

from typing import Any

import pytest
import torch

from conftest import assert_same, random_image, seeded, snapshot
from networks import NETWORKS
from selfadapt import SelfAdapt

FAST = {"steps": 2, "scales": (0.5, 1.0), "lr": 1e-4}


@pytest.mark.parametrize("mode", ["paper", "official"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_any_family_adapts_and_comes_back(name: str, mode: Any) -> None:
    case = NETWORKS[name]
    model = seeded(case.build)
    for parameter in list(model.parameters())[::3]:
        parameter.requires_grad_(False)
    model.train()
    before = snapshot(model)
    method = SelfAdapt(model, mode=mode, **FAST)
    assert_same(before, snapshot(model))
    for size in ((97, 71), (64, 96)):
        image = random_image(*size, case.channels)
        result = method(image)
        assert tuple(result.probs.shape) == (case.classes, *size)
        assert tuple(result.source_probs.shape) == (case.classes, *size)
        assert tuple(result.fused_probs.shape) == (case.classes, *size)
        assert tuple(result.label.shape) == tuple(result.confidence.shape) == size
        assert tuple(result.pseudo_label.shape) == size
        for probs in (result.probs, result.source_probs, result.fused_probs):
            torch.testing.assert_close(probs.sum(dim=0), torch.ones(size))
        assert len(result.losses) == 2
        assert result.losses[1] < result.losses[0]
        assert_same(before, snapshot(model))
        assert torch.equal(method(image).probs, result.probs), "the same image, the same result"


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_any_family_survives_an_exception(name: str) -> None:
    case = NETWORKS[name]
    model = seeded(case.build)
    method = SelfAdapt(model, **FAST)
    image = random_image(64, 64, case.channels)
    expected = method(image)
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 7:  # one source pass, four views, one step, and in the second step
            raise RuntimeError("in the middle")

    handle = model.register_forward_hook(fail)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="in the middle"):
        method(image)
    assert calls == 7
    assert_same(before, snapshot(model))
    handle.remove()
    assert torch.equal(method(image).probs, expected.probs)


@pytest.mark.parametrize("size", [(1, 1), (3, 7), (200, 5)])
def test_tiny_images_adapt_too(size: tuple[int, int]) -> None:
    for name in ("toy", "own U-Net", "smp Unet", "own deeplabv1_resnet50"):
        model = seeded(NETWORKS[name].build)
        result = SelfAdapt(model, steps=1)(random_image(*size))
        assert tuple(result.label.shape) == size
