"""Rows of an evaluation outlive any end of a process, count once, and say why images failed."""

import errno
import json
import os
import random
import shutil
import time
import tracemalloc
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from evaluations import (
    Place,
    copied,
    copy_domains,
    evaluated,
    fail_on,
    files_of,
    kill_group,
    make_place,
    num_rows,
    small,
    start_pair,
    tables_of,
    wait_for,
)  # fmt: skip
from runs import CLASSES, locked, rows, run_cli, write_domain, write_recipe
from selfadapt import journal as journal_module
from selfadapt.baselines import SaNOnly
from selfadapt.files import lock
from selfadapt.images import read_image
from selfadapt.journal import Journal, read_rows
from selfadapt.method import Method
from selfadapt.models.checkpoint import load_model, save_model
from selfadapt.models.create import create_model
from selfadapt.protocol.folder import EvaluationFolder, drawn_pictures
from selfadapt.protocol.rows import TrialKey
from selfadapt.result import Result
from selfadapt.runs import Shard

SECONDS = 120


def row(image: str, **more: Any) -> dict[str, Any]:
    return {"domain": "a", "image": image, "trial": "t", "gaps": [1, 2], **more}


def key(image: str) -> TrialKey:
    return TrialKey("a", image, "t")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows").mkdir()
    return tmp_path / "rows"


def written(folder: Path, *given: dict[str, Any], rank: int = 0) -> Path:
    """Write a journal, and return its file."""
    journal = Journal(folder, TrialKey, rank)
    for one in given:
        journal.write(one)
    journal.close()
    return folder / f"{rank:04}.jsonl"


# the file


def test_rows_are_read_as_they_were_written(folder: Path) -> None:
    given = [row("1"), row("2", error="no such file"), row("ü ☂\n3", gaps=[2**60])]
    written(folder, *given[:2])
    written(folder, given[2], rank=3)
    assert list(read_rows(folder, TrialKey).values()) == given
    journal = Journal(folder, TrialKey)
    assert journal.done == {key("1"): True, key("2"): False, key("ü ☂\n3"): True}
    assert list(journal.rows(lambda key: key.image == "1")) == [key("1")]
    journal.close()


@pytest.mark.parametrize("left", [0, 1, 8, 9, 30, -1])
def test_a_torn_last_line_is_dropped(folder: Path, left: int) -> None:
    path = written(folder, row("1"), row("2"))
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    path.write_bytes(whole[:start] + whole[start:][:left])
    assert list(read_rows(folder, TrialKey)) == [key("1")]
    journal = Journal(folder, TrialKey)
    assert list(journal.done) == [key("1")]
    journal.write(row("2"))
    journal.close()
    assert path.read_bytes() == whole


def test_a_torn_line_of_another_process_is_left_to_it(folder: Path) -> None:
    """It may be writing it right now."""
    path = written(folder, row("1"), row("2"), rank=1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    journal = Journal(folder, TrialKey, rank=0)
    assert list(journal.done) == [key("1")]
    assert path.read_bytes() == whole[:-5]
    path.write_bytes(whole)
    journal.refresh()
    journal.refresh()
    assert list(journal.done) == [key("1"), key("2")]
    journal.close()


@pytest.mark.parametrize("place", [0, 3, 9, 20, -3])
@pytest.mark.parametrize("line", [0, 1, 2])
def test_a_damaged_line_is_refused_by_name(folder: Path, line: int, place: int) -> None:
    path = written(folder, row("1"), row("2"), row("3"))
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = bytearray(lines[line])
    damaged[place] ^= 1
    lines[line] = bytes(damaged)
    path.write_bytes(b"".join(lines))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"0000\.jsonl"):
        Journal(folder, TrialKey)
    with pytest.raises(ValueError, match=r"0000\.jsonl"):
        read_rows(folder, TrialKey)
    assert path.read_bytes() == before


def test_a_journal_that_was_refused_lets_go_of_its_file(folder: Path) -> None:
    """So that it can be tried again once the file is restored."""
    path = written(folder, row("1"), row("2"))
    whole = path.read_bytes()
    path.write_bytes(b"x" + whole)
    for _ in range(2):
        with pytest.raises(ValueError, match="is damaged: its checksum differs"):
            Journal(folder, TrialKey)
    path.write_bytes(whole)
    Journal(folder, TrialKey).close()


def test_a_line_that_is_there_twice_counts_once(folder: Path) -> None:
    path = written(folder, row("1"), row("2"))
    path.write_bytes(path.read_bytes() * 3)
    shutil.copy(path, folder / "0007.jsonl")
    assert list(read_rows(folder, TrialKey)) == [key("1"), key("2")]


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0), (0, 0)])
def test_a_failure_gives_way_to_a_success_wherever_it_is(
    folder: Path, ranks: tuple[int, int]
) -> None:
    written(folder, row("1", error="torn"), rank=ranks[0])
    written(folder, row("1"), rank=ranks[1])
    assert read_rows(folder, TrialKey) == {key("1"): row("1")}
    journal = Journal(folder, TrialKey)
    assert journal.done == {key("1"): True}
    journal.forget_errors()
    assert journal.done == {key("1"): True}
    journal.close()


