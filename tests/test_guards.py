"""What an evaluation and its report notice, and say, before numbers mislead anybody."""

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image, ImageOps

from evaluations import Place, copy_domains, fail_on, files_of, make_place, small, tables_of
from runs import CLASSES, run_cli
from selfadapt.baselines import SaNOnly
from selfadapt.files import file_name
from selfadapt.journal import Journal, read_rows
from selfadapt.protocol.recipe import DomainConfig, MethodConfig
from selfadapt.protocol.rows import TrialKey
from selfadapt.protocol.statistics import worse


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("place"))


def evaluate(content: dict[str, Any], run: Path, *words: str) -> int:
    path = run.parent / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return run_cli("evaluate", path, "-o", run, *words)


def refused(capsys: Any) -> str:
    """Return the one line that says why."""
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err.strip().splitlines()[-1]


@pytest.mark.parametrize("kind", ["images", "labels"])
def test_other_files_under_the_same_names_are_noticed(
    place: Place, tmp_path: Path, capsys: Any, kind: str
) -> None:
    mine = copy_domains(place, tmp_path)
    assert evaluate(small(mine), tmp_path / "run") == 0
    before = (tmp_path / "run" / "record.json").read_text()
    path = tmp_path / "dim" / kind / "01.png"
    with Image.open(path) as picture:
        flipped = ImageOps.flip(picture)
    flipped.save(path, compress_level=1)
    assert evaluate(small(mine), tmp_path / "run") == 2
    assert "01 of dim or its label has changed" in refused(capsys)
    assert (tmp_path / "run" / "record.json").read_text() == before
    assert evaluate(small(mine), tmp_path / "run", "--overwrite") == 0


@pytest.mark.parametrize("kind", ["images", "labels"])
def test_a_file_that_was_another_one_for_a_time_can_be_retried(
    place: Place, tmp_path: Path, capsys: Any, kind: str
) -> None:
    mine = copy_domains(place, tmp_path)
    content = small(mine, pictures=1)
    path = tmp_path / "dim" / kind / "01.png"
    good = path.read_bytes()
    with Image.open(path) as picture:
        flipped = ImageOps.flip(picture)
    flipped.save(path, compress_level=1)
    run = tmp_path / "run"
    assert evaluate(content, run) == 0
    path.write_bytes(good)
    assert evaluate(content, run) == 2
    assert "restore the file, use --retry to segment the new one" in refused(capsys)
    assert evaluate(content, run, "--retry") == 0
    assert evaluate(content, run) == 0
    assert evaluate(content, tmp_path / "fresh") == 0
    assert tables_of(run) == tables_of(tmp_path / "fresh")
    pictures = [files_of(folder / "pictures") for folder in (run, tmp_path / "fresh")]
    assert pictures[0] == pictures[1]


def test_an_image_that_failed_may_be_another_one(place: Place, tmp_path: Path) -> None:
    mine = copy_domains(place, tmp_path)
    path = tmp_path / "dim/images/01.png"
    good = path.read_bytes()
    path.write_bytes(good[:50])
    assert evaluate(small(mine), tmp_path / "run") == 1
    path.write_bytes(good)
    assert evaluate(small(mine), tmp_path / "run", "--retry") == 0


def test_settings_that_are_not_the_best_are_not_reported(
    place: Place, tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    assert evaluate(small(place), run) == 0
    chosen = json.loads((run / "chosen.json").read_text())
    good = chosen["san"]["chosen"]["alpha"]
    chosen["san"]["chosen"]["alpha"] = 0.3 if good == 0 else 0.0
    (run / "chosen.json").write_text(json.dumps(chosen))
    assert run_cli("report", run, "-o", tmp_path / "report") == 2
    assert "the best must be chosen" in refused(capsys)
    assert evaluate(small(place), run) == 0
    assert json.loads((run / "chosen.json").read_text())["san"]["chosen"]["alpha"] == good
    assert run_cli("report", run, "-o", tmp_path / "report") == 0


def test_a_failure_on_a_target_is_none_of_the_tuning(place: Place, tmp_path: Path) -> None:
    """Both are mended, and another value is chosen: nothing is left to be told."""
    run = tmp_path / "run"
    for path in ("val/images/01.png", "dim/images/01.png"):
        with pytest.MonkeyPatch.context() as patch:
            fail_on(patch, place.root / path, SaNOnly)
            evaluate(small(place), run)
    assert evaluate(small(place), run, "--retry") == 0


def test_the_clock_decides_nothing() -> None:
    with pytest.raises(ValueError, match="the number of steps depends on the speed"):
        MethodConfig(method="self-adapt", settings={"budget_ms": 50})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MethodConfig(method="san", tune=None), "tune must have a value, got null"),
        (lambda: MethodConfig(method="san", search=None), "search must have a value, got null"),
        (lambda: MethodConfig(method="san", settings={1: 2}), "no setting 1"),
        (lambda: MethodConfig(method="san", tune={"alpha": [{1}]}), "must be a number, a text"),
        (lambda: DomainConfig(dataset="streets", split=None), "split must have a value, got null"),
    ],
)
def test_what_is_left_empty_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_link_to_a_network_is_as_good_as_the_network(
    place: Place, tmp_path: Path, capsys: Any
) -> None:
    trained = tmp_path / "trained"
    trained.mkdir()
    shutil.copy(place.net(), trained / "best.safetensors")
    recipe = {"source": {"dataset": "folder", "root": str(place.root / "dim"), "split": "all"}}
    (trained / "recipe.json").write_text(json.dumps({**recipe, "validation": None}))
    os.symlink(trained / "best.safetensors", tmp_path / "link.safetensors")
    networks = {"one": {"place": str(tmp_path / "link.safetensors")}}
    assert evaluate(small(place, networks=networks), tmp_path / "run") == 2
    assert "was trained on" in refused(capsys)


