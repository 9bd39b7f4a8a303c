from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conftest import TinyNet, random_image, seeded
from runs import run_cli
from selfadapt import SelfAdapt
from selfadapt.adapt import PATH_LENGTH
from selfadapt.images import to_pil
from selfadapt.losses import BalancedCrossEntropy, CrossEntropy
from selfadapt.modes import MODES
from selfadapt.steps import fixed_length


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, ignore_index=255)


def test_a_function_is_a_loss(tiny: nn.Module, image: Tensor) -> None:
    expected = SelfAdapt(tiny, mode="paper", steps=3)(image)
    result = SelfAdapt(tiny, mode="paper", steps=3, loss=cross_entropy)(image)
    assert torch.equal(result.probs, expected.probs)
    assert result.losses == expected.losses


@pytest.mark.parametrize("weights", [None, (1.0, 0.5, 2.0)])
def test_smoothing_and_class_weights_are_those_of_torch(weights: Any, image: Tensor) -> None:
    model = seeded(TinyNet)
    loss = CrossEntropy(label_smoothing=0.2, class_weights=weights)
    result = SelfAdapt(model, mode="paper", steps=1, loss=loss, alpha=0)(image)
    tensor = None if weights is None else torch.tensor(weights)
    scores = result.source_probs[None].log()
    expected = F.cross_entropy(
        scores, result.pseudo_label[None], tensor, ignore_index=255, label_smoothing=0.2
    )
    assert result.losses == pytest.approx([float(expected)], rel=1e-4)


def test_the_names_of_losses(tiny: nn.Module, image: Tensor) -> None:
    by_name = SelfAdapt(tiny, mode="paper", steps=2, loss="smoothed-cross-entropy")(image)
    smoothed = SelfAdapt(tiny, mode="paper", steps=2, loss=CrossEntropy(label_smoothing=0.1))(image)
    assert torch.equal(by_name.probs, smoothed.probs)
    assert not torch.equal(by_name.probs, SelfAdapt(tiny, mode="paper", steps=2)(image).probs)
    assert (
        by_name.confidence.mean() < SelfAdapt(tiny, mode="paper", steps=2)(image).confidence.mean()
    )


@pytest.mark.parametrize("size", [0.03, 1.0])
def test_steps_of_fixed_length_do_not_depend_on_the_size_of_the_loss(
    size: float, tiny: nn.Module, image: Tensor
) -> None:
    moved = []

    def recorded(weights: list[Tensor], gradients: list[Tensor], lr: float) -> None:
        before = [weight.clone() for weight in weights]
        fixed_length(weights, gradients, lr)
        moved.append(torch.cat([(w - b).flatten() for w, b in zip(weights, before, strict=True)]))

    def scaled(logits: Tensor, target: Tensor) -> Tensor:
        return size * cross_entropy(logits, target)

    named = SelfAdapt(tiny, mode="paper", steps=3, step="fixed-length", lr=0.2)(image)
    result = SelfAdapt(tiny, mode="paper", steps=3, loss=scaled, step=recorded, lr=0.2)(image)
    assert [float(step.norm()) for step in moved] == pytest.approx([0.2] * 3, rel=1e-4)
    torch.testing.assert_close(result.probs, named.probs, rtol=0, atol=1e-5)


def test_balance_weighs_pixels_by_the_size_of_their_class() -> None:
    logits = torch.randn(1, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0] * 9 + [1] * 4 + [255] * 7).reshape(1, 5, 4)  # no pixel of class 2
    logp = logits.log_softmax(dim=1)[0].flatten(1)
    hard = -(logp[0, :9].sum() / 3 + logp[1, 9:13].sum() / 2) / (9 / 3 + 4 / 2)
    even = -logp[:, :13].mean()
    loss = BalancedCrossEntropy(label_smoothing=0.3, balance=0.5)(logits, target)
    torch.testing.assert_close(loss, 0.7 * hard + 0.3 * even)


def test_a_step_of_fixed_length_stays_where_there_is_no_slope() -> None:
    weight = torch.ones(3)
    fixed_length([weight], [torch.zeros(3)], 0.1)
    assert torch.equal(weight, torch.ones(3))


def test_the_default_lr_is_that_of_the_step_rule(tiny: nn.Module) -> None:
    assert SelfAdapt(tiny, mode="paper").lr == MODES["paper"].lr
    assert SelfAdapt(tiny, mode="paper", step="gradient-descent").lr == MODES["paper"].lr
    assert SelfAdapt(tiny, mode="paper", step="fixed-length").lr == PATH_LENGTH / 10
    assert SelfAdapt(tiny, mode="paper", step="fixed-length", steps=4).lr == PATH_LENGTH / 4
    assert (SelfAdapt(tiny).steps, SelfAdapt(tiny, mode="official").steps) == (5, 10)
    assert SelfAdapt(tiny, mode="paper", step="fixed-length", lr=0.3).lr == 0.3


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown loss": ({"loss": "cross_entropy"}, ValueError, "did you mean 'cross-entropy'"),
    "no loss": ({"loss": 3}, TypeError, "loss must be a name or a function"),
    "unknown rule": ({"step": "adam"}, ValueError, "known: gradient-descent, fixed-length"),
    "no rule": ({"step": 1}, TypeError, "step must be a name or a function"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_losses_and_rules_are_explained(case: str, tiny: nn.Module) -> None:
    settings, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        SelfAdapt(tiny, mode="paper", **settings)


def test_wrong_values_of_a_loss_are_explained(tiny: nn.Module, image: Tensor) -> None:
    with pytest.raises(TypeError, match="a loss must return a tensor with one number"):
        SelfAdapt(tiny, mode="paper", loss=lambda logits, target: logits)(image)
    with pytest.raises(ValueError, match="one weight for each of the 3 classes, got 2"):
        SelfAdapt(tiny, mode="paper", loss=CrossEntropy(class_weights=(1.0, 2.0)))(image)
    with pytest.raises(ValueError, match="label_smoothing must be a number, 0 to 1, got 2"):
        CrossEntropy(label_smoothing=2)


def test_losses_are_named_on_the_command_line(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    to_pil(random_image(48, 64)).save(tmp_path / "x.png")
    flags = ["--model", "streets", "-o", tmp_path / "out", "--steps", "1"]
    assert run_cli("predict", tmp_path / "x.png", *flags, "--loss", "smoothed-entropy") == 2
    assert "did you mean 'smoothed-cross-entropy'" in capsys.readouterr().err
    named = ["--loss", "smoothed-cross-entropy", "--step", "fixed-length"]
    assert run_cli("predict", tmp_path / "x.png", *flags, *named) == 0
