"""Benchmark: time networks and methods on this machine, with and without optimizations.

For each network and size, one image of noise goes through

    BatchNorm forward    the network as trained, without fused kernels
    SaN forward          one pass with SaN
    TTA                  the views alone
    self-adaptation      in paper mode without optimizations and with all of them, and the real-time
                         preset

Weights are untrained, since time does not depend on them. One-time work, such as compiling kernels
or recording graphs, is reported separately from the median of the following runs.
"""

import csv
import json
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from selfadapt.engine import NO_OPTIMIZATIONS, Fast
from selfadapt.engine.settings import Precision
from selfadapt.files import atomic_write, csv_cell, make_folder
from selfadapt.forecast import image_seconds
from selfadapt.methods import Segments, create_method
from selfadapt.models.create import create_model, open_model
from selfadapt.models.zoo import MODELS
from selfadapt.progress import duration
from selfadapt.version import __version__
from selfadapt.views import Size

NETWORKS = (
    "deeplabv1_resnet50", "deeplabv1_resnet101", "deeplabv3plus_resnet50", "hrnet_w18",
    "upernet_swin_tiny",
)  # fmt: skip
SIZES = ("1280x720", "1920x1080", "2048x1024")
STEPS = (3, 10)
COUNT_SIZE = (256, 512)
"""Image size for counting operations, which are proportional to the number of pixels."""
MATRIX_SIZE = 2048
"""Size of the matrices that the peak rate of a CPU is measured with."""
WARMUP_RUNS = 3
"""Warm-up runs on a GPU: compilation, graph recording, and one more."""


@dataclass(frozen=True)
class Workload:
    """A method with settings to be timed."""

    name: str
    method: str
    settings: dict[str, Any]
    fast: bool | Fast = True

    def create(self, model: nn.Module, **settings: Any) -> Segments:
        """Create the method."""
        settings = {**self.settings, "compare": False, "fast": self.fast, **settings}
        return create_method(self.method, model, **settings)


@dataclass(frozen=True)
class Timing:
    """A row of the table; the fields are the keys of ``bench.json``."""

    network: str
    size: str
    work: str
    ms: float
    spread: float
    """Interquartile range of the runs, in milliseconds."""
    first_ms: float
    """Time of the first run, with one-time work."""
    megabytes: float | None
    tflops: float
    """Operations of convolutions and matrix products per second, in 10^12."""
    of_card: float
    """``tflops`` as a share of the rate of a large matrix product. Convolutions can exceed 1 with
    algorithms that need fewer operations than counted."""
    ratio: float
    """Speed-up over self-adaptation with as many steps and without optimizations."""
    views: float | None = None
    """Share of the time spent on views and pseudo-label."""
    steps: float | None = None
    """Share of the time spent on steps; the rest is the prediction."""


def workloads(
    steps: Sequence[int],
    adapt: Sequence[str] | None = None,
    precision: Precision = "fp32",
    method: str | None = None,
) -> Iterator[Workload]:
    """Yield the workloads to time.

    Args:
        steps: Numbers of steps.
        adapt: Name patterns of the layers to adapt. None: each network's default.
        precision: Precision of the forward passes with BatchNorm and SaN.
        method: Name of another method, with its default settings.
    """
    if method is not None:
        yield Workload(method, method, {})
    yield Workload("BatchNorm forward", "source", {}, Fast(kernels=False, precision=precision))
    yield Workload("SaN forward", "san", {}, Fast(precision=precision))
    yield Workload("TTA", "tta", {})
    for number in steps:
        name = f"self-adaptation, {number} steps"
        settings = {"mode": "paper", "steps": number, "adapt": adapt}
        yield Workload(f"{name}, plain", "self-adapt", settings, False)
        yield Workload(name, "self-adapt", settings)
    yield Workload(
        "self-adaptation, real-time", "self-adapt", {"preset": "realtime", "adapt": adapt}
    )