def test_a_name_that_is_no_text_is_refused_at_once(
    place: Place, tmp_path: Path, capsys: Any
) -> None:
    mine = copy_domains(place, tmp_path)
    for kind in ("images", "labels"):
        old = tmp_path / "dim" / kind / "01.png"
        os.rename(old, os.fsencode(old.parent) + b"/latin\xe9.png")
    assert evaluate(small(mine), tmp_path / "run") == 2
    assert "must be text in UTF-8" in refused(capsys)
    assert not (tmp_path / "run").exists()


def test_long_names_and_wide_images_are_drawn(place: Place, tmp_path: Path) -> None:
    mine = copy_domains(place, tmp_path)
    for kind in ("images", "labels"):
        path = tmp_path / "dim" / kind / "01.png"
        with Image.open(path) as picture:
            wide = picture.resize((2500, 2), Image.Resampling.NEAREST)
        wide.save(path)
    content = small(mine, pictures=1)
    content["targets"][0]["name"] = "街" * 90
    assert evaluate(content, tmp_path / "run") == 0
    assert run_cli("report", tmp_path / "run", "-o", tmp_path / "report") == 0
    assert len(file_name("街" * 90).encode()) <= 100


def test_labels_are_read_as_they_are_written(place: Place, tmp_path: Path) -> None:
    content = small(place)
    content["methods"][0]["label"] = "$\\frac$"
    content["methods"][1]["label"] = "[_a*b\n<i>"
    assert evaluate(content, tmp_path / "run") == 0
    assert run_cli("report", tmp_path / "run", "-o", tmp_path / "report") == 0
    overview = (tmp_path / "report/tables/overview.md").read_text().splitlines()
    assert len(overview) == 4
    assert "[_a\\*b &lt;i>" in overview[3]
    latex = (tmp_path / "report/tables/overview.tex").read_text()
    assert "\n{}[\\_a*b <i> & " in latex


def test_a_report_needs_only_one_method_that_worked(
    place: Place, tmp_path: Path, capsys: Any
) -> None:
    content = small(place, methods=[{"method": "san"}, {"method": "source"}])
    with pytest.MonkeyPatch.context() as patch:
        for number in range(3):
            fail_on(patch, place.root / f"dim/images/0{number}.png", SaNOnly)
        assert evaluate(content, tmp_path / "run") == 1
    assert run_cli("report", tmp_path / "run", "-o", tmp_path / "report") == 0
    for path in (tmp_path / "run" / "rows").iterdir():
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(line for line in lines if b'"dim"' not in line))
    capsys.readouterr()
    assert run_cli("report", tmp_path / "run", "-o", tmp_path / "other") == 2
    assert "run selfadapt evaluate first" in refused(capsys)


def test_a_report_that_cannot_be_made_leaves_the_old_one(place: Place, tmp_path: Path) -> None:
    assert evaluate(small(place, pictures=1), tmp_path / "run") == 0
    assert run_cli("report", tmp_path / "run", "-o", tmp_path / "report") == 0
    before = sorted(path for path in (tmp_path / "report").rglob("*"))
    next((tmp_path / "run" / "pictures").glob("*.png")).unlink()
    assert run_cli("report", tmp_path / "run", "-o", tmp_path / "report", "--overwrite") == 2
    assert sorted(path for path in (tmp_path / "report").rglob("*")) == before


