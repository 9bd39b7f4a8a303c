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
    assert Path("masks/street_label.png").exists()
    assert Path("panels/a_panel.png").exists()
    assert Path("scene/scene_label.tif").exists()
    assert Path("mine/report.html").exists()
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
    page = (ROOT / "docs" / "architecture.md").read_text()
    (tree,) = re.findall(r"```\n(selfadapt/.*?)```", page, re.S)
    package = Path(selfadapt.__file__).parent
    names = {path.name for path in package.rglob("*.py") if not path.name.startswith("_")}
    assert names <= set(re.findall(r"[\w-]+\.py", tree))
    for name in re.findall(r"[\w-]+\.py", tree):
        folders = (package, ROOT / "benchmarks", ROOT / "docs")
        assert any(list(folder.rglob(name)) for folder in folders), f"{name} is gone"


def test_the_first_screen_has_what_a_newcomer_needs() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    first = "\n".join(lines[:40])
    for part in ("![", "pip install", "selfadapt predict", "selfadapt.SelfAdapt(model)", "| ECE |"):
        assert part in first
    assert sum(line.startswith("|---|") for line in lines) == 2, "the results, and the pages"


def test_links_lead_to_files_that_are_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)", README.read_text()):
        assert target.startswith("https://") or (ROOT / target).exists(), target
