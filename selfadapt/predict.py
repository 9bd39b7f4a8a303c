"""Images in, masks out: segment files and write what a person and a program want to see."""

import os
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image as PILImage
from torch import Tensor

from selfadapt.files import make_folder, written_whole
from selfadapt.images import Image, colored, load_image, overlay
from selfadapt.labels import class_colors, class_names
from selfadapt.models.interface import Interface
from selfadapt.result import Result

OUTPUTS = ("label", "color", "overlay", "confidence")
"""What is written for NAME.jpg: NAME_label.png and so on."""
QUICK = {"overlay": 1, "confidence": 1}
"""Compression of what varies as a photograph does: 3 to 5 times as fast, up to a quarter larger."""
AHEAD = 2
"""How many images are read before the network gets to them."""
WAITING = 4
"""How many results are being written or wait for it; the network waits rather than add to them."""

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""What counts as an image in a folder; a file that is named may have any suffix."""


def find_images(inputs: Iterable[str | Path]) -> list[Path]:
    """Return the image files meant by files and folders, those of a folder sorted by name."""
    found: list[Path] = []
    for path in map(Path, inputs):
        if path.is_dir():
            files = (p for p in path.iterdir() if not p.name.startswith("."))
            inside = sorted(p for p in files if p.suffix.lower() in SUFFIXES)
            if not inside:
                raise FileNotFoundError(f"there are no images in the folder {path}")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise FileNotFoundError(f"there is no image file {path}")
    return list(dict.fromkeys(found))


def plan_outputs(images: Sequence[Path], folder: Path, *, overwrite: bool) -> list[Path]:
    """Return for each image the path its outputs start with, refusing to lose any file."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"the output must be a folder, but {folder} is a file")
    stems = Counter(image.stem for image in images)
    owners: dict[Path, Path] = {}
    for image in images:
        # a.jpg beside a.png: a_jpg and a_png
        name = image.stem if stems[image.stem] == 1 else image.name.replace(".", "_")
        if folder / name in owners:
            raise ValueError(
                f"{owners[folder / name]} and {image} would be written to the same files; "
                "segment them one after the other into two folders"
            )
        owners[folder / name] = image
    bases = list(owners)
    outputs = {path.resolve() for base in bases for path in output_paths(base).values()}
    for image in images:
        if image.resolve() in outputs:
            raise ValueError(f"the input {image} would be replaced by an output")
    present = [path for base in bases for path in output_paths(base).values() if path.exists()]
    if present and not overwrite:
        more = f" and {len(present) - 1} more" if len(present) > 1 else ""
        raise FileExistsError(
            f"{present[0]}{more} would be replaced; choose another folder or say --overwrite"
        )
    return bases


def output_paths(base: Path) -> dict[str, Path]:
    """Return the files written for one image, by what they show."""
    return {kind: base.with_name(f"{base.name}_{kind}.png") for kind in OUTPUTS}


@dataclass(frozen=True)
class Masks:
    """What is written of a result: two bytes for each pixel, on the CPU."""

    label: Tensor
    """Most likely class ``(H, W)``, uint8; uint16 for more than 256 classes."""
    confidence: Tensor
    """Its probability ``(H, W)``, from 0 to 255."""
    names: tuple[str, ...]
    """The classes."""


