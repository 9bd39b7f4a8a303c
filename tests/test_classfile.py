"""Files of classes, and what flags say of classes and of the input of a network."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

import selfadapt
from conftest import TinyNet, random_image, seeded
from runs import run_cli
from selfadapt.classfile import classes_json, read_classes
from selfadapt.cli.model_flags import parse_classes
from selfadapt.images import to_pil
from selfadapt.labels import STREETS_9, class_colors

OWN = """
from torch import nn
def net(num_classes=3):
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
                         nn.Conv2d(4, num_classes, 1))
def gray():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1))
"""
FORMS = {
    "names.txt": ("road\nsky \nvéhicule\n\n", [None, None, None]),
    "bom.txt": ("\ufeffroad\r\nsky\r\nvéhicule", [None, None, None]),
    "names.json": ('["road", "sky", "véhicule"]', [None, None, None]),
    "names.yaml": ("- road\n- sky\n- véhicule\n", [None, None, None]),
    "colors.yaml": (
        "road: [1, 2, 3]\nsky: '#ff8000'\nvéhicule:\n", [(1, 2, 3), (255, 128, 0), None],
    ),
    "colors.json": (
        '{"road": [1, 2, 3], "sky": "red", "véhicule": null}', [(1, 2, 3), (255, 0, 0), None],
    ),
    "entries.json": (
        '[{"index": 0, "name": "road", "color": [1, 2, 3]}, {"name": "sky"}, "véhicule"]',
        [(1, 2, 3), None, None],
    ),
    "id2label.json": ('{"1": "sky", "0": "road", "2": "véhicule"}', [None, None, None]),
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    to_pil(random_image(24, 40)).save(tmp_path / "a.png")
    (tmp_path / f"own_{tmp_path.name}.py").write_text(OWN)
    return tmp_path


def own(here: Path, function: str = "net") -> tuple[str, ...]:
    """Return the words of a command that segments an image with a network of one's own."""
    model = f"own_{here.name}:{function}"
    words = ("predict", "a.png", "--model", model, "--trust", "--method", "san", "--device", "cpu")
    return (*words, "-o", "out")


