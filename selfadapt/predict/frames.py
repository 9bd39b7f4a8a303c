"""Segmentation of a video: its frames as units to segment, and the videos made of them."""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from PIL import Image as PILImage

from selfadapt.files import holds, make_folder
from selfadapt.images import Image, label_image
from selfadapt.journal import Journal, Row
from selfadapt.labels import Classes, Color, predicted_colors, predicted_names
from selfadapt.optional import import_optional
from selfadapt.predict.folder import FileKey, PredictFolder
from selfadapt.predict.inputs import Input
from selfadapt.predict.outputs import Masks, write_png
from selfadapt.predict.stream import Unit, Units
from selfadapt.predict.video import VideoInfo, pixels, read_frames, read_masks, write_videos

NEEDED_BY = {"label": (), "confidence": ("confidence", "panel"), "source": ("panel",)}
"""Masks kept of a frame, and the outputs that need them; the label is always kept."""

MAX_NOTES = 5
"""Maximum number of notes of its frames that a video has."""


class VideoWork:
    """A video to segment, or those of its frames that are in a share."""

    def __init__(
        self, item: Input, key: FileKey, folder: PredictFolder, journal: Journal[FileKey]
    ) -> None:
        self.item, self.key, self.folder, self.journal = item, key, folder, journal
        self.info = VideoInfo()
        self._work = folder.frames(item)
        self._labels = folder.paths(item).get("label")
        self._missing: set[int] | None = None

    def units(self) -> Units:
        """Yield the frames of this share that are not done yet."""
        for folder in (self._work, self._labels):
            if folder is not None:
                make_folder(folder)
        for number, frame in enumerate(read_frames(self.item.path, self.info)):
            if self.folder.shard.has(number) and not self._has(number):
                write = partial(_write_frame, parts=self._parts(number))
                image: Image | Exception
                try:
                    image = torch.from_numpy(pixels(frame)).permute(2, 0, 1)
                except ValueError as error:
                    image = error
                yield Unit(self._frame(number), image, write)

    def is_ready(self) -> bool:
        """Return True if all frames are done, those of other shares included."""
        if self._missing is None:
            self._missing = set(range(self.info.num_frames))
        self._missing = {number for number in self._missing if not self._has(number)}
        return not self._missing

    def finish(self, classes: Classes | None) -> Row:
        """Write the videos; return the row of the whole file."""
        frames = {self._frame(number) for number in range(self.info.num_frames)}
        by_key = self.journal.rows(lambda key: key in frames)
        rows = [by_key[key] for key in sorted(by_key, key=lambda key: key.frame or 0)]
        good = [row for row in rows if "error" not in row]
        failed = [row for row in rows if "error" in row]
        reasons = [self.info.error] if self.info.error else []
        if failed:
            first = f"the first is frame {failed[0]['frame']}: {failed[0]['error']}"
            reasons.append(f"{len(failed)} of {len(rows)} frames could not be segmented, {first}")
        row: Row = {**self.key._asdict(), "frames": self.info.num_frames}
        if good:
            names = predicted_names(classes, len(good[0]["shares"]))
            paths = {k: path for k, path in self.folder.paths(self.item).items() if k != "label"}
            make_folder(self.folder.base(self.item).parent)
            colors = predicted_colors(classes, len(names))
            if paths and (video_error := self._write(paths, names, colors)):
                reasons.append(video_error)
            row |= _averages(good)
        if reasons:
            row["error"] = "; ".join(reasons)
        return row

    def _write(
        self, paths: dict[str, Path], names: tuple[str, ...], colors: list[Color]
    ) -> str | None:
        """Write the videos; return the reason if that fails because of the input video."""
        errors = import_optional("av", "video").error

        def masks_at(number: int) -> Masks | None:
            parts = {part: path for part, path in self._parts(number).items() if path.exists()}
            return read_masks(parts, names) if "label" in parts else None

        try:
            write_videos(self.item.path, paths, self.info, masks_at, names, colors)
        except OSError:
            raise
        except ValueError as error:
            return f"no video could be made of its frames: {error}"
        except errors.FFmpegError as error:
            return f"no video could be made of it: {error.strerror}"
        return None

    def clear(self) -> None:
        """Remove masks that were kept only to write the videos."""
        if holds(self.folder.path, self._work):
            shutil.rmtree(self._work, ignore_errors=True)
        if (
            self._labels is not None
            and not self.info.num_frames
            and not any(self._labels.iterdir())
        ):
            self._labels.rmdir()
        for path in self._labels.glob("*.png") if self._labels else ():
            is_surplus = path.stem.isdigit() and int(path.stem) >= self.info.num_frames
            if is_surplus and holds(self.folder.path, path):
                path.unlink()  # of an earlier, longer video of this name

    def _frame(self, number: int) -> FileKey:
        return self.key._replace(frame=number)

    def _parts(self, number: int) -> dict[str, Path]:
        """Return the paths of the masks kept of a frame."""
        kinds = set(self.folder.kinds)
        needed = [part for part, by in NEEDED_BY.items() if not by or set(by) & kinds]
        parts = {part: self._work / f"{number:06}_{part}.png" for part in needed}
        if self._labels is not None:
            parts["label"] = self._labels / f"{number:06}.png"
        return parts

    def _has(self, number: int) -> bool:
        good = self.journal.done.get(self._frame(number))
        files = (path for part, path in self._parts(number).items() if part != "source")
        return good is not None and (not good or all(path.exists() for path in files))


def _averages(rows: Sequence[Row]) -> Row:
    """Return the size of a video, and the mean time and class shares of its frames."""
    shares = zip(*(row["shares"] for row in rows), strict=True)
    qualities = [row["quality"] for row in rows if row.get("quality") is not None]
    notes = list(dict.fromkeys(note for row in rows for note in row["notes"]))
    more = [f"{len(notes) - MAX_NOTES} more notes of frames"] if len(notes) > MAX_NOTES else []
    return {
        "width": rows[0]["width"],
        "height": rows[0]["height"],
        "ms": round(sum(row["ms"] for row in rows) / len(rows), 3),
        "quality": round(sum(qualities) / len(qualities), 3) if qualities else None,
        "notes": notes[:MAX_NOTES] + more,
        "shares": [round(sum(values) / len(rows), 6) for values in shares],
    }


def _write_frame(masks: Masks, image: Image, parts: dict[str, Path]) -> None:
    """Write the masks of a frame that its videos are made of."""
    for part, path in parts.items():
        levels = getattr(masks, part)
        if levels is not None:
            if part == "label":
                picture = label_image(levels, masks.colors)
            else:
                picture = PILImage.fromarray(levels.numpy())
            write_png(picture, path, part)
