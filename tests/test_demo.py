from pathlib import Path

import numpy as np
import pytest
import torch

from selfadapt import demo
from selfadapt.demo import CLASSES, LOOKS, render


def test_streets_are_the_same_each_time_and_hold_every_class() -> None:
    image, _ = render("day", 3)
    again, _ = render("day", 3)
    assert torch.equal(image, again)
    assert 0 <= image.min() <= image.max() <= 1
    counts = sum(np.bincount(render("day", seed)[1].flatten(), minlength=6) for seed in range(5))
    assert (counts > 0).all()
    assert len(counts) == len(CLASSES)


def test_the_looks_share_the_labels_and_differ_in_light() -> None:
    images = {look: render(look, 1) for look in LOOKS}
    assert all(torch.equal(label, images["day"][1]) for _, label in images.values())
    brightness = {look: float(image.mean()) for look, (image, _) in images.items()}
    assert brightness["night"] < brightness["dusk"] < brightness["day"] < brightness["haze"]


def test_the_demo_writes_a_report_with_pictures(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(demo, "NUM_SCENES", 4)
    monkeypatch.setattr(demo, "TRAIN_STEPS", 2)
    monkeypatch.setattr(demo, "NUM_TARGETS", 1)
    report = demo.demo(tmp_path / "out")
    page = report.read_text()
    assert page.count("data:image/png;base64") == 2
    assert page.count("self-adaptation") >= 2
    assert "the report is in" in capsys.readouterr().out
    with pytest.raises(FileExistsError, match=r"report\.html would be replaced"):
        demo.demo(tmp_path / "out")
    assert report.read_text() == page
    report.unlink()
    with pytest.raises(FileExistsError, match=r"picture\.png would be replaced"):
        demo.demo(tmp_path / "out")
