import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PILImage
from PIL.PngImagePlugin import PngImageFile
from torch import Tensor

import selfadapt
from conftest import TinyNet, random_image, seeded
from selfadapt.data.reading import read_label
from selfadapt.images import Image, load_image, read_image, to_pil
from selfadapt.labels import class_colors, class_names
from selfadapt.predict import DEFAULT, Segmented, masks_of, predict, write_result
from selfadapt.predict import stream as module
from selfadapt.predict.stream import MAX_PENDING, READ_AHEAD
from selfadapt.result import ResizedMap, Result

KINDS = ("label", "color", "overlay", "confidence")


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "images"
    folder.mkdir()
    paths = [folder / f"{number:02}.png" for number in range(12)]
    for number, path in enumerate(paths):
        to_pil(random_image(24, 32 + number, seed=number)).save(path)
    return paths


@pytest.fixture
def bases(images: list[Path], tmp_path: Path) -> list[Path]:
    return [tmp_path / "masks" / image.stem for image in images]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture
def method() -> Callable[[Image], Result]:
    return selfadapt.create_method("san", seeded(TinyNet), compare=False)


class Watched:
    """Does what a method does, and something else first."""

    def __init__(self, method: Any, first: Callable[[int], None]) -> None:
        self.interface, self.method, self.first = method.interface, method, first
        self.images: list[Image] = []

    def __call__(self, image: Image) -> Result:
        self.first(len(self.images))
        self.images.append(image)
        return self.method(image)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def whole(folder: Path) -> bool:
    """Return True if all files of a folder are pictures, those of an image all or none there."""
    names = [path.name.rsplit("_", 1) for path in folder.iterdir()]
    for path in folder.iterdir():
        PILImage.open(path).load()
    expected = {(stem, f"{kind}.png") for stem, _ in names for kind in KINDS}
    return {(stem, kind) for stem, kind in names} == expected


def test_results_come_in_order_with_their_files_written(
    method: Any, images: list[Path], bases: list[Path], monkeypatch: Any
) -> None:
    def write(masks: Any, image: Any, base: Path, **_: Any) -> None:
        time.sleep(0.03 if base.name in ("00", "03", "06") else 0)  # others are done before
        write_result(masks, image, base)

    monkeypatch.setattr(module, "write_result", write)
    seen = []
    for (path, result), base in zip(predict(method, images, bases), bases, strict=True):
        assert isinstance(result, Segmented)
        assert all(base.with_name(f"{base.name}_{kind}.png").exists() for kind in KINDS)
        seen.append(path)
    assert seen == images


@pytest.mark.parametrize("name", ["san", "ensemble", "no interface", "one channel"])
def test_streaming_writes_the_bytes_that_writing_directly_does(
    name: str, images: list[Path], bases: list[Path], tmp_path: Path
) -> None:
    model = seeded(lambda: TinyNet(channels=1 if name == "one channel" else 3))
    method: Any = selfadapt.create_method(name if name in selfadapt.METHODS else "san", model)
    given = (lambda image: method(image)) if name == "no interface" else method
    levels = np.linspace(0, 65535, 24 * 40).reshape(24, 40).astype(np.uint16)
    PILImage.fromarray(levels).save(images[3])
    PILImage.open(images[4]).convert("RGBA").save(images[4])
    PILImage.open(images[5]).convert("P").save(images[5])
    list(predict(given, images, bases, ["road", "car", "sky"]))
    for image, base in zip(images, bases, strict=True):
        write_result(method(image), image, tmp_path / "direct" / base.name, ["road", "car", "sky"])
    assert contents(bases[0].parent) == contents(tmp_path / "direct")


def test_a_file_is_decoded_once_for_a_colour_network(
    method: Any, images: list[Path], bases: list[Path], monkeypatch: Any
) -> None:
    decoded = []
    real = PngImageFile.load_prepare
    monkeypatch.setattr(
        PngImageFile, "load_prepare", lambda file: decoded.append(file.filename) or real(file)
    )
    list(predict(method, images, bases))
    assert decoded == list(map(str, images))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_method_reads_for_itself_what_is_not_in_colour(
    channels: int, images: list[Path], bases: list[Path]
) -> None:
    model = seeded(lambda: TinyNet(channels=channels))
    method = Watched(selfadapt.create_method("san", model), lambda number: None)
    list(predict(method, images, bases))
    if channels == 1:
        assert method.images == images
    else:
        assert all(isinstance(image, Tensor) for image in method.images)


