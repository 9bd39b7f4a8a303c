"""Tiny evaluations: domains in several looks, networks that know a little, and slow scores."""

import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from runs import CLASSES, IGNORE, domain, scene, write_domain
from selfadapt.cli import main
from selfadapt.images import read_image
from selfadapt.method import Method
from selfadapt.methods import create_method
from selfadapt.models.checkpoint import load_model, save_model
from selfadapt.models.create import create_model
from selfadapt.protocol import (
    DomainConfig,
    EvaluateConfig,
    MethodConfig,
    NetworkConfig,
)  # fmt: skip
from selfadapt.protocol import (
    evaluate as run_evaluation,
)
from selfadapt.result import Result

LOOKS = {"val": 0.7, "dim": 0.5, "dark": 0.35}
"""The domains, and what their images are multiplied by: the networks were trained on 1."""
NUM_IMAGES = {"val": 3, "dim": 3, "dark": 2}


class Place(NamedTuple):
    """Where the domains and the networks of a module's tests lie."""

    root: Path
    nets: Path

    def net(self, name: str = "one") -> str:
        return str(self.nets / f"{name}.safetensors")

    def domain(self, name: str, /, **more: Any) -> dict[str, Any]:
        return domain(self.root / name, **more)


def make_place(root: Path) -> Place:
    """Write the domains and the networks."""
    for seed, (name, factor) in enumerate(LOOKS.items(), start=1):
        write_domain(root / name, NUM_IMAGES[name], seed)
        for path in sorted((root / name / "images").iterdir()):
            levels = np.asarray(Image.open(path)) * factor + 20
            Image.fromarray(levels.clip(0, 255).astype(np.uint8)).save(path)
    for name, seed in (("one", 0), ("two", 1)):
        model = create_model("deeplabv1_resnet18_slim", classes=CLASSES)
        model.load_state_dict(_learned(seed))
        save_model(model, root / f"{name}.safetensors")
    return Place(root, root)


def copy_domains(place: Place, to: Path) -> Place:
    """Copy the domains, so that they can be damaged."""
    for name in LOOKS:
        shutil.copytree(place.root / name, to / name)
    return Place(to, place.nets)


@cache
def _learned(seed: int) -> dict[str, torch.Tensor]:
    """Train a network for a moment; it is far from perfect, so that methods differ."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = create_model("deeplabv1_resnet18_slim", classes=CLASSES).train()
        rng = np.random.default_rng(seed)
        scenes = [scene(rng) for _ in range(4)]
        images = torch.stack(
            [torch.from_numpy(image).permute(2, 0, 1) / 255 for image, _ in scenes]
        )
        labels = torch.stack([torch.from_numpy(label).long() for _, label in scenes])
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(10):
            logits = F.interpolate(model((images - 0.45) / 0.22), labels.shape[1:], mode="bilinear")
            optimizer.zero_grad()
            F.cross_entropy(logits, labels).backward()
            optimizer.step()
    return model.state_dict()


def small(place: Place, **changes: Any) -> dict[str, Any]:
    """Return a recipe with one target, which is done in less than a second."""
    base: dict[str, Any] = {
        "networks": {"one": {"place": place.net()}},
        "validation": place.domain("val"),
        "targets": [place.domain("dim")],
        "methods": [
            {"method": "source"},
            {"method": "san", "tune": {"alpha": [0.0, 0.3]}},
        ],
        "classes": CLASSES,
        "pictures": 0,
        "device": "cpu",
    }
    return base | changes


def as_evaluation(content: dict[str, Any]) -> EvaluateConfig:
    """Make the dataclass of a recipe, without the command line."""
    return EvaluateConfig(
        **{
            **content,
            "networks": {n: NetworkConfig(**one) for n, one in content["networks"].items()},
            "validation": DomainConfig(**content["validation"]),
            "targets": [DomainConfig(**one) for one in content["targets"]],
            "methods": [MethodConfig(**one) for one in content["methods"]],
        }
    )


def evaluated(content: dict[str, Any], folder: Path, **how: Any) -> Path:
    return run_evaluation(as_evaluation(content), folder, **how)


def files_of(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def tables_of(folder: Path) -> dict[str, bytes]:
    """Return the tables that must not depend on when and how fast a run was."""
    tables = {path.name: path.read_bytes() for path in (folder / "tables").glob("*.csv")}
    assert len(tables) > 5
    del tables["times.csv"]
    return tables


def num_rows(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in (folder / "rows").glob("*.jsonl"))


# slow scores


class Sample(NamedTuple):
    label: np.ndarray  # (H, W), 255: does not count
    probs: np.ndarray  # (C, H, W)


def slow_ious(samples: Sequence[Sample]) -> list[float]:
    """Return the IoU of each class over all samples together, NaN where it is in no label."""
    ious = []
    for c in range(len(samples[0].probs)):
        both = either = there = 0
        for label, probs in samples:
            true = label == c
            found = (probs.argmax(axis=0) == c) & (label != IGNORE)
            both += int((true & found).sum())
            either += int((true | found).sum())
            there += int(true.sum())
        ious.append(both / either if there else float("nan"))
    return ious


def slow_miou(samples: Sequence[Sample]) -> float:
    ious = [score for score in slow_ious(samples) if score == score]
    return sum(ious) / len(ious) if ious else float("nan")


def slow_accuracy(samples: Sequence[Sample]) -> float:
    right = sum(int((s.probs.argmax(axis=0) == s.label).sum()) for s in samples)
    return right / sum(int((s.label != IGNORE).sum()) for s in samples)


def slow_ece(confidence: np.ndarray, hit: np.ndarray, num_bins: int) -> float:
    """Return the calibration error of some pixels ``(N,)``; a lower edge belongs to its bin."""
    total = 0.0
    for b in range(num_bins):
        last = b == num_bins - 1
        inside = (confidence * num_bins >= b) & (last | (confidence * num_bins < b + 1))
        if inside.any():
            gap = abs(hit[inside].mean() - confidence[inside].mean())
            total += inside.sum() / len(confidence) * gap
    return total


def slow_pooled_ece(samples: Sequence[Sample], num_bins: int) -> float:
    parts = [_pixels(sample, sample.label != IGNORE) for sample in samples]
    return slow_ece(*(np.concatenate(part) for part in zip(*parts, strict=True)), num_bins)


def slow_class_ece(samples: Sequence[Sample]) -> float:
    """Return the paper's error: by class and image, weighted by pixels, mean over classes."""
    errors = []
    for c in range(len(samples[0].probs)):
        sizes = [int((sample.label == c).sum()) for sample in samples]
        if sum(sizes):
            gaps = [
                slow_ece(*_pixels(sample, sample.label == c), 10) if size else 0.0
                for sample, size in zip(samples, sizes, strict=True)
            ]
            errors.append(float(np.average(gaps, weights=sizes)))
    return sum(errors) / len(errors)


