"""Runs over files go on after any end of a process, share their work, and never lose a file."""

import csv
import json
import os
import shutil
import signal
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as PILImage

import selfadapt.predict.run as run_module
from conftest import random_image
from runs import run_cli, start_cli
from selfadapt.baselines import SaNOnly
from selfadapt.images import count_frames, to_pil
from selfadapt.labels import STREETS_9, class_colors
from selfadapt.predict.folder import SHARED_FILES, FileKey, PredictFolder
from selfadapt.predict.inputs import find_inputs
from selfadapt.predict.legend import heading, text_size
from selfadapt.predict.outputs import write_result
from selfadapt.predict.run import current_keys
from selfadapt.runs.store import RunStore

NET = ("--model", "streets", "--method", "san", "--device", "cpu")
SECONDS = 60


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(6):
        to_pil(random_image(24, 40, seed=number)).save(folder / f"{number}.png")
    return folder


@pytest.fixture
def calls(monkeypatch: Any) -> list[Any]:
    """What the network was asked to segment."""
    seen: list[Any] = []
    real = SaNOnly.compute
    monkeypatch.setattr(SaNOnly, "compute", lambda *args: seen.append(args) or real(*args))
    return seen


def table(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "predictions.csv").open(newline="") as file:
        return {Path(row["file"]).name: row for row in csv.DictReader(file)}


def pictures(folder: Path) -> dict[str, bytes]:
    paths = (p for p in folder.rglob("*") if p.is_file() and ".predict" not in p.parts)
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths if p.name not in SHARED_FILES}


def wait_for(condition: Callable[[], bool], process: Any) -> None:
    start = time.monotonic()
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() - start < SECONDS
        time.sleep(0.002)


# what is done, and what is left


def test_the_same_command_does_nothing_twice(
    photos: Path, tmp_path: Path, calls: list[Any], capsys: Any
) -> None:
    command = ("predict", photos, *NET, "-o", tmp_path / "out")
    assert run_cli(*command) == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.png")}
    num_calls = len(calls)
    assert run_cli(*command) == 0
    assert len(calls) == num_calls
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.png")}
    assert "6 of 6 images segmented (6 before)" in capsys.readouterr().out


def test_what_is_new_changed_or_gone_is_done_again(
    photos: Path, tmp_path: Path, calls: list[Any]
) -> None:
    out = tmp_path / "out"
    command = ("predict", photos, *NET, "-o", out)
    assert run_cli(*command) == 0
    calls.clear()
    to_pil(random_image(24, 40, seed=9)).save(photos / "new.png")
    to_pil(random_image(24, 56, seed=9)).save(photos / "1.png")
    (out / "2_color.png").unlink()
    assert run_cli(*command) == 0
    assert len(calls) == 3
    assert PILImage.open(out / "1_label.png").size == (56, 24)
    assert (out / "2_color.png").exists()
    rows = table(out)
    assert rows["1.png"]["width"] == "56"
    assert list(rows) == [*(f"{number}.png" for number in range(6)), "new.png"]


def test_a_file_that_is_put_back_is_done_again(photos: Path, tmp_path: Path) -> None:
    image, kept, out = photos / "0.png", tmp_path / "kept.png", tmp_path / "out"
    command = ("predict", image, *NET, "-o", out, "--outputs", "label")
    shutil.copy2(image, kept)
    for size in ((24, 40), (32, 48), (24, 40), (32, 48)):
        if size == (24, 40):
            shutil.copy2(kept, image)
        else:
            to_pil(random_image(*size)).save(image)
            os.utime(image, ns=(1, 1))
        for _ in range(2):
            assert run_cli(*command) == 0
            assert np.asarray(PILImage.open(out / "0_label.png")).shape == size
            assert table(out)["0.png"]["height"] == str(size[0])


def test_frames_from_before_another_content_are_done_again() -> None:
    order = (("old", 0), ("old", 1), ("old", None), ("new", 0), ("old", 0))
    rows = [{"file": "a.mp4", "stamp": stamp, "frame": frame} for stamp, frame in order]
    assert current_keys(rows) == {FileKey("a.mp4", "old", 0)}


