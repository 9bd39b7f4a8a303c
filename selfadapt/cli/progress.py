"""Progress of a command: a bar on a terminal, a line now and then in a log."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LOG_INTERVAL_S = 30.0
"""Seconds between two lines in a log."""


class ProgressBar:
    """Shows progress as a bar on a terminal, else as lines in a log.

    Args:
        name: Description of the task.
        quiet: Show nothing.
    """

    def __init__(self, name: str, *, quiet: bool = False) -> None:
        console = Console(stderr=True)
        self.name = name
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task(name, total=None)
        self._logs = not console.is_terminal and not quiet
        self._start = self._last_log = time.monotonic()

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int, activity: str = "") -> None:
        """Show how many of how many items are done; ``activity`` replaces the description."""
        description = activity or self.name
        self._bar.update(self._task, completed=done, total=total, description=description)
        now = time.monotonic()
        if self._logs and now - self._last_log >= LOG_INTERVAL_S:
            self._last_log = now
            minutes = (now - self._start) / max(done, 1) * (total - done) / 60
            text = f"{done} of {total}, {minutes:.0f} min left"
            print(f"{description}: {text}", file=sys.stderr, flush=True)
