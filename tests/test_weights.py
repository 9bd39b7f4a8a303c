"""Other people's checkpoints."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

import selfadapt
from conftest import seeded
from selfadapt.models.weights import load_weights, read_weights

CLASSES = ("road", "car", "sky")


def mmseg(model: nn.Module, parts: dict[str, str]) -> dict[str, Tensor]:
    """Give a network's weights mmsegmentation's names, and an auxiliary head."""
    tensors = {}
    for name, value in model.state_dict().items():
        part = next((part for part in parts if name.startswith(f"{part}.")), None)
        tensors[name if part is None else parts[part] + name.removeprefix(part)] = value
    return tensors | {"auxiliary_head.conv_seg.weight": torch.zeros(3, 256, 1, 1)}


def same(first: nn.Module, second: nn.Module) -> bool:
    x = torch.rand(1, 3, 64, 96)
    with torch.no_grad():
        return torch.equal(first(x), second(x))


HRNET = {"head.0": "decode_head.convs.0.conv", "head.1": "decode_head.convs.0.bn",
         "head.3": "decode_head.conv_seg"}  # fmt: skip


@pytest.mark.parametrize("meta", [{"CLASSES": CLASSES}, {"dataset_meta": {"classes": CLASSES}}])
@pytest.mark.parametrize(
    ("name", "parts"),
    [("deeplabv1_resnet50", {"cls_head": "decode_head.conv_seg"}), ("hrnet_w18", HRNET)],
)
def test_mmsegmentation_checkpoints_load_with_their_classes(
    name: str, parts: dict[str, str], meta: dict[str, Any], tmp_path: Path
) -> None:
    options = {"corners": "free"}
    if name == "deeplabv1_resnet50":
        options["dilation"] = "torchvision"
    trained = seeded(lambda: selfadapt.create_model(name, classes=3, **options))
    if name == "hrnet_w18":
        nn.init.zeros_(trained.head[0].bias)
    tensors = mmseg(trained, parts)
    tensors.pop("decode_head.convs.0.conv.bias", None)
    torch.save({"meta": meta, "state_dict": tensors, "optimizer": {}}, tmp_path / "iter_1.pth")
    model = selfadapt.create_model(name, weights=tmp_path / "iter_1.pth")
    assert model.spec.classes == CLASSES
    assert model.spec.options == trained.spec.options
    assert same(model, trained)
    aligned = selfadapt.create_model(name, weights=tmp_path / "iter_1.pth", corners="aligned")
    assert not same(aligned, trained)


def test_the_authors_hrnet_checkpoints_load(tmp_path: Path) -> None:
    trained = seeded(lambda: selfadapt.create_model("hrnet_w18", classes=3))
    tensors = {}
    for name, value in trained.state_dict().items():
        plain = name.removeprefix("backbone.").replace("head.", "last_layer.", 1)
        tensors[f"model.{plain}"] = value
    torch.save({"state_dict": tensors}, tmp_path / "hrnet.pth")
    model = selfadapt.create_model("hrnet_w18", weights=tmp_path / "hrnet.pth")
    assert same(model, trained)


@pytest.mark.parametrize("wrap", ["state_dict", "model", "model_state_dict", ""])
@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.", "module.model.", ""])
def test_wrappings_come_off(wrap: str, prefix: str, tmp_path: Path) -> None:
    trained = seeded(lambda: selfadapt.create_model("deeplabv1_resnet18_slim", classes=3))
    tensors: Any = {f"{prefix}{name}": value for name, value in trained.state_dict().items()}
    torch.save({wrap: tensors, "epoch": 3} if wrap else tensors, tmp_path / "w.pth")
    model = selfadapt.create_model("deeplabv1_resnet18_slim", weights=tmp_path / "w.pth")
    assert len(model.spec.classes) == 3
    assert same(model, trained)


class Odd(nn.Module):
    """A network whose own names look like wrappings and like the released code's."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"x": nn.Sequential(nn.Conv2d(3, 2, 1))})
        self.model["x"].add_module("batch_norm", nn.BatchNorm2d(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.model["x"](x)


def test_a_network_takes_its_own_weights_whatever_their_names(tmp_path: Path) -> None:
    trained, model = seeded(Odd, 1), seeded(Odd, 2)
    for wrapped in (trained.state_dict(), {"state_dict": trained.state_dict()}):
        torch.save(wrapped, tmp_path / "w.pth")
        load_weights(model, read_weights(tmp_path / "w.pth"))
        assert same(model, trained)


BESIDES = {
    "a loss": lambda own: {**_prefixed("model.", own), "criterion.weight": torch.ones(3)},
    "a moving average": lambda own: {
        **_prefixed("model.", own),
        **_prefixed("ema_model.", {name: value * 0 for name, value in own.items()}),
    },
    "a counter": lambda own: {**_prefixed("module.", own), "n_averaged": torch.tensor(3)},
    "another name": lambda own: _prefixed("net.", own),
    "a classification head": lambda own: {**own, "classification_head.3.weight": torch.ones(2, 2)},
    "wrapped by an unknown word": lambda own: {"net": dict(own), "epoch": 3},
}


def _prefixed(prefix: str, tensors: Any) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in tensors.items()}


@pytest.mark.parametrize("case", BESIDES)
def test_a_network_is_found_among_other_things(case: str, tmp_path: Path) -> None:
    trained = seeded(lambda: selfadapt.create_model("smp:Unet/resnet18", classes=4))
    torch.save(BESIDES[case](trained.state_dict()), tmp_path / "w.ckpt")
    model = selfadapt.create_model("smp:Unet/resnet18", weights=tmp_path / "w.ckpt")
    assert len(model.spec.classes) == 4
    assert same(model, trained)


def test_a_backbone_below_its_name_is_one_but_a_whole_network_never_is(tmp_path: Path) -> None:
    trained = selfadapt.create_model("smp:Unet/resnet18", classes=4)
    own = trained.state_dict()
    encoder = {name: value for name, value in own.items() if name.startswith("encoder.")}
    torch.save(encoder, tmp_path / "encoder.pth")
    with pytest.warns(UserWarning, match="has the backbone only"):
        selfadapt.create_model("smp:Unet/resnet18", weights=tmp_path / "encoder.pth")
    torch.save(own, tmp_path / "w.pth")
    with pytest.raises(ValueError, match="it has 4 classes, but 5 are requested"):
        selfadapt.create_model("smp:Unet/resnet18", classes=5, weights=tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"it lacks decoder\.p.*it has unexpected decoder\.blocks"):
        selfadapt.create_model("smp:FPN/resnet18", classes=4, weights=tmp_path / "w.pth")


def test_what_keeps_a_checkpoint_from_loading_is_named(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "args": argparse.Namespace(lr=1)}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"it holds argparse\.Namespace: save its state_dict"):
        read_weights(tmp_path / "w.pth")


