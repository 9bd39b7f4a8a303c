"""Reading ahead keeps the order, uses its threads, and reads no more than it was told to."""

import threading
from collections.abc import Iterator

import pytest

from selfadapt import prefetch as prefetch_module
from selfadapt.prefetch import num_readers, prefetch


@pytest.mark.parametrize("number", [0, 1, 2, 3, 20])
def test_items_come_in_their_order(number: int) -> None:
    slow = threading.Event()

    def read(item: int) -> int:
        slow.wait(0.002 * (item % 3))
        return 10 * item

    assert list(prefetch(read, range(number), 3)) == [10 * item for item in range(number)]


def test_several_are_read_at_once() -> None:
    together = threading.Barrier(3, timeout=10)

    def read(item: int) -> int:
        together.wait()
        return item

    assert list(prefetch(read, range(9), 3)) == list(range(9))


def test_no_more_is_read_than_there_are_readers_ahead_of_what_is_used() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(30):
            taken.append(item)
            yield item

    for used, _ in enumerate(prefetch(str, items(), 2)):
        assert len(taken) <= used + 1 + 2


def test_what_cannot_be_read_is_raised_in_its_place() -> None:
    every = prefetch(lambda item: 6 // item, [3, 2, 0, 1], 2)
    assert [next(every), next(every)] == [2, 3]
    with pytest.raises(ZeroDivisionError):
        next(every)


def test_nothing_is_read_after_the_end() -> None:
    read: list[int] = []
    every = prefetch(read.append, range(1000), 2)
    next(every)
    every.close()
    assert len(read) <= 4


@pytest.mark.parametrize(("cores", "readers"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 8), (128, 8)])
def test_half_of_the_cores_read(cores: int, readers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_module, "num_cores", lambda: cores)
    assert num_readers() == readers


@pytest.mark.parametrize(("started", "cores"), [("", 8), ("1", 8), ("4", 2), ("9", 1), ("x", 8)])
def test_processes_of_a_machine_share_its_cores(
    started: str, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", started)
    assert prefetch_module.num_cores() == cores
