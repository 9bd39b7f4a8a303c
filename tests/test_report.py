"""The report of an evaluation: every number from the rows, every file whole, a page on its own."""

import base64
import csv
import errno
import io
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from evaluations import files_of
from runs import run_cli, write_domain
from selfadapt.models import create_model, save_model
from selfadapt.pages import render
from selfadapt.protocol import DomainConfig, read_results
from selfadapt.protocol.trials import Trial
from selfadapt.recipes import find_recipe, shipped_recipes
from selfadapt.report import write_report
from selfadapt.report.context import ReportContext, ReportItem, Section
from selfadapt.report.formats import Grid, to_csv, to_latex, to_markdown
from selfadapt.report.page import _replace_report
from selfadapt.report.published import (
    compared_methods,
    find_number,
    is_published,
    published,
    published_names,
)
from selfadapt.report.sections import published_methods

CLASSES = ["road", "car", "sky"]
TABLES = {
    "2a": ["gta-resnet50", "gta-resnet101"],
    "2b": ["calibration-gta-resnet50", "calibration-gta-resnet101"],
    "3": ["gta-resnet50", "gta-resnet101", "synthia-resnet50", "synthia-resnet101"],
    "4": [
        "gta-resnet50", "gta-resnet101", "synthia-resnet50", "synthia-resnet101",
        "bound-cityscapes-resnet50", "bound-cityscapes-resnet101", "bound-bdd-resnet50",
        "bound-bdd-resnet101", "bound-mapillary-resnet50", "bound-mapillary-resnet101",
    ],
    "5a": ["tent-gta-hrnet_w18"],
    "5b": ["gta-resnet50"],
    "6": ["norms-gta-resnet50"],
    "7a": ["synthia-resnet50", "synthia-resnet101"],
    "7b": ["calibration-synthia-resnet50", "calibration-synthia-resnet101"],
    "8": ["calibration-gta-resnet50", "calibration-gta-resnet101"],
    "9": ["sensitivity-gta-resnet50"],
    "10": ["views-gta-resnet50"],
    "11": ["gta-resnet50"],
    "12": ["networks-gta"],
    "13": ["weather-gta-resnet50"],
}  # fmt: skip
"""The recipes of each table of the paper that has numbers."""
FIGURES = {
    2: "runtime-gta-resnet50", 3: "sensitivity-gta-resnet50", 4: "gta-resnet50",
    5: "gta-resnet50", 6: "runtime-gta-resnet50", 7: "gta-resnet50", 8: "gta-resnet50",
    9: "gta-resnet50", 10: "gta-resnet50", 11: "gta-resnet50",
}  # fmt: skip
"""The recipe of each figure with results; Figure 1 is a drawing of the method."""


def recipe(root: Path, **changes: Any) -> dict[str, Any]:
    def domain(name: str) -> dict[str, Any]:
        return {"dataset": "folder", "root": str(root / name), "split": "all", "classes": CLASSES}

    return {
        "networks": {"net": {"place": str(root / "net.safetensors")}},
        "classes": CLASSES,
        "validation": domain("dusk"),
        "targets": [domain("fog"), domain("rain & <snow>")],
        "methods": [
            {"method": "source", "label": "t-BN"},
            {"method": "san", "label": "SaN", "tune": {"alpha": [0, 0.5]}, "sweep": {"alpha": [1]}},
            {"method": "tta", "label": "TTA", "same_as": "SaN"},
            {"method": "tent", "label": "Tent", "settings": {"steps": 1}},
            {"method": "self-adapt", "label": "ours", "settings": {"steps": 2},
             "sweep": {"steps": [0, 1], "psi": [0.2, 0.9], "views": [["1"], ["1 flipped gray"]]}},
        ],
        "pictures": 1,
        "device": "cpu",
        **changes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("evaluation")
    for seed, name in enumerate(("dusk", "fog", "rain & <snow>")):
        write_domain(root / name, 3, seed)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = create_model("deeplabv1_resnet18_slim", classes=CLASSES)
    save_model(model, root / "net.safetensors")
    path = root / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(root)))
    assert run_cli("evaluate", path, "-o", root / "run") == 0
    return root


