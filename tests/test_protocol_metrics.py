"""Scores of a domain against slow ones, in whole fractions and plain loops."""

from collections.abc import Callable
from fractions import Fraction
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from torch import Tensor

from evaluations import Sample, slow_class_ece, slow_miou, slow_pooled_ece
from selfadapt.labels import ClassSpace, class_space
from selfadapt.metrics import (
    Counts,
    class_ece,
    count,
    ece,
    iou,
    pixel_accuracy,
    reliability,
    to_class_space,
)  # fmt: skip

IGNORE = 255
Images = list[tuple[Tensor, Tensor]]


# slow scores, pixel by pixel


def pixels_of(label: Tensor, probs: Tensor) -> list[tuple[int, int, Fraction]]:
    """Return true class, predicted class and confidence of each pixel that counts."""
    found = []
    for y in range(label.shape[0]):
        for x in range(label.shape[1]):
            if int(label[y, x]) == IGNORE:
                continue
            values = [Fraction(float(value)) for value in probs[:, y, x]]
            best = values.index(max(values))
            found.append((int(label[y, x]), best, values[best]))
    return found


def exact_ious(images: Images) -> list[Fraction | None]:
    pixels = [pixel for image in images for pixel in pixels_of(*image)]
    ious: list[Fraction | None] = []
    for c in range(len(images[0][1])):
        both = sum(true == found == c for true, found, _ in pixels)
        either = sum(c in (true, found) for true, found, _ in pixels)
        occurs = any(true == c for true, _, _ in pixels)
        ious.append(Fraction(both, either) if occurs else None)
    return ious


def exact_ece(pixels: list[tuple[int, int, Fraction]], num_bins: int) -> Fraction:
    bins: list[list[tuple[int, int, Fraction]]] = [[] for _ in range(num_bins)]
    for pixel in pixels:
        bins[min(int(pixel[2] * num_bins), num_bins - 1)].append(pixel)
    total = Fraction(0)
    for inside in filter(None, bins):
        accuracy = Fraction(sum(true == found for true, found, _ in inside), len(inside))
        confidence = sum(trust for _, _, trust in inside) / len(inside)
        total += Fraction(len(inside), len(pixels)) * abs(accuracy - confidence)
    return total


def exact_class_ece(images: Images) -> Fraction:
    errors = []
    for c in range(len(images[0][1])):
        parts = [[p for p in pixels_of(*image) if p[0] == c] for image in images]
        size = sum(map(len, parts))
        if size:
            errors.append(sum(len(part) * exact_ece(part, 10) for part in parts if part) / size)
    return Fraction(sum(errors), len(errors))


# domains


def random_images(num: int, classes: int, sizes: list[tuple[int, int]], seed: int = 0) -> Images:
    """Return random images; the last class is in no label, and every second image lacks more."""
    generator = torch.Generator().manual_seed(seed)
    images = []
    for number in range(num):
        height, width = sizes[number % len(sizes)]
        known = max(1, classes - 1 - number % 2)
        label = torch.randint(0, known, (height, width), generator=generator)
        label[torch.rand((height, width), generator=generator) < 0.2] = IGNORE
        logits = torch.randn((classes, height, width), generator=generator) * 2
        images.append((label, logits.softmax(dim=0)))
    return images


def sure(
    label: Tensor, predicted: Tensor, classes: int, confidence: float
) -> tuple[Tensor, Tensor]:
    """Return an image whose predictions all have one confidence; the rest is shared evenly."""
    rest = (1 - confidence) / max(1, classes - 1)
    probs = torch.full((classes, *label.shape), rest)
    probs.scatter_(0, predicted[None], confidence)
    return label, probs


def with_ignored_image() -> Images:
    images = random_images(3, 4, [(5, 6)])
    images[1][0].fill_(IGNORE)
    return images


def on_edges(*edges: float) -> Callable[[], Images]:
    """Return images with confidences exactly on the edges of bins, as 32-bit numbers have them."""

    def make() -> Images:
        generator = torch.Generator().manual_seed(1)
        images = []
        for edge in edges:
            label = torch.randint(0, 12, (3, 4), generator=generator)
            predicted = torch.randint(0, 12, (3, 4), generator=generator)
            predicted[0] = label[0]
            images.append(sure(label, predicted, 12, edge))
        return images

    return make


