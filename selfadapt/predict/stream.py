"""The loop from images to masks: files are read and written while the network runs."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from selfadapt.batches import BatchSegmenter, grouped, pinned
from selfadapt.devices import num_cores
from selfadapt.engine import described
from selfadapt.images import Image, count_frames, read_image
from selfadapt.labels import Classes
from selfadapt.models.interface import Interface
from selfadapt.predict.outputs import DEFAULT, Masks, masks_of, write_result
from selfadapt.prefetch import num_readers, prefetch
from selfadapt.result import Result
from selfadapt.views import Size

T = TypeVar("T")
READ_AHEAD = 2
"""Number of images or frames that are read ahead of the network, beyond its next batch."""
MAX_PENDING = 32
"""Maximum number of results being written or queued; beyond it the network waits. On few cores it
is less."""
MAX_BATCH, BATCH_PIXELS = 8, 2**24
"""Limits for the images that a GPU takes at a time: their number, and that of their pixels."""


@dataclass(frozen=True)
class Unit:
    """An image to segment: a file, or a frame of a video."""

    key: Any
    image: Image | Exception
    """The image, or why it could not be read."""
    write: Callable[[Masks, Image], None]
    """Writes its outputs."""
    notes: tuple[str, ...] = ()
    """Notes in addition to those of its result."""


@dataclass(frozen=True)
class Segmented:
    """Outcome of an image whose outputs are written."""

    result: Result
    """The result, without its maps."""
    width: int
    height: int
    shares: list[float]
    """Fraction of pixels of each class."""


Units = Generator[Unit, None, None]
UnitOutcome = Segmented | Exception
UnitOutcomes = Generator[tuple[Any, UnitOutcome], None, None]
Record = Callable[[Any, UnitOutcome], None]
"""Called with key and outcome of an image as soon as its outputs are written."""


def predict(
    method: Callable[[Image], Result],
    images: Sequence[Path],
    bases: Sequence[Path],
    classes: Classes | None = None,
    outputs: Sequence[str] = DEFAULT,
    record: Record = lambda key, outcome: None,
    skip: Callable[[Path], bool] = lambda path: False,
) -> UnitOutcomes:
    """Segment image files and write their outputs; yield the outcome of each, see ``stream``.

    Files that ``skip`` returns True for are left out; it is called by the threads that read ahead.
    """
    units = image_units(method, images, bases, outputs, skip)
    return stream(method, units, classes, record, probs="probs" in outputs)


def image_units(
    method: Callable[[Image], Result],
    images: Sequence[Path],
    bases: Sequence[Path],
    outputs: Sequence[str],
    skip: Callable[[Path], bool] = lambda path: False,
) -> Units:
    """Yield the units of image files, which are read ahead."""
    members = getattr(method, "members", (method,))  # of an ensemble
    interfaces = [getattr(member, "interface", None) for member in members]
    takes_rgb = all(isinstance(i, Interface) and i.channels in (None, 3) for i in interfaces)

    def read(path: Path) -> tuple[Image | Exception, tuple[str, ...]] | None:
        if skip(path):
            return None
        try:
            image = read_image(path) if takes_rgb else path  # else the method reads it
        except (ValueError, FileNotFoundError) as error:
            return error, ()
        if isinstance(image, Tensor):
            image = pinned(image, _device(method))
        return image, picture_notes(path)

    with closing(prefetch(read, images, num_readers())) as loaded:
        for path, base, image_and_notes in zip(images, bases, loaded, strict=True):
            if image_and_notes is not None:
                write = partial(write_result, base=base, outputs=outputs)
                image, notes = image_and_notes
                yield Unit(path, image, write, notes)


def picture_notes(path: Path) -> tuple[str, ...]:
    """Return a note for a file of several pictures, of which only the first is segmented."""
    number = count_frames(path)
    return (f"the file has {number} pictures, and the first is segmented",) if number > 1 else ()


def stream(
    method: Callable[[Image], Result],
    units: Units,
    classes: Classes | None = None,
    record: Record = lambda key, outcome: None,
    *,
    probs: bool = False,
) -> UnitOutcomes:
    """Segment each image and write its outputs; yield key and outcome, which may be an error.

    The network runs in the caller's thread, on a GPU on several images of one size at a time, while
    other threads read the next images and write earlier results. An image is yielded in the given
    order once its outputs are written, without the maps of its result, which would fill the memory.
    ``record`` is called earlier, by the thread that has written the outputs: by then the network
    may be busy with the next image. An exception that stops the network, also Ctrl-C, is raised
    after earlier results are written and yielded. A caller that stops before the end must close the
    generator, which ends its threads; files that they have begun are completed. With ``probs``, the
    probabilities of one image at a time are kept until they are written.
    """
    num_writers = min(MAX_PENDING, num_cores())
    max_pending = 1 if probs else min(MAX_PENDING, num_writers + MAX_BATCH)
    takes_batches = isinstance(method, BatchSegmenter) and method.takes_batches
    max_batch = MAX_BATCH if takes_batches and not probs and _device(method).type == "cuda" else 1
    pending: deque[tuple[Any, Future[UnitOutcome]]] = deque()
    ahead = READ_AHEAD + max_batch - 1
    # One reader: a generator cannot run in two threads.
    loaded = prefetch(lambda _: next(units, None), count(), readers=1, ahead=ahead)

    def limit(size: Size) -> int:
        return max(1, min(max_batch, BATCH_PIXELS // (size[0] * size[1])))

    with closing(units), closing(loaded), _threads(num_writers) as writers:
        try:
            every = iter(partial(next, loaded), None)
            for group in grouped(every, lambda unit: unit.image, limit):
                segmented_group = _segment(method, group, classes, probs)
                for unit, segmented in zip(group, segmented_group, strict=True):
                    yield from _finished(pending, max_pending - 1)
                    if isinstance(segmented, Exception):
                        record(unit.key, segmented)
                        writing: Future[UnitOutcome] = Future()
                        writing.set_result(segmented)
                    else:
                        writing = writers.submit(_write, unit, *segmented, record)
                    pending.append((unit.key, writing))
                    yield from _finished(pending, max_pending)
        except (KeyboardInterrupt, Exception):  # not GeneratorExit, after which one must not yield
            yield from _finished(pending)
            raise
        yield from _finished(pending)


@contextmanager
def _threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """Start threads; at the end, they finish the tasks they have begun and stop."""
    pool = ThreadPoolExecutor(number)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _segment(
    method: Callable[[Image], Result], units: Sequence[Unit], classes: Classes | None, probs: bool
) -> Iterator[tuple[Result, Masks] | Exception]:
    """Yield results without their maps, with their masks; or the errors."""
    outcomes: list[Any] = [unit.image for unit in units]
    if len(units) > 1 and isinstance(method, BatchSegmenter):
        outcomes = method.batch(outcomes)
    elif not isinstance(outcomes[0], Exception):
        outcomes = [attempt(partial(method, outcomes[0]))]
    for unit, outcome in zip(units, outcomes, strict=True):
        if isinstance(outcome, Exception):
            yield _reported(outcome)
            continue
        empty = torch.empty(outcome.num_classes, 0, 0)
        without_maps = outcome._replace(
            probs=empty, source_probs=None, fused_probs=None, pseudo_label=None, image=None,
            notes=(*unit.notes, *outcome.notes),
        )  # fmt: skip
        yield without_maps, masks_of(outcome, classes, probs=probs, wait=False)


def attempt(segment: Callable[[], T]) -> T | Exception:
    """Return what ``segment`` does, or the error if it is one of the image or the network."""
    try:
        return segment()
    except Exception as error:
        return _reported(error)


def _reported(error: Exception) -> Exception:
    """Return an error of an image or the network as it is reported; raise any other."""
    if isinstance(error, ValueError | FileNotFoundError):
        return error
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OSError):
        raise error
    return ValueError(f"the network failed: {described(error)}")


def _device(method: Any) -> torch.device:
    """Return where a method, or the first of an ensemble, runs."""
    engine = getattr(getattr(method, "members", (method,))[0], "engine", None)
    return torch.device("cpu") if engine is None else engine.device


def _write(unit: Unit, result: Result, masks: Masks, record: Record) -> UnitOutcome:
    """Write the outputs of an image and record it."""
    assert not isinstance(unit.image, Exception)
    masks.wait()
    height, width = masks.label.shape
    outcome: UnitOutcome = Segmented(result, width, height, masks.shares())
    try:
        unit.write(masks, unit.image)
    except (ValueError, OSError) as error:  # not an error of the image unless it has disappeared
        if not isinstance(unit.image, Path) or unit.image.is_file():
            raise
        outcome = error
    record(unit.key, outcome)
    return outcome


def _finished(pending: deque[tuple[Any, Future[UnitOutcome]]], left: int = 0) -> UnitOutcomes:
    """Yield outcomes once their outputs are written, until only ``left`` unfinished ones remain."""
    while pending and (len(pending) > left or pending[0][1].done()):
        key, writing = pending.popleft()
        yield key, writing.result()
