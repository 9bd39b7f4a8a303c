"""A module imports only from rows above its own, so that the edge can be dropped or replaced."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import selfadapt

ROOT = Path(selfadapt.__file__).parent
ROWS = [
    {
        "patterns",
        "checks",
        "devices",
        "files",
        "optional",
        "pseudo",
        "version",
        "views",
        "copying",
        "addresses",
    },
    {
        "labels",
        "recipes",
        "budget",
        "modes",
        "prefetch",
        "progress",
        "journal",
        "computed",
        "own",
        "pages",
    },
    {"norm", "auto", "dropout", "losses", "steps", "images", "streets", "classfile", "runs"},
    {"result", "metrics"},
    {"models", "data"},
    {"engine"},
    {"cost", "explain", "batches"},
    {"method"},
    {"adapted"},
    {"adapt", "baselines", "entropy"},
    {"methods"},
    {"scenes"},
    {"forecast"},
    {"predict", "train", "protocol", "bench", "export"},
    {"ray"},
    {"report", "app", "demo"},
    {"cli"},
]

SHORTHANDS = {("result", "predict"), ("method", "adapted"), ("explain", "method")}
"""Imported within a function or for types alone: ``Result.save`` is short for what predict does,
``Method.adapt`` for what adapted does."""


def wrong_imports() -> Iterator[str]:
    row = {name: i for i, names in enumerate(ROWS) for name in names}
    for path in sorted(ROOT.rglob("*.py")):
        here = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if here in ("__init__", "__main__"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "selfadapt" and here != "cli":
                yield f"{path.relative_to(ROOT)} imports the whole package"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("selfadapt."):
                other = node.module.split(".")[1]
                if (here, other) in SHORTHANDS and node.col_offset > 0:
                    continue
                if other != here and row[other] >= row[here]:
                    yield f"{path.relative_to(ROOT)} imports {other}"


def test_modules_import_only_from_rows_above() -> None:
    assert list(wrong_imports()) == []


def test_every_module_has_a_row() -> None:
    files = {path.stem for path in ROOT.glob("*.py") if path.name[0] != "_"}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert files | packages == set().union(*ROWS)


def test_the_page_on_architecture_has_these_rows() -> None:
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    table = page.partition("## Layers")[2].partition("## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert [set(re.findall(r"`(\w+)`", cell)) for cell in cells] == ROWS


CORE = ("adapt", "baselines", "entropy", "method", "norm", "views", "pseudo", "metrics", "losses")


def test_the_core_does_not_know_how_fast_it_runs() -> None:
    for name in CORE:
        for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("selfadapt.engine."), (name, node.module)
