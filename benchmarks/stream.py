"""Seconds of ``selfadapt predict`` on a folder, streaming against one image after the other.

    python benchmarks/stream.py
    python benchmarks/stream.py --images 48 --width 2048 --method self-adapt --device cuda

The images are rendered streets, segmented by the network that comes with the package. One by one,
an image is read, segmented and written before the next, by the same functions. Both are run in
turn, and the medians are compared.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from selfadapt import create_method, open_model
from selfadapt.devices import find_device
from selfadapt.images import read_image, rescale
from selfadapt.methods import Segments
from selfadapt.predict import predict, write_result
from selfadapt.streets import render

Paths = Sequence[Path]


def make_images(folder: Path, number: int, width: int) -> Paths:
    """Render streets at night into a folder."""
    paths = [folder / f"{seed:04}.png" for seed in range(number)]
    for seed, path in enumerate(paths):
        picture = Image.fromarray(render("night", seed=seed)[0])
        rescale(picture, width / picture.width).save(path)
    return paths


def one_by_one(method: Segments, images: Paths, bases: Paths, classes: Sequence[str]) -> None:
    """Do all of an image before the next."""
    for path, base in zip(images, bases, strict=True):
        image = read_image(path)
        write_result(method(image), image, base, classes)


def streaming(method: Segments, images: Paths, bases: Paths, classes: Sequence[str]) -> None:
    """Let reading, segmenting and writing overlap."""
    for _, result in predict(method, images, bases, classes):
        if isinstance(result, Exception):
            raise result


def main() -> None:
    """Print the seconds of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--method", default="san")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    model: Any = open_model("streets").to(find_device(args.device))
    method = create_method(args.method, model, compare=False)
    classes = model.spec.classes
    seconds: dict[str, list[float]] = {"one by one": [], "streaming": []}
    with tempfile.TemporaryDirectory() as folder:
        images = make_images(Path(folder), args.images, args.width)
        method(images[0])
        for _ in range(args.repeats):
            for name, run in (("one by one", one_by_one), ("streaming", streaming)):
                with tempfile.TemporaryDirectory(dir=folder) as output:
                    bases = [Path(output) / image.stem for image in images]
                    start = time.perf_counter()
                    run(method, images, bases, classes)
                    seconds[name].append(time.perf_counter() - start)
    for name, times in seconds.items():
        spread = f"{min(times):.2f} to {max(times):.2f}"
        print(f"{name:10} {statistics.median(times):6.2f} s ({spread})")
    alone, together = map(statistics.median, seconds.values())
    print(f"{alone / together:.2f} times as fast, {args.images} images {args.width} pixels wide")


if __name__ == "__main__":
    main()
