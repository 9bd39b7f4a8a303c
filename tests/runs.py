"""Tiny domains and recipes for training runs, and what a run leaves behind."""

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from selfadapt.cli import main
from selfadapt.data import DataConfig
from selfadapt.files import lock
from selfadapt.train import AugmentConfig, MachineConfig, ModelConfig, TrainConfig

CLASSES = ["road", "car", "sky"]
COLORS = np.array([[120, 70, 120], [200, 40, 30], [60, 140, 220]])
IGNORE = 255
WIDTH, HEIGHT = 96, 64
MACHINE = {"measure": False, "workers": 0, "accelerator": "cpu"}


def scene(
    rng: np.random.Generator, width: int = WIDTH, height: int = HEIGHT
) -> tuple[np.ndarray, np.ndarray]:
    """Return an image whose colour is the class, and its label: sky, road, and a few cars."""
    label = np.zeros((height, width), np.uint8)
    label[: int(rng.integers(height // 4, height * 3 // 4))] = 2
    for _ in range(2):
        left, top = rng.integers(0, width * 2 // 3), rng.integers(0, height * 2 // 3)
        label[top : top + height // 3, left : left + width // 3] = 1
    image = COLORS[label] + rng.normal(0, 12, (height, width, 3))
    return image.clip(0, 255).astype(np.uint8), label


def write_domain(
    root: Path, num: int, seed: int, sizes: tuple[tuple[int, int], ...] = ((WIDTH, HEIGHT),)
) -> Path:
    """Write images with labels; each has another number of ignored pixels."""
    rng = np.random.default_rng(seed)
    for kind in ("images", "labels"):
        (root / kind).mkdir(parents=True, exist_ok=True)
    for number in range(num):
        image, label = scene(rng, *sizes[number % len(sizes)])
        label[:, : number * 5 % 40] = IGNORE
        Image.fromarray(image).save(root / f"images/{number:02}.png")
        Image.fromarray(label).save(root / f"labels/{number:02}.png")
    return root


def domain(root: Path, **more: Any) -> dict[str, Any]:
    return {"dataset": "folder", "root": str(root), "split": "all", "classes": CLASSES, **more}


def recipe(source: Path, validation: Path | None, **changes: Any) -> dict[str, Any]:
    """Return a recipe of nine steps, as it is written in YAML; changes are by top-level key."""
    base: dict[str, Any] = {
        "model": {"name": "deeplabv1_resnet18_slim", "classes": CLASSES},
        "source": domain(source),
        "augment": {"crop": [32, 32], "scale": [0.3, 1.0]},
        "epochs": 3,
        "batch": 4,
        "lr": 0.05,
        "alphas": [0.0, 0.1, 0.5, 1.0],
        "machine": MACHINE,
    }
    if validation is not None:
        base["validation"] = domain(validation)
    return base | changes


def as_config(content: dict[str, Any]) -> TrainConfig:
    """Make the dataclass of a recipe, without the command line."""
    content = dict(content)
    kinds = {
        "model": ModelConfig,
        "source": DataConfig,
        "validation": DataConfig,
        "machine": MachineConfig,
    }
    for key, kind in kinds.items():
        if content.get(key) is not None:
            content[key] = kind(**content[key])
    if "augment" in content:
        pairs = {k: tuple(v) if isinstance(v, list) else v for k, v in content["augment"].items()}
        content["augment"] = AugmentConfig(**pairs)
    return TrainConfig(**content)


def write_recipe(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def run_cli(*words: Any) -> int:
    """Run the command line in this process, and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def start_cli(
    *words: Any, launcher: tuple[str, ...] = (), cwd: Path | None = None
) -> "subprocess.Popen[str]":
    """Run the command line in a process of its own, with one thread."""
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "selfadapt", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        start_new_session=True,
    )


def locked(run: Path) -> int:
    """Lock a run as another process would; return the file to close."""
    file = os.open(run / ".lock", os.O_RDWR | os.O_CREAT)
    assert lock(file), "somebody works there"
    return file


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def result_of(folder: Path) -> dict[str, Any]:
    """Return all of a finished run that must not depend on when and how fast it ran."""
    steps = rows(folder / "log.csv")
    return {
        "log": [{key: row[key] for key in row if key != "images_per_s"} for row in steps],
        "validation": rows(folder / "validation.csv"),
        "last": load_file(folder / "last.safetensors"),
        "best": load_file(folder / "best.safetensors"),
        "files": sorted(path.name for path in folder.glob("*.safetensors")),
        "bytes": (folder / "best.safetensors").read_bytes(),
    }


def assert_same_result(one: dict[str, Any], other: dict[str, Any]) -> None:
    for part in ("log", "validation", "files"):
        assert one[part] == other[part], part
    for part in ("last", "best"):
        assert_same_tensors(one[part], other[part])
    assert one["bytes"] == other["bytes"]


def assert_same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not one[name].equal(other[name])]
    assert not different, f"{len(different)} of {len(one)} tensors differ, first {different[:3]}"
