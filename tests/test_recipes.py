"""Recipes: the paper's defaults, those that are shipped, and what is wrong with bad ones."""

import re
import shlex
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from runs import CLASSES, as_config, domain, recipe, run_cli, write_domain, write_recipe
from selfadapt import MODELS
from selfadapt.cli import COMMANDS, make_parser
from selfadapt.cli.arguments import expand_recipe
from selfadapt.data import DATASETS, DataConfig
from selfadapt.labels import class_space
from selfadapt.recipes import differences, find_recipe, shipped_recipes
from selfadapt.train import AugmentConfig, MachineConfig, ModelConfig, TrainConfig

SHIPPED = list(shipped_recipes("train").values())
MODEL = ModelConfig(name="deeplabv1_resnet50")
GTA = DataConfig(dataset="gta", root="gta")


@cache
def parsed(*words: str) -> TrainConfig:
    """Read a command as the command line does."""
    parser = make_parser()
    args = parser.instantiate(parser.parse_args(expand_recipe(["train", *words]))).train
    return TrainConfig(**{field.name: args[field.name] for field in fields(TrainConfig)})


def commands(path: Path) -> list[list[str]]:
    """Return the commands in the comment that a recipe begins with; a line may go on."""
    found: list[str] = []
    going_on = False
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        text = line[1:].strip()
        going_on = text.startswith("selfadapt train ") or (going_on and text.startswith("--"))
        if text.startswith("selfadapt train "):
            found.append(text)
        elif going_on:
            found[-1] += " " + text
    return [shlex.split(text)[2:] for text in found]


def test_the_defaults_are_the_papers() -> None:
    config = TrainConfig(model=MODEL, source=GTA)
    assert config.lr == 0.005
    assert config.momentum == 0.9
    assert config.weight_decay == 1e-4
    assert config.power == 0.9
    assert config.batch == 4
    assert config.epochs == 50
    assert config.augment == AugmentConfig()
    assert config.seed == 0
    assert config.precision == "32-true"
    assert not config.frozen_batchnorm
    assert config.statistics_batches == 0
    assert config.average == 0
    assert config.alphas == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    assert set(config.targets) == {"cityscapes", "bdd", "idd", "mapillary", "acdc"}
    assert (config.model.norm, config.model.dropout, config.model.weights) == ("bn", 0.0, None)


def test_there_are_recipes_for_both_source_domains_of_the_paper() -> None:
    names = {path.stem for path in SHIPPED}
    networks = ("deeplabv1_resnet50", "deeplabv1_resnet101", "hrnet_w18", "upernet_swin_tiny")
    for source in ("gta", "synthia"):
        assert {f"{source}-{network}" for network in networks} <= names


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_command_in_a_shipped_recipe_is_understood(path: Path) -> None:
    first = commands(path)
    assert first, "no comment line with its command"
    for words in first:
        assert words[0] == path.stem
        config = parsed(*words)
        assert config.model.name in MODELS
        assert config.model.space.names
        assert config.validation or set(config.targets) & {config.source.dataset}
        for data in (config.source, *([config.validation] if config.validation else [])):
            assert data.dataset in DATASETS
            known = DATASETS[data.dataset].splits
            assert not known or data.split in known
            assert data.root is not None or data.dataset == "streets"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_network_of_a_shipped_recipe_can_be_built(path: Path) -> None:
    if path.stem.endswith(("hrnet_w18", "hrnet_w48", "swin_tiny")):
        pytest.importorskip("timm")
    config = parsed(*commands(path)[0])
    with torch.device("meta"):
        model = config.model.build(fresh=True)
    assert model.spec.classes == config.model.space.names


def test_recipes_of_the_paper_change_nothing_of_its_settings() -> None:
    """Batch, learning rate, epochs and augmentation stay at the paper's."""
    contents = [yaml.safe_load(path.read_text()) for path in SHIPPED]
    of_paper = [c for c in contents if c["source"]["dataset"] not in ("folder", "streets")]
    assert len(of_paper) > 10
    for content in of_paper:
        assert set(content) <= {"model", "source", "validation", "targets", "seeds"}


def test_the_example_of_the_command_is_understood() -> None:
    assert parsed(*shlex.split(COMMANDS["train"].example)[2:]).epochs >= 1


