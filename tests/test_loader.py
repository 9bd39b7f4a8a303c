"""Batches follow from seed, epoch and image alone, however they are read."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from runs import CLASSES, write_domain
from selfadapt import Interface
from selfadapt.data import Dataset, open_dataset
from selfadapt.train import AugmentConfig
from selfadapt.train.augment import ColorChange, change_colors
from selfadapt.train.loader import Batch, BatchOrder, read_batches

SMALL = AugmentConfig(crop=(24, 32))
NUM = 13


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    root = write_domain(tmp_path_factory.mktemp("source"), NUM, seed=1)
    return open_dataset("folder", root, split="all", classes=CLASSES, space=CLASSES)


def batches(source: Dataset, start: int, stop: int, workers: int = 0, **order: Any) -> list[Batch]:
    order = {"num_images": NUM, "batch": 4, "seed": 0, **order}
    return list(read_batches(source, SMALL, BatchOrder(**order), start, stop, workers=workers))


def assert_same_batches(one: list[Batch], other: list[Batch]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.images.equal(b.images)
        assert a.labels.equal(b.labels)
        assert a.colors == b.colors


def test_every_epoch_takes_every_image_once() -> None:
    order = BatchOrder(12, 4, seed=0)
    assert order.steps_per_epoch == 3
    seen = []
    for epoch in range(4):
        images = list(chain(*order.steps(3 * epoch, 3 * epoch + 3)))
        assert {number for number, _ in images} == {epoch}
        assert sorted(image for _, image in images) == list(range(12))
        seen.append([image for _, image in images])
    assert len({tuple(images) for images in seen}) == 4
    assert seen[0] != list(range(12))


def test_images_that_fill_no_batch_wait_for_another_epoch() -> None:
    order = BatchOrder(NUM, 4, seed=0)
    assert order.steps_per_epoch == 3
    left = []
    for epoch in range(20):
        images = [image for _, image in chain(*order.steps(3 * epoch, 3 * epoch + 3))]
        assert len(set(images)) == 12
        left.append(*set(range(NUM)) - set(images))
    assert len(set(left)) > 5


@pytest.mark.parametrize("world", [2, 4])
def test_processes_partition_every_batch(world: int) -> None:
    whole = list(BatchOrder(NUM, 4, seed=3).steps(0, 9))
    shares = [list(BatchOrder(NUM, 4, 3, rank, world).steps(0, 9)) for rank in range(world)]
    for step, images in enumerate(whole):
        assert list(chain(*(share[step] for share in shares))) == images
        assert {len(share[step]) for share in shares} == {4 // world}


def test_an_order_begins_anywhere() -> None:
    order = BatchOrder(NUM, 4, seed=0)
    assert list(order.steps(5, 11)) == list(order.steps(0, 12))[5:11]


def test_seeds_give_different_orders() -> None:
    orders = [tuple(chain(*BatchOrder(NUM, 4, seed).steps(0, 3))) for seed in range(5)]
    assert len(set(orders)) == 5


def test_a_batch_that_the_images_do_not_fill_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch has 14 images, but there are only 13"):
        BatchOrder(NUM, 14, seed=0)


def test_a_batch_that_processes_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch must be a multiple of the 3 processes.*got 4"):
        BatchOrder(NUM, 4, seed=0, rank=0, world=3)


def test_the_same_batches_come_twice_whatever_happened_to_global_seeds(source: Dataset) -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    one = batches(source, 0, 6)
    torch.manual_seed(2)
    np.random.seed(2)
    assert_same_batches(one, batches(source, 0, 6))


def test_worker_processes_change_nothing(source: Dataset) -> None:
    assert_same_batches(batches(source, 1, 8, workers=2), batches(source, 1, 8))


def test_reading_goes_on_from_the_middle_with_the_same_batches(source: Dataset) -> None:
    assert_same_batches(batches(source, 0, 8)[5:], batches(source, 5, 8))


def test_two_processes_read_what_one_reads(source: Dataset) -> None:
    whole = batches(source, 0, 4)
    first, second = (batches(source, 0, 4, rank=rank, world=2) for rank in range(2))
    joined = [
        Batch(torch.cat((a.images, b.images)), torch.cat((a.labels, b.labels)), a.colors + b.colors)
        for a, b in zip(first, second, strict=True)
    ]
    assert_same_batches(whole, joined)


def test_an_image_changes_anew_in_every_epoch_and_with_every_seed(source: Dataset) -> None:
    """The first image of the domain, wherever it comes in the order of an epoch."""
    found = []
    for seed in (0, 1):
        order = BatchOrder(NUM, 1, seed)
        for epoch in (0, 1):
            steps = list(order.steps(NUM * epoch, NUM * epoch + NUM))
            step = NUM * epoch + steps.index([(epoch, 0)])
            found.append(batches(source, step, step + 1, batch=1, seed=seed)[0])
    assert len({batch.images.numpy().tobytes() for batch in found}) == 4
    assert len({batch.colors[0].blur for batch in found}) == 4


def test_images_of_one_batch_change_each_in_its_own_way(source: Dataset) -> None:
    batch = batches(source, 0, 1)[0]
    assert len({color.blur for color in batch.colors}) == 4


def test_how_an_image_changes_does_not_depend_on_the_batch_it_is_in(source: Dataset) -> None:
    fours = batches(source, 0, 3, batch=4)
    ones = batches(source, 0, 12, batch=1)
    assert torch.cat([batch.images for batch in fours]).equal(
        torch.cat([batch.images for batch in ones])
    )


def test_crops_hold_the_colours_of_their_labels(source: Dataset) -> None:
    """In these domains red is a car, and nothing else is."""
    plain = AugmentConfig(crop=(24, 32), blur=None, jitter=0, gray=0)
    for batch in read_batches(source, plain, BatchOrder(NUM, 4, 0), 0, 6):
        red = batch.images[:, 0].int() - batch.images[:, 2].int() > 110
        counted = batch.labels != 255
        cars = batch.labels == 1
        assert (red == cars)[counted].float().mean() > 0.95
        assert cars.float().mean() > 0.02


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fault", ["torn", "no picture", "unknown id", "other size", "gone"])
def test_a_broken_file_is_named_in_one_line(tmp_path: Path, workers: int, fault: str) -> None:
    root = write_domain(tmp_path, 4, seed=1)
    source = open_dataset("folder", root, split="all", classes=CLASSES, space=CLASSES)
    image, label = root / "images/02.png", root / "labels/02.png"
    if fault == "torn":
        image.write_bytes(image.read_bytes()[:200])
    elif fault == "no picture":
        image.write_text("no picture")
    elif fault == "unknown id":
        Image.fromarray(np.full((64, 96), 7, np.uint8)).save(label)
    elif fault == "other size":
        Image.fromarray(np.zeros((96, 64), np.uint8)).save(label)
    else:
        image.unlink()
    with pytest.raises((ValueError, OSError), match=r"02\.png") as caught:
        batches(source, 0, 2, workers, num_images=4, batch=2)
    assert "Traceback" not in str(caught.value)
    assert "\n" not in str(caught.value)
    if fault == "unknown id":
        assert "label" in str(caught.value)
        assert "holds id 7" in str(caught.value)


def test_the_network_gets_recoloured_and_normalised_images(source: Dataset) -> None:
    interface = Interface(mean=(0.2, 0.3, 0.4), std=(0.5, 0.25, 0.1), bgr=True)
    batch = batches(source, 0, 1)[0]
    x, label = batch.to_device(torch.device("cpu"), interface)
    images = change_colors(batch.images, batch.colors)
    red, green, blue = images.unbind(1)
    expected = torch.stack(((blue - 0.4) / 0.1, (green - 0.3) / 0.25, (red - 0.2) / 0.5), 1)
    assert torch.allclose(x, expected, atol=1e-6)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert label.dtype == torch.int64
    assert label.equal(batch.labels.long())
    assert 255 in label


def test_colours_are_changed_after_the_crop(source: Dataset) -> None:
    batch = batches(source, 0, 1)[0]
    assert all(isinstance(color, ColorChange) for color in batch.colors)
    assert batch.images.dtype == torch.uint8
    assert batch.images.shape == (4, 3, 24, 32)
    assert batch.labels.shape == (4, 24, 32)
