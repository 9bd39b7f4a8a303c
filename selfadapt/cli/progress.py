"""How far a verb has come: a bar on a terminal, now and then a line in a log."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 30.0
"""Seconds between two lines in a log."""


class Bar:
    """Shows how far something has come, on the terminal or in a log; or nothing.

    Args:
        name: What is being done.
        quiet: Show nothing.
    """

    def __init__(self, name: str, *, quiet: bool = False) -> None:
        console = Console(stderr=True)
        self.name = name
        doing = TextColumn("{task.description}", markup=False)
        columns = (doing, BarColumn(), MofNCompleteColumn())
        shown = console.is_terminal and not quiet
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not shown)
        self._task = self._bar.add_task(name, total=None)
        self._lines = not console.is_terminal and not quiet
        self._start = self._said = time.monotonic()

    def __enter__(self) -> "Bar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int, doing: str = "") -> None:
        """Show how many are done of how many, and what else is being done."""
        self._bar.update(self._task, completed=done, total=total, description=doing or self.name)
        now = time.monotonic()
        if self._lines and now - self._said >= EVERY:
            self._said = now
            minutes = (now - self._start) / max(done, 1) * (total - done) / 60
            text = f"{done} of {total}, {minutes:.0f} min left"
            print(f"{doing or self.name}: {text}", file=sys.stderr, flush=True)
