"""What programs read: one JSON object, with what people are told."""

import json
from pathlib import Path
from typing import Any

import pytest

from runs import CLASSES, write_domain
from selfadapt import METHODS, MODELS
from selfadapt.cli import main


def printed(words: list[str], capsys: Any, code: int = 0) -> dict[str, Any]:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == code
    return json.loads(capsys.readouterr().out)


def test_methods_with_their_settings(capsys: Any) -> None:
    found = printed(["methods", "--json"], capsys)
    assert list(found) == list(METHODS)
    assert found["self-adapt"]["settings"]["psi"]["default"] == 0.7
    assert not found["tent"]["settings"]["interface"]["flag"]
    assert list(printed(["methods", "tent", "--json"], capsys)) == ["tent"]


def test_networks_with_their_size(capsys: Any) -> None:
    found = printed(["models", "--json"], capsys)
    assert list(found) == list(MODELS)
    assert found["deeplabv1_resnet50"]["parameters"] == 23546963
    assert found["deeplabv1_resnet50"]["stride"] == 8


def test_a_dataset_that_is_well_and_one_that_is_not(tmp_path: Path, capsys: Any) -> None:
    root = write_domain(tmp_path / "mine", 2, seed=0)
    words = ["check-data", "folder", str(root), "--classes", *CLASSES, "--json"]
    found = printed(words, capsys)
    assert found["pairs"] == {"folder/all": 2}
    assert found["problems"] == []
    assert sum(found["shares"].values()) == pytest.approx(1)
    (root / "labels/00.png").write_bytes(b"")
    assert "cannot be read" in printed(words, capsys, code=1)["problems"][0]


@pytest.mark.slow
def test_an_evaluation(tmp_path: Path, capsys: Any) -> None:
    words = [
        "evaluate", "streets-quick", "-o", str(tmp_path / "run"), "--json", "--pictures=0",
        "--threads=1",
        "--methods=[{method: source}, {method: san, settings: {alpha: 0.3}}]",
    ]  # fmt: skip
    found = printed(words, capsys)
    assert found["folder"] == str(tmp_path / "run")
    assert found["validation"] == "streets/dusk"
    assert found["failures"] == []
    for scores in found["scores"].values():
        assert all(0 < one["mIoU"] < 1 and 0 <= one["ECE"] < 1 for one in scores.values())
    assert found["scores"]["san"] != found["scores"]["source"]
