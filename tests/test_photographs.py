"""Real photographs: what they meet in the library, at any size and by every reader."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image as PILImage
from torch import nn

import selfadapt
from conftest import needs_data
from runs import run_cli
from selfadapt.images import load_image
from selfadapt.method import UNLIKE
from selfadapt.modes import within_budget
from selfadapt.streets import render
from selfadapt.views import View

FOLDERS = ("camvid", "carla", "cityscapes", "wild", "bdd", "drive", "chase")
SIZES = ((1280, 720), (1242, 375), None)
"""Width and height of photographs as people have them; None: as it is stored."""
SUFFIXES = ("jpg", "png", "webp", "tif", "jpg", "bmp", "png")


def photographs(num: int) -> list[PILImage.Image]:
    """Return photographs of streets and of retinas, most of them enlarged to usual sizes."""
    pictures = []
    for index in range(num):
        name = FOLDERS[index % len(FOLDERS)]
        world = "vessels" if name in ("drive", "chase") else "street"
        files = sorted((needs_data(world, name) / "images").iterdir())
        picture = PILImage.open(files[index * 7 % len(files)]).convert("RGB")
        size = SIZES[index % len(SIZES)]
        pictures.append(picture if size is None else picture.resize(size))
    return pictures


@pytest.fixture(scope="module")
def streets() -> nn.Module:
    return selfadapt.open_model("streets")


def test_scaled_down_photographs_stay_in_the_range_of_images() -> None:
    white = torch.rand(3, 375, 1242, generator=torch.Generator().manual_seed(0)).round()
    for image in (white, *map(load_image, photographs(36))):
        for max_pixels in (100_000, 294_912):
            small = within_budget(image, "paper", max_pixels)
            assert small.min() >= 0
            assert small.max() <= 1
            assert torch.equal(load_image(small), small)


def test_a_float_image_may_be_off_by_rounding(tiny: nn.Module) -> None:
    image = torch.linspace(-9e-4, 1 + 9e-4, 3 * 32 * 48).reshape(3, 32, 48)
    loaded = load_image(image)
    assert torch.equal(loaded, image.clamp(0, 1))
    assert torch.equal(load_image(image.permute(1, 2, 0).numpy().astype(np.float64)), loaded)
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\], got values from -0.002 to 1"):
        load_image(image - 1.1e-3)


def test_photographs_are_segmented_at_their_own_size(streets: nn.Module) -> None:
    method = selfadapt.create_method("san", streets, max_pixels=20_000)
    for picture in photographs(36):
        result = method(picture)
        assert tuple(result.label.shape) == (picture.height, picture.width)
        assert 0 < result.confidence.min() <= result.confidence.max() <= 1 + 1e-5


def test_images_that_the_network_knows_nothing_of_are_noted(streets: nn.Module) -> None:
    method = selfadapt.create_method("tta", streets, scales=(0.5, 0.75), compare=False)
    for index in range(2):
        assert UNLIKE not in method(render("day", 40 + index)[0]).notes
        for world, scale in (("chase", 0.4), ("drive", 0.7)):
            file = sorted((needs_data("vessels", world) / "images").iterdir())[index]
            assert UNLIKE in method(View(scale).make(load_image(Path(file)))).notes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of photographs as people have them: from each place, in each format and size."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for index, picture in enumerate(photographs(len(FOLDERS) * len(SIZES))):
        name = f"{index:02}_{FOLDERS[index % len(FOLDERS)]}"
        picture.save(folder / f"{name}.{SUFFIXES[index % len(SUFFIXES)]}")
    return folder


def test_photographs_are_predicted(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    words = ("--model", "streets", "--steps", 1, "--max-pixels", 40_000, "--device", "cpu")
    assert run_cli("predict", folder, *words, "-o", out, "--outputs", "label", "panel") == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert 0 < len(notes) <= 4, notes  # scaled down, unlike others, not adapted, what else
    with (out / "predictions.csv").open(newline="") as file:
        rows = {row["output"]: row for row in csv.DictReader(file)}
    assert sorted(rows) == sorted(file.stem for file in folder.iterdir())
    for name, row in rows.items():
        assert row["status"] == "done"
        with PILImage.open(row["file"]) as picture, PILImage.open(out / f"{name}_label.png") as it:
            assert it.size == picture.size == (int(row["width"]), int(row["height"]))
    unlike = {name for name, row in rows.items() if UNLIKE in row["notes"]}
    assert unlike >= {"05_drive"}
    assert "00_camvid" not in unlike


def test_photographs_are_shown_in_the_demo(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfadapt.demo.run.MAX_SIDE", 200)
    words = ("--steps", 1, "--device", "cpu", "-o", tmp_path / "out")
    assert run_cli("demo", "--image", folder, *words) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    files = list(folder.iterdir())
    assert page.count("<figure>") == 5 * len(files) + 4  # in the strip on top
    assert all(f"<h2>{file.name}</h2>" in page for file in files)


def test_photographs_are_evaluated(tmp_path: Path) -> None:
    def domain(name: str, scale: float) -> dict[str, Any]:
        root = {"dataset": "folder", "root": str(needs_data("street", name)), "split": "all"}
        return {**root, "classes": "cityscapes-19", "scale": scale, "limit": 4, "name": name}

    recipe = {
        "networks": {"streets": {"place": "streets"}},
        "classes": "streets-9",
        "validation": domain("camvid", 0.5),
        "targets": [domain("wild", 0.7), domain("cityscapes", 0.5)],
        "methods": [
            {"method": "source", "label": "t-BN"},
            {"method": "san", "label": "SaN", "tune": {"alpha": [0, 0.1]}},
            {"method": "tta", "label": "TTA", "same_as": "SaN", "settings": {"scales": [0.5]}},
        ],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert run_cli("evaluate", tmp_path / "recipe.yaml", "-o", tmp_path / "run") == 0
    with (tmp_path / "run/tables/domains.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["method"] for row in rows} == {"t-BN", "SaN", "TTA"}
    assert all(row["failed"] == "0" and 0 < float(row["mIoU"]) < 100 for row in rows)
