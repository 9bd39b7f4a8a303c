"""What every method keeps for every network."""

from functools import lru_cache
from typing import Any

import pytest
import torch

from conftest import assert_same, random_image, seeded, snapshot
from networks import NETWORKS, Case
from selfadapt import METHODS, create_method
from selfadapt.methods import settings_of

QUICK = {"steps": 1, "passes": 2, "scales": (0.5,), "lr": 1e-4, "alphas": (0.0, 0.5)}


def quick(name: str, model: Any, **settings: Any) -> Any:
    """Create a method with settings that make it quick, as far as it has them."""
    known = settings_of(name)
    given = QUICK | settings
    return create_method(name, model, **{k: v for k, v in given.items() if k in known})


def build(case: Case) -> Any:
    """Build a network in training mode, with part of it frozen."""
    model = seeded(case.build)
    for parameter in list(model.parameters())[::3]:
        parameter.requires_grad_(False)
    return model.train()


shared = lru_cache(maxsize=1)(build)
"""The same network for all methods: each test compares it with what it was at its start."""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("network", NETWORKS)
def test_a_method_segments_and_leaves_no_trace(network: str, method: str) -> None:
    case = NETWORKS[network]
    model = shared(case)
    before, random_state = snapshot(model), torch.get_rng_state()
    interface = None
    if method in case.refused_by:
        with pytest.raises(ValueError, match="this network has"):
            quick(method, model)
        assert_same(before, snapshot(model))
        return
    for mode, size in (("paper", (61, 97)), ("official", (32, 40))):
        segment = quick(method, model, mode=mode, interface=interface)
        interface = getattr(segment, "interface", None)  # it is the same in both modes
        image = random_image(*size, case.channels)
        result = segment(image)
        assert_same(before, snapshot(model, copy=False))
        for probs in (result.probs, result.source_probs):
            assert tuple(probs.shape) == (case.classes, *size)
            torch.testing.assert_close(probs.sum(dim=0), torch.ones(size))
            assert (probs >= 0).all()
        assert tuple(result.label.shape) == tuple(result.confidence.shape) == size
    segment(random_image(30, 33, case.channels, seed=1))
    assert torch.equal(segment(image).probs, result.probs), "depends on what came before"
    assert_same(before, snapshot(model, copy=False))
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("network", ["toy", "smp DeepLabV3Plus", "hf SegFormer"])
def test_a_method_leaves_no_trace_when_it_fails(network: str, method: str) -> None:
    case = NETWORKS[network]
    model = build(case)
    segment = quick(method, model)
    image = random_image(64, 64, case.channels)
    expected = segment(image)
    calls, limit = 0, 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == limit:
            raise RuntimeError("in the middle")

    handle = model.register_forward_hook(count)
    before, random_state = snapshot(model), torch.get_rng_state()
    segment(image)
    num_passes = calls
    while limit < num_passes:
        calls, limit = 0, limit + 1
        with pytest.raises(RuntimeError, match="in the middle"):
            segment(image)
        assert_same(before, snapshot(model, copy=False))
    assert torch.equal(torch.get_rng_state(), random_state)
    handle.remove()
    assert torch.equal(segment(image).probs, expected.probs)


@pytest.mark.parametrize("network", NETWORKS)
def test_a_network_of_any_family_adapts(network: str) -> None:
    case = NETWORKS[network]
    model = shared(case)
    before = snapshot(model)
    interface = None
    for mode in ("paper", "official"):
        adapt = quick("self-adapt", model, mode=mode, steps=2, interface=interface)
        interface = adapt.interface
        result = adapt(random_image(64, 71, case.channels))
        assert tuple(result.fused_probs.shape) == (case.classes, 64, 71)
        assert tuple(result.pseudo_label.shape) == (64, 71)
        assert len(result.losses) == 2
        assert result.losses[1] < result.losses[0]
    assert_same(before, snapshot(model, copy=False))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("network", ["toy", "own U-Net", "smp Unet", "smp DeepLabV3Plus"])
def test_tiny_images_are_segmented_too(network: str, method: str) -> None:
    segment = quick(method, seeded(NETWORKS[network].build))
    for size in ((1, 1), (3, 7), (200, 5)):
        assert tuple(segment(random_image(*size)).label.shape) == size