def test_an_image_that_is_gone_before_its_overlay_is_written_fails_alone(
    images: list[Path], bases: list[Path], monkeypatch: Any
) -> None:
    def vanish_then_write(masks: Any, image: Any, **how: Any) -> None:
        if image == images[2]:
            image.unlink()
        write_result(masks, image, **how)

    monkeypatch.setattr(module, "write_result", vanish_then_write)
    method = selfadapt.create_method("san", seeded(lambda: TinyNet(channels=1)), compare=False)
    outcomes = dict(predict(method, images, bases))
    assert [path for path, outcome in outcomes.items() if isinstance(outcome, Exception)] == [
        images[2]
    ]
    assert str(outcomes[images[2]]) == f"there is no image file {images[2]}"


def test_bytes_hold_an_8_bit_image_and_no_other(images: list[Path], tmp_path: Path) -> None:
    levels = read_image(images[0])
    assert levels.dtype == torch.uint8
    assert torch.equal(load_image(levels), load_image(images[0]))
    deep = np.arange(24 * 40, dtype=np.uint16).reshape(24, 40) * 60
    PILImage.fromarray(deep).save(tmp_path / "deep.png")
    assert torch.equal(read_image(tmp_path / "deep.png"), load_image(tmp_path / "deep.png"))
    assert read_image(tmp_path / "deep.png").dtype == torch.float32


def test_an_unreadable_image_is_an_error_in_its_place(
    method: Any, images: list[Path], bases: list[Path]
) -> None:
    images[0].write_text("no image")
    images[5].unlink()
    images[-1].write_bytes(images[-1].read_bytes()[:100])
    results = list(predict(method, images, bases))
    assert [path for path, _ in results] == images
    failed = {path: str(error) for path, error in results if isinstance(error, Exception)}
    assert list(failed) == [images[0], images[5], images[-1]]
    assert "00.png is not an image file" in failed[images[0]]
    assert "there is no image file" in failed[images[5]]
    assert "cut off or damaged" in failed[images[-1]]
    assert len(contents(bases[0].parent)) == 4 * 9


def test_a_network_that_fails_is_an_error_in_its_place(
    method: Any, images: list[Path], bases: list[Path]
) -> None:
    good = None
    errors = iter([good, RuntimeError("sizes must match"), ZeroDivisionError("by zero"), good])

    def fail(_: int) -> None:
        if (error := next(errors)) is not None:
            raise error

    results = list(predict(Watched(method, fail), images[:4], bases[:4]))
    kinds = [Segmented, ValueError, ValueError, Segmented]
    assert [type(result) for _, result in results] == kinds
    assert str(results[1][1]) == "the network failed: RuntimeError: sizes must match"
    assert str(results[2][1]) == "the network failed: ZeroDivisionError: by zero"


def test_running_out_of_memory_is_raised(
    method: Any, images: list[Path], bases: list[Path]
) -> None:
    def fail(number: int) -> None:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        list(predict(Watched(method, fail), images, bases))


@pytest.mark.parametrize("readers", [1, 3])
def test_reading_and_writing_are_bounded(
    readers: int, method: Any, images: list[Path], bases: list[Path], monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "num_readers", lambda: readers)
    num_read, num_written, num_called = 0, 0, 0
    prefetch, unwritten = [], []

    def read(path: Path) -> Tensor:
        nonlocal num_read
        num_read += 1
        prefetch.append(num_read - num_called)
        return read_image(path)

    def write(masks: Any, image: Image, base: Path, **_: Any) -> None:
        nonlocal num_written
        time.sleep(0.1)  # longer than the network takes
        write_result(masks, image, base)
        num_written += 1

    def count(number: int) -> None:
        nonlocal num_called
        time.sleep(0.01)  # time enough to read more than is allowed
        num_called = number + 1
        unwritten.append(number - num_written)

    monkeypatch.setattr(module, "read_image", read)
    monkeypatch.setattr(module, "write_result", write)
    list(predict(Watched(method, count), images, bases))
    assert (
        max(prefetch) <= READ_AHEAD + readers + 1
    )  # that which the network gets next is one of them
    assert 1 < max(unwritten) <= MAX_PENDING