@pytest.fixture(scope="module")
def page(root: Path) -> Path:
    assert run_cli("report", root / "run", "-o", root / "report") == 0
    return root / "report" / "report.html"


class Reader(HTMLParser):
    """Gathers headings, images and addresses of a page, and sees that what is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        given = dict(attrs)
        if tag == "img":
            self.images.append(given["src"])
            assert given["alt"]
        self.addresses += [v for k, v in attrs if k in ("src", "href") and v]
        if tag not in ("img", "meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else_and_its_images_are_whole(page: Path) -> None:
    reader = Reader()
    reader.feed(page.read_text())
    assert not reader.open
    assert all(address.startswith(("data:", "#")) for address in reader.addresses)
    assert len(reader.images) >= 3 + 3  # figures, and a picture of each domain
    for source in reader.images:
        Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).load()


def test_every_section_that_the_run_can_fill_is_there(page: Path) -> None:
    headings = re.findall(r"<h2 id=\"[\w-]+\">(.+?)</h2>", page.read_text())
    assert headings == [
        "All methods", "Normalisation", "Calibration", "Adaptation", "Sensitivity",
        "Runtime and accuracy", "Classes", "Image by image", "How it was done",
    ]  # fmt: skip


def test_names_with_signs_are_shown_as_they_are(page: Path) -> None:
    assert "rain &amp; &lt;snow&gt;" in page.read_text()
    assert "rain & <snow>" not in page.read_text()


def test_numbers_are_those_of_the_rows(root: Path, page: Path) -> None:
    results = read_results(root / "run")
    with (page.parent / "tables" / "overview.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    for label in results.methods:
        for domain in results.targets:
            expected = 100 * results.scores(label, domain).mean_iou
            assert float(rows[label][domain]) == pytest.approx(expected)


def test_every_table_is_there_in_three_forms_and_every_figure_in_two(page: Path) -> None:
    tables = {path.name for path in (page.parent / "tables").iterdir()}
    names = {name.rpartition(".")[0] for name in tables}
    assert tables == {f"{name}.{suffix}" for name in names for suffix in ("md", "tex", "csv")}
    assert {"overview", "gains", "ece_class", "changes", "tuning", "runtime"} <= names
    figures = {path.name for path in (page.parent / "figures").iterdir()}
    drawn = {name.rpartition(".")[0] for name in figures}
    assert figures == {f"{name}.{suffix}" for name in drawn for suffix in ("png", "pdf")}
    assert {"reliability", "changes_histogram", "runtime_plot", "sweep_ours_steps_curve"} <= drawn
    for name in drawn:
        assert (page.parent / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_sweeps_are_shown_but_choose_nothing(root: Path, page: Path) -> None:
    chosen = json.loads((root / "run" / "chosen.json").read_text())
    assert chosen["ours"] == {"tried": [], "chosen": {}}
    text = (page.parent / "tables" / "sweep_ours_views.md").read_text()
    assert "| 1 flipped gray |" in text


def test_the_same_run_gives_the_same_tables(root: Path, page: Path, tmp_path: Path) -> None:
    write_report(root / "run", tmp_path)
    for path in (page.parent / "tables").iterdir():
        assert (tmp_path / "tables" / path.name).read_bytes() == path.read_bytes()


def test_a_report_is_not_replaced_unasked(root: Path, page: Path, capsys: Any) -> None:
    before = page.read_bytes()
    assert run_cli("report", root / "run", "-o", page.parent) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert page.read_bytes() == before


def test_a_folder_without_a_run_is_refused(root: Path, tmp_path: Path, capsys: Any) -> None:
    assert run_cli("report", tmp_path, "-o", tmp_path / "report") == 2
    assert f"there is no evaluation in {tmp_path}" in capsys.readouterr().err
    shutil.copytree(root / "run", tmp_path / "run")
    (tmp_path / "run" / "chosen.json").unlink()
    assert run_cli("report", tmp_path / "run", "-o", tmp_path / "report") == 2
    assert "has not chosen its settings yet" in capsys.readouterr().err


def test_a_run_that_was_only_tuned_has_no_report_yet(
    root: Path, tmp_path: Path, capsys: Any
) -> None:
    assert run_cli("tune", root / "recipe.yaml", "-o", tmp_path / "run") == 0
    assert "SaN: alpha" in capsys.readouterr().out
    assert run_cli("report", tmp_path / "run", "-o", tmp_path / "report") == 2
    assert "no target" in capsys.readouterr().err


def test_a_report_does_not_replace_the_tables_of_its_run(root: Path, capsys: Any) -> None:
    before = (root / "run" / "tables" / "domains.csv").read_bytes()
    assert run_cli("report", root / "run", "-o", root / "run", "--overwrite") == 2
    assert "holds an evaluation" in capsys.readouterr().err
    assert (root / "run" / "tables" / "domains.csv").read_bytes() == before


def test_a_run_that_is_not_complete_says_so(root: Path, page: Path, tmp_path: Path) -> None:
    assert "not complete" not in page.read_text()
    shutil.copytree(root / "run", tmp_path / "run")
    (path,) = (tmp_path / "run" / "rows").iterdir()
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    text = write_report(tmp_path / "run", tmp_path / "report").read_text()
    assert "This run is not complete: 2 rows are missing." in text


def test_a_domain_that_is_not_in_the_mean(root: Path, tmp_path: Path) -> None:
    content = recipe(root)
    content["targets"][1]["in_mean"] = False
    content["methods"] = content["methods"][:2]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    assert run_cli("evaluate", path, "-o", tmp_path / "run") == 0
    with (tmp_path / "run" / "tables" / "domains.csv").open() as file:
        found = {(row["method"], row["domain"]): row["mIoU"] for row in csv.DictReader(file)}
    mean = found["SaN", "mean of targets but rain & <snow>"]
    assert mean == found["SaN", "fog"] != found["SaN", "rain & <snow>"]


def test_a_network_that_was_chosen_on_a_target_is_refused(
    root: Path, tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "trained"
    run.mkdir()
    shutil.copy(root / "net.safetensors", run / "best.safetensors")
    content = recipe(root, networks={"net": {"place": str(run)}})
    seen = {k: v for k, v in content["targets"][0].items() if k != "in_mean"}
    other = {**seen, "root": str(root / "elsewhere")}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    for part, said in (("source", "was trained on"), ("validation", "was chosen on")):
        trained = {"source": other, "validation": other, part: seen}
        (run / "recipe.json").write_text(json.dumps(trained))
        for place in (run, run / "best.safetensors"):
            content["networks"]["net"]["place"] = str(place)
            path.write_text(yaml.safe_dump(content))
            assert run_cli("evaluate", path, "-o", tmp_path / "run") == 2
            assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_page_opens_in_a_browser(page: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium here")
    for width in (1200, 400):
        shot = tmp_path / f"{width}.png"
        done = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
             f"--user-data-dir={tmp_path}/profile", f"--window-size={width},2000",
             f"--screenshot={shot}", page.as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        assert "CONSOLE" not in done.stderr
        assert len(Image.open(shot).convert("L").getcolors(256) or []) > 10  # not an empty page


# The published numbers.


def number(trial: Trial, domain: str, metric: str = "mIoU", **network: Any) -> float | None:
    """Return what the paper has for a trial of its ResNet-50 trained on GTA."""
    found = find_number(
        "gta", "deeplabv1_resnet50", published_names(trial, **network), domain, metric
    )
    return None if found is None else found.value


def trial(method: str, **settings: Any) -> Trial:
    return Trial(method, ("net",), settings)


def test_numbers_of_the_paper_are_found_by_our_names() -> None:
    """Read off the paper's tables by hand."""
    assert number(trial("source"), "cityscapes") == 30.95
    assert number(trial("san", alpha=0.1), "cityscapes") == 37.54
    assert number(trial("self-adapt", alpha=0.1), "cityscapes") == 45.13
    assert number(trial("self-adapt", alpha=0.1), "mapillary") == 47.49
    assert number(trial("mc-dropout", alpha=0), "cityscapes", "ECE", dropout=0.1) == 30.29
    assert number(trial("mc-dropout", alpha=0.1), "cityscapes", "ECE", dropout=0.1) == 25.50
    assert number(trial("source"), "cityscapes", norm="sn") != 30.95


