"""A run that is stopped, in whatever way, goes on to the same result; nothing is ever lost."""

import errno
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from runs import (
    CLASSES,
    as_config,
    assert_same_result,
    assert_same_tensors,
    domain,
    locked,
    recipe,
    result_of,
    rows,
    run_cli,
    start_cli,
    write_domain,
    write_recipe,
)  # fmt: skip
from selfadapt.data import open_dataset
from selfadapt.train import loop, train
from selfadapt.train.folder import TrainFolder, read_state
from selfadapt.train.trainer import Trainer

pytest.importorskip("lightning_fabric")

STEPS = 15
SECONDS = 240


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than the rest of these runs."""
    monkeypatch.setattr(loop, "draw_curves", lambda folder: None)


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A recipe with all that a state must hold: dropout, averaged statistics, saves in between."""
    root = tmp_path_factory.mktemp("domains")
    source = write_domain(root / "source", 13, 1)
    validation = write_domain(root / "validation", 3, 2)
    model = {"name": "deeplabv1_resnet18_slim", "classes": CLASSES, "dropout": 0.1}
    return recipe(
        source, validation, model=model, epochs=5, statistics_batches=2, save_every=2,
        alphas=[0.0, 0.5],
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    train(as_config(content), folder)
    return folder


@pytest.fixture(scope="module")
def ended(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ended")
    with killed_at_step(7):
        train(as_config(content), folder)
    return folder


@pytest.fixture
def half(ended: Path, tmp_path: Path) -> Path:
    """A run that was killed after seven of its steps, and saved after the sixth."""
    assert read_state(ended / "state.safetensors")[0].step == 6
    return Path(shutil.copytree(ended, tmp_path / "run"))


def killed_at_step(number: int) -> Any:
    return interrupted(Trainer, "step", lambda *args: args[-1] == number)


class interrupted:
    """End the run where a function is called and ``when`` holds, before it does anything."""

    def __init__(self, owner: Any, name: str, when: Callable[..., bool] = lambda *_: True) -> None:
        self.owner, self.name, self.when = owner, name, when

    def __enter__(self) -> None:
        self.real = real = getattr(self.owner, self.name)

        def ending(*args: Any, **kwargs: Any) -> Any:
            if self.when(*args):
                raise Killed
            return real(*args, **kwargs)

        setattr(self.owner, self.name, ending)

    def __exit__(self, kind: Any, *_: object) -> bool:
        setattr(self.owner, self.name, self.real)
        assert kind is Killed, f"the run was not ended in {self.name}"
        return True


def test_the_uninterrupted_run_is_worth_comparing(whole: Path) -> None:
    """Otherwise equal results would mean little."""
    result = result_of(whole)
    assert [row["step"] for row in result["log"]] == ["3", "6", "9", "10", "12", "15"]
    assert len(result["validation"]) == 10
    assert len({row["mIoU"] for row in result["validation"]}) > 5
    state, tensors = read_state(whole / "state.safetensors")
    assert state.step == STEPS
    assert any(name.startswith("momentum.") for name in tensors)


def test_a_run_is_the_same_twice(whole: Path, content: dict[str, Any], tmp_path: Path) -> None:
    machine = {"measure": False, "workers": 1, "accelerator": "cpu"}
    train(as_config({**content, "machine": machine, "save_every": 100}), tmp_path)
    assert_same_result(result_of(tmp_path), result_of(whole))


@pytest.mark.parametrize("steps", [(0, 1, 9), (3, 5, 11, 14)], ids=str)
def test_a_run_killed_between_steps_goes_on_to_the_same_result(
    whole: Path, content: dict[str, Any], tmp_path: Path, steps: tuple[int, ...]
) -> None:
    for step in steps:
        with killed_at_step(step):
            train(as_config(content), tmp_path)
    train(as_config(content), tmp_path)
    assert_same_result(result_of(tmp_path), result_of(whole))


def second(owner: Any, name: str) -> Any:
    """End the run at the second call of a function."""
    calls: Iterator[bool] = iter((False, True))
    return interrupted(owner, name, lambda *_: next(calls))


MOMENTS: dict[str, Callable[[], Any]] = {
    "while statistics are averaged": lambda: second(Trainer, "average_statistics"),
    "in validation": lambda: second(loop, "confusion_by_alpha"),
    "before a network is kept": lambda: second(loop, "save_model"),
    "after a network is kept, before the state is saved": lambda: second(loop.Log, "validated"),
    "while a state is written": lambda: interrupted(
        os, "fsync", lambda *_: len(saved_states()) > 3
    ),
    "before others are removed": lambda: interrupted(
        TrainFolder, "keep", lambda _, epochs: max(epochs, default=0) > 1
    ),
}


_SAVED: list[int] = []


def saved_states() -> list[int]:
    _SAVED.append(1)
    return _SAVED


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_a_bad_moment_goes_on_to_the_same_result(
    whole: Path, content: dict[str, Any], tmp_path: Path, moment: str
) -> None:
    _SAVED.clear()
    with MOMENTS[moment]():
        train(as_config(content), tmp_path)
    train(as_config(content), tmp_path)
    assert_same_result(result_of(tmp_path), result_of(whole))


def test_no_saved_state_lacks_a_network_it_holds_for_the_best(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each epoch outdoes the one before, and the run is killed before its state is saved."""
    scores = {alpha: iter((10, 20, 20, 30, 30, 40, 40, 50, 50)) for alpha in (0, 1)}

    def confusion(*_: Any, **__: Any) -> torch.Tensor:
        hits = [next(scores[alpha]) for alpha in (0, 1)]
        return torch.tensor([[[n, 100 - n, 0], [0, 0, 0], [0, 0, 0]] for n in hits])

    monkeypatch.setattr(loop, "confusion_by_alpha", confusion)
    for step in (6, 9, 12):
        ended = interrupted(TrainFolder, "save", lambda _, state, *__, at=step: state.step == at)
        with ended:
            train(as_config(content), tmp_path)
        state, _ = read_state(tmp_path / "state.safetensors")
        assert 0 < state.step < step
        epochs = {epoch for _, epoch in state.best.values()}
        assert epochs
        for epoch in epochs:
            assert (tmp_path / f"epoch_{epoch:03}.safetensors").exists()


END_MOMENTS: dict[str, Callable[[], Any]] = {
    "before anything": lambda: interrupted(loop.TrainingRun, "finish"),
    "before the best network": lambda: interrupted(loop.shutil, "copyfile"),
    "before the summary": lambda: interrupted(
        TrainFolder, "write_json", lambda _, path, *__: path.name == "summary.json"
    ),
    "after all": lambda: interrupted(loop.Log, "close"),
}


@pytest.mark.parametrize("moment", END_MOMENTS)
def test_a_run_killed_at_its_end_is_ended_later(
    whole: Path, content: dict[str, Any], tmp_path: Path, moment: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for name in ("best.safetensors", "last.safetensors", "summary.json"):
        (run / name).unlink()
    with END_MOMENTS[moment]():
        train(as_config(content), run)
    train(as_config(content), run)
    assert_same_result(result_of(run), result_of(whole))
    assert (run / "summary.json").exists()


@pytest.fixture(scope="module")
def whole_average(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run with an average of the weights that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole_average")
    train(as_config({**content, "average": 0.7}), folder)
    return folder


AVERAGE_MOMENTS: dict[str, Callable[[], Any]] = {
    **{f"before step {step}": lambda step=step: killed_at_step(step) for step in (1, 7, 12)},
    "while statistics are averaged": MOMENTS["while statistics are averaged"],
    "in validation": MOMENTS["in validation"],
    "at the end": lambda: interrupted(loop.TrainingRun, "finish"),
}


@pytest.mark.parametrize("moment", AVERAGE_MOMENTS)
def test_an_average_goes_on_to_the_same_result(
    whole_average: Path, content: dict[str, Any], tmp_path: Path, moment: str
) -> None:
    config = as_config({**content, "average": 0.7})
    with AVERAGE_MOMENTS[moment]():
        train(config, tmp_path)
    train(config, tmp_path)
    assert_same_result(result_of(tmp_path), result_of(whole_average))
    states = [load_file(run / "state.safetensors") for run in (tmp_path, whole_average)]
    assert any(name.startswith("mean.") for name in states[0])
    assert_same_tensors(*states)


def test_a_finished_average_is_written_again_as_it_was(
    whole_average: Path, content: dict[str, Any], tmp_path: Path
) -> None:
    run = Path(shutil.copytree(whole_average, tmp_path / "run"))
    for name in ("best.safetensors", "last.safetensors"):
        (run / name).unlink()
    train(as_config({**content, "average": 0.7}), run)
    assert_same_result(result_of(run), result_of(whole_average))


def test_a_run_without_an_average_does_not_go_on_with_one(
    content: dict[str, Any], tmp_path: Path, half: Path, capsys: Any
) -> None:
    said = refused({**content, "average": 0.7}, tmp_path, half, capsys)
    assert "holds a training run that differs (average: 0.0 -> 0.7)" in said


def test_what_a_killed_run_left_half_written_is_removed(
    whole: Path, content: dict[str, Any], half: Path
) -> None:
    names = ("state.safetensors", "epoch_002.safetensors", "log.csv")
    parts = [f".{name}.0123cdef.part" for name in names]
    for name in parts:
        (half / name).write_bytes(b"half")
    others = (".git.part", ".mine", "notes.txt", "table.csv", "weights.safetensors")
    for name in others:
        (half / name).write_text("mine")
    shutil.copy(half / "state.safetensors", half / "epoch_004.safetensors")  # of no saved state
    with (half / "log.csv").open("a", newline="") as file:
        file.write("1")  # of step 10
    with (half / "validation.csv").open("a", newline="") as file:
        file.write("3,0.0,0.9\r\n3,0.5,0.")
    train(as_config(content), half)
    assert not [name for name in parts if (half / name).exists()]
    for name in others:
        assert (half / name).read_text() == "mine"
    (half / "weights.safetensors").unlink()
    assert_same_result(result_of(half), result_of(whole))


def test_rows_of_steps_that_are_done_again_are_dropped(
    whole: Path, content: dict[str, Any], tmp_path: Path
) -> None:
    """The row of step 10 is written before the state of step 10 is."""
    kept = as_config({**content, "save_every": 100})
    with killed_at_step(11):
        train(kept, tmp_path)
    assert [row["step"] for row in rows(tmp_path / "log.csv")] == ["3", "6", "9", "10"]
    assert read_state(tmp_path / "state.safetensors")[0].step == 9
    train(kept, tmp_path)
    assert_same_result(result_of(tmp_path), result_of(whole))


def test_a_run_killed_with_the_hardest_signal_goes_on_to_the_same_result(
    whole: Path, content: dict[str, Any], tmp_path: Path
) -> None:
    """Three times, at moments that no seed fixes, once it has begun to write."""
    path = write_recipe(tmp_path / "r.yaml", {**content, "save_every": 1})
    run, chance = tmp_path / "run", random.Random()
    for _ in range(3):
        process = start_cli("train", path, "-o", run)
        log = run / "log.csv"
        before = log.stat().st_mtime_ns if log.exists() else 0
        begun = time.monotonic()
        while not log.exists() or log.stat().st_mtime_ns == before:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() - begun < SECONDS
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.7))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    step = read_state(run / "state.safetensors")[0].step
    assert step < STEPS
    train(as_config(content), run)
    assert_same_result(result_of(run), result_of(whole))


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_readers_end_with_a_run_that_is_killed_in_validation(
    content: dict[str, Any], tmp_path: Path
) -> None:
    """Then they have more to send than anybody will read."""
    large = write_domain(tmp_path / "large", 40, 3, ((512, 384),))
    machine = {"measure": False, "workers": 2, "accelerator": "cpu"}
    changed = {**content, "validation": domain(large), "machine": machine, "epochs": 1}
    changed["statistics_batches"] = 0  # these would be read by processes of their own
    path, run = write_recipe(tmp_path / "r.yaml", changed), tmp_path / "run"
    process = start_cli("train", path, "-o", run)
    begun = time.monotonic()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    readers: list[str] = []
    while len(readers) < 4:  # those of the batches are still there
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() - begun < SECONDS
        readers = children.read_text().split()
        time.sleep(0.005)
    time.sleep(0.5)
    process.kill()
    process.wait()
    os.close(locked(run))  # nobody trains here any more
    begun = time.monotonic()
    while any(is_running(reader) for reader in readers):
        assert time.monotonic() - begun < 20
        time.sleep(0.05)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_run_that_is_asked_to_stop_saves_its_state(
    whole: Path, content: dict[str, Any], tmp_path: Path
) -> None:
    """With workers that get the signal too, as from a terminal."""
    path = write_recipe(tmp_path / "r.yaml", {**content, "save_every": 1000})
    run = tmp_path / "run"
    process = start_cli("train", path, "-o", run, "--machine.workers", 2)
    begun = time.monotonic()
    while not (run / "epoch_001.safetensors").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() - begun < SECONDS
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert "stopped; all written files are complete" in err
    assert "Traceback" not in err
    state, _ = read_state(run / "state.safetensors")
    assert 3 <= state.step < STEPS
    assert not (run / "best.safetensors").exists()
    train(as_config(content), run)
    assert_same_result(result_of(run), result_of(whole))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_request_to_stop_is_heard_after_the_step(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    real = Trainer.step
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def step(self: Trainer, *args: Any) -> Any:
        if args[-1] == 4:
            os.kill(os.getpid(), number)
        return real(self, *args)

    monkeypatch.setattr(Trainer, "step", step)
    with pytest.raises(KeyboardInterrupt):
        train(as_config({**content, "save_every": 1000}), tmp_path)
    assert read_state(tmp_path / "state.safetensors")[0].step == 5
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


def files_of(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def refused(content: dict[str, Any], tmp_path: Path, run: Path, capsys: Any) -> str:
    """Run the command line; return its one line, after looking that no file has changed."""
    path = write_recipe(tmp_path / "recipe.yaml", content)
    before = files_of(run) if run.is_dir() else {"": run.read_bytes()}
    capsys.readouterr()
    assert run_cli("train", path, "-o", run) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert before == (files_of(run) if run.is_dir() else {"": run.read_bytes()})
    return err[0]


@pytest.mark.parametrize("length", [0, 5, 4000, -1])
def test_a_torn_state_is_said_to_be_torn(
    content: dict[str, Any], tmp_path: Path, half: Path, capsys: Any, length: int
) -> None:
    state = half / "state.safetensors"
    state.write_bytes(state.read_bytes()[:length])
    said = refused(content, tmp_path, half, capsys)
    assert f"{state} is damaged, or not the state of a training run" in said
    assert "use --overwrite to start over" in said


@pytest.mark.parametrize("place", [0.01, 0.1, 0.5, 0.9])
def test_a_flipped_bit_of_a_state_is_noticed(
    content: dict[str, Any], tmp_path: Path, half: Path, capsys: Any, place: float
) -> None:
    """In the header, in weights and in momentum."""
    state = half / "state.safetensors"
    damaged = bytearray(state.read_bytes())
    damaged[int(place * len(damaged))] ^= 1
    state.write_bytes(damaged)
    assert str(state) in refused(content, tmp_path, half, capsys)


@pytest.mark.parametrize("change", ["cut", "flipped", "gone"])
def test_a_finished_run_keeps_its_best_network_when_the_file_of_its_epoch_is_damaged(
    whole: Path, content: dict[str, Any], tmp_path: Path, capsys: Any, change: str
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    best = json.loads((run / "summary.json").read_text())["best"]["epoch"]
    kept = run / f"epoch_{best:03}.safetensors"
    damage(kept, change)
    said = refused(content, tmp_path, run, capsys)
    reason = "is missing" if change == "gone" else "is damaged: its checksum differs"
    assert f"{kept} {reason}; replace it by {run / 'best.safetensors'}, which is the same" in said
    shutil.copy(run / "best.safetensors", kept)
    train(as_config(content), run)
    assert_same_result(result_of(run), result_of(whole))


@pytest.mark.parametrize("change", ["cut", "gone"])
def test_a_run_does_not_go_on_without_the_best_network_so_far(
    content: dict[str, Any], tmp_path: Path, half: Path, capsys: Any, change: str
) -> None:
    kept = sorted(half.glob("epoch_*.safetensors"))[-1]
    damage(kept, change)
    said = refused(content, tmp_path, half, capsys)
    assert f"{kept} is" in said
    assert "restore it, or use --overwrite to start over" in said


def damage(path: Path, change: str) -> None:
    if change == "gone":
        path.unlink()
    elif change == "cut":
        path.write_bytes(path.read_bytes()[:-10])
    else:
        content = bytearray(path.read_bytes())
        content[-10] ^= 1
        path.write_bytes(content)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for open files in /proc")
def test_a_run_that_goes_on_holds_no_state_that_was_replaced(
    content: dict[str, Any], half: Path
) -> None:
    """A file that is mapped takes room on the disk until it is not, though it has no name."""
    mapped = []
    with pytest.MonkeyPatch.context() as patch:
        real = Trainer.step

        def step(*args: Any) -> Any:
            lines = Path("/proc/self/maps").read_text().splitlines()
            mapped.extend(line for line in lines if f"{half}/state.safetensors" in line)
            return real(*args)

        patch.setattr(Trainer, "step", step)
        train(as_config(content), half)
    assert mapped == []


def test_a_foreign_file_is_no_state(
    content: dict[str, Any], tmp_path: Path, half: Path, capsys: Any
) -> None:
    save_file({"a": torch.zeros(3)}, half / "state.safetensors")
    said = refused(content, tmp_path, half, capsys)
    assert "must have the format 'selfadapt training state 3' to resume from, got None" in said
    save_file({"a": torch.zeros(3)}, half / "state.safetensors", {"format": "pt"})
    assert "got 'pt'" in refused(content, tmp_path, half, capsys)


def test_a_run_of_an_earlier_version_is_refused(
    content: dict[str, Any], tmp_path: Path, half: Path, capsys: Any
) -> None:
    record = json.loads((half / "record.json").read_text())
    (half / "record.json").write_text(json.dumps({**record, "format": "selfadapt training 0"}))
    assert "got 'selfadapt training 0', of another version" in refused(
        content, tmp_path, half, capsys
    )
    (half / "record.json").unlink()
    assert "holds other files and no training run of this version" in refused(
        content, tmp_path, half, capsys
    )


def test_a_run_of_another_recipe_is_not_touched(
    content: dict[str, Any], tmp_path: Path, half: Path, capsys: Any
) -> None:
    augment = {**content["augment"], "flip": 0.25}
    other = {**content, "lr": 0.5, "seed": 3, "augment": augment}
    said = refused(other, tmp_path, half, capsys)
    assert f"{half} holds a training run that differs" in said
    for part in ("augment.flip: 0.5 -> 0.25", "lr: 0.05 -> 0.5", "seed: 0 -> 3"):
        assert part in said
    assert "use --overwrite to start" in said


def test_a_run_on_other_images_is_not_touched(
    content: dict[str, Any], tmp_path: Path, half: Path, capsys: Any
) -> None:
    source = {**content["source"], "root": str(write_domain(tmp_path / "more", 14, 1))}
    said = refused({**content, "source": source}, tmp_path, half, capsys)
    assert "images: ['13 of folder/all" in said
    assert "-> ['14 of folder/all" in said


def test_a_run_goes_on_where_its_data_has_moved_to(
    whole: Path, content: dict[str, Any], tmp_path: Path, half: Path
) -> None:
    moved = tmp_path / "moved" / "source"
    shutil.copytree(content["source"]["root"], moved)
    train(as_config({**content, "source": {**content["source"], "root": str(moved)}}), half)
    assert_same_result(result_of(half), result_of(whole))


def test_a_folder_with_other_files_is_not_touched(
    content: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "photos"
    run.mkdir()
    (run / "photo.jpg").write_text("mine")
    said = refused(content, tmp_path, run, capsys)
    assert f"{run} holds other files and no training run" in said
    assert "give an empty or new folder" in said


def test_a_file_is_no_folder(content: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    run.write_text("mine")
    said = refused(content, tmp_path, run, capsys)
    assert f"a training run needs a folder, but {run} is a file" in said


def test_overwriting_starts_anew_and_removes_files_of_the_run_only(
    whole: Path, content: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    mine = {"notes.txt", "results.csv", "imagenet.safetensors", "epoch_of_mine.safetensors"}
    for name in mine:
        (run / name).write_text("mine")
    (run / "epoch_099.safetensors").write_text("of an earlier run")
    (run / "state.safetensors").write_bytes(b"torn")
    changed = as_config({**content, "epochs": 2, "seed": 1, "validation": None})
    train(changed, run, overwrite=True)
    assert all((run / name).read_text() == "mine" for name in mine)
    assert len(list((run / "tensorboard").iterdir())) == 1
    names = {path.name for path in run.iterdir()} - mine - {"tensorboard"}
    assert names == {
        "state.safetensors", "best.safetensors", "last.safetensors", "recipe.json", "log.csv",
        "validation.csv", "summary.json", "record.json", ".lock",
    }  # fmt: skip
    assert [row["step"] for row in rows(run / "log.csv")] == ["3", "6"]
    assert rows(run / "validation.csv") == []
    assert json.loads((run / "summary.json").read_text())["steps"] == 6


def test_a_bad_recipe_overwrites_nothing(
    content: dict[str, Any], tmp_path: Path, half: Path, capsys: Any
) -> None:
    before = files_of(half)
    model = {**content["model"], "name": "no such"}
    path = write_recipe(tmp_path / "r.yaml", {**content, "model": model})
    assert run_cli("train", path, "-o", half, "--overwrite") == 2
    assert "unknown model 'no such'" in capsys.readouterr().err
    assert files_of(half) == before


def test_a_finished_run_says_so_and_keeps_its_files(
    whole: Path, content: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    summary = json.loads((run / "summary.json").read_text())
    summary["speed"] = {"data": 1.0, "model": 2.0}  # as if it had been measured
    (run / "summary.json").write_text(json.dumps(summary))
    before = result_of(run)
    machine = {**content["machine"], "measure": True}
    path = write_recipe(tmp_path / "r.yaml", {**content, "machine": machine})
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", None)
        patch.setattr(loop, "measure_speed", None)
        patch.setattr(loop, "confusion_by_alpha", None)
        assert run_cli("train", path, "-o", run) == 0
    assert "this run is finished: all 15 steps are done" in capsys.readouterr().out
    assert_same_result(result_of(run), before)
    assert json.loads((run / "summary.json").read_text()) == summary


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_state_before(
    whole: Path, content: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    path = write_recipe(tmp_path / "r.yaml", content)
    with pytest.MonkeyPatch.context() as patch:
        real, times = Path.write_bytes, iter(range(100))

        def write(path: Path, content: bytes) -> int:
            if path.name.startswith(".state") and next(times) == 3:
                full()
            return real(path, content)

        patch.setattr(Path, "write_bytes", write)
        assert run_cli("train", path, "-o", run) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    said = err.splitlines()[-1]
    assert f"after step 4: {run / 'state.safetensors'} could not be written" in said
    assert "No space left on device" in said
    assert "run the same command (without --overwrite) to go on" in said
    assert read_state(run / "state.safetensors")[0].step == 3
    assert not list(run.glob(".*.part"))
    assert run_cli("train", path, "-o", run) == 0
    assert_same_result(result_of(run), result_of(whole))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_full_disk_under_the_log_is_said_in_one_line(
    whole: Path, content: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    path = write_recipe(tmp_path / "r.yaml", content)
    with pytest.MonkeyPatch.context() as patch:
        real = Trainer.step

        def step(*args: Any) -> Any:
            if args[-1] == 7:
                (run / "log.csv").unlink()
                (run / "log.csv").symlink_to("/dev/full")
            return real(*args)

        patch.setattr(Trainer, "step", step)
        assert run_cli("train", path, "-o", run) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{run / 'log.csv'} could not be written to (No space left on device)" in said
    (run / "log.csv").unlink()
    assert run_cli("train", path, "-o", run) == 0
    best = [load_file(folder / "best.safetensors") for folder in (run, whole)]
    assert_same_tensors(*best)


def test_a_full_disk_while_a_network_is_kept_is_said_in_one_line(
    whole: Path, content: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    path = write_recipe(tmp_path / "r.yaml", content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert run_cli("train", path, "-o", run) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "No space left on device" in err.splitlines()[-1]
    assert run_cli("train", path, "-o", run) == 0
    assert_same_result(result_of(run), result_of(whole))


def test_a_state_is_read_as_it_was_saved(whole: Path, tmp_path: Path) -> None:
    state, tensors = read_state(whole / "state.safetensors")
    assert set(state.best) == {"0.0", "0.5"}
    assert len(state.images_per_s) == 5
    weights = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    assert_same_tensors(weights, load_file(whole / "last.safetensors"))
    shutil.copy(whole / "state.safetensors", tmp_path / "copy")
    assert read_state(tmp_path / "copy")[0] == state


def test_seeds_that_are_done_are_not_trained_again(content: dict[str, Any], tmp_path: Path) -> None:
    config = as_config({**content, "epochs": 1, "seeds": [0, 1], "validation": None})
    number = iter(range(100))
    with interrupted(Trainer, "step", lambda *_: next(number) == 4):  # the second of seed 1
        train(config, tmp_path)
    assert (tmp_path / "seed_0/best.safetensors").exists()
    before = (tmp_path / "seed_0/log.csv").read_bytes()
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        real = Trainer.step
        patch.setattr(Trainer, "step", lambda *args: steps.append(args[-1]) or real(*args))
        train(config, tmp_path)
    assert steps == [0, 1, 2]
    assert (tmp_path / "seed_0/log.csv").read_bytes() == before


def test_two_processes_do_not_train_in_one_folder(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    file = locked(tmp_path / "run")
    with pytest.raises(ValueError, match=r"another process works in .*run"):
        train(as_config(content), tmp_path / "run")
    os.close(file)
    train(as_config(content), tmp_path / "run")


def test_labels_that_mean_something_else_are_another_run(tmp_path: Path) -> None:
    root = write_domain(tmp_path / "source", 2, 1)
    found = []
    for names in (CLASSES, CLASSES[::-1], CLASSES):
        (root / "classes.txt").write_text("\n".join(names))
        found.append(open_dataset("folder", root, split="all", space=CLASSES).fingerprint())
    assert found[0] == found[2] != found[1]


def test_a_validation_domain_without_labels_is_refused(
    content: dict[str, Any], tmp_path: Path
) -> None:
    empty = write_domain(tmp_path / "empty", 2, 5)
    for path in (empty / "labels").iterdir():
        Image.fromarray(np.full((64, 96), 255, np.uint8)).save(path)
    with pytest.raises(ValueError, match="no pixel of folder/all has a class of the network"):
        train(as_config({**content, "validation": domain(empty)}), tmp_path / "run")


def test_a_disk_that_knows_no_locks_can_be_trained_on(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    train(as_config(content), tmp_path / "run")
    assert (tmp_path / "run/best.safetensors").exists()
