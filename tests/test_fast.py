"""The switches of the optimizations, and PIL's resampling as a matrix product."""

from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image as PILImage
from torch import Tensor, nn

from conftest import random_image
from selfadapt import SelfAdapt, create_method, views
from selfadapt.baselines import SaNOnly
from selfadapt.computed import Computed
from selfadapt.engine import NO_OPTIMIZATIONS, Fast, Network, network, settings
from selfadapt.engine.settings import Plan

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_plain_has_every_shortcut_switched_off() -> None:
    on = {field.name: getattr(NO_OPTIMIZATIONS, field.name) for field in fields(Fast)}
    assert on.pop("precision") == "fp32"
    assert on
    assert not any(on.values())
    plan = NO_OPTIMIZATIONS.plan(GPU)
    assert (plan.predict, plan.adapt, plan.running) == (None, None, ())
    assert set(plan.reasons.values()) == {"switched off"}


def test_on_a_cpu_layers_are_reused_and_san_has_its_kernels() -> None:
    plan = Fast().plan(CPU)
    assert (plan.predict, plan.adapt, plan.running) == (None, None, ("reuse", "san_batchnorm"))
    assert set(plan.reasons.values()) == {"for GPUs only"}


def test_a_plan_says_why_a_shortcut_does_not_run() -> None:
    fast = Fast(batches=False, san_batchnorm=False)
    plan = fast.plan(CPU, reuse="it draws random numbers", precision="autocast")
    assert plan.running == ()
    assert plan.reasons["reuse"] == "it draws random numbers"
    assert plan.reasons["precision"] == "autocast"
    assert plan.reasons["batches"] == "switched off"


@pytest.mark.parametrize(
    ("capability", "predicts", "adapts"),
    [((7, 5), None, None), ((8, 0), torch.float16, torch.bfloat16)],
)
def test_16_bits_where_a_card_is_made_for_them(
    capability: tuple[int, int], predicts: Any, adapts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    settings.has_kernels.cache_clear()
    plan = Fast().plan(GPU)
    assert (plan.predict, plan.adapt) == (predicts, adapts)
    assert Fast(precision="fp32").plan(GPU).predict is None
    plan = Fast(precision="bf16").plan(GPU)
    assert plan.predict == plan.adapt == torch.bfloat16
    assert Fast(precision="bf16").plan(GPU, precision="autocast").predict is None
    settings.has_kernels.cache_clear()


@pytest.mark.parametrize("switch", ["kernels", "channels_last"])
def test_kernels_need_the_channels_last(switch: str) -> None:
    assert not Fast(**{switch: False}, precision="fp32").plan(GPU).runs("kernels")


@pytest.mark.parametrize("precision", ["fp16", "", None, 16, "BF16"])
def test_an_unknown_precision_is_refused(precision: Any) -> None:
    with pytest.raises(ValueError, match="precision must be auto, fp32 or bf16, got"):
        Fast(precision=precision)


@pytest.mark.parametrize("fast", [None, 1, "yes", {"reuse": True}])
def test_only_switches_are_taken(tiny: nn.Module, fast: Any) -> None:
    with pytest.raises(TypeError, match="fast must be True, False or a Fast object, got"):
        SelfAdapt(tiny, mode="paper", fast=fast)


def test_true_and_false_are_all_and_none(tiny: nn.Module) -> None:
    assert create_method("tent", tiny, fast=True).fast == create_method("tent", tiny).fast == Fast()
    assert create_method("tent", tiny, fast=False).fast == NO_OPTIMIZATIONS
    assert create_method("tent", tiny, fast=Fast(graphs=False)).fast == Fast(graphs=False)


def test_a_network_that_draws_random_numbers_is_run_again_each_time() -> None:
    class Noisy(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.rand_like(x))

    model = nn.Sequential(Noisy(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    method = SelfAdapt(model, mode="paper", steps=3, adapt=["2"])
    assert method.engine.plan().reasons["reuse"] == "the network draws random numbers"
    image = random_image()
    plain = SelfAdapt(model, mode="paper", steps=3, adapt=["2"], fast=Fast(reuse=False))(image)
    assert torch.equal(method(image).probs, plain.probs)


def test_16_bits_on_the_cpu_are_near_the_same(tiny: nn.Module) -> None:
    image = random_image()
    expected = SelfAdapt(tiny, mode="paper", steps=3)(image)
    result = SelfAdapt(tiny, mode="paper", steps=3, fast=Fast(precision="bf16"))(image)
    assert not torch.equal(result.probs, expected.probs)
    torch.testing.assert_close(result.probs, expected.probs, rtol=0, atol=0.03)


sides = st.integers(1, 90)


@hypothesis_settings(deadline=None, max_examples=150)
@given(size=st.tuples(sides, sides), new=st.tuples(sides, sides), seed=st.integers(0, 99))
def test_the_way_of_the_gpu_gives_pils_pixels_across_then_down(
    size: tuple[int, int], new: tuple[int, int], seed: int
) -> None:
    levels = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    picture = PILImage.fromarray(levels)
    across = picture.resize((new[1], size[0]), PILImage.Resampling.BILINEAR)
    expected = np.asarray(across.resize(new[::-1], PILImage.Resampling.BILINEAR))
    found = views._pil_resize_on_gpu(torch.from_numpy(levels).float()[None], new)
    assert np.array_equal(found[0].numpy(), expected)


# Pillow 13 goes down first where the height loses more than twice as many pixels as the width.
@pytest.mark.parametrize("new", [(1024, 2048), (131, 517), (150, 200), (300, 400), (601, 800)])
def test_large_images_too(new: tuple[int, int]) -> None:
    image = random_image(600, 800)
    levels = (image * 255).round()
    found = views._pil_resize_on_gpu(levels, new) / 255
    assert torch.equal(found.float(), views.pil_resize(image, new))


class Overflowing(SaNOnly):
    """Gives infinite scores as long as fp16 is taken."""

    def compute(self, network: Network, image: Tensor) -> Computed:
        computed = super().compute(network, image)
        if self.fast.precision == "auto":
            assert computed.logits is not None
            return Computed(logits=computed.logits * float("inf"))
        return computed


def test_where_fp16_overflows_bf16_is_taken(
    tiny: nn.Module, image: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Fast.plan

    def plan(self: Fast, device: torch.device, **reasons: str) -> Plan:
        """Pretend that fp16 is used."""
        fp16 = torch.float16 if self.precision == "auto" else None
        return replace(real(self, device, **reasons), predict=fp16, adapt=None)

    monkeypatch.setattr(Fast, "plan", plan)
    monkeypatch.setattr(network, "_autocast", lambda *_: nullcontext())
    monkeypatch.setattr(Network, "__init__", partialmethod(_in_float32, Network.__init__))
    method = Overflowing(tiny, fast=True)
    result = method(image)
    assert method.fast.precision == "bf16"
    assert result.notes == ("this network's activations overflow in fp16: bf16 is used",)
    assert torch.equal(result.probs, SaNOnly(tiny)(image).probs)


def _in_float32(self: Network, init: Any, *args: Any) -> None:
    """Make a network whose weights are stored as they are."""
    *others, plan, on_step, fallbacks = args
    init(self, *others, replace(plan, predict=None), on_step, fallbacks)
