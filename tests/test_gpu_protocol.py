"""Evaluations on a GPU: the rows know its memory, and the scores are those of the CPU."""

import csv
from pathlib import Path

import pytest
import torch
import yaml

from runs import CLASSES, domain, run_cli, write_domain
from selfadapt.metrics import count, start_count
from selfadapt.models import create_model, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_an_evaluation_on_a_gpu_scores_as_on_the_cpu(tmp_path: Path) -> None:
    for seed, name in enumerate(("dusk", "fog")):
        write_domain(tmp_path / name, 3, seed)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_model(
            create_model("deeplabv1_resnet18_slim", classes=CLASSES), tmp_path / "net.safetensors"
        )
    recipe = {
        "networks": {"net": {"place": str(tmp_path / "net.safetensors")}},
        "classes": CLASSES,
        "validation": domain(tmp_path / "dusk"),
        "targets": [domain(tmp_path / "fog")],
        "methods": [
            {"method": "source"},
            {"method": "san", "tune": {"alpha": [0, 0.5]}},
            {
                "method": "self-adapt",
                "label": "bf16",
                "precision": "bf16",
                "settings": {"steps": 1},
            },
        ],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    scores, memory = {}, {}
    for device in ("cpu", "cuda"):
        run = tmp_path / device
        assert run_cli("evaluate", path, "-o", run, "--device", device) == 0
        with (run / "tables" / "domains.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["method"] != "bf16"]
        scores[device] = [float(row["mIoU"]) for row in rows]
        with (run / "tables" / "times.csv").open() as file:
            memory[device] = [row["MiB_peak"] for row in csv.DictReader(file)]
    assert scores["cuda"] == pytest.approx(scores["cpu"], abs=0.02)
    assert set(memory["cpu"]) == {""}
    assert all(float(peak) > 1 for peak in memory["cuda"])


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_counts_are_of_maps_that_are_gone_and_overwritten(kind: torch.dtype) -> None:
    """The GPU counts while it is told what follows, which may be given the memory of the maps."""
    generator = torch.Generator().manual_seed(0)
    started, expected = [], []
    for _ in range(20):
        probs = torch.rand(5, 700, 900, generator=generator).softmax(dim=0).to(kind)
        label = torch.randint(0, 5, (700, 900), generator=generator, dtype=torch.uint8)
        expected.append(count(label, probs))
        there, known = probs.cuda(), label.cuda()
        started.append(start_count(known, there))
        del there, known
        for _ in range(3):
            torch.ones(5, 700, 900, dtype=kind, device="cuda").mul_(7)
            torch.ones(700, 900, dtype=torch.uint8, device="cuda").mul_(3)
    for finish, one in zip(started, expected, strict=True):
        found = finish()
        assert found.confusion.equal(one.confusion)
        assert found.bins.equal(one.bins)
        assert found.gaps.equal(one.gaps)
