"""What a result writes and shows is what ``selfadapt predict`` writes of the same image."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

import selfadapt
from conftest import random_image
from runs import run_cli
from selfadapt.images import to_pil
from selfadapt.result import Result

KINDS = ("label", "color", "overlay", "confidence", "panel", "probs")


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "street.png"
    to_pil(random_image(24, 40)).save(path)
    return path


@pytest.fixture
def result() -> Result:
    probs = torch.tensor([[[0.9, 0.2], [0.6, 0.1]], [[0.1, 0.8], [0.4, 0.9]]])
    return Result(probs=probs)


def test_a_result_writes_the_files_that_predict_writes(photo: Path, tmp_path: Path) -> None:
    command = ("predict", photo, "--model", "streets", "--method", "san", "--device", "cpu")
    assert run_cli(*command, "-o", tmp_path / "cli", "--outputs", *KINDS) == 0
    model = selfadapt.open_model("streets")
    result = selfadapt.create_method("san", model)(photo)
    paths = result.save(tmp_path / "mine", photo, outputs=KINDS, classes=model.spec.classes)
    assert sorted(paths) == sorted(KINDS)
    for path in (*paths.values(), tmp_path / "mine/classes.json", tmp_path / "mine/legend.png"):
        expected = tmp_path / "cli" / path.name
        if path.suffix == ".npz":  # a ZIP file has the time it was made
            with np.load(path) as file, np.load(expected) as other:
                assert np.array_equal(file["probs"], other["probs"])
        else:
            assert path.read_bytes() == expected.read_bytes(), path.name


@pytest.mark.parametrize("form", ["path", "PIL", "array", "tensor"])
def test_an_overlay_shows_any_form_of_the_image(form: str, photo: Path) -> None:
    levels = np.array(PILImage.open(photo))
    image: Any = {
        "path": photo,
        "PIL": PILImage.open(photo),
        "array": levels,
        "tensor": torch.from_numpy(levels).permute(2, 0, 1) / 255,
    }[form]
    probs = torch.zeros(2, 24, 40)
    probs[1, :, 20:] = 1
    classes = {"left": (10, 20, 30), "right": (250, 0, 0)}
    for known in (Result(probs=probs, image=image, classes=classes), Result(probs=probs)):
        overlay = np.asarray(known.overlay(None if known.image is not None else image,
                                           classes=classes, opacity=0.25))  # fmt: skip
        painted = np.full((24, 40, 3), (10, 20, 30))
        painted[:, 20:] = (250, 0, 0)
        assert np.abs(overlay - (0.75 * levels + 0.25 * painted)).max() <= 1


def test_a_label_image_has_the_classes_as_values_and_shows_their_colours(result: Result) -> None:
    image = result.label_image(classes={"a": (1, 2, 3), "b": None})
    assert np.asarray(image).tolist() == [[0, 1], [0, 1]]
    assert image.convert("RGB").getpixel((0, 0)) == (1, 2, 3)


def test_without_an_image_there_is_no_overlay(result: Result, tmp_path: Path) -> None:
    assert set(result.save(tmp_path / "out")) == {"label", "color", "confidence"}
    assert (tmp_path / "out/image_label.png").exists()
    with pytest.raises(ValueError, match="the image is needed to write overlay and panel"):
        result.save(tmp_path / "out", outputs=["overlay"], name="x")
    with pytest.raises(ValueError, match=r"give it, result.overlay\(image\)"):
        result.overlay()


def test_an_image_of_another_size_is_refused(result: Result, photo: Path, tmp_path: Path) -> None:
    for act in (result.overlay, lambda image: result.save(tmp_path / "out", image)):
        with pytest.raises(ValueError, match="size of the result, 2x2 pixels, got 40x24"):
            act(photo)
    assert not list((tmp_path / "out").glob("*"))


def test_files_are_replaced_when_asked_for_alone(result: Result, tmp_path: Path) -> None:
    result.save(tmp_path, name="a")
    with pytest.raises(FileExistsError, match=r"a_label.png would be replaced.*overwrite=True"):
        result.save(tmp_path, name="a")
    result.save(tmp_path, name="a", overwrite=True)
    result.save(tmp_path, name="b")
    with pytest.raises(FileExistsError, match=r"classes.json would be replaced"):
        result.save(tmp_path, name="c", classes=["road", "sky"])
    assert not (tmp_path / "c_label.png").exists()
    assert json.loads((tmp_path / "classes.json").read_text())[0]["name"] == "class 0"


@pytest.mark.parametrize("name", ["", "a/b", "../a"])
def test_a_name_is_no_folder(name: str, result: Result, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without folders"):
        result.save(tmp_path / "out", name=name)


def test_an_unknown_output_is_refused(result: Result, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown output 'colour'; did you mean 'color'"):
        result.save(tmp_path / "out", outputs="colour")
