"""The queue of images: those of visitors of the page and of programs run one after the other.

Use::

    with queue.job(session) as job:
        queue.enqueue(job).result()  # waits for its turn
        run(..., stop=job.stop)
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from threading import Event, RLock

from selfadapt.app.limits import MAX_QUEUE, MAX_RUNNING
from selfadapt.method import Stopped

PROGRAMS = ""
"""Session of all programs; those of the page have names."""
FIRST_SECONDS = 1.0
"""Assumed time of an image before one was measured."""
WEIGHT = 0.2
"""Weight of the last image in the mean time."""
MAX_RETRY_S = 60
"""Longest time that a program is told to wait: the mean follows long runs of the page, too."""


class QueueFull(Exception):
    """Too many images are waiting.

    Args:
        seconds: When to try again.
    """

    def __init__(self, seconds: int) -> None:
        super().__init__(
            f"{MAX_QUEUE} images are waiting, no more are accepted; try again in {seconds} s"
        )
        self.seconds = seconds


@dataclass(eq=False)
class Job:
    """An image in the queue."""

    session: str
    stop: Event = field(default_factory=Event)
    """Set to stop the job at its next step."""
    turn: Future[None] = field(default_factory=Future)
    """Done when the job may run; fails with ``Stopped`` if it is stopped before."""
    began: float | None = None
    """When its turn came."""


class JobQueue:
    """Gives ``MAX_RUNNING`` jobs at a time their turn, and stops them."""

    def __init__(self) -> None:
        self.seconds = FIRST_SECONDS
        """Mean time of a job."""
        self._jobs: list[Job] = []
        """All jobs: those whose image is still being received, waiting and running ones."""
        self._waiting: list[Job] = []
        self._was_program = False
        self._shutting_down = False
        self._lock = RLock()

    @contextmanager
    def job(self, session: str) -> Iterator[Job]:
        """Context manager of a job, which has left the queue on exit.

        Raises:
            QueueFull: Too many jobs of programs are waiting. The page has a limit of its own.
        """
        job = Job(session)
        job.turn.set_running_or_notify_cancel()  # so that who waits cannot cancel it
        with self._lock:
            programs = [j for j in self._jobs if j.session == PROGRAMS and j.began is None]
            if session == PROGRAMS and len(programs) >= MAX_QUEUE:
                seconds = ceil(self.seconds * len(self._jobs) / MAX_RUNNING)
                raise QueueFull(min(max(seconds, 1), MAX_RETRY_S))
            self._jobs.append(job)
            if self._shutting_down:
                self.stop(job)
        try:
            yield job
            if job.began is not None:
                self.seconds += WEIGHT * (time.monotonic() - job.began - self.seconds)
        finally:
            with self._lock:
                self._jobs.remove(job)
                if job in self._waiting:
                    self._waiting.remove(job)
                self._begin_next()

    def enqueue(self, job: Job) -> Future[None]:
        """Let a job wait for its turn; return what is done then, or fails with ``Stopped``."""
        with self._lock:
            if not job.turn.done():
                self._waiting.append(job)
                self._begin_next()
        return job.turn

    @property
    def num_running(self) -> int:
        """Number of jobs that are running."""
        return sum(job.began is not None for job in list(self._jobs))

    @property
    def num_waiting(self) -> int:
        """Number of jobs that are waiting, and of those whose image is being received."""
        return sum(job.began is None for job in list(self._jobs))

    def stop(self, job: Job) -> None:
        """Stop a job: at once if it is waiting, at its next step if it is running."""
        with self._lock:
            job.stop.set()
            if job in self._waiting:
                self._waiting.remove(job)
            if not job.turn.done():
                job.turn.set_exception(Stopped())

    def stop_session(self, session: str) -> bool:
        """Stop the jobs of a session; return True if there are any."""
        with self._lock:
            jobs = [job for job in self._jobs if job.session == session]
            for job in jobs:
                self.stop(job)
        return bool(jobs)

    def stop_all(self) -> None:
        """Stop all jobs, including those that begin later."""
        with self._lock:
            self._shutting_down = True
            for job in self._jobs:
                self.stop(job)

    def _begin_next(self) -> None:
        while self._waiting and self.num_running < MAX_RUNNING:
            # The page and programs take turns, so that neither waits for all jobs of the other.
            job = next(
                (j for j in self._waiting if (j.session == PROGRAMS) != self._was_program),
                self._waiting[0],
            )
            self._waiting.remove(job)
            self._was_program = job.session == PROGRAMS
            job.began = time.monotonic()
            job.turn.set_result(None)
