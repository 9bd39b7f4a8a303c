"""Logs of a run: CSV files, TensorBoard if installed, and curves."""

import csv
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from selfadapt.files import atomic_write
from selfadapt.optional import import_optional

STEPS = ("step", "epoch", "loss", "lr", "images_per_s")
VALIDATION = ("epoch", "alpha", "mIoU")


class CsvLog:
    """A CSV file that rows are appended to.

    Args:
        path: The file.
        columns: The header.
        last: Existing rows with a greater first column are removed, as a resumed run repeats them.
    """

    def __init__(self, path: Path, columns: Sequence[str], last: int) -> None:
        self.path = path
        rows = (
            [row for row in read_csv_rows(path) if float(row[0]) <= last] if path.exists() else []
        )
        with atomic_write(path) as temporary, temporary.open("w", newline="") as file:
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


def read_csv_rows(path: Path) -> list[list[str]]:
    """Return the rows of a CSV file without header and without an incomplete last row."""
    with path.open(newline="") as file:
        text = file.read()
    lines = text.splitlines(keepends=True)
    complete = [line for line in lines if line.endswith("\n")]
    return list(csv.reader(complete))[1:]


class Log:
    """The logs of a run."""

    def __init__(self, folder: Path, step: int, epoch: int) -> None:
        self.steps = CsvLog(folder / "log.csv", STEPS, step)
        self.validation = CsvLog(folder / "validation.csv", VALIDATION, epoch)
        self._board: Any = None
        with suppress(ImportError):  # TensorBoard is optional
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def step(self, step: int, epoch: int, loss: float, lr: float, speed: float) -> None:
        """Log a step."""
        self.steps.add(step, epoch, f"{loss:.6g}", f"{lr:.6g}", f"{speed:.1f}")
        for name, value in (("loss", loss), ("lr", lr), ("images_per_s", speed)):
            self._scalar(name, value, step)

    def validated(self, step: int, epoch: int, by_alpha: dict[float, float]) -> None:
        """Log a validation."""
        for alpha, mean_iou in by_alpha.items():
            self.validation.add(epoch, alpha, f"{mean_iou:.6f}")
            self._scalar(f"mIoU/alpha_{alpha:g}", mean_iou, step)

    def close(self) -> None:
        """Flush and close the logs."""
        if self._board is not None:
            self._board.close()

    def _scalar(self, name: str, value: float, step: int) -> None:
        if self._board is not None:
            self._board.add_scalar(name, value, step)


def draw_curves(folder: Path) -> None:
    """Plot training loss and validation mIoU of a run from its CSV files."""
    figure = import_optional("matplotlib.figure", "train").Figure(
        figsize=(11, 4), layout="constrained"
    )
    left, right = figure.subplots(1, 2)
    steps = [[float(value) for value in row] for row in read_csv_rows(folder / "log.csv")]
    if steps:
        left.plot([row[0] for row in steps], [row[2] for row in steps], linewidth=0.8)
    left.set(xlabel="step", ylabel="cross-entropy", yscale="log", title="training loss")
    by_alpha: dict[str, list[tuple[int, float]]] = {}
    for epoch, alpha, mean_iou in read_csv_rows(folder / "validation.csv"):
        by_alpha.setdefault(alpha, []).append((int(epoch), 100 * float(mean_iou)))
    for number, (alpha, points) in enumerate(by_alpha.items()):
        color = (0.85 * number / max(1, len(by_alpha) - 1), 0.35, 0.6)
        right.plot(*zip(*points, strict=True), marker=".", color=color, label=f"alpha {alpha}")
    right.set(xlabel="epoch", ylabel="mIoU (%)", title="validation domain")
    if by_alpha:
        right.legend(fontsize=7)
    with atomic_write(folder / "curve.png") as temporary:
        figure.savefig(temporary, format="png", dpi=120)