def run_bench(
    networks: Sequence[str] = NETWORKS,
    sizes: Sequence[str] = SIZES,
    steps: Sequence[int] = STEPS,
    *,
    device: torch.device,
    adapt: Sequence[str] | None = None,
    method: str | None = None,
    trust: bool = False,
    repeats: int = 10,
    seconds: float = 20,
    log: Callable[[str], None] = print,
    keep: Callable[[list[Timing]], None] = lambda rows: None,
) -> list[Timing]:
    """Time every network at every size; networks whose library is missing are skipped.

    Args:
        networks: Names of networks, which get random weights, or what ``open_model`` takes.
        sizes: Widths and heights such as ``1280x720``.
        steps: Numbers of steps.
        device: Where to compute.
        adapt: Name patterns of the layers to adapt. None: each network's default.
        method: Name of another method to time.
        trust: Allow networks of the user's own code.
        repeats: Runs of each workload, after the warm-up.
        seconds: Time limit of a workload; there are fewer runs if they would take longer.
        log: Called with a line of text for each row.
        keep: Called with all rows so far, after each row.
    """
    parsed, steps = [parse_size(size) for size in sizes], sorted(set(steps))
    precision: Precision = "bf16" if Fast().plan(device).predict else "fp32"
    peak_rate = matrix_rate(device)
    log(f"{describe_machine(device)}; a large matrix product runs at {peak_rate:.1f} TFLOP/s")
    rows: list[Timing] = []
    for network in networks:
        try:
            if network in MODELS:
                model = create_model(network).to(device)
            else:
                model = open_model(network, trust=trust).to(device)
        except ModuleNotFoundError as error:
            log(f"{network} is skipped: {error}")
            continue
        if (
            total := bench_seconds(
                model, parsed, workloads(steps, adapt, method=method), repeats, seconds
            )
        ) is not None:
            log(f"{network} takes about {duration(total)} on this CPU")
        counts = [
            (work, count_operations(work, model))
            for work in workloads(steps, adapt, precision, method)
        ]
        for name, size in zip(sizes, parsed, strict=True):
            block = []
            for work, count in counts:
                try:
                    row = _time(work, model, size, repeats, seconds)
                except torch.OutOfMemoryError:
                    log(f"{network}, {name}, {work.name} is skipped: out of memory")
                    continue
                total = count * size[0] * size[1] / (COUNT_SIZE[0] * COUNT_SIZE[1]) / 1e12
                rate = total / row.ms * 1000
                row = replace(
                    row, network=network, size=name, tflops=rate, of_card=rate / peak_rate
                )
                log(f"{network:24} {name:10} {row.work:36} {row.ms:9.1f} ms")
                block.append(row)
                keep([*rows, *add_ratios(block)])
            rows += add_ratios(block)
    return rows


def bench_seconds(
    model: nn.Module,
    sizes: Sequence[Size],
    works: Iterable[Workload],
    repeats: int,
    seconds: float,
) -> float | None:
    """Estimate the time of the benchmark of a network on a CPU; None on a GPU."""
    methods = [work.create(model) for work in works]
    total = 0.0
    for size in sizes:
        for method in methods:
            each = image_seconds(method, size)
            if each is None:
                return None
            total += each * max(2, min(1 + repeats, ceil(seconds / each)))  # see _time
    return total


def add_ratios(block: Sequence[Timing]) -> list[Timing]:
    """Add speed-up and shares of time to the rows of one network and size."""
    by_work = {row.work: row for row in block}
    result = []
    for row in block:
        plain = by_work.get(f"{row.work}, plain", row)
        row = replace(row, ratio=plain.ms / row.ms)
        number = _steps_of(row)
        is_plain = row.work.endswith("plain")
        others = [
            (_steps_of(other), other.ms)
            for other in block
            if "steps" in other.work and other.work.endswith("plain") == is_plain
        ]
        if number and len(others) > 1:
            (few, short), (many, long) = min(others), max(others)
            share = number * (long - short) / (many - few) / row.ms
            fast = "TTA" in by_work and not is_plain
            views = by_work["TTA"].ms / row.ms if fast else None
            row = replace(row, steps=share, views=views)
        result.append(row)
    return result


def _steps_of(row: Timing) -> int:
    """Return the number of steps of "self-adaptation, 10 steps"; 0 for all else."""
    match = re.search(r"(\d+) steps", row.work)
    return int(match[1]) if match else 0