def test_flags_change_a_recipe(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml", recipe(tmp_path / "s", tmp_path / "v"))
    words = ["--lr", "0.3", "--augment.crop", "[64, 80]", "--seeds", "[3, 4]", "--model.norm", "sn"]
    config = parsed(str(path), "-o", "run", *words)
    assert (config.lr, config.augment.crop, config.seeds) == (0.3, (64, 80), [3, 4])
    assert (config.model.norm, config.augment.scale, config.batch) == ("sn", (0.3, 1.0), 4)


def test_a_recipe_reads_as_the_dataclass_does(tmp_path: Path) -> None:
    content = recipe(tmp_path / "s", tmp_path / "v", seeds=[1, 2], precision="bf16-mixed")
    path = write_recipe(tmp_path / "r.yaml", content)
    assert parsed(str(path), "-o", "run") == as_config(content)


def test_each_seed_has_a_folder_and_a_recipe_of_its_own() -> None:
    config = TrainConfig(model=MODEL, source=GTA, seeds=[0, 7])
    (one, place), (other, place7) = config.runs(Path("run"))
    assert (place, place7) == (Path("run/seed_0"), Path("run/seed_7"))
    assert (one.seed, other.seed) == (0, 7)
    assert one.seeds == other.seeds == []
    assert TrainConfig(model=MODEL, source=GTA).runs(Path("run"))[0][1] == Path("run")


def test_a_run_is_the_same_wherever_it_takes_place() -> None:
    one = TrainConfig(model=MODEL, source=GTA)
    other = TrainConfig(
        model=MODEL,
        source=DataConfig(dataset="gta", root="/elsewhere/gta"),
        machine=MachineConfig(devices=4, workers=3, measure=False),
        save_every=7,
    )
    assert differences(one.identity(), other.identity()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lr": 0.1}, ["lr: 0.005 -> 0.1"]),
        ({"model": ModelConfig(name="hrnet_w18")}, ["model.name: deeplabv1_resnet50 -> hrnet_w18"]),
        ({"augment": AugmentConfig(flip=0)}, ["augment.flip: 0.5 -> 0"]),
        ({"seed": 1, "batch": 8}, ["batch: 4 -> 8", "seed: 0 -> 1"]),
        ({"precision": "bf16-mixed"}, ["precision: 32-true -> bf16-mixed"]),
    ],
)
def test_what_differs_between_recipes_is_said(changes: dict[str, Any], said: list[str]) -> None:
    one = TrainConfig(model=MODEL, source=GTA)
    other = TrainConfig(**{"model": MODEL, "source": GTA, **changes})
    assert differences(one.identity(), other.identity()) == said


def data(dataset: str, split: str = "val", root: str | None = "somewhere") -> DataConfig:
    return DataConfig(dataset=dataset, split=split, root=root)


TARGETS: dict[str, tuple[DataConfig, list[str] | None]] = {
    "a dataset": (data("cityscapes"), ["cityscapes"]),
    "a dataset of the defaults": (data("mapillary"), None),
    "the training part of a target": (data("cityscapes", "train"), ["cityscapes"]),
    "a split": (data("bdd", "train"), ["bdd/train"]),
    "a condition of a target": (data("acdc-fog"), ["acdc"]),
    "a condition of the defaults": (data("acdc-night"), None),
    "a condition of a target's split": (data("acdc-fog"), ["acdc/val"]),
    "a target that is a condition": (data("acdc"), ["acdc-fog"]),
    "a target that is a condition's split": (data("acdc"), ["acdc-rain/val"]),
    "another name of the same images": (data("wilddash", "all"), ["wilddash/val"]),
    "other labels of the same images": (data("wilddash-unified", "val"), ["wilddash"]),
    "all, of which a target is part": (data("gta", "all"), ["gta/val"]),
    "a part of all": (data("gta", "val"), ["gta/all"]),
    "a look of all looks": (data("streets", "night", None), ["streets"]),
    "a look": (data("streets", "night", None), ["streets/night"]),
    "a folder": (data("folder", "all", "/data/camvid"), ["/data/camvid"]),
    "a folder spelled otherwise": (data("folder", "all", "/data/x/../camvid/"), ["/data/camvid"]),
    "a folder of the home": (data("folder", "all", "~/camvid"), [str(Path.home() / "camvid")]),
    "a folder that a dataset is found in": (data("folder", "all", "/data"), ["/data/camvid"]),
    "a dataset that is found in a folder": (data("folder", "all", "/data/camvid"), ["/data"]),
    "the folder of a dataset": (data("wilddash", "all", "/data/wd"), ["/data/wd"]),
}


