"""Accuracy, calibration and time of any methods on a folder of images with labels.

    python benchmarks/street.py DOMAIN --weights FILE -o rows.csv
    python benchmarks/street.py DOMAIN --weights FILE --run san --run tent:lr=0.01,alpha=1

DOMAIN holds ``images/NAME.jpg`` and ``labels/NAME.png`` (Cityscapes train ids). Classes are merged
into the space a CARLA-trained network can know: riders are persons, all vehicles are cars. Images
are enlarged to twice their size by PIL, probabilities are brought back before they are scored.
"""

import argparse
import ast
import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from selfadapt import METHODS, create_method, create_model
from selfadapt.images import load_image
from selfadapt.methods import Segments
from selfadapt.metrics import calibration_bins, confusion_matrix, ece, iou, merge_classes

MERGES = {12: 11, 14: 13, 15: 13, 16: 13, 17: 13, 18: 13}
ENLARGE = 2


class Score:
    """What one method scored over the images so far."""

    def __init__(self) -> None:
        self.confusion = torch.zeros(19, 19, dtype=torch.int64)
        self.bins = torch.zeros(3, 10, dtype=torch.float64)
        self.image_iou: list[float] = []
        self.seconds: list[float] = []

    def add(self, label: Tensor, probs: Tensor, seconds: float) -> None:
        """Count one image."""
        probs = F.interpolate(probs[None], label.shape, mode="bilinear")[0]
        probs = merge_classes(probs, MERGES)
        confusion = confusion_matrix(label, probs.argmax(dim=0), 19).cpu()
        self.confusion += confusion
        self.bins += calibration_bins(label, probs).cpu()
        self.image_iou.append(float(iou(confusion).nanmean()))
        self.seconds.append(seconds)


def read_pairs(root: Path, device: str, every: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each enlarged image ``(3, H, W)`` with its label at the stored size."""
    paths = sorted((root / "images").iterdir())[::every]
    if not paths:
        raise SystemExit(f"there are no images in {root / 'images'}")
    for path in paths:
        with Image.open(path) as picture:
            size = (picture.width * ENLARGE, picture.height * ENLARGE)
            image = load_image(picture.convert("RGB").resize(size, Image.Resampling.BILINEAR))
        label = torch.from_numpy(np.array(Image.open(root / "labels" / f"{path.stem}.png")))
        label = label.long().to(device)
        for old, new in MERGES.items():
            label[label == old] = new
        yield image.to(device), label


def parse_run(run: str) -> tuple[str, dict[str, Any]]:
    """Split ``METHOD:key=value,...`` into a method's name and its settings."""
    name, _, text = run.partition(":")
    pairs = [pair.split("=") for pair in text.split(",") if pair]
    words = {"paper", "official"}
    return name, {k: v if v in words else ast.literal_eval(v) for k, v in pairs}


def evaluate(
    methods: dict[str, Segments], pairs: Iterator[tuple[Tensor, Tensor]]
) -> dict[str, Score]:
    """Run every method on every image."""
    scores = {name: Score() for name in methods}
    for image, label in pairs:
        for name, method in methods.items():
            result = method(image)
            scores[name].add(label, result.probs, result.seconds)
    return scores


def main() -> None:
    """Print a table and write it as CSV."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("domain", type=Path)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--dilation", default="released")
    parser.add_argument(
        "--run", action="append", default=[], help="METHOD or METHOD:key=value,...; default: all"
    )
    parser.add_argument("--every", type=int, default=1, help="take every N-th image only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    model = create_model(
        "deeplabv1_resnet50", style="caffe", dilation=args.dilation, weights=args.weights
    ).to(args.device)
    runs = ["source", *(run for run in args.run or METHODS if run != "source")]
    methods = {}
    for run in runs:
        name, settings = parse_run(run)
        methods[run] = create_method(name, model, compare=False, **settings)
    start = time.perf_counter()
    scores = evaluate(methods, read_pairs(args.domain, args.device, args.every))
    baseline = torch.tensor(scores["source"].image_iou)
    rows = [["method", "mIoU", "ECE", "images made worse", "ms"]]
    for name, score in scores.items():
        worse = (torch.tensor(score.image_iou) < baseline).float().mean()
        mean_iou = float(iou(score.confusion).nanmean())
        numbers = [100 * mean_iou, 100 * ece(score.bins), 100 * float(worse)]
        milliseconds = float(np.median(score.seconds)) * 1000
        rows.append([name, *(f"{n:.2f}" for n in numbers), f"{milliseconds:.0f}"])
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(f"{len(baseline)} images of {args.domain.name}, {time.perf_counter() - start:.0f} s")
    if args.output:
        with args.output.open("w", newline="") as file:
            csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main()