def _time(work: Workload, model: nn.Module, size: Size, repeats: int, seconds: float) -> Timing:
    device = next(model.parameters()).device
    cuda = device.type == "cuda"
    image = noise(size).to(device)
    limit = {} if "preset" in work.settings else {"max_pixels": size[0] * size[1]}
    method = work.create(model, **limit)  # images keep their size, but for a preset that says so
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    times: list[float] = []
    warmup = WARMUP_RUNS if cuda else 1
    start_of_runs = time.perf_counter()
    while len(times) < warmup + repeats:
        start = time.perf_counter()
        method(image)
        times.append(1000 * (time.perf_counter() - start))
        if len(times) > warmup and time.perf_counter() - start_of_runs > seconds:
            break
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if cuda else None
    timed = sorted(times[warmup:])
    spread = timed[-1 - len(timed) // 4] - timed[len(timed) // 4]
    return Timing("", "", work.name, statistics.median(timed), spread, times[0], peak, 0, 0, 1)


def count_operations(work: Workload, model: nn.Module) -> float:
    """Count the operations of convolutions and matrix products for a small image."""
    plain = replace(NO_OPTIMIZATIONS, reuse=work.fast is not False)
    image = noise(COUNT_SIZE).to(next(model.parameters()).device)
    with FlopCounterMode(display=False) as counter:
        work.create(model, fast=plain)(image)
    return float(counter.get_total_flops())


def matrix_rate(device: torch.device) -> float:
    """Measure the rate of a large matrix product in TFLOP/s: bf16 on a GPU, else fp32."""
    cuda = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if cuda else (MATRIX_SIZE, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    times = []
    for _ in range(8):
        start = time.perf_counter()
        a @ b
        if cuda:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times) / 1e12


def noise(size: Size) -> Tensor:
    """Return an 8-bit image of smooth noise ``(3, H, W)``."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(1, 3, 16, 32, generator=generator)
    return (nn.functional.interpolate(coarse, size, mode="bilinear")[0] * 255).byte()


def parse_size(text: str) -> Size:
    """Parse a size such as ``1280x720`` into height and width.

    Example:
        >>> parse_size("1280x720")
        (720, 1280)
    """
    width, cross, height = text.partition("x")
    if not (cross and width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise ValueError(f"a size is written as WIDTHxHEIGHT, such as 1280x720, got {text!r}")
    return int(height), int(width)


def describe_machine(device: torch.device) -> str:
    """Return the name of the processor or GPU, and the versions of the software."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    threads = "" if device.type == "cuda" else f", {torch.get_num_threads()} threads"
    return f"{name}{threads}, torch {torch.__version__}, selfadapt {__version__}{_commit()}"


def _commit() -> str:
    """Return the commit of this code, if it is in a git checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    is_tracked, head = ["ls-files", "--error-unmatch", __file__], ["rev-parse", "--short", "HEAD"]
    try:
        subprocess.run([*git, *is_tracked], capture_output=True, check=True)
        commit = subprocess.run([*git, *head], capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return f" at {commit.stdout.strip()}"


COLUMNS = (
    "network", "size", "work", "ms", "spread", "images/s", "MB", "ratio", "TFLOP/s", "of card",
    "views", "steps", "first ms",
)  # fmt: skip


def as_cells(row: Timing) -> list[str]:
    """Return a row of the table as text, in the order of ``COLUMNS``."""

    def share(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.0f} %"

    megabytes = "" if row.megabytes is None else f"{row.megabytes:.0f}"
    return [
        row.network, row.size, row.work, f"{row.ms:.1f}", f"{row.spread:.1f}",
        f"{1000 / row.ms:.1f}", megabytes, f"{row.ratio:.1f}", f"{row.tflops:.1f}",
        share(row.of_card), share(row.views), share(row.steps), f"{row.first_ms:.0f}",
    ]  # fmt: skip


def write_bench(rows: Iterable[Timing], about: str, folder: Path) -> None:
    """Write the table as Markdown, CSV and JSON."""
    rows = list(rows)
    make_folder(folder)
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(as_cells, rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    texts = {
        "bench.md": f"{about}\n\n{table}\n",
        "bench.json": json.dumps({"about": about, "rows": [asdict(row) for row in rows]}, indent=1),
    }
    for name, text in texts.items():
        with atomic_write(folder / name) as temporary:
            temporary.write_text(text)
    with atomic_write(folder / "bench.csv") as temporary, temporary.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *(map(csv_cell, as_cells(row)) for row in rows)])


def draw_bench(rows: Sequence[Timing], path: Path) -> None:
    """Plot time over pixels and over steps, if Matplotlib is installed.

    Both should be straight lines.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_pixels, by_steps = figure.subplots(1, 2)
    fast = [row for row in rows if not row.work.endswith("plain")]
    for network in dict.fromkeys(row.network for row in fast):
        of_network = [row for row in fast if row.network == network]
        most = max(map(_steps_of, of_network))
        points = sorted(
            (parse_size(row.size)[0] * parse_size(row.size)[1] / 1e6, row.ms)
            for row in of_network
            if _steps_of(row) == most
        )
        by_pixels.plot(*zip(*points, strict=True), marker="o", label=f"{network}, {most} steps")
        largest = max(
            of_network, key=lambda row: parse_size(row.size)[0] * parse_size(row.size)[1]
        ).size
        points = sorted(
            (_steps_of(r), r.ms) for r in of_network if _steps_of(r) and r.size == largest
        )
        by_steps.plot(*zip(*points, strict=True), marker="o", label=f"{network}, {largest}")
    for axes, name in ((by_pixels, "megapixels"), (by_steps, "steps")):
        axes.set(xlabel=name, ylabel="milliseconds", xlim=(0, None), ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
