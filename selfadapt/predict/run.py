"""A run over files: what is left to do of a share, and what came of it.

Every image is segmented once, by the share that it is in, and then has a row in the journal. Shares
wait for nobody: each writes the table from the journal when it ends, and the last to end makes the
videos whose frames are in several of them.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from selfadapt.data.reading import read_image_size
from selfadapt.journal import Journal, Row
from selfadapt.labels import Classes, predicted_colors, predicted_names
from selfadapt.methods import Segments
from selfadapt.predict.folder import TABLE, Key, PredictFolder
from selfadapt.predict.frames import VideoWork
from selfadapt.predict.inputs import Input
from selfadapt.predict.outputs import write_classes
from selfadapt.predict.stream import Outcome, predict, stream
from selfadapt.predict.table import append_to_table, write_table
from selfadapt.predict.video import guess_frame_size, guess_num_frames
from selfadapt.views import Size

MOST_LOOKED_AT = 200
"""Files whose size is looked up to say what a run will take."""
Show = Callable[[int, int, str], None]
"""Is told how many images and frames are done, of how many, and what is being done beside that."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What came of a run, or of a share of it."""

    num_files: int
    """The images of the share, and the videos that are complete."""
    num_before: int
    """How many of them were done by an earlier run."""
    num_left: int
    """How many files other shares have still to do."""
    failures: dict[str, str]
    """Why files could not be segmented, or not in full."""
    notes: dict[str, list[str]]
    """What is to be known of some results, with their files."""
    table: Path
    seconds: float