def predict(
    method: Callable[[Image], Result],
    images: Sequence[Path],
    bases: Sequence[Path],
    classes: Sequence[str] | None = None,
) -> Generator[tuple[Path, Result | Exception], None, None]:
    """Segment each image and write its files; yield the result, or why it could not be read.

    The next images are read and earlier results written while the network works, which it does in
    the caller's thread. An image is yielded once its files are there, in the order given, and
    without the maps of its result: those would pile up. Whoever stops before the end closes the
    generator, which ends its threads; what they have begun to write becomes whole.
    """
    pairs = list(zip(images, bases, strict=True))
    waiting: deque[tuple[Path, Result | Exception, Future[None] | None]] = deque()
    read = read_image if _takes_color(method) else Path  # which leaves the reading to the method
    num_writers = min(WAITING, os.cpu_count() or 1)
    with _threads(1) as reader, _threads(num_writers) as writers:
        for (image, base), ahead in zip(pairs, _ahead(reader, read, images), strict=True):
            done = _segment(method, ahead, classes)
            while len(waiting) >= WAITING:
                yield _written(*waiting.popleft())
            if isinstance(done, Exception):
                waiting.append((image, done, None))
            else:
                result, masks, picture = done
                writing = writers.submit(write_result, masks, picture, base)
                waiting.append((image, result, writing))
            while waiting and (waiting[0][2] is None or waiting[0][2].done()):
                yield _written(*waiting.popleft())
        while waiting:
            yield _written(*waiting.popleft())


def read_image(path: Path) -> Tensor:
    """Return an image file ``(3, H, W)``, as bytes where they hold all of it.

    They take a quarter of the memory, and of the time to a GPU, where they become the same numbers
    as those of the file.
    """
    image = load_image(path)
    levels = (image * 255).round().byte()
    return levels if torch.equal(levels / 255, image) else image


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


def _ahead(
    reader: ThreadPoolExecutor, read: Callable[[Path], Image], images: Iterable[Path]
) -> Iterator[Future[Image]]:
    """Yield each image as it is read, while those after it are read."""
    reading: deque[Future[Image]] = deque()
    for image in images:
        reading.append(reader.submit(read, image))
        if len(reading) > AHEAD:
            yield reading.popleft()
    while reading:
        yield reading.popleft()


def _segment(
    method: Callable[[Image], Result], ahead: Future[Image], classes: Sequence[str] | None
) -> tuple[Result, Masks, Image] | Exception:
    """Return the result without its maps, what is written of it, and the image; or what failed."""
    try:
        image = ahead.result()
        result = method(image)
    except (ValueError, FileNotFoundError) as error:
        return error
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, LookupError, AssertionError) as error:  # the network's
        return ValueError(f"the network failed: {type(error).__name__}: {error}")
    probs = result.probs.new_empty((len(result.probs), 0, 0))
    slim = replace(result, probs=probs, source_probs=None, fused_probs=None, pseudo_label=None)
    return slim, masks_of(result, classes), image


def _written(
    image: Path, result: Result | Exception, writing: Future[None] | None
) -> tuple[Path, Result | Exception]:
    """Wait until the files of an image are there, or raise what kept them from it."""
    if writing is not None:
        writing.result()
    return image, result


def masks_of(result: Result, classes: Sequence[str] | None = None) -> Masks:
    """Return what is written of a result; the work is done where the result is."""
    names = tuple(classes or class_names(len(result.probs)))
    if len(names) == 1:
        names = ("background", *names)  # one output channel is two classes
    if len(names) != len(result.probs):
        raise ValueError(
            f"the network predicts {len(result.probs)} classes, but {len(names)} are named"
        )
    label = result.label.to(torch.uint8 if len(names) <= 256 else torch.uint16)
    confidence = (result.confidence.clamp(0, 1) * 255).round().byte()
    return Masks(label.cpu(), confidence.cpu(), names)


def write_result(
    result: Result | Masks, image: Image, base: Path, classes: Sequence[str] | None = None
) -> None:
    """Write the label as ids and in colours, laid over the image, and its confidence."""
    masks = masks_of(result, classes) if isinstance(result, Result) else result
    painted = colored(masks.label, class_colors(masks.names))
    pictures = {
        "label": PILImage.fromarray(masks.label.numpy()),
        "color": painted,
        "overlay": overlay(load_image(image), painted),
        "confidence": PILImage.fromarray(masks.confidence.numpy()),
    }
    make_folder(base.parent)
    for kind, path in output_paths(base).items():
        level = {"compress_level": QUICK[kind]} if kind in QUICK else {}
        with written_whole(path) as aside:
            pictures[kind].save(aside, format="PNG", **level)