@pytest.mark.parametrize("case", TARGETS)
def test_a_target_domain_is_no_validation_domain(case: str) -> None:
    validation, targets = TARGETS[case]
    more = {} if targets is None else {"targets": targets}
    with pytest.raises(ValueError, match="is a target domain, on which checkpoint and alpha"):
        TrainConfig(model=MODEL, source=GTA, validation=validation, **more)


@pytest.mark.parametrize(
    ("validation", "targets"),
    [
        (data("wilddash", "all"), None),
        (data("cityscapes"), ["bdd", "acdc"]),
        (data("cityscapes", "train"), ["cityscapes/val"]),
        (data("acdc-fog"), ["acdc-night"]),
        (data("acdc-fog", "train"), ["acdc/val"]),
        (data("streets", "day", None), ["streets/night"]),
        (data("folder", "all", "/data/camvid"), ["/data/kitti", "cityscapes"]),
        (data("cityscapes"), []),
    ],
    ids=str,
)
def test_any_other_domain_is_a_validation_domain(
    validation: DataConfig, targets: list[str] | None
) -> None:
    more = {} if targets is None else {"targets": targets}
    TrainConfig(model=MODEL, source=GTA, validation=validation, **more)


def test_a_recipe_is_found_by_name_or_path(tmp_path: Path) -> None:
    assert find_recipe("gta-deeplabv1_resnet50", "train") in SHIPPED
    path = tmp_path / "own.yaml"
    path.write_text("")
    assert find_recipe(str(path), "train") == path


VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "negative lr": ({"lr": -1.0}, "lr must be a number.*got -1.0"),
    "lr 0": ({"lr": 0.0}, "lr must be a number.*got 0.0"),
    "lr NaN": ({"lr": float("nan")}, "lr must be a number.*got nan"),
    "lr True": ({"lr": True}, "lr must be a number.*got True"),
    "no epochs": ({"epochs": 0}, "epochs must be a whole number, 1 or more, got 0"),
    "half an epoch": ({"epochs": 0.5}, "epochs must be a whole number.*got 0.5"),
    "no batch": ({"batch": 0}, "batch must be a whole number, 1 or more, got 0"),
    "momentum over 1": ({"momentum": 1.5}, "momentum must be a number, 0 to 1, got 1.5"),
    "negative decay": ({"weight_decay": -0.1}, "weight_decay must be.*got -0.1"),
    "an average that forgets nothing": (
        {"average": 1.0},
        r"average must be a number, 0 to 0\.999999, got 1\.0",
    ),
    "a negative average": ({"average": -0.1}, "average must be.*got -0.1"),
    "negative power": ({"power": -1.0}, "power must be.*got -1.0"),
    "a negative seed": ({"seed": -1}, "seed must be a whole number.*got -1"),
    "a negative seed of many": ({"seeds": [0, -1]}, "seed must be a whole number.*got -1"),
    "alpha over 1": ({"alphas": [0.0, 1.5]}, r"alpha must lie in \[0, 1\].*got 1.5"),
    "no alpha": ({"alphas": []}, "alphas must have at least one value"),
    "a weight of a class that is not there": (
        {"class_weights": {"unicorn": 2.0}},
        "class_weights must be of classes of the network, got 'unicorn'; it has road, sidewalk",
    ),
    "a negative weight": ({"class_weights": {"pole": -1.0}}, "class_weights of pole must be"),
    "a scale without statistics": (
        {"statistics_scale": [0.1, 0.5]},
        "statistics_scale applies to statistics_batches",
    ),
    "a scale of statistics that cannot be": (
        {"statistics_scale": [0.5, 0.1], "statistics_batches": 2},
        "scale must be the lower and the upper end",
    ),
    "negative statistics": ({"statistics_batches": -1}, "statistics_batches must be.*got -1"),
    "statistics that are frozen": (
        {"statistics_batches": 3, "frozen_batchnorm": True},
        "frozen_batchnorm.*statistics_batches",
    ),
    "never saved": ({"save_every": 0}, "save_every must be a whole number, 1 or more"),
    "a source that is enlarged": (
        {"source": DataConfig(dataset="gta", scale=2)},
        "source.*scale",
    ),
}


