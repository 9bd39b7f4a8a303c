"""``auto`` mode against a slow reference, written from its page in the documentation."""

import math

import pytest
import torch
from test_adapt import LATER, reference_logits, reference_self_adaptation
from torch import Tensor, nn

from conftest import TinyNet, random_image, seeded
from selfadapt import SelfAdapt, create_method
from selfadapt.adapt import NOT_NEEDED
from selfadapt.auto import calibrated, quality, shift
from selfadapt.method import UNLIKE


def reference_auto(image: Tensor, model: nn.Module, alpha: float, steps: int) -> dict[str, object]:
    """Return prediction, shift and quality of ``auto`` mode, pixel by pixel."""
    paper = reference_self_adaptation(image, model, alpha, 0.7, 0.05, 0, (0.25, 0.5, 0.75), LATER)
    fused, target = paper["fused"], paper["label"]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    source = reference_logits(image, weights, 0.0).softmax(dim=0)
    san = reference_logits(image, weights, alpha).softmax(dim=0)
    num_classes, height, width = fused.shape
    pixels = [(j, k) for j in range(height) for k in range(width)]

    before = [int(source[:, j, k].argmax()) for j, k in pixels]
    after = [int(san[:, j, k].argmax()) for j, k in pixels]
    ious = []
    for c in range(num_classes):
        union = sum(a == c or b == c for a, b in zip(before, after, strict=True))
        both = sum(a == c and b == c for a, b in zip(before, after, strict=True))
        ious += [both / union] if union else []
    moved = 1 - sum(ious) / len(ious)
    expected = float((san.amax(dim=0).mean() + fused.amax(dim=0).mean()) / 2)
    chance = 1 / num_classes
    estimate = max((expected - chance) / (1 - chance), 0) ** 3
    trust = min(max((estimate - 0.25) / 0.1, 0), 1)
    share = min(max((moved - 0.1) / 0.1, 0), 1) * (0.5 + 0.5 * trust)

    kept = [(j, k) for j, k in pixels if target[j, k] != 255]
    counts = [sum(int(target[j, k]) == c for j, k in kept) for c in range(num_classes)]
    for name in LATER:
        weights[name].requires_grad_()
    losses = []
    for _ in range(steps if share else 0):
        log_probs = reference_logits(image, weights, alpha).log_softmax(dim=0)
        hard = even = total = 0.0
        for j, k in kept:
            weight = 1 / math.sqrt(counts[target[j, k]])
            hard = hard - weight * log_probs[target[j, k], j, k]
            total += weight
            even = even - log_probs[:, j, k].sum() / num_classes
        loss = 0.9 * hard / total + 0.1 * even / len(kept)
        gradients = torch.autograd.grad(loss, [weights[name] for name in LATER])
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
        for name, gradient in zip(LATER, gradients, strict=True):
            weights[name] = (weights[name] - 0.05 / norm * gradient).detach().requires_grad_()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        probs = reference_logits(image, weights, alpha).softmax(dim=0)
    probs = share * probs + (1 - share) * san

    low, high = 0.2, 8.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        sure = float((probs.log() / middle).softmax(dim=0).amax(dim=0).mean())
        low, high = (middle, high) if sure > expected else (low, middle)
    return {
        "probs": (probs.log() / low).softmax(dim=0), "shift": moved, "losses": losses,
        "quality": estimate,
    }  # fmt: skip


@pytest.mark.parametrize(("alpha", "seed", "low", "high"), [
    (0.1, 0, 0.0, 0.1), (0.4, 5, 0.1, 0.2), (0.1, 2, 0.1, 0.2), (0.1, 3, 0.2, 1.0),
    (1.0, 1, 0.2, 1.0),
])  # fmt: skip
def test_auto_mode_is_what_its_page_says(alpha: float, seed: int, low: float, high: float) -> None:
    model, image = seeded(TinyNet, seed=seed).double(), random_image(24, 31).double()
    method = SelfAdapt(model, alpha=alpha, steps=3, adapt=LATER)
    result, expected = method(image), reference_auto(image, model, alpha, 3)
    assert low <= expected["shift"] < high
    assert result.losses == pytest.approx(expected["losses"], rel=1e-5)
    assert (NOT_NEEDED in result.notes) == (not expected["losses"])
    assert result.quality == pytest.approx(expected["quality"], abs=1e-5)
    torch.testing.assert_close(result.probs, expected["probs"], rtol=0, atol=1e-5)


def test_a_network_that_san_does_not_change_is_always_adapted(image: Tensor) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    result = SelfAdapt(model, steps=2)(image)
    assert len(result.losses) == 2
    assert NOT_NEEDED not in result.notes


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
        after = calibrated(probs, torch.tensor(goal)).softmax(dim=0)
        assert torch.equal(after.argmax(dim=0), probs.argmax(dim=0))
        assert float(after.amax(dim=0).mean()) == pytest.approx(goal, abs=0.01)


def test_the_shift_counts_classes_that_either_has() -> None:
    first = torch.tensor([[0, 0, 0, 1], [0, 0, 2, 1]])
    second = torch.tensor([[0, 0, 0, 0], [0, 0, 2, 2]])
    scores = [
        torch.nn.functional.one_hot(x, 6).permute(2, 0, 1)[None].float() for x in (first, second)
    ]
    assert float(shift(*scores)) == pytest.approx(1 - (5 / 6 + 0 + 1 / 2) / 3)


def test_quality_falls_with_confidence_and_is_a_share() -> None:
    values = [float(quality(torch.tensor(c), 4)) for c in (0.1, 0.25, 0.5, 0.9, 1.0)]
    assert values == sorted(values)
    assert values[0] == values[1] == 0
    assert values[-1] == 1


def test_a_low_quality_is_told() -> None:
    result = SelfAdapt(seeded(TinyNet, seed=3), steps=1)(random_image(24, 31))
    assert result.quality < 0.25
    assert UNLIKE in result.notes
    assert f"quality {result.quality:.2f}" in repr(result)


@pytest.mark.parametrize("mode", ["paper", "official"])
def test_other_modes_know_no_quality(mode: str, image: Tensor) -> None:
    assert SelfAdapt(seeded(TinyNet, seed=3), steps=1, mode=mode)(image).quality is None
