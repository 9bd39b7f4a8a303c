"""Images per second of ``selfadapt predict`` on a folder of JPEGs, and which stage bounds them.

    python benchmarks/throughput.py
    python benchmarks/throughput.py --images photos --methods san --outputs label --seconds 10

Each stage is measured alone, with all cores, and then the whole, on images of one size:

    decode      threads read JPEGs
    transfer    an image to the device, its label and confidence back
    compute     the network, on images that are on the device already
    encode      threads write the outputs

Decoding and encoding share the cores: together they cannot reach what each reaches alone. That
bound is ``cores``, from the CPU time of both. The network is a DeepLabv1 ResNet-50 of 19 classes
with random weights, whose BatchNorm statistics are those of the images.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from selfadapt import create_method, create_model
from selfadapt.batches import pinned
from selfadapt.devices import find_device, num_cores
from selfadapt.images import read_image, rescale
from selfadapt.predict import DEFAULT, masks_of, predict, write_result
from selfadapt.predict.stream import MAX_BATCH
from selfadapt.prefetch import prefetch
from selfadapt.streets import render

OUTPUT_SETS = {"label": ("label",), "all": DEFAULT}
STAGES = ("decode", "transfer", "compute", "encode")


def make_images(folder: Path, number: int, width: int) -> list[Path]:
    """Write streets at dusk with the noise of a camera as JPEGs of 2:1."""

    def make(seed: int) -> Path:
        path = folder / f"{seed:04}.jpg"
        picture = Image.fromarray(render("dusk", seed=seed)[0])
        pixels = np.asarray(rescale(picture, width / picture.width)).astype(np.float32)
        noise = np.random.default_rng(seed).normal(0, 3, pixels.shape)
        Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8)).save(path, quality=90)
        return path

    with ThreadPoolExecutor(num_cores()) as pool:
        return list(pool.map(make, range(number)))


def rate(work: Iterator[Any], seconds: float, warm_up: int = 0) -> float:
    """Return how many items a second an iterator gives, over a time after some first items."""
    for _ in range(warm_up):
        next(work)
    number, start = 0, time.perf_counter()
    for _ in work:
        number += 1
        if time.perf_counter() - start >= seconds:
            break
    return number / (time.perf_counter() - start)


def in_threads(work: Callable[[Any], Any], items: Sequence[Any], seconds: float) -> float:
    """Return how many items a second all cores do."""
    threads = num_cores()
    with closing(prefetch(work, cycle(items), threads, 2 * threads)) as done:
        return rate(done, seconds, threads)


def cpu_ms(work: Callable[[Any], Any], items: Sequence[Any]) -> float:
    """Return the CPU time of an item on one core in milliseconds."""
    work(items[0])
    start = time.process_time()
    for item in items[:8]:
        work(item)
    return 1000 * (time.process_time() - start) / len(items[:8])


def transfers(images: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yield images that were copied to the device, and two of their three channels back."""
    kept = [pinned(image, device) for image in images[:MAX_BATCH]]
    for image in cycle(kept):
        there = image.to(device, non_blocking=True)
        there[:2].to("cpu", non_blocking=True)
        _synchronize(device)
        yield there


def computed(method: Any, images: Sequence[Tensor], batch: int) -> Iterator[Tensor]:
    """Yield label and confidence of images that are on the device."""
    results = method.map(cycle(images), batch)
    with closing(results):
        for result in results:
            yield torch.stack([result.label.byte(), (result.confidence * 255).byte()])


def whole(
    method: Any, images: Sequence[Path], folder: Path, outputs: Sequence[str], number: int
) -> float:
    """Return the images a second of ``predict``, from the first file read to the last written."""
    paths = list(islice(cycle(images), number))
    bases = [folder / "out" / f"{index:06}" for index in range(number)]
    start = time.perf_counter()
    for _, outcome in predict(method, paths, bases, outputs=outputs):
        if isinstance(outcome, Exception):
            raise outcome
    seconds = time.perf_counter() - start
    shutil.rmtree(folder / "out")
    return number / seconds