def test_what_waits_holds_no_probabilities(
    method: Any, images: list[Path], bases: list[Path]
) -> None:
    _, done = next(iter(list(predict(method, images, bases))))
    assert isinstance(done, Segmented)
    assert done.result.probs.shape == (3, 0, 0)
    assert done.result.seconds > 0
    assert (done.width, done.height) == (32, 24)
    assert sum(done.shares) == pytest.approx(1, abs=1e-5)
    masks = masks_of(method(images[0]))
    assert masks.label.dtype == masks.confidence.dtype == torch.uint8


def test_the_next_images_are_read_while_the_network_works(
    method: Any, images: list[Path], bases: list[Path], monkeypatch: Any
) -> None:
    events = {path: threading.Event() for path in images}

    def read(path: Path) -> Tensor:
        events[path].set()
        return read_image(path)

    def wait(number: int) -> None:
        for path in images[number : number + READ_AHEAD + 1]:
            assert events[path].wait(timeout=10)

    monkeypatch.setattr(module, "read_image", read)
    assert len(list(predict(Watched(method, wait), images, bases))) == len(images)


def test_a_result_is_written_while_the_network_works(
    method: Any, images: list[Path], bases: list[Path]
) -> None:
    def wait(number: int) -> None:
        last = bases[number - 1].with_name(f"{bases[number - 1].name}_confidence.png")
        deadline = time.monotonic() + 10
        while number and not last.exists():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    assert len(list(predict(Watched(method, wait), images, bases))) == len(images)


def test_an_error_of_writing_is_raised_and_leaves_whole_files(
    method: Any, images: list[Path], bases: list[Path], monkeypatch: Any
) -> None:
    real = PILImage.Image.save

    def save(picture: PILImage.Image, path: Path, **kwargs: Any) -> None:
        real(picture, path, **kwargs)
        if "02_overlay" in path.name:
            path.write_bytes(path.read_bytes()[:50])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(PILImage.Image, "save", save)
    results = predict(method, images, bases)
    written: list[Path] = []
    with pytest.raises(OSError, match=r"02_overlay.png could not be written \(No space left"):
        written.extend(path for path, _ in results)
    assert written[:2] == images[:2]
    assert images[2] not in written, "it is said to be there"
    folder = bases[0].parent
    assert not list(folder.glob(".*"))
    assert {path.name for path in folder.glob("02_*")} == {"02_label.png", "02_color.png"}
    assert all(len(list(folder.glob(f"{path.stem}_*"))) == len(DEFAULT) for path in written)


def test_a_wrong_number_of_names_is_raised(
    method: Any, images: list[Path], bases: list[Path]
) -> None:
    with pytest.raises(ValueError, match="predicts 3 classes, but 2 are named"):
        list(predict(method, images, bases, ["road", "car"]))


@pytest.mark.parametrize("number", [1, 5])
def test_closing_early_leaves_whole_files_and_no_thread(
    number: int, method: Any, images: list[Path], bases: list[Path]
) -> None:
    before = set(threading.enumerate())
    results = predict(method, images, bases)
    for _ in range(number):
        next(results)
    results.close()
    assert set(threading.enumerate()) <= before
    assert whole(bases[0].parent)
    assert 4 * number <= len(contents(bases[0].parent)) <= 4 * (number + MAX_PENDING)


def test_ctrl_c_in_the_method_leaves_whole_files_and_no_thread(
    method: Any, images: list[Path], bases: list[Path]
) -> None:
    def stop(number: int) -> None:
        if number == 4:
            raise KeyboardInterrupt

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        list(predict(Watched(method, stop), images, bases))
    assert set(threading.enumerate()) <= before
    assert whole(bases[0].parent)


def test_a_generator_that_is_left_open_does_not_keep_python_from_ending(
    images: list[Path], bases: list[Path]
) -> None:
    text = f"""
from pathlib import Path
from torch import nn
import selfadapt
from selfadapt.predict import predict
method = selfadapt.create_method("san", nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
images = sorted(Path({str(images[0].parent)!r}).iterdir())
results = predict(method, images, [Path({str(bases[0].parent)!r}) / i.stem for i in images])
next(results)
"""
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)
    assert whole(bases[0].parent)


