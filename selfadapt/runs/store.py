"""The folder of a run: what it is of, who works in it, and what is done.

``RunStore`` is for commands that work for long, may be killed at any moment, and go on when they
are started again. A command makes a subclass, which names the files that its runs write, and works
between ``open`` and ``close``. What holds then:

- Identity. All that decides the result is given to ``open`` as plain data, and written to
  ``record.json``. Where a record is there already it must be the same: the run goes on, or a
  ValueError says in words which settings differ. A folder with other files and no record is
  refused, and so is a record of another format. Hidden files do not count.
- Lock. No other process works on the run, or only those that work on other shares of it. The lock
  is on the file ``.lock``; it ends with the process, and processes forked from it do not have it.
- Journal. ``journal`` opens the rows of this share to append to, and reads those of all. A row is
  written in one piece, with a checksum; what has a row need not be done again.
- Resume. Files other than rows are written with ``files.atomic_write``: each is whole or not
  there. So whatever is there may be relied on, and nothing is remembered elsewhere.
- Overwrite. ``open(overwrite=True)`` removes what ``outputs`` yields, and nothing else, once nobody
  else works on the run. The record is replaced last.
- Parts. What killed processes left half written of the record and the outputs is removed by the
  next process that is alone in the folder.
- Shares. ``Shard(i, n)`` is the i-th of n shares of a run. All of them come to what one process
  comes to, whoever starts which when, and how often. No share waits for another: what it needs of
  others it reads in the journal, or does itself. ``claim`` tells the last one to conclude.

Where outputs lie among files of the user, ``WORK`` is a folder of the run's own for its record,
lock and rows, and ``outputs`` yields the files that the record names.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

from selfadapt.files import (
    atomic_write,
    close_after_fork,
    lock,
    make_folder,
    release_lock,
    remove_partial_files,
)
from selfadapt.journal import Journal
from selfadapt.recipes import differences

RECORD = "record.json"
LOCK = ".lock"
PATIENCE = 10.0
"""Seconds that a share waits for one that ended and writes what all of them came to."""
K = TypeVar("K", bound=tuple)


@dataclass(frozen=True)
class Shard:
    """One of several shares of a run, each for a process of its own."""

    number: int = 1
    """From 1."""
    total: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.total:
            raise ValueError(
                f"a shard must be such as 2/4, the second of four, got {self.number}/{self.total}"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the share that is written as i/n.

        Example:
            >>> Shard.parse("2/4")
            Shard(number=2, total=4)
        """
        number, _, total = text.partition("/")
        if not (number.isdecimal() and total.isdecimal()):
            raise ValueError(f"a shard must be such as 2/4, the second of four, got {text!r}")
        return cls(int(number), int(total))

    def of(self, num: int) -> range:
        """Return which of so many things are in this share.

        Example:
            >>> list(Shard(2, 4).of(10))
            [1, 5, 9]
        """
        return range(self.number - 1, num, self.total)

    def has(self, index: int) -> bool:
        """Return True if the thing of this index is in this share."""
        return index % self.total == self.number - 1


WHOLE = Shard()
"""All of a run."""


