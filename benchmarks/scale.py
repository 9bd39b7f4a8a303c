"""Hours of a large run of ``selfadapt predict`` on machines some of which are slow, or fail.

    python benchmarks/scale.py --images 1e9 --rate 60 --machines 200 --price 4
    python benchmarks/scale.py --list 100000

The images are divided into shares (``--shard I/N``), and a machine that is free takes the next. A
machine keeps its speed; some are much slower. A failure costs the time to get a machine, to start
and to repeat the images in flight: the journal keeps the others. ``--rate`` is what
``benchmarks/throughput.py`` prints; the other numbers are assumptions about a cluster, to be set.

With ``--list`` the second line measures what a share takes before its first image, on empty files.
"""

import argparse
import heapq
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from selfadapt import create_method
from selfadapt.predict import FileKey, PredictFolder, PredictRun, find_inputs

IN_FLIGHT = 48
"""Images that a killed process repeats: read ahead, in a batch, or being written."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines, and how unreliable they are."""

    machines: int
    rate: float
    """Images a second of a machine as it should be."""
    spread: float
    """Standard deviation of the logarithm of their speeds."""
    slow: float
    """Share of machines that are much slower."""
    slowdown: float
    """How many times slower these are."""
    mtbf: float
    """Mean hours between failures of a machine."""
    restart: float
    """Minutes from a failure to the next image."""
    start: float
    """Seconds of a share before its first image."""

    def hours(self, images: float, shares: int, rng: np.random.Generator) -> tuple[float, float]:
        """Return the hours of a run until its last image, and those of all machines together."""
        rates = self.rate * np.exp(rng.normal(0, self.spread, self.machines))
        rates[rng.random(self.machines) < self.slow] /= self.slowdown
        free = [(0.0, index) for index in range(self.machines)]  # by the second
        share, busy = images / shares, 0.0
        for _ in range(shares):
            at, index = heapq.heappop(free)
            work = self.start + share / rates[index]
            failures = rng.poisson(work / (3600 * self.mtbf))
            work += failures * (60 * self.restart + IN_FLIGHT / rates[index])
            busy += work
            heapq.heappush(free, (at + work, index))
        return max(free)[0] / 3600, busy / 3600


def simulate(cluster: Cluster, images: float, repeats: int, price: float) -> None:
    """Print what the number of shares does to the time of a run."""
    ideal = images / cluster.rate / cluster.machines / 3600
    print(f"{images:.3g} images, {cluster}")
    print(f"without slow machines and failures: {ideal:.2f} hours\n")
    cost = " cost |" if price else ""
    print("| shares of a machine | hours, median | worst | of the ideal | machine hours |" + cost)
    print("|---|---|---|---|---|" + "---|" * bool(price))
    for each in (1, 4, 16, 64):
        rng = np.random.default_rng(0)
        runs = [cluster.hours(images, each * cluster.machines, rng) for _ in range(repeats)]
        hours, busy = (np.array(values) for values in zip(*runs, strict=True))
        line = f"| {each} | {np.median(hours):.2f} | {hours.max():.2f} | "
        line += f"{100 * ideal / np.median(hours):.0f} % | {np.median(busy):.0f} |"
        print(line + (f" {price * np.median(busy):.0f} |" if price else ""))


def bookkeeping(number: int) -> None:
    """Print the time and memory of a share before its first image."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).eval()
    method = create_method("san", model, compare=False)
    with tempfile.TemporaryDirectory() as temporary:
        images = Path(temporary, "images")
        images.mkdir()
        for index in range(number):
            (images / f"{index:09}.jpg").touch()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.process_time()
        folder = PredictFolder(Path(temporary, "masks"), ("label",))
        inputs = folder.plan(find_inputs([images]), overwrite=False)
        with folder:
            folder.start({"method": "san"}, inputs, overwrite=False)
            journal = folder.journal(FileKey)
            run = PredictRun(folder, journal, method, None, inputs)
            assert len(run._left()) == number
            seconds = time.process_time() - start
            journal.close()
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        record = Path(temporary, "masks", ".predict", "record.json").stat().st_size
    print(f"{number} files, before the first image: {seconds:.1f} s of one core, ", end="")
    print(f"{memory / 2**10:.0f} MB, a record of {record / 1e6:.1f} MB; torch {torch.__version__}")


def main() -> None:
    """Print the table of a run, or what its bookkeeping takes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=float, default=1e6)
    parser.add_argument("--rate", type=float, default=50, help="images a second of a machine")
    parser.add_argument("--machines", type=int, default=8)
    parser.add_argument("--spread", type=float, default=0.05, help="of the speeds of machines")
    parser.add_argument("--slow", type=float, default=0.03, help="share of much slower machines")
    parser.add_argument("--slowdown", type=float, default=3, help="of these")
    parser.add_argument("--mtbf", type=float, default=200, help="hours between failures of one")
    parser.add_argument("--restart", type=float, default=10, help="minutes after a failure")
    parser.add_argument("--start", type=float, default=30, help="seconds at the start of a share")
    parser.add_argument("--price", type=float, default=0, help="of a machine for an hour")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--list", type=int, default=0, metavar="N", help="measure N files instead")
    args = parser.parse_args()
    if args.list:
        bookkeeping(args.list)
        return
    cluster = Cluster(
        machines=args.machines, rate=args.rate, spread=args.spread, slow=args.slow,
        slowdown=args.slowdown, mtbf=args.mtbf, restart=args.restart, start=args.start,
    )  # fmt: skip
    simulate(cluster, args.images, args.repeats, args.price)


if __name__ == "__main__":
    main()