def test_no_clock_needs_to_be_right(
    photos: Path, tmp_path: Path, calls: list[Any], monkeypatch: Any
) -> None:
    out = tmp_path / "out"
    command = ("predict", photos / "0.png", *NET, "-o", out, "--outputs", "label")
    for number, hours in enumerate((9, 3, 6, 0)):
        monkeypatch.setattr(time, "time", lambda now=2e9 + 3600 * hours: now)
        to_pil(random_image(24, 32 + 8 * number)).save(photos / "0.png")
        for _ in range(2):
            assert run_cli(*command) == 0
            assert table(out)["0.png"]["width"] == str(32 + 8 * number)
        assert len(calls) == number + 1


def test_a_pipe_is_not_waited_for(photos: Path, tmp_path: Path, capsys: Any) -> None:
    for name in ("pipe.png", "pipe.mp4"):
        os.mkfifo(photos / name)
    assert run_cli("predict", photos, *NET, "-o", tmp_path / "out", "--outputs", "label") == 1
    told = capsys.readouterr()
    assert "6 of 8 images segmented" in told.out
    assert "pipe.png is a pipe or a device" in told.err
    assert "pipe.mp4 is not a file" in told.err
    assert not (tmp_path / "out/pipe_label").exists()


def test_a_failure_is_kept_until_the_file_changes_or_it_is_tried_again(
    photos: Path, tmp_path: Path, calls: list[Any], monkeypatch: Any, capsys: Any
) -> None:
    out = tmp_path / "out"
    (photos / "bad.png").write_text("no image")
    command = ("predict", photos, *NET, "-o", out)
    assert run_cli(*command) == 1
    assert table(out)["bad.png"]["status"] == "failed"
    assert "not an image file" in table(out)["bad.png"]["reason"]
    assert run_cli(*command) == 1
    assert capsys.readouterr().err.count("not done: ") == 2
    shutil.copy(photos / "0.png", photos / "bad.png")
    assert run_cli(*command) == 0
    assert table(out)["bad.png"]["status"] == "done"
    calls.clear()
    assert run_cli(*command, "--retry") == 0
    assert not calls
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_cli(*command) == 2
    assert "start processes with --shard i/n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--alpha", "0.3"], "settings.alpha: default -> 0.3"),
        (["--outputs", "label"], "outputs: .* -> ['label']"),
        (["--method", "source"], "method: san -> source"),
    ],
)
def test_other_settings_are_refused_in_the_same_folder(
    flags: list[str], message: str, photos: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    command = ("predict", photos / "0.png", *NET, "-o", out)
    assert run_cli(*command) == 0
    before = pictures(out)
    assert run_cli(*command, *flags) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in message.split(".*"))
    assert "--overwrite to start" in error
    assert pictures(out) == before
    assert run_cli(*command, *flags, "--overwrite") == 0
    if "--outputs" in flags:
        assert set(pictures(out)) == {"0_label.png"}


def test_foreign_files_are_refused_before_and_after_a_run(
    photos: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    assert run_cli("predict", photos / "0.png", *NET, "-o", out) == 0
    (out / "1_label.png").write_bytes(b"mine")
    assert run_cli("predict", photos, *NET, "-o", out) == 2
    assert "1_label.png would be replaced" in capsys.readouterr().err
    assert (out / "1_label.png").read_bytes() == b"mine"
    assert not (out / "2_label.png").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "predictions.csv").write_text("mine")
    assert run_cli("predict", photos, *NET, "-o", other) == 2
    assert (other / "predictions.csv").read_text() == "mine"


def test_outputs_among_the_inputs_are_no_inputs(photos: Path, tmp_path: Path) -> None:
    command = ("predict", photos, *NET, "-o", photos)
    assert run_cli(*command) == 0
    assert run_cli(*command) == 0
    assert len(table(photos)) == 6
    assert len(list(photos.glob("*.png"))) == 6 + 4 * 6 + 1  # the legend


