"""When images are recorded, and what is kept; the recording itself needs a GPU."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import seeded
from selfadapt.computed import Computed, ComputedBatch
from selfadapt.engine import Engine, Fast, graphs
from selfadapt.engine.graphs import Graphs, addresses, has_hooks
from selfadapt.models.interface import Interface


class Graph:
    """Stands for a CUDA graph, which does not exist here."""

    def replay(self) -> None:
        """Do nothing."""


@pytest.fixture(autouse=True)
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let a computation be taken for its recording; return what was recorded."""
    made: list[Any] = []

    def graph(*_: Any, **__: Any) -> Any:
        made.append(1)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(graphs.gc, "collect", lambda: 0)  # before each recording; it takes long
    return made


def computing(computed: list[Any]) -> Any:
    def compute(image: Tensor) -> Computed:
        computed.append(tuple(image.shape))
        return Computed(probs=image * 2)

    return compute


def sized(width: int) -> Tensor:
    return torch.ones(3, 4, width)


def test_the_second_image_of_a_size_is_recorded(tiny: nn.Module, recordings: list[Any]) -> None:
    computed: list[Any] = []
    run, compute = Graphs(tiny), computing(computed)
    assert torch.equal(run(compute, sized(8), (4, 8)).probs, 2 * sized(8))
    assert not recordings
    for _ in range(4):
        run(compute, sized(8), (4, 8))
    assert (len(recordings), len(computed)) == (1, 2)


def test_another_variant_is_another_recording(tiny: nn.Module, recordings: list[Any]) -> None:
    run, compute = Graphs(tiny), computing([])
    for variant in (1, 1, 2, 2, 1, 2):
        run(compute, sized(8), (4, 8), variant)
    assert len(recordings) == 2


def test_the_oldest_makes_room(tiny: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_RECORDINGS", 2)
    run, compute = Graphs(tiny), computing([])
    for width in (1, 2, 1, 2, 1, 3, 3):
        run(compute, sized(width), (4, width))
    assert [key[0][-1] for key in run._recordings] == [1, 3]


def test_memory_makes_room_too(tiny: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_BYTES", 3 * 4 * 10 * 4 * 2)
    run, compute = Graphs(tiny), computing([])
    for width in (5, 5, 4, 4, 7, 7, 100, 100):
        run(compute, sized(width), (4, width))
        kept = [key[0][-1] for key in run._recordings]
        assert sum(kept) <= 10 or len(kept) == 1
    assert kept == [100]


def test_sizes_that_come_and_go_are_recorded_ever_less(
    tiny: nn.Module, monkeypatch: pytest.MonkeyPatch, recordings: list[Any]
) -> None:
    monkeypatch.setattr(graphs, "MAX_RECORDINGS", 2)
    run, compute = Graphs(tiny), computing([])
    for _ in range(40):
        for width in (1, 2, 3):
            run(compute, sized(width), (4, width))
    assert len(recordings) < 20


def test_a_changed_network_is_recorded_anew(tiny: nn.Module, recordings: list[Any]) -> None:
    run, compute = Graphs(tiny), computing([])
    changes = [
        lambda: None,
        lambda: setattr(tiny, "head", nn.Conv2d(8, 3, 1)),
        lambda: setattr(tiny.body.weight, "data", tiny.body.weight.data.clone()),
        lambda: setattr(tiny.norm1, "running_mean", torch.zeros(6)),
    ]
    for number, change in enumerate(changes, start=1):
        change()
        for _ in range(3):
            run(compute, sized(8), (4, 8))
        assert len(recordings) == number


def test_values_changed_in_place_are_no_other_network(tiny: nn.Module) -> None:
    before = addresses(tiny)
    with torch.no_grad():
        tiny.head.weight.mul_(2)
    tiny.load_state_dict(seeded(type(tiny), seed=3).state_dict())
    assert addresses(tiny) == before


def test_nothing_is_recorded_while_hooks_watch(tiny: nn.Module) -> None:
    engine = Engine(tiny, Interface(), Fast())
    handle = tiny.head.register_forward_hook(lambda *_: None)
    assert has_hooks(tiny)
    assert engine.plan().reasons["reuse"] == "the network has hooks, which must see every run"
    handle.remove()
    assert engine.plan().runs("reuse")


def test_what_is_recorded_is_not_written_over(tiny: nn.Module) -> None:
    run, compute = Graphs(tiny), computing([])
    for _ in range(2):
        first = run(compute, sized(8), (4, 8))
    assert first.probs is not None
    run._recordings.popitem()[1].computed.probs.zero_()
    assert torch.equal(first.probs, 2 * sized(8))


def test_a_batch_is_recorded_beside_single_images(tiny: nn.Module, recordings: list[Any]) -> None:
    def compute(images: Tensor) -> ComputedBatch:
        return ComputedBatch([Computed(logits=image[None]) for image in images])

    run = Graphs(tiny)
    for batch in (sized(8)[None], torch.stack([sized(8), sized(8) * 2])):
        for _ in range(3):
            computed = run(compute, batch, (4, 8))
        for image, one in zip(batch, computed.images, strict=True):
            assert torch.equal(one.probs, image.softmax(dim=0))
    assert len(recordings) == 2


def test_what_cannot_be_recorded_is_computed(
    tiny: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def graph(*_: Any, **__: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    run = Graphs(tiny)
    for _ in range(3):
        assert torch.equal(run(computing([]), sized(8), (4, 8)).probs, 2 * sized(8))
    assert run.trouble == "operation not permitted when stream is capturing"
