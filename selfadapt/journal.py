"""The journal of a run: a row for each processed item, which survives killed processes.

Every process appends to its own file, each line in a single write. A line is a checksum and a JSON
object. An incomplete last line, of a process that was killed while writing, is ignored, and its
item is processed again.
"""

import json
import os
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar
from zlib import crc32

from selfadapt.files import atomic_write, close_after_fork, lock, open_own, release_lock

Row = dict[str, Any]
K = TypeVar("K", bound=tuple)
"""A NamedTuple that identifies a row. Its fields are fields of the row."""
SYNC_INTERVAL_S = 5.0
"""Seconds between calls of fsync."""


class Journal(Generic[K]):
    """The rows of all processes of a run, and the file that this process appends to.

    Args:
        folder: The folder with the files of all processes.
        kind: Type of the keys of rows.
        rank: Index of this process.
    """

    def __init__(self, folder: Path, kind: type[K], rank: int = 0) -> None:
        self.folder, self.kind = folder, kind
        self.done: dict[K, bool] = {}
        """Keys of all rows: True if the item was processed, False if it failed with an error."""
        self._read: dict[Path, int] = {}
        path = folder / f"{rank:04}.jsonl"
        self._file = open_locked(path)
        close_after_fork(self._file)
        self._synced = time.monotonic()
        try:
            self.refresh()
            os.ftruncate(self._file, self._read.get(path, 0))  # drop an incomplete line
        except BaseException:
            release_lock(self._file)
            raise

    def refresh(self) -> None:
        """Read the rows that all processes have written since the last call."""
        for path in sorted(self.folder.glob("*.jsonl")):
            start = self._read.get(path, 0)
            for row, end in _rows(path, start):
                self._add(row)
                self._read[path] = end

    def write(self, row: Row) -> None:
        """Append a row."""
        try:
            rest = _line(row)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            raise OSError(
                f"a row could not be written to {self.folder} ({error.strerror}); the rows before "
                "it are kept. Make room, then run the same command (without --overwrite) to go on"
            ) from error
        self._add(row)
        if time.monotonic() - self._synced > SYNC_INTERVAL_S:
            self.sync()

    def rows(self, wanted: Callable[[K], bool] = lambda key: True) -> dict[K, Row]:
        """Return rows from the files."""
        return read_rows(self.folder, self.kind, wanted)

    def keep(self, keys: Container[K]) -> None:
        """Forget all other items, so that they are processed again."""
        self.done = {key: succeeded for key, succeeded in self.done.items() if key in keys}

    def forget_errors(self) -> None:
        """Forget failed items, so that they are processed again."""
        self.done = {key: succeeded for key, succeeded in self.done.items() if succeeded}

    def sync(self) -> None:
        """Wait until all rows are on the disk."""
        os.fsync(self._file)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Flush all rows to the disk, and close and unlock the file."""
        self.sync()
        release_lock(self._file)

    def _add(self, row: Row) -> None:
        key = _key_of(row, self.kind)
        self.done[key] = self.done.get(key, False) or "error" not in row


def _key_of(row: Row, kind: Any) -> Any:
    try:
        return kind(*(row[name] for name in kind._fields))
    except (TypeError, KeyError) as error:
        raise ValueError(f"a row of the journal is of another kind: {error} is missing") from None


def read_rows(
    folder: Path, kind: type[K], wanted: Callable[[K], bool] = lambda key: True
) -> dict[K, Row]:
    """Return the rows of a run by key, without changing its files.

    A row with an error is replaced by another row of the same key.
    """
    rows: dict[K, Row] = {}
    for row in iter_rows(folder):
        key = _key_of(row, kind)
        if wanted(key) and "error" in rows.get(key, {"error": ""}):
            rows[key] = row
    return rows


def iter_rows(folder: Path) -> Iterator[Row]:
    """Iterate over the rows of a run, which may not fit in memory."""
    for path in sorted(folder.glob("*.jsonl")):
        for row, _ in _rows(path, 0):
            yield row


def read_errors(folder: Path, kind: type[K]) -> dict[K, str]:
    """Return the errors of items that have not been processed successfully."""
    errors: dict[K, str] = {}
    done: set[K] = set()
    for row in iter_rows(folder):
        key = _key_of(row, kind)
        if "error" not in row:
            done.add(key)
        else:
            errors[key] = row["error"]
    return {key: reason for key, reason in errors.items() if key not in done}


def drop_rows(folder: Path, drop: Callable[[Row], bool]) -> None:
    """Remove rows of a run that no other process writes to."""
    for path in sorted(folder.glob("*.jsonl")):
        if any(drop(row) for row, _ in _rows(path, 0)):
            with atomic_write(path) as temporary, temporary.open("wb") as file:
                file.writelines(_line(row) for row, _ in _rows(path, 0) if not drop(row))


def _line(row: Row) -> bytes:
    text = json.dumps(row, separators=(",", ":"))
    return f"{crc32(text.encode()):08x} {text}\n".encode()


def _rows(path: Path, start: int, *, is_retry: bool = False) -> Iterator[tuple[Row, int]]:
    """Yield the complete rows of a file from the byte ``start`` on, with the end of each.

    A damaged line is read once more, as its process may just be truncating and rewriting it.
    """
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            checksum, _, text = line.rstrip(b"\n").partition(b" ")
            if f"{crc32(text):08x}".encode() != checksum:
                if not is_retry:
                    yield from _rows(path, start, is_retry=True)
                    return
                raise ValueError(
                    f"a row in {path}, from byte {start} on, is damaged: its checksum differs; "
                    "restore the file, or remove that line, and its image is done again"
                )
            start += len(line)
            yield json.loads(text), start


def open_locked(path: Path) -> int:
    """Open a file to append to, and lock it until it is closed."""
    file = open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    if not lock(file):
        os.close(file)
        raise ValueError(f"another process writes to {path}; wait for it, or give another folder")
    return file
