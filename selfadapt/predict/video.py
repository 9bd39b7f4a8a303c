"""Videos: reading their frames, and writing videos of their masks.

A video is segmented frame by frame, each starting from the network as trained: no state is carried
over. The masks of a frame are kept as small PNGs, written atomically, from which the videos are
written when all frames are done. So the work on a video can be interrupted at any moment, and
shared by several processes.
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

DEFAULT_RATE = Fraction(25)
"""Frames per second of a video that does not specify it."""
CODEC = {"name": "libx264", "options": {"crf": "18", "preset": "veryfast"}}


@dataclass
class VideoInfo:
    """What is known about a video after reading its frames."""

    num_frames: int = 0
    rate: Fraction = DEFAULT_RATE
    """Frames per second."""
    varies: bool = False
    """Whether some frame is off the constant frame rate by more than half a frame."""
    error: str | None = None
    """Why its remaining frames could not be read."""


def read_frames(path: Path, info: VideoInfo) -> Generator[Any, None, None]:
    """Yield the frames of a video, and fill in ``info`` meanwhile.

    If the video cannot be read to its end, ``info.error`` is set after the last readable frame.
    """
    av = import_optional("av", "video")
    if not path.is_file():  # opening a pipe would block
        exists = path.exists()
        info.error = f"the video {path} is not a file" if exists else f"there is no video {path}"
        return
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ValueError("it has no video stream")
            source = container.streams.video[0]
            source.thread_type = "AUTO"
            info.rate = _rate(source)
            first, late = None, Fraction(0)
            for frame in container.decode(source):
                if frame.pts is not None:
                    first = frame.pts if first is None else first
                    late = (frame.pts - first) * frame.time_base
                    stray = abs(late - info.num_frames / info.rate)
                    info.varies |= stray > 1 / info.rate / 2
                info.num_frames += 1
                yield frame
            if info.num_frames < source.frames:
                raise ValueError(f"its header says {source.frames} frames")
            if not source.frames and _is_short(container, info, late):
                raise ValueError(f"its header says {container.duration / 1e6:.1f} seconds")
    except (av.error.FFmpegError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        where = f" after frame {info.num_frames}" if info.num_frames else ""
        info.error = f"{path} cannot be read{where}, it may be cut off or damaged: {reason}"
    if not info.num_frames and info.error is None:
        info.error = f"{path} is a video without frames"


def _is_short(container: Any, info: VideoInfo, last: Fraction) -> bool:
    """Return True if a video ends long before the duration in its header.

    Not checked with an audio stream, which may be longer, nor with a variable frame rate, where the
    last frame may be shown for long.
    """
    if not container.duration or len(container.streams) > 1 or info.varies:
        return False
    rest = Fraction(container.duration, 1_000_000) - last
    return rest > max(3 / info.rate, last / 20)


def guess_num_frames(path: Path) -> int:
    """Return the number of frames according to a video's header; 0 if unknown."""
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
    """Return width and height of the frames according to a video's header, or raise ValueError."""
    av = import_optional("av", "video")
    try:
        with av.open(str(path)) as container:
            source = container.streams.video[0]
            return source.width, source.height
    except (av.error.FFmpegError, LookupError) as error:
        raise ValueError(f"the frame size of {path} cannot be read") from error


def _rate(source: Any) -> Fraction:
    return source.average_rate or source.guessed_rate or DEFAULT_RATE


def pixels(frame: Any) -> np.ndarray:
    """Return a frame ``(H, W, 3)`` upright: videos of phones may be stored rotated."""
    turns = round(getattr(frame, "rotation", 0) / 90)
    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), turns))


def write_videos(
    path: Path,
    paths: dict[str, Path],
    info: VideoInfo,
    masks_at: Callable[[int], Masks | None],
    names: Sequence[str],
    colors: Sequence[Color],
) -> None:
    """Read a video again and write videos of its masks.

    Args:
        path: The video.
        paths: The videos to write, by kind.
        info: What is known about the video from the first reading.
        masks_at: Returns the masks of a frame; None if it could not be segmented.
        names: Names of the classes.
        colors: Colours of the classes.

    Raises:
        ValueError: It can no longer be read.
    """
    draw = partial(_pictures, kinds=tuple(paths), names=names, colors=colors)
    new_info = VideoInfo()
    with ExitStack() as stack:
        temporary = {kind: stack.enter_context(atomic_write(p)) for kind, p in paths.items()}
        writers: dict[str, VideoWriter] = {}
        size, start = None, None
        for number, frame in enumerate(read_frames(path, new_info)):
            image = PILImage.fromarray(pixels(frame))
            size = size or image.size
            start = frame.pts if start is None else start
            time: int | None = number
            if info.varies and start is not None:
                time = None if frame.pts is None else frame.pts - start
            for kind, picture in draw(image, masks_at(number)).items():
                if kind not in writers:
                    varies = info.varies and start is not None
                    base = frame.time_base if varies else 1 / info.rate
                    writer = VideoWriter(temporary[kind], picture.size, info.rate, base)
                    writers[kind] = stack.enter_context(writer)
                if image.size != size:
                    picture = picture.resize(writers[kind].size)
                writers[kind].add(picture, time)
        if not writers:
            raise ValueError(new_info.error)
        for writer in writers.values():
            writer.finish()


def _pictures(
    image: PILImage.Image,
    masks: Masks | None,
    kinds: Sequence[str],
    names: Sequence[str],
    colors: Sequence[Color],
) -> dict[str, PILImage.Image]:
    """Return the pictures of a frame by kind; without masks they are black."""
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
    """Writes pictures as an H.264 video, which players and browsers can show.

    Args:
        path: The file.
        size: Width and height of the pictures; odd ones are padded by a black line.
        rate: Frames per second.
        time_base: Unit of the time stamps of the pictures, in seconds.
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
        """Append a picture with a time stamp, increased if it is not after the last one."""
        self._last = self._last + 1 if time is None else max(time, self._last + 1)
        size = (self._stream.width, self._stream.height)
        if picture.size != size:
            picture = picture.crop((0, 0, *size))
        frame = self._av.VideoFrame.from_ndarray(np.asarray(picture), format="rgb24")
        frame.pts, frame.time_base = self._last, self._time_base
        self._container.mux(self._stream.encode(frame))

    def finish(self) -> None:
        """Write the frames that the encoder has buffered."""
        self._container.mux(self._stream.encode(None))

    def __enter__(self) -> "VideoWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._container.close()


def read_masks(parts: dict[str, Path], names: tuple[str, ...]) -> Masks:
    """Read the masks kept of a frame."""
    maps = {}
    for part, path in parts.items():
        with PILImage.open(path) as picture:
            maps[part] = torch.from_numpy(np.array(picture))
    zeros = torch.zeros_like(maps["label"], dtype=torch.uint8)
    return Masks(maps["label"], maps.get("confidence", zeros), names, maps.get("source"))
