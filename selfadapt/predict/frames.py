"""The work on a video: its frames as images to segment, and what is made of them all."""

import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from PIL import Image as PILImage
from torch import Tensor

from selfadapt.files import make_folder
from selfadapt.images import Image, label_image
from selfadapt.journal import Journal, Row
from selfadapt.labels import Classes, Color, predicted_colors, predicted_names
from selfadapt.optional import import_optional
from selfadapt.predict.folder import Key, PredictFolder
from selfadapt.predict.inputs import Input
from selfadapt.predict.outputs import Masks, write_png
from selfadapt.predict.stream import Unit, Units
from selfadapt.predict.video import Reading, pixels, read_frames, read_masks, write_videos

NEEDED_BY = {"label": (), "confidence": ("confidence", "panel"), "source": ("panel",)}
"""What is kept of a frame, and the outputs that need it; the label always is."""

MOST_NOTES = 5
"""How many notes of its frames a video has."""


class VideoWork:
    """A video that is being segmented, or the frames of it that are in a share."""

    def __init__(self, item: Input, key: Key, folder: PredictFolder, journal: Journal[Key]) -> None:
        self.item, self.key, self.folder, self.journal = item, key, folder, journal
        self.reading = Reading()
        self._work = folder.frames(item)
        self._labels = folder.paths(item).get("label")
        self._missing: set[int] | None = None

    def units(self) -> Units:
        """Read the frames of this share that are not done yet."""
        for place in (self._work, self._labels):
            if place is not None:
                make_folder(place)
        for number, frame in enumerate(read_frames(self.item.path, self.reading)):
            if self.folder.shard.has(number) and not self._has(number):
                write = partial(_write_frame, parts=self._parts(number))
                yield Unit(self._frame(number), _image(frame), write)

    def is_ready(self) -> bool:
        """Return True if all frames are there, those of the other shares as well."""
        if self._missing is None:
            self._missing = set(range(self.reading.num_frames))
        self._missing = {number for number in self._missing if not self._has(number)}
        return not self._missing

    def finish(self, classes: Classes | None) -> Row:
        """Make the videos; return the row of the whole."""
        rows = self._rows()
        good = [row for row in rows if "error" not in row]
        trouble = None
        row: Row = {**self.key._asdict(), "at": time.time(), "frames": self.reading.num_frames}
        if good:
            names = predicted_names(classes, len(good[0]["shares"]))
            paths = {k: path for k, path in self.folder.paths(self.item).items() if k != "label"}
            make_folder(self.folder.base(self.item).parent)
            colors = predicted_colors(classes, len(names))
            trouble = self._write(paths, names, colors) if paths else None
            row |= _averages(good)
        if reasons := [*self._reasons(rows), *([trouble] if trouble else ())]:
            row["error"] = "; ".join(reasons)
        return row

    def _write(
        self, paths: dict[str, Path], names: tuple[str, ...], colors: list[Color]
    ) -> str | None:
        """Write the videos; return why they could not be, where that is the video's fault."""
        errors = import_optional("av", "video").error
        try:
            masks_at = partial(self._masks, names=names)
            write_videos(self.item.path, paths, self.reading, masks_at, names, colors)
        except OSError:
            raise
        except ValueError as error:
            return f"no video could be made of its frames: {error}"
        except errors.FFmpegError as error:
            return f"no video could be made of it: {error.strerror}"
        return None

    def clear(self) -> None:
        """Remove what was only kept for the videos."""
        shutil.rmtree(self._work, ignore_errors=True)
        if self._labels is not None and not self.reading.num_frames and not _any(self._labels):
            self._labels.rmdir()
        for path in self._labels.glob("*.png") if self._labels else ():
            if path.stem.isdigit() and int(path.stem) >= self.reading.num_frames:
                path.unlink()  # of a longer video that had this name before

    def _frame(self, number: int) -> Key:
        return self.key._replace(frame=number)

    def _parts(self, number: int) -> dict[str, Path]:
        """Return the files that are kept of a frame."""
        wanted = [p for p, by in NEEDED_BY.items() if not by or set(by) & set(self.folder.kinds)]
        parts = {part: self._work / f"{number:06}_{part}.png" for part in wanted}
        if self._labels is not None:
            parts["label"] = self._labels / f"{number:06}.png"
        return parts

    def _has(self, number: int) -> bool:
        good = self.journal.done.get(self._frame(number))
        files = (path for part, path in self._parts(number).items() if part != "source")
        return good is not None and (not good or all(path.exists() for path in files))

    def _masks(self, number: int, names: tuple[str, ...]) -> Masks | None:
        parts = {part: path for part, path in self._parts(number).items() if path.exists()}
        return read_masks(parts, names) if "label" in parts else None

    def _rows(self) -> list[Row]:
        frames = {self._frame(number) for number in range(self.reading.num_frames)}
        rows = self.journal.rows(lambda key: key in frames)
        return [rows[key] for key in sorted(rows, key=lambda key: key.frame or 0)]

    def _reasons(self, rows: Sequence[Row]) -> list[str]:
        """Return why the video, or some of its frames, could not be segmented."""
        failed = [row for row in rows if "error" in row]
        reasons = [self.reading.trouble] if self.reading.trouble else []
        if failed:
            first = f"the first is frame {failed[0]['frame']}: {failed[0]['error']}"
            reasons.append(f"{len(failed)} of {len(rows)} frames could not be segmented, {first}")
        return reasons


def _any(folder: Path) -> bool:
    return any(folder.iterdir())


def _averages(rows: Sequence[Row]) -> Row:
    """Return what is written down of a video: size, time of a frame, shares over all frames."""
    shares = zip(*(row["shares"] for row in rows), strict=True)
    notes = list(dict.fromkeys(note for row in rows for note in row["notes"]))
    more = [f"{len(notes) - MOST_NOTES} more notes of frames"] if len(notes) > MOST_NOTES else []
    return {
        "width": rows[0]["width"],
        "height": rows[0]["height"],
        "ms": round(sum(row["ms"] for row in rows) / len(rows), 3),
        "notes": notes[:MOST_NOTES] + more,
        "shares": [round(sum(values) / len(rows), 6) for values in shares],
    }


def _image(frame: object) -> Image | Exception:
    try:
        return torch.from_numpy(pixels(frame)).permute(2, 0, 1)
    except ValueError as error:
        return error


def _write_frame(masks: Masks, image: Image, parts: dict[str, Path]) -> None:
    """Keep of a frame what its videos are made of."""
    for part, path in parts.items():
        levels = getattr(masks, part)
        if levels is not None:
            is_label = part == "label"
            picture = label_image(levels, masks.colors) if is_label else _gray(levels)
            write_png(picture, path, part)


def _gray(levels: Tensor) -> PILImage.Image:
    return PILImage.fromarray(levels.numpy())
