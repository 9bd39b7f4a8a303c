"""A run over files: what is left to do, in one or many processes, and what came of it.

Every image is done once, by the process whose number it has, and then has a row in the journal.
Processes meet in the journal: so it does not matter how many they are, nor how often they are
started. The first makes the videos and the table when all is there.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from selfadapt.data.reading import size_of_file
from selfadapt.journal import Journal, Row
from selfadapt.labels import Classes, predicted_colors, predicted_names
from selfadapt.methods import Segments
from selfadapt.predict.frames import VideoWork
from selfadapt.predict.inputs import Input
from selfadapt.predict.outputs import write_classes
from selfadapt.predict.record import PATIENCE, TABLE, Key, PredictFolder
from selfadapt.predict.stream import Outcome, predict, stream
from selfadapt.predict.table import append_to_table, write_table
from selfadapt.predict.video import guess_frame_size, guess_num_frames
from selfadapt.views import Size

MOST_LOOKED_AT = 200
"""Files whose size is looked up to say what a run will take."""
POLL = 0.5
"""Seconds between two looks at what the other processes have done."""
Show = Callable[[int, int, str], None]
"""Is told how many images and frames are done, of how many, and what is being done beside that."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What came of a run."""

    num_files: int
    num_before: int
    """How many of them were done by an earlier run."""
    failures: dict[str, str]
    """Why files could not be segmented, or not in full."""
    notes: dict[str, list[str]]
    """What is to be known of some results, with their files."""
    table: Path
    seconds: float


