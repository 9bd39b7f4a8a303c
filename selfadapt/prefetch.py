"""Reading ahead: the next images are decoded by other threads while one is dealt with."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from selfadapt.devices import num_cores

MOST_READERS = 8

Item = TypeVar("Item")
Read = TypeVar("Read")


def num_readers() -> int:
    """Return how many threads read images for a process: half of its cores, at most 8."""
    return max(1, min(MOST_READERS, num_cores() // 2))


def prefetch(
    read: Callable[[Item], Read], items: Iterable[Item], readers: int
) -> Generator[Read, None, None]:
    """Yield ``read(item)`` of every item, in their order, while those after it are read.

    As many are read ahead as there are readers. Whoever stops before the end closes the generator:
    nothing more is read then.

    Example:
        >>> list(prefetch(str.upper, ["a", "b", "c"], readers=2))
        ['A', 'B', 'C']
    """
    pool = ThreadPoolExecutor(readers)
    reading: deque[Future[Read]] = deque()
    try:
        for item in items:
            reading.append(pool.submit(read, item))
            if len(reading) > readers:
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
