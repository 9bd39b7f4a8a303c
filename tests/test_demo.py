from pathlib import Path

import pytest

from selfadapt import demo


def test_the_demo_writes_a_report_with_pictures(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(demo, "NUM_IMAGES", 1)
    monkeypatch.setattr(demo, "TARGETS", ("haze", "night"))
    monkeypatch.setattr(demo, "STEPS", 1)
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
