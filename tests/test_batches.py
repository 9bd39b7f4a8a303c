"""Many images give what each of them gives by itself, in order, whatever happens to one of them."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PILImage
from torch import Tensor, nn

import selfadapt
from conftest import TinyNet, assert_same, random_image, seeded, snapshot
from networks import NETWORKS
from selfadapt import METHODS, create_method
from selfadapt.baselines import SaNOnly
from selfadapt.computed import Computed
from selfadapt.images import to_pil
from selfadapt.predict import predict, stream, write_result

BATCHED = ("source", "p-bn", "san", "tta")
MAKES = (
    "toy", "toy binary", "toy dict", "toy four channels", "own U-Net", "frozen BatchNorm",
    "toy with BIN", "toy with SN", "hf SegFormer", "hf UPerNet Swin", "timm mobilenetv3",
)  # fmt: skip


def of_sizes(*sizes: tuple[int, int], channels: int = 3) -> list[Tensor]:
    """Return images of different brightness, so that mixed statistics would show."""
    images = [random_image(*size, channels, seed) for seed, size in enumerate(sizes)]
    return [image * (1 - index % 3 / 3) for index, image in enumerate(images)]


def count_batches(method: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that is filled with the number of images that are computed together."""
    sizes: list[int] = []
    compute_batch = method.compute_batch

    def count(network: Any, images: Tensor) -> Any:
        sizes.append(len(images))
        return compute_batch(network, images)

    monkeypatch.setattr(method, "compute_batch", count)
    return sizes


def assert_equal(found: selfadapt.Result, expected: selfadapt.Result, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found.probs, expected.probs, rtol=0, atol=atol)
    torch.testing.assert_close(found.source_probs, expected.source_probs, rtol=0, atol=atol)
    assert torch.equal(found.label, expected.label)


