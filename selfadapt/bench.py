"""How long it takes here: the same work with and without shortcuts, in one run.

For each network and size, one image of noise goes through

    BatchNorm forward    the network as trained, without fused kernels
    SaN forward          one pass with SaN
    TTA                  the views alone
    self-adaptation      without shortcuts, with all of them, and the real-time preset

Weights are fresh: time does not depend on them. What is prepared once, such as compiling kernels or
recording graphs, is reported apart from the median of the runs that follow.
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

from selfadapt.cost import duration
from selfadapt.engine import NO_SHORTCUTS, Fast
from selfadapt.engine.settings import Precision
from selfadapt.files import atomic_write, make_folder
from selfadapt.forecast import image_seconds
from selfadapt.methods import Segments, create_method
from selfadapt.models.create import create_model
from selfadapt.version import __version__
from selfadapt.views import Size

NETWORKS = (
    "deeplabv1_resnet50", "deeplabv1_resnet101", "deeplabv3plus_resnet50", "hrnet_w18",
    "upernet_swin_tiny",
)  # fmt: skip
SIZES = ("1280x720", "1920x1080", "2048x1024")
STEPS = (3, 10)
COUNTED = (256, 512)
"""The size that operations are counted at; they are in proportion to the pixels."""
SETTLING = 3
"""Runs that prepare: compile, record, and one more."""


@dataclass(frozen=True)
class Work:
    """Something to be timed."""

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
    """A row of the table."""

    network: str
    size: str
    work: str
    ms: float
    spread: float
    """Milliseconds between the quarter of the runs that is fastest and the one that is slowest."""
    first_ms: float
    """What the very first run took, with all that is prepared once."""
    megabytes: float | None
    tflops: float
    """Operations of convolutions and matrix products a second, in 10^12."""
    of_card: float
    """Their share of what a large matrix product reaches here; convolutions can do better, with
    algorithms that need fewer operations than are counted."""
    ratio: float
    """How many times faster than self-adaptation without shortcuts with as many steps."""
    views: float | None = None
    """Share of the time for views and pseudo-label."""
    steps: float | None = None
    """Share of the time for steps; the rest is the prediction."""


def works(
    steps: Sequence[int], adapt: Sequence[str] | None = None, half: Precision = "fp32"
) -> Iterator[Work]:
    """Yield what is timed.

    Args:
        steps: Numbers of steps.
        adapt: Name patterns of the layers to adapt. None: each network's default.
        half: Precision of the forward passes of BatchNorm and SaN, which are to be compared.
    """
    yield Work("BatchNorm forward", "source", {}, Fast(kernels=False, precision=half))
    yield Work("SaN forward", "san", {}, Fast(precision=half))
    yield Work("TTA", "tta", {})
    for number in steps:
        name, settings = f"self-adaptation, {number} steps", {"steps": number, "adapt": adapt}
        yield Work(f"{name}, plain", "self-adapt", settings, False)
        yield Work(name, "self-adapt", settings)
    yield Work("self-adaptation, real-time", "self-adapt", {"preset": "realtime", "adapt": adapt})


def run_bench(
    networks: Sequence[str] = NETWORKS,
    sizes: Sequence[str] = SIZES,
    steps: Sequence[int] = STEPS,
    *,
    device: torch.device,
    adapt: Sequence[str] | None = None,
    repeats: int = 10,
    seconds: float = 20,
    say: Callable[[str], None] = print,
    keep: Callable[[list[Timing]], None] = lambda rows: None,
) -> list[Timing]:
    """Time every network at every size; a network that needs a library that is missing is left out.

    Args:
        networks: Names of networks.
        sizes: Widths and heights such as ``1280x720``.
        steps: Numbers of steps.
        device: Where to compute.
        adapt: Name patterns of the layers to adapt. None: each network's default.
        repeats: Runs of each work, after those that prepare.
        seconds: Fewer runs where they would take longer than this.
        say: Takes a line for each row.
        keep: Takes all rows there are, after each of them.
    """
    parsed, steps = [parse_size(size) for size in sizes], sorted(set(steps))
    half: Precision = "bf16" if Fast().plan(device).predict else "fp32"
    card = matrix_rate(device)
    say(f"{machine(device)}; a large matrix product runs at {card:.1f} TFLOP/s")
    rows: list[Timing] = []
    for network in networks:
        try:
            model = create_model(network).to(device)
        except ModuleNotFoundError as error:
            say(f"{network} is left out: {error}")
            continue
        if (total := bench_seconds(model, parsed, steps, adapt, repeats, seconds)) is not None:
            say(f"{network} takes about {duration(total)} on this CPU")
        counts = [(work, count_operations(work, model)) for work in works(steps, adapt, half)]
        for name, size in zip(sizes, parsed, strict=True):
            block = []
            for work, count in counts:
                try:
                    row = _time(work, model, size, repeats, seconds)
                except torch.OutOfMemoryError:
                    say(f"{network}, {name}, {work.name} is left out: out of memory")
                    continue
                total = count * size[0] * size[1] / (COUNTED[0] * COUNTED[1]) / 1e12
                rate = total / row.ms * 1000
                row = replace(row, network=network, size=name, tflops=rate, of_card=rate / card)
                say(_line(row))
                block.append(row)
                keep([*rows, *compared(block)])
            rows += compared(block)
    return rows


def bench_seconds(
    model: nn.Module,
    sizes: Sequence[Size],
    steps: Sequence[int],
    adapt: Sequence[str] | None,
    repeats: int,
    seconds: float,
) -> float | None:
    """Return what the bench of a network takes on a CPU, about; None on a GPU."""
    method: Any = create_method("self-adapt", model, adapt=adapt, compare=False)
    passes = {"BatchNorm forward": 1, "SaN forward": 1}
    total = 0.0
    for size in sizes:
        for work in works(steps, adapt):
            method.steps = work.settings.get("steps", 2 if "preset" in work.settings else 0)
            each = image_seconds(method, size)
            if each is None:
                return None
            if work.name in passes:
                each = method.estimate(*size).plain_seconds
            total += each * max(2, min(1 + repeats, ceil(seconds / each)))  # see _time
    return total


def compared(block: Sequence[Timing]) -> list[Timing]:
    """Set the rows of one network and size against each other."""
    by_work = {row.work: row for row in block}
    done = []
    for row in block:
        slow = by_work.get(f"{row.work}, plain", row)
        row = replace(row, ratio=slow.ms / row.ms)
        number = _steps_of(row)
        others = [(_steps_of(other), other.ms) for other in block if _same_kind(other, row)]
        if number and len(others) > 1:
            (few, short), (many, long) = min(others), max(others)
            share = number * (long - short) / (many - few) / row.ms
            fast = "TTA" in by_work and not row.work.endswith("plain")
            views = by_work["TTA"].ms / row.ms if fast else None
            row = replace(row, steps=share, views=views)
        done.append(row)
    return done


def _steps_of(row: Timing) -> int:
    """Return the number of steps of "self-adaptation, 10 steps"; 0 for all else."""
    found = re.search(r"(\d+) steps", row.work)
    return int(found[1]) if found else 0


def _same_kind(one: Timing, other: Timing) -> bool:
    return "steps" in one.work and one.work.endswith("plain") == other.work.endswith("plain")


def _time(work: Work, model: nn.Module, size: Size, repeats: int, seconds: float) -> Timing:
    device = next(model.parameters()).device
    cuda = device.type == "cuda"
    image = noise(size).to(device)
    method = work.create(model, max_pixels=size[0] * size[1])
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    times: list[float] = []
    settling = SETTLING if cuda else 1
    began = time.perf_counter()
    while len(times) < settling + repeats:
        start = time.perf_counter()
        method(image)
        times.append(1000 * (time.perf_counter() - start))
        if len(times) > settling and time.perf_counter() - began > seconds:
            break
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if cuda else None
    rest = sorted(times[settling:])
    spread = rest[-1 - len(rest) // 4] - rest[len(rest) // 4]
    return Timing("", "", work.name, statistics.median(rest), spread, times[0], peak, 0, 0, 1)


def count_operations(work: Work, model: nn.Module) -> float:
    """Count the operations of convolutions and matrix products for a small image."""
    plain = replace(NO_SHORTCUTS, reuse=work.fast is not False)
    image = noise(COUNTED).to(next(model.parameters()).device)
    with FlopCounterMode(display=False) as counter:
        work.create(model, fast=plain)(image)
    return float(counter.get_total_flops())


def matrix_rate(device: torch.device) -> float:
    """Measure what a large matrix product reaches, in TFLOP/s: of bf16 on a GPU, else of fp32."""
    cuda = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if cuda else (2048, torch.float32)
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
    """Return height and width of what is written as ``1280x720``.

    Example:
        >>> parse_size("1280x720")
        (720, 1280)
    """
    width, cross, height = text.partition("x")
    if not (cross and width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise ValueError(f"a size is written as WIDTHxHEIGHT, such as 1280x720, got {text!r}")
    return int(height), int(width)


def machine(device: torch.device) -> str:
    """Return what computes, and with which versions."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    threads = "" if device.type == "cuda" else f", {torch.get_num_threads()} threads"
    return f"{name}{threads}, torch {torch.__version__}, selfadapt {__version__}{_commit()}"


