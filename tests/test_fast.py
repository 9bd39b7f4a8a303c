"""The switches of the shortcuts, and PIL's resampling as a matrix product."""

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage
from torch import Tensor, nn

from conftest import random_image
from selfadapt import SelfAdapt, create_method, views
from selfadapt.baselines import SaNOnly
from selfadapt.engine.network import Network
from selfadapt.fast import PLAIN, Fast
from selfadapt.norm import SaNReport

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_plain_has_every_shortcut_switched_off() -> None:
    on = {field.name: getattr(PLAIN, field.name) for field in fields(Fast)}
    assert on.pop("precision") == "fp32"
    assert on
    assert not any(on.values())
    assert PLAIN.half(GPU) is None
    assert PLAIN.half(GPU, steps=True) is None
    assert not PLAIN.fuses(GPU)
    assert not PLAIN.keeps_channels_last(GPU)


def test_on_a_cpu_layers_are_reused_and_nothing_else_is_done() -> None:
    assert Fast().reuse
    assert Fast().half(CPU) is None
    assert Fast().half(CPU, steps=True) is None
    assert not Fast().keeps_channels_last(CPU)
    assert not Fast().fuses(CPU)


@pytest.mark.parametrize(
    ("capability", "predicts", "adapts"),
    [((7, 5), None, None), ((8, 0), torch.float16, torch.bfloat16)],
)
def test_16_bits_where_a_card_is_made_for_them(
    capability: tuple[int, int], predicts: Any, adapts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert Fast().half(GPU) == predicts
    assert Fast().half(GPU, steps=True) == adapts
    assert Fast(precision="fp32").half(GPU) is None
    assert Fast(precision="bf16").half(GPU) == Fast(precision="bf16").half(GPU, steps=True)
    assert Fast(precision="bf16").half(GPU) == torch.bfloat16


@pytest.mark.parametrize("switch", ["kernels", "channels_last"])
def test_kernels_need_the_channels_last(switch: str) -> None:
    assert not Fast(**{switch: False}).fuses(GPU)


@pytest.mark.parametrize("precision", ["fp16", "", None, 16, "BF16"])
def test_an_unknown_precision_is_refused(precision: Any) -> None:
    with pytest.raises(ValueError, match="precision must be auto, fp32 or bf16, got"):
        Fast(precision=precision)


@pytest.mark.parametrize("fast", [None, 1, "yes", {"reuse": True}])
def test_only_switches_are_taken(tiny: nn.Module, fast: Any) -> None:
    with pytest.raises(TypeError, match="fast must be True, False or a Fast object, got"):
        SelfAdapt(tiny, fast=fast)


def test_true_and_false_are_all_and_none(tiny: nn.Module) -> None:
    assert create_method("tent", tiny, fast=True).fast == create_method("tent", tiny).fast == Fast()
    assert create_method("tent", tiny, fast=False).fast == PLAIN
    assert create_method("tent", tiny, fast=Fast(graphs=False)).fast == Fast(graphs=False)


def test_a_network_that_draws_random_numbers_is_run_again_each_time() -> None:
    class Noisy(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.rand_like(x))

    model = nn.Sequential(Noisy(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    method = SelfAdapt(model, steps=3, adapt=["2"])
    assert not method.fast.reuse
    assert not method.fast.graphs
    image = random_image()
    plain = SelfAdapt(model, steps=3, adapt=["2"], fast=False)(image)
    assert torch.equal(method(image).probs, plain.probs)


def test_16_bits_on_the_cpu_are_near_the_same(tiny: nn.Module) -> None:
    image = random_image()
    expected = SelfAdapt(tiny, steps=3)(image)
    result = SelfAdapt(tiny, steps=3, fast=Fast(precision="bf16"))(image)
    assert not torch.equal(result.probs, expected.probs)
    torch.testing.assert_close(result.probs, expected.probs, rtol=0, atol=0.03)


sides = st.integers(1, 90)


@settings(deadline=None, max_examples=150)
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

    def _compute(self, image: Tensor) -> dict[str, Tensor]:
        maps = super()._compute(image)
        if self.fast.precision == "auto":
            maps["logits"] = maps["logits"] * float("inf")
        return maps

    def _network(self, tuned: Collection[str] = (), san: SaNReport | None = None) -> Network:
        network = super()._network(tuned, san)
        if self.fast.precision == "auto":
            network.logits = lambda image: torch.full((1, 3, *image.shape[-2:]), torch.inf)
        return network


def test_where_fp16_overflows_bf16_is_taken(
    tiny: nn.Module, image: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = {"auto": torch.float16, "bf16": None, "fp32": None}
    monkeypatch.setattr(Fast, "half", lambda self, *_, **__: half[self.precision])
    method = Overflowing(tiny, fast=True)
    monkeypatch.setattr("selfadapt.engine.network._precision", lambda *_, **__: nullcontext())
    result = method(image)
    assert method.fast.precision == "bf16"
    assert result.notes == ("this network's numbers are too large for fp16: bf16 is taken",)
    assert torch.equal(result.probs, SaNOnly(tiny, fast=False)(image).probs)
