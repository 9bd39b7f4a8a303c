"""What the README shows is run, in order, in one folder."""

import re
from pathlib import Path

import pytest

import selfadapt
from documents import ROOT, blocks, prepare, run_blocks, run_commands

README = ROOT / "README.md"


def test_every_python_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepare()
    assert len(blocks(README, "python")) >= 4
    names = run_blocks(README)
    assert isinstance(names["result"], selfadapt.Result)
    assert tuple(names["logits"].shape) == (1, 21, 240, 320)
    assert isinstance(names["method"], selfadapt.SelfAdapt)


def test_every_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepare()
    run_commands(README)
    assert Path("masks/a_label.png").exists()
    assert Path("sheet.png").exists()
    assert Path("run/best.safetensors").exists()
    assert Path("report/report.html").exists()


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", "\n".join(blocks(README, "sh")), re.M)
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M)


def test_the_file_map_is_complete() -> None:
    (tree,) = re.findall(r"```\n(selfadapt/.*?)```", README.read_text(), re.S)
    package = Path(selfadapt.__file__).parent
    for path in package.rglob("*.py"):
        if not path.name.startswith("_"):
            assert path.name in tree


def test_links_lead_to_files_that_are_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)", README.read_text()):
        assert target.startswith("https://") or (ROOT / target).exists(), target