def test_a_file_keeps_its_name_when_another_of_that_name_comes(
    photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run_cli("predict", photos, *NET, "-o", out, "--outputs", "label") == 0
    to_pil(random_image(24, 40)).save(photos / "0.jpg")
    assert run_cli("predict", photos, *NET, "-o", out, "--outputs", "label") == 0
    assert {"0_label.png", "0_jpg_label.png"} <= set(pictures(out))
    assert table(out)["0.jpg"]["output"] == "0_jpg"


def test_a_damaged_record_is_said_and_can_be_replaced(
    photos: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    command = ("predict", photos / "0.png", *NET, "-o", out)
    assert run_cli(*command) == 0
    (out / ".predict" / "record.json").write_text("{")
    assert run_cli(*command) == 2
    assert "record.json is damaged" in capsys.readouterr().err
    assert run_cli(*command, "--overwrite") == 0


# ends of processes


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_files(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(40):
        to_pil(random_image(48, 64, seed=number)).save(photos / f"{number:02}.png")
    out = tmp_path / "out"
    command = ("predict", photos, *NET, "-o", out)
    for number in (3, 15):
        process = start_cli(*command)
        wait_for(lambda least=number: len(list(out.glob("*_label.png"))) >= least, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    left_over = out / ".05_label.png.0123cdef.part"
    left_over.write_bytes(b"half")
    mine = out / ".mine.part"
    mine.write_bytes(b"mine")
    assert len(list(out.glob("*_label.png"))) < 40, "it was done before it was killed"
    assert run_cli(*command) == 0
    assert run_cli(*command[:-1], tmp_path / "whole") == 0
    assert mine.exists()
    mine.unlink()
    assert pictures(out) == pictures(tmp_path / "whole")


def without_times(out: Path) -> list[str]:
    """Lines of the table but for the milliseconds of each image."""
    column = (out / "predictions.csv").read_text().split("\n")[0].split(",").index("ms")
    with (out / "predictions.csv").open(newline="") as file:
        return [",".join(row[:column] + row[column + 1 :]) for row in csv.reader(file)]


@pytest.mark.slow
def test_shares_come_to_what_one_process_comes_to(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (photos / "bad.png").write_text("no image")
    command = ("predict", photos, *NET)
    processes = [start_cli(*command, "-o", out, "--shard", f"{i}/2") for i in (1, 2)]
    said = [process.communicate(timeout=SECONDS) for process in processes]
    assert [process.returncode for process in processes] == [1, 0], said
    assert "3 of 4 images segmented" in said[0][0]
    assert "3 of 3 images segmented" in said[1][0]
    lines = [p.read_text().count("\n") for p in sorted((out / ".predict" / "rows").iterdir())]
    assert lines == [4, 3]
    assert run_cli(*command, "-o", tmp_path / "alone") == 1
    assert pictures(out) == pictures(tmp_path / "alone")
    assert [line.replace(str(out), "") for line in without_times(out)] == without_times(
        tmp_path / "alone"
    )


def test_a_share_writes_nothing_once_others_may_remove_its_temporary_files(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []

    def claim(_: RunStore) -> bool:
        events.append("claim")
        return False

    def noted(name: str) -> None:
        write = getattr(run_module, name)

        def write_noted(*args: Any) -> None:
            events.append(name)
            write(*args)

        monkeypatch.setattr(run_module, name, write_noted)

    monkeypatch.setattr(RunStore, "claim", claim)
    noted("write_table")
    noted("write_classes")
    assert run_cli("predict", photos, *NET, "-o", tmp_path / "out", "--shard", "1/2") == 0
    assert {*events} == {"write_table", "write_classes", "claim"}
    assert events[-1] == "claim"


def test_shares_may_run_one_after_the_other_and_any_later_start_merges_them(
    photos: Path, tmp_path: Path, calls: list[Any], capsys: Any
) -> None:
    out = tmp_path / "out"
    command = ("predict", photos, *NET, "-o", out)
    assert run_cli(*command, "--shard", "3/3") == 0
    assert "2 of 2 images segmented" in (told := capsys.readouterr().out)
    assert "4 files are left to other shares" in told
    assert list(table(out)) == ["2.png", "5.png"]
    assert run_cli(*command, "--shard", "1/3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["left"] == 2
    assert run_cli(*command) == 0
    assert "6 of 6 images segmented (4 before)" in capsys.readouterr().out
    assert list(table(out)) == [f"{number}.png" for number in range(6)]
    assert len(calls) == 6
    assert run_cli("predict", photos, *NET, "-o", tmp_path / "alone") == 0
    assert pictures(out) == pictures(tmp_path / "alone")
    assert without_times(out) == without_times(tmp_path / "alone")


def test_shares_take_names_for_images_that_came_later(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ("predict", photos, *NET, "-o", out, "--outputs", "label", "--shard")
    assert run_cli(*command, "1/2") == 0
    to_pil(random_image(24, 40)).save(photos / "0.jpg")
    to_pil(random_image(24, 40)).save(photos / "new.png")
    assert run_cli(*command, "2/2") == 0
    assert run_cli(*command, "1/2") == 0
    assert len(table(out)) == 8
    assert {"0_label.png", "0_jpg_label.png", "new_label.png"} <= set(pictures(out))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shard", "3/2"], "a shard must be I/N, for example 2/4"),
        (["--shard", "1/2", "--overwrite"], "a share cannot start again"),
        (["--shard", "1/2", "--alpha", "0.3"], "holds a run of predict that differs"),
    ],
)
def test_shares_that_cannot_be(
    flags: list[str], message: str, photos: Path, tmp_path: Path, capsys: Any
) -> None:
    command = ("predict", photos / "0.png", *NET, "-o", tmp_path / "out")
    assert run_cli(*command) == 0
    before = pictures(tmp_path / "out")
    assert run_cli(*command, *flags) == 2
    assert message in capsys.readouterr().err
    assert pictures(tmp_path / "out") == before


@pytest.mark.slow
def test_killed_shares_go_on_to_the_same_files(tmp_path: Path) -> None:
    photos, out = tmp_path / "photos", tmp_path / "out"
    photos.mkdir()
    for number in range(40):
        to_pil(random_image(48, 64, seed=number)).save(photos / f"{number:02}.png")
    command = ("predict", photos, *NET)
    first, second = (start_cli(*command, "-o", out, "--shard", f"{i}/2") for i in (1, 2))
    wait_for(lambda: len(list(out.glob("*_label.png"))) >= 3, second)
    os.killpg(second.pid, signal.SIGKILL)
    second.communicate()
    assert len(list(out.glob("*_label.png"))) < 40, "it was done before it was killed"
    told = first.communicate(timeout=SECONDS)
    assert first.returncode == 0, told
    assert "20 of 20 images segmented" in told[0]
    assert run_cli(*command, "-o", out, "--shard", "2/2") == 0
    assert run_cli(*command, "-o", tmp_path / "whole") == 0
    assert pictures(out) == pictures(tmp_path / "whole")
    assert without_times(out) == without_times(tmp_path / "whole")
    assert not list(out.rglob("*.part"))


def test_ctrl_c_says_that_the_same_command_goes_on(
    photos: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    real, seen = SaNOnly.compute, []

    def stop(*args: Any) -> Any:
        seen.append(args)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return real(*args)

    def write_slowly(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.3)
        write_result(*args, **kwargs)

    out = tmp_path / "out"
    monkeypatch.setattr(SaNOnly, "compute", stop)
    monkeypatch.setattr("selfadapt.predict.stream.write_result", write_slowly)
    assert run_cli("predict", photos, *NET, "-o", out) == 130
    assert "run the same command to continue" in capsys.readouterr().err
    assert len(list(out.glob("*_label.png"))) == 3
    assert (out / ".predict" / "rows" / "0000.jsonl").read_text().count("\n") == 3
    assert run_cli("predict", photos, *NET, "-o", out) == 0
    assert len(list(out.glob("*_label.png"))) == 6
    assert len(seen) == 7, "what was done was done again"


def test_an_output_that_disappears_is_said_so_and_made_again(
    photos: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    out = tmp_path / "out"

    def compute(*args: Any, run: Any = SaNOnly.compute) -> Any:
        (out / "0_label.png").unlink(missing_ok=True)
        return run(*args)

    monkeypatch.setattr(SaNOnly, "compute", compute)
    assert run_cli("predict", photos, *NET, "-o", out) == 2
    assert "0.png have disappeared: does another program change" in capsys.readouterr().err
    monkeypatch.undo()
    assert run_cli("predict", photos, *NET, "-o", out) == 0
    assert len(list(out.glob("*_label.png"))) == 6


# what is meant


def test_links_that_lead_nowhere_fail_alone(photos: Path, tmp_path: Path, capsys: Any) -> None:
    (photos / "loop.png").symlink_to("loop.png")
    (photos / "dangling.png").symlink_to("nowhere.png")
    assert run_cli("predict", photos, *NET, "-o", tmp_path / "out") == 1
    assert capsys.readouterr().err.count("not done: ") == 2


def test_patterns_keep_their_folders(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("drives/a/1.png", "drives/b/c/1.png", "drives/b/notes.txt", "drives/.h/1.png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        to_pil(random_image(16, 16)).save(name, format="PNG")
    assert run_cli("predict", "drives/**/*", *NET, "-o", "out", "--outputs", "label") == 0
    assert set(pictures(Path("out"))) == {"a/1_label.png", "b/c/1_label.png"}
    assert [str(one.path) for one in find_inputs(["drives/*/1.png"])] == ["drives/a/1.png"]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    to_pil(random_image(16, 16)).save(tmp_path / "a[1].png")
    to_pil(random_image(16, 16)).save(tmp_path / "a1.png")
    assert [one.path.name for one in find_inputs([tmp_path / "a[1].png"])] == ["a[1].png"]


# what is written and said


def test_a_panel_shows_image_source_prediction_and_confidence(photos: Path, tmp_path: Path) -> None:
    kinds = ("label", "color", "confidence", "panel")
    command = ("predict", photos / "0.png", *NET, "--outputs", *kinds, "-o")
    assert run_cli(*command, tmp_path / "out") == 0
    source = ("--method", "source")
    assert run_cli(*command, tmp_path / "source", *source) == 0
    panel = np.asarray(PILImage.open(tmp_path / "out" / "0_panel.png"))
    head = heading("", 40, text_size(24)).height
    parts = np.split(panel[head : head + 24], 4, axis=1)
    expected = [
        photos / "0.png", tmp_path / "source" / "0_color.png", tmp_path / "out" / "0_color.png",
        tmp_path / "out" / "0_confidence.png",
    ]  # fmt: skip
    for part, path in zip(parts, expected, strict=True):
        assert np.array_equal(part, np.asarray(PILImage.open(path).convert("RGB")))


def test_a_panel_has_headings_and_a_legend_of_the_classes(photos: Path, tmp_path: Path) -> None:
    to_pil(random_image(80, 160)).save(photos / "wide.png")
    command = ("predict", photos / "wide.png", *NET, "--outputs", "panel", "-o", tmp_path / "out")
    assert run_cli(*command) == 0
    panel = np.asarray(PILImage.open(tmp_path / "out" / "wide_panel.png"))
    head = heading("", 160, text_size(80)).height
    for part in np.split(panel[:head], 4, axis=1):
        assert part.max() == 255
        assert part.min() < 100, "there is no heading"
    below = panel[head + 80 :].reshape(-1, 3)
    for color in class_colors(STREETS_9):
        assert (below == color).all(axis=1).sum() > 100, "a class is not in the legend"


def test_a_folder_says_which_index_and_colour_a_class_has(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_cli("predict", photos / "0.png", *NET, "-o", out) == 0
    classes = json.loads((out / "classes.json").read_text())
    assert classes[0] == {"index": 0, "name": "road", "color": [128, 64, 128]}
    assert [entry["name"] for entry in classes] == list(STREETS_9)
    label = PILImage.open(out / "0_label.png")
    painted = np.asarray(label.convert("RGB"))
    colors = np.array([entry["color"] for entry in classes])
    assert np.array_equal(painted, colors[np.asarray(label)])
    legend = np.asarray(PILImage.open(out / "legend.png")).reshape(-1, 3)
    assert all((legend == color).all(axis=1).any() for color in colors)


@pytest.mark.parametrize("name", ["classes.json", "legend.png"])
def test_foreign_classes_and_legends_are_not_replaced(
    name: str, photos: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("mine")
    assert run_cli("predict", photos, *NET, "-o", out) == 2
    assert f"{name} would be replaced" in capsys.readouterr().err
    assert (out / name).read_text() == "mine"


def test_probabilities_are_written_with_the_names_of_the_classes(
    photos: Path, tmp_path: Path
) -> None:
    command = ("predict", photos, *NET, "--outputs", "label", "probs", "-o", tmp_path / "out")
    assert run_cli(*command) == 0
    for number in range(6):
        with np.load(tmp_path / "out" / f"{number}_probs.npz") as file:
            probs, classes = file["probs"], file["classes"]
        assert tuple(classes) == STREETS_9
        assert probs.dtype == np.float16
        assert probs.shape == (9, 24, 40)
        assert np.allclose(probs.astype(float).sum(axis=0), 1, atol=3e-3)
        label = np.asarray(PILImage.open(tmp_path / "out" / f"{number}_label.png"))
        best = np.take_along_axis(probs, label[None].astype(int), axis=0)[0]
        assert (best >= probs.max(axis=0) - 1e-3).all()


def test_probabilities_of_a_video_are_refused(photos: Path, tmp_path: Path, capsys: Any) -> None:
    (photos / "film.mp4").write_bytes(b"")
    command = ("predict", photos, *NET, "--outputs", "probs", "-o", tmp_path / "out")
    assert run_cli(*command) == 2
    assert "probs can only be written for images" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_table_has_size_time_and_shares(photos: Path, tmp_path: Path) -> None:
    assert run_cli("predict", photos / "0.png", *NET, "-o", tmp_path / "out") == 0
    row = table(tmp_path / "out")["0.png"]
    assert (row["width"], row["height"], row["status"]) == ("40", "24", "done")
    assert float(row["ms"]) > 0
    label = np.asarray(PILImage.open(tmp_path / "out" / "0_label.png"))
    assert float(row["share_road"]) == pytest.approx((label == 0).mean(), abs=1e-5)
    shares = [float(value) for name, value in row.items() if name.startswith("share_")]
    assert len(shares) == 9
    assert sum(shares) == pytest.approx(1, abs=1e-4)


def test_json_is_one_object_and_quiet_is_quiet(photos: Path, tmp_path: Path, capsys: Any) -> None:
    (photos / "bad.png").write_text("no image")
    command = ("predict", photos, *NET, "-o", tmp_path / "out")
    assert run_cli(*command, "--json") == 1
    said = json.loads(capsys.readouterr().out)
    assert {name: said[name] for name in ("files", "done", "failed")} == {
        "files": 7, "done": 6, "failed": 1,
    }  # fmt: skip
    assert said["failures"][0]["file"] == str(photos / "bad.png")
    assert Path(said["table"]).exists()
    assert run_cli(*command, "--quiet") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


def write_bomb(path: Path) -> None:
    """Write a small file that says it has 3600 million pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 99)))


@pytest.mark.slow
def test_two_hundred_files_of_all_sorts(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    good = to_pil(random_image(16, 24))
    deep = PILImage.fromarray(np.arange(384, dtype=np.uint16).reshape(16, 24) * 99)
    makers: list[tuple[str, Callable[[Path], Any]]] = [
        ("good.png", good.save),
        ("good.jpg", good.save),
        ("deep.png", deep.save),
        ("cmyk.jpg", good.convert("CMYK").save),
        ("gray.png", good.convert("L").save),
        ("cut.png", lambda path: (good.save(path), path.write_bytes(path.read_bytes()[:-200]))),
        ("empty.png", lambda path: path.write_bytes(b"")),
        ("text.jpg", lambda path: path.write_text("no image")),
        ("bomb.png", write_bomb),
        ("gone.png", lambda path: path.symlink_to("nowhere.png")),
    ]
    for number in range(200):
        name, make = makers[number % 10]
        make(folder / f"{number:03}_{name}")
    assert run_cli("predict", folder, *NET, "-o", tmp_path / "out", "--outputs", "label") == 1
    captured = capsys.readouterr()
    assert "100 of 200 images segmented" in captured.out
    assert captured.err.count("not done: ") == 100
    assert len(pictures(tmp_path / "out")) == 100


# settings


def test_settings_come_from_a_file_and_flags_count_beside_it(
    photos: Path, tmp_path: Path, capsys: Any
) -> None:
    words = ("predict", photos, *NET, "--alpha", "0.2", "-o", tmp_path / "out")
    assert run_cli(*words, "--print-config") == 0
    config = tmp_path / "predict.yaml"
    config.write_text(capsys.readouterr().out)
    assert not (tmp_path / "out").exists()
    assert run_cli("predict", "--config", config, "--print-config") == 0
    assert capsys.readouterr().out == config.read_text()
    other = ("predict", photos / "0.png", "-o", tmp_path / "other", "--config", config)
    assert run_cli(*other, "--no-fast", "--alpha=0.4") == 0
    record = json.loads((tmp_path / "other" / ".predict" / "record.json").read_text())
    assert record["identity"]["settings"] == {"alpha": 0.4, "fast": False}
    assert list(record["names"].values()) == ["0"]
    assert run_cli("predict", "--config", config, "--model", "nowhere") == 2
    assert "unknown model 'nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["train", "tune", "evaluate"])
def test_what_a_recipe_comes_to_is_printed(verb: str, tmp_path: Path, capsys: Any) -> None:
    command = (verb, "streets-quick", "-o", tmp_path / "run", "--print-config")
    assert run_cli(*command) == 0
    assert f"output: {tmp_path / 'run'}" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "fast"),
    [
        (["--fast", "{image}"], True),
        (["--no-fast", "{image}"], False),
        (["--fast", "false", "{image}"], False),
        (["--fast=false", "{image}"], False),
        (["--fast", "true", "{image}"], True),
    ],
)
def test_a_switch_does_not_eat_the_image(
    words: list[str], fast: bool, photos: Path, tmp_path: Path
) -> None:
    words = [word.format(image=photos / "0.png") for word in words]
    assert run_cli("predict", *words, *NET, "-o", tmp_path / "out") == 0
    record = json.loads((tmp_path / "out" / ".predict" / "record.json").read_text())
    assert record["identity"]["settings"] == {"fast": fast}


BAD = {
    "no match": (["{photos}/*.webp"], "matches no image or video"),
    "unknown output": (["{photos}", "--outputs", "labl"], "did you mean 'label'"),
    "settings that are not text": (["{photos}", "--config", "{photos}/0.png"], "is not text"),
    "no such settings": (["{photos}", "--config", "nowhere.yaml"], "nowhere.yaml"),
    "unknown setting in a file": (["{photos}", "--config", "{photos}/bad.yaml"], "colour"),
    "fast": (["{photos}", "--fast=perhaps"], "fast"),
    "empty settings": (["{photos}", "--config", "{photos}/empty.yaml"], "empty.yaml is empty"),
    "an empty word": (["{photos}", ""], "an argument is empty: is a shell variable not set?"),
    "an image too late": (["--scales", "0.5", "{photos}/0.png"], "0.png"),
    "a long name": (["{photos}/" + "x" * 230 + ".png"], "is too long: the names of its outputs"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_asked_wrongly_leaves_nothing(
    case: str, photos: Path, tmp_path: Path, capsys: Any
) -> None:
    (photos / "bad.yaml").write_text("colour: true\n")
    (photos / "empty.yaml").touch()
    (photos / f"{'x' * 230}.png").write_bytes((photos / "0.png").read_bytes())
    words, message = BAD[case]
    words = [word.format(photos=photos) for word in words]
    assert run_cli("predict", *words, *NET, "-o", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_images_that_are_scaled_down_are_noted_once(
    photos: Path, tmp_path: Path, capsys: Any
) -> None:
    to_pil(random_image(48, 40)).save(photos / "high.png")
    command = ("predict", photos, *NET, "--max-pixels", 600, "-o", tmp_path / "out")
    assert run_cli(*command) == 0
    table_path = tmp_path / "out" / "predictions.csv"
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert notes == [f"note: 7 images were scaled down to be segmented, see {table_path}"]
    assert "segmented at" in table(tmp_path / "out")["high.png"]["notes"]
    assert run_cli("predict", photos / "0.png", *command[2:-1], tmp_path / "one") == 0
    assert "note: segmented at 31x18, the image is 40x24" in capsys.readouterr().err


# rows at once


def test_a_row_is_there_while_the_next_image_is_segmented(
    photos: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    real, rows = SaNOnly.compute, []

    def wait_for_the_row_before(*args: Any) -> Any:
        start = time.monotonic()
        while len(table(tmp_path / "out")) < len(rows) and time.monotonic() - start < SECONDS:
            time.sleep(0.01)
        rows.append(list(table(tmp_path / "out")))
        return real(*args)

    monkeypatch.setattr(SaNOnly, "compute", wait_for_the_row_before)
    assert run_cli("predict", photos, *NET, "-o", tmp_path / "out") == 0
    names = [f"{number}.png" for number in range(6)]
    assert [sorted(row) for row in rows] == [names[:number] for number in range(6)]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_table_has_what_is_done_however_the_run_ends(end: int, tmp_path: Path) -> None:
    photos, out = tmp_path / "photos", tmp_path / "out"
    photos.mkdir()
    to_pil(random_image(24, 40)).save(photos / "=1+1.png")
    to_pil(random_image(640, 960)).save(photos / "large.png")
    command = ("predict", photos, "--model", "streets", "--steps", 40, "-o", out, "--quiet")
    process = start_cli(*command)
    wait_for(lambda: (out / "predictions.csv").exists() and "=1+1.png" in table(out), process)
    os.killpg(process.pid, end)
    process.communicate()
    assert process.returncode == -end
    assert table(out)["=1+1.png"]["status"] == "done"
    assert len(list(out.glob("*.png"))) == 4
    (photos / "large.png").unlink()
    assert run_cli(*command) == 0
    assert list(table(out)) == ["=1+1.png"]


def test_a_row_of_unknown_classes_has_shares_too(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (photos / "0.png").write_text("no image")
    (tmp_path / "nameless.py").write_text(
        "import torch\ndef net():\n    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ("--model", "nameless:net", "--trust", "--method", "source", "--device", "cpu")
    assert run_cli("predict", photos, *words, "-o", tmp_path / "out") == 1
    rows = table(tmp_path / "out")
    assert len(rows) == 6
    assert rows["0.png"]["share_class 3"] == ""
    shares = [float(rows["1.png"][f"share_class {index}"]) for index in range(4)]
    assert sum(shares) == pytest.approx(1, abs=1e-5)


def test_no_cell_of_the_table_is_a_formula(photos: Path, tmp_path: Path, calls: list[Any]) -> None:
    for number, name in enumerate(("=1+1", "+1", "-1", "@a", "a=1")):
        (photos / f"{number}.png").rename(photos / f"{name}.png")
    command = ("predict", photos, *NET, "-o", tmp_path / "out")
    for _ in range(2):  # what is there already is written anew
        assert run_cli(*command) == 0
        assert len(calls) == 6
        with (tmp_path / "out" / "predictions.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert {row["output"] for row in rows} == {"'=1+1", "'+1", "'-1", "'@a", "a=1", "5"}
        assert all(row["output"].lstrip("'") == Path(row["file"]).stem for row in rows)


# links


def test_links_to_folders_above_are_followed_once(photos: Path) -> None:
    (photos / "self").symlink_to(".")
    (photos / "again").symlink_to(photos)  # two of them would be followed 2 ** 40 times
    (photos / "deep").mkdir()
    to_pil(random_image(16, 16)).save(photos / "deep" / "a.png")
    inputs = find_inputs([f"{photos}/**/*.png"])
    names = [f"{number}.png" for number in range(6)]
    assert [str(one.path.relative_to(photos)) for one in inputs] == [*names, "deep/a.png"]


def test_a_file_that_links_lead_to_is_segmented_once(photos: Path, tmp_path: Path) -> None:
    (photos / "-first.png").symlink_to("0.png")
    (tmp_path / "linked").symlink_to(photos)
    names = [path.name for path in sorted(photos.iterdir())]
    found = find_inputs([photos, tmp_path / "linked", f"{tmp_path}/*/?.png"])
    assert sorted(one.path.name for one in found) == names[1:]
    assert {one.path.parent for one in found} == {photos}
    assert find_inputs([photos / "-first.png", photos])[0].path.name == names[0]
    inside = find_inputs([f"{tmp_path}/l*/**/*.png"])  # a folder that only a link leads to
    assert len(inside) == 6


# what is not as it seems


@pytest.mark.parametrize("kind", ["tif", "gif", "webp", "png"])
def test_of_several_pictures_in_a_file_the_first_is_taken_and_it_is_said(
    kind: str, tmp_path: Path, capsys: Any
) -> None:
    pictures = [to_pil(random_image(24, 40, seed=number)) for number in range(3)]
    pictures[0].save(tmp_path / f"a.{kind}", save_all=True, append_images=pictures[1:])
    pictures[0].save(tmp_path / f"b.{kind}")
    (tmp_path / "c.gif").write_bytes(b"GIF89a and no more")
    out = tmp_path / "out"
    assert run_cli("predict", *sorted(tmp_path.glob("?.*")), *NET, "-o", out) == 1
    note = "the file has 3 pictures, and the first is segmented"
    assert f"a.{kind}: {note}" in capsys.readouterr().err
    assert note in table(out)[f"a.{kind}"]["notes"]
    assert note not in table(out)[f"b.{kind}"]["notes"]


def test_smaller_copies_in_a_tiff_are_no_pictures_of_their_own(tmp_path: Path) -> None:
    large, small = (to_pil(random_image(size, size)) for size in (64, 32))
    small.encoderinfo = {"tiffinfo": {254: 1}}
    large.save(tmp_path / "pyramid.tif", save_all=True, append_images=[small])
    assert PILImage.open(tmp_path / "pyramid.tif").n_frames == 2
    assert count_frames(tmp_path / "pyramid.tif") == 1


def test_images_that_vanish_fail_alone(photos: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def vanish_then_plan(folder: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = plan(folder, *args, **kwargs)
        (photos / "2.png").unlink()
        return inputs

    plan = PredictFolder.plan
    monkeypatch.setattr(PredictFolder, "plan", vanish_then_plan)
    assert run_cli("predict", photos, *NET, "-o", tmp_path / "out") == 1
    rows = table(tmp_path / "out")
    assert [name for name, row in rows.items() if row["status"] == "failed"] == ["2.png"]
    assert rows["2.png"]["reason"] == f"there is no image file {photos / '2.png'}"
