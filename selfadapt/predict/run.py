"""A run of ``predict`` over files: what is left to do in a share, and the outcome.

Every image is segmented once, by its share, and then has a row in the journal. Shares do not wait
for each other: each writes the table from the journal when it ends, and the last one to end writes
the videos whose frames are spread over several shares.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from selfadapt.auto import LOW_QUALITY
from selfadapt.data.reading import read_image_size
from selfadapt.forecast import forecast
from selfadapt.journal import Journal, Row, iter_rows
from selfadapt.labels import Classes, predicted_colors, predicted_names
from selfadapt.methods import Segments
from selfadapt.predict.folder import TABLE, FileKey, PredictFolder
from selfadapt.predict.frames import VideoWork
from selfadapt.predict.inputs import Input
from selfadapt.predict.outputs import write_classes
from selfadapt.predict.remote import FileJob
from selfadapt.predict.scene import LargeImages
from selfadapt.predict.stream import UnitOutcome, attempt, predict, stream
from selfadapt.predict.table import append_to_table, write_table
from selfadapt.predict.video import guess_frame_size, guess_num_frames
from selfadapt.scenes import raster_size
from selfadapt.views import Size

MAX_SIZE_SAMPLES = 200
"""Maximum number of files whose size is read to estimate the time of a run."""
ShowProgress = Callable[[int, int, str], None]
"""Called with the numbers of finished and of all images and frames, and the current activity."""
SegmentFiles = Callable[[Sequence[FileJob]], Iterator[tuple[FileJob, UnitOutcome]]]
"""Segments images, and yields the outcome of each once its outputs are written."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Outcome of a run, or of a share of it."""

    num_files: int
    """Number of finished images of the share, and of complete videos."""
    num_earlier: int
    """How many of them an earlier run has done."""
    num_left: int
    """How many files are left to other shares."""
    failures: dict[str, str]
    """Why files could not be segmented, or not completely, by path."""
    notes: dict[str, list[str]]
    """Notes, each with the files it applies to."""
    doubtful: dict[str, float]
    """Quality of the files whose masks a person should look at, by path, the lowest first."""
    table: str
    seconds: float


