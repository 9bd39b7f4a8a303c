"""Accuracy, calibration and time of any methods on a domain.

    python benchmarks/street.py DOMAIN --model FILE -o rows.csv
    python benchmarks/street.py DOMAIN --weights FILE --run san --run tent:lr=0.01,alpha=1
    python benchmarks/street.py streets/night --model streets --limit 50

DOMAIN is a folder that holds ``images/NAME.jpg`` and ``labels/NAME.png`` (Cityscapes train ids), or
a look of the built-in world. Classes of a folder are merged into the space a CARLA-trained network
can know, ``carla-13``; its images are enlarged to twice their size by PIL, and probabilities are
brought back before they are scored.
"""

import argparse
import ast
import csv
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from selfadapt import METHODS, create_method, create_model, open_model
from selfadapt.data import Dataset, open_dataset
from selfadapt.images import load_image, rescale
from selfadapt.methods import Segments
from selfadapt.metrics import Score, to_class_space


def open_network(place: str | None, weights: Path | None, dilation: str = "released") -> Any:
    """Return a trained network: what ``selfadapt train`` saved, or a DeepLabv1 with weights."""
    if (place is None) == (weights is None):
        raise SystemExit("give either --model or --weights")
    if place is not None:
        return open_model(place)
    return create_model("deeplabv1_resnet50", weights=weights, style="caffe", dilation=dilation)


def open_domain(domain: str, limit: int | None) -> tuple[Dataset, float]:
    """Return a domain, and how much its images are enlarged."""
    name, _, look = domain.partition("/")
    if name == "streets" and look:
        return open_dataset("streets", split=look, space="streets-9", limit=limit), 1
    folder = open_dataset(
        "folder", domain, split="all", classes="cityscapes-19", space="carla-13", limit=limit
    )
    return folder, 2


def read_pairs(dataset: Dataset, scale: float, every: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each image ``(3, H, W)`` with its label at the stored size."""
    for number in range(0, len(dataset), every):
        sample = dataset[number]
        image = load_image(rescale(sample.image, scale))
        yield image, torch.from_numpy(sample.label).long()


def parse_run(run: str) -> tuple[str, dict[str, Any]]:
    """Split ``METHOD:key=value,...`` into a method's name and its settings."""
    name, _, text = run.partition(":")
    pairs = [pair.split("=") for pair in text.split(",") if pair]
    words = {"auto", "paper", "official"}
    return name, {k: v if v in words else ast.literal_eval(v.replace(";", ",")) for k, v in pairs}


def evaluate(
    methods: dict[str, Segments],
    classes: Sequence[str],
    dataset: Dataset,
    pairs: Iterator[tuple[Tensor, Tensor]],
) -> tuple[dict[str, Score], dict[str, list[float]]]:
    """Run every method on every image; return the scores and the seconds by method."""
    scores = {name: Score(len(dataset.space.names)) for name in methods}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for image, label in pairs:
        for name, method in methods.items():
            result = method(image)
            label = label.to(result.probs.device)
            probs = F.interpolate(result.probs[None], label.shape, mode="bilinear")[0]
            scores[name].add(label, to_class_space(probs, classes, dataset.space))
            seconds[name].append(result.seconds)
    return scores, seconds


def main() -> None:
    """Print a table and write it as CSV."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("domain")
    parser.add_argument("--model", help="what selfadapt train saved, or streets")
    parser.add_argument("--weights", type=Path, help="weights of a caffe-style DeepLabv1 ResNet-50")
    parser.add_argument("--dilation", default="released")
    parser.add_argument(
        "--run",
        action="append",
        default=[],
        help="METHOD or METHOD:key=value,...; in lists ; for a comma; default: all",
    )
    parser.add_argument("--every", type=int, default=1, help="take every N-th image only")
    parser.add_argument("--limit", type=int, help="take the first N images only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    model = open_network(args.model, args.weights, args.dilation)
    model.to(args.device)
    methods = {}
    for run in ["source", *(run for run in args.run or METHODS if run != "source")]:
        name, settings = parse_run(run)
        methods[run] = create_method(name, model, compare=False, **settings)
    dataset, scale = open_domain(args.domain, args.limit)
    start = time.perf_counter()
    scores, seconds = evaluate(
        methods, model.spec.classes, dataset, read_pairs(dataset, scale, args.every)
    )
    baseline = torch.tensor(scores["source"].image_iou)
    rows = [["method", "mIoU", "ECE", "images made worse", "ms"]]
    for name, score in scores.items():
        worse = (torch.tensor(score.image_iou) < baseline).float().mean()
        numbers = [100 * score.mean_iou, 100 * score.ece, 100 * float(worse)]
        milliseconds = float(np.median(seconds[name])) * 1000
        rows.append([name, *(f"{n:.2f}" for n in numbers), f"{milliseconds:.0f}"])
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(f"{len(baseline)} images of {dataset.name}, {time.perf_counter() - start:.0f} s")
    if args.output:
        with args.output.open("w", newline="") as file:
            csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main()