@pytest.mark.parametrize(
    ("of", "network"),
    [
        (trial("memo", alpha=0.1), {}),
        (trial("tta", alpha=0), {}),
        (trial("self-adapt", alpha=0), {}),
        (trial("san", alpha=0.1), {"norm": "bin"}),
        (trial("source"), {"dropout": 0.1}),
    ],
)
def test_what_the_paper_has_not_has_no_number(of: Trial, network: dict[str, Any]) -> None:
    assert number(of, "cityscapes", **network) is None


def test_a_part_of_a_domain_has_no_published_number() -> None:
    whole = DomainConfig(dataset="cityscapes", split="val")
    assert is_published(whole, "gta", "cityscapes-19")
    assert not is_published(whole, "gta", "synthia-16")
    assert not is_published(whole, None, "cityscapes-19")
    for change in ({"limit": 5}, {"scale": 2.0}, {"split": "train"}, {"names": "some.txt"}):
        assert not is_published(replace(whole, **change), "gta", "cityscapes-19")


def test_every_published_number_says_whose_it_is() -> None:
    assert len(published()) == 519
    assert all(number.cite and number.table in TABLES for number in published())
    assert {number.table for number in published()} == set(TABLES)
    assert {n.method for n in compared_methods("gta")} >= {
        "RobustNet",
        "SAN-SAW",
        "self-adaptation",
    }


