"""Training: what a step is, what is chosen, and that processes and seeds do what they should."""

import copy
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import selfadapt
from runs import (
    CLASSES,
    COLORS,
    IGNORE,
    as_config,
    assert_same_tensors,
    locked,
    recipe,
    rows,
    run_cli,
    start_cli,
    write_domain,
    write_recipe,
)  # fmt: skip
from selfadapt.data import open_dataset
from selfadapt.models.norms import BatchInstanceNorm2d
from selfadapt.train import TrainConfig, loop, train
from selfadapt.train.fabric import make_fabric
from selfadapt.train.folder import read_state
from selfadapt.train.loader import BatchOrder, read_batches
from selfadapt.train.statistics import average_statistics
from selfadapt.train.trainer import Trainer
from selfadapt.train.validate import confusion_by_alpha

pytest.importorskip("lightning_fabric")

ALPHAS = [0.0, 0.1, 0.5, 1.0]
PROCESSES = 240  # seconds that a run in another process may take


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than most of these runs; those of fixtures are drawn."""
    monkeypatch.setattr(loop, "draw_curves", lambda folder: None)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source domain of 13 images, and a validation domain of two sizes of images."""
    root = tmp_path_factory.mktemp("domains")
    sizes = ((96, 64), (96, 64), (80, 48))
    return write_domain(root / "source", 13, 1), write_domain(root / "validation", 6, 2, sizes)


