"""What files of others may not do: run code, reach out of their folders, or take all memory."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file

import selfadapt
from evaluations import files_of
from runs import run_cli
from selfadapt.app.gate import EXPIRY_S, stored
from selfadapt.data.reading import read_image_size, read_label, read_picture
from selfadapt.data.tables import CITYSCAPES
from selfadapt.models.weights import read_weights
from selfadapt.predict.table import append_to_table
from selfadapt.progress import ProgressBar
from selfadapt.report.page import PICTURE_KEYS, _is_valid_entry

CODE = "open('ran', 'w')\ndef net(): raise SystemExit\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an image, and code that should not be run."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (24, 16)).save(tmp_path / "x.png")
    (tmp_path / "evil.py").write_text(CODE)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: 'evil:net'\ntrust: true\n", "must not set 'trust'"),
        ("config: other.yaml\n", "must not set 'config'"),
        ("model: 'evil:net'\n", "trust"),
    ],
)
def test_a_settings_file_cannot_set_trust(text: str, said: str, here: Path, capsys: Any) -> None:
    (here / "other.yaml").write_text("model: 'evil:net'\ntrust: true\n")
    (here / "c.yaml").write_text(text + "output: out\n")
    assert run_cli("predict", "x.png", "--config", "c.yaml") == 2
    assert said in capsys.readouterr().err
    assert not (here / "ran").exists()


@pytest.mark.parametrize("text", ["[" * 3000, "classes: " + "[" * 3000 + "]" * 3000])
def test_a_settings_file_that_is_nested_too_deeply_is_refused(
    text: str, here: Path, capsys: Any
) -> None:
    (here / "c.yaml").write_text(text)
    assert run_cli("predict", "x.png", "--config", "c.yaml", "-o", "out") == 2
    said = capsys.readouterr().err
    assert "a settings file must be YAML, but c.yaml is nested too deeply" in said


@pytest.mark.parametrize("flag", ["--config={}", "--config {}"])
def test_inline_settings_are_refused(flag: str, here: Path, capsys: Any) -> None:
    words = flag.format("{model: 'evil:net', trust: true}").split(" ", 1)
    assert run_cli("predict", "x.png", *words, "-o", "out") == 2
    assert "there is no settings file" in capsys.readouterr().err
    assert not (here / "ran").exists()


@pytest.mark.parametrize("name", ["../victim", "{root}/victim", "a/../../victim", "", 3])
@pytest.mark.parametrize("flags", [[], ["--overwrite"]])
def test_a_record_removes_nothing_outside_of_its_folder(
    name: Any, flags: list[str], here: Path, capsys: Any
) -> None:
    words = ("predict", "x.png", "--model", "streets", "--method", "source", "-o", "out")
    assert run_cli(*words) == 0
    path = here / "out" / ".predict" / "record.json"
    record = json.loads(path.read_text())
    named = name.format(root=here) if isinstance(name, str) else name
    path.write_text(json.dumps(record | {"names": {str(here / "y.png"): named}}))
    (here / "victim_label.png").write_text("precious")
    assert run_cli(*words, *flags) == (0 if flags else 2)
    assert "Traceback" not in capsys.readouterr().err
    assert (here / "victim_label.png").read_text() == "precious"


PREDICT = ("predict", "x.png", "--model", "streets", "--method", "source", "--outputs", "label")


@pytest.mark.parametrize(
    "name", [".predict", ".predict/rows", ".predict/frames", ".predict/.names"]
)
def test_a_link_in_a_folder_of_predictions_is_refused(name: str, here: Path, capsys: Any) -> None:
    assert run_cli(*PREDICT, "-o", "out") == 0
    link, elsewhere = here / "out" / name, here / "elsewhere"
    if link.exists():
        link.rename(elsewhere)
    else:
        (elsewhere / "x").mkdir(parents=True)
        (elsewhere / "x" / "precious").touch()
    link.symlink_to(elsewhere)
    before = files_of(elsewhere)
    for flags in (["--overwrite"], ["--shard", "1/2"]):
        assert run_cli(*PREDICT, "-o", "out", *flags) == 2
        said = capsys.readouterr().err
        assert f"out/{name} must not be a symbolic link; remove it" in said
    assert files_of(elsewhere) == before


def test_overwriting_predictions_removes_nothing_through_a_link(here: Path) -> None:
    assert run_cli(*PREDICT, "-o", "out") == 0
    path = here / "out" / ".predict" / "record.json"
    record = json.loads(path.read_text())
    names = {str(here / "y.png"): "a/victim", str(here / "y.mp4"): "a/film"}
    path.write_text(json.dumps(record | {"names": record["names"] | names}))
    (here / "elsewhere" / "film_label").mkdir(parents=True)
    for name in ("victim_label.png", "film_label/000000.png", ".victim_label.png.0123abcd.part"):
        (here / "elsewhere" / name).touch()
    (here / "out" / "a").symlink_to(here / "elsewhere")
    before = files_of(here / "elsewhere")
    assert run_cli(*PREDICT, "-o", "out") == 0
    assert run_cli(*PREDICT, "-o", "out", "--overwrite") == 0
    assert files_of(here / "elsewhere") == before


def test_a_table_that_is_a_link_is_replaced(here: Path) -> None:
    assert run_cli(*PREDICT, "-o", "out", "--shard", "2/2") == 0
    table = here / "out" / "predictions.csv"
    table.rename(here / "precious.csv")
    table.symlink_to(here / "precious.csv")
    before = (here / "precious.csv").read_text()
    assert run_cli(*PREDICT, "-o", "out", "--shard", "1/2") == 0
    assert (here / "precious.csv").read_text() == before
    assert not table.is_symlink()
    assert str(here / "x.png") in table.read_text()


def test_nothing_is_appended_through_a_link(here: Path) -> None:
    (here / "t.csv").symlink_to(here / "x.png")
    with pytest.raises(OSError, match=r"t\.csv cannot be written to \(it is a link; remove it\)"):
        append_to_table(here / "t.csv", {"file": "x"}, {"x": "x"}, ())


def test_images_of_datasets_start_no_other_program(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PIL asks Ghostscript to draw Encapsulated PostScript, whatever the file is called."""
    (here / "gs").write_text("#!/bin/sh\ntouch ran\n")
    (here / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    path = here / "a.png"
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n")
    for read in (read_picture, read_image_size):
        with pytest.raises(ValueError, match=r"a\.png"):
            read(path)
    assert not (here / "ran").exists()


@pytest.mark.parametrize("size", [(200_000, 200_000), (-1, 5), ("a", 5)])
def test_polygons_are_of_the_size_of_an_image(size: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "a_polygons.json"
    path.write_text(json.dumps({"imgWidth": size[0], "imgHeight": size[1], "objects": []}))
    with pytest.raises(ValueError, match="must be of the size of an image"):
        read_label(path, CITYSCAPES)


def test_a_number_of_classes_that_cannot_be_is_not_believed(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors", {"classes": "3000000000"})
    assert read_weights(tmp_path / "a.safetensors").classes is None


def test_a_folder_of_a_network_reaches_for_nothing_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smp = pytest.importorskip("segmentation_models_pytorch")
    smp.Unet("resnet18", encoder_weights=None, classes=3).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    asked: list[Any] = []

    def lookup(*where: Any, **_: Any) -> Any:
        asked.append(where)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    path.write_text(json.dumps(config | {"encoder_weights": "imagenet"}))
    selfadapt.open_model(f"smp:{tmp_path}", classes=3)
    path.write_text(json.dumps(config | {"encoder_name": "tu-hf-hub:somebody/something"}))
    with pytest.raises(ValueError, match="no encoder 'tu-hf-hub:somebody/something'"):
        selfadapt.open_model(f"smp:{tmp_path}", classes=3)
    assert not asked


@pytest.mark.parametrize("file", ["../secret.png", "/etc/hostname", "a.txt", 3])
def test_pictures_of_a_report_are_those_of_its_run(file: Any) -> None:
    picture = dict.fromkeys(PICTURE_KEYS, "") | {"file": "dim-best-00.png"}
    assert _is_valid_entry(picture)
    assert not _is_valid_entry(picture | {"file": file})


def test_names_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(force_terminal=True, width=80, stderr=True)
    monkeypatch.setattr("selfadapt.progress.Console", lambda **_: console)
    with console.capture() as shown, ProgressBar("all") as bar:
        bar.update(1, 2, name="a[/b].mp4", note="c[/d]")
    text = shown.get()
    assert "a[/b].mp4" in text
    assert "c[/d]" in text


def test_signs_that_steer_a_terminal_are_shown(here: Path, capsys: Any) -> None:
    save_file({"\x1b]0;owned\x07": torch.zeros(1)}, here / "a.safetensors")
    words = ("predict", "x.png", "--model", "deeplabv1_resnet18_slim", "-o", "out")
    assert run_cli(*words, "--weights", "a.safetensors") == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "\\x1b]0;owned" in said


def test_uploads_are_counted_and_removed_when_they_are_old(tmp_path: Path) -> None:
    old, new = tmp_path / "a" / "old.png", tmp_path / "new.png"
    old.parent.mkdir()
    for path in (old, new):
        path.write_bytes(b"12345")
    os.utime(old, (0, new.stat().st_mtime - EXPIRY_S - 10))
    assert stored(tmp_path) == (5, 1)
    assert not old.exists()
    assert new.exists()
