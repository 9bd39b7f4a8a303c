"""The protocol: settings come from the validation domain alone, and tables say what came out."""

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import spearmanr

from conftest import assert_same, seeded, snapshot
from evaluations import (
    Place,
    Sample,
    as_evaluation,
    copy_domains,
    evaluated,
    files_of,
    make_place,
    num_rows,
    segmented,
    slow_accuracy,
    slow_class_ece,
    slow_ious,
    slow_miou,
    slow_pooled_ece,
    small,
)  # fmt: skip
from runs import CLASSES, IGNORE, rows, run_cli, write_domain, write_recipe
from selfadapt.baselines import Source
from selfadapt.data import Dataset
from selfadapt.labels import CLASS_SPACES
from selfadapt.methods import create_method
from selfadapt.models.checkpoint import load_model, save_model
from selfadapt.models.create import create_model
from selfadapt.protocol import evaluate as package_evaluate
from selfadapt.protocol.trials import Trial, open_network
from selfadapt.runs import Shard

ALPHAS = [0.0, 0.2, 0.5, 1.0]
RATES = [0.01, 0.2]
STEPS = [1, 2]
ONE_VIEW = {"scales": [1.0]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def content(place: Place) -> dict[str, Any]:
    """A recipe with all there is: grids, one setting after the other, shared ones, sweeps."""
    return small(
        place,
        networks={"one": {"place": place.net("one")}, "two": {"place": place.net("two")}},
        targets=[place.domain("dim"), place.domain("dark", scale=1.5)],
        methods=[
            {"method": "source"},
            {"method": "p-bn"},
            {"method": "san", "label": "SaN", "tune": {"alpha": ALPHAS}, "sweep": {"alpha": [0.7]}},
            {"method": "tta", "same_as": "SaN", "settings": ONE_VIEW},
            {
                "method": "self-adapt",
                "label": "adapted",
                "same_as": "SaN",
                "settings": ONE_VIEW,
                "tune": {"lr": RATES, "steps": STEPS},
                "search": "in turn",
            },
            {"method": "source", "label": "source two", "network": "two"},
            {"method": "san", "label": "SaN two", "network": "two", "settings": {"alpha": 0.3}},
            {"method": "ensemble", "same_as": "SaN"},
        ],
    )


@pytest.fixture(scope="module")
def run(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return evaluated(content, tmp_path_factory.mktemp("evaluations") / "run")


def samples_of(
    place: Place, name: str, method: str, nets: tuple[str, ...] = ("one",), **settings: Any
) -> tuple[Sample, ...]:
    """Segment a domain apart from the protocol."""
    files = tuple(place.net(net) for net in nets)
    scale = 1.5 if name == "dark" else 1.0
    return segmented(place.root / name, files, method, json.dumps(settings, sort_keys=True), scale)


def best_alpha(place: Place) -> float:
    scores = [slow_miou(samples_of(place, "val", "san", alpha=alpha)) for alpha in ALPHAS]
    return ALPHAS[scores.index(max(scores))]


def settings_found(place: Place) -> dict[str, tuple[str, tuple[str, ...], dict[str, Any]]]:
    """Return method, networks and settings of each label, tuned here once more, by other means."""
    alpha = best_alpha(place)
    adapted: dict[str, Any] = {"alpha": alpha, "lr": RATES[0], "steps": STEPS[0], **ONE_VIEW}
    for name, values in (("lr", RATES), ("steps", STEPS)):
        tried = [{**adapted, name: value} for value in values]
        scores = [slow_miou(samples_of(place, "val", "self-adapt", **one)) for one in tried]
        adapted = tried[scores.index(max(scores))]
    return {
        "source": ("source", ("one",), {}),
        "p-bn": ("p-bn", ("one",), {}),
        "SaN": ("san", ("one",), {"alpha": alpha}),
        "tta": ("tta", ("one",), {"alpha": alpha, **ONE_VIEW}),
        "adapted": ("self-adapt", ("one",), adapted),
        "source two": ("source", ("two",), {}),
        "SaN two": ("san", ("two",), {"alpha": 0.3}),
        "ensemble": ("ensemble", ("one", "two"), {"alpha": alpha}),
    }


def close(text: str, value: float) -> bool:
    """Compare a cell of a table with a number; an empty cell is none."""
    return value != value if text == "" else math.isclose(float(text), value, abs_tol=2e-6)


# tuning


def test_the_run_is_worth_comparing(run: Path) -> None:
    """Otherwise equal tables would mean little."""
    table = rows(run / "tables/domains.csv")
    assert len({row["mIoU"] for row in table}) > len(table) * 3 // 4
    changes = [float(row["change"]) for row in rows(run / "tables/images.csv") if row["change"]]
    assert min(changes) < 0 < max(changes)
    tuning = [row for row in rows(run / "tables/tuning.csv") if row["method"] == "SaN"]
    assert len({row["mIoU"] for row in tuning}) == len(ALPHAS)


def test_settings_are_those_with_the_highest_iou_on_the_validation_domain(
    run: Path, place: Place
) -> None:
    chosen = json.loads((run / "chosen.json").read_text())
    found = settings_found(place)
    assert chosen["SaN"]["chosen"] == {"alpha": best_alpha(place)}
    adapted = found["adapted"][2]
    assert chosen["adapted"]["chosen"] == {k: adapted[k] for k in ("alpha", "lr", "steps")}
    for label in ("tta", "ensemble"):
        assert chosen[label] == {"tried": [], "chosen": {"alpha": best_alpha(place)}}
    for label in ("source", "p-bn", "source two", "SaN two"):
        assert chosen[label] == {"tried": [], "chosen": {}}


def test_all_that_was_tried_is_written_down(run: Path, place: Place) -> None:
    table = rows(run / "tables/tuning.csv")
    chosen = json.loads((run / "chosen.json").read_text())
    scores = {
        (row["method"], row["settings"]): row["mIoU"] for row in table
    }  # a setting that is tried twice has one score
    for alpha in ALPHAS:
        expected = slow_miou(samples_of(place, "val", "san", alpha=alpha))
        assert close(scores["SaN", json.dumps({"alpha": alpha})], expected)
    tried = [settings for settings, _ in chosen["SaN"]["tried"]]
    assert tried == [{"alpha": alpha} for alpha in ALPHAS]
    for settings, score in chosen["adapted"]["tried"]:
        expected = slow_miou(samples_of(place, "val", "self-adapt", **settings, **ONE_VIEW))
        assert score == pytest.approx(expected, abs=1e-6)
        assert settings["alpha"] == best_alpha(place)
    assert {row["method"] for row in table} == {"SaN", "adapted"}


def test_one_setting_after_the_other_starts_from_the_first_values(run: Path, place: Place) -> None:
    tried = json.loads((run / "chosen.json").read_text())["adapted"]["tried"]
    found = [(settings["lr"], settings["steps"]) for settings, _ in tried]
    assert found[: len(RATES)] == [(rate, STEPS[0]) for rate in RATES]
    best = settings_found(place)["adapted"][2]["lr"]
    assert {rate for rate, _ in found[len(RATES) :]} == {best}


def test_each_method_has_one_setting_that_is_marked_as_chosen(run: Path) -> None:
    table = rows(run / "tables/tuning.csv")
    for label in ("SaN", "adapted"):
        assert [row["chosen"] for row in table if row["method"] == label].count("1") == 1, label


def test_a_grid_tries_all_combinations(place: Place, tmp_path: Path) -> None:
    tune = {"alpha": [0.0, 1.0], "steps": [1, 2]}
    method = {"method": "tent", "tune": tune}
    validation = place.domain("val", limit=1)
    content = small(place, methods=[{"method": "source"}, method], validation=validation)
    evaluated(content, tmp_path / "run", only_tune=True)
    tried = json.loads((tmp_path / "run/chosen.json").read_text())["tent"]["tried"]
    found = [(settings["alpha"], settings["steps"]) for settings, _ in tried]
    assert found == [(0.0, 1), (0.0, 2), (1.0, 1), (1.0, 2)]
    assert not (tmp_path / "run/tables").exists()


def test_of_equal_settings_the_first_is_chosen(place: Place, tmp_path: Path) -> None:
    """The budget is larger than the image in both cases."""
    method = {"method": "san", "tune": {"max_pixels": [500_000, 400_000, 600_000]}}
    evaluated(small(place, methods=[method]), tmp_path / "run", only_tune=True)
    choice = json.loads((tmp_path / "run/chosen.json").read_text())["san"]
    assert len({score for _, score in choice["tried"]}) == 1
    assert choice["chosen"] == {"max_pixels": 500_000}


def test_settings_that_are_fixed_are_not_taken_over_from_another(
    place: Place, tmp_path: Path
) -> None:
    """Else a setting that the recipe fixes would have another value, and no word of it."""
    methods = [
        {"method": "san", "tune": {"alpha": [1.0, 0.9]}},
        {"method": "tta", "same_as": "san", "settings": {"alpha": 0.0, **ONE_VIEW}},
    ]
    try:
        config = as_evaluation(small(place, methods=methods))
    except ValueError as error:  # just as well
        assert "alpha" in str(error)  # noqa: PT017
        return
    package_evaluate(config, tmp_path / "run")
    table = rows(tmp_path / "run/tables/domains.csv")
    found = next(row for row in table if row["method"] == "tta" and row["domain"] == "dim")
    expected = slow_miou(samples_of(place, "dim", "tta", alpha=0.0, **ONE_VIEW))
    assert close(found["mIoU"], expected)


class Reading(list[tuple[str, bool]]):
    """Takes down each image that is read, and whether settings were chosen by then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
        super().__init__()
        real = Dataset.read

        def read(dataset: Dataset, pair: Any) -> Any:
            self.append((str(pair.image), (run / "chosen.json").exists()))
            return real(dataset, pair)

        monkeypatch.setattr(Dataset, "read", read)


def test_no_target_is_read_before_settings_are_final(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    reading = Reading(monkeypatch, run)
    written = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda *a, **k: written.append(str(a[1])) or real(*a, **k))
    methods = [*small(place)["methods"], {"method": "tta", "same_as": "san", "settings": ONE_VIEW}]
    validation, targets = place.domain("val", limit=2), [place.domain("dim", limit=2)]
    recipe = small(place, methods=methods, validation=validation, targets=targets, pictures=1)
    evaluated(recipe, run)
    assert len(list((run / "pictures").glob("*.png"))) == 4  # the best and the worst of each
    after = [chosen for path, chosen in reading if "/dim/" in path]
    assert after
    assert all(after)
    assert [path for path, chosen in reading if not chosen]
    assert written.count(str(run / "chosen.json")) <= 1


def test_tuning_reads_no_target(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Reading(monkeypatch, tmp_path / "run")
    path = write_recipe(tmp_path / "r.yaml", small(place))
    assert run_cli("tune", path, "-o", tmp_path / "run") == 0
    assert reading
    assert not [path for path, _ in reading if "/dim/" in path]
    assert (tmp_path / "run/chosen.json").exists()


def test_a_share_has_all_settings_before_it_reads_a_target(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = small(place, methods=[{"method": "san", "tune": {"alpha": [0.0, 0.3]}}])
    run = tmp_path / "run"
    reading = Reading(monkeypatch, run)
    evaluated(content, run, shard=Shard(2, 2))
    read = {Path(path).name for path, _ in reading if "/dim/images/" in path}
    assert read == {"01.png"}, "the share of the target"
    assert {Path(path).name for path, _ in reading if "/val/images/" in path} == {
        "00.png",
        "01.png",
        "02.png",
    }, "all need the settings"
    assert not [path for path, chosen in reading if "/dim/" in path and not chosen]
    assert not (run / "tables").exists()


def test_settings_in_the_folder_are_not_believed(
    content: dict[str, Any], run: Path, tmp_path: Path
) -> None:
    """They follow from the rows."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    written = (run / "chosen.json").read_bytes()
    changed = json.loads(written)
    changed["SaN"]["chosen"] = {"alpha": 0.123}
    (copy / "chosen.json").write_text(json.dumps(changed))
    evaluated(content, copy)
    assert (copy / "chosen.json").read_bytes() == written


# tables


def test_the_table_of_domains_is_that_of_slow_scores(run: Path, place: Place) -> None:
    table = {(row["method"], row["domain"]): row for row in rows(run / "tables/domains.csv")}
    found = settings_found(place)
    references = {"source two": None, "source": None, "SaN two": "source two"}
    for label, (method, nets, settings) in found.items():
        for name in ("val", "dim", "dark"):
            row = table.pop((label, name))
            samples = samples_of(place, name, method, nets, **settings)
            assert row["images"] == str(len(samples))
            assert row["failed"] == "0"
            expected = {
                "mIoU": slow_miou(samples),
                "pixel_accuracy": slow_accuracy(samples),
                "ECE_10": slow_pooled_ece(samples, 10),
                "ECE_15": slow_pooled_ece(samples, 15),
                "ECE_class": slow_class_ece(samples),
            }
            reference = references.get(label, "source")
            if reference is not None:
                before = samples_of(place, name, *found[reference][:2])
                expected |= changes_of(samples, before)
            for column, value in expected.items():
                assert close(row[column], value), (label, name, column, row[column], value)
            if reference is None:
                assert row["change"] == row["worse"] == row["worse_10"] == ""
            else:
                low, high = float(row["change_low"]), float(row["change_high"])
                assert low <= high
    assert {domain for _, domain in table} == {"mean of targets"}


def changes_of(after: tuple[Sample, ...], before: tuple[Sample, ...]) -> dict[str, float]:
    by_image = [
        slow_miou([one]) - slow_miou([other]) for one, other in zip(after, before, strict=True)
    ]
    return {
        "change": slow_miou(after) - slow_miou(before),
        "worse": sum(change < 0 for change in by_image) / len(by_image),
        "worse_5": sum(change < -0.05 for change in by_image) / len(by_image),
        "worse_10": sum(change < -0.1 for change in by_image) / len(by_image),
    }


def test_the_mean_is_over_the_targets_alone(run: Path) -> None:
    table = {(row["method"], row["domain"]): row for row in rows(run / "tables/domains.csv")}
    for label in ("source", "SaN", "adapted"):
        mean = table[label, "mean of targets"]
        for column in ("mIoU", "ECE_10", "ECE_15", "ECE_class", "change", "worse", "worse_5"):
            parts = [table[label, name][column] for name in ("dim", "dark")]
            if "" in parts:
                assert mean[column] == ""
            else:
                assert close(mean[column], sum(map(float, parts)) / 2), (label, column)
        assert mean["images"] == str(3 + 2)


def test_tables_of_classes_and_images_are_those_of_slow_scores(run: Path, place: Place) -> None:
    found = settings_found(place)
    classes = {
        (row["method"], row["domain"], row["class"]): row
        for row in rows(run / "tables/classes.csv")
    }
    images = {
        (row["method"], row["domain"], row["image"]): row for row in rows(run / "tables/images.csv")
    }
    for label in ("source", "SaN", "ensemble", "SaN two"):
        method, nets, settings = found[label]
        for name in ("val", "dim", "dark"):
            samples = samples_of(place, name, method, nets, **settings)
            for c, score in enumerate(slow_ious(samples)):
                row = classes[label, name, CLASSES[c]]
                assert close(row["IoU"], score)
                assert int(row["pixels"]) == sum(int((s.label == c).sum()) for s in samples)
            for number, sample in enumerate(samples):
                row = next(row for key, row in images.items() if key[:2] == (label, name)
                           and key[2].endswith(f"{number:02}"))  # fmt: skip
                assert close(row["mIoU"], slow_miou([sample]))


def test_sweeps_are_shown_and_choose_nothing(run: Path, place: Place) -> None:
    table = rows(run / "tables/sweeps.csv")
    assert [row["domain"] for row in table] == ["val", "dim", "dark"]
    for row in table:
        assert (row["method"], row["setting"], row["value"]) == ("SaN", "alpha", "0.7")
        samples = samples_of(place, row["domain"], "san", alpha=0.7)
        assert close(row["mIoU"], slow_miou(samples))
        assert close(row["ECE_10"], slow_pooled_ece(samples, 10))
    for choice in json.loads((run / "chosen.json").read_text()).values():
        assert 0.7 not in choice["chosen"].values()
        assert not [tried for tried, _ in choice["tried"] if 0.7 in tried.values()]


def test_nothing_failed_and_all_was_timed(run: Path) -> None:
    assert rows(run / "tables/failed.csv") == []
    for row in rows(run / "tables/times.csv"):
        assert float(row["ms_median"]) > 0


def test_networks_are_the_same_to_the_bit_afterwards(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[Any, Any]] = []

    def opened(network: Any, trust: bool) -> Any:
        model = open_network(network, trust)
        kept.append((model, snapshot(model)))
        return model

    monkeypatch.setattr(sys.modules["selfadapt.protocol.evaluate"], "open_network", opened)
    one_each = deepcopy(content)
    for domain in (one_each["validation"], *one_each["targets"]):
        domain["limit"] = 1
    evaluated(one_each, tmp_path / "run")
    assert len(kept) == 2
    for model, before in kept:
        assert_same(before, snapshot(model))
    for (model, _), network in zip(kept, content["networks"].values(), strict=True):
        on_disk = load_model(network["place"]).state_dict()
        assert all(torch.equal(value, on_disk[n]) for n, value in model.state_dict().items())


def test_an_image_without_a_pixel_that_counts_is_no_worse(place: Place, tmp_path: Path) -> None:
    root = Path(shutil.copytree(place.root / "dim", tmp_path / "partly"))
    path = root / "labels/01.png"
    Image.fromarray(np.full((64, 96), IGNORE, np.uint8)).save(path)
    methods = [{"method": "source"}, {"method": "p-bn"}]
    content = small(place, targets=[place.domain("dim") | {"root": str(root)}], methods=methods)
    evaluated(content, tmp_path / "run")
    row = rows(tmp_path / "run/tables/domains.csv")[-1]
    assert (row["method"], row["domain"], row["images"]) == ("p-bn", "partly", "3")
    counting = [0, 2]
    after, before = (
        tuple(samples_of(place, "dim", method)[number] for number in counting)
        for method in ("p-bn", "source")
    )
    for column, value in changes_of(after, before).items():
        assert close(row[column], value), column
    assert close(row["mIoU"], slow_miou(after))


def test_a_domain_without_a_pixel_that_counts_is_not_perfectly_calibrated(
    place: Place, tmp_path: Path
) -> None:
    """It has no score at all; a zero would also lower the mean of the targets."""
    root = Path(shutil.copytree(place.root / "dark", tmp_path / "blank"))
    for path in (root / "labels").iterdir():
        Image.fromarray(np.full((64, 96), IGNORE, np.uint8)).save(path)
    targets = [place.domain("dim"), place.domain("dark") | {"root": str(root)}]
    run = evaluated(small(place, targets=targets), tmp_path / "run")
    for row in rows(run / "tables/domains.csv"):
        if row["domain"] == "blank":
            for column in ("mIoU", "pixel_accuracy", "ECE_10", "ECE_15", "ECE_class", "worse"):
                assert row[column] == "", column


def test_the_quality_of_an_image_is_kept_and_compared_with_its_iou(
    place: Place, tmp_path: Path
) -> None:
    methods = [{"method": "source"}, {"method": "self-adapt", "settings": {"steps": 1}}]
    run = evaluated(small(place, methods=methods), tmp_path / "run")
    table = [row for row in rows(run / "tables/images.csv") if row["domain"] == "dim"]
    source, adapted = ([row for row in table if row["method"] == m["method"]] for m in methods)
    assert [row["quality"] for row in source] == ["", "", ""]
    method = create_method("self-adapt", load_model(place.net()), steps=1)
    paths = sorted((place.root / "dim/images").iterdir())
    for row, path in zip(adapted, paths, strict=True):
        assert float(row["quality"]) == pytest.approx(method(path).quality, abs=1e-4)
    assert run_cli("report", run, "-o", tmp_path / "report") == 0
    shown = rows(tmp_path / "report/tables/quality.csv")
    pairs = [[float(row[column]) for row in adapted] for column in ("quality", "mIoU")]
    assert [row["method"] for row in shown] == ["self-adapt"]
    assert float(shown[0]["dim"]) == pytest.approx(100 * spearmanr(*pairs).statistic)


# classes of the network and classes to score


@pytest.fixture(scope="module")
def wide(place: Place) -> Place:
    """A network of 19 classes and domains whose labels hold some of them."""
    model = create_model("deeplabv1_resnet18_slim", classes="cityscapes-19")
    torch.nn.init.normal_(list(model.parameters())[-1], generator=torch.manual_seed(0))
    save_model(model, place.root / "wide.safetensors")
    rng = np.random.default_rng(0)
    for name, source in (("wide val", "val"), ("wide dim", "dim")):
        shutil.copytree(place.root / source / "images", place.root / name / "images")
        (place.root / name / "labels").mkdir()
        for path in (place.root / name / "images").iterdir():
            ids = np.array([0, 10, 11, 12, 13, 15, IGNORE], np.uint8)[rng.integers(0, 7, (64, 96))]
            Image.fromarray(ids).save(place.root / name / "labels" / path.name)
    return place


def test_classes_are_merged_by_their_probabilities(wide: Place, tmp_path: Path) -> None:
    """The network tells riders from persons and buses from cars; CARLA's classes do not."""
    space, own = CLASS_SPACES["carla-13"], CLASS_SPACES["cityscapes-19"].names
    as_domain = {"classes": "cityscapes-19"}
    content = small(
        wide,
        networks={"wide": {"place": wide.net("wide")}},
        validation=wide.domain("wide val") | as_domain,
        targets=[wide.domain("wide dim") | as_domain],
        methods=[{"method": "source"}],
        classes="carla-13",
    )
    evaluated(content, tmp_path / "run")
    merged = []
    for label, probs in segmented(wide.root / "wide dim", (wide.net("wide"),), "source", "{}"):
        lookup = np.array([space.index(name) for name in own] + [IGNORE] * (256 - len(own)))
        summed = np.zeros((len(space.names), *label.shape), np.float32)
        for c, name in enumerate(own):
            summed[space.index(name)] += probs[c]
        merged.append(Sample(lookup[label], summed))
    row = rows(tmp_path / "run/tables/domains.csv")[-1]
    assert close(row["mIoU"], slow_miou(merged))
    assert close(row["ECE_10"], slow_pooled_ece(merged, 10))
    assert close(row["ECE_class"], slow_class_ece(merged))


# what is refused

Change = Callable[[dict[str, Any], Place, Path], None]


def refused(content: dict[str, Any], tmp_path: Path, capsys: Any) -> str:
    """Run the command line, check that nothing was written, and return the message."""
    path, run = write_recipe(tmp_path / "recipe.yaml", content), tmp_path / "run"
    capsys.readouterr()
    code = run_cli("evaluate", path, "-o", run)
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert code == 2, said
    assert not run.exists(), "something was written"
    return " ".join(said.split())


def same_folder(content: dict[str, Any], place: Place, tmp_path: Path) -> None:
    root = place.root / "dim" / ".." / "val"
    content["targets"].append(place.domain("val", name="new") | {"root": str(root)})


def linked_folder(content: dict[str, Any], place: Place, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(place.root / "val")
    content["targets"].append(place.domain("val") | {"root": str(tmp_path / "linked")})


def copied_folder(content: dict[str, Any], place: Place, tmp_path: Path) -> None:
    shutil.copytree(place.root / "val", tmp_path / "copy")
    content["targets"].append(place.domain("val") | {"root": str(tmp_path / "copy")})


def one_copied_image(content: dict[str, Any], place: Place, tmp_path: Path) -> None:
    write_domain(tmp_path / "mixed", 2, 77)
    for kind in ("images", "labels"):
        shutil.copy(place.root / "val" / kind / "01.png", tmp_path / "mixed" / kind / "zz.png")
    content["targets"].append(place.domain("val") | {"root": str(tmp_path / "mixed")})


def copied_target(content: dict[str, Any], place: Place, tmp_path: Path) -> None:
    shutil.copytree(place.root / "dim", tmp_path / "copy")
    content["targets"].append(place.domain("dim") | {"root": str(tmp_path / "copy")})


def part_of_the_folder(content: dict[str, Any], place: Place, tmp_path: Path) -> None:
    content["targets"].append(place.domain("val", name="new", limit=1))


def set_at(*keys: Any, value: Any) -> Change:
    """Return a change of one value in the recipe."""

    def change(content: dict[str, Any], place: Place, tmp_path: Path) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def methods(*given: dict[str, Any]) -> Change:
    return set_at("methods", value=[{"method": "source"}, *given])


def without(key: str) -> Change:
    return lambda content, place, tmp_path: content.pop(key)


def foreign_network(content: dict[str, Any], place: Place, tmp_path: Path) -> None:
    model = create_model("deeplabv1_resnet18_slim", classes=["cat", "dog", "bird"])
    save_model(model, tmp_path / "foreign.safetensors")
    content["networks"]["one"]["place"] = str(tmp_path / "foreign.safetensors")


def differing_networks(content: dict[str, Any], place: Place, tmp_path: Path) -> None:
    """Their classes are the same, in another order."""
    model = create_model("deeplabv1_resnet18_slim", classes=CLASSES[::-1])
    save_model(model, tmp_path / "turned.safetensors")
    content["networks"]["two"]["place"] = str(tmp_path / "turned.safetensors")
    content["methods"].append({"method": "ensemble"})


def torn_network(content: dict[str, Any], place: Place, tmp_path: Path) -> None:
    whole = Path(place.net()).read_bytes()
    (tmp_path / "torn.safetensors").write_bytes(whole[: len(whole) // 2])
    content["networks"]["one"]["place"] = str(tmp_path / "torn.safetensors")


def empty_folder(content: dict[str, Any], place: Place, tmp_path: Path) -> None:
    for kind in ("images", "labels"):
        (tmp_path / "empty" / kind).mkdir(parents=True)
    content["targets"][0]["root"] = str(tmp_path / "empty")


def other_sizes(which: str) -> Change:
    def change(content: dict[str, Any], place: Place, tmp_path: Path) -> None:
        root = Path(shutil.copytree(place.root / "dim", tmp_path / "sizes"))
        for number, path in enumerate(sorted((root / "images").iterdir())):
            rng = np.random.default_rng(number)
            Image.fromarray(rng.integers(0, 255, (48, 64, 3), np.uint8)).save(path)
        one = content["validation"] if which == "validation" else content["targets"][0]
        one["root"] = str(root)

    return change


REFUSED: dict[str, tuple[Change, str]] = {
    "no validation domain": (without("validation"), "validation"),
    "validation is null": (set_at("validation", value=None), "no validation domain is named"),
    "validation is a target": (
        lambda c, place, tmp: c["targets"].append(place.domain("val")),
        "validation domain val is also the target",
    ),
    "validation is a target of another name": (
        lambda c, place, tmp: c["targets"].append(place.domain("val", name="new")),
        "validation domain val is also the target domain new",
    ),
    "validation is a target by dataset and split": (
        lambda c, place, tmp: c.update(
            validation={"dataset": "streets", "split": "dusk", "limit": 2},
            targets=[{"dataset": "streets", "split": "dusk", "limit": 3}],
        ),
        "validation domain streets/dusk is also the target",
    ),
    "validation is a target by another path": (same_folder, "validation domain val is also"),
    "validation is a target by a link": (linked_folder, "validation domain val is also"),
    "validation is part of a target": (part_of_the_folder, "validation domain val is also"),
    "validation is a copy of a target": (copied_folder, "is the same image as"),
    "validation has an image of a target": (one_copied_image, "is the same image as"),
    "a target twice": (
        lambda c, place, tmp: c["targets"].append(place.domain("dim")),
        "dim.* have images in common|2 domains are called 'dim'",
    ),
    "a target twice with two names": (
        lambda c, place, tmp: c["targets"].append(place.domain("dim", name="new")),
        "dim and new have images in common",
    ),
    "a copy of a target": (copied_target, "is the same image as"),
    "unknown method": (
        methods({"method": "self-adpt"}),
        "unknown method 'self-adpt'; did you mean 'self-adapt'",
    ),
    "unknown setting": (
        methods({"method": "san", "settings": {"alpah": 0.1}}),
        "no setting 'alpah'; did you mean 'alpha'",
    ),
    "unknown tuned setting": (
        methods({"method": "san", "tune": {"psi": [0.1]}}),
        "'san' has no setting 'psi'",
    ),
    "unknown swept setting": (
        methods({"method": "san", "sweep": {"psi": [0.1]}}),
        "'san' has no setting 'psi'",
    ),
    "fixed and tuned": (
        methods({"method": "san", "settings": {"alpha": 0.1}, "tune": {"alpha": [0.1, 0.2]}}),
        "alpha is fixed and tuned",
    ),
    "a grid without values": (
        methods({"method": "san", "tune": {"alpha": []}}),
        "alpha must have values to try",
    ),
    "a sweep without values": (
        methods({"method": "san", "sweep": {"alpha": []}}),
        "alpha must have values",
    ),
    "a value twice": (
        methods({"method": "san", "tune": {"alpha": [0.1, 0.2, 0.1]}}),
        "values of alpha must differ",
    ),
    "a value twice in two spellings": (
        methods({"method": "san", "tune": {"alpha": [0, 0.0]}}),
        "values of alpha must differ",
    ),
    "a grid that is no list": (
        methods({"method": "san", "tune": {"alpha": 0.1}}),
        "(alpha|tune).*0.1",
    ),
    "a method twice": (
        methods({"method": "source"}),
        "2 methods are called 'source'; give one of them a label",
    ),
    "a label twice": (
        methods({"method": "san", "label": "x"}, {"method": "tta", "label": "x"}),
        "2 methods are called 'x'",
    ),
    "unknown network": (
        methods({"method": "san", "network": "onee"}),
        "no network 'onee'; did you mean 'one'",
    ),
    "two networks for one": (
        methods({"method": "san", "network": ["one", "two"]}),
        "san takes one network",
    ),
    "no network for a method": (methods({"method": "san", "network": []}), "network"),
    "no network for an ensemble": (methods({"method": "ensemble", "network": []}), "network"),
    "same as something later": (
        methods({"method": "tta", "same_as": "san"}, {"method": "san", "tune": {"alpha": [0, 1]}}),
        "tta: same_as must be the label of a method that comes before",
    ),
    "same as something that is not tuned": (
        methods({"method": "tta", "same_as": "source"}),
        "tta: same_as must be .* tunes something, got 'source'",
    ),
    "same as itself": (
        methods({"method": "san", "same_as": "san", "tune": {"alpha": [0, 1]}}),
        "same_as must be",
    ),
    "no targets": (set_at("targets", value=[]), "targets must name at least one"),
    "targets left out": (without("targets"), "targets"),
    "no methods": (set_at("methods", value=[]), "methods must name at least one"),
    "methods left out": (without("methods"), "methods"),
    "no networks": (set_at("networks", value={}), "networks must name at least one"),
    "networks left out": (without("networks"), "networks"),
    "unknown key": (set_at("validationn", value=1), "validationn"),
    "unknown key of a domain": (set_at("validation", "spilt", value="all"), "spilt"),
    "unknown key of a method": (methods({"method": "san", "tuned": {"alpha": [0]}}), "tuned"),
    "unknown key of a network": (set_at("networks", "one", "pace", value="x"), "pace"),
    "targets is no list": (set_at("targets", value="dim"), "targets"),
    "a number for a method": (set_at("methods", value=[{"method": 3}]), "method"),
    "pictures is a word": (set_at("pictures", value="many"), "pictures.*many"),
    "unknown search": (
        methods({"method": "san", "tune": {"alpha": [0, 1]}, "search": "random"}),
        "search|grid",
    ),
    "unknown way with unreadable images": (
        set_at("unreadable", value="skip"),
        "unreadable.*go on.*stop",
    ),
    "unknown class space": (set_at("classes", value="cityscapes"), "unknown class space"),
    "a class twice": (set_at("classes", value=["road", "car", "car"]), "car"),
    "unknown device": (set_at("device", value="tpu9"), "no device 'tpu9'"),
    "unknown dataset": (set_at("targets", 0, "dataset", value="citiscapes"), "citiscapes"),
    "no such folder": (set_at("targets", 0, "root", value="/no/such"), "/no/such"),
    "missing checkpoint": (
        set_at("networks", "one", "place", value="/no/such.safetensors"),
        "there is no file /no/such.safetensors",
    ),
    "torn checkpoint": (torn_network, "torn.safetensors"),
    "network of other classes": (foreign_network, "(cat|class)"),
    "an ensemble of differing networks": (differing_networks, "must have the same classes"),
    "labels of other classes": (
        set_at("targets", 0, "classes", value=["cat", "dog", "bird"]),
        "has no class of the requested",
    ),
    "empty folder": (empty_folder, "empty"),
    "labels of another size in the validation domain": (other_sizes("validation"), "size"),
    "labels of another size in a target": (other_sizes("target"), "size"),
    "a setting out of range": (methods({"method": "san", "settings": {"alpha": 7}}), "alpha"),
    "a setting of the wrong type": (
        methods({"method": "san", "settings": {"alpha": "high"}}),
        "alpha",
    ),
    "a value to try out of range": (
        methods({"method": "san", "tune": {"alpha": [0.1, 7]}}),
        "alpha",
    ),
    "a swept value out of range": (
        methods({"method": "san", "sweep": {"alpha": [0.1, 7]}}),
        "alpha",
    ),
    "a bad mode": (methods({"method": "san", "settings": {"mode": "papr"}}), "papr"),
    "views that are no list": (
        methods({"method": "tta", "settings": {"views": 1}}),
        r"views must be a list such as \[1, 0.5 flipped\], got 1",
    ),
    "a word for a domain": (
        set_at("validation", value="wilddash"),
        "validation.*wilddash",
    ),
    "a word for a method": (
        set_at("methods", value=["san"]),
        "methods.*san",
    ),
    "a word for a network": (
        set_at("networks", value={"one": "net.pt"}),
        "networks.*net.pt",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_recipe_is_refused(name: str, place: Place, tmp_path: Path, capsys: Any) -> None:
    """With a message that names the setting, before anything is written."""
    networks = {"one": {"place": place.net()}, "two": {"place": place.net("two")}}
    content = deepcopy(small(place, networks=networks))
    change, reason = REFUSED[name]
    change(content, place, tmp_path)
    assert_says(refused(content, tmp_path, capsys), reason)


CODE = {"class_path": "evil.Code"}


@pytest.mark.parametrize(
    "change",
    [
        set_at("validation", value="evil.Code"),
        set_at("validation", value=CODE),
        set_at("networks", value={"one": "evil.Code"}),
        set_at("methods", value=["evil.Code"]),
        methods({"method": "san", "settings": {"alpha": CODE}}),
        methods({"method": "san", "tune": {"alpha": [CODE]}}),
    ],
)
@pytest.mark.parametrize("how", ["file", "flag"])
def test_a_recipe_runs_no_code(
    change: Any, how: str, place: Place, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """Neither may it name a module, which would be imported to see what it is."""
    (tmp_path / "evil.py").write_text("open('ran', 'w')\nclass Code: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    good = small(place)
    content = deepcopy(good)
    change(content, place, tmp_path)
    words = ["evaluate", write_recipe(tmp_path / "r.yaml", content if how == "file" else good)]
    if how == "flag":
        words += [f"--{k}={json.dumps(v)}" for k, v in content.items() if good[k] != v]
    assert run_cli(*words, "-o", tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "allowlist" not in error, "advice to allow it"
    assert not (tmp_path / "ran").exists()


def bomb() -> str:
    """Return seven lists, each of which holds the one before ten times."""
    lines = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 8)]
    return "\n".join(["a0: &a0 [x, y]", *lines])


@pytest.mark.parametrize("text", [bomb(), "a: &a [*a]"], ids=["a bomb", "a list in itself"])
def test_settings_that_unfold_without_end_are_refused(
    text: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "r.yaml").write_text(text)
    assert run_cli("evaluate", tmp_path / "r.yaml", "-o", tmp_path / "run") == 2
    assert "expands to over 100000 values" in capsys.readouterr().err


def test_sizes_are_those_of_photos_that_are_turned(place: Place, tmp_path: Path) -> None:
    """A camera on its side notes that in the file, whose pixels lie the other way."""
    mine = copy_domains(place, tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6
    for path in sorted((mine.root / "dim/images").iterdir()):
        turned = Image.open(path).transpose(Image.Transpose.ROTATE_90)
        turned.save(path.with_suffix(".jpg"), exif=exif)
        path.unlink()
    assert num_rows(evaluated(small(mine), tmp_path / "run")) == 15


def test_a_recipe_by_its_flag_is_looked_at_too(place: Place, tmp_path: Path, capsys: Any) -> None:
    path = write_recipe(tmp_path / "r.yaml", small(place))
    path.write_text(path.read_text() + "pictures: 1\n")
    for flag in (["--recipe", path], [f"--recipe={path}"]):
        assert run_cli("evaluate", *flag, "-o", tmp_path / "run") == 2
        assert "duplicate key 'pictures'" in capsys.readouterr().err


def assert_says(text: str, reason: str) -> None:
    assert re.search(reason, text), text


def test_what_is_refused_leaves_a_run_that_is_there(
    place: Place, tmp_path: Path, capsys: Any
) -> None:
    """Also with --overwrite, which removes nothing before the recipe is known to be good."""
    run = evaluated(small(place), tmp_path / "run")
    before = files_of(run)
    for name in ("validation is a copy of a target", "unknown setting", "missing checkpoint"):
        content = deepcopy(small(place))
        inside = tmp_path / name
        inside.mkdir()
        REFUSED[name][0](content, place, inside)
        path = write_recipe(inside / "recipe.yaml", content)
        assert run_cli("evaluate", path, "-o", run, "--overwrite") == 2
        assert files_of(run) == before, name


def test_a_domain_may_be_another_split_of_the_same_dataset(place: Place, tmp_path: Path) -> None:
    """Only images in common are refused."""
    content = small(
        place,
        networks={"streets": {"place": "streets"}},
        validation={"dataset": "streets", "split": "dusk", "limit": 1},
        targets=[{"dataset": "streets", "split": "haze", "limit": 1}],
        methods=[{"method": "source"}],
        classes="streets-9",
    )
    as_evaluation(content)
    with pytest.raises(ValueError, match="streets/dusk is also the target"):
        as_evaluation({**content, "targets": [content["validation"] | {"name": "again"}]})


def test_the_command_line_says_what_came_out(place: Place, tmp_path: Path, capsys: Any) -> None:
    path, run = write_recipe(tmp_path / "recipe.yaml", small(place)), tmp_path / "run"
    assert run_cli("evaluate", path, "-o", run) == 0
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    table = {(row["method"], row["domain"]): row for row in rows(run / "tables/domains.csv")}
    for method in ("source", "san"):
        assert f"{100 * float(table[method, 'dim']['mIoU']):.2f}" in out
    assert "of 2 tried" in out
    assert num_rows(run) == 3 * 3 + 2 * 3  # source and two candidates, then source and the best


def test_equal_trials_are_one(place: Place, tmp_path: Path) -> None:
    """SaN with alpha 0.3 stands in two rows of the recipe, and is segmented once."""
    given = [
        {"method": "san", "settings": {"alpha": 0.3}},
        {"method": "san", "label": "again", "settings": {"alpha": 0.3, "mode": "paper"}},
    ]
    run = evaluated(small(place, methods=given), tmp_path / "run")
    assert num_rows(run) == 6
    table = rows(run / "tables/domains.csv")
    assert [row["mIoU"] for row in table[:2]] == [row["mIoU"] for row in table[2:]]
    assert Trial("san", ("one",), {"alpha": 1}).key == Trial("san", ("one",), {"alpha": 1.0}).key


def test_a_network_with_one_output_is_scored_as_two_classes(place: Place, tmp_path: Path) -> None:
    """Its class is that of pixels which are more likely than not of it."""
    model = seeded(lambda: create_model("deeplabv1_resnet18_slim", classes=["car"]))
    save_model(model, tmp_path / "binary.safetensors")
    content = small(
        place,
        networks={"one": {"place": str(tmp_path / "binary.safetensors")}},
        classes=["background", "car"],
        methods=[{"method": "source"}],
    )
    run = evaluated(content, tmp_path / "run")
    (row,) = [r for r in rows(run / "tables/domains.csv") if r["domain"] == "dim"]
    hits = cars = 0
    for path in sorted((place.root / "dim/images").iterdir()):
        label = np.asarray(Image.open(place.root / "dim/labels" / path.name))
        there = label == CLASSES.index("car")
        hits += int((Source(model)(path).label.numpy() == 1)[there].sum())
        cars += int(there.sum())
    assert 0 < hits < cars
    assert float(row["mIoU"]) == pytest.approx(hits / cars, abs=1e-4)


def test_one_class_alone_cannot_be_scored(place: Place, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least two classes must be scored, got road"):
        evaluated(small(place, classes=["road"]), tmp_path / "run")