def _commit() -> str:
    """Return the commit this code is of, if it lies in a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    found = ""
    try:
        for words in (["ls-files", "--error-unmatch", __file__], ["rev-parse", "--short", "HEAD"]):
            ran = subprocess.run([*git, *words], capture_output=True, text=True, check=True)
            found = ran.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
    return f" at {found}"


COLUMNS = (
    "network", "size", "work", "ms", "spread", "images/s", "MB", "ratio", "TFLOP/s", "of card",
    "views", "steps", "first ms",
)  # fmt: skip


def as_cells(row: Timing) -> list[str]:
    """Return a row of the table as texts, in the order of ``COLUMNS``."""

    def share(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.0f} %"

    megabytes = "" if row.megabytes is None else f"{row.megabytes:.0f}"
    return [
        row.network, row.size, row.work, f"{row.ms:.1f}", f"{row.spread:.1f}",
        f"{1000 / row.ms:.1f}", megabytes, f"{row.ratio:.1f}", f"{row.tflops:.1f}",
        share(row.of_card), share(row.views), share(row.steps), f"{row.first_ms:.0f}",
    ]  # fmt: skip


def _line(row: Timing) -> str:
    return f"{row.network:24} {row.size:10} {row.work:36} {row.ms:9.1f} ms"


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
        with atomic_write(folder / name) as aside:
            aside.write_text(text)
    with atomic_write(folder / "bench.csv") as aside, aside.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *map(as_cells, rows)])


def draw_bench(rows: Sequence[Timing], path: Path) -> None:
    """Draw time against pixels and against steps, where Matplotlib is installed.

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
        own = [row for row in fast if row.network == network]
        most = max(map(_steps_of, own))
        points = sorted(
            (parse_size(row.size)[0] * parse_size(row.size)[1] / 1e6, row.ms)
            for row in own
            if _steps_of(row) == most
        )
        by_pixels.plot(*zip(*points, strict=True), marker="o", label=f"{network}, {most} steps")
        largest = max(own, key=lambda row: parse_size(row.size)[0] * parse_size(row.size)[1]).size
        points = sorted((_steps_of(r), r.ms) for r in own if _steps_of(r) and r.size == largest)
        by_steps.plot(*zip(*points, strict=True), marker="o", label=f"{network}, {largest}")
    for axes, name in ((by_pixels, "megapixels"), (by_steps, "steps")):
        axes.set(xlabel=name, ylabel="milliseconds", xlim=(0, None), ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    with atomic_write(path) as aside:
        figure.savefig(aside, format="png", dpi=110)
