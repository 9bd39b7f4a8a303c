import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

import selfadapt
from conftest import random_image, seeded
from runs import run_cli
from selfadapt.cli import COMMANDS, main, make_parser
from selfadapt.cli.arguments import expand_recipe
from selfadapt.images import to_pil
from selfadapt.labels import CITYSCAPES_COLORS
from selfadapt.methods import settings_of

FAST = ["--steps", "1", "--scales", "0.5"]


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = seeded(
        lambda: selfadapt.create_model("deeplabv1_resnet18_slim", classes="cityscapes-19")
    )
    path = tmp_path_factory.mktemp("net") / "net.safetensors"
    selfadapt.save_model(model, path, dtype=torch.float16)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, size in {"a.png": (33, 49), "b.jpg": (40, 40)}.items():
        to_pil(random_image(*size)).save(folder / name)
    return folder


def run(*args: Any) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_predict_writes_four_files_for_each_image(
    net: Path, photos: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "masks"
    assert run("predict", photos, "--model", net, "-o", out, *FAST) == 0
    assert f"2 of 2 images segmented, see {out}" in capsys.readouterr().out
    kinds = ("label", "color", "overlay", "confidence")
    once = {"predictions.csv", "classes.json", "legend.png"}
    named = {f"{n}_{k}.png" for n in "ab" for k in kinds} | once
    assert {p.name for p in out.iterdir() if p.name != ".predict"} == named
    expected = selfadapt.SelfAdapt(selfadapt.load_model(net), steps=1, scales=(0.5,))(
        photos / "a.png"
    )
    label = np.asarray(PILImage.open(out / "a_label.png"))
    assert label.dtype == np.uint8
    assert np.array_equal(label, expected.label.numpy())
    confidence = np.asarray(PILImage.open(out / "a_confidence.png"))
    assert np.array_equal(confidence, (expected.confidence * 255).round().byte().numpy())
    color = np.asarray(PILImage.open(out / "a_color.png"))
    assert color.shape == (33, 49, 3)
    assert color.tolist() == np.array(list(CITYSCAPES_COLORS.values()))[label].tolist()
    assert PILImage.open(out / "b_overlay.png").size == (40, 40)


def test_a_folder_of_all_sorts(net: Path, photos: Path, tmp_path: Path) -> None:
    to_pil(random_image(24, 24)).save(photos / "a.jpg")
    (photos / ".hidden.png").write_text("hidden")
    (photos / "notes.pdf").write_text("no image")
    out = tmp_path / "masks"
    command = ("predict", photos, photos / "b.jpg", "--model", net, "-o", out, *FAST)
    assert run(*command) == 0
    labels = {p.name for p in out.iterdir() if p.name.endswith("_label.png")}
    assert labels == {"a_png_label.png", "a_jpg_label.png", "b_label.png"}


def test_the_foreground_of_a_binary_network_is_painted(photos: Path, tmp_path: Path) -> None:
    model = seeded(lambda: selfadapt.create_model("deeplabv1_resnet50", classes=["crack"]))
    model.cls_head.weight.data.zero_()
    model.cls_head.bias.data.fill_(5.0)
    selfadapt.save_model(model, tmp_path / "net.safetensors")
    out = tmp_path / "masks"
    command = ("predict", photos / "a.png", "--model", tmp_path / "net.safetensors", "-o", out)
    assert run(*command, "--steps", "0", "--scales", "1") == 0
    assert (np.asarray(PILImage.open(out / "a_label.png")) == 1).all()
    assert np.asarray(PILImage.open(out / "a_color.png")).any()


def test_predict_refuses_to_overwrite_unless_told(
    net: Path, photos: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "masks"
    out.mkdir()
    (out / "b_color.png").write_bytes(b"mine")
    command = ("predict", photos, "--model", net, "-o", out, *FAST)
    assert run(*command) == 2
    assert "b_color.png would be replaced" in capsys.readouterr().err
    assert [p.name for p in out.iterdir()] == ["b_color.png"]
    assert (out / "b_color.png").read_bytes() == b"mine"
    assert run(*command, "--overwrite") == 0
    assert (out / "b_color.png").read_bytes() != b"mine"


def test_an_input_is_never_replaced(net: Path, photos: Path, capsys: Any) -> None:
    to_pil(random_image(24, 24)).save(photos / "a_label.png")
    content = (photos / "a_label.png").read_bytes()
    command = ("predict", photos, "--model", net, "-o", photos, "--overwrite", *FAST)
    assert run(*command) == 2
    assert "a_label.png would be replaced by an output" in capsys.readouterr().err
    assert (photos / "a_label.png").read_bytes() == content


def test_running_out_of_memory_is_said(
    net: Path, photos: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("selfadapt.predict.stream.write_result", full)
    assert run("predict", photos, "--model", net, "-o", tmp_path / "masks", *FAST) == 1
    assert "out of memory: try a smaller --max-pixels" in capsys.readouterr().err


def test_an_unreadable_image_is_listed_and_the_rest_is_done(
    net: Path, photos: Path, tmp_path: Path, capsys: Any
) -> None:
    (photos / "aa.png").write_text("not an image")
    (photos / "gone.png").symlink_to(photos / "nowhere.png")
    out = tmp_path / "masks"
    assert run("predict", photos, "--model", net, "-o", out, *FAST) == 1
    captured = capsys.readouterr()
    assert re.search(r"not done: .*aa.png is not an image file", captured.err)
    assert re.search(r"not done: .*no image file .*gone.png", captured.err)
    assert "2 of 4 images segmented" in captured.out
    assert len(list(out.glob("[ab]_*.png"))) == 8


@pytest.mark.parametrize("method", selfadapt.METHODS)
def test_predict_with_any_method(method: str, net: Path, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "masks"
    quick = {"steps": "1", "scales": "0.5", "passes": "2", "alphas": "0.5"}
    flags = [f"--{k}={v}" for k, v in quick.items() if k in settings_of(method)]
    command = ["predict", photos / "a.png", "--model", net, "-o", out, "--method", method]
    assert run(*command, *flags) == 0
    settings = {k: int(v) for k, v in quick.items() if k in ("steps", "passes")}
    settings |= {"scales": (0.5,), "alphas": (0.5,)}
    settings = {k: v for k, v in settings.items() if k in settings_of(method)}
    expected = selfadapt.create_method(method, selfadapt.load_model(net), **settings)
    label = np.asarray(PILImage.open(out / "a_label.png"))
    assert np.array_equal(label, expected(photos / "a.png").label.numpy())


def test_predict_with_an_ensemble(net: Path, photos: Path, tmp_path: Path) -> None:
    command = [
        "predict",
        photos / "a.png",
        "--model",
        net,
        "--model",
        net,
        "-o",
        tmp_path / "masks",
    ]
    assert run(*command, "--method", "ensemble", "--tta", "--scales", "0.5") == 0


def test_predict_with_a_network_by_address(photos: Path, tmp_path: Path, capsys: Any) -> None:
    model = seeded(lambda: selfadapt.create_model("smp:Unet/resnet18", classes=["road", "car"]))
    torch.save({"meta": {"CLASSES": ["road", "car"]}, "state_dict": model.state_dict()},
               tmp_path / "unet.pth")  # fmt: skip
    command = ["predict", photos / "a.png", "--model", "smp:Unet/resnet18", "--weights"]
    flags = [tmp_path / "unet.pth", "-o", tmp_path / "masks", "--method", "san"]
    assert run(*command, *flags) == 0
    colors = np.asarray(PILImage.open(tmp_path / "masks" / "a_color.png")).reshape(-1, 3)
    known = {CITYSCAPES_COLORS["road"], CITYSCAPES_COLORS["car"]}
    assert {tuple(map(int, color)) for color in np.unique(colors, axis=0)} <= known
    assert run(*command, *flags, "--overwrite", "--classes", "3") == 2
    assert "it has 2 classes, but 3 are requested" in capsys.readouterr().err


def test_methods_are_listed_with_one_line_each(capsys: Any) -> None:
    assert run("methods") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(selfadapt.METHODS)
    assert all(len(line) < 110 and line.endswith(".") for line in lines)


@pytest.mark.parametrize("method", selfadapt.METHODS)
def test_every_setting_of_a_method_is_explained(method: str, capsys: Any) -> None:
    assert run("methods", method) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(settings_of(method))
    assert all(line.endswith(".") for line in lines)


def test_models_are_listed_with_what_they_are(capsys: Any) -> None:
    assert run("models") == 0
    text = capsys.readouterr().out
    for name, architecture in selfadapt.MODELS.items():
        assert f"{name}: output stride {architecture.stride}" in text
        assert architecture.published in text
    assert "SaN mixes the statistics of 12 BatchNorm layers in decoder" in text
    assert "hf:OWNER/NAME" in text


BAD = {
    "no such image": (["x.png"], "there is no image file x.png"),
    "no model": (
        ["{photos}", "--model", "x.safetensors"],
        "there is no file x.safetensors",
    ),
    "an empty folder": (["{empty}"], "there are no images in the folder"),
    "the same name twice": (["{photos}", "{other}/a.png"], "would be written to the same files"),
    "output is a file": (
        ["{photos}", "-o", "{photos}/a.png"],
        "needs a folder, but .*a.png is a file",
    ),
    "psi": (["{photos}", "--psi", "1.4"], r"psi must lie in \[0, 1\].*got 1.4"),
    "alpha": (["{photos}", "--alpha", "2"], r"alpha must lie in \[0, 1\]"),
    "layers": (["{photos}", "--adapt", "layer9"], "did you mean 'layer4'"),
    "device": (["{photos}", "--device", "tpu9"], "there is no device 'tpu9' here"),
    "unknown flag": (["{photos}", "--alpah", "0.2"], "--alpah"),
    "not a number": (["{photos}", "--steps", "many"], r"steps(.|\n)*many"),
    "unknown mode": (["{photos}", "--mode", "fast"], r"mode(.|\n)*fast"),
    "a device that is not here": (
        ["{photos}", "--device", "cuda:7"],
        "there is no device 'cuda:7'",
    ),
    "no images": ([], "at least one IMAGE is needed"),
    "unknown method": (
        ["{photos}", "--method", "self-adpt"],
        "unknown method 'self-adpt'; did you mean 'self-adapt'",
    ),
    "a setting of another method": (
        ["{photos}", "--method", "tent", "--psi", "0.7"],
        "the method 'tent' has no setting 'psi'; .*it has steps, lr, alpha",
    ),
    "several models": (
        ["{photos}", "--model", "a", "--model", "b"],
        "self-adapt takes one --model, got 2",
    ),
    "unknown network": (
        ["{photos}", "--model", "deeplabv9"],
        "unknown model 'deeplabv9'; known: streets, deeplabv1_resnet50",
    ),
    "code without trust": (["{photos}", "--model", "nets:build"], "if you trust it, add --trust"),
    "code that fails": (
        ["{photos}", "--model", "json:loads", "--trust"],
        "json:loads failed: TypeError",
    ),
    "no segmentation network": (
        ["{photos}", "--model", "torchvision.models:resnet18", "--trust"],
        r"must return class scores \(B, C, H, W\), got \(1, 1000\)",
    ),
    "weights beside a file": (
        ["{photos}", "--weights", "w.pth"],
        "records its own architecture and classes: leave out weights",
    ),
    "no weights": (
        ["{photos}", "--model", "hrnet_w18"],
        "hrnet_w18 comes without weights: give those of the whole network, weights=FILE",
    ),
    "no weights file": (
        ["{photos}", "--model", "hrnet_w18", "--weights", "w.pth"],
        "there is no weights file w.pth",
    ),
    "unknown class space": (
        ["{photos}", "--model", "hrnet_w18", "--weights", "{photos}/a.png", "--classes", "city-19"],
        "unknown class space 'city-19'; did you mean",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_usage_exits_2_without_a_traceback(
    case: str, net: Path, photos: Path, tmp_path: Path, capsys: Any
) -> None:
    args, message = BAD[case]
    (tmp_path / "empty").mkdir()
    shutil.copytree(photos, tmp_path / "other")
    folders = {"photos": photos, "empty": tmp_path / "empty", "other": tmp_path / "other"}
    args = [arg.format(**folders) for arg in args]
    network = [] if "--model" in args else ["--model", net]
    assert run("predict", *network, "-o", tmp_path / "masks", *args) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert "Traceback" not in error
    assert not (tmp_path / "masks").exists()


def test_ctrl_c_ends_cleanly(
    net: Path, photos: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
):
    written = []

    def stop(*args: Any, **_: Any) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(args)

    monkeypatch.setattr("selfadapt.predict.stream.write_result", stop)
    assert run("predict", photos, "--model", net, "-o", tmp_path / "masks", *FAST) == 130
    assert "stopped" in capsys.readouterr().err


def test_version_and_help() -> None:
    command = [sys.executable, "-m", "selfadapt"]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.strip() == selfadapt.__version__
    text = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    assert all(command in text for command in COMMANDS)
    assert len(text.splitlines()) <= 14 + len(COMMANDS), "one line for each command"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_that_parses(command: str, capsys: Any) -> None:
    assert run(command, "--help") == 0
    example = COMMANDS[command].example
    assert f"example: {example}" in capsys.readouterr().out
    parsed = make_parser().parse_args(expand_recipe(shlex.split(example)[1:]))
    assert parsed.command == command


@pytest.mark.parametrize(
    ("args", "names", "help_command"),
    [
        ([], ["command"], "selfadapt --help"),
        (["demoo"], ["'demoo'", "demo"], "selfadapt --help"),
        (["--foo"], ["--foo"], "selfadapt --help"),
        (["predict", "a.png"], ["model", "output"], "selfadapt predict --help"),
        (["predict", "a.png", "--alpah", "2"], ["--alpah"], "selfadapt predict --help"),
        (["predict", "a.png", "--mod", "paper"], ["--mod"], "selfadapt predict --help"),
        (["serve", "--port", "many"], ["port", "many"], "selfadapt serve --help"),
        (["bench", "--steps", "x\x1b[2J"], ["steps", r"x\x1b[2J"], "selfadapt bench --help"),
        (["train"], ["output", "model.name", "source.dataset"], "selfadapt train --help"),
        (["train", "-o"], ["-o/--output"], "selfadapt train --help"),
    ],
)
def test_wrong_usage_exits_with_code_2_and_names_what_is_wrong(
    args: list[str], names: list[str], help_command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(*args) == 2
    error = capsys.readouterr().err
    assert all(name in error for name in names), error
    assert error.endswith(f"see {help_command}\n")
    assert "Traceback" not in error


@pytest.mark.parametrize("world", ["0", "2", "x"])
@pytest.mark.parametrize("verb", ["predict", "evaluate"])
def test_torchrun_is_refused(
    verb: str, world: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    to_pil(random_image(16, 16)).save(tmp_path / "a.png")
    words = ["streets-quick"] if verb == "evaluate" else [tmp_path / "a.png", "--model", "streets"]
    assert run_cli(verb, *words, "-o", tmp_path / "out") == 2
    assert "--shard i/n" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_classes_are_named_and_only_our_words_are_printed(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("talkative.py").write_text(
        "import torch\ndef net():\n    print('loading')\n    return torch.nn.Conv2d(3, 3, 1)\n"
    )
    to_pil(random_image(16, 16)).save("a.png")
    command = ("predict", "a.png", "--model", "talkative:net", "--trust", "--method", "source")
    assert run_cli(*command, "-o", "out", "--json", "--classes", "road", "car", "sky") == 0
    assert json.loads(capsys.readouterr().out)["done"] == 1
    assert "share_road,share_car,share_sky" in Path("out/predictions.csv").read_text()


def test_shells_complete_file_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("--print_completion", "shtab-bash") == 0
    assert "complete -o bashdefault -o default -F" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError, RuntimeError])
def test_too_little_memory_is_said_so(
    kind: type[Exception], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise kind("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("selfadapt.cli.look.run_bench", fail)
    assert run_cli("bench") == 1
    assert "out of memory: try a smaller --sizes" in capsys.readouterr().err