class RunStore:
    """The folder of a run.

    Args:
        path: The folder.
        shard: The share of the run that this process works on.
    """

    NAME: ClassVar[str] = "a run"
    """What messages call it."""
    FORMAT: ClassVar[str] = ""
    """Changes where runs of earlier versions cannot go on."""
    OUTPUTS: ClassVar[tuple[str, ...]] = ()
    """Patterns of the files that it writes beside the record, relative to ``path``."""
    WORK: ClassVar[str] = "."
    """The folder in ``path`` of record, lock and rows."""

    def __init__(self, path: Path, shard: Shard = WHOLE) -> None:
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"{self.NAME} needs a folder, but {path} is a file")
        self.path, self.shard = path, shard
        self.work = path / self.WORK
        self.rows = self.work / "rows"
        self._lock: int | None = None

    def check(self, identity: Mapping[str, Any], *, overwrite: bool = False) -> bool:
        """Return True if there is a run to go on with; refuse any other, and change nothing."""
        is_empty = not self.work.is_dir() or all(p.name[0] == "." for p in self.work.iterdir())
        if not (self.work / RECORD).exists():  # looked for last: another share may just write it
            if not is_empty:
                raise FileExistsError(
                    f"{self.path} holds other files and no {self.NAME.partition(' ')[2]} of this "
                    "version of selfadapt; give an empty or new folder"
                )
            return False
        if overwrite:
            if self.shard.total > 1:
                raise ValueError("a share cannot start anew: leave out --shard, or --overwrite")
            return False
        if changed := differences(self.read_record(self.path)["identity"], _plain(identity)):
            raise ValueError(
                f"{self.path} holds {self.NAME} that differs ({'; '.join(changed[:5])}); give "
                "another folder, or use --overwrite to start anew"
            )
        return True

    def open(
        self,
        identity: Mapping[str, Any],
        details: Mapping[str, Any] | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Make the folder, or enter it, and keep others out until ``close``.

        Args:
            identity: What decides the result.
            details: What the record says beside it.
            overwrite: Remove a run that is there.
        """
        self.check(identity, overwrite=overwrite)
        make_folder(self.work)
        self._enter()
        try:
            goes_on = self.check(identity, overwrite=overwrite)  # now nobody else changes it
            if overwrite:
                self._clear()
            if self.shard.total == 1:
                self._remove_parts()
            if self.shard.total == 1 or not goes_on:
                record = {"format": self.FORMAT, "identity": identity, **(details or {})}
                self.write_json(self.work / RECORD, record)
            if self.shard.total > 1:
                self._take(shared=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others in."""
        if self._lock is not None:
            release_lock(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def claim(self) -> bool:
        """Return True if no other share is being worked on; then none is until ``close``."""
        assert self._lock is not None
        if self.shard.total == 1:
            return True
        if not lock(self._lock):  # and the shared lock is gone
            return False
        self._remove_parts()
        return True

    def journal(self, kind: type[K]) -> Journal[K]:
        """Return the rows of the run; this process appends to those of its share."""
        make_folder(self.rows)
        return Journal(self.rows, kind, self.shard.number - 1)

    def outputs(self) -> Iterator[Path]:
        """Yield the files of the run that are there, but the record."""
        for pattern in self.OUTPUTS:
            yield from sorted(self.path.glob(pattern))

    def write_json(self, path: Path, content: object) -> None:
        """Write a file of the run."""
        with atomic_write(path) as aside:
            aside.write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def read_record(cls, folder: Path) -> dict[str, Any]:
        """Read what the run in a folder is of."""
        path = folder / cls.WORK / RECORD
        try:
            record = read_json(path)
        except (FileNotFoundError, NotADirectoryError):
            name = cls.NAME.partition(" ")[2]
            raise FileNotFoundError(f"there is no {name} in {folder}") from None
        written = record.get("format") if isinstance(record, dict) else None
        if written != cls.FORMAT:
            raise ValueError(
                f"{path} must be of the format {cls.FORMAT!r}, got {written!r}, of another version "
                "of selfadapt or of another command; use --overwrite to start anew"
            )
        if not isinstance(record.get("identity"), dict):
            raise ValueError(f"{path} is damaged, it lacks identity; use --overwrite to start anew")
        return dict(record)

    def _enter(self) -> None:
        """Lock the run: as a share together with others, once there is a record."""
        try:
            file = os.open(self.work / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise OSError(f"{self.path} cannot be written to ({error.strerror})") from error
        close_after_fork(file)
        self._lock = file
        if self.shard.total == 1:
            return self._take(shared=False)
        while not (self.work / RECORD).exists():
            if lock(file):  # to write it
                return None
            time.sleep(0.05)  # another share does
        return self._take(shared=True)

    def _take(self, *, shared: bool) -> None:
        assert self._lock is not None
        until = time.monotonic() + (PATIENCE if shared else 0)
        while not lock(self._lock, shared=shared):
            if time.monotonic() >= until:
                self.close()
                raise ValueError(
                    f"another process works in {self.path}; wait for it, or give another folder"
                )
            time.sleep(0.1)

    def _clear(self) -> None:
        paths = list(self.outputs())
        for path in paths:
            path.unlink()
        for folder in {path.parent for path in paths} - {self.path}:
            with suppress(OSError):  # others have files there
                folder.rmdir()

    def _remove_parts(self) -> None:
        remove_partial_files(self.work, RECORD)
        remove_partial_files(self.path, *self.OUTPUTS)


def read_json(path: Path) -> Any:
    """Read a file of a run."""
    try:
        return json.loads(path.read_text())
    except PermissionError as error:
        raise PermissionError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); use --overwrite to start anew") from error


def _plain(identity: Mapping[str, Any]) -> Any:
    """Return data as they are read back from a file."""
    return json.loads(json.dumps(identity))
