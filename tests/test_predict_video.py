"""Videos are segmented frame by frame and keep their frames, size and times."""

import csv
import os
import shutil
import signal
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image as PILImage

import selfadapt
from conftest import random_image
from runs import run_cli, start_cli
from selfadapt.baselines import SaNOnly
from selfadapt.images import to_pil
from selfadapt.predict.folder import PredictFolder
from selfadapt.predict.frames import VideoWork
from selfadapt.predict.legend import heading, text_size
from selfadapt.predict.video import VideoInfo, read_frames

NET = ("--model", "streets", "--method", "san", "--device", "cpu")
CODECS = {".mp4": "libx264", ".mov": "mpeg4", ".avi": "mpeg4", ".mkv": "ffv1", ".webm": "libvpx"}
SECONDS = 60


def write_video(
    path: Path, frames: int = 7, size: tuple[int, int] = (48, 32), rate: Any = 12,
    times: list[int] | None = None,
) -> Path:  # fmt: skip
    with av.open(str(path), "w") as container:
        stream = container.add_stream(CODECS[path.suffix], rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(frames):
            picture = to_pil(random_image(size[1], size[0], seed=number))
            frame = av.VideoFrame.from_ndarray(np.asarray(picture), format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def frames_of(path: Path) -> tuple[Fraction, list[np.ndarray]]:
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        return container.streams.video[0].average_rate, frames


def brightness(frame: np.ndarray) -> np.ndarray:
    return np.asarray(PILImage.fromarray(frame).convert("L")).astype(int)


def times_of(path: Path) -> list[float]:
    with av.open(str(path)) as container:
        return [round(frame.time, 3) for frame in container.decode(video=0)]


def row_of(folder: Path) -> dict[str, str]:
    with (folder / "predictions.csv").open(newline="") as file:
        return next(csv.DictReader(file))


def contents(folder: Path) -> dict[str, Any]:
    """Return the labels, and how many frames videos have: encoders differ from run to run."""
    paths = [p for p in folder.rglob("*") if p.is_file() and ".predict" not in p.parts]
    labels = {str(p.relative_to(folder)): p.read_bytes() for p in paths if p.suffix == ".png"}
    return labels | {p.name: len(frames_of(p)[1]) for p in paths if p.suffix == ".mp4"}


def test_times_that_repeat_are_moved_on(tmp_path: Path) -> None:
    video = write_video(tmp_path / "film.mkv", times=[0, 40, 40, 41, 300, 320, 1000])
    to_pil(random_image(32, 48)).save(tmp_path / "z.png")
    out = tmp_path / "out"
    assert run_cli("predict", video, tmp_path / "z.png", *NET, "-o", out) == 0
    assert len(frames_of(out / "film_color.mp4")[1]) == 7
    assert times_of(out / "film_color.mp4") == pytest.approx(
        [0, 0.04, 0.041, 0.042, 0.3, 0.32, 1.0], abs=0.002
    )
    assert (out / "z_label.png").exists()


def test_a_video_that_cannot_be_written_does_not_stop_the_rest(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def fail(*_: Any) -> None:
        raise av.error.FFmpegError(22, "Invalid argument")

    monkeypatch.setattr("selfadapt.predict.frames.write_videos", fail)
    video = write_video(tmp_path / "film.mkv", frames=2)
    to_pil(random_image(32, 48)).save(tmp_path / "z.png")
    out = tmp_path / "out"
    assert run_cli("predict", video, tmp_path / "z.png", *NET, "-o", out) == 1
    assert "no video could be made of it: Invalid argument" in capsys.readouterr().err
    assert (out / "z_label.png").exists()


@pytest.mark.parametrize("when", ["planned", "segmented"])
def test_a_video_that_vanishes_does_not_stop_the_rest(
    when: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    film = write_video(tmp_path / "b.mp4")
    for name in ("a.png", "c.png"):
        to_pil(random_image(16, 16)).save(tmp_path / name)
    unit = (PredictFolder, "start") if when == "planned" else (VideoWork, "finish")
    real = getattr(*unit)
    monkeypatch.setattr(
        *unit, lambda *args, **how: film.unlink(missing_ok=True) or real(*args, **how)
    )
    assert run_cli("predict", tmp_path, *NET, "-o", tmp_path / "out") == 1
    captured = capsys.readouterr()
    assert "2 of 3 images segmented" in captured.out
    reason = f"there is no video {film}"
    if when == "segmented":
        reason = f"no video could be made of its frames: {reason}"
    assert captured.err.splitlines()[-1] == f"not done: {reason}"
    with (tmp_path / "out" / "predictions.csv").open(newline="") as file:
        reasons = {Path(row["file"]).name: row["reason"] for row in csv.DictReader(file)}
    assert reasons == {"a.png": "", "b.mp4": reason, "c.png": ""}


def test_labels_that_are_gone_are_made_again(tmp_path: Path) -> None:
    video = write_video(tmp_path / "film.mkv", frames=3)
    command = ("predict", video, *NET, "-o", tmp_path / "out")
    assert run_cli(*command) == 0
    before = contents(tmp_path / "out")
    (tmp_path / "out/film_label/000001.png").unlink()
    assert run_cli(*command) == 0
    assert contents(tmp_path / "out") == before


def test_starting_anew_leaves_other_files_among_the_labels(tmp_path: Path) -> None:
    video = write_video(tmp_path / "film.mkv", frames=2)
    command = ("predict", video, *NET, "-o", tmp_path / "out", "--outputs", "label")
    assert run_cli(*command) == 0
    notes = tmp_path / "out/film_label/notes.txt"
    notes.write_text("mine")
    assert run_cli(*command, "--overwrite") == 0
    assert notes.read_text() == "mine"


def test_files_behind_links_are_not_removed(tmp_path: Path) -> None:
    elsewhere, out = tmp_path / "elsewhere", tmp_path / "out"
    for folder in (tmp_path / "drives/a", elsewhere / "film"):
        folder.mkdir(parents=True)
    video = write_video(tmp_path / "drives/a/film.mkv", frames=2)
    command = ("predict", tmp_path / "drives/**/*", *NET, "-o", out, "--outputs", "label")
    assert run_cli(*command) == 0
    shutil.rmtree(out / "a/film_label")
    shutil.rmtree(out / ".predict/frames/a")
    for link in (out / "a/film_label", out / ".predict/frames/a"):
        link.symlink_to(elsewhere)
    precious = [elsewhere / "000099.png", elsewhere / "film/precious.txt"]
    for path in precious:
        path.touch()
    os.utime(video, ns=(1, 1))
    assert run_cli(*command) == 0
    assert [path for path in precious if not path.exists()] == []


@pytest.mark.parametrize("suffix", CODECS)
def test_a_video_keeps_frames_size_and_rate(suffix: str, tmp_path: Path) -> None:
    video = write_video(tmp_path / f"film{suffix}", rate=Fraction(30000, 1001))
    out = tmp_path / "out"
    assert run_cli("predict", video, *NET, "-o", out) == 0
    rate, given = frames_of(video)
    assert len(given) == 7
    for kind, columns in {"overlay": 2, "color": 1, "confidence": 1}.items():
        found, frames = frames_of(out / f"film_{kind}.mp4")
        assert len(frames) == 7
        assert frames[0].shape == (32, columns * 48, 3)
        assert float(found) == pytest.approx(float(rate), rel=1e-3)
    assert [p.name for p in sorted((out / "film_label").iterdir())] == [
        f"{number:06}.png" for number in range(7)
    ]
    assert not list((out / ".predict").rglob("*.png"))


def test_every_frame_is_segmented_from_the_source_weights(tmp_path: Path) -> None:
    video = write_video(tmp_path / "film.mkv")
    flags = ("--model", "streets", "--steps", "2", "--lr", "0.5", "--device", "cpu")
    assert run_cli("predict", video, *flags, "-o", tmp_path / "out", "--outputs", "label") == 0
    frames = frames_of(video)[1]
    for number in (0, 6):
        method = selfadapt.SelfAdapt(selfadapt.open_model("streets"), steps=2, lr=0.5)
        label = PILImage.open(tmp_path / "out" / "film_label" / f"{number:06}.png")
        assert np.array_equal(np.asarray(label), method(frames[number]).label.numpy())


def test_an_overlay_stands_beside_its_frame_and_a_panel_has_four(tmp_path: Path) -> None:
    video = write_video(tmp_path / "film.mkv", size=(47, 31))
    out = tmp_path / "out"
    assert run_cli("predict", video, *NET, "-o", out, "--outputs", "overlay", "panel") == 0
    given = frames_of(video)[1]
    overlay = frames_of(out / "film_overlay.mp4")[1]
    panel = frames_of(out / "film_panel.mp4")[1]
    assert overlay[0].shape == (32, 94, 3)
    assert panel[0].shape[1] == 188
    head = heading("", 47, text_size(31)).height
    for number in range(7):
        for made, top in ((overlay, 0), (panel, head)):
            shown = made[number][top : top + 31, :46]
            found, wanted = brightness(shown), brightness(given[number][:, :46])
            assert np.abs(found - wanted).mean() < 5
    assert not (out / "film_label").exists()


def test_times_that_vary_are_kept(tmp_path: Path) -> None:
    times = [0, 40, 80, 500, 540, 1200, 1240]
    video = write_video(tmp_path / "film.mkv", rate=25, times=times)
    assert run_cli("predict", video, *NET, "-o", tmp_path / "out", "--outputs", "overlay") == 0
    assert times_of(tmp_path / "out" / "film_overlay.mp4") == [time / 1000 for time in times]


def test_what_is_no_video_is_listed_and_the_rest_is_done(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "films"
    folder.mkdir()
    write_video(folder / "good.mp4")
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "text.avi").write_text("no video")
    whole = write_video(tmp_path / "whole.mp4").read_bytes()
    (folder / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    assert run_cli("predict", folder, *NET, "-o", tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert error.count("not done: ") == 3
    for name in ("empty.mp4", "text.avi", "cut.mp4"):
        assert f"{name} cannot be read, it may be cut off or damaged" in error
    assert (tmp_path / "out" / "good_overlay.mp4").exists()
    assert len(list((tmp_path / "out").glob("*.mp4"))) == 3


def test_a_video_that_breaks_off_is_made_of_what_is_there(tmp_path: Path, capsys: Any) -> None:
    whole = write_video(tmp_path / "whole.mkv", frames=20).read_bytes()
    video = tmp_path / "film.mkv"
    video.write_bytes(whole[: len(whole) // 2])
    info = VideoInfo()
    num_frames = len(list(read_frames(video, info)))
    assert 0 < num_frames < 20
    assert "it may be cut off or damaged" in (info.error or "")
    assert run_cli("predict", video, *NET, "-o", tmp_path / "out") == 1
    assert len(frames_of(tmp_path / "out" / "film_overlay.mp4")[1]) == num_frames
    assert row_of(tmp_path / "out")["frames"] == str(num_frames)


def test_frames_that_fail_are_black_and_counted(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    video = write_video(tmp_path / "film.mkv")
    real, seen = SaNOnly.compute, []

    def fail(*args: Any) -> Any:
        seen.append(args)
        if len(seen) in (3, 4):
            raise RuntimeError("too dark")
        return real(*args)

    monkeypatch.setattr(SaNOnly, "compute", fail)
    out = tmp_path / "out"
    command = ("predict", video, *NET, "-o", out, "--outputs", "overlay", "color")
    assert run_cli(*command) == 1
    error = capsys.readouterr().err
    assert "2 of 7 frames could not be segmented, the first is frame 2: " in error
    frames = frames_of(out / "film_color.mp4")[1]
    assert len(frames) == 7
    assert frames[2].max() < 30 < frames[1].max()
    assert run_cli(*command, "--retry") == 0
    assert frames_of(out / "film_color.mp4")[1][2].max() > 30


def test_a_finished_video_is_not_read_again(tmp_path: Path, monkeypatch: Any) -> None:
    video = write_video(tmp_path / "film.mp4")
    command = ("predict", video, *NET, "-o", tmp_path / "out")
    assert run_cli(*command) == 0
    videos = list((tmp_path / "out").glob("*.mp4"))
    before = [path.stat().st_mtime_ns for path in videos]
    monkeypatch.setattr(SaNOnly, "compute", None)
    assert run_cli(*command) == 0
    assert [path.stat().st_mtime_ns for path in videos] == before


def test_a_shorter_video_of_the_same_name_leaves_no_frame_behind(tmp_path: Path) -> None:
    video = write_video(tmp_path / "film.mp4", frames=7)
    command = ("predict", video, *NET, "-o", tmp_path / "out")
    assert run_cli(*command) == 0
    write_video(video, frames=4)
    assert run_cli(*command) == 0
    assert len(list((tmp_path / "out" / "film_label").iterdir())) == 4
    assert row_of(tmp_path / "out")["frames"] == "4"


@pytest.mark.slow
def test_killed_while_frames_are_segmented_or_encoded_it_goes_on(tmp_path: Path) -> None:
    video = write_video(tmp_path / "film.mkv", frames=40, size=(256, 192))
    out = tmp_path / "out"
    command = ("predict", video, *NET, "-o", out)
    moments = {
        "frames": lambda: len(list((out / "film_label").glob("*.png"))) >= 5,
        "videos": lambda: any(out.glob(".film_overlay.mp4.*.part")),
    }
    rows = out / ".predict" / "rows" / "0000.jsonl"
    for moment in moments.values():
        process = start_cli(*command)
        start = time.monotonic()
        while not moment():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() - start < SECONDS
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert not list(out.glob("*.mp4"))
    num_rows = rows.read_text().count("\n")
    assert num_rows >= 40
    assert run_cli(*command) == 0
    assert rows.read_text().count("\n") == num_rows + 1, "no frame is done twice"
    assert run_cli(*command[:-1], tmp_path / "whole") == 0
    assert contents(out) == contents(tmp_path / "whole")


def test_shares_make_a_video_together(tmp_path: Path) -> None:
    video = write_video(tmp_path / "film.mkv")
    command = ("predict", video, *NET)
    out = tmp_path / "out"
    assert run_cli(*command, "-o", out, "--shard", "2/2") == 0
    assert not list(out.glob("*.mp4"))
    assert run_cli(*command, "-o", out, "--shard", "1/2") == 0
    folder = out / ".predict" / "rows"
    assert [p.read_text().count("\n") for p in sorted(folder.iterdir())] == [5, 3]
    assert run_cli(*command, "-o", tmp_path / "alone") == 0
    assert contents(out) == contents(tmp_path / "alone")


def test_without_the_library_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    video = write_video(tmp_path / "film.mp4")
    monkeypatch.setitem(sys.modules, "av", None)
    assert run_cli("predict", video, *NET, "-o", tmp_path / "out") == 2
    assert "pip install 'selfadapt[video]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
