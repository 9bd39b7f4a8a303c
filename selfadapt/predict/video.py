"""Videos: their frames as images, and frames put together to videos again.

A video is segmented frame by frame, and every frame by the network as trained: nothing is carried
from one to the next. What is kept of a frame are small PNGs, each whole or not there, from which
the videos are made at the end, when all frames are there. So the work on a video can end at any
moment, and be shared by processes.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as PILImage

from selfadapt.files import atomic_write
from selfadapt.images import colored
from selfadapt.labels import Color
from selfadapt.optional import import_optional
from selfadapt.predict.outputs import Masks, panel, side_by_side

USUAL_RATE = Fraction(25)
"""Frames a second of a video that does not say."""
CODEC = {"name": "libx264", "options": {"crf": "18", "preset": "veryfast"}}


@dataclass
class Reading:
    """What was found out of a video while it was read."""

    num_frames: int = 0
    rate: Fraction = USUAL_RATE
    """Frames a second."""
    varies: bool = False
    """Some frame comes more than half a frame from where this rate would have it."""
    trouble: str | None = None
    """Why the rest of it could not be read."""


def read_frames(path: Path, reading: Reading) -> Generator[Any, None, None]:
    """Yield the frames of a video, and write down what is found out of it on the way.

    Where it cannot be read to its end, the frames before that are all there are.
    """
    av = import_optional("av", "video")
    if not path.is_file():  # a pipe would be waited for
        kind = "a video must be a file, but {} is none" if path.exists() else "there is no video {}"
        reading.trouble = kind.format(path)
        return
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ValueError("it has no pictures")
            source = container.streams.video[0]
            source.thread_type = "AUTO"
            reading.rate = _rate(source)
            first, late = None, Fraction(0)
            for frame in container.decode(source):
                if frame.pts is not None:
                    first = frame.pts if first is None else first
                    late = (frame.pts - first) * frame.time_base
                    stray = abs(late - reading.num_frames / reading.rate)
                    reading.varies |= stray > 1 / reading.rate / 2
                reading.num_frames += 1
                yield frame
            if reading.num_frames < source.frames:
                raise ValueError(f"it says that it has {source.frames} frames")
            if not source.frames and _is_short(container, reading, late):
                raise ValueError(f"it says that it lasts {container.duration / 1e6:.1f} seconds")
    except (av.error.FFmpegError, ValueError) as error:
        found = getattr(error, "strerror", None) or error
        where = f" after frame {reading.num_frames}" if reading.num_frames else ""
        reading.trouble = f"{path} cannot be read{where}, it may be cut off or damaged: {found}"
    if not reading.num_frames and reading.trouble is None:
        reading.trouble = f"{path} is a video without frames"


def _is_short(container: Any, reading: Reading, last: Fraction) -> bool:
    """Say whether a video ends long before it says it does.

    Sound may well go on after it, and the last frame of a video without a fixed rate.
    """
    if not container.duration or len(container.streams) > 1 or reading.varies:
        return False
    rest = Fraction(container.duration, 1_000_000) - last
    return rest > max(3 / reading.rate, last / 20)


def guess_num_frames(path: Path) -> int:
    """Return how many frames a video says it has; 0 if it does not."""
    av = import_optional("av", "video")
    if not path.is_file():
        return 0
    try:
        with av.open(str(path)) as container:
            source = container.streams.video[0]
            seconds = Fraction(container.duration or 0, 1_000_000)
            return source.frames or round(seconds * _rate(source))
    except (av.error.FFmpegError, LookupError):
        return 0


def guess_frame_size(path: Path) -> tuple[int, int]:
    """Return width and height of a video's frames, as it says, or raise ValueError."""
    av = import_optional("av", "video")
    try:
        with av.open(str(path)) as container:
            source = container.streams.video[0]
            return source.width, source.height
    except (av.error.FFmpegError, LookupError) as error:
        raise ValueError(f"{path} does not say what size its frames have") from error


def _rate(source: Any) -> Fraction:
    return source.average_rate or source.guessed_rate or USUAL_RATE


def pixels(frame: Any) -> np.ndarray:
    """Return a frame ``(H, W, 3)`` as it is to be seen: phones lay videos on their side."""
    turns = round(getattr(frame, "rotation", 0) / 90)
    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), turns))