def test_another_head_is_not_left_out_in_silence(tmp_path: Path) -> None:
    tensors = dict(torchvision.models.resnet50(weights=None).state_dict())
    tensors["classifier.0.weight"] = torch.zeros(19, 2048, 1, 1)
    torch.save(tensors, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"it has unexpected classifier\.0\.weight"):
        selfadapt.create_model("deeplabv1_resnet50", weights=tmp_path / "w.pth")


def test_metadata_of_other_makers_is_no_trouble(tmp_path: Path) -> None:
    tensors = selfadapt.create_model("hrnet_w18", classes=3).state_dict()
    save_file(tensors, tmp_path / "w.safetensors", metadata={"arch": "hrnet", "classes": "three"})
    model = selfadapt.create_model("hrnet_w18", weights=tmp_path / "w.safetensors")
    assert len(model.spec.classes) == 3


def test_a_mismatch_names_the_network_that_would_fit(tmp_path: Path) -> None:
    trained = selfadapt.create_model("deeplabv1_resnet101", classes=19)
    torch.save(trained.state_dict(), tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"it has unexpected backbone\.layer3\.6.* more; .*101'"):
        selfadapt.create_model("deeplabv1_resnet50", weights=tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"it lacks .* it is closest to 'deeplabv1_resnet101'"):
        selfadapt.create_model("hrnet_w18", weights=tmp_path / "w.pth")


