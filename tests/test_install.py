"""The package as a user gets it: a wheel, a command, words that a shell completes."""

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import selfadapt
from selfadapt.cli import COMMANDS, main
from selfadapt.recipes import shipped_recipes

ROOT = Path(__file__).parents[1]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "selfadapt")
"""What a wheel is made of."""


def output_of(*words: object, **more: Any) -> str:
    return subprocess.run(
        [*map(str, words)], capture_output=True, text=True, check=True, **more
    ).stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip(f"needs setuptools 77, this is {version('setuptools')}")
    folder = tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(
                ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / part, folder / part)
    output_of(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", "dist", cwd=folder)
    (built,) = (folder / "dist").glob("selfadapt-*.whl")
    return built


@pytest.mark.slow
def test_a_wheel_has_all_that_is_needed_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    needed = {"selfadapt/weights/streets.safetensors", "selfadapt/report/published.csv"}
    for kind in ("train", "evaluate"):
        needed |= {f"selfadapt/recipes/{kind}/{name}.yaml" for name in shipped_recipes(kind)}
    needed |= {str(path.relative_to(ROOT)) for path in (ROOT / "selfadapt").rglob("*.py")}
    assert needed <= names
    kinds = {name.split("/")[0].split("-")[0] for name in names}
    assert kinds == {"selfadapt"}
    assert not [name for name in names if "test" in name or name.endswith(".pyc")]


@pytest.mark.slow
def test_an_installed_wheel_runs_the_demo(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    output_of(
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target",
        target, wheel,
    )  # fmt: skip
    run = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(target)}}
    where = output_of(sys.executable, "-c", "import selfadapt; print(selfadapt.__file__)", **run)
    assert Path(where.strip()).is_relative_to(target)
    shown = output_of(
        sys.executable, "-m", "selfadapt", "demo", "--looks", "haze", "--scenes", 1, "--steps", 1,
        **run,
    )  # fmt: skip
    assert "the report is in demo/report.html" in shown
    assert (tmp_path / "demo" / "report.html").stat().st_size > 100_000


def test_a_shell_completes_commands_and_flags(tmp_path: Path, capsys: Any) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    with pytest.raises(SystemExit) as caught:
        main(["--print_completion", "shtab-bash"])
    assert caught.value.code == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)

    def completed(*words: str) -> list[str]:
        line = f"""source {script}; COMP_WORDS=(selfadapt {" ".join(words)})
            COMP_CWORD={len(words)}
            _shtab_selfadapt selfadapt {words[-1]} x; echo "${{COMPREPLY[@]}}" """
        return output_of(bash, "-c", line).split()

    assert completed("eval") == ["evaluate"]
    assert completed("demo", "--im") == ["--image"]


def test_help_fits_a_screen(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for name, command in COMMANDS.items():
        assert any(line.split() == [name, *command.help.split()] for line in lines)


def test_importing_the_package_takes_no_time_until_it_is_used() -> None:
    lines = "import sys, selfadapt; assert 'torch' not in sys.modules; selfadapt.SelfAdapt"
    subprocess.run([sys.executable, "-c", lines], check=True)


def test_all_names_are_there_and_the_same_for_those_who_only_read() -> None:
    tree = ast.parse((ROOT / "selfadapt" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    read = {part.name: node.module for node in block.body for part in node.names}
    assert read == {name: f"selfadapt.{module}" for name, module in selfadapt.HOMES.items()}
    for name in selfadapt.__all__:
        assert getattr(selfadapt, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        selfadapt.nothing  # noqa: B018


def test_ctrl_c_while_it_is_loaded_ends_it_in_a_word(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "selfadapt", "methods"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "stopped; nothing was done yet\n")
