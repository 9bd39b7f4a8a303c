"""What an evaluation costs beside the method: metrics, journal and progress; and its memory.

    python benchmarks/bookkeeping.py
    python benchmarks/bookkeeping.py --rounds 1 --images 1000 --height 64 --width 128

One image is segmented by ``san`` again and again, by DeepLabv1 ResNet-50 with fresh weights: in an
evaluation, and in the same loop without a row for it, in turn. An evaluation notes rows while the
next image is segmented, so it is the difference that counts, not the time outside of the method.
"""

import argparse
import resource
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image

from selfadapt import create_model
from selfadapt.data import Sample
from selfadapt.devices import find_device
from selfadapt.images import load_image
from selfadapt.journal import Journal
from selfadapt.methods import Segments
from selfadapt.protocol import DomainConfig, EvaluateConfig, MethodConfig, NetworkConfig
from selfadapt.protocol.domains import Domain
from selfadapt.protocol.evaluate import Evaluation, Loaded
from selfadapt.protocol.rows import Key
from selfadapt.protocol.trials import Trial, trial_of


class OneImage(Evaluation):
    """Segments the same image for every number, which is in memory."""

    loaded: Loaded

    def load(self, domain: Domain, number: int) -> Loaded:
        """Return the image."""
        return self.loaded

    def segment(self, trial: Trial) -> None:
        """Segment all images of the target, and note nothing."""
        for _, loaded in self._read(self.domains[1], range(len(self.domains[1].data))):
            assert isinstance(loaded, Loaded)
            self.predict(self.domains[1], loaded, trial)


def main() -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=100, help="images of a round")
    parser.add_argument("--rounds", type=int, default=9)
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
    methods: dict[str, Segments] = {}
    sample = Sample("one", Image.fromarray(picture), label)
    true = torch.from_numpy(label)
    loaded = Loaded(sample, image, true.pin_memory() if device.type == "cuda" else true)
    alone, every, memory = [], [], []
    for _ in range(1 + args.rounds):
        with TemporaryDirectory() as folder, closing(Journal(Path(folder), Key)) as journal:
            run = OneImage(config, domains, models, journal)
            run.loaded, run._methods = loaded, methods
            alone.append(milliseconds(run.segment, trial) / args.images)
            with run.progress() as progress:
                whole = milliseconds(run.measure, domains[1], [trial], "rows", progress)
            every.append(whole / args.images)
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    method, total = median(alone[1:]), median(every[1:])  # the first prepares
    print(f"san {method:.2f} ms, with its row {total:.2f} ms, at {args.width}x{args.height}")
    print(f"metrics, journal and progress: {total - method:.2f} ms, ", end="")
    print(f"{100 * (total / method - 1):.1f} %, medians of {args.rounds} rounds")
    grown, images = memory[-1] - memory[0], args.rounds * args.images
    print(f"memory grew by {grown:.1f} MiB over {images} images")


def milliseconds(work: Callable[..., object], *args: object) -> float:
    """Return what some work takes."""
    start = time.perf_counter()
    work(*args)
    return 1000 * (time.perf_counter() - start)


if __name__ == "__main__":
    main()
