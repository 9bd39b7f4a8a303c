"""The folder of a run: what it is of, who works in it, what is removed and what is not."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from evaluations import files_of
from runs import locked
from selfadapt.files import atomic_write, remove_partial_files
from selfadapt.runs import RunStore, Shard

IDENTITY = {"lr": 0.1, "model": {"name": "a", "classes": ("x", "y")}}


class Store(RunStore):
    NAME = "a test run"
    FORMAT = "test 1"
    OUTPUTS = ("rows/*.jsonl", "result.txt", "maps/*.png")


class Key(NamedTuple):
    image: str


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a row and outputs, beside files of the user."""
    path = tmp_path / "run"
    with Store(path) as store:
        store.open(IDENTITY, {"device": "cpu"})
        journal = store.journal(Key)
        journal.write({"image": "1"})
        journal.close()
        (path / "maps").mkdir()
        for name in ("result.txt", "maps/1.png", "maps/mine.txt", "mine.png"):
            (path / name).write_text(name)
    return path


def opened(path: Path, identity: dict[str, Any] = IDENTITY, **how: Any) -> None:
    with Store(path) as store:
        store.open(identity, **how)


def opened_with_rows(path: Path, **how: Any) -> None:
    with Store(path) as store:
        store.open(IDENTITY, **how)
        store.journal(Key).close()


def test_a_run_goes_on_with_all_that_is_there(run: Path) -> None:
    before = files_of(run)
    with Store(run) as store:
        assert store.check(IDENTITY)
        store.open(IDENTITY, {"device": "cpu"})
        journal = store.journal(Key)
        assert list(journal.done) == [Key("1")]
        journal.close()
    assert files_of(run) == before
    assert Store.read_record(run) == {
        "format": "test 1", "identity": json.loads(json.dumps(IDENTITY)), "device": "cpu"
    }  # fmt: skip


def test_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    """Processes of two containers may have the same number."""
    path = tmp_path / ("a" * 236 + ".txt")
    with atomic_write(path) as one, atomic_write(path) as other:
        assert one.exists()
        assert one != other
        other.write_text("other")
        one.write_text("one")
    assert files_of(tmp_path) == {path.name: b"one"}


def test_temporary_files_are_known_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".a.txt.0123abcd.part").symlink_to(tmp_path / "elsewhere")
    others = {"a.txt", ".a.txt.part", ".a.txt.mine.part", ".b.txt.01234567.part"}
    for name in (".a.txt.4567cdef.part", *others):
        (tmp_path / name).touch()
    remove_partial_files(tmp_path, "a.txt")
    assert {path.name for path in tmp_path.iterdir()} == others | {"elsewhere"}


def test_settings_that_differ_are_named(run: Path) -> None:
    before = files_of(run)
    other = {"lr": 0.1, "model": {"name": "b", "classes": ("x", "y")}, "seed": 1}
    with pytest.raises(ValueError, match=r"holds a test run that differs") as caught:
        opened(run, other)
    assert "(model.name: a -> b; seed: default -> 1); give another folder" in str(caught.value)
    assert files_of(run) == before


def test_overwriting_removes_what_a_run_writes_and_nothing_else(run: Path) -> None:
    opened(run, {"lr": 1}, overwrite=True)
    left = {path.relative_to(run).as_posix() for path in run.rglob("*")}
    assert left == {".lock", "record.json", "maps", "maps/mine.txt", "mine.png"}
    assert Store.read_record(run)["identity"] == {"lr": 1}