def settle(model: nn.Module, images: Sequence[Tensor]) -> None:
    """Give BatchNorm the statistics of the images, as training would."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in layers:
        layer.momentum = None
    model.train()
    with torch.no_grad():
        small = [image[:, ::4, ::4].float() / 127.5 - 1 for image in images[:8]]
        model(torch.stack(small))
    model.eval()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def row(*cells: object) -> None:
    """Print a line of a table."""
    texts = [f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells]
    print(f"| {' | '.join(texts)} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=Path, help="folder of JPEGs of one size; rendered if none")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--number", type=int, default=32, help="rendered images")
    parser.add_argument("--model", default="deeplabv1_resnet50")
    parser.add_argument("--methods", nargs="+", default=["source", "san", "tta", "self-adapt"])
    parser.add_argument("--outputs", nargs="+", choices=OUTPUT_SETS, default=list(OUTPUT_SETS))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=5, help="of each measurement, about")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    device = find_device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if args.images is None:
            paths = make_images(folder, args.number, args.width)
        else:
            paths = sorted(args.images.glob("*.jpg"))
        pictures = [read_image(path) for path in paths[:32]]
        torch.manual_seed(0)
        model: Any = create_model(args.model, classes=19)
        settle(model, pictures)
        model.to(device)
        height, width = pictures[0].shape[-2:]
        megabytes = sum(path.stat().st_size for path in paths) / len(paths) / 1e6
        print(f"{width}x{height}, JPEGs of {megabytes:.2f} MB, {args.model}, {name}, ", end="")
        print(f"{num_cores()} cores, torch {torch.__version__}\n")
        measure(args, paths, pictures, model, device, folder)


def measure(
    args: argparse.Namespace, paths: Sequence[Path], pictures: Sequence[Tensor], model: Any,
    device: torch.device, folder: Path,
) -> None:  # fmt: skip
    """Measure the stages and the whole, and print them."""
    names, write_numbers = tuple(f"class {index}" for index in range(19)), count()
    there = [picture.to(device) for picture in pictures]
    methods: dict[str, Any] = {
        name: create_method(name, model, compare=False) for name in args.methods
    }
    kept = [masks_of(methods[args.methods[0]](picture), names) for picture in pictures[:8]]

    row("compute, images/s, by images at a time", *args.batches, "from main memory, as in predict")
    row(*["---"] * (2 + len(args.batches)))
    best: dict[str, float] = {}
    for name, method in methods.items():
        takes_batches = method.takes_batches and device.type == "cuda"
        default = MAX_BATCH if takes_batches else 1
        rates: dict[int, float] = {}
        for batch in dict.fromkeys([default, *(args.batches if method.takes_batches else [1])]):
            rates[batch] = rate(computed(method, there, batch), args.seconds / 2, 4 * batch)
        best[name] = rates[default]
        from_memory = rate(computed(method, pictures, default), args.seconds / 2, 4 * default)
        row(name, *(rates.get(batch, "") for batch in args.batches), from_memory)

    encoded: dict[str, float] = {}
    spent = {"decode": cpu_ms(read_image, paths)}
    sizes = {"decode": float(paths[0].stat().st_size)}
    decode = in_threads(read_image, paths, args.seconds)
    transfer = rate(transfers(pictures, device), args.seconds / 2, 3)
    for key in args.outputs:

        def write(index: int, outputs: Sequence[str] = OUTPUT_SETS[key]) -> None:
            masks, picture = kept[index % len(kept)], pictures[index % len(kept)]
            masks.shares()
            base = folder / "out" / f"{next(write_numbers) % 2000:06}"
            write_result(masks, picture, base, names, outputs)

        spent[key] = cpu_ms(write, range(8))
        files = list((folder / "out").iterdir())
        sizes[key] = sum(file.stat().st_size for file in files) * len(OUTPUT_SETS[key]) / len(files)
        encoded[key] = in_threads(write, range(64), args.seconds)
        shutil.rmtree(folder / "out")

    print()
    row("an image", "ms on one core", "MB of files")
    row("---", "---", "---")
    for key, ms in spent.items():
        text = key if key == "decode" else f"encode, outputs: {key}"
        row(text, ms, f"{sizes[key] / 1e6:.2f}")

    print("\nimages/s:\n")
    row("method", "outputs", *STAGES, "cores", "slowest stage", "whole", "of the slowest stage")
    row(*["---"] * (6 + len(STAGES)))
    for name, method in methods.items():
        for key in args.outputs:
            rates_of = dict(zip(STAGES, (decode, transfer, best[name], encoded[key]), strict=True))
            slowest = min(rates_of, key=lambda stage: rates_of[stage])
            cores = 1000 * num_cores() / (spent["decode"] + spent[key])
            number = max(2 * MAX_BATCH, int(rates_of[slowest] * args.seconds))
            number -= number % MAX_BATCH
            whole(method, paths, folder, OUTPUT_SETS[key], 3 * MAX_BATCH)  # allocates memory
            together = whole(method, paths, folder, OUTPUT_SETS[key], number)
            share = f"{100 * together / rates_of[slowest]:.0f} %"
            row(name, key, *rates_of.values(), cores, slowest, together, share)


if __name__ == "__main__":
    main()