def test_more_than_256_classes_are_written_in_16_bits(tmp_path: Path) -> None:
    probs = torch.rand(300, 8, 8).softmax(dim=0)
    write_result(Result(probs=probs), random_image(8, 8), tmp_path / "a")
    label = np.asarray(PILImage.open(tmp_path / "a_label.png"))
    assert np.array_equal(label, probs.argmax(dim=0).numpy())


@pytest.mark.parametrize("num_classes", [2, 16, 17, 255, 256])
def test_a_label_has_a_palette_and_every_reader_of_ours_gets_the_classes(
    num_classes: int, tmp_path: Path
) -> None:
    label = torch.arange(num_classes).repeat(num_classes, 1)
    probs = torch.nn.functional.one_hot(label, num_classes).permute(2, 0, 1).float()
    write_result(Result(probs=probs), None, tmp_path / "a", outputs=("label",))
    path = tmp_path / "a_label.png"
    picture = PILImage.open(path)
    assert picture.mode == "P"
    assert np.array_equal(np.asarray(picture), label.numpy())
    assert np.array_equal(read_label(path), label.numpy())
    painted = np.asarray(picture.convert("RGB"))[0]
    assert painted.tolist() == [list(c) for c in class_colors(class_names(num_classes))]


def test_probabilities_larger_than_what_is_made_at_once_are_the_same(
    tmp_path: Path, monkeypatch: Any
) -> None:
    scores = torch.randn(7, 6, 9, generator=torch.Generator().manual_seed(0))
    for kind, values in (("scores", scores * 5), ("probs", scores.softmax(dim=0))):
        whole = ResizedMap(values, (40, 50), scores=kind == "scores").probs
        with monkeypatch.context() as patch:
            patch.setattr("selfadapt.result.MAX_BYTES", 2 * 40 * 50 * 4)
            parts = ResizedMap(values, (40, 50), scores=kind == "scores")
            assert [len(part) for part in parts.parts()] == [2, 2, 2, 1]
            for name, probs in (("map", parts), ("tensor", whole)):
                write_result(
                    Result(probs=probs), None, tmp_path / f"{kind} {name}", outputs=("probs",)
                )
            assert "probs" not in parts.__dict__, "all of it was made"
        for name in ("map", "tensor"):
            with np.load(tmp_path / f"{kind} {name}_probs.npz") as file:
                assert np.abs(file["probs"] - whole.numpy()).max() < 1e-3
                assert file["classes"].tolist() == list(class_names(7))


def test_probabilities_of_two_images_at_most_are_held(
    method: Any, images: list[Path], bases: list[Path], monkeypatch: Any
) -> None:
    num_written, unwritten = 0, []

    def write(masks: Any, image: Image, base: Path, **how: Any) -> None:
        nonlocal num_written
        time.sleep(0.05)  # longer than the network takes
        assert masks.probs is not None
        write_result(masks, image, base, **how)
        num_written += 1

    def count(number: int) -> None:
        unwritten.append(number - num_written)

    monkeypatch.setattr(module, "write_result", write)
    list(predict(Watched(method, count), images, bases, outputs=("probs",)))
    assert max(unwritten) <= 2
    assert len(list(bases[0].parent.glob("*_probs.npz"))) == len(images)


@pytest.mark.parametrize("channels", [2, 6])
def test_what_no_picture_holds_is_shown_by_its_first_channels(
    channels: int, tmp_path: Path
) -> None:
    image = random_image(24, 32, channels)
    result = selfadapt.create_method("san", seeded(lambda: TinyNet(channels=channels)))(image)
    write_result(result, image, tmp_path / "x")
    shown = image[:3] if channels > 3 else image[:1].expand(3, -1, -1)
    painted = np.asarray(PILImage.open(tmp_path / "x_color.png")).astype(int)
    overlay = np.asarray(PILImage.open(tmp_path / "x_overlay.png")).astype(int)
    expected = (painted + 255 * shown.permute(1, 2, 0).numpy()) / 2
    assert np.abs(overlay - expected).max() <= 2
