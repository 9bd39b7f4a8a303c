import pytest
import torch
from torch import Tensor

from selfadapt.labels import ClassSpace
from selfadapt.metrics import Score, confusion_matrix, count, ece, iou, reliability, to_class_space


def naive_iou(label: Tensor, predicted: Tensor, c: int) -> float:
    pixels = zip(label.flatten().tolist(), predicted.flatten().tolist(), strict=True)
    pairs = [(true, found) for true, found in pixels if true != 255]
    both = sum(true == c and found == c for true, found in pairs)
    return both / sum(c in pair for pair in pairs)


def naive_ece(label: Tensor, probs: Tensor, num_bins: int) -> float:
    pixels = []
    for j in range(label.shape[0]):
        for k in range(label.shape[1]):
            if label[j, k] != 255:
                best = int(probs[:, j, k].argmax())
                pixels.append((float(probs[best, j, k]), best == int(label[j, k])))
    total = 0.0
    for b in range(num_bins):
        inside = [p for p in pixels if min(int(p[0] * num_bins), num_bins - 1) == b]
        if inside:
            confidence = sum(c for c, _ in inside) / len(inside)
            accuracy = sum(hit for _, hit in inside) / len(inside)
            total += len(inside) / len(pixels) * abs(accuracy - confidence)
    return total


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(0, 4, (9, 11), generator=generator)  # class 4 never occurs
    label[:2] = 255
    return label, (torch.randn((5, 9, 11), generator=generator) * 2).softmax(dim=0)


def test_iou_is_the_slow_one(pair: tuple[Tensor, Tensor]) -> None:
    label, probs = pair
    found = iou(confusion_matrix(label, probs.argmax(dim=0), 5))
    for c in range(4):
        assert float(found[c]) == pytest.approx(naive_iou(label, probs.argmax(dim=0), c))
    assert torch.isnan(found[4])


@pytest.mark.parametrize("num_bins", [10, 15])
def test_ece_is_the_slow_one(pair: tuple[Tensor, Tensor], num_bins: int) -> None:
    assert ece(count(*pair), num_bins) == pytest.approx(naive_ece(*pair, num_bins))


def test_iou_is_of_the_domain_not_the_mean_of_images() -> None:
    first = confusion_matrix(torch.ones(10).long(), torch.zeros(10).long(), 2)
    second = confusion_matrix(torch.ones(1000).long(), torch.ones(1000).long(), 2)
    assert float(iou(first + second)[1]) == pytest.approx(1000 / 1010)


def test_one_pixel_and_no_pixel() -> None:
    assert iou(confusion_matrix(torch.tensor([[1]]), torch.tensor([[1]]), 2))[1] == 1
    nothing = torch.tensor([[255]])
    assert torch.isnan(iou(confusion_matrix(nothing, torch.tensor([[1]]), 2))).all()
    assert ece(count(nothing, torch.ones(1, 1, 1))) == 0


def test_a_sure_pixel_falls_into_the_last_bin() -> None:
    bins = reliability(count(torch.tensor([[0]]), torch.tensor([[[1.0]], [[0.0]]])))
    assert bins[0].tolist() == [0] * 9 + [1]


def test_merging_adds_probabilities() -> None:
    probs = torch.rand(4, 2, 2)
    space = ClassSpace(("person", "sky", "car"), merges={"rider": "person"})
    merged = to_class_space(probs, ("rider", "car", "person", "train"), space)
    torch.testing.assert_close(merged[0], probs[0] + probs[2])
    assert (merged[1] == 0).all()
    torch.testing.assert_close(merged[2], probs[1])


def test_a_score_counts_a_domain_and_each_image() -> None:
    score = Score(2)
    sure = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]).reshape(2, 1, 3)
    score.add(torch.tensor([[0, 0, 1]]), sure)
    score.add(torch.tensor([[1, 0, 255]]), sure)
    # over the domain: class 0 is hit 3 times and missed by 1 pixel, class 1 hit once, missed once
    assert score.mean_iou == pytest.approx((3 / 4 + 1 / 2) / 2)
    assert score.image_iou == pytest.approx([1.0, (1 / 2 + 0) / 2])
    assert score.ece == pytest.approx(1 / 5)
