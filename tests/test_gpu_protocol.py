"""Evaluations on a GPU: the rows know its memory, and the scores are those of the CPU."""

import csv
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from runs import CLASSES, domain, run_cli, write_domain
from selfadapt.baselines import SaNOnly
from selfadapt.journal import Journal
from selfadapt.metrics import count
from selfadapt.models import create_model, save_model
from selfadapt.progress import ProgressBar
from selfadapt.protocol import DomainConfig, EvaluateConfig, MethodConfig, NetworkConfig
from selfadapt.protocol.domains import Domain, open_domains
from selfadapt.protocol.evaluate import Evaluation
from selfadapt.protocol.rows import TrialKey, counts_of
from selfadapt.protocol.scorer import Loaded
from selfadapt.protocol.trials import Trial, trial_of

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


@pytest.mark.parametrize("fast", [False, True])
def test_each_row_counts_the_map_of_its_own_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    """Another stream counts an image while the next is segmented, or recorded."""
    sizes = ((900, 700), (640, 480), (800, 800)) if fast else ((900, 700),)
    for seed, name in enumerate(("dusk", "fog")):
        write_domain(tmp_path / name, 12, seed, sizes)
    looks = [
        DomainConfig(dataset="folder", root=str(tmp_path / name), split="all", classes=CLASSES)
        for name in ("dusk", "fog")
    ]
    config = EvaluateConfig(
        networks={"net": NetworkConfig(place="deeplabv1_resnet18_slim")},
        classes=CLASSES,  # the network has more: the GPU is not done when the method is
        validation=looks[0],
        targets=[looks[1]],
        methods=[MethodConfig(method="san", settings={"fast": fast})],
    )
    domains = open_domains(config)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = create_model("deeplabv1_resnet18_slim").cuda()
    maps: list[tuple[torch.Tensor, torch.Tensor]] = []
    predict = Evaluation.predict

    def remember(self: Evaluation, domain: Domain, loaded: Loaded, trial: Trial) -> Any:
        probs, result = predict(self, domain, loaded, trial)
        maps.append((loaded.label, probs.clone()))
        return probs, result

    monkeypatch.setattr(Evaluation, "predict", remember)
    with closing(Journal(tmp_path, TrialKey)) as journal:
        run = Evaluation(config, domains, {"net": model}, journal)
        with ProgressBar("evaluating", 12, quiet=True) as progress:
            trial = trial_of(config, config.methods[0])
            run.measure(domains[1], range(len(domains[1].data)), [trial], progress)
        rows = list(journal.rows().values())
    assert len(rows) == len(maps) == 12
    for row, (label, probs) in zip(rows, maps, strict=True):
        found, expected = counts_of(row), count(label, probs.cpu())
        assert found.confusion.equal(expected.confusion)
        assert found.bins.equal(expected.bins)
        assert found.gaps.equal(expected.gaps)
    if fast:
        method = run._methods[trial.key]
        assert isinstance(method, SaNOnly)
        assert len(method.engine.graphs._recordings) == len(sizes)
        return
    own = [
        row["mb"] - sum(kept.nbytes for _, kept in maps[:n]) / 2**20 for n, row in enumerate(rows)
    ]
    assert own == pytest.approx([own[0]] * 12, abs=3)  # a map that is counted has 7 MiB