@pytest.mark.parametrize("network", MAKES)
@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_gives_what_its_images_give_by_themselves(
    name: str, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = NETWORKS[network]
    model = seeded(case.build)
    settings = {"alpha": 0.6} if name in ("san", "tta") else {}
    method: Any = create_method(name, model, **settings)
    images = of_sizes(*[(64, 71)] * 3, channels=case.channels)
    expected = [method(image) for image in images]
    before, batches = snapshot(model), count_batches(method, monkeypatch)
    for found, single in zip(method.map(images, batch_size=3), expected, strict=True):
        assert_equal(found, single, 1e-4 if name == "p-bn" else 1e-5)  # of few pixels
        assert found.notes == single.notes
    assert batches == [3]
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("mode", ["paper", "official"])
def test_batches_in_each_mode(mode: Any, fast: bool, tiny: nn.Module) -> None:
    images = of_sizes(*[(24, 31)] * 2)
    for name in BATCHED:
        method = create_method(name, tiny, mode=mode, fast=fast)
        for found, image in zip(method.map(images, 2), images, strict=True):
            assert_equal(found, method(image))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_maps_in_order(name: str, tiny: nn.Module) -> None:
    settings = {"steps": 1} if name in ("tent", "entropy", "memo", "self-adapt") else {}
    method = create_method(name, tiny, compare=False, **settings)
    images = of_sizes((16, 20), (16, 20), (18, 20), (16, 20))
    results = list(method.map(images, batch_size=2))
    for image, result in zip(images, results, strict=True):
        torch.testing.assert_close(result.probs, method(image).probs, rtol=0, atol=1e-5)
        assert result.image is image
    assert (name in BATCHED) == method.takes_batches


def test_neighbours_of_one_size_are_computed_together(
    tiny: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = create_method("san", tiny)
    batches = count_batches(method, monkeypatch)
    narrow, wide = (20, 24), (20, 40)
    list(method.map(of_sizes(*[narrow] * 5, wide, wide, narrow, *[wide] * 3), batch_size=3))
    assert batches == [3, 2, 2, 3]  # and one alone


def test_large_images_are_scaled_down_in_a_batch_too(tiny: nn.Module) -> None:
    method = create_method("san", tiny, max_pixels=300)
    images = of_sizes(*[(30, 40)] * 2)
    for found, image in zip(method.map(images, 2), images, strict=True):
        assert_equal(found, method(image))
        assert found.notes[-1] == "segmented at 20x15, the image is 40x30"


def test_images_in_any_form_are_read(tiny: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    to_pil(random_image()).save(path)
    picture = PILImage.open(path).convert("P")
    images: list[Any] = [path, str(path), picture, np.asarray(PILImage.open(path)), random_image()]
    method = create_method("san", tiny)
    for image, result in zip(images, method.map(iter(images), 4), strict=True):
        assert_equal(result, method(image))
        assert result.image is image
    (result,) = method.map([random_image() - 0.4], normalized=True)
    assert_equal(result, method(random_image() - 0.4, normalized=True))


# failures


@pytest.fixture
def some_bad(tmp_path: Path) -> list[Any]:
    to_pil(random_image()).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_text("no image")
    nan = torch.full((3, 32, 48), torch.nan)
    return [random_image(), tmp_path / "bad.png", random_image(seed=1), nan, tmp_path / "good.png"]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_an_error_is_raised_in_its_turn_and_says_which_image_it_was(
    batch_size: int, tiny: nn.Module, some_bad: list[Any]
) -> None:
    results = create_method("san", tiny).map(some_bad, batch_size)
    assert next(results).label.shape == (32, 48)
    with pytest.raises(ValueError, match="is not an image file") as caught:
        next(results)
    assert caught.value.__notes__ == ["it was image 1, counted from 0"]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_an_error_stands_in_the_place_of_its_result(
    batch_size: int, tiny: nn.Module, some_bad: list[Any]
) -> None:
    method = create_method("san", tiny)
    outcomes = list(method.map(some_bad, batch_size, return_exceptions=True))
    assert [isinstance(outcome, ValueError) for outcome in outcomes] == [0, 1, 0, 1, 0]
    assert "finite" in str(outcomes[3])
    for index in (0, 2, 4):
        assert_equal(outcomes[index], method(some_bad[index]))


class Fragile(TinyNet):
    """Has no finite scores for dark images."""

    def forward(self, x: Tensor) -> Any:
        dark = x.amax(dim=(1, 2, 3), keepdim=True) < 0
        return super().forward(x) * torch.where(dark, torch.nan, 1.0)


def test_what_is_not_finite_spoils_no_other_image() -> None:
    method = create_method("san", seeded(Fragile))
    images = [random_image(), random_image() * 0.01, random_image(seed=1)]
    outcomes = list(method.map(images, 3, return_exceptions=True))
    assert str(outcomes[1]) == "the network's own prediction for this image is not finite"
    for index in (0, 2):
        assert_equal(outcomes[index], method(images[index]))


class Single(TinyNet):
    def forward(self, x: Tensor) -> Any:
        assert len(x) == 1, "one image, please"
        return super().forward(x)


class Windows(TinyNet):
    """Puts the halves of an image into the batch."""

    def forward(self, x: Tensor) -> Any:
        halves = super().forward(torch.cat(x.chunk(2, dim=-1)))
        return torch.cat(halves.split(len(x)), dim=-1)


class Batchwise(TinyNet):
    """Looks at all images of a batch."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x - x.mean())


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Single, "the network takes one only (AssertionError: one image, please"),
        (Windows, "the network takes one only (RuntimeError: several images cannot be told apart"),
        (Batchwise, "the network mixes the images of a batch"),
    ],
)
def test_a_network_that_takes_no_batches_gets_one_image_at_a_time(
    build: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method: Any = create_method("san", seeded(build))
    batches = count_batches(method, monkeypatch)
    images = of_sizes(*[(32, 48)] * 3)
    expected = [method(image) for image in images]
    for found, single in zip(method.map(images, 2), expected, strict=True):
        assert_equal(found, single)
        assert found.notes[0].startswith(f"images are computed one by one: {reason}")
    assert batches == []


def test_a_batch_that_fits_into_no_memory_is_halved(
    tiny: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    method: Any = create_method("san", tiny)
    batches = count_batches(method, monkeypatch)
    real = method.compute_batch

    def fail(network: Any, images: Tensor) -> Any:
        computed = real(network, images)
        if len(images) > 2:
            raise torch.OutOfMemoryError
        return computed

    monkeypatch.setattr(method, "compute_batch", fail)
    images = of_sizes(*[(20, 24)] * 10)
    results = list(method.map(images, 9))
    assert batches == [9, 4, 2, 2, 2, 2]
    assert len(results) == 10
    assert results[-1].notes == (
        "images are computed at most 4 at a time: there is not enough memory for 9",
        "images are computed at most 2 at a time: there is not enough memory for 4",
    )


def test_a_batch_on_a_cpu_must_fit_into_its_memory(
    tiny: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    method: Any = create_method("san", tiny)
    batches = count_batches(method, monkeypatch)
    monkeypatch.setattr("selfadapt.cost.LARGE_PIXELS", 1)
    needed = method.estimate(20, 24).num_bytes
    monkeypatch.setattr("selfadapt.cost.free_memory", lambda: int(2.5 * needed))
    assert len(list(method.map(of_sizes(*[(20, 24)] * 4), 4))) == 4
    assert batches == [2, 2]


def test_a_method_that_changes_compute_alone_gets_one_image_at_a_time(tiny: nn.Module) -> None:
    class Sharper(SaNOnly):
        def compute(self, network: Any, image: Tensor) -> Computed:
            return Computed(logits=2 * network.logits(image))

    method = Sharper(tiny)
    assert not method.takes_batches
    images = of_sizes(*[(20, 24)] * 2)
    for found, image in zip(method.map(images, 2), images, strict=True):
        assert torch.equal(found.probs, method(image).probs)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_a_batch_size_that_is_none_is_refused_at_once(size: Any, tiny: nn.Module) -> None:
    with pytest.raises(ValueError, match="batch_size must be a whole number, 1 or more"):
        create_method("san", tiny).map([], size)


def test_no_more_images_are_read_than_a_batch_ahead(tiny: nn.Module) -> None:
    taken: list[int] = []

    def images() -> Iterator[Tensor]:
        for number in range(60):
            taken.append(number)
            yield random_image(16, 16)

    before = set(threading.enumerate())
    results = create_method("san", tiny).map(images(), batch_size=4)
    next(results)
    assert len(taken) <= 4 + 8 + 1
    results.close()
    assert set(threading.enumerate()) <= before


# predict


def test_predict_writes_the_same_with_batches(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does on a GPU."""
    method: Any = create_method("san", tiny)
    images = [tmp_path / f"{number:02}.png" for number in range(9)]
    for number, path in enumerate(images):
        to_pil(random_image(24, 32 if number < 6 else 40, seed=number)).save(path)
    images[3].write_text("no image")
    monkeypatch.setattr(stream, "_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(stream, "pinned", lambda image, _: image)
    monkeypatch.setattr(stream, "BATCH_PIXELS", 24 * 32 * 2)
    batches = count_batches(method, monkeypatch)
    bases = [tmp_path / "out" / path.stem for path in images]
    outcomes = dict(predict(method, images, bases))
    assert list(outcomes) == images
    assert [p for p, outcome in outcomes.items() if isinstance(outcome, Exception)] == [images[3]]
    assert batches == [2, 2]  # of the wider ones, no two fit
    for path, base in zip(images, bases, strict=True):
        if path != images[3]:
            write_result(method(path), path, tmp_path / "direct" / base.name)
    assert len(list((tmp_path / "out").iterdir())) == 4 * 8
    for path in (tmp_path / "direct").iterdir():
        written, direct = (
            np.asarray(PILImage.open(p)) for p in (tmp_path / "out" / path.name, path)
        )
        rounding = 1 if "confidence" in path.name else 0
        assert np.abs(written.astype(int) - direct).max() <= rounding