def write_videos(
    path: Path,
    paths: dict[str, Path],
    reading: Reading,
    masks_at: Callable[[int], Masks | None],
    names: Sequence[str],
    colors: Sequence[Color],
) -> None:
    """Read a video once more and write what was made of it.

    Args:
        path: The video.
        paths: The videos to write, by what they show.
        reading: What was found out when it was read.
        masks_at: Gives what is to be shown of a frame; None: that frame could not be segmented.
        names: The classes.
        colors: Theirs.

    Raises:
        ValueError: It cannot be read any more.
    """
    draw = partial(_pictures, kinds=tuple(paths), names=names, colors=colors)
    again = Reading()
    with ExitStack() as stack:
        asides = {kind: stack.enter_context(atomic_write(p)) for kind, p in paths.items()}
        writers: dict[str, VideoWriter] = {}
        size, start = None, None
        for number, frame in enumerate(read_frames(path, again)):
            image = PILImage.fromarray(pixels(frame))
            size = size or image.size
            start = frame.pts if start is None else start
            time: int | None = number
            if reading.varies and start is not None:
                time = None if frame.pts is None else frame.pts - start
            for kind, picture in draw(image, masks_at(number)).items():
                if kind not in writers:
                    varies = reading.varies and start is not None
                    base = frame.time_base if varies else 1 / reading.rate
                    writer = VideoWriter(asides[kind], picture.size, reading.rate, base)
                    writers[kind] = stack.enter_context(writer)
                if image.size != size:
                    picture = picture.resize(writers[kind].size)
                writers[kind].add(picture, time)
        if not writers:
            raise ValueError(again.trouble)
        for writer in writers.values():
            writer.finish()


def _pictures(
    image: PILImage.Image,
    masks: Masks | None,
    kinds: Sequence[str],
    names: Sequence[str],
    colors: Sequence[Color],
) -> dict[str, PILImage.Image]:
    """Return the pictures of a frame; what could not be segmented is black."""
    black = PILImage.new("RGB", image.size)
    painted = black if masks is None else colored(masks.label, colors)
    makers: dict[str, Callable[[], PILImage.Image]] = {
        "color": lambda: painted,
        "overlay": lambda: side_by_side(
            image, black if masks is None else PILImage.blend(image, painted, 0.5)
        ),
        "confidence": lambda: (
            black if masks is None else PILImage.fromarray(masks.confidence.numpy()).convert("RGB")
        ),
        "panel": lambda: panel(masks, image, names, colors),
    }
    return {kind: makers[kind]() for kind in kinds}


class VideoWriter:
    """Writes pictures as an H.264 video, which players and browsers show.

    Args:
        path: The file.
        size: Width and height of the pictures; one that is odd gains a line of black.
        rate: Frames a second.
        time_base: What one unit of a picture's time is, in seconds.
    """

    def __init__(
        self, path: Path, size: tuple[int, int], rate: Fraction, time_base: Fraction
    ) -> None:
        self.size = size
        self._av = import_optional("av", "video")
        self._container = self._av.open(
            str(path), "w", format="mp4", options={"movflags": "faststart"}
        )
        self._stream = self._container.add_stream(
            CODEC["name"], rate=rate, options=CODEC["options"]
        )
        self._stream.width, self._stream.height = (length + length % 2 for length in size)
        self._stream.pix_fmt = "yuv420p"
        self._stream.codec_context.time_base = time_base
        self._time_base = time_base
        self._last = -1

    def add(self, picture: PILImage.Image, time: int | None) -> None:
        """Append a picture, to be shown from a time on; it comes after the one before."""
        self._last = self._last + 1 if time is None else max(time, self._last + 1)
        wanted = (self._stream.width, self._stream.height)
        if picture.size != wanted:
            picture = picture.crop((0, 0, *wanted))
        frame = self._av.VideoFrame.from_ndarray(np.asarray(picture), format="rgb24")
        frame.pts, frame.time_base = self._last, self._time_base
        self._container.mux(self._stream.encode(frame))

    def finish(self) -> None:
        """Write what is still held back."""
        self._container.mux(self._stream.encode(None))

    def __enter__(self) -> "VideoWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._container.close()


def read_masks(parts: dict[str, Path], names: tuple[str, ...]) -> Masks:
    """Return what was kept of a frame."""
    found = {part: torch.from_numpy(_levels(path)) for part, path in parts.items()}
    label = found["label"]
    nothing = torch.zeros_like(label, dtype=torch.uint8)
    return Masks(label, found.get("confidence", nothing), names, found.get("source"))


def _levels(path: Path) -> np.ndarray:
    with PILImage.open(path) as picture:
        return np.array(picture)
