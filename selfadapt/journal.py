"""The journal of a run: one line for each thing done, which outlives any end of a process.

Every process appends to a file of its own, each line in one write: what is written stays, whoever
is killed when. A line is its checksum and a JSON object. A last line without its end was being
written when a process was killed; it does not count, and its image is done again.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar
from zlib import crc32

from selfadapt.files import hold, lock, release, written_whole

Row = dict[str, Any]
K = TypeVar("K", bound=tuple)
"""A NamedTuple: what a row is about. Its fields are those of the row."""
SYNC_EVERY = 5.0
"""Seconds between two moments at which rows are known to be on the disk, should the power fail."""


class Journal(Generic[K]):
    """What all processes of a run have done, and the file that this one appends to.

    Args:
        folder: Where the files of all processes are.
        kind: What a row is about.
        rank: The number of this process.
    """

    def __init__(self, folder: Path, kind: type[K], rank: int = 0) -> None:
        self.folder, self.kind = folder, kind
        self.done: dict[K, bool] = {}
        """The rows that are there: whether the image was segmented, or why not is written there."""
        self._read: dict[Path, int] = {}
        own = folder / f"{rank:04}.jsonl"
        self._file = lock_rows(own)
        hold(self._file)
        self._synced = time.monotonic()
        try:
            self.refresh()
            os.ftruncate(self._file, self._read.get(own, 0))  # a line that was cut short goes
        except BaseException:
            release(self._file)
            raise

    def refresh(self) -> None:
        """Take in what all processes have done since the last time."""
        for path in sorted(self.folder.glob("*.jsonl")):
            start = self._read.get(path, 0)
            for row, end in _rows(path, start):
                self._note(row)
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
        self._note(row)
        if time.monotonic() - self._synced > SYNC_EVERY:
            self.sync()

    def rows(self, wanted: Callable[[K], bool] = lambda key: True) -> dict[K, Row]:
        """Return rows from the files."""
        return read_rows(self.folder, self.kind, wanted)

    def forget_errors(self) -> None:
        """Take failures as not done, so that they are tried again."""
        self.done = {key: good for key, good in self.done.items() if good}

    def sync(self) -> None:
        """Wait until all rows are on the disk."""
        os.fsync(self._file)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Write out all rows and let go of the file."""
        self.sync()
        release(self._file)

    def _note(self, row: Row) -> None:
        key = _key_of(row, self.kind)
        self.done[key] = self.done.get(key, False) or "error" not in row


def _key_of(row: Row, kind: Any) -> Any:
    try:
        return kind(*(row[name] for name in kind._fields))
    except (TypeError, KeyError) as error:
        raise ValueError(f"a row of another kind is among the others: {error} is missing") from None


def read_rows(
    folder: Path, kind: type[K], wanted: Callable[[K], bool] = lambda key: True
) -> dict[K, Row]:
    """Return the rows of a run, without touching its files; one that failed gives way to another.

    Each key is there once, however often its line is.
    """
    found: dict[K, Row] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for row, _ in _rows(path, 0):
            key = _key_of(row, kind)
            if wanted(key) and ("error" in found.get(key, {"error": ""})):
                found[key] = row
    return found


def each_row(folder: Path) -> Iterator[Row]:
    """Yield the rows of a run one by one: there may be more than fit in memory."""
    for path in sorted(folder.glob("*.jsonl")):
        for row, _ in _rows(path, 0):
            yield row


def read_errors(folder: Path, kind: type[K]) -> dict[K, str]:
    """Return why things failed that have not been done since."""
    errors: dict[K, str] = {}
    done: set[K] = set()
    for path in sorted(folder.glob("*.jsonl")):
        for row, _ in _rows(path, 0):
            key = _key_of(row, kind)
            if "error" not in row:
                done.add(key)
            else:
                errors[key] = row["error"]
    return {key: reason for key, reason in errors.items() if key not in done}


def drop_rows(folder: Path, drop: Callable[[Row], bool]) -> None:
    """Remove rows of a run that no other process is at."""
    for path in sorted(folder.glob("*.jsonl")):
        if any(drop(row) for row, _ in _rows(path, 0)):
            with written_whole(path) as aside, aside.open("wb") as kept:
                kept.writelines(_line(row) for row, _ in _rows(path, 0) if not drop(row))


def _line(row: Row) -> bytes:
    text = json.dumps(row, separators=(",", ":"))
    return f"{crc32(text.encode()):08x} {text}\n".encode()


def _rows(path: Path, start: int, *, again: bool = False) -> Iterator[tuple[Row, int]]:
    """Yield the whole rows of a file from a byte on, and where each ends.

    A line that is not whole is read ``again``: its process may just be putting it right.
    """
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            checksum, _, text = line.rstrip(b"\n").partition(b" ")
            if f"{crc32(text):08x}".encode() != checksum:
                if not again:
                    yield from _rows(path, start, again=True)
                    return
                raise ValueError(
                    f"a row in {path}, from byte {start} on, is not as it was written; restore "
                    "the file, or remove that line and its image is done again"
                )
            start += len(line)
            yield json.loads(text), start


def lock_rows(path: Path) -> int:
    """Open a file of rows to append to, which no other process can do until it is closed."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    if not lock(file):
        os.close(file)
        raise ValueError(f"another process writes to {path}; wait for it, or give another folder")
    return file