class Run:
    """One run, in one of the processes that share it.

    Args:
        folder: Where outputs go, opened.
        journal: What is done already.
        method: Segments an image.
        classes: The names of what it finds, with colours if they are a mapping.
        inputs: The files.
        show: Is told how far it has come.
    """

    def __init__(
        self,
        folder: PredictFolder,
        journal: Journal[Key],
        method: Segments,
        classes: Classes | None,
        inputs: Sequence[Input],
        show: Show = lambda done, total, doing: None,
    ) -> None:
        self.folder, self.journal, self.method = folder, journal, method
        self.classes, self.inputs, self.show = classes, inputs, show
        self._before = latest_rows(journal)
        stamps = present_stamps(inputs, journal)
        self._keys = {one.file: Key(one.file, stamps[one.file], None) for one in inputs}
        self._videos: dict[str, VideoWork] = {}
        self._done = self._total = 0
        self._lock = threading.Lock()
        """Rows are written by the threads that write the files."""
        self._columns: tuple[str, ...] = ()
        """The classes in the header of the table, once they are known."""

    def __call__(self) -> Summary | None:
        """Do what is left to do; return what came of it all, in the first process."""
        start = time.monotonic()
        left = self._left()
        before = [one for one in self.inputs if one not in left and self._is_good(one)]
        mine = self._share(left)
        self._total = sum(self._size(one) for one in mine)
        self._begin_table(left)
        for is_video, group in groupby(mine, key=lambda one: one.is_video):
            for one in group if is_video else ():
                self._segment_video(one)
            self._segment_images([one for one in group if not is_video])
        if self.folder.rank > 0:
            return None
        self._wait(left)
        return self._conclude(len(before), start)

    def sizes(self) -> dict[Size, float]:
        """Return how many images and frames of each size this process has to do.

        Of many files some are looked at, and taken for all.
        """
        mine = self._share(self._left())
        sample = mine[:: 1 + len(mine) // MOST_LOOKED_AT]
        sizes: Counter[Size] = Counter()
        for one in sample:
            if not one.path.is_file():  # a pipe would be waited for
                continue
            try:
                width, height = (guess_frame_size if one.is_video else size_of_file)(one.path)
            except (ValueError, OSError):  # it is said where it is read
                continue
            sizes[height, width] += self._size(one)
        return {size: number * len(mine) / len(sample) for size, number in sizes.items()}

    def _left(self) -> list[Input]:
        return [one for one in self.inputs if not self._complete(one) or self._lacks_labels(one)]

    def _complete(self, one: Input) -> bool:
        """Say whether there is nothing left to do for a file, as it is now."""
        good = self.journal.done.get(self._keys[one.file])
        paths = self.folder.paths(one).values()
        return good is not None and (not good or all(path.exists() for path in paths))

    def _lacks_labels(self, one: Input) -> bool:
        """Say whether labels of a video are gone that an earlier run has made."""
        folder = self.folder.paths(one).get("label") if one.is_video else None
        frames = self._before.get(one.file, {}).get("frames", 0)
        return folder is not None and len(list(folder.glob("[0-9]*.png"))) < frames

    def _is_good(self, one: Input) -> bool:
        return self.journal.done.get(self._keys[one.file], False)

    def _share(self, left: Sequence[Input]) -> list[Input]:
        """Return the images of this process, and the videos, of which it does some frames."""
        order = {file: number for number, file in enumerate(self.folder.names)}
        rank, world = self.folder.rank, self.folder.world
        return [one for one in left if one.is_video or order[one.file] % world == rank]

    def _size(self, one: Input) -> int:
        return max(1, guess_num_frames(one.path) // self.folder.world) if one.is_video else 1

    def _segment_images(self, images: Sequence[Input]) -> None:
        keys = {one.path: self._keys[one.file] for one in images}
        bases = [self.folder.base(one) for one in images]

        def record(path: Path, outcome: Outcome) -> None:
            self._record(keys[path], outcome)

        results = predict(self.method, list(keys), bases, self.classes, self.folder.outputs, record)
        with closing(results):
            for _ in results:
                pass

    def _segment_video(self, one: Input) -> None:
        work = VideoWork(one, self._keys[one.file], self.folder, self.journal)
        before = self._done
        results = stream(self.method, work.units(), self.classes, self._record)
        with closing(results):
            for _ in results:
                pass
        self._total += self._done - before - self._size(one)  # the guess gives way to the count
        self._videos[one.file] = work
        self._finish_videos()

    def _record(self, key: Key, outcome: Outcome) -> None:
        """Write down what came of an image or a frame."""
        row = row_of(key, outcome)
        with self._lock:
            if key.frame is None:
                self._add_to_table(row)
            self.journal.write(row)
            self._done += 1
            self.show(self._done, max(self._total, self._done), "")

    def _begin_table(self, left: Sequence[Input]) -> None:
        """Write the table of what is done so far; the files that are left come to it one by one."""
        rows = self._before
        number = next((len(row["shares"]) for row in rows.values() if "shares" in row), 0)
        if number:
            self._columns = predicted_names(self.classes, number)
        elif len(self.classes or ()) > 1:
            self._columns = tuple(self.classes or ())
        if self.folder.rank == 0:
            again = {one.file for one in left}
            self._write_table({file: row for file, row in rows.items() if file not in again})

    def _add_to_table(self, row: Row) -> None:
        """Append a row; the table is written anew once all rows are in the journal."""
        shares = row.get("shares", ())
        if shares and len(shares) != len(self._columns):
            self._columns = predicted_names(self.classes, len(shares))
            if self.folder.rank == 0:
                self._write_table(latest_rows(self.journal))
        append_to_table(self.folder.path / TABLE, row, self.folder.names, self._columns)

    def _write_table(self, rows: dict[str, Row]) -> None:
        kept = [rows[file] for file in self.folder.names if file in rows]
        write_table(self.folder.path / TABLE, kept, self.folder.names, self._columns)

    def _finish_videos(self) -> None:
        """Put videos together whose frames are all there, which the first process does."""
        for file, work in list(self._videos.items()):
            if self.folder.rank == 0 and work.is_ready():
                self.show(self._done, self._total, f"writing the video {work.one.path.name}")
                row = work.finish(self.classes)
                self._add_to_table(row)
                self.journal.write(row)
                work.clear()
                del self._videos[file]

    def _wait(self, left: Sequence[Input]) -> None:
        """Wait until the other processes have done their share; what is done must be there."""
        since = time.monotonic()
        while missing := self._missing(left):
            if any(self._keys[one.file] not in self.journal.done for one in missing):
                since = time.monotonic()
            if time.monotonic() - since >= (PATIENCE if self.folder.world > 1 else 0):
                raise OSError(
                    f"what was written for {missing[0].path} is gone: does something else change "
                    f"{self.folder.path}? The same command makes it again"
                )
            self.show(self._done, self._total, "waiting for the other processes")
            time.sleep(POLL)

    def _missing(self, left: Sequence[Input]) -> list[Input]:
        """Return the files that something is still to be written for, by any process."""
        self.journal.refresh()
        self._finish_videos()
        return [one for one in left if one.file in self._videos or not self._complete(one)]

    def _conclude(self, num_before: int, start: float) -> Summary:
        """Write the table and tidy up."""
        rows = latest_rows(self.journal)
        current = [rows[one.file] for one in self.inputs]
        notes: dict[str, list[str]] = {}
        for one, row in zip(self.inputs, current, strict=True):
            for note in row.get("notes", ()):
                notes.setdefault(note, []).append(str(one.path))
        self._write_table(rows)
        number = next((len(row["shares"]) for row in rows.values() if "shares" in row), 0)
        if number:
            classes = predicted_names(self.classes, number)
            write_classes(self.folder.path, classes, predicted_colors(self.classes, number))
        self.folder.sweep(self.inputs)
        return Summary(
            num_files=len(self.inputs),
            num_before=num_before,
            failures={
                str(one.path): row["error"]
                for one, row in zip(self.inputs, current, strict=True)
                if "error" in row
            },
            notes=notes,
            table=self.folder.path / TABLE,
            seconds=time.monotonic() - start,
        )


def row_of(key: Key, outcome: Outcome) -> Row:
    """Return the row of an image or a frame."""
    row: Row = {**key._asdict(), "at": time.time()}
    if isinstance(outcome, Exception):
        return {**row, "error": str(outcome)}
    return {
        **row,
        "width": outcome.width,
        "height": outcome.height,
        "ms": round(1000 * outcome.result.seconds, 3),
        "notes": list(outcome.result.notes),
        "shares": outcome.shares,
    }


def latest_rows(journal: Journal[Key]) -> dict[str, Row]:
    """Return for each file what last came of it."""
    rows = journal.rows(lambda key: key.frame is None)
    return {row["file"]: row for row in sorted(rows.values(), key=lambda row: row["at"])}


def present_stamps(inputs: Sequence[Input], journal: Journal[Key]) -> dict[str, str]:
    """Return what the journal calls each file as it is now.

    That is its stamp; or, where the file was another one in between, the stamp with a number: what
    was made of it then has been written over since.
    """
    rows = journal.rows(lambda key: True).values()
    known: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: row["at"]):
        stamps = known.setdefault(row["file"], [])
        if row["stamp"] not in stamps[-1:]:
            stamps.append(row["stamp"])
    return {one.file: _next_stamp(one.stamp(), known.get(one.file, [])) for one in inputs}


def _next_stamp(stamp: str, known: Sequence[str]) -> str:
    """Return the stamp of a file that had these before.

    Example:
        >>> _next_stamp("a", []), _next_stamp("a", ["a"]), _next_stamp("a", ["a", "b"])
        ('a', 'a', 'a #1')
        >>> _next_stamp("a", ["a", "b", "a #1"])
        'a #1'
    """
    same = [one for one in known if one.partition(" #")[0] == stamp]
    if not same:
        return stamp
    return same[-1] if known[-1] == same[-1] else f"{stamp} #{len(set(same))}"
