"""Images in tiles against the same images whole: labels that agree, mean IoU, time.

    python benchmarks/scenes.py DOMAIN --weights FILE --tile 641 --every 5

DOMAIN and FILE are those of benchmarks/street.py. The network adapts to the whole image in both
cases, so that only tiles make a difference.
"""

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from street import open_domain, open_network, read_pairs
from torch import Tensor

from selfadapt import SelfAdapt
from selfadapt.baselines import SaNOnly
from selfadapt.scenes import PictureReader, nearest, segment_tiles


def measure(domain: str, weights: Path, tile: int, every: int, device: str) -> None:
    """Print a line for each method."""
    model = open_network(None, weights).to(device)
    methods = {
        "san": SaNOnly(model, compare=False),
        "self-adapt, paper": SelfAdapt(model, mode="paper", compare=False),
        "self-adapt, auto": SelfAdapt(model, compare=False),
    }
    dataset, scale = open_domain(domain, None)
    table = torch.tensor([*range(11), 11, 11, *[12] * 6, *[255] * 237], dtype=torch.uint8)

    def iou(counts: Tensor) -> float:
        hits, truth, predicted = counts
        return float((hits / (truth + predicted - hits).clamp_min(1))[truth > 0].mean())

    for name, method in methods.items():
        agreements, counts, seconds = [], torch.zeros(2, 3, 13), [0.0, 0.0]
        for image, label in read_pairs(dataset, scale, every):
            start = time.perf_counter()
            whole = method(image.to(device)).label.cpu().numpy().astype(np.uint8)
            middle = time.perf_counter()
            with TemporaryDirectory() as folder:
                maps = segment_tiles(method, PictureReader(image), Path(folder) / "work", tile=tile)
                tiles = np.array(maps.label)
            seconds = [
                seconds[0] + middle - start, seconds[1] + time.perf_counter() - middle
            ]  # fmt: skip
            agreements.append(np.mean(whole == tiles))
            size = (label.shape[0], label.shape[1])
            for index, predicted in enumerate((whole, tiles)):
                values = table[torch.from_numpy(nearest(predicted, size)).long()]
                kept = label != 255
                for row, part in enumerate(
                    (label[kept & (values == label)], label[kept], values[kept])
                ):
                    counts[index, row] += torch.bincount(part.long(), minlength=13)[:13]
        num = len(agreements)
        print(
            f"| {name} | {100 * np.mean(agreements):.2f}, {100 * min(agreements):.2f} | "
            f"{100 * iou(counts[0]):.2f} | {100 * iou(counts[1]):.2f} | "
            f"{seconds[0] / num:.2f} s, {seconds[1] / num:.2f} s | {num} images",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("domain")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--tile", type=int, default=641)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    measure(args.domain, args.weights, args.tile, args.every, args.device)