class PredictRun:
    """A run of ``predict``, or the share given by ``folder.shard``.

    Args:
        folder: The opened output folder.
        journal: The journal of the run.
        method: The method.
        classes: Names of its classes, with colours if they are a mapping.
        inputs: The files.
        show: Called to show progress.
        large: How images that are too large to be segmented whole are, and georeferenced ones.
        segment_files: Segments the images in another way than in this thread.
    """

    def __init__(
        self,
        folder: PredictFolder,
        journal: Journal[FileKey],
        method: Segments,
        classes: Classes | None,
        inputs: Sequence[Input],
        show: ShowProgress = lambda done, total, activity: None,
        large: LargeImages | None = None,
        segment_files: SegmentFiles | None = None,
    ) -> None:
        self.segment_files = segment_files
        self.folder, self.journal, self.method = folder, journal, method
        self.classes, self.inputs, self.show = classes, inputs, show
        self.large = LargeImages(method) if large is None else large
        rows = rows_by_time(journal)
        journal.keep(current_keys(rows))
        self._earlier = latest_rows(rows)
        self._last = {row["file"]: row["at"] for row in rows}
        self._order = {file: index for index, file in enumerate(folder.names)}
        self._keys = {item.file: FileKey(item.file, item.stamp(), None) for item in inputs}
        self._videos: dict[str, VideoWork] = {}
        self._done = self._total = 0
        self._lock = threading.Lock()
        """For rows, which are written by the threads that write the outputs."""
        self._columns: tuple[str, ...] = ()
        """Class names in the header of the table, once they are known."""

    def __call__(self) -> Summary:
        """Segment what is left to do in this share, and return the outcome."""
        start = time.monotonic()
        left = self._left()
        files = {item.file for item in left}
        num_earlier = sum(
            item.file not in files and self.journal.done.get(self._keys[item.file], False)
            for item in self._share(self.inputs)
        )
        items = self._share(left)
        self._total = sum(self._size(item) for item in items)
        self._begin_table(files)
        for is_video, group in groupby(items, key=lambda item: item.is_video):
            for item in group if is_video else ():
                self._segment_video(item)
            self._segment_images([item for item in group if not is_video])
        self.folder.update()
        for item in items:
            if not self._complete(item) and item.file not in self._videos:
                raise OSError(
                    f"outputs of {item.shown} have disappeared: does another program change "
                    f"{self.folder.shown('')}? Run the same command again to restore them"
                )
        if self.folder.shard.total > 1:
            self.journal.refresh()
            summary = self._conclude(num_earlier, start)  # while no other share removes its parts
            if not self.folder.claim():
                return summary
        self.journal.refresh()
        self._finish_videos()
        return self._conclude(num_earlier, start)

    def sizes(self) -> dict[Size, float]:
        """Return how many images and frames of each size are left to do in this share.

        Of many files only a sample is read, and the numbers are scaled up.
        """
        items = self._share(self._left())
        sample = items[:: 1 + len(items) // MAX_SIZE_SAMPLES]
        sizes: Counter[Size] = Counter()
        for item in sample:
            if not item.path.is_file():  # opening a pipe would block
                continue
            try:
                if item.is_raster:
                    height, width = raster_size(item.path)
                else:
                    read = guess_frame_size if item.is_video else read_image_size
                    width, height = read(item.path)
            except (ValueError, OSError):  # reported when it is segmented
                continue
            sizes[height, width] += self._size(item)
        return {size: number * len(items) / len(sample) for size, number in sizes.items()}

    def forecast(self, name: str) -> list[str]:
        """Return lines on the time that this share will take, see ``forecast.forecast``."""
        return forecast(name, self.method, self.sizes(), self.large.max_pixels())

    def _left(self) -> list[Input]:
        """Return the files that are not done, and videos of which label files are missing."""
        left = []
        for item in self.inputs:
            labels = self.folder.paths(item).get("label") if item.is_video else None
            frames = self._earlier.get(item.file, {}).get("frames", 0)
            lacks_labels = labels is not None and len(list(labels.glob("[0-9]*.png"))) < frames
            if lacks_labels or not self._complete(item):
                left.append(item)
        return left

    def _complete(self, item: Input) -> bool:
        """Return True if a file is done, and its outputs still exist."""
        succeeded = self.journal.done.get(self._keys[item.file])
        paths = self.folder.paths(item).values()
        return succeeded is not None and (not succeeded or all(map(self.folder.exists, paths)))

    def _is_done(self, item: Input) -> bool:
        return self._keys[item.file] in self.journal.done

    def _share(self, items: Sequence[Input]) -> list[Input]:
        """Return the images of this share, and all videos: each share has some of their frames."""
        return [i for i in items if i.is_video or self.folder.shard.has(self._order[i.file])]

    def _size(self, item: Input) -> int:
        if not item.is_video:
            return 1
        return max(1, guess_num_frames(item.path) // self.folder.shard.total)

    def _job(self, item: Input) -> FileJob:
        target, tiles = self.folder.target(item), self.folder.tiles(item).absolute()
        return FileJob(item.file, target, item.shown, self._keys[item.file].stamp, str(tiles))

    def _segment_images(self, images: Sequence[Input]) -> None:
        if self.segment_files is not None:
            jobs = [self._job(item) for item in images]
            for job, outcome in self.segment_files(jobs):
                self._record(self._keys[job.file], outcome)
            self.folder.remove_parts()  # of workers that were killed
            return
        by_path = {item.path: item for item in images}
        bases = [self.folder.base(item) for item in images]
        scenes: list[Input] = []

        def is_scene(path: Path) -> bool:
            if self.large.is_scene(by_path[path]):
                scenes.append(by_path[path])
                return True
            return False

        def record(path: Path, outcome: UnitOutcome) -> None:
            self._record(self._keys[by_path[path].file], outcome)

        results = predict(
            self.method, list(by_path), bases, self.classes, self.folder.kinds, record, is_scene
        )
        with closing(results):
            for _ in results:
                pass
        for item in sorted(scenes, key=lambda item: self._order[item.file]):
            self._segment_scene(item)

    def _segment_scene(self, item: Input) -> None:
        key, paths, work = self._keys[item.file], self.folder.paths(item), self.folder.tiles(item)

        def show_tiles(done: int, total: int) -> None:  # they count as images
            text = f"tiles of {item.path.name}"
            self.show(self._done + done, self._total + total - 1, text)

        def segment() -> UnitOutcome:
            return self.large.segment(item, paths, work, self.classes, key.stamp, show_tiles)

        self._record(key, attempt(segment))

    def _segment_video(self, item: Input) -> None:
        work = VideoWork(item, self._keys[item.file], self.folder, self.journal)
        num_done = self._done
        results = stream(self.method, work.units(), self.classes, self._record)
        with closing(results):
            for _ in results:
                pass
        self._total += self._done - num_done - self._size(item)  # replace the guess by the count
        self._videos[item.file] = work
        if self.folder.shard.total == 1:
            self._finish_videos()

    def _record(self, key: FileKey, outcome: UnitOutcome) -> None:
        """Write the row of an image or a frame."""
        with self._lock:
            self._write(row_of(key, outcome))
            self._done += 1
            self.show(self._done, max(self._total, self._done), "")

    def _write(self, row: Row) -> None:
        """Write a row with its time, after that of all rows of its file: clocks may be wrong."""
        file = row["file"]
        row["at"] = self._last[file] = max(time.time(), self._last.get(file, 0) + 0.001)
        if row["frame"] is None:  # appended, at the end the table is written again
            shares = row.get("shares", ())
            if shares and len(shares) != len(self._columns):
                self._columns = predicted_names(self.classes, len(shares))
                self._write_table(latest_rows(rows_by_time(self.journal)))
            append_to_table(self.folder.path / TABLE, row, self.folder.names, self._columns)
        self.journal.write(row)

    def _begin_table(self, left: set[str]) -> None:
        """Write the table of the files done so far; rows of the others are appended to it."""
        rows = self._earlier
        number = next((len(row["shares"]) for row in rows.values() if "shares" in row), 0)
        if number:
            self._columns = predicted_names(self.classes, number)
        elif len(self.classes or ()) > 1:
            self._columns = tuple(self.classes or ())
        table = self.folder.path / TABLE
        if self.folder.shard.total == 1 or not table.is_file() or table.is_symlink():
            self._write_table({file: row for file, row in rows.items() if file not in left})

    def _write_table(self, rows: dict[str, Row]) -> None:
        kept = [rows[file] for file in self.folder.names if file in rows]
        write_table(self.folder.path / TABLE, kept, self.folder.names, self._columns)

    def _finish_videos(self) -> None:
        """Write the videos all of whose frames are done."""
        for file, work in list(self._videos.items()):
            if work.is_ready():
                self.show(self._done, self._total, f"writing the video {work.item.path.name}")
                self._write(work.finish(self.classes))
                work.clear()
                del self._videos[file]

    def _conclude(self, num_earlier: int, start: float) -> Summary:
        """Write the table and the classes, and return the summary."""
        rows = latest_rows(rows_by_time(self.journal))
        current = [(i, rows[i.file]) for i in self._share(self.inputs) if self._is_done(i)]
        notes: dict[str, list[str]] = {}
        doubtful: dict[str, float] = {}
        for item, row in current:
            for note in row.get("notes", ()):
                notes.setdefault(note, []).append(item.shown)
            quality = row.get("quality")
            if quality is not None and quality < LOW_QUALITY:
                doubtful[item.shown] = quality
        self._write_table(rows)
        number = next((len(row["shares"]) for row in rows.values() if "shares" in row), 0)
        if number:
            classes = predicted_names(self.classes, number)
            write_classes(self.folder.path, classes, predicted_colors(self.classes, number))
        return Summary(
            num_files=len(current),
            num_earlier=num_earlier,
            num_left=sum(not self._is_done(item) for item in self.inputs),
            failures={item.shown: row["error"] for item, row in current if "error" in row},
            notes=notes,
            doubtful=dict(sorted(doubtful.items(), key=lambda item: item[1])),
            table=self.folder.shown(TABLE),
            seconds=time.monotonic() - start,
        )


def row_of(key: FileKey, outcome: UnitOutcome) -> Row:
    """Return the row of an image or a frame."""
    row: Row = key._asdict()
    if isinstance(outcome, Exception):
        return {**row, "error": str(outcome)}
    quality = outcome.result.quality
    return {
        **row,
        "width": outcome.width,
        "height": outcome.height,
        "ms": round(1000 * outcome.result.seconds, 3),
        "quality": None if quality is None else round(quality, 3),
        "notes": list(outcome.result.notes),
        "shares": outcome.shares,
    }


def rows_by_time(journal: Journal[FileKey]) -> list[Row]:
    """Return all rows, the latest last."""
    return sorted(iter_rows(journal.folder), key=lambda row: row["at"])


def latest_rows(rows: Iterable[Row]) -> dict[str, Row]:
    """Return the latest row of each file, from rows in order of time."""
    return {row["file"]: row for row in rows if row["frame"] is None}


def current_keys(rows: Iterable[Row]) -> set[FileKey]:
    """Return the keys of rows whose outputs have not been overwritten, from rows in order of time.

    If a file was replaced by another one and then restored, its outputs are those of the other.

    Example:
        >>> stamps = ("old", "new")
        >>> current_keys({"file": "a.png", "stamp": stamp, "frame": None} for stamp in stamps)
        {FileKey(file='a.png', stamp='new', frame=None)}
    """
    stamps: dict[str, str] = {}
    keys: dict[str, set[FileKey]] = {}
    for row in rows:
        key = FileKey(row["file"], row["stamp"], row["frame"])
        if stamps.get(key.file) != key.stamp:
            stamps[key.file], keys[key.file] = key.stamp, set()
        keys[key.file].add(key)
    return set().union(*keys.values())
