"""The loop from images to masks: reading and writing go on while the network works."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from selfadapt.devices import num_cores
from selfadapt.engine import described
from selfadapt.images import Image, count_frames, read_image
from selfadapt.labels import Classes
from selfadapt.models.interface import Interface
from selfadapt.predict.outputs import DEFAULT, Masks, masks_of, write_result
from selfadapt.prefetch import num_readers, prefetch
from selfadapt.result import Result

AHEAD = 2
"""How many images or frames are taken from where they are read before the network gets to them."""
WAITING = 8
"""How many results are being written or wait for it; the network waits rather than add to them."""


@dataclass(frozen=True)
class Unit:
    """An image to segment, as it was read: a file, or a frame of a video."""

    key: Any
    image: Image | Exception
    """The image, or why it could not be read."""
    write: Callable[[Masks, Image], None]
    """Writes what becomes of it."""
    notes: tuple[str, ...] = ()
    """What is to be known of it beside the notes of its result."""


@dataclass(frozen=True)
class Segmented:
    """What is to be known of an image whose files are there."""

    result: Result
    """The result, without its maps."""
    width: int
    height: int
    shares: list[float]
    """The share of the pixels that each class has."""


Units = Generator[Unit, None, None]
Outcome = Segmented | Exception
Outcomes = Generator[tuple[Any, Outcome], None, None]
Record = Callable[[Any, Outcome], None]
"""Takes what came of an image as soon as its files are there."""


def predict(
    method: Callable[[Image], Result],
    images: Sequence[Path],
    bases: Sequence[Path],
    classes: Classes | None = None,
    outputs: Sequence[str] = DEFAULT,
    record: Record = lambda key, outcome: None,
) -> Outcomes:
    """Segment image files and write theirs; yield what came of each, see ``stream``."""
    units = image_units(method, images, bases, outputs)
    return stream(method, units, classes, record, probs="probs" in outputs)


def image_units(
    method: Callable[[Image], Result],
    images: Sequence[Path],
    bases: Sequence[Path],
    outputs: Sequence[str],
) -> Units:
    """Read image files."""
    in_color = _takes_color(method)

    def read(path: Path) -> tuple[Image | Exception, tuple[str, ...]]:
        try:
            image = read_image(path) if in_color else path  # which the method reads itself
        except (ValueError, FileNotFoundError) as error:
            return error, ()
        return image, picture_notes(path)

    with closing(prefetch(read, images, num_readers())) as every:
        for path, base, (image, notes) in zip(images, bases, every, strict=True):
            yield Unit(path, image, partial(write_result, base=base, outputs=outputs), notes)


def picture_notes(path: Path) -> tuple[str, ...]:
    """Return the note of a file of which only the first picture is segmented, if it is one."""
    number = count_frames(path)
    return (f"the file has {number} pictures, and the first is segmented",) if number > 1 else ()


def stream(
    method: Callable[[Image], Result],
    units: Units,
    classes: Classes | None = None,
    record: Record = lambda key, outcome: None,
    *,
    probs: bool = False,
) -> Outcomes:
    """Segment each image and write its files; yield what came of it, or why nothing did.

    The next images are read and earlier results written while the network works, which it does in
    the caller's thread. An image is yielded once its files are there, in the order given, and
    without the maps of its result: those would pile up. As the network may be busy with the next
    image by then, ``record`` is called at once, by the thread that wrote the files. What ends the
    network's work, Ctrl-C among it, is raised after what was segmented before is written and
    yielded. Whoever stops before the end closes the generator, which ends its threads; what they
    have begun to write becomes whole. With ``probs``, the probabilities are kept until they are
    written, those of one image at a time.
    """
    most = 1 if probs else WAITING
    waiting: deque[tuple[Any, Future[Outcome] | Exception]] = deque()
    num_writers = min(WAITING, num_cores())
    with closing(units), _threads(1) as reader, _threads(num_writers) as writers:
        try:
            for unit in _ahead(reader, units):
                done = _segment(method, unit, classes, probs)
                while len(waiting) >= most:
                    yield _written(*waiting.popleft())
                if isinstance(done, Exception):
                    record(unit.key, done)
                    waiting.append((unit.key, done))
                else:
                    waiting.append((unit.key, writers.submit(_write, unit, *done, record)))
                while waiting and _is_done(waiting[0][1]):
                    yield _written(*waiting.popleft())
        except (KeyboardInterrupt, Exception):  # not GeneratorExit, after which nobody listens
            yield from _rest(waiting)
            raise
        yield from _rest(waiting)


def _takes_color(method: Callable[[Image], Result]) -> bool:
    """Say whether the networks of a method are known to take the three channels of a picture."""
    members = getattr(method, "members", (method,))
    interfaces = [getattr(member, "interface", None) for member in members]
    return all(isinstance(it, Interface) and it.channels in (None, 3) for it in interfaces)


@contextmanager
def _threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """Lend threads; on leaving, they finish what they have begun and end."""
    pool = ThreadPoolExecutor(number)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _ahead(reader: ThreadPoolExecutor, units: Units) -> Iterator[Unit]:
    """Yield each image as it is read, while those after it are read."""
    reading: deque[Future[Unit | None]] = deque()
    while True:
        while len(reading) <= AHEAD:
            reading.append(reader.submit(next, units, None))
        unit = reading.popleft().result()
        if unit is None:
            return
        yield unit


def _segment(
    method: Callable[[Image], Result], unit: Unit, classes: Classes | None, probs: bool
) -> tuple[Result, Masks] | Exception:
    """Return the result without its maps, and what is written of it; or what failed."""
    if isinstance(unit.image, Exception):
        return unit.image
    try:
        result = method(unit.image)
    except (ValueError, FileNotFoundError) as error:
        return error
    except (torch.OutOfMemoryError, MemoryError, OSError):
        raise
    except Exception as error:  # the network's
        return ValueError(f"the network failed: {described(error)}")
    none = torch.empty(result.num_classes, 0, 0)
    slim = result._replace(
        probs=none, source_probs=None, fused_probs=None, pseudo_label=None, image=None,
        notes=(*unit.notes, *result.notes),
    )  # fmt: skip
    return slim, masks_of(result, classes, probs=probs)


def _write(unit: Unit, result: Result, masks: Masks, record: Record) -> Outcome:
    """Write the files of an image and record it."""
    assert not isinstance(unit.image, Exception)
    height, width = masks.label.shape
    outcome: Outcome = Segmented(result, width, height, masks.shares())
    try:
        unit.write(masks, unit.image)
    except (ValueError, OSError) as error:  # of the outputs, unless it is the image that is gone
        if not isinstance(unit.image, Path) or unit.image.is_file():
            raise
        outcome = error
    record(unit.key, outcome)
    return outcome


def _rest(waiting: deque[tuple[Any, Future[Outcome] | Exception]]) -> Outcomes:
    """Yield what is still being written."""
    while waiting:
        yield _written(*waiting.popleft())


def _is_done(writing: Future[Outcome] | Exception) -> bool:
    return isinstance(writing, Exception) or writing.done()


def _written(key: Any, writing: Future[Outcome] | Exception) -> tuple[Any, Outcome]:
    """Wait until the files of an image are there, or raise what kept them from it."""
    return key, writing if isinstance(writing, Exception) else writing.result()