def test_the_classes_of_a_file_are_taken_unless_others_are_asked_for(tmp_path: Path) -> None:
    trained = selfadapt.create_model("hrnet_w18", classes=CLASSES)
    path = tmp_path / "net.safetensors"
    selfadapt.save_model(trained, path)
    assert selfadapt.create_model("hrnet_w18", weights=path).spec.classes == CLASSES
    assert selfadapt.create_model("hrnet_w18", weights=path, classes=3).spec.classes[0] == "class 0"
    with pytest.raises(
        ValueError, match="it has 3 classes, but 16 are requested; give --classes 3"
    ):
        selfadapt.create_model("hrnet_w18", weights=path, classes="synthia-16")


def test_weights_of_another_width_are_refused_by_name_and_shape(tmp_path: Path) -> None:
    tensors = selfadapt.create_model("hrnet_w18", classes=3).state_dict()
    tensors["head.0.weight"] = torch.zeros(270, 99, 1, 1)
    torch.save(tensors, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"head\.0\.weight has the shape \(270, 99, 1, 1\), but"):
        selfadapt.create_model("hrnet_w18", classes=3, weights=tmp_path / "w.pth")


def test_dropout_comes_with_building_saving_and_loading(tmp_path: Path) -> None:
    model = seeded(lambda: selfadapt.create_model("hrnet_w18", classes=3, dropout=0.1))
    selfadapt.save_model(model, tmp_path / "net.safetensors")
    loaded = selfadapt.load_model(tmp_path / "net.safetensors")
    assert loaded.spec.dropout == 0.1
    rates = [module.p for module in loaded.modules() if isinstance(module, nn.Dropout)]
    assert len(rates) == sum(isinstance(module, nn.ReLU) for module in loaded.modules())
    assert set(rates) == {0.1}
    assert same(loaded, model)
    plain = seeded(lambda: selfadapt.create_model("hrnet_w18", classes=3))
    assert list(plain.state_dict()) == list(model.state_dict())
    selfadapt.save_model(plain, tmp_path / "plain.safetensors")
    again = selfadapt.load_model(tmp_path / "plain.safetensors", dropout=0.2)
    assert {m.p for m in again.modules() if isinstance(m, nn.Dropout)} == {0.2}
    none = selfadapt.load_model(tmp_path / "net.safetensors", dropout=0.0)
    assert not [m for m in none.modules() if isinstance(m, nn.Dropout)]
    with pytest.raises(ValueError, match=r"the dropout rate must lie between 0 and 1, got 1\.5"):
        selfadapt.create_model("hrnet_w18", dropout=1.5)


def test_numbers_that_are_not_finite_are_said(tmp_path: Path) -> None:
    """One variance that overflowed leaves a channel dead, which no prediction shows."""
    build = partial(selfadapt.create_model, "deeplabv1_resnet18_slim", classes=3)
    tensors = build().state_dict()
    tensors["backbone.bn1.running_var"][2] = torch.inf
    torch.save(tensors, tmp_path / "net.pth")
    with pytest.warns(UserWarning, match="not finite are backbone.bn1.running_var; variances"):
        build(weights=tmp_path / "net.pth")


def test_tensors_without_all_their_numbers_are_refused(tmp_path: Path) -> None:
    tensors = selfadapt.create_model("deeplabv1_resnet18_slim", classes=3).state_dict()
    tensors["cls_head.weight"] = tensors["cls_head.weight"].to_sparse()
    torch.save(dict(tensors), tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"w\.pth cannot be loaded into this network"):
        selfadapt.create_model("deeplabv1_resnet18_slim", weights=tmp_path / "w.pth")
