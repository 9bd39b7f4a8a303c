"""The networks of the paper."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

import selfadapt
from conftest import random_image, seeded
from networks import FAMILIES
from selfadapt import MODELS, SelfAdapt
from selfadapt.models.detect import detect
from selfadapt.models.families import adapted_parameters
from selfadapt.models.upernet import swin_tiny
from selfadapt.norm import find_san

MILLIONS = {
    "deeplabv1_resnet50": 25.557 - 2.049 + 0.039,  # torchvision's, its classifier out, ours in
    "deeplabv1_resnet101": 44.549 - 2.049 + 0.039,
    "deeplabv1_resnet18_slim": 2.820,
    "deeplabv3plus_resnet50": 39.761 - 0.552,  # the released code's, the last 3x3 separable
    "deeplabv3plus_resnet101": 58.753 - 0.552,
    "hrnet_w18": 9.641,
    "hrnet_w48": 65.859,
    "upernet_swin_tiny": 58.951,
}


def meta(name: str, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return selfadapt.create_model(name, **options)


@pytest.mark.parametrize("name", MODELS)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    millions = sum(parameter.numel() for parameter in meta(name).parameters()) / 1e6
    assert millions == pytest.approx(MILLIONS[name], abs=0.001)
    published = float(MODELS[name].published.split(" M")[0])
    assert millions == pytest.approx(published, rel=0.02)


LAST = {
    "deeplabv1": "backbone.layer4",
    "deeplabv3plus": "encoder.layer4",
    "hrnet": "backbone.stage4",
    "upernet": "encoder.model.layers_3",
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("classes", [16, 19, 3])
def test_a_network_has_any_number_of_classes_and_its_stride(name: str, classes: int) -> None:
    model = meta(name, classes=classes)
    features = []
    last = model.get_submodule(LAST[name.split("_")[0]])
    last.register_forward_hook(lambda _, __, output: features.append(output))
    output = model(torch.empty(1, 3, 64, 128, device="meta"))
    assert tuple(output.shape) == (1, classes, 64, 128)
    finest = features[0][0] if isinstance(features[0], list) else features[0]
    stride = MODELS[name].stride
    assert {64 // stride, 128 // stride} <= set(finest.shape)


ADAPTED = {
    "deeplabv1_resnet50": {"backbone.layer3", "backbone.layer4", "cls_head.weight"},
    "deeplabv1_resnet101": {"backbone.layer4", "cls_head.weight"},
    "deeplabv1_resnet18_slim": {"backbone.layer3", "backbone.layer4", "cls_head.weight"},
    "deeplabv3plus_resnet50": {"encoder.layer3", "encoder.layer4", "decoder.aspp"},
    "deeplabv3plus_resnet101": {"encoder.layer4", "decoder.aspp"},
    "hrnet_w18": {"backbone.transition3", "backbone.stage4", "head.3"},
    "hrnet_w48": {"backbone.transition3", "backbone.stage4", "head.3"},
    "upernet_swin_tiny": {"encoder.model", "decoder.psp"},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_network_knows_which_layers_adapt(name: str) -> None:
    selection = adapted_parameters(meta(name))
    parts = {".".join(parameter.split(".")[:2]) for parameter in selection.names}
    assert parts >= ADAPTED[name]
    assert not parts & {"backbone.conv1", "backbone.layer2", "encoder.layer2", "backbone.stage3"}
    assert not selection.notes


def test_swin_adapts_its_last_two_stages_and_san_acts_on_the_decoder() -> None:
    model = meta("upernet_swin_tiny")
    stages = {n.split(".")[2] for n in adapted_parameters(model).names if n.startswith("encoder")}
    assert stages == {"layers_2", "layers_3"}
    report = find_san(model, 0.1)
    assert {name.split(".")[0] for name in report.converted} == {"decoder"}
    assert "12 BatchNorm layers in decoder; skipped 28" in str(report)


@pytest.mark.parametrize("name", ["deeplabv3plus_resnet50", "upernet_swin_tiny"])
def test_pooling_to_one_value_works_for_one_image(name: str) -> None:
    """In training such layers fail at batch size 1, for want of a variance."""
    model = seeded(lambda: selfadapt.create_model(name, classes=3))
    batches = []
    model.register_forward_pre_hook(lambda _, inputs: batches.append(len(inputs[0])))
    for mode in ("paper", "official"):
        result = SelfAdapt(model, mode=mode, steps=2, scales=(1.0,), alpha=1.0)(random_image())
        assert len(result.losses) == 2
        assert torch.isfinite(result.probs).all()
    assert set(batches) == {1}


@pytest.mark.parametrize("name", FAMILIES.values())
def test_what_a_network_takes_is_what_trying_it_shows(name: str) -> None:
    model = seeded(lambda: selfadapt.create_model(name, classes=3))
    known = model.interface
    del model.interface
    assert detect(model) == known


# HRNet


CORNERS = {"released": (True, False), "aligned": (True, True), "free": (False, False)}
"""Whether corners are aligned in the backbone and at the end, and before the head."""


def resized(maps: Tensor, size: tuple[int, int], aligned: bool) -> Tensor:
    return F.interpolate(maps, size, mode="bilinear", align_corners=aligned)


@pytest.mark.parametrize("corners", CORNERS)
def test_the_head_of_an_hrnet_sees_all_branches(corners: str) -> None:
    model = seeded(lambda: selfadapt.create_model("hrnet_w18", classes=3, corners=corners))
    aligned, joined_aligned = CORNERS[corners]
    x = torch.rand(1, 3, 64, 96)
    with torch.no_grad():
        branches = model.backbone(x)
        assert [tuple(b.shape[1:]) for b in branches] == [
            (18, 16, 24), (36, 8, 12), (72, 4, 6), (144, 2, 3),
        ]  # fmt: skip
        y = torch.cat([resized(b, (16, 24), joined_aligned) for b in branches], dim=1)
        for layer in model.head:
            y = layer(y)
        torch.testing.assert_close(model(x), resized(y, (64, 96), aligned))


@pytest.mark.parametrize("corners", CORNERS)
def test_branches_of_an_hrnet_meet_at_any_size(corners: str) -> None:
    model = seeded(lambda: selfadapt.create_model("hrnet_w18", classes=3, corners=corners))
    module = model.backbone.stage3[0]
    x = [torch.rand(1, 18 * 2**n, *size) for n, size in enumerate([(13, 7), (7, 4), (4, 2)])]
    with torch.no_grad():
        first, second, third = (b(maps) for b, maps in zip(module.branches, x, strict=True))
        up, down = module.fuse_layers[1][2], module.fuse_layers[1][0]
        expected = down(first) + second + resized(up(third), (7, 4), CORNERS[corners][0])
        torch.testing.assert_close(module(x)[1], expected.relu())
        assert model(torch.rand(1, 3, 50, 31)).shape == (1, 3, 50, 31)


# ImageNet


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put made-up ImageNet weights where torchvision and timm keep what they have downloaded."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def in_hub(hub: Path, repo: str, tensors: dict[str, torch.Tensor]) -> None:
    folder = hub / "hf" / f"models--{repo.replace('/', '--')}"
    (folder / "snapshots" / "1").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1")
    save_file(tensors, folder / "snapshots" / "1" / "model.safetensors")


@pytest.mark.parametrize("name", ["deeplabv1_resnet50", "deeplabv3plus_resnet50"])
def test_imagenet_weights_of_a_resnet_come_from_torchvision(name: str, hub: Path) -> None:
    resnet = seeded(lambda: torchvision.models.resnet50(weights=None))
    folder = hub / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save(resnet.state_dict(), folder / "resnet50-0676ba61.pth")
    model = selfadapt.create_model(name, classes=3, weights="imagenet")
    backbone = model.get_submodule(MODELS[name].backbone)
    assert torch.equal(backbone.layer4[2].conv3.weight, resnet.layer4[2].conv3.weight)
    assert torch.equal(backbone.bn1.running_var, resnet.bn1.running_var)


def test_imagenet_weights_of_an_hrnet_come_from_timm(hub: Path) -> None:
    whole = seeded(lambda: timm.create_model("hrnet_w18"))
    in_hub(hub, "timm/hrnet_w18.ms_aug_in1k", dict(whole.state_dict()))
    model = selfadapt.create_model("hrnet_w18", classes=3, weights="imagenet")
    for name, value in model.backbone.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name


def test_imagenet_weights_of_a_swin_come_from_timm(hub: Path) -> None:
    whole = seeded(lambda: timm.create_model("swin_tiny_patch4_window7_224"))
    in_hub(hub, "timm/swin_tiny_patch4_window7_224.ms_in1k", dict(whole.state_dict()))
    model = selfadapt.create_model("upernet_swin_tiny", classes=3, weights="imagenet")
    block = model.encoder.model.layers_3.blocks[1]
    assert torch.equal(block.mlp.fc1.weight, whole.layers[3].blocks[1].mlp.fc1.weight)
    assert list(swin_tiny().state_dict()) == list(model.encoder.model.state_dict())


def test_without_a_network_the_error_says_what_to_do(hub: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("urllib.request.urlopen", offline)
    for name in FAMILIES.values():
        with pytest.raises(OSError, match=r"could not be fetched .* give weights=FILE"):
            selfadapt.create_model(name, weights="imagenet")


def offline(*_: Any, **__: Any) -> None:
    raise OSError("no route to host")


@pytest.mark.parametrize(
    ("name", "timm_name"),
    [("hrnet_w18", "hrnet_w18"), ("upernet_swin_tiny", "swin_tiny_patch4_window7_224")],
)
def test_a_local_file_of_timm_starts_the_backbone(
    name: str, timm_name: str, tmp_path: Path
) -> None:
    whole = seeded(lambda: timm.create_model(timm_name))
    torch.save(whole.state_dict(), tmp_path / "backbone.pth")
    with pytest.warns(UserWarning, match=r"backbone\.pth has the backbone only"):
        model = selfadapt.create_model(name, classes=3, weights=tmp_path / "backbone.pth")
    backbone = model.get_submodule(MODELS[name].backbone)
    loaded = [v for v in backbone.state_dict().values() if v.dim() == 4]
    assert all(any(torch.equal(v, w) for w in whole.state_dict().values()) for v in loaded[-3:])