DOMAINS: dict[str, Callable[[], Images]] = {
    "random": lambda: random_images(4, 5, [(7, 9), (4, 4), (1, 13)]),
    "two classes": lambda: random_images(3, 2, [(6, 6)]),
    "many classes": lambda: random_images(3, 19, [(8, 8)], seed=3),
    "one class": lambda: [(torch.zeros(2, 2).long(), torch.ones(1, 2, 2))],
    "one pixel each": lambda: random_images(9, 4, [(1, 1)], seed=1),
    "an image of ignored pixels": with_ignored_image,
    "sure": on_edges(1.0),
    "on edges": on_edges(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    "on edges of fifteen": on_edges(*(number / 15 for number in range(2, 16))),
    "beside edges": on_edges(0.1 - 1e-8, 0.5 - 3e-8, 0.5 + 6e-8, 1 - 6e-8, 1 + 1.2e-7),
}


@pytest.fixture(params=DOMAINS)
def images(request: pytest.FixtureRequest) -> Images:
    return DOMAINS[request.param]()


def added(images: Images) -> Counts:
    return reduce(add, (count(*image) for image in images))


def test_iou_is_that_of_single_pixels(images: Images) -> None:
    found = iou(added(images).confusion).tolist()
    expected = exact_ious(images)
    assert [score != score for score in found] == [score is None for score in expected]
    for one, other in zip(found, expected, strict=True):
        assert other is None or one == pytest.approx(float(other), abs=1e-6)
    there = [score for score in expected if score is not None]
    mean = float(iou(added(images).confusion).nanmean())
    assert mean == pytest.approx(float(sum(there) / len(there)), abs=1e-6)


@pytest.mark.parametrize("num_bins", [10, 15])
def test_calibration_is_that_of_single_pixels(images: Images, num_bins: int) -> None:
    pixels = [pixel for image in images for pixel in pixels_of(*image)]
    expected = float(exact_ece(pixels, num_bins))
    assert ece(added(images), num_bins) == pytest.approx(expected, abs=1e-7)


def test_calibration_by_class_is_that_of_single_pixels(images: Images) -> None:
    assert class_ece(added(images)) == pytest.approx(float(exact_class_ece(images)), abs=1e-7)


def test_accuracy_is_that_of_single_pixels(images: Images) -> None:
    pixels = [pixel for image in images for pixel in pixels_of(*image)]
    right = sum(true == found for true, found, _ in pixels)
    assert pixel_accuracy(added(images).confusion) == pytest.approx(right / len(pixels))


def test_the_slow_scores_of_whole_maps_agree(images: Images) -> None:
    """They serve the tests of the protocol."""
    samples = [Sample(label.numpy(), probs.numpy()) for label, probs in images]
    there = [score for score in exact_ious(images) if score is not None]
    pixels = [pixel for image in images for pixel in pixels_of(*image)]
    assert slow_miou(samples) == pytest.approx(float(sum(there) / len(there)))
    assert slow_pooled_ece(samples, 10) == pytest.approx(float(exact_ece(pixels, 10)))
    assert slow_class_ece(samples) == pytest.approx(float(exact_class_ece(images)))


def test_counts_are_whole_and_the_same_in_any_order(images: Images) -> None:
    parts = [count(*image) for image in images]
    for part in parts:
        for tensor in (part.confusion, part.bins, part.gaps):
            assert tensor.dtype == torch.int64
    forward = reduce(add, parts)
    backward = reduce(add, reversed(parts))
    middle = len(parts) // 2
    zero = Counts.zero(len(images[0][1]))
    halves = sum(parts[middle:], zero) + sum(parts[:middle], zero)
    for other in (backward, halves):
        assert torch.equal(forward.confusion, other.confusion)
        assert torch.equal(forward.bins, other.bins)
        assert torch.equal(forward.gaps, other.gaps)
        assert ece(forward, 15) == ece(other, 15)
        assert class_ece(forward) == class_ece(other)


def test_labels_of_any_whole_type_count_the_same() -> None:
    label, probs = random_images(1, 5, [(6, 8)])[0]
    expected = count(label, probs)
    for dtype in (torch.uint8, torch.int16, torch.int32):
        found = count(label.to(dtype), probs)
        assert torch.equal(found.confusion, expected.confusion)
        assert torch.equal(found.gaps, expected.gaps)
    found = count(
        torch.from_numpy(label.numpy().astype(np.uint8)),
        probs.permute(1, 2, 0).clone().permute(2, 0, 1),
    )
    assert torch.equal(found.bins, expected.bins)


def test_iou_is_not_the_mean_over_images() -> None:
    """Class 1 is missed on 10 pixels of one image, and found on 990 of the other."""
    ones = torch.ones(1, 10).long()
    missed = sure(ones, torch.zeros(1, 10).long(), 2, 0.75)
    found = sure(torch.ones(10, 99).long(), torch.ones(10, 99).long(), 2, 0.75)
    parts = [count(*missed), count(*found)]
    by_image = [float(iou(part.confusion).nanmean()) for part in parts]
    assert by_image == [0.0, 1.0]
    assert float(iou((parts[0] + parts[1]).confusion).nanmean()) == pytest.approx(0.99)


def test_a_class_that_is_only_predicted_does_not_occur() -> None:
    """It lowers the IoU of the classes that are there, and is no class of its own."""
    label = torch.zeros(1, 4).long()
    found = torch.tensor([[0, 0, 0, 2]])
    scores = iou(count(*sure(label, found, 3, 0.5)).confusion)
    assert scores[0] == 0.75
    assert scores[1:].isnan().all()


def test_errors_of_two_images_do_not_cancel_in_the_error_by_class() -> None:
    """Class 0 has confidence 0.75: one image has it all right, the other half of it; by hand."""
    right = sure(torch.zeros(1, 4).long(), torch.zeros(1, 4).long(), 3, 0.75)
    half = sure(torch.zeros(1, 4).long(), torch.tensor([[0, 0, 1, 1]]), 3, 0.75)
    counts = added([right, half])
    assert ece(counts, 10) == 0
    assert class_ece(counts) == pytest.approx(0.25)
    other = sure(torch.full((1, 2), 2), torch.zeros(1, 2).long(), 3, 0.5)  # class 2, all wrong
    counts = added([right, half, other])
    assert class_ece(counts) == pytest.approx((0.25 + 0.5) / 2)


def test_images_weigh_by_their_pixels_of_the_class() -> None:
    few = sure(torch.zeros(1, 1).long(), torch.ones(1, 1).long(), 2, 1.0)  # an error of 1
    many = sure(torch.zeros(1, 9).long(), torch.zeros(1, 9).long(), 2, 1.0)  # none
    assert class_ece(added([few, many])) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("confidence", "ten", "fifteen"),
    [(0.1, 1, 1), (0.5, 5, 7), (0.25, 2, 3), (1.0, 9, 14), (0.0, 0, 0), (1.0000001, 9, 14)],
)
def test_a_confidence_on_an_edge_is_in_the_upper_bin(
    confidence: float, ten: int, fifteen: int
) -> None:
    counts = count(torch.tensor([[0]]), torch.tensor([[[confidence]]]))
    assert int(reliability(counts, 10)[0].argmax()) == ten
    assert int(reliability(counts, 15)[0].argmax()) == fifteen


