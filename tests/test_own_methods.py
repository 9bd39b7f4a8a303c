"""Methods of the user's own, by their address, and what is decided for a network."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import selfadapt
from conftest import random_image
from runs import run_cli
from selfadapt import METHODS, Computed, Method, SelfAdapt
from selfadapt.engine import Fast, Network
from selfadapt.images import to_pil
from selfadapt.losses import LOSSES
from selfadapt.methods import load_own, settings_of
from selfadapt.steps import STEP_RULES

MODULE = """
from selfadapt import Computed, Method, SelfAdapt

class Mirrored(Method):
    def __init__(self, model, *, share=0.5, **kwargs):
        super().__init__(model, **kwargs)
        self.share = share

    def compute(self, network, image):
        mirrored = network.logits(image.flip(-1)).flip(-1)
        return Computed(logits=network.logits(image).lerp(mirrored, self.share))

class Quick(SelfAdapt):
    def __init__(self, model, *, steps=1, **kwargs):
        super().__init__(model, steps=steps, **kwargs)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "mine.py").write_text(MODULE)
    to_pil(random_image(48, 64)).save(tmp_path / "a.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = set(METHODS)
    yield tmp_path
    for name in set(METHODS) - names:
        del METHODS[name]
    sys.modules.pop("mine", None)


def predict(*flags: str) -> int:
    return run_cli("predict", "a.png", "--model", "streets", "--device", "cpu", "-o", "m", *flags)


def test_a_method_of_ones_own_runs_with_trust_alone(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict("--method", "mine:Mirrored") == 2
    text = capsys.readouterr().err
    assert "mine:Mirrored is code of your own that would be run; if you trust it, add" in text
    assert "mine" not in sys.modules
    assert not (place / "m").exists()
    assert predict("--method=mine:Mirrored", "--share", "0.25", "--trust", "--explain") == 0
    assert (place / "m" / "a_label.png").exists()
    text = capsys.readouterr().err
    assert "Mirrored with DeepLabV1 on cpu" in text
    assert "share=0.25" in text
    assert predict("--method", "mine:Nothing", "--trust", "--overwrite") == 2
    assert "mine has no function or class 'Nothing'" in capsys.readouterr().err


def test_a_loss_and_a_step_rule_of_ones_own_run_with_trust_alone(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "mine.py").write_text(
        "def square(logits, target):\n    return logits.square().mean()\n\n"
        "def small(weights, gradients, lr):\n"
        "    for weight, gradient in zip(weights, gradients):\n"
        "        weight.sub_(gradient * 1e-3)\n"
    )
    flags = ("--loss", "mine:square", "--step", "mine:small", "--steps", "1")
    try:
        assert predict(*flags) == 2
        assert "mine:square is code of your own that would be run" in capsys.readouterr().err
        assert predict(*flags, "--trust", "--explain") == 0
        assert "mine:square" in capsys.readouterr().err
        assert predict("--loss", "mine:cube", "--trust", "--overwrite") == 2
        assert "has no function or class 'cube'" in capsys.readouterr().err
    finally:
        LOSSES.pop("mine:square", None)
        STEP_RULES.pop("mine:small", None)


def test_settings_of_a_method_of_ones_own_are_listed(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("methods", "mine:Mirrored") == 2
    assert "add --trust" in capsys.readouterr().err
    assert run_cli("methods", "mine:Mirrored", "--trust") == 0
    assert "share" in capsys.readouterr().out


RECIPE = """
networks: {streets: {place: streets}}
classes: streets-9
validation: {dataset: streets, split: dusk, limit: 1, scale: 0.25}
targets: [{dataset: streets, split: haze, limit: 1, scale: 0.25}]
pictures: 0
methods:
  - {method: source}
  - {method: "mine:Mirrored", label: mirrored, tune: {share: [0.25, 0.5]}, sweep: {alpha: [0, 0.3]}}
"""


def test_a_report_needs_no_code_of_the_methods(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "recipe.yaml").write_text(RECIPE)
    assert run_cli("evaluate", "recipe.yaml", "-o", "run") == 2
    assert "mine:Mirrored is code of your own that would be run" in capsys.readouterr().err
    assert run_cli("evaluate", "recipe.yaml", "-o", "run", "--trust") == 0
    record = json.loads((place / "run" / "record.json").read_text())
    (defaults,) = (m["defaults"] for m in record["recipe"]["methods"] if m["defaults"])
    assert (defaults["share"], defaults["alpha"]) == (0.5, 0.1)
    (place / "mine.py").unlink()
    del METHODS["mine:Mirrored"], sys.modules["mine"]
    assert run_cli("report", "run", "-o", "report") == 0
    assert "mirrored" in (place / "report" / "report.html").read_text()


def test_settings_are_inherited_through_keywords(place: Path) -> None:
    for name in ("mine:Mirrored", "mine:Quick"):
        load_own(name)
    assert list(settings_of("mine:Mirrored"))[:2] == ["share", "alpha"]
    quick = settings_of("mine:Quick")
    assert quick["steps"].default == 1
    assert quick["psi"].default == 0.7
    assert set(settings_of("self-adapt")) == set(quick)
    assert selfadapt.methods.summary_of("mine:Mirrored") == ""


class Halved(Method):
    """Half of the scores."""

    def compute(self, network: selfadapt.engine.Network, image: Tensor) -> Computed:
        return Computed(logits=network.logits(image) / 2)


def test_a_method_is_one_hook(tiny: nn.Module, image: Tensor) -> None:
    result = Halved(tiny)(image)
    torch.testing.assert_close(result.probs.sum(dim=0), torch.ones(image.shape[-2:]))
    assert float(result.confidence.mean()) < float(METHODS["san"](tiny)(image).confidence.mean())


def test_a_record_has_one_prediction() -> None:
    with pytest.raises(ValueError, match="either logits or probs must be given"):
        Computed()


# what is decided


def test_what_is_decided_can_be_read(tiny: nn.Module) -> None:
    tiny.register_forward_hook(lambda *_: None)
    method = SelfAdapt(
        tiny, mode="paper", adapt=["head"], loss=lambda s, t: s.sum(), fast=Fast(graphs=False)
    )
    explained = method.explain()
    text = str(explained)
    assert explained.topics["adapts"].startswith("0.00 of 0.00 million weights; as given: head")
    assert explained.optimizations["graphs"] == "switched off"
    assert explained.optimizations["reuse"] == "the network has hooks, which must see every run"
    assert explained.optimizations["kernels"] == "for GPUs only"
    assert "SaN mixes the statistics of 2 BatchNorm layers" in text
    assert "lr=0.02" in explained.topics["settings"]
    json.dumps(explained.topics)


def test_a_normalisation_that_nothing_says_is_assumed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    assert METHODS["san"](model).explain().topics["input"].endswith("(assumed)")


def test_one_pass_has_no_steps(tiny: nn.Module) -> None:
    explained = METHODS["ensemble"]([tiny, tiny]).explain()
    assert explained.title == "Ensemble of 2, the first: SaNOnly with TinyNet on cpu"
    assert explained.optimizations["reuse"] == "there are no steps"
    assert "loss" not in explained.topics


class Stepping(SelfAdapt):
    """Has a ``compute`` of its own around that of self-adaptation."""

    def compute(self, network: Network, image: Tensor) -> Computed:
        return super().compute(network, image)


def test_a_method_that_computes_something_else_is_told_so(tiny: nn.Module, image: Tensor) -> None:
    class Plain(Method):
        def compute(self, network: Network, image: Tensor) -> Computed:
            return network.logits(image)  # type: ignore[return-value]

    with pytest.raises(TypeError, match=r"Plain\.compute must return a Computed, got Tensor"):
        Plain(tiny)(image)


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 3, 8, 8), (8, 8)])
def test_scores_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"logits must be \(1, C, H, W\)"):
        Computed(logits=torch.zeros(shape))


