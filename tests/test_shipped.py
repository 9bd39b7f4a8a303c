"""The network that comes with the package: what it is, what it can do, and how it was made."""

import csv
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentParser

from selfadapt import create_method, open_model
from selfadapt.data import open_dataset
from selfadapt.images import load_image
from selfadapt.labels import STREETS_9
from selfadapt.metrics import Score
from selfadapt.recipes import find_recipe
from selfadapt.streets import TARGETS
from selfadapt.train import MachineConfig, TrainConfig
from selfadapt.train.fabric import make_fabric
from selfadapt.train.folder import TrainFolder
from selfadapt.train.loop import TrainingRun

WEIGHTS = Path(str(files("selfadapt") / "weights"))


def mean_iou(look: str, alpha: float, number: int = 2) -> float:
    method = create_method("san", open_model("streets"), alpha=alpha, compare=False)
    score = Score(len(STREETS_9))
    domain = open_dataset("streets", split=look, space="streets-9", limit=number)
    for sample in (domain[index] for index in range(number)):
        label = torch.from_numpy(sample.label).long()
        score.add(label, method(load_image(sample.image)).probs)
    return score.mean_iou


def test_it_is_small_and_keeps_its_statistics_in_32_bits() -> None:
    assert (WEIGHTS / "streets.safetensors").stat().st_size <= 6_000_000
    model = open_model("streets")
    assert model.spec.classes == STREETS_9
    assert model.spec.name == "deeplabv1_resnet18_slim"
    assert {value.dtype for name, value in model.named_buffers() if "running" in name} == {
        torch.float32
    }


def test_it_knows_the_streets_by_day() -> None:
    assert mean_iou("day", 0.0) > 0.65


@pytest.mark.parametrize("look", TARGETS)
def test_san_helps_on_every_target(look: str) -> None:
    assert mean_iou(look, 0.4) > mean_iou(look, 0.0) + 0.01


def test_its_recipe_gives_the_recorded_curve(tmp_path: Path) -> None:
    recorded = next(csv.DictReader((WEIGHTS / "streets.csv").read_text().splitlines()))
    parser = ArgumentParser()
    parser.add_class_arguments(TrainConfig)
    content = parser.instantiate(parser.parse_path(str(find_recipe("streets", "train"))))
    machine = MachineConfig(accelerator="cpu", workers=0, measure=False)
    config = replace(TrainConfig(**vars(content)), machine=machine)
    source = config.source.open(config.model.space)
    with torch.random.fork_rng():
        run = TrainingRun(config, TrainFolder(tmp_path), source, None, make_fabric(config))
        run.start(overwrite=False)
        run.trainer.train_mode()
        losses = []
        for x, label in run.inputs(0, int(recorded["step"])):
            losses.append(float(run.trainer.step(x, label, run.lr, run.state.step)))
            run.state.step += 1
    assert sum(losses) / len(losses) == pytest.approx(float(recorded["loss"]), rel=0.02)
    assert run.lr == pytest.approx(float(recorded["lr"]), rel=1e-4)