def test_the_papers_numbers_stand_beside_ours(root: Path, monkeypatch: Any) -> None:
    results = read_results(root / "run")
    content = yaml.safe_load(find_recipe("gta-resnet50", "evaluate").read_text())
    targets = [{**content["targets"][0], "root": "x"}, {**content["targets"][1], "root": "x"}]
    config = results.config
    renamed = {"fog": targets[0]["name"], "rain & <snow>": targets[1]["name"]}
    rows = {
        trial: [{**row, "domain": renamed.get(trial[0], trial[0])} for row in found]
        for trial, found in results._by_trial.items()
    }
    results._by_trial = {(renamed.get(d, d), t): found for (d, t), found in rows.items()}
    results.config = replace(
        config,
        source="gta",
        targets=[DomainConfig(**target) for target in targets],
    )
    for name in ("context", "sections"):
        monkeypatch.setattr(f"selfadapt.report.{name}.is_published", lambda *_: True)
    spec = {"name": "deeplabv1_resnet50", "norm": "bn", "dropout": 0.0}
    record = {"networks": {"net": spec}}
    context = ReportContext(results, record, [])
    grid = context.grid(["t-BN", "SaN"], lambda scores: scores.mean_iou)
    assert [row[0] for row in grid.rows] == ["t-BN", "t-BN, published", "SaN", "SaN, published"]
    assert grid.rows[1][1:3] == ("30.95", "28.52")
    section = published_methods(context)
    assert section is not None
    assert section.items[0].grid is not None
    names = [str(row[0]) for row in section.items[0].grid.rows]
    assert any("RobustNet" in name for name in names)
    assert any("this run" in name for name in names)


# Tables as text.

GRID = Grid(("a_b", "x|y"), [("p & q", 1.0), ("r", 2.5), ("s", None), ("t", "2.50")], "high")


def test_tables_as_text() -> None:
    assert to_markdown(GRID).splitlines()[0] == "| a_b | x\\|y |"
    assert "| r | **2.50** |" in to_markdown(GRID)
    assert "p \\& q & 1.00 \\\\" in to_latex(GRID)
    assert "r & \\textbf{2.50} \\\\" in to_latex(GRID)
    signs = to_latex(Grid(("a^b",), [("~c\\d_{e}",)]))
    assert r"a\textasciicircum{}b" in signs
    assert r"\textasciitilde{}c\textbackslash{}d\_\{e\}" in signs
    assert to_csv(GRID).splitlines() == ["a_b,x|y", "p & q,1.0", "r,2.5", "s,", "t,2.50"]
    section = Section("s", "", [ReportItem("table", "caption", GRID)])
    page = render("report.html", title="t", sections=[section], footer="")
    assert "<td>p &amp; q</td>" in page
    assert page.count('<td class="best">') == 1


