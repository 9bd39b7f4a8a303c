"""How often labels are the same with optimizations as without, image by image.

    python benchmarks/agreement.py DOMAIN --weights FILE --every 17
    python benchmarks/agreement.py streets/night --model streets --limit 3

DOMAIN, --model and --weights are as in ``street.py``. The reference is ``fast=False`` in full
precision, TF32 off. On a CPU there is but one optimization, ``reuse``, and one precision.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from street import open_domain, open_network, read_pairs
from torch import Tensor

from selfadapt import SelfAdapt
from selfadapt.engine import Fast
from selfadapt.engine.settings import Precision
from selfadapt.modes import ModeName


def same(one: Tensor, other: Tensor) -> float:
    """Return the share of labels that are equal, in percent."""
    return 100 * float((one == other).float().mean())


def main() -> None:
    """Print for each mode and precision the share over all images, and that of the worst."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("domain")
    parser.add_argument("--model", help="what selfadapt train saved, or streets")
    parser.add_argument("--weights", type=Path, help="weights of a caffe-style DeepLabv1 ResNet-50")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--every", type=int, default=1, help="take every N-th image only")
    parser.add_argument("--limit", type=int, help="take the first N images only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    model = open_network(args.model, args.weights).to(args.device)
    dataset, scale = open_domain(args.domain, args.limit)
    images = [image for image, _ in read_pairs(dataset, scale, args.every)]
    gpu = args.device.startswith("cuda")
    precisions: tuple[Precision, ...] = ("fp32", "auto", "bf16") if gpu else ("fp32",)
    print(f"labels equal to those of fast=False, {len(images)} images of {dataset.name}, in %")
    for mode in get_args(ModeName):
        create = partial(SelfAdapt, model, mode=mode, steps=args.steps, compare=False)
        plain = create(fast=False)
        expected = [plain(image).label.cpu() for image in images]
        for precision in precisions:
            method = create(fast=Fast(precision=precision))
            shares = [
                same(method(image).label.cpu(), label)
                for image, label in zip(images, expected, strict=True)
            ]
            mean = sum(shares) / len(shares)
            print(f"{mode:9} {precision:5} mean {mean:.3f}, worst image {min(shares):.3f}")


if __name__ == "__main__":
    main()
