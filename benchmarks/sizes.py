"""Seconds and memory for images of many sizes, which a recording for each size must not slow down.

    python benchmarks/sizes.py
    python benchmarks/sizes.py --images 6 --sizes 3 --steps 1 --model deeplabv1_resnet18_slim

Images of noise, in sizes from 512x256 on that follow each other at random, go through
self-adaptation without optimizations, with all of them, again with the recordings kept, and with
all but recordings.
"""

import argparse
import random
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from selfadapt import Fast, SelfAdapt, create_model
from selfadapt.bench import noise
from selfadapt.devices import find_device


def draw_images(number: int, num_sizes: int) -> list[Tensor]:
    """Return images in random order, as many of each size as of the others."""
    sizes = [(256 + 32 * step, 512 + 48 * step) for step in range(num_sizes)]
    images = [noise(sizes[index % num_sizes]) for index in range(number)]
    random.Random(0).shuffle(images)
    return images


def run(method: SelfAdapt, images: Sequence[Tensor], name: str) -> None:
    """Print what all images take, and the memory in use after each third of them."""
    cuda = next(method.model.parameters()).is_cuda
    memory = []
    start = time.perf_counter()
    for number, image in enumerate(images, 1):
        method(image)
        if cuda and number % max(1, len(images) // 3) == 0:
            memory.append(f"{torch.cuda.memory_reserved() / 2**30:.2f}")
    seconds = time.perf_counter() - start
    print(f"{name:22} {seconds:7.2f} s  {'GB reserved: ' if cuda else ''}{', '.join(memory)}")


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=60)
    parser.add_argument("--sizes", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--model", default="deeplabv1_resnet50")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    device = find_device(args.device)
    model = create_model(args.model).to(device)
    images = [image.to(device) for image in draw_images(args.images, args.sizes)]
    create = partial(SelfAdapt, model, steps=args.steps, compare=False)
    for optimizations in (False, True):
        create(fast=optimizations)(images[0])  # compiles kernels
    run(create(fast=False), images, "without optimizations")
    method = create()
    run(method, images, "with them")
    run(method, images, "the same images again")
    run(create(fast=Fast(graphs=False)), images, "without recordings")


if __name__ == "__main__":
    main()