def test_no_cell_of_a_table_is_a_formula() -> None:
    change = "+0.52 [-0.10, +0.90]"
    rows = [("=1+1", -0.5), ("-net", change), ("+1", "-"), ("@a", "-0.52"), ("\ta", "-1-cmd|a!A1")]
    written = list(csv.reader(io.StringIO(to_csv(Grid(("=a", "b"), rows)))))
    assert written == [
        ["'=a", "b"], ["'=1+1", "-0.5"], ["'-net", change], ["'+1", "-"], ["'@a", "-0.52"],
        ["'\ta", "'-1-cmd|a!A1"],
    ]  # fmt: skip


def test_the_lowest_error_is_the_best() -> None:
    grid = Grid(("m", "ECE"), [("a", 2.0), ("b", 1.0)], "low")
    assert "| b | **1.00** |" in to_markdown(grid)


# The recipes that come with the package.


def test_every_table_and_figure_of_the_paper_has_a_recipe() -> None:
    shipped = shipped_recipes("evaluate")
    named = {name for names in TABLES.values() for name in names} | set(FIGURES.values())
    assert named <= set(shipped)
    assert set(shipped) - named == {"carla", "streets", "streets-quick"}
    assert set(FIGURES) == set(range(2, 12))


@pytest.mark.parametrize("name", shipped_recipes("evaluate"))
def test_a_shipped_recipe_parses(name: str, capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """It gets as far as to miss the data or the checkpoint, and no further."""
    if name.startswith("streets"):
        pytest.skip("it needs nothing, so it would run")
    monkeypatch.chdir(tmp_path)
    assert run_cli("evaluate", name, "-o", tmp_path / "run") == 2
    first = "data/camvid" if name == "carla" else "data/wilddash"
    assert first in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_trials_with_equal_settings_are_one() -> None:
    one = Trial("san", ("net",), {"alpha": 1, "scales": (0.5, 1.0)})
    same = Trial("san", ("net",), {"scales": [0.5, 1], "alpha": 1.0})
    assert one.key == same.key
    for other in (
        Trial("san", ("net",), {"alpha": 0.9, "scales": [0.5, 1]}),
        Trial("san", ("other",), {"alpha": 1, "scales": [0.5, 1]}),
        Trial("tta", ("net",), {"alpha": 1, "scales": [0.5, 1]}),
        Trial("san", ("net",), {"alpha": 1, "scales": [0.5, 1]}, "bf16"),
    ):
        assert other.key != one.key


def test_the_whole_protocol_on_the_built_in_streets(tmp_path: Path) -> None:
    small = [
        {"dataset": "streets", "split": s, "limit": 1, "scale": 0.25} for s in ("haze", "rain")
    ]
    words = ("--threads", 1, "--validation.scale", 0.25, "--targets", json.dumps(small))
    assert run_cli("evaluate", "streets-quick", "-o", tmp_path / "run", *words) == 0
    assert run_cli("report", tmp_path / "run", "-o", tmp_path / "report") == 0
    text = (tmp_path / "report" / "report.html").read_text()
    for name in ("p-BN", "SaN", "TTA", "SaN + MC-dropout", "Tent", "MEMO", "InTEnt"):
        assert f"<td>{name}</td>" in text


def test_a_damaged_record_of_a_training_run_is_refused(
    root: Path, tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "trained"
    run.mkdir()
    shutil.copy(root / "net.safetensors", run / "best.safetensors")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(root, networks={"net": {"place": str(run)}})))
    for content in ("{", "[]", "{}", '{"source": {"color": 1}, "validation": null}'):
        (run / "recipe.json").write_text(content)
        assert run_cli("evaluate", path, "-o", tmp_path / "run") == 2
        err = capsys.readouterr().err
        assert "is not the recipe of a training run" in err
        assert "Traceback" not in err


