import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import random_image
from selfadapt import Interface, SelfAdapt
from selfadapt.baselines import SaNOnly, Source
from selfadapt.budget import PRESETS, TimeBudget


def test_as_many_steps_are_taken_as_fit() -> None:
    calls = []

    def measure(steps: int) -> float:
        calls.append(steps)
        return 0.030 + 0.010 * steps

    pace = TimeBudget(75)
    assert pace.steps(10, 1000, measure) == 4
    assert pace.steps(3, 1000, measure) == 3
    assert pace.steps(10, 500, measure) == 10
    assert pace.steps(10, 2000, measure) == 0
    assert pace.steps(0, 9000, measure) == 0
    assert calls == [1, 2]
    assert pace.steps(10, 9000, measure) == 4, "so far away it is measured anew"
    assert calls == [1, 2, 1, 2]


def test_a_budget_without_end_takes_all_steps() -> None:
    assert TimeBudget(float("inf")).steps(7, 10, lambda steps: 1.0 * steps) == 7
    assert TimeBudget(1000).steps(7, 10, lambda steps: 1.0 / steps) == 1, "measured badly"


def test_a_budget_changes_the_number_of_steps_and_says_so(tiny: nn.Module, image: Tensor) -> None:
    generous = SelfAdapt(tiny, mode="paper", steps=4, budget_ms=60_000)(image)
    assert len(generous.losses) == 4
    assert torch.equal(generous.probs, SelfAdapt(tiny, mode="paper", steps=4)(image).probs)
    none = SelfAdapt(tiny, mode="paper", steps=4, budget_ms=0)(image)
    assert none.losses == ()
    assert none.notes[-1].startswith("0 ms are too little to adapt")
    assert torch.equal(none.probs, Source(tiny)(image).probs)
    alone = SelfAdapt(tiny, mode="paper", steps=4, budget_ms=0, compare=False)(image)
    assert torch.equal(alone.probs, SaNOnly(tiny)(image).probs)


PIXEL_SECONDS = 2**-19
"""What a pass of ``Slow`` takes for a pixel: 0.25 s for an image of 256 x 512."""


class Clock:
    """Stands in for ``time.perf_counter``: time passes only where a network runs."""

    def __init__(self) -> None:
        self.now, self.speed = 0.0, 1.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


class Slow(nn.Module):
    """Takes a time in proportion to the pixels."""

    interface = Interface(mean=(0.5,) * 3, std=(0.5,) * 3)

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        clock = time.perf_counter
        assert isinstance(clock, Clock)
        clock.now += x[0, 0].numel() * PIXEL_SECONDS / clock.speed
        return self.head(self.body(x).relu())


# Views take an eighth of a second; source, each step and the prediction a quarter.
@pytest.mark.parametrize("speed", [1.0, 0.5], ids=["as fast as before", "half as fast as before"])
@pytest.mark.parametrize(("budget_ms", "steps"), [(20, 0), (400, 0), (900, 1), (2000, 5)])
def test_no_image_takes_more_than_its_budget_and_one_plain_pass(
    budget_ms: float, steps: int, speed: float, clock: Clock
) -> None:
    method = SelfAdapt(Slow(), mode="paper", steps=50, scales=(0.5,), budget_ms=budget_ms)
    clock.speed = speed  # it was measured when the method was made
    start = clock.now
    result = method(random_image(256, 512))
    assert clock.now - start <= budget_ms / 1000 + 0.25 / speed
    assert len(result.losses) <= steps
    if speed == 1:
        assert len(result.losses) == steps
    else:
        assert len(result.losses) >= (steps - 3) / 2


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("budget_ms", [20, 900, 1300, 2000])
def test_a_preset_keeps_to_the_budget(budget_ms: float, preset: str, clock: Clock) -> None:
    method = SelfAdapt(Slow(), preset=preset, budget_ms=budget_ms)
    start = clock.now
    method(random_image(256, 512))
    assert clock.now - start <= budget_ms / 1000 + 0.25


