"""``auto`` mode against a slow reference, written from its page in the documentation."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from test_adapt import LATER, reference_logits, reference_norm, reference_self_adaptation
from torch import Tensor, nn

from conftest import TinyNet, random_image, seeded
from selfadapt import SelfAdapt, create_method
from selfadapt.adapt import NOT_NEEDED
from selfadapt.auto import (
    StatisticsShift,
    expected_confidence,
    label_iou,
    quality,
    temperature,
)
from selfadapt.method import UNLIKE
from selfadapt.models.detect import IMAGENET_MEAN, IMAGENET_STD


def reference_iou(first: Tensor, second: Tensor) -> float:
    """Return the mean IoU of two labels, over the classes that either has."""
    pairs = list(zip(first.flatten().tolist(), second.flatten().tolist(), strict=True))
    classes = {c for pair in pairs for c in pair}
    ious = [
        sum(a == c and b == c for a, b in pairs) / sum(a == c or b == c for a, b in pairs)
        for c in classes
    ]
    return sum(ious) / len(ious)


def reference_shift(image: Tensor, weights: dict[str, Tensor]) -> float:
    """Return the shift of the statistics, a channel after the other."""
    mean, std = (torch.tensor(v).to(image).reshape(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    x = F.conv2d(((image - mean) / std)[None], weights["stem.weight"], stride=2, padding=1)[0]
    distance = spread = 0.0
    for norm, eps in (("norm1", 1e-5), ("norm2", 1e-3)):
        source, var = weights[f"{norm}.running_mean"], weights[f"{norm}.running_var"] + eps
        for c in range(len(x)):
            h, w = x.shape[1] // 2, x.shape[2] // 2
            rows, columns = (slice(h), slice(h, 2 * h)), (slice(w), slice(w, 2 * w))
            a, b, d, e = (float(x[c, j, k].mean()) for j in rows for k in columns)
            scale = float(var[c]) * len(x)
            distance += ((a + b + d + e) / 4 - float(source[c])) ** 2 / scale
            spread += (((a + d) / 2 - (b + e) / 2) ** 2 + ((a + b) / 2 - (d + e) / 2) ** 2) / scale
        if norm == "norm1":
            x = reference_norm(x, weights, "norm1", 0.0, eps).clamp(min=0)
            x = F.conv2d(x[None], weights["body.weight"], padding=1)[0]
    return distance / spread


def reference_views(
    image: Tensor, model: nn.Module, alpha: float, scales: tuple[float, ...]
) -> Tensor:
    return reference_self_adaptation(image, model, alpha, 0.7, 0.05, 0, scales, LATER)["fused"]


def reference_auto(image: Tensor, model: nn.Module, alpha: float, steps: int) -> dict[str, object]:
    """Return what ``auto`` mode makes of an image, pixel by pixel."""
    paper = reference_self_adaptation(image, model, alpha, 0.7, 0.05, 0, (0.25, 0.5, 0.75), LATER)
    fused, target = paper["fused"], paper["label"]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    source = reference_logits(image, weights, 0.0).softmax(dim=0)
    san = reference_logits(image, weights, alpha).softmax(dim=0)
    num_classes, height, width = fused.shape
    pixels = [(j, k) for j in range(height) for k in range(width)]

    kept_san = min(max((reference_shift(image, weights) - 0.2) / 0.2, 0), 1)
    plain = kept_san * san + (1 - kept_san) * source
    small, middle = (
        reference_views(image, model, alpha, (scale,)).argmax(dim=0) for scale in (0.25, 0.5)
    )
    gain = reference_iou(middle, small) - reference_iou(middle, san.argmax(dim=0))
    share = min(max((gain + 0.1) / 0.1, 0), 1)
    sure = float((plain.amax(dim=0).mean() + fused.amax(dim=0).mean()) / 2)
    chance = 1 / num_classes
    estimate = max((sure - chance) / (1 - chance), 0) ** 3

    half = reference_views(image, model, alpha, (0.5,))
    agree = [(j, k) for j, k in pixels if int(plain[:, j, k].argmax()) == int(middle[j, k])]
    weight = max(kept_san, share)
    expected = [
        (1 - weight) * float(plain[:, j, k].max()) + weight * float(half[:, j, k].max())
        for j, k in agree
    ]

    kept = [(j, k) for j, k in pixels if target[j, k] != 255]
    counts = [sum(int(target[j, k]) == c for j, k in kept) for c in range(num_classes)]
    for name in LATER:
        weights[name].requires_grad_()
    losses = []
    for _ in range(steps if share else 0):
        log_probs = reference_logits(image, weights, alpha).log_softmax(dim=0)
        hard = even = total = 0.0
        for j, k in kept:
            weight = counts[target[j, k]] ** -0.25
            hard = hard - weight * log_probs[target[j, k], j, k]
            total += weight
            even = even - log_probs[:, j, k].sum() / num_classes
        loss = 0.9 * hard / total + 0.1 * even / len(kept)
        gradients = torch.autograd.grad(loss, [weights[name] for name in LATER])
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
        for name, gradient in zip(LATER, gradients, strict=True):
            step = 0.4 / steps / norm * gradient
            weights[name] = (weights[name] - step).detach().requires_grad_()
        losses.append(float(loss.detach()))
    probs = plain
    if losses:
        adapted = copy.deepcopy(model)
        adapted.load_state_dict(weights)
        with torch.no_grad():
            probs = reference_logits(image, weights, alpha).softmax(dim=0)
            probs = (probs + reference_views(image, adapted, alpha, (0.5, 0.75))) / 2
        probs = share * probs + (1 - share) * plain

    low, high = 0.2, 8.0
    for _ in range(60):
        middle_t = math.sqrt(low * high)
        after = (probs.log() / middle_t).softmax(dim=0)
        is_too_sure = sum(float(after[:, j, k].max()) for j, k in agree) > sum(expected)
        low, high = (middle_t, high) if is_too_sure else (low, middle_t)
    return {
        "probs": (probs.log() / low).softmax(dim=0), "share": share, "san": kept_san,
        "losses": losses, "quality": estimate, "weights": weights, "temperature": low,
    }  # fmt: skip


@pytest.mark.parametrize(("alpha", "seed", "share", "san"), [
    (0.1, 0, "all", "all"), (1.0, 3, "part", "all"), (0.1, 9, "none", "all"),
    (1.0, 8, "part", "none"), (0.1, 64, "part", "part"), (0.1, 17, "all", "part"),
])  # fmt: skip
def test_auto_mode_is_what_its_page_says(alpha: float, seed: int, share: str, san: str) -> None:
    model, image = seeded(TinyNet, seed=seed).double(), random_image(24, 31, seed=seed).double()
    method = SelfAdapt(model, alpha=alpha, steps=3, adapt=LATER)
    result, expected = method(image), reference_auto(image, model, alpha, 3)
    kinds = {0: "none", 1: "all"}
    assert kinds.get(expected["share"], "part") == share
    assert kinds.get(expected["san"], "part") == san
    assert result.losses == pytest.approx(expected["losses"], rel=1e-5)
    assert (NOT_NEEDED in result.notes) == (not expected["losses"])
    assert result.quality == pytest.approx(expected["quality"], abs=1e-5)
    torch.testing.assert_close(result.probs, expected["probs"], rtol=0, atol=1e-5)


def test_a_network_without_batchnorm_is_adapted(image: Tensor) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    result = SelfAdapt(model, steps=2, scales=0.5)(image)  # one scale: nothing to compare views by
    assert len(result.losses) == 2
    assert NOT_NEEDED not in result.notes


def test_the_shift_tells_other_images_from_those_of_the_training_statistics() -> None:
    model, image = seeded(TinyNet), random_image(64, 96)
    x = model.interface.prepare(model.interface.normalize(image))
    with torch.no_grad():  # the statistics of this image
        for name, layer in (("stem", model.norm1), ("body", model.norm2)):
            features = x if name == "stem" else model.norm1(model.stem(x)).relu()
            features = getattr(model, name)(features)
            layer.running_mean.copy_(features.mean(dim=(0, 2, 3)))
            layer.running_var.copy_(features.var(dim=(0, 2, 3)))
    shifts = []
    for other in (image, image.flip(-1), 0.3 * image, 0.7 + 0.3 * image):
        with StatisticsShift(model, ["norm1", "norm2"]) as shift, torch.no_grad():
            model(model.interface.prepare(model.interface.normalize(other)))
        shifts.append(float(shift.value))
    assert shifts[0] < 0.01
    assert shifts[1] < 0.2
    assert min(shifts[2:]) > 1
    assert not model.norm1._forward_pre_hooks


def test_the_source_is_computed_once_and_given_only_if_asked_for(image: Tensor) -> None:
    model = seeded(TinyNet, seed=3)
    compared, alone = (SelfAdapt(model, steps=1, compare=value)(image) for value in (True, False))
    source = create_method("source", model)(image)
    assert torch.equal(compared.source_probs, source.probs)
    assert alone.source_probs is None
    assert torch.equal(alone.probs, compared.probs)


def test_a_temperature_keeps_labels_and_reaches_the_confidence() -> None:
    probs = torch.randn(5, 40, 300, generator=torch.Generator().manual_seed(0)).mul(3).softmax(0)
    for goal in (0.4, 0.6, 0.9):
        scores = probs.log()
        after = (scores / temperature(scores, torch.full((40, 160), goal))).softmax(dim=0)
        assert torch.equal(after.argmax(dim=0), probs.argmax(dim=0))
        assert float(after.amax(dim=0).mean()) == pytest.approx(goal, abs=0.01)


def test_the_iou_of_labels_counts_classes_that_either_has() -> None:
    first = torch.tensor([[0, 0, 0, 1], [0, 0, 2, 1]])
    second = torch.tensor([[0, 0, 0, 0], [0, 0, 2, 2]])
    assert float(label_iou(first, second, 6)) == pytest.approx((5 / 6 + 0 + 1 / 2) / 3)


def test_quality_rises_with_confidence_and_is_a_share() -> None:
    sure, even = (torch.tensor(p).reshape(4, 1, 1) for p in ([1.0, 0, 0, 0], [0.25] * 4))
    assert float(quality(sure, sure)) == 1
    assert float(quality(even, even)) == 0
    assert float(quality(sure, even)) == float(quality(even, sure)) == pytest.approx(0.5**3)


def test_views_tell_how_sure_to_be_of_images_that_call_for_adaptation() -> None:
    plain = torch.tensor([[0.9, 0.8, 0.6], [0.1, 0.2, 0.4]]).reshape(2, 1, 3)
    views = torch.tensor([[0.7, 0.6, 0.4], [0.3, 0.4, 0.6]]).reshape(2, 1, 3)
    for weight, expected in ((0.0, [0.9, 0.8, 0]), (0.5, [0.8, 0.7, 0]), (1.0, [0.7, 0.6, 0])):
        values = expected_confidence(plain, views, torch.tensor(weight))
        torch.testing.assert_close(values, torch.tensor([expected]))
    nowhere = expected_confidence(plain, plain.flip(0), torch.tensor(0.0))
    torch.testing.assert_close(nowhere, plain.amax(dim=0))


def test_a_low_quality_is_told() -> None:
    result = SelfAdapt(seeded(TinyNet, seed=3), steps=1)(random_image(24, 31))
    assert result.quality < 0.25
    assert UNLIKE in result.notes
    assert f"quality {result.quality:.2f}" in repr(result)


@pytest.mark.parametrize("mode", ["paper", "official"])
def test_other_modes_know_no_quality(mode: str, image: Tensor) -> None:
    assert SelfAdapt(seeded(TinyNet, seed=3), steps=1, mode=mode)(image).quality is None
