"""The folder of a run: its identity, lock and journal.

``RunStore`` is for commands that run for a long time, may be killed at any moment, and continue
when they are started again. A command subclasses it, defines the files that its runs write, and
works between ``open`` and ``close``. Guarantees:

- Identity. Everything that determines the result is passed to ``open`` as plain data, and written
  to ``record.json``. If there is a record already, it must be equal: then the run continues, else
  a ValueError lists the settings that differ. A folder with other files and no record is refused,
  and so is a record of another format. Hidden files are ignored.
- Lock. No other process works on the run, except for those that work on other shares. The lock is
  on the file ``.lock``; it ends with the process and is not inherited by forked processes.
- Journal. ``journal`` opens the rows of this share for appending, and reads those of all shares. A
  row is written at once, with a checksum; what has a row is not done again.
- Resume. Files other than rows are written atomically with ``files.atomic_write``. So existing
  files are complete, and no other state is needed.
- Overwrite. ``open(overwrite=True)`` removes the files of ``outputs``, and no others, once no other
  process works on the run. The record is replaced last. Nothing is removed through a link.
- Temporary files. Those that killed processes have left are removed by the next process that is
  alone in the folder.
- Shares. ``Shard(i, n)`` is the i-th of n shares of a run. Together they give the same result as
  one process, whatever the order in which they are started, and however often. No share waits for
  another one: it reads the rows of others in the journal, or does their work itself. ``claim``
  returns True in the last one, which writes the final files.

If outputs are mixed with files of the user, ``WORK`` is a subfolder for the record, lock and rows,
and ``outputs`` yields the files listed in the record.
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
    holds,
    lock,
    make_folder,
    open_own,
    release_lock,
    remove_partial_files,
)
from selfadapt.journal import Journal
from selfadapt.recipes import differences

RECORD = "record.json"
LOCK = ".lock"
LOCK_TIMEOUT_S = 10.0
"""Seconds that a share waits for the last one to write the final files."""
K = TypeVar("K", bound=tuple)


@dataclass(frozen=True)
class Shard:
    """One of several shares of a run, each for a separate process."""

    number: int = 1
    """From 1."""
    total: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.total:
            raise ValueError(
                f"a shard must be I/N, for example 2/4, got {self.number}/{self.total}"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a share written as i/n.

        Example:
            >>> Shard.parse("2/4")
            Shard(number=2, total=4)
        """
        number, _, total = text.partition("/")
        if not (number.isdecimal() and total.isdecimal()):
            raise ValueError(f"a shard must be I/N, for example 2/4, got {text!r}")
        return cls(int(number), int(total))

    def of(self, num: int) -> range:
        """Return the indices of this share among ``num`` items.

        Example:
            >>> list(Shard(2, 4).of(10))
            [1, 5, 9]
        """
        return range(self.number - 1, num, self.total)

    def has(self, index: int) -> bool:
        """Return True if the item with this index is in this share."""
        return index % self.total == self.number - 1


WHOLE = Shard()
"""The only share of a run."""