def test_an_estimate_is_what_an_image_takes(clock: Clock) -> None:
    method = SelfAdapt(Slow(), mode="paper", steps=2, scales=(0.5,))
    estimate = method.estimate(256, 512)
    assert estimate.plain_seconds == pytest.approx(0.25)
    assert estimate.seconds == pytest.approx(method(random_image(256, 512)).seconds)
    assert SaNOnly(Slow()).estimate(256, 512).seconds == pytest.approx(0.5)


def test_what_does_not_fit_into_memory_is_refused_before_work_starts(
    tiny: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfadapt.cost.free_memory", lambda: 2**20)
    with pytest.raises(ValueError, match=r"1280x1024 pixels needs .*, but 1 MB are free; lower"):
        SaNOnly(tiny)(torch.zeros(3, 1024, 1280))
    assert SaNOnly(tiny)(torch.zeros(3, 64, 64)).label.shape == (64, 64)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_preset_is_its_settings(preset: str, tiny: nn.Module, image: Tensor) -> None:
    expected = SelfAdapt(tiny, **PRESETS[preset])(image)
    assert expected.quality is not None
    assert torch.equal(SelfAdapt(tiny, preset=preset)(image).probs, expected.probs)
    assert not torch.equal(SelfAdapt(tiny)(image).probs, expected.probs)


def test_in_real_time_large_images_are_scaled_down(tiny: nn.Module) -> None:
    result = SelfAdapt(tiny, preset="realtime", compare=False)(random_image(900, 1000))
    assert tuple(result.label.shape) == (900, 1000)
    assert any("942x848" in note for note in result.notes)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown preset": ({"preset": "realtim"}, "unknown preset 'realtim'; did you mean 'realtime'"),
    "preset and steps": ({"preset": "realtime", "steps": 5}, "sets steps to 3, got 5; leave out"),
    "preset and mode": ({"preset": "realtime", "mode": "official"}, "sets mode to 'auto'"),
    "negative budget": ({"budget_ms": -1}, "budget_ms must be a number, 0 or more, got -1"),
    "large step scale": ({"step_scale": 1.5}, "step_scale must be a number, 0.01 to 1, got 1.5"),
    "weight over 1": ({"final_weight": 2}, "final_weight must be a number, 0 to 1, got 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_are_explained(case: str, tiny: nn.Module) -> None:
    settings, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        SelfAdapt(tiny, **settings)


def test_settings_of_a_preset_may_be_given_if_they_are_the_same(tiny: nn.Module) -> None:
    method = SelfAdapt(tiny, preset="realtime", steps=3, scales=[0.25, 0.5])
    assert (method.steps, method.step_scale, method.max_pixels) == (3, 0.5, 800_000)


def test_steps_on_a_smaller_image_adapt_at_that_size(tiny: nn.Module) -> None:
    image = random_image(40, 56)
    sizes = []
    method = SelfAdapt(tiny, mode="paper", steps=2, step_scale=0.5, scales=(0.75,), compare=False)
    tiny.register_forward_hook(lambda _, args, __: sizes.append(tuple(args[0].shape[-2:])))
    result = method(image)
    assert sizes == [(30, 42), (30, 42), (20, 28), (20, 28), (40, 56)]
    assert tuple(result.pseudo_label.shape) == (40, 56)
    assert result.losses[1] < result.losses[0]


def test_the_adapted_network_predicts_views_too(tiny: nn.Module, image: Tensor) -> None:
    def adapted(**settings: Any) -> Tensor:
        return SelfAdapt(tiny, mode="paper", steps=2, **settings)(image).probs

    alone, whole = adapted(), adapted(final_scales=(0.5,), final_weight=1.0)
    half = adapted(final_scales=(0.5,), final_weight=0.5)
    torch.testing.assert_close(half, (alone + whole) / 2)
    assert not torch.allclose(alone, whole)
