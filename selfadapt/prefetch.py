"""Prefetching: threads read the next images while one is processed."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from selfadapt.devices import num_cores

MAX_READERS = 8

Item = TypeVar("Item")
Read = TypeVar("Read")


def num_readers() -> int:
    """Return the number of threads that read images: half of the cores, at most 8."""
    return max(1, min(MAX_READERS, num_cores() // 2))


def prefetch(
    read: Callable[[Item], Read], items: Iterable[Item], readers: int, ahead: int | None = None
) -> Generator[Read, None, None]:
    """Yield ``read(item)`` of every item in order, while threads read the following items.

    At most ``ahead`` items are read ahead, by default as many as there are readers. To stop early,
    close the generator.

    Example:
        >>> list(prefetch(str.upper, ["a", "b", "c"], readers=2))
        ['A', 'B', 'C']
    """
    pool = ThreadPoolExecutor(readers)
    reading: deque[Future[Read]] = deque()
    try:
        for item in items:
            reading.append(pool.submit(read, item))
            if len(reading) > (readers if ahead is None else ahead):
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