def test_sums_are_exact_over_millions_of_pixels() -> None:
    """A sum in 32 bits would lose the last digits."""
    confidence = torch.tensor(0.7)
    label = torch.zeros(1200, 1200, dtype=torch.uint8)
    probs = torch.stack([confidence.expand(1200, 1200), (1 - confidence).expand(1200, 1200)])
    counts = reduce(add, [count(label, probs)] * 8)
    expected = 1 - float(confidence)
    assert ece(counts, 10) == pytest.approx(expected, abs=2**-25)
    assert class_ece(counts) == pytest.approx(expected, abs=2**-25)


def test_a_domain_without_a_pixel_that_counts_has_no_score() -> None:
    nothing = count(torch.full((2, 3), IGNORE), torch.full((4, 2, 3), 0.25))
    assert not nothing.bins.any()
    assert not nothing.confusion.any()
    assert not nothing.gaps.any()
    assert iou(nothing.confusion).isnan().all()
    assert class_ece(nothing) != class_ece(nothing)
    some = count(*random_images(1, 4, [(3, 3)])[0])
    assert ece(some + nothing) == ece(some)
    assert class_ece(some + nothing) == class_ece(some)


# merged classes


def test_merging_comes_before_the_choice_of_a_class() -> None:
    """The person is likelier than the car and than the bus, but not than a vehicle."""
    space = ClassSpace(("person", "car"), merges={"bus": "car"})
    probs = torch.tensor([0.3, 0.3, 0.4]).reshape(3, 1, 1)
    merged = to_class_space(probs, ("car", "bus", "person"), space)
    assert int(merged.argmax(dim=0)) == 1
    assert float(merged.max()) == pytest.approx(0.6)
    counts = count(torch.tensor([[1]]), merged)
    assert pixel_accuracy(counts.confusion) == 1
    assert ece(counts) == pytest.approx(0.4)


def test_the_spaces_of_the_paper_meet_by_name() -> None:
    wide, narrow = class_space("cityscapes-19"), class_space("carla-13")
    probs = random_images(1, 19, [(4, 5)])[0][1]
    merged = to_class_space(probs, wide.names, narrow)
    vehicles = ("car", "truck", "bus", "train", "motorcycle", "bicycle")
    expected = sum(probs[wide.index(name)] for name in vehicles)
    torch.testing.assert_close(merged[narrow.index("car")], expected)
    torch.testing.assert_close(merged.sum(dim=0), torch.ones(4, 5))
    same = to_class_space(probs, wide.names, wide)
    assert torch.equal(same, probs)
    fewer = class_space("synthia-16")
    left = to_class_space(probs, wide.names, fewer)
    assert torch.equal(left[fewer.index("sky")], probs[wide.index("sky")])
    lost = sum(probs[wide.index(name)] for name in ("terrain", "truck", "train"))
    torch.testing.assert_close(left.sum(dim=0), 1 - lost)


def test_probabilities_are_left_as_they_were() -> None:
    probs = random_images(1, 3, [(2, 2)])[0][1]
    before = probs.clone()
    to_class_space(probs, ("a", "b", "c"), ClassSpace(("x",), merges={"a": "x", "b": "x"}))
    assert torch.equal(probs, before)