@pytest.mark.parametrize("case", VALUES)
def test_a_value_out_of_range_is_named(case: str) -> None:
    changes, message = VALUES[case]
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{"model": MODEL, "source": GTA, **changes})


def test_a_class_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="two or more classes, got road"):
        ModelConfig(name="deeplabv1_resnet18_slim", classes=["road"])


@pytest.mark.parametrize(
    ("setting", "value"), [("devices", 0), ("devices", -1), ("nodes", 0), ("workers", -1)]
)
def test_a_machine_that_cannot_be_is_refused(setting: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be a whole number.*got {value}"):
        MachineConfig(**{setting: value})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("data")
    return write_domain(root / "source", 5, 1), write_domain(root / "validation", 2, 2)


# Arguments after the recipe and its output, and what the last lines on stderr say.
BAD_COMMANDS = {
    "an unknown flag": ("--lrr 3", "unrecognized arguments: --lrr"),
    "an unknown flag of a part": ("--augment.crp 3", "unrecognized arguments: --augment.crp"),
    "a word for a number": ("--lr fast", "^selfadapt train: .*lr.*fast"),
    "a number for a pair": (
        "--augment.crop 3",
        "^selfadapt train: .*augment.crop.*tuple.* 3",
    ),
    "an unknown precision": (
        "--precision 8",
        "^selfadapt train: .*precision.*32-true.*bf16-mixed.* 8",
    ),
    "a negative lr": ("--lr -1", "^selfadapt train: lr must be a number.*got -1.0"),
    "no epochs": ("--epochs 0", "^selfadapt train: epochs must be a whole number, 1 or more"),
    "a batch too large": ("--batch 6", "^selfadapt train: a batch has 6 images, but.* only 5 "),
    "an alpha over 1": ("--alphas [0,2]", r"^selfadapt train: alpha must lie in \[0, 1\].*got 2"),
    "an unknown model": (
        "--model.name deeplabv1_resnet18_slm",
        "^selfadapt train: unknown model.*did you mean 'deeplabv1_resnet18_slim'",
    ),
    "an unknown option": ("--model.options {'a':'b'}", "^selfadapt train: .*no option 'a'"),
    "an unknown norm": ("--model.norm gn", "^selfadapt train: norm must be one of bn, bin, sn"),
    "weights that are not there": ("--model.weights no.pt", "^selfadapt train: there is no.*no.pt"),
    "an unknown class space": (
        "--model.classes cityscapes-20",
        "^selfadapt train: unknown class space 'cityscapes-20'; did you mean 'cityscapes-19'",
    ),
    "an unknown dataset": (
        "--source.dataset citscapes --source.classes null",
        "^selfadapt train: unknown dataset 'citscapes'; did you mean 'cityscapes'",
    ),
    "a root that is not there": ("--source.root no", "^selfadapt train: there is no folder no "),
    "an unknown split": ("--source.split trian", "^selfadapt train: .*no split 'trian'.*all"),
    "no class in common": (
        "--model.classes cityscapes-19 --source.classes ['tree','house','cow']",
        "^selfadapt train: folder/all has no class of the requested.*it has tree, house, cow",
    ),
    "no class in common in validation": (
        "--validation.classes ['tree','house','cow']",
        "^selfadapt train: folder/all has no class of the requested.*it has tree, house, cow",
    ),
    "no GPU": ("--machine.accelerator gpu", "^selfadapt train: there is no GPU here; use"),
    "a network from elsewhere": (
        "--model.name hf:nvidia/segformer",
        "^selfadapt train: hf:nvidia/segformer cannot be rebuilt.*use a name of",
    ),
    "a target for validation": ("--targets [ROOT/validation]", "^selfadapt train: .*is a target"),
}


@pytest.mark.parametrize("case", BAD_COMMANDS)
def test_a_bad_command_gets_a_clear_line_and_exit_code_2(
    case: str, roots: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    if case == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is one")
    words, message = BAD_COMMANDS[case]
    path = write_recipe(tmp_path / "r.yaml", recipe(*roots))
    words = words.replace("ROOT", str(roots[0].parent))
    assert run_cli("train", path, "-o", tmp_path / "run", *words.split()) == 2
    assert_says(capsys.readouterr().err, message)
    assert not (tmp_path / "run").exists()


def assert_says(err: str, message: str) -> None:
    assert "Traceback" not in err
    text = " ".join(err.split())
    assert re.search(message, text), text


FILES = {
    "a recipe that is not there": (None, "there is no recipe .*; did you mean 'gta-hrnet_w48'"),
    "an empty file": ("", "a recipe must contain settings, but .*r.yaml is empty"),
    "a key twice": (
        "epochs: 1\nepochs: 2\n",
        "but .*r.yaml is not: duplicate key 'epochs' in line 2",
    ),
    "a list": (
        "- a\n- b\n",
        "must be a mapping of settings, but .*r.yaml contains a list",
    ),
    "no YAML": ("a: [1, 2\nb: {", "a recipe must be YAML, but .*r.yaml is not: .* in line 2"),
    "an unknown key": ("learning_rate: 3\n", "learning_rate"),
    "an unknown key of a part": (
        "model: {name: a, clases: b}\n",
        "model.clases",
    ),
    "a wrong type": ("epochs: three\n", "epochs.*three"),
    "a missing part": ("lr: 0.1\n", "are required: .*model.name.*source.dataset"),
    "a missing name": ("model: {norm: bn}\nsource: {dataset: gta}\n", "required: .*model.name"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_bad_recipe_gets_a_clear_line_and_exit_code_2(
    case: str, tmp_path: Path, capsys: Any
) -> None:
    content, message = FILES[case]
    path: Any = "gta-hrnet_w48x"
    if content is not None:
        path = tmp_path / "r.yaml"
        path.write_text(content)
    assert run_cli("train", path, "-o", tmp_path / "run") == 2
    assert_says(capsys.readouterr().err, message)
    assert not (tmp_path / "run").exists()


def test_a_root_without_images_is_told_what_was_looked_for(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "images").mkdir()
    path = write_recipe(tmp_path / "r.yaml", recipe(tmp_path, None))
    assert run_cli("train", path, "-o", tmp_path / "run") == 2
    assert_says(capsys.readouterr().err, "no images with labels of folder/all.*looked for images/")


def test_labels_of_a_known_space_are_taken_for_a_larger_network(tmp_path: Path) -> None:
    """Classes meet by name: what the labels lack is never trained, what they have is mapped."""
    source = write_domain(tmp_path / "s", 4, 1)
    found = DataConfig(**domain(source)).open(class_space("cityscapes-19"))
    names = class_space("cityscapes-19").names
    wanted = {names.index(name) for name in CLASSES} | {255}
    assert set(found[1].label.flatten().tolist()) == wanted


def test_a_misspelled_target_is_refused() -> None:
    """It would protect nothing."""
    with pytest.raises(ValueError, match=r"got 'cityscpaes'; did you mean 'cityscapes'"):
        TrainConfig(model=MODEL, source=GTA, targets=["cityscpaes"])
    with pytest.raises(ValueError, match=r"a target must be .* or a folder, got 'citiscapes/val'"):
        TrainConfig(model=MODEL, source=GTA, targets=["citiscapes/val"])


def test_classes_and_seeds_differ() -> None:
    with pytest.raises(ValueError, match="class names must differ, got 'road'"):
        replace(MODEL, classes=["road", "sky", "road"])
    with pytest.raises(ValueError, match=r"seeds must differ, got \[1, 1\]"):
        TrainConfig(model=MODEL, source=GTA, seeds=[1, 1])


@pytest.mark.parametrize("setting", [{"frozen_batchnorm": True}, {"statistics_batches": 3}])
def test_settings_of_batchnorm_need_batchnorm(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="apply to BatchNorm, but the network has norm 'bin'"):
        TrainConfig(model=replace(MODEL, norm="bin"), source=GTA, **setting)
