"""Training on a GPU: the same steps as on a CPU, in 16 bits as well."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import as_config, recipe, write_domain
from selfadapt.train import train
from selfadapt.train.log import read_csv_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def content(root: Path, accelerator: str, **changes: Any) -> dict[str, Any]:
    machine = {"measure": False, "workers": 2, "accelerator": accelerator}
    source = write_domain(root / "source", 12, 1)
    validation = write_domain(root / "validation", 3, 2)
    return recipe(source, validation, **{"machine": machine, "lr": 0.01, **changes})


def test_a_run_on_the_gpu_goes_as_on_the_cpu(tmp_path: Path) -> None:
    losses = {}
    for accelerator in ("cpu", "gpu"):
        folder = tmp_path / accelerator
        train(as_config(content(tmp_path, accelerator)), folder)
        losses[accelerator] = [float(row[2]) for row in read_csv_rows(folder / "log.csv")]
    assert losses["gpu"] == pytest.approx(losses["cpu"], rel=0.02)


def test_a_run_in_16_bits_states_its_speed(tmp_path: Path) -> None:
    machine = {"measure": True, "workers": 2, "accelerator": "gpu"}
    settings = content(tmp_path, "gpu", precision="bf16-mixed", machine=machine)
    train(as_config(settings), tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["speed"]["data"] > 0
    assert summary["speed"]["model"] > 0
    assert summary["device"] == torch.cuda.get_device_name()