def test_the_report_says_which_images_were_taken(place: Place, tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("00\n02\n")
    targets = [
        place.domain("dim", names=str(tmp_path / "few.txt"), limit=1),
        place.domain("dark", in_mean=False),
    ]
    assert evaluate(small(place, targets=targets), tmp_path / "run") == 0
    page = run_cli("report", tmp_path / "run", "-o", tmp_path / "report")
    assert page == 0
    text = (tmp_path / "report" / "report.html").read_text()
    assert "the first 1 of those in few.txt" in text
    assert "target, not in the mean" in text
    assert "The mean is of all targets but dark." in text


def test_no_image_is_no_share() -> None:
    assert all(share != share for share in worse([]))


def test_a_line_that_is_put_right_meanwhile_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, TrialKey)
    journal.write({"domain": "a", "image": "b", "trial": "c"})
    journal.close()
    path = tmp_path / "0000.jsonl"
    good, opened = path.read_bytes(), Path.open
    path.write_bytes(good[:3] + b"?" + good[4:])
    (tmp_path / "good").write_bytes(good)

    def mended(self: Path, *args: Any, **kwargs: Any) -> Any:
        file = opened(self, *args, **kwargs)
        shutil.copy(tmp_path / "good", tmp_path / "copy")
        (tmp_path / "copy").replace(path)
        return file

    monkeypatch.setattr(Path, "open", mended)
    assert list(read_rows(tmp_path, TrialKey)) == [TrialKey("a", "b", "c")]


NETWORK = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(3, 3, 1)
    def forward(self, x):
        if x.shape[-1] == 96 and FAILS:
            raise AttributeError("no luck\\nat all")
        return self.head(x)
def make():
    return Net()
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_network_of_ones_own_is_evaluated_with_trust(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, fails: bool
) -> None:
    name = f"own_network_{fails}"
    (tmp_path / f"{name}.py").write_text(NETWORK.replace("FAILS", str(fails)))
    monkeypatch.syspath_prepend(str(tmp_path))
    networks = {"own": {"place": f"{name}:make", "classes": CLASSES}}
    content = small(place, networks=networks, methods=[{"method": "source"}])
    assert evaluate(content, tmp_path / "run") == 2
    assert "--trust" in refused(capsys)
    assert evaluate({**content, "trust": True}, tmp_path / "run") == 2
    assert "only the command line may" in refused(capsys)
    assert evaluate(content, tmp_path / "run", "--trust") == int(fails)
    if fails:
        failed = (tmp_path / "run/tables/failed.csv").read_text()
        assert "source failed: AttributeError: no luck; while the network ran on" in failed
    del networks["own"]["classes"]
    capsys.readouterr()
    assert evaluate(content, tmp_path / "other", "--trust") == 2
    assert "the classes of the network own are not known" in refused(capsys)


def test_a_network_that_fails_is_told_of_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "sized.py").write_text(SIZED)
    monkeypatch.syspath_prepend(str(tmp_path))
    Image.new("RGB", (96, 64), "teal").save(tmp_path / "a.png")
    own = ("--model", "sized:make", "--trust")
    assert run_cli("export", *own, "--onnx", tmp_path / "a.onnx") == 2
    assert "the network failed: AssertionError" in refused(capsys)
    assert run_cli("demo", "--image", tmp_path / "a.png", *own, "-o", tmp_path / "demo") == 2
    assert "the network failed: AssertionError" in refused(capsys)
    assert not (tmp_path / "demo").exists()
    assert run_cli("predict", tmp_path / "a.png", *own, "-o", tmp_path / "masks") == 1
    assert "certain sizes only" in capsys.readouterr().err


SIZED = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(3, 3, 1)
    def forward(self, x):
        assert x.shape[-1] == 123
        return self.head(x)
def make():
    return Net()
def plain():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))
"""


def test_the_demo_does_without_methods_that_a_network_cannot_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "plain.py").write_text(SIZED)
    monkeypatch.syspath_prepend(str(tmp_path))
    Image.new("RGB", (96, 64), "teal").save(tmp_path / "a.png")
    words = ("--image", tmp_path / "a.png", "--model", "plain:plain", "--trust", "--steps", "1")
    assert run_cli("demo", *words, "-o", tmp_path / "demo") == 0
    assert "note: without tent: " in capsys.readouterr().err
    assert (tmp_path / "demo" / "report.html").exists()


def test_advice_of_libraries_to_run_code_does_not_reach_the_user(
    place: Place, tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("transformers")
    net = tmp_path / "net"
    net.mkdir()
    code = {"AutoConfig": "code.C", "AutoModelForSemanticSegmentation": "code.M"}
    (net / "config.json").write_text(json.dumps({"model_type": "m", "auto_map": code}))
    (net / "code.py").write_text("raise SystemExit('it was run')")
    networks = {"one": {"place": f"hf:{net}"}}
    assert evaluate(small(place, networks=networks), tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert f"hf:{net} cannot be opened" in said
    assert "it needs code that comes with it, which is not run" in said
    assert "trust_remote_code" not in said


def test_notes_of_libraries_do_not_advise_to_run_code(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def warn(*_: Any, **__: Any) -> None:
        warnings.warn("It is an old file. Set weights_only=False.\nIt is slow.", stacklevel=2)
        warnings.warn("Pass allow_pickle=True.", stacklevel=2)

    monkeypatch.setattr("selfadapt.cli.runs.write_report", warn)
    assert run_cli("report", "run", "-o", "out") == 0
    assert capsys.readouterr().err == "note: It is an old file. It is slow.\n"
