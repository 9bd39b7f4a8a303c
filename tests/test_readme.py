"""What the README shows is run, in order, in one folder."""

import re
import shlex
from pathlib import Path

import pytest
import torch

import selfadapt
from conftest import random_image
from selfadapt.cli import main
from selfadapt.images import to_pil

SHORT = {
    "train": [
        "--epochs=1", "--source.limit=8", "--validation.limit=1", "--machine.measure=false",
        "--machine.workers=0", "--augment.crop=[32,32]", "--alphas=[0.1]", "--statistics_batches=1",
    ],
    "evaluate": ["--methods=[{method: source}, {method: san}]", "--pictures=0"],
}  # fmt: skip
"""Flags that make commands end soon."""
README = Path(__file__).parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.S)


def test_every_python_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    to_pil(random_image(48, 64)).save("street.jpg")
    names: dict[str, object] = {}
    found = blocks("python")
    assert len(found) >= 4
    for block in found:
        offline = block.replace('weights="DEFAULT"', "weights=None, weights_backbone=None")
        exec(offline, names)
    assert isinstance(names["result"], selfadapt.Result)
    assert tuple(names["logits"].shape) == (1, 21, 240, 320)
    assert isinstance(names["method"], selfadapt.SelfAdapt)


def test_every_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    to_pil(random_image(24, 32)).save("street.jpg")
    Path("photos").mkdir()
    to_pil(random_image(24, 32)).save("photos/a.png")
    for kind in ("images", "labels"):
        Path("mine", kind).mkdir(parents=True)
    to_pil(random_image(24, 32)).save("mine/images/a.png")
    to_pil(torch.zeros(24, 32)).convert("L").save("mine/labels/a.png")
    model = selfadapt.create_model("deeplabv1_resnet50", classes=3)
    selfadapt.save_model(model, "net.safetensors", dtype=torch.float16)
    commands = [
        line
        for block in blocks("sh")
        for line in block.splitlines()
        if line.startswith("selfadapt")
    ]
    assert commands
    for command in commands:
        words = shlex.split(command, comments=True)[1:]
        with pytest.raises(SystemExit) as caught:
            main(words + SHORT.get(words[0], []))
        assert caught.value.code == 0
    assert Path("masks/a_label.png").exists()
    assert Path("sheet.png").exists()
    assert Path("run/best.safetensors").exists()
    assert Path("report/report.html").exists()


def test_the_make_targets_exist() -> None:
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", "\n".join(blocks("sh")), re.M):
        assert re.search(rf"^{target}:", makefile, re.M)


def test_the_file_map_is_complete() -> None:
    (tree,) = re.findall(r"```\n(selfadapt/.*?)```", README.read_text(), re.S)
    package = Path(selfadapt.__file__).parent
    for path in package.rglob("*.py"):
        if not path.name.startswith("_"):
            assert path.name in tree