@pytest.mark.parametrize("name", FORMS)
def test_a_file_of_classes_has_one_of_several_forms(name: str, tmp_path: Path) -> None:
    text, colors = FORMS[name]
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    classes = read_classes(tmp_path / name)
    assert list(classes) == ["road", "sky", "véhicule"]
    assert list(classes.values()) == colors


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    colors = class_colors(STREETS_9)
    (tmp_path / "classes.json").write_text(classes_json(STREETS_9, colors))
    assert read_classes(tmp_path / "classes.json") == dict(zip(STREETS_9, colors, strict=True))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "at least one, got none"),
        ("a.txt", b"road\n\nsky\n", "line 2 is empty"),
        ("a.txt", b"road\nroad\n", "must differ, got 'road' more than once"),
        ("a.txt", b"ro\x1bad\n", "must be a line of 1 to 200 characters"),
        ("a.txt", b"x" * 201, "must be a line of 1 to 200 characters"),
        ("a.txt", b"\xff\xd8\xff", "must be a text file"),
        ("a.txt", b"x\n" * (2**21 + 1), "is too large for a file of classes"),
        ("a.json", b"{", "is not JSON"),
        ("a.json", b"[" * 100_000, "nested too deeply"),
        ("a.json", b"7", "must be a list of names"),
        ("a.json", b"[1, 2]", "class names must be strings, got 1"),
        ("a.json", b'{"a": 1, "a": 2}', "'a' is there twice"),
        ("a.json", b'{"0": "a", "2": "b"}', "no class with the index 1"),
        ("a.json", b'[{"color": [1, 2, 3]}]', "a class must have a name"),
        ("a.json", b'[{"index": 1, "name": "a"}]', "order of their index"),
        ("a.json", b'{"a": [1, 2, 256]}', r"like \[128, 64, 128\] or '#804080', got \[1, 2, 256"),
        ("a.json", b'{"a": [true, 2, 3]}', "a colour is written like"),
        ("a.yaml", b"a: 'reddish'", "got 'reddish'"),
        ("a.yaml", b"a: [", "is not YAML"),
        ("a.yaml", b"- no\n- yes\n", "class names must be strings, got False"),
    ],
)
def test_what_is_no_file_of_classes_is_refused(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_classes(tmp_path / name)


def test_words_name_classes(here: Path) -> None:
    (here / "names.txt").write_text("road\nsky\n")
    assert parse_classes([]) is None
    assert parse_classes(["streets-9"]) == "streets-9"
    assert parse_classes(["7"]) == 7
    assert parse_classes(["vessel"]) == ["vessel"]
    assert parse_classes(["road", "sky"]) == ["road", "sky"]
    assert parse_classes(["names.txt"]) == {"road": None, "sky": None}
    with pytest.raises(ValueError, match="did you mean 'cityscapes-19'"):
        parse_classes(["cityscape-19"])
    for word in ("gone.txt", "./gone"):
        with pytest.raises(FileNotFoundError, match="there is no file of classes"):
            parse_classes([word])


def test_names_and_colours_of_a_file_are_drawn(here: Path) -> None:
    Path("c.json").write_text('{"left": [9, 8, 7], "right": "#00ff00", "road": null}')
    assert run_cli(*own(here), "--classes", "c.json") == 0
    colors = np.array([(9, 8, 7), (0, 255, 0), (128, 64, 128)])
    label = PILImage.open("out/a_label.png")
    for painted in (label.convert("RGB"), PILImage.open("out/a_color.png")):
        assert np.array_equal(np.asarray(painted), colors[np.asarray(label)])
    assert [c["color"] for c in json.loads(Path("out/classes.json").read_text())] == colors.tolist()
    assert "share_left,share_right,share_road" in Path("out/predictions.csv").read_text()


def test_other_colours_are_other_outputs(here: Path, capsys: Any) -> None:
    Path("c.json").write_text('{"a": "red", "b": "green", "c": "blue"}')
    assert run_cli(*own(here), "--classes", "c.json") == 0
    Path("c.json").write_text('{"a": "red", "b": "green", "c": "white"}')
    assert run_cli(*own(here), "--classes", "c.json") == 2
    assert "classes.c: [0, 0, 255] -> [255, 255, 255]" in capsys.readouterr().err


def test_one_name_is_the_class_of_a_network_with_one_channel(here: Path) -> None:
    assert run_cli(*own(here, "gray"), "--classes", "vessel") == 0
    classes = json.loads(Path("out/classes.json").read_text())
    assert [entry["name"] for entry in classes] == ["background", "vessel"]


def test_classes_that_a_file_of_a_network_has_may_be_coloured(here: Path, capsys: Any) -> None:
    words = ("predict", "a.png", "--model", "streets", "--method", "san", "--device", "cpu")
    Path("c.json").write_text(json.dumps({name: [1, 2, 3] for name in STREETS_9}))
    assert run_cli(*words, "-o", "out", "--classes", "c.json") == 0
    assert np.asarray(PILImage.open("out/a_color.png")).reshape(-1, 3).max(axis=0).tolist() == [
        1, 2, 3,
    ]  # fmt: skip
    assert run_cli(*words, "-o", "other", "--classes", "road", "sky") == 2
    assert "records its own architecture and classes: leave out classes" in capsys.readouterr().err


# the input of a network


def test_mean_and_std_by_flag_are_those_of_an_interface(here: Path) -> None:
    numbers = ("--mean", "0.1", "0.2", "0.3", "--std", "0.5", "0.6", "0.7")
    torch.save(seeded(lambda: TinyNet(3)).state_dict(), "w.pth")
    Path(f"own_{here.name}.py").write_text(
        "from conftest import TinyNet\ndef net(): return TinyNet(3)\n"
    )
    assert run_cli(*own(here), "--weights", "w.pth", *numbers, "--outputs", "probs") == 0
    interface = selfadapt.Interface(mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    method = selfadapt.create_method("san", seeded(lambda: TinyNet(3)), interface=interface)
    expected = method(here / "a.png").probs.numpy()
    with np.load("out/a_probs.npz") as file:
        assert np.abs(file["probs"] - expected).max() < 1e-3
    with np.load("out/a_probs.npz") as file:
        other = selfadapt.create_method("san", seeded(lambda: TinyNet(3)))(here / "a.png").probs
        assert np.abs(file["probs"] - other.numpy()).max() > 0.01


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mean", "0.5", "0.5", "0.5"), "--mean and --std go together"),
        (
            ("--mean", "0.5", "0.5", "--std", "1", "1"),
            "takes other numbers of channels, got flags for 2",
        ),
        (("--mean", "0", "0", "0", "--std", "1", "0", "1"), "std must be positive"),
        (("--mean", "nan", "0", "0", "--std", "1", "1", "1"), "nan"),
        (("--mean", "123.7", "116.3", "103.5", "--std", "58", "57", "57"), "divide by 255"),
        (("--mean", "0", "0", "0", "--std", "1", "1"), "std must have one number for"),
        (("--channels", "0"), "channels must be a whole number, 1 to 1024, got 0"),
        (("--channels", "5"), "takes other numbers of channels, got flags for 5"),
        (("--channels", "x"), "channels"),
    ],
)
def test_flags_of_the_input_that_cannot_be_are_refused(
    flags: tuple[str, ...], message: str, here: Path, capsys: Any
) -> None:
    assert run_cli(*own(here), *flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not Path("out/a_label.png").exists()


def test_gray_networks_of_smp_are_told_by_their_weights(here: Path, capsys: Any) -> None:
    smp = pytest.importorskip("segmentation_models_pytorch")
    gray = seeded(lambda: smp.Unet("mobilenet_v2", encoder_weights=None, in_channels=1))
    torch.save(gray.state_dict(), "gray.pth")
    words = ("predict", "a.png", "--model", "smp:Unet/mobilenet_v2", "--weights", "gray.pth",
             "--method", "san", "--device", "cpu", "--outputs", "label", "-o")  # fmt: skip
    assert run_cli(*words, "out", "--classes", "vessel", "--mean", "0.5", "--std", "0.2") == 0
    assert np.asarray(PILImage.open("out/a_label.png")).shape == (24, 40)
    assert run_cli(*words, "other", "--classes", "vessel", "--channels", "3") == 2
    assert "takes 1 channels, got flags for 3" in capsys.readouterr().err


def test_the_streets_of_the_demo_have_their_own_input(here: Path, capsys: Any) -> None:
    assert run_cli("demo", "-o", "demo", "--channels", "3") == 2
    assert "are segmented by their own network" in capsys.readouterr().err
