"""Whoever looks on is told of each step, may end it, and changes nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import assert_same, snapshot
from selfadapt import SelfAdapt, create_method
from selfadapt.computed import Computed
from selfadapt.engine.graphs import Graphs
from selfadapt.engine.settings import Fast, Plan
from selfadapt.method import Stopped
from selfadapt.views import Size

STEPPING = ("self-adapt", "tent", "entropy", "memo")


def told(method: Any) -> list[tuple[int, float]]:
    """Take down from now on what the method tells of its steps."""
    calls: list[tuple[int, float]] = []
    method.on_step = lambda number, loss: calls.append((number, loss))
    return calls


@pytest.mark.parametrize("mode", ["paper", "official"])
@pytest.mark.parametrize("name", STEPPING)
def test_each_step_is_told_once_and_changes_nothing(
    name: str, mode: str, tiny: nn.Module, image: Tensor
) -> None:
    method = create_method(name, tiny, steps=3, mode=mode)
    alone = method(image)
    calls = told(method)
    watched = method(image)
    assert calls == list(enumerate(watched.losses, start=1))
    assert len(calls) == 3
    assert watched.losses == alone.losses
    assert torch.equal(watched.probs, alone.probs)
    assert watched.notes == alone.notes


@pytest.mark.parametrize("error", [Stopped, ValueError, KeyError])
@pytest.mark.parametrize("name", STEPPING)
def test_raising_ends_the_image_and_leaves_the_model_as_it_was(
    name: str, error: type[Exception], tiny: nn.Module, image: Tensor
) -> None:
    method: Any = create_method(name, tiny.train(), mode="paper", steps=3, lr=0.1)
    expected, before, fast = method(image), snapshot(tiny), method.fast

    def stop(number: int, loss: float) -> None:
        if number == 2:
            raise error("enough")

    method.on_step = stop
    with pytest.raises(error, match="enough"):
        method(image)
    assert_same(before, snapshot(tiny))
    assert method.fast == fast
    method.on_step = None
    again = method(image)
    assert torch.equal(again.probs, expected.probs)
    assert again.notes == expected.notes


def test_stopping_is_not_taken_for_a_shortcut_that_fails(tiny: nn.Module, image: Tensor) -> None:
    method, calls = SelfAdapt(tiny, mode="paper", steps=3), []

    def stop(number: int, loss: float) -> None:
        calls.append(number)
        raise Stopped

    method.on_step = stop
    with pytest.raises(Stopped):
        method(image)
    assert calls == [1]


def test_an_error_of_who_looks_on_is_none_of_the_network(tiny: nn.Module, image: Tensor) -> None:
    method = SelfAdapt(tiny, mode="paper", steps=2, compare=False)
    notes, fast, seen = method.notes, method.fast, []

    def look(number: int, loss: float) -> None:
        seen.append(number)
        raise KeyError("mine")

    method.on_step = look
    with pytest.raises(KeyError, match="mine"):
        method(image)
    assert (method.notes, method.fast, seen) == (notes, fast, [1])


def test_measuring_for_a_budget_is_not_told(tiny: nn.Module, image: Tensor) -> None:
    method = SelfAdapt(tiny, mode="paper", steps=3, budget_ms=60_000)
    calls = told(method)
    method(image)
    assert [number for number, _ in calls] == [1, 2, 3]


def test_images_are_not_recorded_while_steps_are_told(
    tiny: nn.Module, image: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = []

    def record(graphs: Graphs, compute: Any, image: Tensor, size: Size, variant: Any) -> Computed:
        recorded.append(variant)
        return compute(image).finish(size, copy=True)

    def plan(self: Fast, device: torch.device, *, graphs: str = "", **_: str) -> Plan:
        reasons = dict.fromkeys(("reuse", "channels_last", "kernels", "batches"), "no GPU")
        return Plan(reasons={**reasons, **({"graphs": graphs} if graphs else {})})

    monkeypatch.setattr(Graphs, "__call__", record)
    monkeypatch.setattr(Fast, "plan", plan)
    method = SelfAdapt(tiny, mode="paper", steps=1)
    method(image)
    assert len(recorded) == 1
    told(method)
    method(image)
    assert len(recorded) == 1