class Run:
    """A run, or the share of it that ``folder`` says.

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
        self._order = {file: index for index, file in enumerate(folder.names)}
        self._keys = {item.file: Key(item.file, stamps[item.file], None) for item in inputs}
        self._videos: dict[str, VideoWork] = {}
        self._done = self._total = 0
        self._lock = threading.Lock()
        """Rows are written by the threads that write the files."""
        self._columns: tuple[str, ...] = ()
        """The classes in the header of the table, once they are known."""

    def __call__(self) -> Summary:
        """Do what is left to do; return what came of the share."""
        start = time.monotonic()
        left = self._left()
        files = {item.file for item in left}
        before = [i for i in self._share(self.inputs) if i.file not in files and self._is_good(i)]
        mine = self._share(left)
        self._total = sum(self._size(item) for item in mine)
        self._begin_table(files)
        for is_video, group in groupby(mine, key=lambda item: item.is_video):
            for item in group if is_video else ():
                self._segment_video(item)
            self._segment_images([item for item in group if not is_video])
        self._check_outputs(mine)
        is_last = self.folder.claim()
        self.journal.refresh()
        if is_last:
            self._finish_videos()
        return self._conclude(len(before), start)

    def sizes(self) -> dict[Size, float]:
        """Return how many images and frames of each size are left to do in this share.

        Of many files some are looked at, and taken for all.
        """
        mine = self._share(self._left())
        sample = mine[:: 1 + len(mine) // MOST_LOOKED_AT]
        sizes: Counter[Size] = Counter()
        for item in sample:
            if not item.path.is_file():  # a pipe would be waited for
                continue
            try:
                width, height = (guess_frame_size if item.is_video else read_image_size)(item.path)
            except (ValueError, OSError):  # it is said where it is read
                continue
            sizes[height, width] += self._size(item)
        return {size: number * len(mine) / len(sample) for size, number in sizes.items()}

    def _left(self) -> list[Input]:
        return [
            item for item in self.inputs if not self._complete(item) or self._lacks_labels(item)
        ]

    def _complete(self, item: Input) -> bool:
        """Return True if there is nothing left to do for a file, as it is now."""
        good = self.journal.done.get(self._keys[item.file])
        paths = self.folder.paths(item).values()
        return good is not None and (not good or all(path.exists() for path in paths))

    def _lacks_labels(self, item: Input) -> bool:
        """Return True if labels of a video are gone that an earlier run has made."""
        folder = self.folder.paths(item).get("label") if item.is_video else None
        frames = self._before.get(item.file, {}).get("frames", 0)
        return folder is not None and len(list(folder.glob("[0-9]*.png"))) < frames

    def _is_done(self, item: Input) -> bool:
        return self._keys[item.file] in self.journal.done

    def _is_good(self, item: Input) -> bool:
        return self.journal.done.get(self._keys[item.file], False)

    def _share(self, items: Sequence[Input]) -> list[Input]:
        """Return the images of this share, and the videos, of which it has some frames."""
        return [i for i in items if i.is_video or self.folder.shard.has(self._order[i.file])]

    def _size(self, item: Input) -> int:
        if not item.is_video:
            return 1
        return max(1, guess_num_frames(item.path) // self.folder.shard.total)

    def _segment_images(self, images: Sequence[Input]) -> None:
        keys = {item.path: self._keys[item.file] for item in images}
        bases = [self.folder.base(item) for item in images]

        def record(path: Path, outcome: Outcome) -> None:
            self._record(keys[path], outcome)

        results = predict(self.method, list(keys), bases, self.classes, self.folder.kinds, record)
        with closing(results):
            for _ in results:
                pass

    def _segment_video(self, item: Input) -> None:
        work = VideoWork(item, self._keys[item.file], self.folder, self.journal)
        before = self._done
        results = stream(self.method, work.units(), self.classes, self._record)
        with closing(results):
            for _ in results:
                pass
        self._total += self._done - before - self._size(item)  # the guess gives way to the count
        self._videos[item.file] = work
        if self.folder.shard.total == 1:
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

    def _begin_table(self, left: set[str]) -> None:
        """Write the table of what is done so far; the files that are left are appended to it."""
        rows = self._before
        number = next((len(row["shares"]) for row in rows.values() if "shares" in row), 0)
        if number:
            self._columns = predicted_names(self.classes, number)
        elif len(self.classes or ()) > 1:
            self._columns = tuple(self.classes or ())
        if self.folder.shard.total == 1 or not (self.folder.path / TABLE).exists():
            self._write_table({file: row for file, row in rows.items() if file not in left})

    def _add_to_table(self, row: Row) -> None:
        """Append a row; the table is written anew once all rows are in the journal."""
        shares = row.get("shares", ())
        if shares and len(shares) != len(self._columns):
            self._columns = predicted_names(self.classes, len(shares))
            self._write_table(latest_rows(self.journal))
        append_to_table(self.folder.path / TABLE, row, self.folder.names, self._columns)

    def _write_table(self, rows: dict[str, Row]) -> None:
        kept = [rows[file] for file in self.folder.names if file in rows]
        write_table(self.folder.path / TABLE, kept, self.folder.names, self._columns)

    def _finish_videos(self) -> None:
        """Make the videos whose frames are all there."""
        for file, work in list(self._videos.items()):
            if work.is_ready():
                self.show(self._done, self._total, f"writing the video {work.item.path.name}")
                row = work.finish(self.classes)
                self._add_to_table(row)
                self.journal.write(row)
                work.clear()
                del self._videos[file]

    def _check_outputs(self, items: Sequence[Input]) -> None:
        """Raise OSError unless what was written is there."""
        for item in items:
            if not self._complete(item) and item.file not in self._videos:
                raise OSError(
                    f"what was written for {item.path} is gone: does something else change "
                    f"{self.folder.path}? The same command makes it again"
                )

    def _conclude(self, num_before: int, start: float) -> Summary:
        """Write the table, and what goes with it."""
        rows = latest_rows(self.journal)
        current = [(i, rows[i.file]) for i in self._share(self.inputs) if self._is_done(i)]
        notes: dict[str, list[str]] = {}
        for item, row in current:
            for note in row.get("notes", ()):
                notes.setdefault(note, []).append(str(item.path))
        self._write_table(rows)
        number = next((len(row["shares"]) for row in rows.values() if "shares" in row), 0)
        if number:
            classes = predicted_names(self.classes, number)
            write_classes(self.folder.path, classes, predicted_colors(self.classes, number))
        return Summary(
            num_files=len(current),
            num_before=num_before,
            num_left=sum(not self._is_done(item) for item in self.inputs),
            failures={str(item.path): row["error"] for item, row in current if "error" in row},
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
    return {item.file: _next_stamp(item.stamp(), known.get(item.file, [])) for item in inputs}


def _next_stamp(stamp: str, known: Sequence[str]) -> str:
    """Return the stamp of a file that had these before.

    Example:
        >>> _next_stamp("a", []), _next_stamp("a", ["a"]), _next_stamp("a", ["a", "b"])
        ('a', 'a', 'a #1')
        >>> _next_stamp("a", ["a", "b", "a #1"])
        'a #1'
    """
    same = [item for item in known if item.partition(" #")[0] == stamp]
    if not same:
        return stamp
    return same[-1] if known[-1] == same[-1] else f"{stamp} #{len(set(same))}"