class RunStore:
    """The folder of a run.

    Args:
        path: The folder.
        shard: The share of the run that this process works on.
    """

    NAME: ClassVar[str] = "a run"
    """Name in messages, with an article."""
    FORMAT: ClassVar[str] = ""
    """Version of the folder; to be changed if earlier runs cannot be continued."""
    OUTPUTS: ClassVar[tuple[str, ...]] = ()
    """Patterns of the files written in addition to the record, relative to ``path``."""
    WORK: ClassVar[str] = "."
    """Subfolder of ``path`` for record, lock and rows."""

    def __init__(self, path: Path, shard: Shard = WHOLE) -> None:
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"{self.NAME} needs a folder, but {path} is a file")
        if path.parts[:1] and path.parts[0].endswith(":"):  # the path that s3://bucket becomes
            raise ValueError(f"{self.NAME} needs a folder on a disk, got the address {path}")
        self.path, self.shard = path, shard
        self.work = path / self.WORK
        self.rows = self.work / "rows"
        self._lock: int | None = None

    def check(self, identity: Mapping[str, Any], *, overwrite: bool = False) -> bool:
        """Return True if there is a run to continue; raise an error if it is a different one."""
        is_own = self.work != self.path
        for path in (self.work, *self.work.glob("*")) if is_own else (self.rows,):
            if path.is_symlink():  # files of others would be changed there
                raise ValueError(f"{path} must not be a symbolic link; remove it")
        is_empty = not self.work.is_dir() or all(p.name[0] == "." for p in self.work.iterdir())
        if not (self.work / RECORD).exists():  # checked last: another share may be writing it
            if not is_empty:
                raise FileExistsError(
                    f"{self.path} holds other files and no {self.NAME.partition(' ')[2]} of this "
                    "version of selfadapt; give an empty or new folder"
                )
            return False
        if overwrite:
            if self.shard.total > 1:
                raise ValueError("a share cannot start again: leave out --shard, or --overwrite")
            return False
        given = json.loads(json.dumps(identity))  # as it would be read back
        if changed := differences(self.read_record(self.path)["identity"], given):
            raise ValueError(
                f"{self.path} holds {self.NAME} that differs ({'; '.join(changed[:5])}); give "
                "another folder, or use --overwrite to start again"
            )
        return True

    def open(
        self,
        identity: Mapping[str, Any],
        details: Mapping[str, Any] | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Create or open the folder, and lock it until ``close``.

        Args:
            identity: Everything that determines the result.
            details: Further content of the record.
            overwrite: Remove an existing run.
        """
        self.check(identity, overwrite=overwrite)
        make_folder(self.work)
        self._enter()
        try:
            continues = self.check(identity, overwrite=overwrite)  # again, now that it is locked
            if overwrite:
                self._clear()
            if self.shard.total == 1:
                self.remove_parts()
            if self.shard.total == 1 or not continues:
                record = {"format": self.FORMAT, "identity": identity, **(details or {})}
                self.write_json(self.work / RECORD, record)
            if self.shard.total > 1:
                self._take(shared=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock."""
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
        """Return True if no other share is running; then none can start until ``close``."""
        assert self._lock is not None
        if self.shard.total == 1:
            return True
        if not lock(self._lock):  # the shared lock is lost then
            return False
        self.remove_parts()
        return True

    def journal(self, kind: type[K]) -> Journal[K]:
        """Open the journal of the run; new rows go to the file of this share."""
        make_folder(self.rows)
        return Journal(self.rows, kind, self.shard.number - 1)

    def outputs(self) -> Iterator[Path]:
        """Yield the existing files of the run except for the record."""
        for pattern in self.OUTPUTS:
            yield from sorted(self.path.glob(pattern))

    def write_json(self, path: Path, content: object) -> None:
        """Write a JSON file of the run."""
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def read_record(cls, folder: Path) -> dict[str, Any]:
        """Read and check the record of the run in a folder."""
        path = folder / cls.WORK / RECORD
        try:
            record = read_json(path)
        except (FileNotFoundError, NotADirectoryError):
            name = cls.NAME.partition(" ")[2]
            raise FileNotFoundError(f"there is no {name} in {folder}") from None
        version = record.get("format") if isinstance(record, dict) else None
        if version != cls.FORMAT:
            raise ValueError(
                f"{path} must be of the format {cls.FORMAT!r}, got {version!r}, of another version "
                "of selfadapt or of another command; use --overwrite to start again"
            )
        if not isinstance(record.get("identity"), dict):
            raise ValueError(
                f"{path} is damaged, it lacks identity; use --overwrite to start again"
            )
        return dict(record)

    def _enter(self) -> None:
        """Lock the run, if it is one share of several with a shared lock once there is a record."""
        file = open_own(self.work / LOCK, os.O_RDWR | os.O_CREAT)
        close_after_fork(file)
        self._lock = file
        if self.shard.total == 1:
            return self._take(shared=False)
        while not (self.work / RECORD).exists():
            if lock(file):  # to write it
                return None
            time.sleep(0.05)  # another share is writing it
        return self._take(shared=True)

    def _take(self, *, shared: bool) -> None:
        assert self._lock is not None
        until = time.monotonic() + (LOCK_TIMEOUT_S if shared else 0)
        while not lock(self._lock, shared=shared):
            if time.monotonic() >= until:
                self.close()
                raise ValueError(
                    f"another process works in {self.path}; wait for it, or give another folder"
                )
            time.sleep(0.1)

    def _clear(self) -> None:
        paths = [path for path in self.outputs() if holds(self.path, path)]
        for path in paths:
            path.unlink()
        for folder in {path.parent for path in paths} - {self.path}:
            with suppress(OSError):  # it contains other files
                folder.rmdir()

    def remove_parts(self) -> None:
        """Remove temporary files of killed processes; no other process may write to the run."""
        remove_partial_files(self.work, RECORD)
        remove_partial_files(self.path, *self.OUTPUTS)


def read_json(path: Path) -> Any:
    """Read a JSON file of a run."""
    try:
        return json.loads(path.read_text())
    except PermissionError as error:
        raise PermissionError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); use --overwrite to start again") from error
