"""What an evaluation costs beside the method: metrics, journal and progress; and its memory.

    python benchmarks/bookkeeping.py
    python benchmarks/bookkeeping.py --rounds 50 --height 64 --width 128

One image is segmented by ``san`` again and again, by DeepLabv1 ResNet-50 with fresh weights: in an
evaluation, and in the same loop without a row for it, in short turns, for machines are never quiet.
An evaluation notes rows while the next image is segmented, so it is the difference that counts, not
the time outside of the method. Times are from the start of one image to that of the next.
"""

import argparse
import resource
import time
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from selfadapt import create_model
from selfadapt.data import Sample
from selfadapt.devices import find_device
from selfadapt.images import read_image
from selfadapt.journal import Journal
from selfadapt.progress import ProgressBar
from selfadapt.protocol import DomainConfig, EvaluateConfig, MethodConfig, NetworkConfig
from selfadapt.protocol.domains import Domain
from selfadapt.protocol.evaluate import Evaluation
from selfadapt.protocol.rows import TrialKey
from selfadapt.protocol.scorer import Loaded
from selfadapt.protocol.trials import Trial, trial_of
from selfadapt.result import Result


class OneImage(Evaluation):
    """Segments the same image for every number, which is in memory."""

    loaded: Loaded
    starts: list[float]

    def load(self, domain: Domain, number: int) -> Loaded:
        """Return the image."""
        return self.loaded

    def predict(self, domain: Domain, loaded: Loaded, trial: Trial) -> tuple[Tensor, Result]:
        """Segment the image, and remember when."""
        self.starts.append(1000 * time.perf_counter())
        return super().predict(domain, loaded, trial)

    def segment(self, trial: Trial) -> None:
        """Segment all images of the target, and note nothing."""
        for _, loaded in self._read(self.domains[1], range(len(self.domains[1].data))):
            assert isinstance(loaded, Loaded)
            self.predict(self.domains[1], loaded, trial)

    def milliseconds(self, work: Callable[..., None], *args: object) -> float:
        """Return what an image takes in some work, apart from the first, which starts threads."""
        self.starts = []
        work(*args)
        return mean(after - start for start, after in pairwise(self.starts[1:]))


def main() -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=20, help="images of a round")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--model", default="deeplabv1_resnet50")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--plain", action="store_true", help="segment without optimizations")
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
    image, true = read_image(Image.fromarray(picture)), torch.from_numpy(label)
    if device.type == "cuda":
        image, true = image.pin_memory(), true.pin_memory()
    trial = trial_of(config, config.methods[0])
    domains = [Domain(one, one.open(config.space)) for one in config.domains]
    models = {"net": create_model(args.model).to(device)}
    sample = Sample("one", Image.fromarray(picture), label)
    alone, added, memory = [], [], []
    numbers = range(len(domains[1].data))
    with TemporaryDirectory() as folder, closing(Journal(Path(folder), TrialKey)) as journal:
        run = OneImage(config, domains, models, journal)
        run.loaded = Loaded(sample, image, true)
        for _ in range(2 + args.rounds):
            alone.append(run.milliseconds(run.segment, trial))
            with ProgressBar("rows") as progress:
                whole = run.milliseconds(run.measure, domains[1], numbers, [trial], progress)
            added.append(whole - alone[-1])
            journal.done.clear()
            memory.append(megabytes())
    del alone[:2], added[:2], memory[:2]  # which prepare
    method, cost, error = mean(alone), mean(added), stdev(added) / len(added) ** 0.5
    print(f"san at {args.width}x{args.height}: {method:.2f} ms, with a row {method + cost:.2f} ms")
    print(f"metrics, journal and progress: {cost:.3f} ms (standard error {error:.3f}), ", end="")
    print(f"{100 * cost / method:.2f} %; {args.rounds} rounds of {args.images} images")
    grown, images = memory[-1] - memory[0], (args.rounds - 1) * args.images
    print(f"memory grew by {grown[0]:.1f} MiB, on the GPU {grown[1]:.1f}, over {images} images")


def megabytes() -> np.ndarray:
    """Return the memory taken so far, and that on the GPU."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    return np.array([own, torch.cuda.max_memory_reserved()]) / 2**20


if __name__ == "__main__":
    main()
