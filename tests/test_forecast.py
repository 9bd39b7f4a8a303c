"""What a run will take is said before it begins, with what would be faster."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PILImage
from torch import nn

import selfadapt
from conftest import TinyNet, random_image, seeded
from runs import domain, run_cli, write_domain, write_recipe
from selfadapt.cost import Estimate
from selfadapt.forecast import faster, forecast, total_seconds
from selfadapt.images import to_pil
from selfadapt.labels import class_space
from selfadapt.method import UNLIKE
from selfadapt.models.trained import TRAINED
from selfadapt.protocol.domains import Domain
from selfadapt.protocol.recipe import DomainConfig, MethodConfig
from selfadapt.protocol.tune import choose, num_candidates

HD = (720, 1280)
PLAIN = 10 / (720 * 1280)
"""Seconds a pixel: an image of 1280x720 takes ten a pass and twenty a step."""


class Timed:
    """A method that knows what it takes."""

    mode, max_pixels = "paper", 2048 * 1024

    def __init__(self, steps: int = 10, budget_ms: float | None = None) -> None:
        self.model, self.steps, self.budget_ms = nn.Linear(1, 1), steps, budget_ms

    def estimate(self, height: int, width: int) -> Estimate:
        plain = PLAIN * height * width
        return Estimate(plain * (3 + 2 * self.steps), plain, 2 * plain, 0.0)

    def __call__(self, image: Any, *, normalized: bool = False) -> Any:
        raise AssertionError("nothing is segmented to say what it takes")


def test_a_long_run_is_said_with_what_would_be_faster() -> None:
    assert forecast("self-adapt", Timed(), {HD: 12}) == [
        "self-adapt: an image of 1280x720 pixels takes about 4 min on this CPU, all 12 take about "
        "46 min",
        "faster: --method san (10 s an image), --steps 3 (90 s an image), --max-pixels 230000 "
        "(58 s an image)",
    ]


def test_a_short_run_is_said_in_one_line() -> None:
    line = "self-adapt: an image of 320x240 pixels takes about 4.2 s on this CPU"
    assert forecast("self-adapt", Timed(steps=1), {(240, 320): 1}) == [line]
    mixed = {(240, 320): 2, HD: 1}  # the usual size is named, and all are counted
    assert forecast("self-adapt", Timed(steps=1), mixed) == [f"{line}, all 3 take about 58 s"]


def test_of_a_few_pixels_nothing_is_measured() -> None:
    assert forecast("self-adapt", Timed(), {}) == []
    assert forecast("self-adapt", Timed(), {(64, 64): 15}) == []
    assert forecast("self-adapt", Timed(), {(64, 64): 16}) != []


def test_what_is_not_faster_is_not_named() -> None:
    text = " ".join(forecast("self-adapt", Timed(steps=3), {HD: 1}))
    assert "--steps" not in text
    assert "--method san" in text
    assert len(forecast("self-adapt", Timed(budget_ms=3000), {HD: 1})) == 1
    assert total_seconds(Timed(budget_ms=3000), {HD: 2}) == pytest.approx(2 * 13)


def test_the_default_mode_has_a_preset_for_cpus() -> None:
    model = seeded(TinyNet)
    full, short = selfadapt.SelfAdapt(model), selfadapt.SelfAdapt(model, preset="cpu")
    ways = faster(full, HD)
    short._rates = full._rates  # measured once
    assert ways["--preset cpu"] == short.estimate(*HD).seconds < full.estimate(*HD).seconds / 2
    assert "--preset cpu" not in faster(short, HD)


def test_small_images_are_not_to_be_made_smaller() -> None:
    slow = Timed(steps=100)
    assert "--max-pixels 100000" in forecast("self-adapt", slow, {(500, 800): 1})[1]
    assert "--max-pixels" not in forecast("self-adapt", slow, {(480, 800): 1})[1]


def test_an_ensemble_is_the_sum_of_its_members() -> None:
    members = [seeded(TinyNet), seeded(TinyNet, seed=1)]
    ensemble = selfadapt.create_method("ensemble", members)
    alone = selfadapt.create_method("san", members[0], compare=False)
    both, single = (total_seconds(method, {(256, 256): 1}) for method in (ensemble, alone))
    assert both is not None
    assert single is not None
    assert both > single
    assert len(forecast("ensemble", ensemble, {(256, 256): 1})) == 1


# said by the verbs


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        to_pil(random_image(96, 176, seed=number)).save(folder / f"{number}.png")
    turned = PILImage.Exif()
    turned[274] = 6
    to_pil(random_image(176, 96)).save(folder / "turned.jpg", exif=turned)
    return folder


def test_predict_says_what_it_will_take_before_the_first_image(
    photos: Path, tmp_path: Path, capsys: Any
) -> None:
    (photos / "text.jpg").write_text("no image")
    command = ("predict", photos, "--model", "streets", "--steps", 1, "--device", "cpu")
    assert run_cli(*command, "-o", tmp_path / "out") == 1
    trained, times, *_ = capsys.readouterr().err.splitlines()
    assert trained == (
        "the network was trained on synthetic street scenes rendered in daylight, not photographs"
    )
    assert times.startswith("self-adapt: an image of 176x96 pixels takes about ")
    assert ", all 4 take about " in times
    for quiet in ("--quiet", "--json"):
        assert run_cli(*command, "-o", tmp_path / quiet, quiet) == 1
        assert "takes about" not in capsys.readouterr().err
    assert run_cli(*command, "-o", tmp_path / "out") == 1
    assert "takes about" not in capsys.readouterr().err, "nothing is left to do"


def test_the_demo_says_what_it_will_take(photos: Path, tmp_path: Path, capsys: Any) -> None:
    command = ("demo", "--image", photos, "--steps", 1, "--device", "cpu", "-o", tmp_path / "out")
    assert run_cli(*command) == 0
    trained, times, *_ = capsys.readouterr().err.splitlines()
    assert trained.startswith("the network was trained on synthetic street")
    assert times.startswith("6 methods on 4 images take about ")
    assert "trained on synthetic street scenes" in (tmp_path / "out" / "report.html").read_text()


def test_evaluate_says_what_it_will_take(tmp_path: Path, capsys: Any) -> None:
    roots = [
        write_domain(tmp_path / name, 3, seed, sizes=((192, 128),))
        for seed, name in enumerate("vt")
    ]
    recipe = {
        "networks": {"streets": {"place": "streets"}},
        "classes": ["road", "car", "sky"],
        "validation": {**domain(roots[0]), "name": "v"},
        "targets": [{**domain(roots[1]), "name": "t"}],
        "methods": [{"method": "san", "tune": {"alpha": [0, 0.1]}}],
        "device": "cpu",
    }
    write_recipe(tmp_path / "recipe.yaml", recipe)
    command = (tmp_path / "recipe.yaml", "-o", tmp_path / "run")
    assert run_cli("tune", *command, "--json") == 0
    assert "takes about" not in capsys.readouterr().err
    assert run_cli("evaluate", *command) == 0
    err = capsys.readouterr().err
    assert re.search(r"this takes about \S+ s on this CPU \(v 0.0 s, t \S+ s\)", err), err


def test_the_number_of_candidates_is_that_of_the_settings_tried() -> None:
    tune = {"alpha": [0, 0.1, 0.2], "psi": [0.5, 0.7]}
    for method in (
        MethodConfig(method="self-adapt", tune=tune, search="grid"),
        MethodConfig(method="self-adapt", tune=tune, search="in turn"),
    ):
        tried: list[dict[str, Any]] = []

        def score(candidates: Any, tried: list[dict[str, Any]] = tried) -> list[float]:
            tried += [settings for settings in candidates if settings not in tried]
            return [0.0] * len(candidates)

        choose(method, score, {}, {"alpha": 0.1, "psi": 0.7})
        assert num_candidates(method) == len(tried)
    assert num_candidates(MethodConfig(method="san")) == 0


# networks that were trained on other images


@pytest.mark.parametrize("verb", ["predict", "demo"])
def test_unlike_images_lead_to_the_list_of_trained_networks(
    verb: str, tmp_path: Path, capsys: Any
) -> None:
    to_pil(random_image(64, 96)).save(tmp_path / "noise.png")
    words: tuple[Any, ...] = ("predict", tmp_path / "noise.png", "--model", "streets")
    if verb == "demo":
        words = ("demo", "--image", tmp_path / "noise.png")
    assert run_cli(*words, "--steps", 1, "--device", "cpu", "-o", tmp_path / "out") == 0
    captured = capsys.readouterr()
    said = " ".join((captured.out + captured.err).split())
    assert UNLIKE in said
    assert said.count("selfadapt models --trained") == 1


def test_trained_networks_are_listed(capsys: Any) -> None:
    assert run_cli("models", "--trained") == 0
    text = capsys.readouterr().out
    for name, network in TRAINED.items():
        assert f"{name}\n" in text
        for part in (network.purpose, network.trained_on, network.licence):
            assert part in text
    assert run_cli("models", "--trained", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert list(listed) == list(TRAINED)
    assert set(listed["torchvision:deeplabv3_resnet50"]) == {
        "trained_on", "num_classes", "megabytes", "licence", "purpose",
    }  # fmt: skip


@pytest.mark.parametrize("name", [name for name in TRAINED if name.startswith("torchvision:")])
def test_the_list_says_what_torchvision_says(name: str) -> None:
    models = pytest.importorskip("torchvision.models")
    meta = models.get_model_weights(name.removeprefix("torchvision:")).DEFAULT.meta
    assert TRAINED[name].num_classes == len(meta["categories"])
    assert TRAINED[name].megabytes == pytest.approx(meta["_file_size"] * 2**20 / 1e6, abs=0.6)


@pytest.mark.parametrize(
    "name", ["torchvision:lraspp_mobilenet_v3_large", "hf:restor/tcd-segformer-mit-b0"]
)
def test_a_trained_network_that_cannot_be_fetched_is_said_in_a_line(
    name: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("Name or service not known\nCheck your connection")

    monkeypatch.setattr("torch.hub.download_url_to_file", unreachable)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", unreachable)
    assert run_cli("predict", photos, "--model", name, "-o", tmp_path / "out") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert name in error
    assert "could not be fetched" in error
    assert "Name or service not known" in error
    assert "without a connection" in error
    assert not (tmp_path / "out").exists()


def test_networks_that_segment_volumes_are_refused(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "volumes.py").write_text(
        "import torch\ndef net():\n    return torch.nn.Sequential(torch.nn.Conv3d(1, 2, 3))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ("--model", "volumes:net", "--trust", "-o", tmp_path / "out")
    assert run_cli("predict", photos, *words) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "segments volumes (it has Conv3d layers)" in error
    assert "slice by slice" in error
    assert not (tmp_path / "out").exists()


def test_domains_know_their_size_without_being_read() -> None:
    street = DomainConfig(dataset="streets", split="rain", limit=1, scale=0.5)
    domain = Domain(street, street.open(class_space("streets-9")))
    height, width = domain.usual_size()
    assert domain.data[0].image.size == (2 * width, 2 * height)
