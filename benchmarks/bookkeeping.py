"""What an evaluation costs beside the method: metrics, journal and progress; and its memory.

    python benchmarks/bookkeeping.py
    python benchmarks/bookkeeping.py --images 1000 --height 64 --width 128

One image is segmented by ``san`` again and again, by DeepLabv1 ResNet-50 with fresh weights: alone,
in an evaluation, and alone once more. An evaluation notes rows while the next image is segmented,
so it is the difference that counts, not the time outside of the method.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from selfadapt import create_model
from selfadapt.data import Sample
from selfadapt.devices import find_device
from selfadapt.images import load_image
from selfadapt.journal import Journal
from selfadapt.protocol import DomainConfig, EvaluateConfig, MethodConfig, NetworkConfig
from selfadapt.protocol.domains import Domain
from selfadapt.protocol.evaluate import Evaluation, Loaded
from selfadapt.protocol.rows import Key
from selfadapt.protocol.trials import trial_of


class OneImage(Evaluation):
    """Segments the same image for every number, which is in memory."""

    loaded: Loaded

    def load(self, domain: Domain, number: int) -> Loaded:
        """Return the image."""
        return self.loaded


def main() -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--model", default="deeplabv1_resnet50")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--plain", action="store_true", help="segment without shortcuts")
    args = parser.parse_args()
    device = find_device(args.device)
    look = {"dataset": "streets", "limit": args.images}
    config = EvaluateConfig(
        networks={"net": NetworkConfig(place=args.model)},
        validation=DomainConfig(**look, split="dusk"),
        targets=[DomainConfig(**look, split="night")],
        methods=[MethodConfig(method="san", settings={"fast": False} if args.plain else {})],
    )
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 255, (args.height, args.width, 3), np.uint8)
    label = rng.integers(0, 19, (args.height, args.width), np.uint8)
    image = load_image(Image.fromarray(picture))
    trial = trial_of(config, config.methods[0])
    domains = [Domain(one, one.open(config.space)) for one in config.domains]
    models = {"net": create_model(args.model).to(device)}
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder), Key)
        run = OneImage(config, domains, models, journal)
        sample = Sample("one", Image.fromarray(picture), label)
        true = torch.from_numpy(label)
        run.loaded = Loaded(sample, image, true.pin_memory() if device.type == "cuda" else true)
        with run.progress() as progress:
            run.measure(domains[0], [trial], "warm-up", progress)
        alone = milliseconds(run.predict, domains[1], run.loaded, trial, times=args.images)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with run.progress() as progress:
            every = milliseconds(run.measure, domains[1], [trial], "measured", progress)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        again = milliseconds(run.predict, domains[1], run.loaded, trial, times=args.images)
    total, method = every / args.images, (alone + again) / 2
    print(f"san {alone:.2f} and {again:.2f} ms for an image of {args.width}x{args.height}")
    print(f"in an evaluation {total:.2f} ms: {total - method:.2f} ms or ", end="")
    print(f"{100 * (total / method - 1):.1f} % for metrics, journal and progress")
    print(f"memory grew by {(after - before) / 1024:.1f} MiB over {args.images} images")


def milliseconds(work: Callable[..., object], *args: object, times: int = 1) -> float:
    """Return what some work takes, on average over some times."""
    start = time.perf_counter()
    for _ in range(times):
        work(*args)
    return 1000 * (time.perf_counter() - start) / times


if __name__ == "__main__":
    main()