def test_a_method_that_takes_steps_says_which_layers(tiny: nn.Module, image: Tensor) -> None:
    class Steps(Method):
        def compute(self, network: Network, image: Tensor) -> Computed:
            network.step(image, lambda logits: logits.mean(), lr=0.1)
            return Computed(logits=network.logits(image))

    with pytest.raises(ValueError, match=r"must call self\._select_layers"):
        Steps(tiny)(image)


def test_an_error_of_a_loss_is_not_told_as_one_of_the_network(
    tiny: nn.Module, image: Tensor
) -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return logits[:, 99]

    with pytest.raises(IndexError) as caught:
        SelfAdapt(tiny, mode="paper", loss=loss)(image)
    assert not getattr(caught.value, "__notes__", [])


def test_settings_that_change_after_construction_count(tiny: nn.Module, image: Tensor) -> None:
    method = SelfAdapt(tiny, mode="paper", steps=5)
    method.steps = 2
    result = method(image)
    assert len(result.losses) == 2
    assert not any("steps fit" in note for note in result.notes)


def test_a_budget_counts_for_subclasses_too(tiny: nn.Module, image: Tensor) -> None:
    result = Stepping(tiny, mode="paper", steps=5, budget_ms=0)(image)
    assert not result.losses
    assert any("too little to adapt" in note for note in result.notes)
    assert len(Stepping(tiny, mode="paper", steps=2, budget_ms=60_000)(image).losses) == 2


class Unmeasured(SelfAdapt):
    """Does not say how many passes it takes."""

    work = Method.work


def test_the_time_of_a_method_that_does_not_say_its_work_is_measured(tiny: nn.Module) -> None:
    method, calls = Unmeasured(tiny, steps=3), []
    method.on_step = lambda number, loss: calls.append(number)
    estimate = method.estimate(256, 256)
    assert estimate.seconds > 2 * estimate.plain_seconds
    assert calls == []