def test_files_of_others_are_not_replaced(root: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "mine" / "tables").mkdir(parents=True)
    precious = tmp_path / "mine" / "tables" / "domains.csv"
    precious.write_text("precious")
    assert run_cli("report", root / "run", "-o", tmp_path / "mine") == 2
    assert "tables would be replaced" in capsys.readouterr().err
    assert precious.read_text() == "precious"


def test_a_report_that_was_killed_is_written_anew(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", at_call(8, Path.replace, KeyboardInterrupt()))
        assert run_cli("report", root / "run", "-o", out) == 130
    assert len(list((out / "tables").iterdir())) == 7
    assert not (out / "report.html").exists()
    (aside,) = out.glob(".report.*.part")
    aside.rename(out / ".report.0123cdef.part")  # of no process that is running
    assert run_cli("report", root / "run", "-o", out) == 0
    assert [path.name for path in out.glob(".*")] == [".report.json"]


def at_call(number: int, function: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """Return a function that raises when it is called for the ``number``-th time, from 0."""
    times = iter(range(1000))

    def called(*args: Any, **kwargs: Any) -> Any:
        if next(times) == number:
            raise error
        return function(*args, **kwargs)

    return called


@pytest.mark.parametrize("number", [0, 7, 20])
@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (OSError(errno.ENOSPC, "full"), 2)], ids=repr
)
def test_the_report_before_stands_until_the_new_one_is_complete(
    root: Path, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any,
    number: int, error: BaseException, code: int,
) -> None:  # fmt: skip
    out = Path(shutil.copytree(page.parent, tmp_path / "out"))
    (out / "tables" / "of_before.csv").write_text("of the report before")
    before = files_of(out)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", at_call(number, os.fsync, error))
        assert run_cli("report", root / "run", "-o", out, "--overwrite") == code
    assert files_of(out) == before
    if code == 2:
        said = capsys.readouterr().err
        assert f"the report could not be written to {out} (full); nothing was changed" in said


def test_a_folder_that_cannot_be_written_to_is_said_once(
    root: Path, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = Path(shutil.copytree(page.parent, tmp_path / "out"))
    mkdir = Path.mkdir

    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.parent.name.startswith(".report"):
            raise PermissionError(13, "Permission denied")
        mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert run_cli("report", root / "run", "-o", out, "--overwrite") == 2
    said = capsys.readouterr().err
    assert f"the report could not be written to {out} (Permission denied); nothing" in said


def test_what_a_killed_report_left_is_removed(root: Path, page: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(page.parent, tmp_path / "out"))
    for name in ("report.0123cdef", "mine.0123cdef"):
        (out / f".{name}.part").mkdir()
    assert run_cli("report", root / "run", "-o", out, "--overwrite") == 0
    left = {path.name for path in out.glob(".*")}
    assert left == {".mine.0123cdef.part", ".report.json"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chosen.json", "{}", "chosen.json is damaged"),
        ("chosen.json", "no", "chosen.json is damaged"),
        ("record.json", '{"format": "selfadapt evaluation 1"}', "of another version"),
        (
            "record.json",
            '{"format": "selfadapt evaluation 2", "identity": {}}',
            "lacks recipe, images",
        ),
        ("pictures/index.json", "[", "index.json is damaged"),
        ("pictures/index.json", '[{"file": "a.png"}]', "index.json is damaged"),
        ("chosen.json", '{"t-BN": {"tried": null, "chosen": null}}', "chosen.json is damaged"),
    ],
)
def test_a_damaged_run_is_named(
    name: str, content: str, message: str, root: Path, tmp_path: Path, capsys: Any
) -> None:
    shutil.copytree(root / "run", tmp_path / "run")
    (tmp_path / "run" / name).write_text(content)
    assert run_cli("report", tmp_path / "run", "-o", tmp_path / "out") == 2
    assert message in capsys.readouterr().err


