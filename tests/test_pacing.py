from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import random_image
from selfadapt import SelfAdapt
from selfadapt.pacing import PRESETS, Pace


def test_as_many_steps_are_taken_as_fit() -> None:
    calls = []

    def measure(steps: int) -> float:
        calls.append(steps)
        return 0.030 + 0.010 * steps

    pace = Pace(75)
    assert pace.steps(10, 1000, measure) == 4
    assert pace.steps(3, 1000, measure) == 3
    assert pace.steps(10, 500, measure) == 10
    assert pace.steps(10, 2000, measure) == 0
    assert pace.steps(0, 9000, measure) == 0
    assert calls == [1, 2]
    assert pace.steps(10, 9000, measure) == 4, "so far away it is measured anew"
    assert calls == [1, 2, 1, 2]


def test_a_budget_without_end_takes_all_steps() -> None:
    assert Pace(float("inf")).steps(7, 10, lambda steps: 1.0 * steps) == 7
    assert Pace(1000).steps(7, 10, lambda steps: 1.0 / steps) == 1, "measured badly"


def test_a_budget_changes_the_number_of_steps_and_says_so(tiny: nn.Module, image: Tensor) -> None:
    generous = SelfAdapt(tiny, steps=4, budget_ms=60_000)(image)
    assert len(generous.losses) == 4
    assert torch.equal(generous.probs, SelfAdapt(tiny, steps=4)(image).probs)
    none = SelfAdapt(tiny, steps=4, budget_ms=0)(image)
    assert none.losses == ()
    assert none.notes[-1] == "0 of 4 steps fit into 0 ms"
    assert torch.equal(none.probs, SelfAdapt(tiny, steps=0)(image).probs)


def test_the_preset_is_its_settings(tiny: nn.Module, image: Tensor) -> None:
    expected = SelfAdapt(tiny, **PRESETS["realtime"])(image)
    assert torch.equal(SelfAdapt(tiny, preset="realtime")(image).probs, expected.probs)
    assert not torch.equal(SelfAdapt(tiny)(image).probs, expected.probs)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown preset": ({"preset": "realtim"}, "unknown preset 'realtim'; did you mean 'realtime'"),
    "preset and steps": ({"preset": "realtime", "steps": 5}, "sets steps to 2, got 5; leave out"),
    "preset and mode": ({"preset": "realtime", "mode": "official"}, "sets mode to 'paper'"),
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
    method = SelfAdapt(tiny, preset="realtime", steps=2, scales=[0.25, 0.5])
    assert (method.steps, method.step_scale) == (2, 0.625)


def test_steps_on_a_smaller_image_adapt_at_that_size(tiny: nn.Module) -> None:
    image = random_image(40, 56)
    sizes = []
    method = SelfAdapt(tiny, steps=2, step_scale=0.5, scales=(0.75,), compare=False)
    tiny.register_forward_hook(lambda _, args, __: sizes.append(tuple(args[0].shape[-2:])))
    result = method(image)
    assert sizes == [(30, 42), (30, 42), (20, 28), (20, 28), (40, 56)]
    assert tuple(result.pseudo_label.shape) == (40, 56)
    assert result.losses[1] < result.losses[0]


def test_the_adapted_network_predicts_views_too(tiny: nn.Module, image: Tensor) -> None:
    def adapted(**settings: Any) -> Tensor:
        return SelfAdapt(tiny, steps=2, **settings)(image).probs

    alone, whole = adapted(), adapted(final_scales=(0.5,), final_weight=1.0)
    half = adapted(final_scales=(0.5,), final_weight=0.5)
    torch.testing.assert_close(half, (alone + whole) / 2)
    assert not torch.allclose(alone, whole)
