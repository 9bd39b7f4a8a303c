"""Bad input gets a clear message: what must be, what came, what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PILImage
from torch import nn

import selfadapt
from conftest import TinyNet, assert_same, random_image, seeded, snapshot
from selfadapt import Interface, SelfAdapt, View
from selfadapt.labels import class_names
from selfadapt.models.weights import load_weights, read_weights

RAISES = {
    "alpha too large": (
        lambda model: SelfAdapt(model, alpha=1.5),
        ValueError,
        r"alpha must lie in \[0, 1\] \(0: source statistics, 1: image statistics\), got 1.5",
    ),
    "alpha not a number": (
        lambda model: SelfAdapt(model, alpha="high"),
        ValueError,
        r"alpha must lie in \[0, 1\].*got 'high'",
    ),
    "alpha NaN": (lambda model: selfadapt.apply_san(model, float("nan")), ValueError, "got nan"),
    "alpha by a layer that is not there": (
        lambda model: selfadapt.apply_san(model, {"nrom1": 0.1}),
        ValueError,
        r"alpha names no normalisation layer with 'nrom1'; did you mean 'norm1'\?.*norm1, norm2",
    ),
    "psi too large": (
        lambda model: SelfAdapt(model, psi=1.4),
        ValueError,
        r"psi must lie in \[0, 1\].*got 1.4",
    ),
    "steps negative": (
        lambda model: SelfAdapt(model, steps=-1),
        ValueError,
        "steps must be a whole number, 0 or more, got -1",
    ),
    "steps a fraction": (lambda model: SelfAdapt(model, steps=2.5), ValueError, "got 2.5"),
    "lr zero": (
        lambda model: SelfAdapt(model, lr=0),
        ValueError,
        "lr must be a positive number, got 0",
    ),
    "lr infinite": (lambda model: SelfAdapt(model, lr=float("inf")), ValueError, "got inf"),
    "unknown mode": (
        lambda model: SelfAdapt(model, mode="offical"),
        ValueError,
        "unknown mode 'offical'; did you mean 'official'. known: auto, paper, official",
    ),
    "no scales": (lambda model: SelfAdapt(model, scales=()), ValueError, "at least one view"),
    "scale zero": (
        lambda model: SelfAdapt(model, scales=(0.5, 0)),
        ValueError,
        "scale of a view must be a positive number, 4 at most, got 0",
    ),
    "not a view": (
        lambda model: SelfAdapt(model, views=[0.5]),
        TypeError,
        "views must be View objects, got float; use scales=",
    ),
    "layers that are not there": (
        lambda model: SelfAdapt(model, adapt=["haed"]),
        ValueError,
        r"adapt names no parameters of this model with 'haed'; did you mean 'head'\?.*body, head",
    ),
    "no layers": (lambda model: SelfAdapt(model, adapt=[]), ValueError, "at least one layer"),
    "max_pixels zero": (
        lambda model: SelfAdapt(model, max_pixels=0),
        ValueError,
        "max_pixels must be a positive whole number, got 0",
    ),
    "max_pixels in official mode": (
        lambda model: SelfAdapt(model, mode="official", max_pixels=100),
        ValueError,
        "max_pixels cannot be set in official mode",
    ),
    "not a model": (
        lambda _: SelfAdapt("resnet"),
        TypeError,
        "model must be a torch.nn.Module, got str",
    ),
    "a TorchScript model": (
        lambda _: SelfAdapt(torch.jit.script(nn.Conv2d(3, 2, 1))),
        TypeError,
        "a TorchScript model cannot be adapted",
    ),
    "a model without parameters": (
        lambda _: SelfAdapt(nn.Sequential(nn.ReLU())),
        ValueError,
        "this model has no parameters",
    ),
    "a classifier": (
        lambda _: SelfAdapt(
            nn.Sequential(nn.Conv2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        ),
        TypeError,
        r"must return class scores \(B, C, H, W\), got \(1, 2\)",
    ),
    "an unknown dict": (
        lambda _: SelfAdapt(TinyNet(form=lambda y: {"a": y, "b": y})),
        TypeError,
        r"returns \['a', 'b'\], none of which is called out or logits or pred",
    ),
    "mean of the wrong length": (
        lambda model: SelfAdapt(model, interface=Interface(mean=(0.5,), std=(0.5,))),
        ValueError,
        r"mean must have one number for each of the 3 input channels, got \(0.5,\)",
    ),
    "std zero": (
        lambda model: SelfAdapt(model, interface=Interface(mean=(0.0,) * 3, std=(0.0,) * 3)),
        ValueError,
        "std must be positive",
    ),
    "unknown network": (
        lambda _: selfadapt.create_model("deeplabv1_resnet5"),
        ValueError,
        "unknown model 'deeplabv1_resnet5'; did you mean 'deeplabv1_resnet50'",
    ),
    "unknown option": (
        lambda _: selfadapt.create_model("deeplabv1_resnet50", stile="caffe"),
        ValueError,
        "has no option 'stile'; did you mean 'style'",
    ),
    "unknown style": (
        lambda _: selfadapt.create_model("deeplabv1_resnet50", style="cafe"),
        ValueError,
        "style of deeplabv1_resnet50 must be one of 'pytorch', 'caffe', got 'cafe'",
    ),
    "no classes": (
        lambda _: selfadapt.create_model("deeplabv1_resnet50", classes=0),
        ValueError,
        "number of classes must be a whole number, 1 to 65536, got 0",
    ),
    "unknown class space": (
        lambda _: class_names("cityscapes-20"),
        ValueError,
        "unknown class space 'cityscapes-20'; did you mean 'cityscapes-19'",
    ),
    "a model of unknown make": (
        lambda model: selfadapt.save_model(model, "never.safetensors"),
        TypeError,
        "model must come from create_model or load_model, which record its architecture, got",
    ),
    "scales as text": (lambda model: SelfAdapt(model, scales="0.5"), ValueError, "got '0'"),
    "adapt not names": (lambda model: SelfAdapt(model, adapt=3), TypeError, "patterns, got 3"),
    "adapt not a name": (lambda model: SelfAdapt(model, adapt=[3]), TypeError, "got 3 in it"),
    "alpha by nothing": (lambda model: SelfAdapt(model, alpha={}), ValueError, "map name patterns"),
    "alpha by number": (lambda model: SelfAdapt(model, alpha={1: 0.2}), ValueError, "{1: 0.2}"),
    "no mode": (lambda model: SelfAdapt(model, mode=None), ValueError, "unknown mode None"),
    "interface a dict": (
        lambda model: SelfAdapt(model, interface={"mean": 1}),
        TypeError,
        "interface must be an Interface, got dict",
    ),
    "mean a number": (lambda _: Interface(mean=0.5), TypeError, r"mean must be a tuple such as \("),
    "size a number": (lambda _: Interface(size=224), TypeError, r"size must be a tuple such as \("),
    "divisor negative": (
        lambda _: Interface(divisor=-1),
        ValueError,
        "divisor must be a whole number, 1",
    ),
    "output a name": (lambda _: Interface(output="out"), TypeError, "output must be a function"),
    "output of another network": (
        lambda model: SelfAdapt(
            TinyNet(form=lambda y: {"a": y}), interface=Interface(output=lambda y: y["b"])
        ),
        TypeError,
        "output= failed with KeyError.*which is dict",
    ),
    "SaN on text": (lambda _: selfadapt.apply_san("net"), TypeError, "torch.nn.Module, got str"),
    "lazy layers": (
        lambda _: SelfAdapt(nn.Sequential(nn.LazyConv2d(3, 1))),
        ValueError,
        "lazy layers without weights",
    ),
    "classes a fraction": (
        lambda _: class_names(3.5),
        ValueError,
        "number of classes must be a whole number, 1 to 65536, got 3.5",
    ),
    "dtype by name": (
        lambda _: selfadapt.save_model(
            selfadapt.create_model("deeplabv1_resnet50", classes=2), "never", dtype="float16"
        ),
        TypeError,
        "dtype must be a torch.dtype such as torch.float16, got 'float16'",
    ),
    "no views to fuse": (lambda _: selfadapt.fuse([]), ValueError, "at least one view is needed"),
    "view with a negative scale": (lambda _: View(-1.0), ValueError, "got -1.0"),
}


@pytest.mark.parametrize("case", RAISES)
def test_a_wrong_setting_is_refused(case: str, tiny: nn.Module) -> None:
    call, error, message = RAISES[case]
    before = snapshot(tiny)
    with pytest.raises(error, match=message):
        call(tiny)
    assert_same(before, snapshot(tiny))


IMAGES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "no such file": (lambda p: p / "a.png", FileNotFoundError, "there is no image file .*a.png"),
    "a folder": (lambda p: p, ValueError, "is a folder"),
    "a text file": (
        lambda p: _written(p / "a.jpg", b"hello"),
        ValueError,
        "a.jpg is not an image file that can be read",
    ),
    "an empty file": (lambda p: _written(p / "a.png", b""), ValueError, "is not an image file"),
    "a cut off file": (lambda p: _cut_off(p / "a.png"), ValueError, "cut off or damaged"),
    "a number": (lambda _: 3, TypeError, "an image must be a path.*got int"),
    "a list": (lambda _: [[1, 2]], TypeError, "got list"),
    "a batch": (
        lambda _: torch.rand(2, 3, 8, 8),
        ValueError,
        r"must have the shape \(3, H, W\), got \(2, 3, 8, 8\); images have two dimensions",
    ),
    "two channels": (
        lambda _: torch.rand(2, 8, 8),
        ValueError,
        "takes 3 channels, got an image with 2",
    ),
    "no pixels at all": (lambda _: PILImage.new("RGB", (0, 0)), ValueError, "must have pixels"),
    "channels last tensor": (
        lambda _: torch.rand(40, 50, 3),
        ValueError,
        r"got \(40, 50, 3\), which looks like \(H, W, C\); use image.permute",
    ),
    "no pixels": (lambda _: torch.rand(3, 0, 8), ValueError, r"got \(3, 0, 8\)"),
    "8-bit values as float": (
        lambda _: torch.rand(3, 8, 8) * 255,
        ValueError,
        r"must lie in \[0, 1\], got values from .*divide 8-bit values by 255, or say normalized",
    ),
    "NaN": (lambda _: torch.full((3, 8, 8), float("nan")), ValueError, "NaN or infinite"),
    "integers": (lambda _: torch.ones(3, 8, 8, dtype=torch.int64), TypeError, "got torch.int64"),
    "bool array": (lambda _: np.ones((8, 8, 3), bool), TypeError, "uint8, uint16 or float, got"),
    "channels first array": (
        lambda _: np.zeros((3, 80, 80), np.uint8),
        ValueError,
        r"got \(3, 80, 80\), which looks like \(C, H, W\)",
    ),
    "one dimension": (lambda _: np.zeros(8, np.uint8), ValueError, r"\(H, W, C\), got \(8,\)"),
    "32-bit levels": (
        lambda _: PILImage.fromarray(np.full((4, 4), 70000, np.int32)),
        ValueError,
        "must hold 16-bit values, got values from 70000 to 70000",
    ),
}


@pytest.mark.parametrize("case", IMAGES)
def test_a_wrong_image_is_refused(case: str, tiny: nn.Module, tmp_path: Path) -> None:
    make, error, message = IMAGES[case]
    method = SelfAdapt(tiny, steps=1)
    before = snapshot(tiny)
    with pytest.raises(error, match=message):
        method(make(tmp_path))
    assert_same(before, snapshot(tiny))


def test_normalised_goes_with_float_tensors_only(tiny: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"normalized=True takes a float tensor .* got ndarray"):
        SelfAdapt(tiny)(np.zeros((8, 8, 3), np.uint8), normalized=True)


def test_a_file_cannot_feed_a_network_of_many_channels(tmp_path: Path) -> None:
    PILImage.new("RGB", (8, 8)).save(tmp_path / "a.png")
    method = SelfAdapt(seeded(lambda: TinyNet(channels=5)))
    with pytest.raises(ValueError, match=r"takes 5 channels, .* give a tensor \(5, H, W\)"):
        method(tmp_path / "a.png")


def test_a_decompression_bomb_is_refused(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PILImage.new("RGB", (64, 64)).save(tmp_path / "a.png")
    monkeypatch.setattr(PILImage, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ValueError, match="has more pixels than one image may have"):
        SelfAdapt(tiny)(tmp_path / "a.png")


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_a_network_without_gradients_is_said_to_be_so(guard: Any) -> None:
    class Detached(TinyNet):
        @guard()
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x)

    with pytest.raises(ValueError, match="the network's output carries no gradient"):
        SelfAdapt(seeded(Detached), mode="paper")(random_image())


def test_a_failing_network_says_on_what(tiny: nn.Module) -> None:
    def fail(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if inputs[0].shape[-1] == 12:
            raise RuntimeError("too small")

    method = SelfAdapt(tiny)
    tiny.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="too small") as caught:
        method(random_image(32, 48))
    assert "while the network ran on an image of 12x8 pixels" in caught.value.__notes__[0]


WEIGHTS: dict[str, tuple[Callable[[Path], Path], type[Exception], str]] = {
    "no such file": (lambda p: p / "w.pth", FileNotFoundError, "no weights file .*w.pth"),
    "not a checkpoint": (lambda p: _written(p / "w.pth", b"hello"), ValueError, "tensors alone"),
    "torn safetensors": (
        lambda p: _written(p / "w.safetensors", b"\x40\0\0\0\0\0\0\0{"),
        ValueError,
        "is not a complete safetensors file",
    ),
    "a pickled model": (
        lambda p: _saved(p / "w.pth", nn.Conv2d(1, 1, 1)),
        ValueError,
        r"nothing else is loaded for safety; .* save its state_dict\(\) instead",
    ),
    "a list": (lambda p: _saved(p / "w.pth", [1, 2]), ValueError, "must contain tensors by name"),
    "a snake that bites its tail": (
        lambda p: _saved(p / "w.pth", _endless()),
        ValueError,
        "contains no tensors",
    ),
    "a torn old checkpoint": (
        lambda p: _torn(_saved(p / "w.pth", {"a": torch.rand(9)}, old=True)),
        ValueError,
        "tensors alone",
    ),
    "no tensors": (lambda p: _saved(p / "w.pth", {"lr": 0.1}), ValueError, "contains no tensors"),
    "another network": (
        lambda p: _saved(p / "w.pth", nn.Conv2d(1, 1, 1).state_dict()),
        ValueError,
        "it lacks .* and .* more; it has unexpected weight, bias; it does not fit any of deeplab",
    ),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_wrong_weights_are_refused(case: str, tmp_path: Path) -> None:
    make, error, message = WEIGHTS[case]
    model = selfadapt.create_model("deeplabv1_resnet50", classes=2)
    before = snapshot(model)
    with pytest.raises(error, match=message):
        load_weights(model, read_weights(make(tmp_path)))
    assert_same(before, snapshot(model))


def test_another_number_of_classes_is_refused(tmp_path: Path) -> None:
    selfadapt.save_model(
        selfadapt.create_model("deeplabv1_resnet50", classes=3), tmp_path / "w.safetensors"
    )
    with pytest.raises(ValueError, match="it has 3 classes, but 4 are requested; give --classes 3"):
        selfadapt.create_model("deeplabv1_resnet50", classes=4, weights=tmp_path / "w.safetensors")


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _saved(path: Path, thing: Any, old: bool = False) -> Path:
    torch.save(thing, path, _use_new_zipfile_serialization=not old)
    return path


def _torn(path: Path) -> Path:
    return _written(path, path.read_bytes()[:-20])


def _endless() -> dict[str, Any]:
    content: dict[str, Any] = {}
    content["state_dict"] = content
    return content


def _cut_off(path: Path) -> Path:
    PILImage.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(path)
    return _written(path, path.read_bytes()[:5000])