@pytest.fixture(scope="module")
def learned(roots: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learned")
    augment = {"crop": [64, 64], "scale": [0.3, 1.0], "blur": [0.1, 0.6], "gray": 0.0}
    settings = {"epochs": 24, "validate_every": 6, "statistics_batches": 3}
    best = train(as_config(recipe(*roots, augment=augment, **settings)), folder)
    assert best == [folder / "best.safetensors"]
    return folder


def mean_iou(predictions: Sequence[tuple[np.ndarray, Tensor]]) -> float:
    """Return the mean IoU of labels and predictions, by sets of pixels."""
    labels = np.concatenate([label.flatten() for label, _ in predictions])
    predicted = np.concatenate([p.numpy().flatten() for _, p in predictions])
    counted = labels != IGNORE
    labels, predicted = labels[counted], predicted[counted]
    scores = []
    for number in range(len(CLASSES)):
        true, said = labels == number, predicted == number
        if true.any():
            scores.append((true & said).sum() / (true | said).sum())
    return float(np.mean(scores))


def scored(model: nn.Module, root: Path, alpha: float, scale: float = 1) -> float:
    """Return the mean IoU of a network with SaN, by the methods of the package, image by image."""
    method = selfadapt.create_method("san", model, alpha=alpha)
    if alpha == 0:
        method = selfadapt.create_method("source", model)
    pairs = []
    for path in sorted((root / "images").iterdir()):
        image = Image.open(path)
        label = np.array(Image.open(root / "labels" / path.name))
        large = image
        if scale != 1:
            size = (round(image.width * scale), round(image.height * scale))
            large = image.resize(size, Image.Resampling.BILINEAR)
        probs = method(large).probs
        if scale != 1:
            probs = F.interpolate(probs[None], label.shape, mode="bilinear")[0]
        pairs.append((label, probs.argmax(0)))
    return mean_iou(pairs)


def table(folder: Path) -> dict[tuple[int, float], float]:
    return {
        (int(row["epoch"]), float(row["alpha"])): float(row["mIoU"])
        for row in rows(folder / "validation.csv")
    }


def test_a_network_learns_an_easy_task(learned: Path, roots: tuple[Path, Path]) -> None:
    model = selfadapt.load_model(learned / "best.safetensors")
    assert scored(model, roots[1], alpha=0.0) > 0.8
    losses = [float(row["loss"]) for row in rows(learned / "log.csv")]
    assert losses[-1] < 0.5 * losses[0]


def test_validation_scores_are_those_of_the_saved_network(
    learned: Path, roots: tuple[Path, Path]
) -> None:
    scores = table(learned)
    assert len(scores) == 4 * len(ALPHAS)
    kept = sorted(learned.glob("epoch_*.safetensors"))
    assert kept
    for path in kept:
        model = selfadapt.load_model(path)
        for alpha in ALPHAS:
            expected = scored(model, roots[1], alpha)
            assert scores[int(path.stem[6:]), alpha] == pytest.approx(expected, abs=2e-4)
    epoch = int(kept[-1].stem[6:])
    assert len({round(scores[epoch, alpha], 4) for alpha in ALPHAS}) > 1  # alpha matters


def test_summary_and_checkpoints_agree_with_the_scores(learned: Path) -> None:
    scores = table(learned)
    summary = json.loads((learned / "summary.json").read_text())
    best_epochs = set()
    for alpha in ALPHAS:
        by_epoch = {epoch: score for (epoch, a), score in scores.items() if a == alpha}
        score, epoch = summary["best by alpha"][str(alpha)]
        assert score == pytest.approx(max(by_epoch.values()), abs=1e-6)
        assert by_epoch[epoch] == max(by_epoch.values())
        best_epochs.add(epoch)
    assert {path.name for path in learned.glob("epoch_*")} == {
        f"epoch_{epoch:03}.safetensors" for epoch in best_epochs
    }
    chosen = summary["best"]
    assert chosen["mIoU"] == pytest.approx(max(scores.values()), abs=1e-6)
    assert scores[chosen["epoch"], chosen["alpha"]] == max(scores.values())
    assert_same_tensors(
        load_file(learned / "best.safetensors"),
        load_file(learned / f"epoch_{chosen['epoch']:03}.safetensors"),
    )
    assert summary["steps"] == 72
    assert summary["processes"] == 1
    assert summary["images_per_s"] > 0


def test_a_run_writes_down_what_it_was_and_how_it_went(learned: Path) -> None:
    written = json.loads((learned / "recipe.json").read_text())
    assert written["lr"] == 0.05
    assert written["model"]["name"] == "deeplabv1_resnet18_slim"
    assert written["augment"]["crop"] == [64, 64]
    assert Image.open(learned / "curve.png").width > 500
    steps = rows(learned / "log.csv")
    noted = [step for step in range(1, 73) if step % 10 == 0 or step % 3 == 0]
    assert [int(row["step"]) for row in steps] == noted
    assert [int(row["epoch"]) for row in steps] == [(step - 1) // 3 + 1 for step in noted]
    assert [path.name for path in learned.glob(".*")] == [".lock"]


def scripted(monkeypatch: pytest.MonkeyPatch, folder: Path, scores: dict[int, list[int]]) -> list:
    """Let validation find percentages by epoch, one for each alpha; return the files at each."""
    seen: list[list[str]] = []
    epochs = iter(scores.values())

    def confusion(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(sorted(path.name[6:9] for path in folder.glob("epoch_*")))
        counts = [
            torch.tensor([[n, 100 - n, 0], [0, 0, 0], [0, 0, 0]]) for n in next(epochs)
        ]  # IoU n % of the first class, and no other class occurs
        return torch.stack(counts)

    monkeypatch.setattr(loop, "confusion_by_alpha", confusion)
    return seen


def test_networks_are_kept_while_they_are_the_best_for_some_alpha(
    roots: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {1: [50, 20], 2: [40, 60], 3: [70, 10], 4: [70, 30], 5: [10, 61], 6: [69, 61]}
    seen = scripted(monkeypatch, tmp_path, scores)
    train(as_config(recipe(*roots, epochs=6, batch=13, alphas=[0.0, 0.3])), tmp_path)
    kept = sorted(path.name[6:9] for path in tmp_path.glob("epoch_*"))
    assert [*seen, kept] == [
        [],
        ["001"],
        ["001", "002"],
        ["002", "003"],
        ["002", "003"],
        ["003", "005"],
        ["003", "005"],  # as good as before is not better
    ]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["best"] == {"alpha": 0.0, "mIoU": pytest.approx(0.7), "epoch": 3}
    assert summary["best by alpha"]["0.3"] == [pytest.approx(0.61), 5]
    best, last = (load_file(tmp_path / f"{name}.safetensors") for name in ("best", "last"))
    assert_same_tensors(best, load_file(tmp_path / "epoch_003.safetensors"))
    assert any(not best[name].equal(last[name]) for name in best)


@pytest.mark.parametrize(
    ("settings", "epochs"),
    [
        ({"validate_from": 3}, [3, 4, 5]),
        ({"validate_every": 2}, [2, 4, 5]),
        ({"validate_from": 3, "validate_every": 2}, [4, 5]),
        ({"validate_from": 9}, [5]),
    ],
    ids=str,
)
def test_validation_comes_when_it_is_due_and_at_the_end(
    roots: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, int],
    epochs: list[int],
) -> None:
    scripted(monkeypatch, tmp_path, {epoch: [epoch] for epoch in epochs})
    train(as_config(recipe(*roots, epochs=5, batch=13, alphas=[0.0], **settings)), tmp_path)
    assert [epoch for epoch, _ in table(tmp_path)] == epochs


def test_enlarged_images_are_scored_at_their_own_size(
    learned: Path, roots: tuple[Path, Path]
) -> None:
    model = selfadapt.load_model(learned / "last.safetensors")
    opened = open_dataset("folder", roots[1], split="all", classes=CLASSES, space=CLASSES)
    interface: Any = model.interface
    for scale in (2.0, 0.7):
        counts = confusion_by_alpha(model, interface, opened, [0.0, 0.3], scale=scale)
        for alpha, count in zip([0.0, 0.3], counts.double(), strict=True):
            hit = count.diagonal()
            found = float((hit / (count.sum(0) + count.sum(1) - hit)).mean())
            expected = scored(model, roots[1], alpha, scale)
            assert found == pytest.approx(expected, abs=2e-4)
    plain = confusion_by_alpha(model, interface, opened, [0.0])
    assert not plain.equal(counts[:1])
    labels = [np.array(Image.open(path)) for path in (roots[1] / "labels").iterdir()]
    assert int(plain.sum()) == sum(int((label != IGNORE).sum()) for label in labels)


def test_shares_of_the_validation_domain_add_up(learned: Path, roots: tuple[Path, Path]) -> None:
    model = selfadapt.load_model(learned / "last.safetensors")
    opened = open_dataset("folder", roots[1], split="all", classes=CLASSES, space=CLASSES)
    interface: Any = model.interface
    whole = confusion_by_alpha(model, interface, opened, ALPHAS)
    shares = [
        confusion_by_alpha(model, interface, opened, ALPHAS, rank=rank, world=4, workers=rank % 2)
        for rank in range(4)
    ]
    assert (whole - sum(shares)).abs().sum() <= 8  # batches of other sizes round otherwise


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_validation_image_is_named_in_one_line(
    roots: tuple[Path, Path], tmp_path: Path, learned: Path, workers: int
) -> None:
    root = write_domain(tmp_path, 3, 2)
    broken = root / "images/01.png"
    broken.write_bytes(broken.read_bytes()[:100])
    model: Any = selfadapt.load_model(learned / "last.safetensors")
    opened = open_dataset("folder", root, split="all", classes=CLASSES, space=CLASSES)
    with pytest.raises((ValueError, OSError), match=r"01\.png") as caught:
        confusion_by_alpha(model, model.interface, opened, [0.0], workers=workers)
    assert "\n" not in str(caught.value)


def test_without_validation_the_last_network_is_taken(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    train(as_config(recipe(roots[0], None, epochs=2, batch=6)), tmp_path)
    last = load_file(tmp_path / "last.safetensors")
    assert_same_tensors(last, load_file(tmp_path / "best.safetensors"))
    assert rows(tmp_path / "validation.csv") == []
    assert json.loads((tmp_path / "summary.json").read_text())["best"] is None
    assert not list(tmp_path.glob("epoch_*"))


def a_trainer(roots: tuple[Path, Path], **changes: Any) -> tuple[Trainer, Tensor, Tensor]:
    """Return a trainer in training mode, and a batch for it."""
    config = as_config(recipe(*roots, **changes))
    trainer = Trainer(config, make_fabric(config))
    trainer.train_mode()
    source = config.source.open(CLASSES)
    batch = next(read_batches(source, config.augment, BatchOrder(13, 4, 0), 0, 1))
    return trainer, *batch.to_device(torch.device("cpu"), trainer.interface)


def gradients(trainer: Trainer, x: Tensor, label: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the mean cross-entropy, on a copy of the network."""
    model: Any = copy.deepcopy(trainer.model)
    logits = F.interpolate(model(x), x.shape[-2:], mode="bilinear")
    log_probs = logits.log_softmax(1)
    counted = label != IGNORE
    picked = log_probs.gather(1, label.where(counted, 0)[:, None])[:, 0]
    loss = -(picked * counted).sum() / counted.sum()
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("norm", ["bn", "bin", "sn"])
def test_steps_are_those_of_sgd(roots: tuple[Path, Path], norm: str) -> None:
    """Two steps by hand: weight decay, momentum; mixing weights are faster and do not decay."""
    model = {"name": "deeplabv1_resnet18_slim", "classes": CLASSES, "norm": norm}
    trainer, x, label = a_trainer(roots, model=model, weight_decay=0.01, momentum=0.8)
    for layer in trainer.model.modules():
        if isinstance(layer, BatchInstanceNorm2d):
            layer.rho.data.uniform_(0.3, 0.7)
    velocity: dict[str, Tensor] = {}
    for number, lr in enumerate((0.02, 0.01)):
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        expected = gradients(trainer, x, label)
        loss = trainer.step(x, label, lr, number)
        assert float(loss) == pytest.approx(float(expected["loss"]), abs=1e-5)
        mixing = 0
        for name, parameter in trainer.model.named_parameters():
            fast = name.endswith(("rho", "mean_weight", "var_weight"))
            mixing += fast
            step = expected[name] + (0 if fast else 0.01) * before[name]
            velocity[name] = step + 0.8 * velocity.get(name, torch.zeros_like(step))
            after = before[name] - lr * (10 if fast else 1) * velocity[name]
            if name.endswith("rho"):
                after = after.clamp(0, 1)
            assert torch.allclose(parameter, after, atol=1e-5), name
        assert (mixing > 0) == (norm != "bn")


def test_the_loss_is_a_mean_that_weighs_classes(roots: tuple[Path, Path]) -> None:
    rare = CLASSES[-1]
    trainer, x, label = a_trainer(roots, class_weights={rare: 7.5})
    label[:, :2] = IGNORE
    log_probs = F.interpolate(copy.deepcopy(trainer.model)(x), x.shape[-2:], mode="bilinear")
    log_probs = log_probs.log_softmax(1)
    total, weights = 0.0, 0.0
    for index in range(len(CLASSES)):
        there = label == index
        assert there.any()
        weight = 7.5 if index == len(CLASSES) - 1 else 1
        total -= weight * float(log_probs[:, index][there].sum())
        weights += weight * int(there.sum())
    assert float(trainer.step(x, label, 0.01, 0)) == pytest.approx(total / weights, abs=1e-5)


@pytest.mark.parametrize("norm", ["bin", "sn"])
def test_other_normalisations_train(roots: tuple[Path, Path], tmp_path: Path, norm: str) -> None:
    model = {"name": "deeplabv1_resnet18_slim", "classes": CLASSES, "norm": norm}
    train(as_config(recipe(*roots, model=model, lr=0.3, epochs=2, alphas=[0.0])), tmp_path)
    last = load_file(tmp_path / "last.safetensors")
    names = ("rho",) if norm == "bin" else ("mean_weight", "var_weight")
    mixing = torch.cat([value.flatten() for n, value in last.items() if n.endswith(names)])
    assert len(mixing) > 10
    assert mixing.isfinite().all()
    assert (mixing != 1).float().mean() > 0.3
    if norm == "bin":
        assert mixing.min() >= 0
        assert mixing.max() == 1
    saved = selfadapt.load_model(tmp_path / "best.safetensors")
    assert saved.spec.norm == norm
    assert scored(saved, roots[1], alpha=0) == pytest.approx(
        max(table(tmp_path).values()), abs=1e-4
    )


def test_rho_stays_between_0_and_1(roots: tuple[Path, Path]) -> None:
    model = {"name": "deeplabv1_resnet18_slim", "classes": CLASSES, "norm": "bin"}
    trainer, x, label = a_trainer(roots, model=model)
    layers = [layer for layer in trainer.model.modules() if isinstance(layer, BatchInstanceNorm2d)]
    for number in range(3):
        trainer.step(x, label, 5.0, number)
        for layer in layers:
            assert layer.rho.min() >= 0
            assert layer.rho.max() <= 1
    assert min(float(layer.rho.detach().min()) for layer in layers) == 0


def test_the_learning_rate_falls_with_the_power_of_what_is_left(
    roots: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def step(self: Trainer, x: Tensor, label: Tensor, lr: float, number: int) -> Tensor:
        taken.append((number, lr))
        return torch.tensor(1.0)

    monkeypatch.setattr(Trainer, "step", step)
    train(as_config(recipe(roots[0], None, epochs=4, lr=0.04, power=0.7)), tmp_path)
    expected = [(n, 0.04 * (1 - n / 12) ** 0.7) for n in range(12)]
    assert taken == [(n, pytest.approx(lr)) for n, lr in expected]


def test_frozen_statistics_stay_bit_by_bit_while_weights_change(
    roots: tuple[Path, Path],
) -> None:
    trainer, x, label = a_trainer(roots, frozen_batchnorm=True)
    state = trainer.model.state_dict()
    torch.manual_seed(0)
    for name, value in state.items():
        if name.endswith("running_mean"):
            value.normal_(0, 0.1)
    before = copy.deepcopy(state)
    for number in range(3):
        trainer.step(x, label, 0.01, number)
    after = trainer.model.state_dict()
    statistics = [n for n in before if n.endswith(("running_mean", "running_var", "tracked"))]
    assert len(statistics) > 30
    for name in statistics:
        assert after[name].equal(before[name]), name
    weights = [n for n in before if n.endswith("weight")]
    assert all(not after[name].equal(before[name]) for name in weights)


def test_without_freezing_statistics_follow_the_batches(roots: tuple[Path, Path]) -> None:
    trainer, x, label = a_trainer(roots)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.step(x, label, 0.01, 0)
    after = trainer.model.state_dict()
    assert all(not after[n].equal(before[n]) for n in before if n.endswith("running_mean"))


def test_averaged_statistics_are_the_plain_mean_over_batches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.3), nn.Dropout(0.5))
    model[1].running_mean.fill_(7.0)
    model[1].num_batches_tracked.fill_(5)
    inputs = [torch.rand(2, 3, 9, 11) * n for n in (1, 2, 5)]
    means, variances = [], []
    for x in inputs:
        y = F.conv2d(x, model[0].weight, model[0].bias).permute(1, 0, 2, 3).flatten(1)
        mean = y.sum(1) / y.shape[1]
        means.append(mean)
        variances.append((y - mean[:, None]).square().sum(1) / (y.shape[1] - 1))
    state = torch.get_rng_state()
    average_statistics(model, model, inputs)
    assert torch.get_rng_state().equal(state)  # no dropout
    assert torch.allclose(model[1].running_mean, torch.stack(means).mean(0), atol=1e-5)
    assert torch.allclose(model[1].running_var, torch.stack(variances).mean(0), atol=1e-5)
    assert model[1].momentum == 0.3
    assert not any(module.training for module in model.modules())


def test_the_statistics_of_a_run_are_of_batches_that_no_step_has_seen(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    config = as_config(recipe(roots[0], None, epochs=1, statistics_batches=4))
    train(config, tmp_path)
    assert_statistics_of_fresh_batches(tmp_path, config)


def test_statistics_may_be_of_crops_of_another_size(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    """Trained in small crops, for images in which things are as large as in larger ones."""
    settings = {"epochs": 1, "statistics_batches": 4, "statistics_scale": (0.9, 1.0)}
    config = as_config(recipe(roots[0], None, **settings))
    train(config, tmp_path)
    augment = replace(config.augment, scale=(0.9, 1.0))
    assert_statistics_of_fresh_batches(
        tmp_path, replace(config, augment=augment, statistics_scale=None)
    )
    with pytest.raises(AssertionError):
        assert_statistics_of_fresh_batches(tmp_path, replace(config, statistics_scale=None))


def assert_statistics_of_fresh_batches(folder: Path, config: TrainConfig) -> None:
    """Compare the first BatchNorm of the last network with batches after all steps."""
    model: Any = selfadapt.load_model(folder / "last.safetensors")
    source = config.source.open(CLASSES)
    means = []
    start = 3 * config.epochs
    stop = start + config.statistics_batches
    for batch in read_batches(source, config.augment, BatchOrder(13, 4, 0), start, stop):
        x, _ = batch.to_device(torch.device("cpu"), model.interface)
        convolution = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
        means.append(convolution(x).detach().mean((0, 2, 3)))
    norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    assert torch.allclose(norm.running_mean, torch.stack(means).mean(0), atol=1e-5)


@pytest.mark.parametrize("norm", ["bn", "bin"])
def test_the_average_is_that_of_the_weights_after_each_step(
    roots: tuple[Path, Path], norm: str
) -> None:
    model = {"name": "deeplabv1_resnet18_slim", "classes": CLASSES, "norm": norm}
    trainer, x, label = a_trainer(roots, model=model, average=0.25)
    own = trainer.model.state_dict()
    expected = copy.deepcopy(own)
    for number, decay in enumerate((1 / 10, 2 / 11, 3 / 12, 0.25, 0.25)):
        trainer.step(x, label, 0.05, number)
        for name, value in own.items():
            late = value.is_floating_point()
            expected[name] = decay * expected[name] + (1 - decay) * value if late else value.clone()
    before = copy.deepcopy(own)
    with trainer.averaged():
        averaged = copy.deepcopy(trainer.model.state_dict())
        own["backbone.conv1.weight"].zero_()
    assert_same_tensors(dict(trainer.model.state_dict()), dict(before))
    for name, value in averaged.items():
        assert torch.allclose(value, expected[name], atol=1e-5), name
    weights = [name for name in before if name.endswith("weight")]
    assert any(not averaged[name].equal(before[name]) for name in weights)
    with trainer.averaged():  # what was done to the average is still there
        assert not own["backbone.conv1.weight"].any()


def test_an_average_is_validated_and_saved_and_training_goes_on_without_it(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = {"epochs": 3, "statistics_batches": 2, "alphas": [0.0, 0.5]}
    plain, mean = tmp_path / "plain", tmp_path / "mean"
    train(as_config(recipe(*roots, **settings)), plain)
    config = as_config(recipe(*roots, **settings, average=0.6))
    train(config, mean)
    logs = [[row["loss"] for row in rows(folder / "log.csv")] for folder in (plain, mean)]
    assert logs[0] == logs[1]
    tensors = [read_state(folder / "state.safetensors")[1] for folder in (plain, mean)]
    learned = [name for name in tensors[0] if not name.endswith(("mean", "var", "tracked"))]
    assert_same_tensors(*({name: part[name] for name in learned} for part in tensors))
    last = load_file(mean / "last.safetensors")
    assert_same_tensors(last, {n[5:]: t for n, t in tensors[1].items() if n.startswith("mean.")})
    assert not last["backbone.conv1.weight"].equal(tensors[1]["model.backbone.conv1.weight"])
    scores = table(mean)
    for path in mean.glob("epoch_*.safetensors"):
        network = selfadapt.load_model(path)
        for alpha in (0.0, 0.5):
            expected = scored(network, roots[1], alpha)
            assert scores[int(path.stem[6:]), alpha] == pytest.approx(expected, abs=2e-4)
    assert_statistics_of_fresh_batches(mean, config)


def test_seeds_train_networks_that_differ(roots: tuple[Path, Path], tmp_path: Path) -> None:
    config = as_config(recipe(*roots, epochs=1, batch=6, seeds=[0, 1], alphas=[0.0]))
    best = train(config, tmp_path)
    assert best == [tmp_path / f"seed_{seed}/best.safetensors" for seed in (0, 1)]
    one, other = (load_file(path) for path in best)
    weights = [name for name in one if name.endswith("weight") and one[name].dim() == 4]
    assert all(not one[name].equal(other[name]) for name in weights)
    single = tmp_path / "single"
    train(as_config(recipe(*roots, epochs=1, batch=6, seed=1, alphas=[0.0])), single)
    assert_same_tensors(other, load_file(single / "best.safetensors"))


def test_fresh_weights_follow_from_the_seed(roots: tuple[Path, Path]) -> None:
    first, again, other = (a_trainer(roots, seed=seed)[0].model for seed in (3, 3, 4))
    assert_same_tensors(dict(first.state_dict()), dict(again.state_dict()))
    name = next(n for n, p in first.named_parameters() if p.dim() == 4)
    assert not first.state_dict()[name].equal(other.state_dict()[name])


def damaged(learned: Path, to: Path, name: str) -> dict[str, Any]:
    """Return a network to start from, where one number overflowed when it was saved."""
    tensors = load_file(learned / "best.safetensors")
    assert tensors[name].dim() == 1
    tensors[name][1] = torch.inf
    save_file(tensors, to / "damaged.safetensors")
    weights = str(to / "damaged.safetensors")
    return {"name": "deeplabv1_resnet18_slim", "classes": CLASSES, "weights": weights}


def test_statistics_that_are_not_finite_start_anew(
    roots: tuple[Path, Path], learned: Path, tmp_path: Path
) -> None:
    """Else they would be infinite for ever, and so would be those of the running mean."""
    model = damaged(learned, tmp_path, "backbone.bn1.running_var")
    config = as_config(recipe(*roots, model=model, epochs=1, average=0.5))
    with pytest.warns(UserWarning, match="not finite: backbone.bn1 was reset"):
        train(config, tmp_path / "run")
    for name in ("best", "last"):
        trained = load_file(tmp_path / "run" / f"{name}.safetensors")
        assert all(value.isfinite().all() for value in trained.values())


@pytest.mark.parametrize(
    ("name", "frozen", "said"),
    [
        ("backbone.bn1.running_var", True, r"not finite \(backbone.bn1\).* frozen_batchnorm"),
        ("backbone.bn1.weight", False, "are not finite, see backbone.bn1.weight"),
    ],
)
def test_weights_that_no_training_mends_are_refused(
    roots: tuple[Path, Path], learned: Path, tmp_path: Path, name: str, frozen: bool, said: str
) -> None:
    model = damaged(learned, tmp_path, name)
    config = as_config(recipe(*roots, model=model, frozen_batchnorm=frozen))
    with pytest.raises(ValueError, match=said):
        train(config, tmp_path / "run")


def test_training_starts_from_weights_in_a_file(
    learned: Path, roots: tuple[Path, Path], tmp_path: Path
) -> None:
    weights = learned / "best.safetensors"
    name = {"name": "deeplabv1_resnet18_slim", "classes": CLASSES, "weights": str(weights)}
    model = a_trainer(roots, model=name)[0].model
    assert_same_tensors(dict(model.state_dict()), load_file(weights))


def test_bfloat16_trains_on_a_cpu(roots: tuple[Path, Path], tmp_path: Path) -> None:
    train(as_config(recipe(*roots, epochs=1, precision="bf16-mixed", alphas=[0.0])), tmp_path)
    last = load_file(tmp_path / "last.safetensors")
    floats = [value for value in last.values() if value.is_floating_point()]
    assert {value.dtype for value in floats} == {torch.float32}
    assert all(value.isfinite().all() for value in floats)
    plain = a_trainer(roots)
    half = a_trainer(roots, precision="bf16-mixed")
    losses = [float(trainer.step(x, label, 0.0, 0)) for trainer, x, label in (plain, half)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_training_leaves_global_random_numbers_as_they_were(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    model = {"name": "deeplabv1_resnet18_slim", "classes": CLASSES, "dropout": 0.2}
    config = as_config(recipe(*roots, model=model, epochs=1, batch=6, alphas=[0.0]))
    train(config, tmp_path / "run")
    with pytest.raises(ValueError, match="a training run that differs"):
        train(as_config(recipe(*roots, epochs=2, alphas=[0.0])), tmp_path / "run")
    assert torch.get_rng_state().equal(before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


def test_measuring_the_speed_changes_nothing_else(
    roots: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from selfadapt.train import speed

    monkeypatch.setattr(speed, "DATA_SECONDS", 0.2)
    for measure in (True, False):
        machine = {"measure": measure, "workers": 0, "accelerator": "cpu"}
        config = as_config(recipe(roots[0], None, epochs=1, machine=machine))
        train(config, tmp_path / str(measure))
    one, other = (load_file(tmp_path / f"{m}/last.safetensors") for m in (True, False))
    assert_same_tensors(one, other)
    measured = json.loads((tmp_path / "True/summary.json").read_text())["speed"]
    assert measured["data"] > 0
    assert measured["model"] > 0
    out = capsys.readouterr().out
    assert "data alone" in out
    assert "% of the slower of data and model alone" in out


def finished(*words: Any, launcher: tuple[str, ...] = ()) -> None:
    process = start_cli(*words, launcher=launcher)
    try:
        _, err = process.communicate(timeout=PROCESSES)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        raise
    assert process.returncode == 0, err


@pytest.fixture(scope="module")
def shared_recipe(roots: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose batches can be shared, and the run of one process beside it."""
    folder = tmp_path_factory.mktemp("shared")
    content = recipe(*roots, epochs=2, lr=0.01, frozen_batchnorm=True)
    train(as_config(content), folder / "one")
    return write_recipe(folder / "r.yaml", content)


def assert_like_one_process(run: Path, one: Path) -> None:
    for name in ("last", "best"):
        shared, alone = (load_file(folder / f"{name}.safetensors") for folder in (run, one))
        assert shared.keys() == alone.keys()
        for key in alone:
            assert torch.allclose(shared[key], alone[key], atol=1e-5), key
    assert table(run) == pytest.approx(table(one), abs=1e-3)
    losses = [[float(row["loss"]) for row in rows(folder / "log.csv")] for folder in (run, one)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert json.loads((run / "summary.json").read_text())["processes"] == 2


def test_two_processes_train_as_one(shared_recipe: Path, tmp_path: Path) -> None:
    words = ("--machine.devices", 2, "--frozen_batchnorm", "true")
    finished("train", shared_recipe, "-o", tmp_path / "run", *words)
    assert_like_one_process(tmp_path / "run", shared_recipe.parent / "one")


def test_tensorboard_has_every_score_of_a_run_that_was_finished_twice(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = as_config(recipe(*roots, epochs=2, batch=13, alphas=[0.0, 0.5]))
    for _ in range(2):
        train(config, tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {
        (event.step, alpha): event.value
        for alpha in (0.0, 0.5)
        for event in events.Scalars(f"mIoU/alpha_{alpha:g}")
    }
    assert found == pytest.approx(table(tmp_path), abs=1e-5)


def test_torchrun_trains_as_one_process(shared_recipe: Path, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    finished("train", shared_recipe, "-o", tmp_path / "run", launcher=launcher)
    assert_like_one_process(tmp_path / "run", shared_recipe.parent / "one")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_a_process_that_is_killed_ends_the_others_in_a_line(
    shared_recipe: Path, tmp_path: Path
) -> None:
    content = {**yaml.safe_load(shared_recipe.read_text()), "epochs": 500, "save_every": 1}
    path, run = write_recipe(tmp_path / "r.yaml", content), tmp_path / "run"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = start_cli("train", path, "-o", run, launcher=launcher)
    while not (run / "log.csv").exists() or len(rows(run / "log.csv")) < 2:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode
    assert "selfadapt train: another process of this training ended" in err
    assert "continues from the last saved state" in err
    assert "RuntimeError: [" not in err
    os.close(locked(run))  # nobody trains here any more
    assert read_state(run / "state.safetensors")[0].step > 0


def test_the_loss_of_two_processes_is_over_all_their_pixels(roots: tuple[Path, Path]) -> None:
    """A stand-in for two processes, of which the other has many more labelled pixels."""
    trainer, x, label = a_trainer(roots, frozen_batchnorm=True)
    alone = float(trainer.step(x, label, 0.0, 0))
    pixels = int((label != IGNORE).sum())

    class TwoProcesses:
        world_size, global_rank = 2, 0
        backward = staticmethod(lambda loss: loss.backward())

        @staticmethod
        def all_reduce(number: Tensor, reduce_op: str) -> Tensor:
            assert reduce_op == "sum"
            return number + 3 * pixels

    trainer.fabric = TwoProcesses()
    assert float(trainer.step(x, label, 0.0, 0)) == pytest.approx(alone * 2 / 4, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("average", [0.0, 0.5])
def test_processes_with_statistics_of_their_own_score_the_network_that_is_saved(
    roots: tuple[Path, Path], tmp_path: Path, average: float
) -> None:
    content = recipe(*roots, epochs=2, alphas=[0.0, 0.5], average=average)
    path = write_recipe(tmp_path / "r.yaml", content)
    finished("train", path, "-o", tmp_path / "run", "--machine.devices", 2)
    scores = table(tmp_path / "run")
    for saved in (tmp_path / "run").glob("epoch_*"):
        model = selfadapt.load_model(saved)
        for alpha in (0.0, 0.5):
            expected = scored(model, roots[1], alpha)
            assert scores[int(saved.stem[6:]), alpha] == pytest.approx(expected, abs=2e-4)


@pytest.mark.slow
def test_a_batch_that_processes_cannot_share_is_refused(
    shared_recipe: Path, tmp_path: Path
) -> None:
    words = ("--machine.devices", 2, "--batch", 3)
    process = start_cli("train", shared_recipe, "-o", tmp_path / "run", *words)
    _, err = process.communicate(timeout=PROCESSES)
    assert process.returncode == 2
    assert "batch must be a multiple of the 2 processes that share it, got 3" in err
    assert "Traceback" not in err


def test_a_loss_that_is_no_number_ends_the_run(
    roots: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    path = write_recipe(tmp_path / "r.yaml", recipe(*roots, epochs=5, alphas=[0.0]))
    assert run_cli("train", path, "-o", tmp_path / "run", "--lr", 1000, "--batch", 4) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    said = err.splitlines()[-1]
    assert "the loss is " in said
    assert "the learning rate may be too high (lr 1000.0)" in said
    assert "the last saved state is kept" in said
    state, tensors = read_state(tmp_path / "run/state.safetensors")
    assert np.isfinite(state.losses).all()
    assert all(value.isfinite().all() for name, value in tensors.items() if "weight" in name)


@pytest.mark.parametrize("fault", ["image", "label"])
def test_a_run_goes_on_once_a_broken_file_is_repaired(
    tmp_path: Path, capsys: Any, fault: str
) -> None:
    root = write_domain(tmp_path / "source", 13, 1)
    path = write_recipe(tmp_path / "r.yaml", recipe(root, None, epochs=1, batch=2, save_every=2))
    order = [image for step in BatchOrder(13, 2, 0).steps(0, 6) for _, image in step]
    broken = root / f"{fault}s/{order[7]:02}.png"  # of step 4
    content = broken.read_bytes()
    if fault == "image":
        broken.write_bytes(content[: len(content) // 2])
    else:
        Image.fromarray(np.full((64, 96), 3, np.uint8)).save(broken)
    assert run_cli("train", path, "-o", tmp_path / "run") == 2
    err = capsys.readouterr().err
    assert str(broken) in err.splitlines()[-1]
    assert "Traceback" not in err
    if fault == "label":
        assert "holds id 3, but the ids of folder/all go from 0 to 2" in err
    broken.write_bytes(content)
    assert run_cli("train", path, "-o", tmp_path / "run") == 0
    assert "going on after step 2 of 6" in capsys.readouterr().out
    train(as_config(recipe(root, None, epochs=1, batch=2)), tmp_path / "whole")
    one, other = (load_file(tmp_path / f"{run}/last.safetensors") for run in ("run", "whole"))
    assert_same_tensors(one, other)


def test_the_colours_of_the_domains_tell_the_class() -> None:
    assert np.abs(COLORS[:, None] - COLORS).sum(-1)[~np.eye(3, dtype=bool)].min() > 100


def test_labels_of_other_classes_are_mapped_by_name(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    """Nineteen classes, of which the labels have three."""
    model = {"name": "deeplabv1_resnet18_slim", "classes": "cityscapes-19"}
    train(as_config(recipe(roots[0], None, model=model, epochs=6)), tmp_path)
    saved = selfadapt.load_model(tmp_path / "last.safetensors")
    names = np.array(saved.spec.classes)
    image = Image.open(roots[1] / "images/00.png")
    label = selfadapt.create_method("source", saved)(image).label.numpy()
    assert set(names[np.unique(label)]) <= set(CLASSES)
