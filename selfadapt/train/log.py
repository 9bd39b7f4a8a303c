"""What a run tells: a line of progress, CSV files, TensorBoard if installed, and curves."""

import csv
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from selfadapt.files import written_whole
from selfadapt.optional import need

STEPS = ("step", "epoch", "loss", "lr", "images_per_s")
VALIDATION = ("epoch", "alpha", "mIoU")


class Table:
    """A CSV file that grows by a row at a time; a run that goes on drops what came after."""

    def __init__(self, path: Path, columns: Sequence[str], until: int) -> None:
        self.path = path
        rows = [row for row in read_rows(path) if float(row[0]) <= until] if path.exists() else []
        with written_whole(path) as aside, aside.open("w", newline="") as file:
            csv.writer(file).writerows([columns, *rows])

    def add(self, *values: object) -> None:
        """Add a row."""
        try:
            with self.path.open("a", newline="") as file:
                csv.writer(file).writerow(values)
        except OSError as error:
            raise OSError(
                f"{self.path} could not be written to ({error.strerror}). Make room, then run the "
                "same command (without --overwrite) to go on from the last saved state"
            ) from error


def read_rows(path: Path) -> list[list[str]]:
    """Return the whole rows of a CSV file, without its header; a torn last one is left out."""
    with path.open(newline="") as file:
        text = file.read()
    lines = text.splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    return list(csv.reader(whole))[1:]


class Log:
    """Writes down what happens in a run."""

    def __init__(self, folder: Path, step: int, epoch: int) -> None:
        self.steps = Table(folder / "log.csv", STEPS, step)
        self.validation = Table(folder / "validation.csv", VALIDATION, epoch)
        self._board = _tensorboard(folder, step)

    def step(self, step: int, epoch: int, loss: float, lr: float, speed: float) -> None:
        """Note a step."""
        self.steps.add(step, epoch, f"{loss:.6g}", f"{lr:.6g}", f"{speed:.1f}")
        for name, value in (("loss", loss), ("lr", lr), ("images_per_s", speed)):
            self._scalar(name, value, step)

    def validated(self, step: int, epoch: int, by_alpha: dict[float, float]) -> None:
        """Note a validation."""
        for alpha, mean_iou in by_alpha.items():
            self.validation.add(epoch, alpha, f"{mean_iou:.6f}")
            self._scalar(f"mIoU/alpha_{alpha:g}", mean_iou, step)

    def close(self) -> None:
        """Write out what is still to be written."""
        if self._board is not None:
            self._board.close()

    def _scalar(self, name: str, value: float, step: int) -> None:
        if self._board is not None:
            self._board.add_scalar(name, value, step)


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)


@contextmanager
def progress_line(total: int, done: int, *, shown: bool) -> Iterator[Any]:
    """Show a line of progress; yields a function of the steps done and what is to be said."""
    columns = (
        TextColumn("epoch {task.fields[epoch]}"), BarColumn(), TextColumn("{task.fields[said]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    kept = sys.stdout.isatty()  # what goes to a file is not to be shown above the line instead
    with Progress(*columns, console=console, disable=not shown, redirect_stdout=kept) as progress:
        task = progress.add_task("", total=total, completed=done, epoch="", said="")

        def update(step: int, epoch: str, said: str) -> None:
            progress.update(task, completed=step, epoch=epoch, said=said)

        yield update


def draw_curves(folder: Path) -> None:
    """Draw loss, learning rate and validation mIoU of a run, from its CSV files."""
    figure = need("matplotlib.figure", "train").Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = [[float(value) for value in row] for row in read_rows(folder / "log.csv")]
    if steps:
        left.plot([row[0] for row in steps], [row[2] for row in steps], linewidth=0.8)
    left.set(xlabel="step", ylabel="cross-entropy", yscale="log", title="training loss")
    by_alpha: dict[str, list[tuple[int, float]]] = {}
    for epoch, alpha, mean_iou in read_rows(folder / "validation.csv"):
        by_alpha.setdefault(alpha, []).append((int(epoch), 100 * float(mean_iou)))
    for number, (alpha, points) in enumerate(by_alpha.items()):
        color = (0.85 * number / max(1, len(by_alpha) - 1), 0.35, 0.6)
        right.plot(*zip(*points, strict=True), marker=".", color=color, label=f"alpha {alpha}")
    right.set(xlabel="epoch", ylabel="mIoU (%)", title="validation domain")
    if by_alpha:
        right.legend(fontsize=7)
    with written_whole(folder / "curve.png") as aside:
        figure.savefig(aside, format="png", dpi=120)