def test_one_process_at_a_time_writes_to_a_file(folder: Path) -> None:
    first = Journal(folder, TrialKey)
    with pytest.raises(ValueError, match=r"another process writes to .*0000\.jsonl"):
        Journal(folder, TrialKey)
    second = Journal(folder, TrialKey, rank=1)
    second.write(row("2"))
    first.write(row("1"))
    first.refresh()
    assert set(first.done) == {key("1"), key("2")}
    first.close()
    second.close()
    Journal(folder, TrialKey).close()


def test_a_row_that_is_written_in_pieces_is_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may write less than it is asked to, as often as it likes."""
    real = os.write
    monkeypatch.setattr(journal_module.os, "write", lambda file, text: real(file, text[:7]))
    written(folder, row("1"), row("2"))
    monkeypatch.undo()
    assert list(read_rows(folder, TrialKey)) == [key("1"), key("2")]


@pytest.mark.parametrize("room", [0, 1, 12])
def test_a_full_disk_keeps_the_rows_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """It fills up within a row."""
    path = written(folder, row("1"), row("2"))
    journal = Journal(folder, TrialKey)
    real = os.write
    left = [room]

    def write(file: int, text: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = real(file, text[: left[0]])
        left[0] -= done
        return done

    monkeypatch.setattr(journal_module.os, "write", write)
    with pytest.raises(OSError, match=r"rows.* \(No space left on device\); the rows before it"):
        journal.write(row("3"))
    assert key("3") not in journal.done
    journal.close()
    monkeypatch.undo()
    assert list(read_rows(folder, TrialKey)) == [key("1"), key("2")]
    written(folder, row("3"))
    assert list(read_rows(folder, TrialKey)) == [key("1"), key("2"), key("3")]
    assert path.read_bytes().count(b"\n") == 3


def test_a_journal_keeps_no_row_in_memory(folder: Path) -> None:
    """Of megabytes of rows it knows only which are there."""
    tracemalloc.start()
    try:
        start, _ = tracemalloc.get_traced_memory()
        journal = Journal(folder, TrialKey)
        for number in range(50):
            journal.write(row(str(number), confusion=[10**9 + number] * 3600))
        journal.refresh()
        held, _ = tracemalloc.get_traced_memory()
        journal.close()
        again = Journal(folder, TrialKey)
        held_again, _ = tracemalloc.get_traced_memory()
        again.close()
    finally:
        tracemalloc.stop()
    size = (folder / "0000.jsonl").stat().st_size
    assert size > 1.9e6
    assert held - start < 0.1 * size
    assert held_again - held < 0.1 * size


def test_opening_a_journal_takes_little_memory(folder: Path) -> None:
    """Long runs have journals of gigabytes."""
    path = written(folder, row("1", confusion=[10**9] * 3600))
    path.write_bytes(path.read_bytes() * 50)
    tracemalloc.start()
    try:
        Journal(folder, TrialKey).close()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 0.5 * path.stat().st_size


# the run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def whole(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small run that nothing interrupts."""
    return evaluated(small(place), tmp_path_factory.mktemp("whole") / "run")


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


def killed_after(number: int, content: dict[str, Any], run: Path) -> Path:
    """Evaluate until so many rows are written."""
    times = iter(range(10_000))
    with pytest.MonkeyPatch.context() as patch:
        real = Journal.write

        def write(self: Journal, one: dict[str, Any]) -> None:
            if next(times) == number:
                raise Killed
            real(self, one)

        patch.setattr(Journal, "write", write)
        with pytest.raises(Killed):
            evaluated(content, run)
    assert num_rows(run) == number
    return run


def failing(*_: Any, **__: Any) -> None:
    raise AssertionError("it is computed again")


def cli(content: dict[str, Any], run: Path, *flags: str) -> int:
    path = run.parent / "recipe.yaml"
    write_recipe(path, content)
    return run_cli("evaluate", path, "-o", run, *flags)


def refused(content: dict[str, Any], run: Path, capsys: Any, *flags: str) -> str:
    """Run the command line; return its one line, after looking that no file has changed."""
    before = files_of(run)
    capsys.readouterr()
    code = cli(content, run, *flags)
    said = capsys.readouterr().err
    assert code == 2, said
    assert "Traceback" not in said
    assert len(said.splitlines()) == 1, said
    assert files_of(run) == before
    return said


@pytest.mark.parametrize("number", [0, 1, 5, 9, 14])
def test_a_run_goes_on_after_any_row(
    place: Place, whole: Path, tmp_path: Path, number: int
) -> None:
    run = killed_after(number, small(place), tmp_path / "run")
    evaluated(small(place), run)
    assert tables_of(run) == tables_of(whole)
    assert num_rows(run) == num_rows(whole) == 15


@pytest.mark.parametrize("name", ["record.json", "chosen.json", "domains.csv", "failed.csv"])
def test_a_run_goes_on_that_ended_before_a_file_was_in_place(
    place: Place, whole: Path, tmp_path: Path, name: str
) -> None:
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        real = Path.replace

        def replace(path: Path, target: Path) -> Path:
            if Path(target).name == name:
                raise Killed
            return real(path, target)

        patch.setattr(Path, "replace", replace)
        with pytest.raises(Killed):
            evaluated(small(place), run)
    evaluated(small(place), run)
    assert tables_of(run) == tables_of(whole)
    assert (run / "chosen.json").read_bytes() == (whole / "chosen.json").read_bytes()


