"""Progress of a long task: a bar on a terminal, a line now and then in a log."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LOG_INTERVAL_S = 30.0
"""Seconds between two lines in a log."""


class ProgressBar:
    """Shows progress on stderr, as a bar on a terminal, else as lines in a log.

    Args:
        name: Description of the task.
        total: Number of items. None: not known yet.
        done: How many of them are done already.
        quiet: Show nothing.
    """

    def __init__(
        self, name: str, total: int | None = None, done: int = 0, *, quiet: bool = False
    ) -> None:
        console = Console(stderr=True)
        self.done = self._done_before = done
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
            redirect_stdout=sys.stdout.isatty(),  # what goes to a file stays there
            refresh_per_second=2,  # drawing takes milliseconds
        )
        self._task = self._bar.add_task(name, total=total, completed=done, note="")
        self._logs = not console.is_terminal and not quiet
        self._start = self._last_log = time.monotonic()

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(
        self,
        done: int | None = None,
        total: int | None = None,
        *,
        name: str | None = None,
        note: str | None = None,
    ) -> None:
        """Show how many of how many items are done; what is None stays as it is."""
        self.done = self.done if done is None else done
        self._bar.update(self._task, completed=self.done, total=total, description=name)
        if note is not None:
            self._bar.update(self._task, note=note)
        now = time.monotonic()
        task = self._bar.tasks[0]
        if self._logs and task.total and now - self._last_log >= LOG_INTERVAL_S:
            self._last_log = now
            seconds = (now - self._start) / max(self.done - self._done_before, 1)
            text = f"{self.done} of {task.total:g}"
            if left := task.total - self.done:
                text += f", about {duration(seconds * left)} left"
            more = f", {task.fields['note']}" if task.fields["note"] else ""
            sys.stderr.write(f"{task.description}: {text}{more}\n")
            sys.stderr.flush()

    def advance(self, note: str | None = None) -> None:
        """Show that one more item is done."""
        self.update(self.done + 1, note=note)


def duration(seconds: float) -> str:
    """Return a duration as text, rounded to a suitable unit.

    Example:
        >>> duration(0.25), duration(21.4), duration(480)
        ('0.2 s', '21 s', '8 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
