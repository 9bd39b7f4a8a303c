import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from selfadapt.bench import (
    Timing,
    add_ratios,
    describe_machine,
    noise,
    parse_size,
    run_bench,
    write_bench,
)
from selfadapt.cli import main


@pytest.fixture(autouse=True)
def small_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the rate on smaller matrices, and count operations for a smaller image."""
    monkeypatch.setattr("selfadapt.bench.COUNT_SIZE", (64, 128))
    monkeypatch.setattr("selfadapt.bench.MATRIX_SIZE", 256)


def timing(work: str, ms: float) -> Timing:
    return Timing("net", "20x10", work, ms, 0, ms, None, 1, 1, 1)


def test_rows_are_set_against_the_plain_ones() -> None:
    rows = add_ratios([
        timing("TTA", 10),
        timing("self-adaptation, 3 steps, plain", 200),
        timing("self-adaptation, 3 steps", 50),
        timing("self-adaptation, 10 steps, plain", 480),
        timing("self-adaptation, 10 steps", 120),
        timing("self-adaptation, real-time", 25),
    ])  # fmt: skip
    by_work = {row.work: row for row in rows}
    assert by_work["self-adaptation, 3 steps"].ratio == 4
    assert by_work["self-adaptation, 10 steps"].steps == pytest.approx(100 / 120)
    assert by_work["self-adaptation, 10 steps"].views == pytest.approx(10 / 120)
    assert by_work["self-adaptation, 10 steps, plain"].steps == pytest.approx(400 / 480)
    assert by_work["TTA"].ratio == 1


def test_no_cell_of_the_table_is_a_formula(tmp_path: Path) -> None:
    write_bench([Timing("=1+1", "20x10", "TTA", 1, 0, 1, None, 1, 1, 1)], "about", tmp_path)
    with (tmp_path / "bench.csv").open(newline="") as file:
        assert next(csv.DictReader(file))["network"] == "'=1+1"


def test_every_work_is_timed_and_written(tmp_path: Path, capsys: Any) -> None:
    words = "bench --networks deeplabv1_resnet18_slim --sizes 64x32 48x48 --steps 1 2 --repeats 2"
    with pytest.raises(SystemExit) as end:
        main([*words.split(), "--device", "cpu", "-o", str(tmp_path / "out")])
    assert end.value.code == 0
    assert "TFLOP/s" in capsys.readouterr().out
    stored = json.loads((tmp_path / "out/bench.json").read_text())
    assert stored["about"] == describe_machine(torch.device("cpu"))
    assert len(stored["rows"]) == 2 * 8
    assert all(row["ms"] > 0 and row["tflops"] > 0 for row in stored["rows"])
    with (tmp_path / "out/bench.csv").open() as file:
        assert len(list(csv.reader(file))) == 17
    assert (tmp_path / "out/bench.md").read_text().count("\n|") == 18
    assert (tmp_path / "out/bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_network_and_a_method_of_ones_own_are_timed(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "timed_net.py").write_text(
        "import torch\ndef net():\n    return torch.nn.Sequential(\n"
        "        torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 2, 1))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = "bench --networks timed_net:net --trust --method tent --sizes 32x32 --steps 1 -o out"
    with pytest.raises(SystemExit) as end:
        main([*words.split(), "--repeats", "1", "--device", "cpu"])
    assert end.value.code == 0
    rows = json.loads(Path("out/bench.json").read_text())["rows"]
    assert {row["network"] for row in rows} == {"timed_net:net"}
    assert rows[0]["work"] == "tent"


def test_a_bench_that_is_there_is_not_replaced(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "bench.json").write_text("kept")
    with pytest.raises(SystemExit) as end:
        main(["bench", "--device", "cpu", "-o", str(tmp_path)])
    assert end.value.code == 2
    assert "bench.json would be replaced" in capsys.readouterr().err
    assert (tmp_path / "bench.json").read_text() == "kept"


def test_rows_are_kept_as_they_come() -> None:
    kept: list[int] = []
    said: list[str] = []
    run_bench(
        ["deeplabv1_resnet18_slim"], ["32x32", "48x32"], [1], device=torch.device("cpu"),
        repeats=1, log=said.append, keep=lambda rows: kept.append(len(rows)),
    )  # fmt: skip
    assert kept == list(range(1, 13))
    assert re.fullmatch(r"deeplabv1_resnet18_slim takes about \S+ s on this CPU", said[1])


def test_a_network_that_cannot_be_built_is_left_out(monkeypatch: Any) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("pip install it")

    monkeypatch.setattr("selfadapt.bench.create_model", missing)
    said: list[str] = []
    assert run_bench(["hrnet_w18"], ["8x8"], device=torch.device("cpu"), log=said.append) == []
    assert said[1] == "hrnet_w18 is skipped: pip install it"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--networks resnet", "unknown model 'resnet'"),
        ("--networks mine:net", "mine:net is code of your own"),
        ("--method sna", "did you mean 'san'"),
        ("--method mine:Method", "mine:Method is code of your own"),
        ("--sizes 12", "a size is written as WIDTHxHEIGHT, such as 1280x720, got '12'"),
        ("--sizes 0x5", "a size is written as"),
        ("--steps 0", "steps and repeats must be a whole number, 1 or more, got 0"),
        ("--device cuda:9", "there is no device 'cuda:9' here"),
    ],
)
def test_wrong_words_are_explained(words: str, message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", *words.split()])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_noise_is_an_image() -> None:
    image = noise(parse_size("30x20"))
    assert image.shape == (3, 20, 30)
    assert image.dtype == torch.uint8
    assert image.unique().numel() > 100