def test_an_end_while_a_run_is_removed_leaves_a_run(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", ending)
        with pytest.raises(KeyboardInterrupt):
            opened(run, {"lr": 1}, overwrite=True)
    assert not (run / "result.txt").exists()
    assert Store.read_record(run)["identity"]["lr"] == 0.1
    opened(run)


def ending(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("how", [{}, {"overwrite": True}], ids=str)
def test_other_files_are_no_run(tmp_path: Path, how: dict[str, Any]) -> None:
    (tmp_path / "photo.jpg").write_text("mine")
    with pytest.raises(FileExistsError, match="holds other files and no test run"):
        opened(tmp_path, **how)
    assert files_of(tmp_path) == {"photo.jpg": b"mine"}


def test_a_run_may_lie_among_other_files_in_a_folder_of_its_own(tmp_path: Path) -> None:
    class Hidden(Store):
        WORK = ".test"
        OUTPUTS = ("*.png",)

    (tmp_path / "photo.jpg").write_text("mine")
    for _ in range(2):
        with Hidden(tmp_path) as store:
            store.open(IDENTITY)
            (tmp_path / "photo.png").write_text("made")
            store.journal(Key).close()
    assert (tmp_path / ".test/rows").is_dir()
    with Hidden(tmp_path) as store:
        store.open({}, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"photo.jpg", ".test"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is damaged"),
        ("[]", "got None, of another version"),
        ('{"format": "test 0", "identity": {}}', "got 'test 0', of another version"),
        ('{"format": "test 1"}', "lacks identity"),
        ('{"format": "test 1", "identity": 3}', "lacks identity"),
    ],
)
def test_a_record_that_cannot_be_is_refused(run: Path, text: str, reason: str) -> None:
    (run / "record.json").write_text(text)
    before = files_of(run)
    with pytest.raises(ValueError, match="use --overwrite to start") as caught:
        opened(run)
    assert reason in str(caught.value)
    assert files_of(run) == before
    opened(run, overwrite=True)
    opened(run)


def test_one_process_works_on_a_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfadapt.runs.store.LOCK_TIMEOUT_S", 0.3)
    file = locked(run)
    for shard in (Shard(), Shard(1, 2)):
        with pytest.raises(ValueError, match=r"another process works in .*run; wait for it"):
            Store(run, shard).open(IDENTITY)
    os.close(file)
    opened(run)


@pytest.mark.parametrize("end", ["close", "raise"])
def test_a_run_is_let_go_of(run: Path, end: str) -> None:
    store = Store(run)
    if end == "close":
        store.open(IDENTITY)
        store.close()
    else:
        with pytest.raises(ValueError, match="differs"):
            store.open({"lr": 3})
    os.close(locked(run))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_does_not_hold_the_lock(run: Path) -> None:
    store = Store(run)
    store.open(IDENTITY)
    journal = store.journal(Key)
    (read, write), (ready, forked) = os.pipe(), os.pipe()
    if not (child := os.fork()):
        os.close(write)
        os.write(forked, b"!")
        os.read(read, 1)  # until the parent is done
        os._exit(0)
    os.read(ready, 1)
    journal.close()
    store.close()
    os.close(locked(run))
    with Store(run) as again:
        again.open(IDENTITY)
        again.journal(Key).close()
    os.close(write)
    os.waitpid(child, 0)
    for file in (read, ready, forked):
        os.close(file)


def test_shares_work_together_and_the_last_concludes(tmp_path: Path) -> None:
    stores = [Store(tmp_path / "run", Shard(number, 3)) for number in (1, 2, 3)]
    for store in stores:
        store.open(IDENTITY)
    with pytest.raises(ValueError, match="another process works"):
        opened(tmp_path / "run")
    claims = []
    for store in stores:
        claims.append(store.claim())
        store.close()
    assert claims == [False, False, True]
    opened(tmp_path / "run")


def test_shares_that_start_at_once_are_of_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They differ, so all but those of one kind are refused, whichever makes the record."""
    outcomes: list[tuple[int, str]] = []
    barrier = threading.Barrier(6)

    def start(number: int) -> None:
        store = Store(tmp_path / "run", Shard(number, 6))
        barrier.wait()
        try:
            store.open({"lr": number % 2})
            outcomes.append((number % 2, "opened"))
            done.wait()
        except ValueError as error:
            outcomes.append((number % 2, str(error)))
        finally:
            store.close()

    done = threading.Event()
    threads = [threading.Thread(target=start, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(outcomes) == 6)
    done.set()
    for thread in threads:
        thread.join()
    kind = Store.read_record(tmp_path / "run")["identity"]["lr"]
    assert sorted(outcome for lr, outcome in outcomes if lr == kind) == ["opened"] * 3
    assert all("differs" in outcome for lr, outcome in outcomes if lr != kind)


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it took too long")


def test_a_share_does_not_start_anew(run: Path) -> None:
    before = files_of(run)
    with pytest.raises(ValueError, match="a share cannot start again"):
        Store(run, Shard(1, 2)).open(IDENTITY, overwrite=True)
    assert files_of(run) == before


def test_a_folder_that_cannot_be_written_to_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match=r"\.lock cannot be written to \(Permission denied\)"):
        opened(run)


def test_rows_that_cannot_be_written_are_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, *how: Any) -> int:
        if str(path).endswith(".jsonl"):
            raise PermissionError(13, "Permission denied")
        return real(path, *how)

    monkeypatch.setattr(os, "open", refuse)
    with Store(run) as store:
        store.open(IDENTITY)
        with pytest.raises(OSError, match=r"0\.jsonl cannot be written to \(Permission denied\)"):
            store.journal(Key)


@pytest.mark.parametrize("name", [".lock", "rows/0000.jsonl", "rows"])
def test_links_in_a_run_change_no_other_file(name: str, run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "0000.jsonl").write_text("precious")
    if (run / name).is_dir():
        shutil.rmtree(run / name)
    else:
        (run / name).unlink()
    (run / name).symlink_to(elsewhere if name == "rows" else elsewhere / "0000.jsonl")
    for overwrite in (False, True) if name != "rows/0000.jsonl" else (False,):
        with pytest.raises((ValueError, OSError), match=f"{name} .* link; remove it"):
            opened_with_rows(run, overwrite=overwrite)
    assert files_of(elsewhere) == {"0000.jsonl": b"precious"}


def test_overwriting_removes_nothing_through_a_link(run: Path, tmp_path: Path) -> None:
    shutil.move(run / "maps", tmp_path / "elsewhere")
    (run / "maps").symlink_to(tmp_path / "elsewhere")
    before = files_of(tmp_path / "elsewhere")
    opened(run, {"lr": 1}, overwrite=True)
    assert files_of(tmp_path / "elsewhere") == before
    assert not (run / "result.txt").exists()


def test_a_record_that_cannot_be_read_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(OSError, match=r"record.json cannot be read \(Permission denied\)"):
        opened(run)


def test_shares_are_all_and_each_once() -> None:
    numbers = [number for i in range(1, 5) for number in Shard(i, 4).of(10)]
    assert sorted(numbers) == list(range(10))
    assert list(Shard().of(3)) == [0, 1, 2]