def many(place: Place) -> dict[str, Any]:
    """Return a recipe of 82 rows, which takes its time."""
    return small(
        place,
        targets=[place.domain("dim"), place.domain("dark")],
        methods=[
            {"method": "source"},
            {"method": "san", "tune": {"alpha": [0.0, 0.1, 0.3, 0.5]},
             "sweep": {"alpha": [0.2, 0.4, 0.6]}},
            {"method": "tta", "same_as": "san", "settings": {"scales": [1.0]}},
            {"method": "tent", "same_as": "san", "tune": {"lr": [0.1, 0.01], "steps": [1, 2]},
             "search": "in turn"},
        ],
    )  # fmt: skip


@pytest.fixture(scope="module")
def single(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The larger run, in one process that nothing interrupts."""
    return evaluated(many(place), tmp_path_factory.mktemp("single") / "run")


def test_two_processes_killed_five_times_come_to_the_same_tables(
    place: Place, single: Path, tmp_path: Path
) -> None:
    """At moments a seed gives, with the hardest signal, each time both of them."""
    path, run = write_recipe(tmp_path / "recipe.yaml", many(place)), tmp_path / "run"
    log, chance = tmp_path / "log", random.Random(5)
    for _ in range(5):
        process = start_pair(path, run, log)
        goal = (num_rows(run) if run.exists() else 0) + chance.randint(1, 8)
        wait_for(lambda goal=goal: num_rows(run) >= goal, process, log)
        if chance.random() < 0.7:
            process.join(chance.uniform(0, 0.05))
        kill_group(process)
    rows_then = num_rows(run)
    assert 5 <= rows_then < num_rows(single)
    process = start_pair(path, run, log)
    process.join(SECONDS)
    assert process.exitcode == 0, log.read_text()
    assert tables_of(run) == tables_of(single)
    assert len(list((run / "rows").glob("*.jsonl"))) == 2
    assert len(read_rows(run / "rows", TrialKey)) == len(read_rows(single / "rows", TrialKey))
    assert (run / "chosen.json").read_bytes() == (single / "chosen.json").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Method, "__call__", failing)
        evaluated(many(place), run)  # and one process has nothing left to do
    assert tables_of(run) == tables_of(single)


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2), (2, 2, 3, 1)], ids=str)
def test_shares_come_to_the_same_tables_in_any_order(
    place: Place, whole: Path, tmp_path: Path, capsys: Any, order: tuple[int, ...]
) -> None:
    run = tmp_path / "run"
    for number in order:
        capsys.readouterr()
        assert not (run / "tables").exists()
        assert cli(small(place), run, "--shard", f"{number}/3") == 0
    assert "rows, settings and tables are in" in capsys.readouterr().out
    assert num_rows(run) == num_rows(whole), "nothing is done twice"
    assert tables_of(run) == tables_of(whole)
    assert (run / "chosen.json").read_bytes() == (whole / "chosen.json").read_bytes()


def test_a_share_says_what_is_still_to_come(
    place: Place, whole: Path, tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    assert cli(small(place), run, "--shard", "1/2") == 0
    assert "this share is done, 3 rows of others are not" in capsys.readouterr().out
    assert cli(small(place), run, "--shard", "1/2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["missing"] == 3
    with pytest.MonkeyPatch.context() as patch:
        done = []
        real = Journal.write
        patch.setattr(Journal, "write", lambda self, one: done.append(one) or real(self, one))
        assert cli(small(place), run) == 0  # whoever comes does what is left
    assert len(done) == 3
    assert tables_of(run) == tables_of(whole)


def test_the_last_share_writes_tables_while_another_is_only_waiting(
    place: Place, whole: Path, tmp_path: Path
) -> None:
    """Nobody writes tables as long as another share may still add rows."""
    run = tmp_path / "run"
    evaluated(small(place), run, shard=Shard(1, 2))
    store = EvaluationFolder(run, Shard(3, 4))
    store.open(json.loads((run / "record.json").read_text())["identity"])
    evaluated(small(place), run, shard=Shard(2, 2))
    assert not (run / "tables").exists()
    assert store.claim()
    store.close()
    evaluated(small(place), run, shard=Shard(2, 2))
    assert tables_of(run) == tables_of(whole)


@pytest.mark.parametrize("shard", ["0/2", "3/2", "2", "a/b", "-1/2", "1/2/3", ""])
def test_a_shard_that_cannot_be_is_refused(
    place: Place, tmp_path: Path, capsys: Any, shard: str
) -> None:
    assert cli(small(place), tmp_path / "run", f"--shard={shard}") == 2
    assert "a shard must be I/N, for example 2/4" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flag", ["--overwrite", "--retry"])
def test_a_share_removes_nothing_of_others(
    place: Place, whole: Path, tmp_path: Path, capsys: Any, flag: str
) -> None:
    said = refused(small(place), copied(whole, tmp_path / "run"), capsys, "--shard=1/2", flag)
    assert "leave out --shard" in said


def test_a_share_is_done_by_one_process_at_a_time(
    place: Place, whole: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfadapt.runs.store.LOCK_TIMEOUT_S", 0.3)
    run = copied(whole, tmp_path / "run")
    journal = Journal(run / "rows", TrialKey, 1)
    assert "another process writes to" in refused(small(place), run, capsys, "--shard", "2/2")
    journal.close()
    file = locked(run)  # by one that does all
    assert "another process works in" in refused(small(place), run, capsys, "--shard", "2/2")
    os.close(file)


def test_processes_of_torchrun_are_told_of_shares(
    place: Place, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli(small(place), tmp_path / "run") == 2
    assert "start processes with --shard i/n" in capsys.readouterr().err


def test_an_evaluation_of_an_earlier_version_is_refused(
    place: Place, whole: Path, tmp_path: Path, capsys: Any
) -> None:
    run = copied(whole, tmp_path / "run")
    record = json.loads((run / "record.json").read_text())
    (run / "record.json").write_text(json.dumps({**record, "format": "selfadapt evaluation 1"}))
    said = refused(small(place), run, capsys)
    assert "got 'selfadapt evaluation 1', of another version" in said
    assert "use --overwrite to start" in said
    assert cli(small(place), run, "--overwrite") == 0
    assert tables_of(run) == tables_of(whole)


def test_a_torn_row_is_done_again(place: Place, whole: Path, tmp_path: Path) -> None:
    run = copied(whole, tmp_path / "run")
    path = run / "rows/0000.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    done = []
    with pytest.MonkeyPatch.context() as patch:
        real = Journal.write
        patch.setattr(Journal, "write", lambda self, one: done.append(one) or real(self, one))
        evaluated(small(place), run)
    assert len(done) == 1
    assert tables_of(run) == tables_of(whole)


def test_a_damaged_row_stops_a_run(place: Place, whole: Path, tmp_path: Path, capsys: Any) -> None:
    run = copied(whole, tmp_path / "run")
    path = run / "rows/0000.jsonl"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    assert f"a row in {path}" in refused(small(place), run, capsys)


def test_rows_that_are_there_twice_count_once(place: Place, whole: Path, tmp_path: Path) -> None:
    run = copied(whole, tmp_path / "run")
    path = run / "rows/0000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, lines[3], lines[-1], *lines[:2]]))
    shutil.rmtree(run / "tables")
    evaluated(small(place), run)
    assert tables_of(run) == tables_of(whole)


def test_a_run_that_is_complete_is_not_computed_again(
    place: Place, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(whole, tmp_path / "run")
    shutil.rmtree(run / "tables")
    before = (run / "rows/0000.jsonl").read_bytes()
    monkeypatch.setattr(Method, "__call__", failing)
    monkeypatch.setattr(Journal, "write", failing)
    assert cli(small(place), run) == 0
    assert tables_of(run) == tables_of(whole)
    assert (run / "rows/0000.jsonl").read_bytes() == before


def test_what_does_not_change_the_numbers_may_change(
    place: Place, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data and the network lie elsewhere now."""
    run = copied(whole, tmp_path / "run")
    elsewhere = copy_domains(place, tmp_path / "elsewhere")
    shutil.copy(place.net(), elsewhere.root)
    elsewhere = elsewhere._replace(nets=elsewhere.root)
    monkeypatch.setattr(Journal, "write", failing)
    evaluated(small(elsewhere, unreadable="stop"), run)
    assert tables_of(run) == tables_of(whole)


# runs that are not touched


def with_another_network(content: dict[str, Any], place: Place, tmp_path: Path) -> None:
    content["networks"]["one"]["place"] = place.net("two")


def with_renamed_classes(content: dict[str, Any], place: Place, tmp_path: Path) -> None:
    """The same tensors, but what was road is car now."""
    model = create_model("deeplabv1_resnet18_slim", classes=[CLASSES[1], CLASSES[0], CLASSES[2]])
    model.load_state_dict(load_model(place.net()).state_dict())
    save_model(model, tmp_path / "renamed.safetensors")
    content["networks"]["one"]["place"] = str(tmp_path / "renamed.safetensors")


def with_other_preprocessing(content: dict[str, Any], place: Place, tmp_path: Path) -> None:
    """The same tensors, but the image comes in another way."""
    model: Any = load_model(place.net())
    model.interface = type(model.interface)(
        **{**vars(model.interface), "mean": (0.1, 0.2, 0.3), "std": (1.0, 1.0, 1.0)}
    )
    save_model(model, tmp_path / "prepared.safetensors")
    content["networks"]["one"]["place"] = str(tmp_path / "prepared.safetensors")


def with_another_image(content: dict[str, Any], place: Place, tmp_path: Path) -> None:
    root = copied(place.root / "dim", tmp_path / "dim")
    extra = write_domain(tmp_path / "extra", 1, 99)
    for kind in ("images", "labels"):
        shutil.copy(extra / kind / "00.png", root / kind / "77.png")
    content["targets"][0]["root"] = str(root)


def with_one_image_less(content: dict[str, Any], place: Place, tmp_path: Path) -> None:
    root = copied(place.root / "val", tmp_path / "val")
    for kind in ("images", "labels"):
        (root / kind / "01.png").unlink()
    content["validation"]["root"] = str(root)


def changed(*keys: Any, value: Any) -> Callable[[dict[str, Any], Place, Path], None]:
    def change(content: dict[str, Any], place: Place, tmp_path: Path) -> None:
        for one in keys[:-1]:
            content = content[one]
        content[keys[-1]] = value

    return change


CHANGES: dict[str, tuple[Callable[[dict[str, Any], Place, Path], None], str]] = {
    "a tuned setting": (changed("methods", 1, "tune", value={"alpha": [0.0, 0.4]}), "methods"),
    "one more method": (
        changed("methods", value=[*[{"method": "source"}], {"method": "p-bn"}]),
        "methods",
    ),
    "the scale": (changed("targets", 0, "scale", value=2.0), "targets"),
    "the classes": (changed("classes", value=["road", "car"]), "classes"),
    "the order of classes": (changed("classes", value=CLASSES[::-1]), "classes"),
    "what labels mean": (changed("targets", 0, "classes", value=CLASSES[::-1]), "targets"),
    "the name of a domain": (changed("targets", 0, "name", value="other"), "other"),
    "the network": (with_another_network, "networks.one"),
    "the classes of the network": (with_renamed_classes, "networks"),
    "the preprocessing of the network": (with_other_preprocessing, "networks"),
    "one more image": (with_another_image, "images.dim: 3 of folder.*-> 4 of folder"),
    "one image less": (with_one_image_less, "images.val: 3 of folder.*-> 2 of folder"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_of_something_else_is_not_touched(
    place: Place, whole: Path, tmp_path: Path, capsys: Any, name: str
) -> None:
    run = copied(whole, tmp_path / "run")
    content = deepcopy(small(place))
    change, word = CHANGES[name]
    change(content, place, tmp_path)
    said = refused(content, run, capsys)
    assert f"{run} holds an evaluation that differs" in said
    assert "--overwrite to start" in said
    with pytest.raises(ValueError, match=word):
        raise ValueError(said)


def test_another_order_of_settings_that_are_tuned_in_turn_is_another_run(
    place: Place, tmp_path: Path
) -> None:
    tune = {"steps": [1, 2], "lr": [0.1, 0.01]}
    method = {"method": "tent", "search": "in turn"}
    data = {"validation": place.domain("val", limit=1)}
    run = tmp_path / "run"
    evaluated(small(place, methods=[{**method, "tune": tune}], **data), run, only_tune=True)
    turned = {name: tune[name] for name in reversed(tune)}
    with pytest.raises(ValueError, match="holds an evaluation that differs"):
        evaluated(small(place, methods=[{**method, "tune": turned}], **data), run, only_tune=True)


def test_overwriting_starts_anew(place: Place, whole: Path, tmp_path: Path) -> None:
    run = copied(whole, tmp_path / "run")
    (run / "rows/0001.jsonl").write_bytes((run / "rows/0000.jsonl").read_bytes())
    other = small(place, methods=[{"method": "source"}])
    assert cli(other, run, "--overwrite") == 0
    assert num_rows(run) == 6
    assert [row["method"] for row in rows(run / "tables/domains.csv")] == ["source"] * 2
    assert cli(small(place), run, "--overwrite") == 0
    assert tables_of(run) == tables_of(whole)


def test_what_killed_processes_left_half_written_is_removed(
    place: Place, whole: Path, tmp_path: Path
) -> None:
    run = copied(whole, tmp_path / "run")
    (run / "pictures").mkdir()
    gone = "0123cdef"
    mine = [run / f".mine.{gone}.part", run / "tables/.b.part"]
    names = ("record.json", "chosen.json", "tables/domains.csv", "pictures/a.png")
    parts = [(run / name).with_name(f".{Path(name).name}.{gone}.part") for name in names]
    for path in (*parts, *mine):
        path.write_text("half")
    other = os.open(run / ".lock", os.O_RDWR)
    assert lock(other, shared=True)
    evaluated(small(place), run, shard=Shard(1, 2))
    assert [path for path in parts if not path.exists()] == [], "they may be the other share's"
    os.close(other)
    evaluated(small(place), run)
    assert [path for path in parts if path.exists()] == []
    assert [path for path in mine if not path.exists()] == []
    assert tables_of(run) == tables_of(whole)


def test_overwriting_keeps_other_files(place: Place, whole: Path, tmp_path: Path) -> None:
    run = copied(whole, tmp_path / "run")
    (run / "notes.txt").write_text("mine")
    assert cli(small(place), run) == 0
    assert cli(small(place), run, "--overwrite") == 0
    assert (run / "notes.txt").read_text() == "mine"
    assert tables_of(run) == tables_of(whole)


def test_a_damaged_record_is_said_to_be_damaged(
    place: Place, whole: Path, tmp_path: Path, capsys: Any
) -> None:
    run = copied(whole, tmp_path / "run")
    record = run / "record.json"
    record.write_text(record.read_text()[:50])
    assert f"{record} is damaged" in refused(small(place), run, capsys)
    record.write_text("[]")
    assert str(record) in refused(small(place), run, capsys)
    record.write_text('{"format": "mine"}')
    assert str(record) in refused(small(place), run, capsys)


@pytest.mark.parametrize("flags", [(), ("--overwrite",)], ids=["", "overwrite"])
@pytest.mark.parametrize("name", ["photo.jpg", "pictures/photo.jpg", "tables/mine.csv"])
def test_a_folder_of_other_files_is_not_touched(
    place: Place, tmp_path: Path, capsys: Any, name: str, flags: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    (run / name).parent.mkdir(parents=True)
    (run / name).write_text("mine")
    said = refused(small(place), run, capsys, *flags)
    assert f"{run} holds other files and no evaluation" in said


def test_a_file_is_no_folder(place: Place, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run").write_text("mine")
    assert cli(small(place), tmp_path / "run") == 2
    assert f"{tmp_path / 'run'} is a file" in capsys.readouterr().err
    assert (tmp_path / "run").read_text() == "mine"


@pytest.mark.parametrize("flags", [(), ("--overwrite",), ("--retry",)], ids=str)
def test_two_processes_do_not_write_one_run(
    place: Place, whole: Path, tmp_path: Path, capsys: Any, flags: tuple[str, ...]
) -> None:
    run = copied(whole, tmp_path / "run")
    file = locked(run)
    said = refused(small(place), run, capsys, *flags)
    assert f"another process works in {run}" in said
    os.close(file)
    assert cli(small(place), run, *flags) == 0


# images that cannot be read


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def no_image(path: Path) -> None:
    path.write_text("this is no image")


def resized(path: Path) -> None:
    Image.open(path).resize((48, 32)).save(path)


def unknown_id(path: Path) -> None:
    Image.fromarray(np.full((64, 96), 77, np.uint8)).save(path)


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "cut image": ("images", cut),
    "empty image": ("images", empty),
    "text for an image": ("images", no_image),
    "small image": ("images", resized),
    "cut label": ("labels", cut),
    "unknown id": ("labels", unknown_id),
}


@pytest.fixture
def mine(place: Place, tmp_path: Path) -> Place:
    """The place in a copy that can be damaged."""
    return copy_domains(place, tmp_path / "place")


@pytest.mark.parametrize("name", DAMAGE)
def test_an_image_that_cannot_be_read_is_a_row_with_its_reason(
    place: Place, mine: Place, whole: Path, tmp_path: Path, capsys: Any, name: str
) -> None:
    kind, damage = DAMAGE[name]
    path, run = mine.root / "dim" / kind / "01.png", tmp_path / "run"
    good = path.read_bytes()
    damage(path)
    assert cli(small(mine), run) == 1
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert "not done: dim, 01" in out
    failed = rows(run / "tables/failed.csv")
    assert [(one["method"], one["domain"]) for one in failed] == [("source", "dim"), ("san", "dim")]
    assert {one["image"] for one in failed} == {"01"}
    for one in failed:
        assert "01.png" in one["reason"]
        assert "\n" not in one["reason"]
    table = {(one["method"], one["domain"]): one for one in rows(run / "tables/domains.csv")}
    assert (table["san", "dim"]["images"], table["san", "dim"]["failed"]) == ("2", "1")
    assert table["san", "val"] in rows(whole / "tables/domains.csv")
    path.write_bytes(good)
    assert cli(small(mine), run, "--retry") == 0
    assert tables_of(run) == tables_of(whole)


@pytest.mark.parametrize("kind", ["images", "labels"])
def test_a_file_without_its_partner_is_left_out_and_that_is_said(
    mine: Place, tmp_path: Path, capsys: Any, kind: str
) -> None:
    (mine.root / "dim" / kind / "01.png").unlink()
    assert cli(small(mine), tmp_path / "run") == 0
    assert "note: dim: left out: 1" in capsys.readouterr().err
    (note,) = json.loads((tmp_path / "run/record.json").read_text())["notes"]
    assert "01.png" in note
    table = {
        (one["method"], one["domain"]): one for one in rows(tmp_path / "run/tables/domains.csv")
    }
    assert table["san", "dim"]["images"] == "2"


def test_an_image_that_failed_is_tried_again_when_it_is_asked_for(
    mine: Place, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, run = mine.root / "dim/images/01.png", tmp_path / "run"
    good = path.read_bytes()
    cut(path)
    assert cli(small(mine), run) == 1
    path.write_bytes(good)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "write", failing)
        assert cli(small(mine), run) == 1
    assert cli(small(mine), run, "--retry") == 0
    monkeypatch.setattr(Journal, "write", failing)
    assert cli(small(mine), run) == 0
    assert cli(small(mine), run, "--retry") == 0
    assert tables_of(run) == tables_of(whole)


def test_an_image_of_the_validation_domain_that_cannot_be_read_is_left_out(
    mine: Place, whole: Path, tmp_path: Path
) -> None:
    path, run = mine.root / "val/images/02.png", tmp_path / "run"
    good = path.read_bytes()
    cut(path)
    assert cli(small(mine), run) == 1
    one_less = small(mine, validation=mine.domain("val", limit=2))
    evaluated(one_less, tmp_path / "less")
    scores = [json.loads((one / "chosen.json").read_text())["san"] for one in
              (run, tmp_path / "less")]  # fmt: skip
    assert scores[0] == scores[1]
    path.write_bytes(good)
    assert cli(small(mine), run, "--retry") == 0
    assert tables_of(run) == tables_of(whole)


def test_a_retry_that_fails_again_says_the_new_reason(mine: Place, tmp_path: Path) -> None:
    path, run = mine.root / "dim/images/01.png", tmp_path / "run"
    no_image(path)
    assert cli(small(mine), run) == 1
    first = rows(run / "tables/failed.csv")
    Image.new("RGB", (30, 20)).save(path)
    assert cli(small(mine), run, "--retry") == 1
    second = rows(run / "tables/failed.csv")
    assert len(first) == len(second) == 2
    assert "is not an image file" in first[0]["reason"]
    assert "30x20" in second[0]["reason"]


def test_a_run_can_stop_at_an_image_that_cannot_be_read(
    mine: Place, whole: Path, tmp_path: Path, capsys: Any
) -> None:
    path, run = mine.root / "dim/images/01.png", tmp_path / "run"
    good = path.read_bytes()
    cut(path)
    assert cli(small(mine, unreadable="stop"), run) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    said = err.splitlines()[-1]
    assert "dim, 01: " in said
    assert "01.png" in said
    assert "finished rows are kept" in said
    kept = num_rows(run)
    assert kept == 3 * 3 + 2
    path.write_bytes(good)
    assert cli(small(mine, unreadable="stop"), run) == 0
    assert num_rows(run) == 15
    assert tables_of(run) == tables_of(whole)


def test_a_method_that_fails_on_an_image_does_not_end_the_run(
    place: Place, whole: Path, tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        fail_on(patch, place.root / "dim/images/02.png", SaNOnly)
        assert cli(small(place), run) == 1
    assert "Traceback" not in capsys.readouterr().err
    failed = rows(run / "tables/failed.csv")
    assert [(one["method"], one["domain"], one["image"]) for one in failed] == [
        ("san", "dim", "02")
    ]
    assert "no luck" in failed[0]["reason"]
    assert cli(small(place), run, "--retry") == 0
    assert tables_of(run) == tables_of(whole)


def test_an_interruption_loses_no_image_that_was_segmented(
    place: Place, whole: Path, tmp_path: Path
) -> None:
    """A row is written while the next image is segmented: here that takes long, and ends first."""
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        segment, write, times = Method.__call__, Journal.write, iter(range(1000))

        def interrupted(*args: Any, **kwargs: Any) -> Result:
            if next(times) == 4:
                raise Killed
            return segment(*args, **kwargs)

        def slow(self: Journal, one: dict[str, Any]) -> None:
            time.sleep(0.5)
            write(self, one)

        patch.setattr(Method, "__call__", interrupted)
        patch.setattr(Journal, "write", slow)
        with pytest.raises(Killed):
            evaluated(small(place), run)
    assert num_rows(run) == 4
    evaluated(small(place), run)
    assert tables_of(run) == tables_of(whole)


def test_an_image_that_cannot_be_counted_is_a_row_with_its_reason(
    place: Place, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        segment, bad = Method.__call__, read_image(place.root / "dim/images/02.png")

        def broken(self: Method, image: Any, **kwargs: Any) -> Result:
            result = segment(self, image, **kwargs)
            if type(self) is SaNOnly and torch.equal(image, bad):
                result.probs[:, 3, 20:22] = torch.nan
            return result

        patch.setattr(Method, "__call__", broken)
        assert cli(small(place), run) == 1
    failed = rows(run / "tables/failed.csv")
    assert [(one["method"], one["domain"], one["image"]) for one in failed] == [
        ("san", "dim", "02")
    ]
    assert "san failed: ValueError: 2 pixels cannot be counted" in failed[0]["reason"]


def test_a_failure_of_settings_that_are_not_chosen_is_no_secret(
    place: Place, tmp_path: Path, capsys: Any
) -> None:
    """The image is left out for all settings, which may change the choice."""
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        fail_on(patch, place.root / "val/images/01.png", SaNOnly, alpha=0.0)
        assert cli(small(place), run) == 1
    assert "san alpha=0.0: san failed: RuntimeError: no luck" in capsys.readouterr().out
    (failed,) = rows(run / "tables/failed.csv")
    assert (failed["method"], failed["domain"], failed["image"]) == ("san alpha=0.0", "val", "01")
    assert cli(small(place), run, "--retry") == 0
    assert rows(run / "tables/failed.csv") == []


def test_pictures_are_of_the_settings_that_were_chosen_in_the_end(
    mine: Place, tmp_path: Path
) -> None:
    path, run = mine.root / "val/images/00.png", tmp_path / "run"
    content = small(mine, pictures=1)
    content["methods"][1]["tune"] = {"alpha": [round(0.1 * step, 1) for step in range(11)]}
    good = path.read_bytes()
    cut(path)
    assert cli(content, run) == 1
    before = json.loads((run / "chosen.json").read_text())["san"]["chosen"]
    path.write_bytes(good)
    assert cli(content, run, "--retry") == 0
    assert json.loads((run / "chosen.json").read_text())["san"]["chosen"] != before
    fresh = evaluated(content, tmp_path / "fresh")
    assert files_of(run / "pictures") == files_of(fresh / "pictures")


def test_no_cell_of_the_tables_is_a_formula(place: Place, tmp_path: Path) -> None:
    worse = {"method": "tent", "label": "-p", "settings": {"lr": 10.0}}
    methods = [{"method": "source", "label": "=1+1"}, worse]
    run = evaluated(small(place, methods=methods), tmp_path / "run")
    images = rows(run / "tables/images.csv")
    assert {row["method"] for row in images} == {"'=1+1", "'-p"}
    assert any(float(row["change"] or 0) < 0 for row in images), "there is no negative number"


def test_pictures_of_others_are_kept_and_not_taken_for_drawn_ones(
    place: Place, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    content = small(place, pictures=1)
    evaluated(content, run)
    before = files_of(run / "pictures")
    mine = run / "pictures/mine.png"
    mine.write_text("precious")
    (run / "tables/mine.csv").write_text("precious")
    for how in ({}, {"retry": True}, {"overwrite": True}):
        evaluated(content, run, **how)
        assert files_of(run / "pictures") == before | {"mine.png": b"precious"}
    assert (run / "tables/mine.csv").read_text() == "precious"
    (run / "pictures/index.json").unlink()
    drawn = sorted(name for name in before if name.endswith(".png"))[0]
    (run / "pictures" / drawn).write_text("of an earlier run")
    evaluated(content, run)
    assert files_of(run / "pictures") == before | {"mine.png": b"precious"}


@pytest.mark.parametrize(
    "content", ["[", "3", "[3, {}]", '[{"file": "../mine.png"}, {"file": "a\\u0000.png"}]', "link"]
)
def test_an_index_removes_no_picture_of_others(content: str, tmp_path: Path) -> None:
    run, pictures = tmp_path / "run", tmp_path / "run/pictures"
    run.mkdir()
    if content == "link":
        (tmp_path / "elsewhere").mkdir()
        pictures.symlink_to(tmp_path / "elsewhere")
        content = '[{"file": "a.png"}]'
    else:
        pictures.mkdir()
    for path in (run / "mine.png", pictures / "a.png"):
        path.touch()
    (pictures / "index.json").write_text(content)
    assert drawn_pictures(run) == set()


def test_an_end_while_a_run_is_removed_leaves_what_can_be_removed(
    place: Place, whole: Path, tmp_path: Path
) -> None:
    run = copied(whole, tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rmdir", failing)
        with pytest.raises(AssertionError):
            evaluated(small(place), run, overwrite=True)
    evaluated(small(place), run, overwrite=True)
    assert tables_of(run) == tables_of(whole)


def test_what_goes_on_after_a_stop_is_said_without_overwriting(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "write", stop)
    assert cli(small(place), tmp_path / "run", "--overwrite") == 130
    said = capsys.readouterr().err
    assert "run the same command without --overwrite to continue" in said


def test_the_change_is_over_the_images_that_both_have(
    place: Place, whole: Path, tmp_path: Path
) -> None:
    """An image that one method alone fails on must not count as a change of the others."""
    run = tmp_path / "run"
    content = small(
        place, methods=[{"method": "source"}, {"method": "san", "settings": {"alpha": 0}}]
    )
    with pytest.MonkeyPatch.context() as patch:
        fail_on(patch, place.root / "dim/images/02.png", SaNOnly)
        assert cli(content, run) == 1
    table = {(one["method"], one["domain"]): one for one in rows(run / "tables/domains.csv")}
    assert float(table["san", "val"]["change"]) == 0
    assert float(table["san", "dim"]["change"]) == 0  # SaN with alpha 0 is source


def test_a_sweep_that_fails_is_no_secret(place: Place, tmp_path: Path) -> None:
    run = tmp_path / "run"
    methods = [{"method": "source"}, {"method": "san", "sweep": {"alpha": [0.5]}}]
    with pytest.MonkeyPatch.context() as patch:
        fail_on(patch, place.root / "dim/images/01.png", SaNOnly, alpha=0.5)
        code = cli(small(place, methods=methods), run)
    assert code == 1
    assert "no luck" in (run / "tables/failed.csv").read_text()


def test_a_full_disk_stops_a_run_that_goes_on_later(
    place: Place, whole: Path, tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        real, times = os.write, iter(range(1000))

        def write(file: int, text: bytes) -> int:
            if b'"confusion"' in text and next(times) >= 7:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(file, text)

        patch.setattr(journal_module.os, "write", write)
        assert cli(small(place), run) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    said = err.splitlines()[-1]
    assert f"a row could not be written to {run / 'rows'} (No space left on device)" in said
    assert "the rows before it are kept" in said
    assert num_rows(run) == 7
    assert cli(small(place), run) == 0
    assert num_rows(run) == 15
    assert tables_of(run) == tables_of(whole)