def _pixels(sample: Sample, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    confidence = sample.probs.max(axis=0).astype(np.float64)
    hit = sample.probs.argmax(axis=0) == sample.label
    return confidence[which], hit[which]


@cache
def segmented(
    root: Path, nets: tuple[str, ...], method: str, settings: str, scale: float = 1.0
) -> tuple[Sample, ...]:
    """Segment a domain with a method, apart from the protocol; settings are in JSON."""
    networks = [load_model(net) for net in nets]
    model = networks if method == "ensemble" else networks[0]
    segment = create_method(method, model, **json.loads(settings))
    samples = []
    for path in sorted((root / "images").iterdir()):
        picture = Image.open(path).convert("RGB")
        label = np.asarray(Image.open(root / "labels" / path.name))
        if scale != 1:
            size = round(picture.width * scale), round(picture.height * scale)
            picture = picture.resize(size, Image.Resampling.BILINEAR)
        probs = segment(picture).probs[None]
        if scale != 1:
            probs = F.interpolate(probs, label.shape, mode="bilinear", align_corners=False)
        samples.append(Sample(label, probs[0].numpy()))
    return tuple(samples)


def fail_on(patch: pytest.MonkeyPatch, path: Path, method: type[Method], **settings: Any) -> None:
    """Let a method fail on an image, if it has these settings."""
    image, real = read_image(path), Method.__call__

    def segment(self: Method, given: Any, **how: Any) -> Result:
        same = given.shape == image.shape and bool((given == image).all())
        asked = all(getattr(self, name) == value for name, value in settings.items())
        if type(self) is method and same and asked:
            raise RuntimeError("no luck")
        return real(self, given, **how)

    patch.setattr(Method, "__call__", segment)


# processes that are killed


def start_pair(recipe: Path, run: Path, log: Path) -> Any:
    """Start an evaluation in two processes of one group, forked where all is imported already."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["selfadapt.cli"])
    process = context.Process(target=_pair, args=(recipe, run, log))
    process.start()
    return process


def kill_group(process: Any) -> None:
    """End both processes of a pair at once, with the signal that nothing can catch."""
    assert process.is_alive(), "it was done before it was killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def wait_for(condition: Any, process: Any, log: Path, seconds: float = 60) -> None:
    begun = time.monotonic()
    while not condition():
        assert process.is_alive(), log.read_text()
        assert time.monotonic() - begun < seconds, log.read_text()
        time.sleep(0.002)


def _pair(recipe: Path, run: Path, log: Path) -> None:
    os.setpgid(0, 0)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    other = os.fork()
    code = 3
    try:
        main(["evaluate", str(recipe), "-o", str(run), "--shard", "1/2" if other else "2/2"])
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        if other:
            code = code or os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])
        os._exit(code)


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))