def test_a_record_of_another_version_is_named(root: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(root / "run", tmp_path / "run")
    path = tmp_path / "run" / "record.json"
    record = json.loads(path.read_text())
    record["recipe"]["unheard_of"] = 1
    path.write_text(json.dumps(record))
    assert run_cli("report", tmp_path / "run", "-o", tmp_path / "out") == 2
    assert "record.json is damaged or of another version" in capsys.readouterr().err


def test_a_report_over_another_leaves_nothing_of_it(root: Path, page: Path, tmp_path: Path) -> None:
    content = recipe(root, methods=[{"method": "source"}], pictures=0)
    content["targets"][0]["name"], content["targets"][1]["name"] = "fog/a", "fog a"
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    assert run_cli("evaluate", path, "-o", tmp_path / "run") == 0
    shutil.copytree(page.parent, tmp_path / "over")
    mine = {"tables/mine.csv", "tables/mine.txt", "figures/mine.png", "figures/mine.pdf"}
    for name in mine:
        (tmp_path / "over" / name).write_text("precious")
    assert run_cli("report", tmp_path / "run", "-o", tmp_path / "over", "--overwrite") == 0
    assert run_cli("report", tmp_path / "run", "-o", tmp_path / "new") == 0
    new, over = files_of(tmp_path / "new"), files_of(tmp_path / "over")
    names = {"tables/classes_fog_a.csv", "tables/classes_fog_a_2.csv"}
    assert names <= new.keys(), "one for each domain"
    assert over == new | dict.fromkeys(mine, b"precious")


NEW = {"tables/a.csv": b"new", "report.html": b"new"}


@pytest.mark.parametrize("link", [True, False])
def test_a_list_of_a_report_removes_nothing_outside_of_it(link: bool, tmp_path: Path) -> None:
    out, mine = tmp_path / "out", tmp_path / "mine"
    for path in (out / "tables", out / "figures", mine):
        path.mkdir(parents=True)
    kept = [mine / "a.csv", out / "mine.csv", out / "tables/mine.csv"]
    for path in (*kept, out / "tables/of_before.csv"):
        path.write_text("precious")
    names = ["../mine/a.csv", "tables/../../mine/a.csv", "tables/..", "tables", "mine.csv", 3]
    names += [str(mine / "a.csv"), "tables/\0", "report.html", "tables/of_before.csv"]
    if link:
        (out / "figures").rmdir()
        (out / "figures").symlink_to(mine)
        names.append("figures/a.csv")
    (out / ".report.json").write_text(json.dumps(names))
    _replace_report(out, NEW)
    assert all(path.exists() for path in kept)
    assert not (out / "tables/of_before.csv").exists()


@pytest.mark.parametrize("content", [None, "", "3", "null", '{"tables/of_before.csv": 1}', "["])
def test_a_report_without_a_list_keeps_its_surplus_files(
    content: str | None, tmp_path: Path
) -> None:
    _replace_report(tmp_path, {**NEW, "tables/of_before.csv": b"of before"})
    (tmp_path / ".report.json").unlink()
    if content is not None:
        (tmp_path / ".report.json").write_text(content)
    _replace_report(tmp_path, NEW)
    assert (tmp_path / "tables/of_before.csv").exists()
    assert json.loads((tmp_path / ".report.json").read_text()) == ["report.html", "tables/a.csv"]


def test_a_network_whose_name_is_a_path_has_its_table(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    model = create_model("smp:Unet/resnet18", classes=CLASSES)
    save_model(model, tmp_path / "unet.safetensors")
    networks = {"a": {"place": str(root / "net.safetensors")},
                "b": {"place": str(tmp_path / "unet.safetensors")}}  # fmt: skip
    methods = [{"method": "source", "label": name, "network": name} for name in networks]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(root, networks=networks, methods=methods)))
    assert run_cli("evaluate", path, "-o", tmp_path / "run") == 0
    assert run_cli("report", tmp_path / "run", "-o", tmp_path / "out") == 0
    assert (tmp_path / "out" / "tables" / "network_smp_Unet_resnet18.csv").exists()


def test_what_a_killed_evaluation_left_of_pictures_is_removed(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "run", tmp_path / "run")
    torn = tmp_path / "run" / "pictures" / ".fog-first-00.png.0123cdef.part"
    torn.touch()
    assert run_cli("evaluate", root / "recipe.yaml", "-o", tmp_path / "run") == 0
    assert not torn.exists()
