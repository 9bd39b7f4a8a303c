"""Networks of other libraries, by address."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import segmentation_models_pytorch as smp
import torch
import torchvision.models.segmentation as tv
import transformers
from safetensors.torch import save_file
from torch import nn
from torchvision.models import resnet18

import selfadapt
from conftest import random_image, seeded
from networks import segformer
from selfadapt import SelfAdapt

OWN = """
import torch
torch.manual_seed(0)

def build(num_classes=4):
    return torch.nn.Sequential(torch.nn.Conv2d(3, num_classes, 1))

def plain():
    return torch.nn.Conv2d(3, 2, 1)

def number():
    return 5

def leaves():
    raise SystemExit(3)

constant = 3
"""


def test_torchvision_with_its_published_weights(tmp_path: Path, monkeypatch: Any) -> None:
    published = seeded(lambda: tv.fcn_resnet50(weights=None, weights_backbone=None, aux_loss=True))
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    torch.save(published.state_dict(), folder / "fcn_resnet50_coco-1167a1af.pth")
    model = selfadapt.create_model("torchvision:fcn_resnet50")
    assert model.spec.classes[:3] == ("__background__", "aeroplane", "bicycle")
    x = torch.rand(1, 3, 48, 48)
    with torch.no_grad():
        assert torch.equal(model(x)["out"], published(x)["out"])


def test_torchvision_with_classes_of_ones_own_has_fresh_weights() -> None:
    model = selfadapt.create_model("torchvision:lraspp_mobilenet_v3_large", classes=["a", "b"])
    assert model.spec.classes == ("a", "b")
    assert len(SelfAdapt(model, steps=1)(random_image()).probs) == 2


def test_smp_with_an_encoder_of_its_own_or_of_timm() -> None:
    for address in ("smp:Unet/resnet18", "smp:fpn/tu-mobilenetv3_small_050"):
        model = selfadapt.create_model(address, classes=3)
        assert len(SelfAdapt(model, steps=1)(random_image()).probs) == 3


def test_smp_takes_weights_from_a_file_and_the_number_of_classes_with_them(tmp_path: Path) -> None:
    trained = seeded(lambda: smp.Unet("resnet18", encoder_weights=None, classes=7))
    torch.save({"state_dict": {f"model.{k}": v for k, v in trained.state_dict().items()}},
               tmp_path / "unet.ckpt")  # fmt: skip
    model = selfadapt.create_model("smp:Unet/resnet18", weights=tmp_path / "unet.ckpt")
    assert len(model.spec.classes) == 7
    x = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(x), trained(x))


@pytest.mark.parametrize("address", ["smp:Unet/resnet18", "torchvision:lraspp_mobilenet_v3_large"])
def test_a_network_of_a_library_is_saved_and_loaded(address: str, tmp_path: Path) -> None:
    model = seeded(lambda: selfadapt.create_model(address, classes=["a", "b"]))
    selfadapt.save_model(model, tmp_path / "net.safetensors")
    loaded = selfadapt.load_model(tmp_path / "net.safetensors")
    assert loaded.spec == model.spec
    image = random_image()
    expected = selfadapt.create_method("source", model)(image)
    assert torch.equal(selfadapt.create_method("source", loaded)(image).probs, expected.probs)


def test_a_folder_in_the_hubs_layout(tmp_path: Path) -> None:
    trained = seeded(segformer)
    trained.config.id2label = dict(enumerate(["road", "car", "sky", "tree", "wall"]))
    trained.save_pretrained(tmp_path / "net")
    rules = {"do_normalize": True, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.5, 0.5]}
    (tmp_path / "net" / "preprocessor_config.json").write_text(json.dumps(rules))
    model = selfadapt.create_model(f"hf:{tmp_path / 'net'}")
    assert model.spec.classes == ("road", "car", "sky", "tree", "wall")
    method = SelfAdapt(model, steps=1)
    assert method.interface.mean == (0.1, 0.2, 0.3)
    x = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(model(x).logits, trained(x).logits)
    with pytest.raises(ValueError, match="has 5 classes, but 19 are requested"):
        selfadapt.create_model(f"hf:{tmp_path / 'net'}", classes="cityscapes-19")
    with pytest.raises(ValueError, match="cannot be rebuilt from a file"):
        selfadapt.save_model(model, tmp_path / "net.safetensors")


def test_a_network_in_the_hubs_cache(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "models--someone--segformer"
    seeded(segformer).save_pretrained(folder / "snapshots" / "1")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(  # where transformers 4 looks
        "transformers.utils.hub.TRANSFORMERS_CACHE", str(tmp_path), raising=False
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = selfadapt.create_model("hf:someone/segformer")
    assert len(model.spec.classes) == 5
    with pytest.raises(ValueError, match="hf:someone/else cannot be opened: it could not"):
        selfadapt.create_model("hf:someone/else")


def test_a_folder_that_smp_wrote(tmp_path: Path) -> None:
    trained = seeded(lambda: smp.Unet("resnet18", encoder_weights=None, classes=3))
    trained.save_pretrained(tmp_path / "unet")
    model = selfadapt.open_model(f"smp:{tmp_path / 'unet'}", classes=["a", "b", "c"])
    assert model.spec.classes == ("a", "b", "c")
    x = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(x), trained(x))
    (tmp_path / "unet" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="unet cannot be opened"):
        selfadapt.create_model(f"smp:{tmp_path / 'unet'}")


@pytest.mark.parametrize("kind", ["SegformerForImageClassification", "SegformerModel"])
def test_a_folder_without_a_segmentation_head_is_refused(kind: str, tmp_path: Path) -> None:
    getattr(transformers, kind)(segformer().config).save_pretrained(tmp_path / "net")
    with pytest.raises(ValueError, match="it lacks weights of a segmentation network, such as de"):
        selfadapt.create_model(f"hf:{tmp_path / 'net'}")


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    segformer().save_pretrained(tmp_path / "net")
    path = tmp_path / "net" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="cannot be opened"):
        selfadapt.create_model(f"hf:{tmp_path / 'net'}")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module of one's own into the working directory; return its name."""
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_a_function_of_ones_own_runs_only_when_trusted(own: str) -> None:
    with pytest.raises(ValueError, match="is code of your own that would be run; if you trust it"):
        selfadapt.create_model(f"{own}:build")
    with pytest.raises(ValueError, match="is code of your own"):
        selfadapt.create_model(f"{own}:build", trust="no")  # type: ignore[arg-type]
    assert own not in sys.modules
    assert selfadapt.create_model(f"{own}:build", trust=True)[0].out_channels == 4
    model = selfadapt.create_model(f"{own}:build", classes=["a", "b", "c"], trust=True)
    assert model[0].out_channels == 3
    assert model.spec.classes == ("a", "b", "c")
    assert selfadapt.create_model(f"{own}:plain", trust=True).spec.classes == ()


def test_a_function_of_ones_own_takes_weights(own: str, tmp_path: Path) -> None:
    trained = nn.Sequential(nn.Conv2d(3, 4, 1))
    torch.save({"model": trained.state_dict()}, tmp_path / "w.pth")
    model = selfadapt.create_model(f"{own}:build", weights=tmp_path / "w.pth", trust=True)
    assert torch.equal(model[0].weight, trained[0].weight)


def test_a_checkpoint_never_names_code_to_run(own: str, tmp_path: Path) -> None:
    for arch in (f"{own}:build", "hf:someone/net", "os:getcwd"):
        save_file({"a": torch.zeros(1)}, tmp_path / "w.safetensors", metadata={"arch": arch})
        with pytest.raises(ValueError, match="does not describe a valid network"):
            selfadapt.load_model(tmp_path / "w.safetensors")
    assert own not in sys.modules


BAD = {
    "deeplabv1_resnet5": "did you mean 'deeplabv1_resnet50'.*or an address such as torchvision:",
    "torchvision:deeplabv3_resnet5": "no segmentation network.*did you mean 'deeplabv3_resnet50'",
    "torchvision:resnet50": "torchvision has no segmentation network 'resnet50'",
    "smp:Unett/resnet34": "no architecture 'Unett'; did you mean 'Unet'",
    "smp:Unet": "must name an encoder, as smp:Unet/resnet34 does",
    "smp:Unet/resnet35": "has no 'resnet35'; did you mean 'resnet50'",
    "smp:Unet/tu-no_such_net": "smp:Unet/tu-no_such_net cannot be built: .*no_such_net",
    "smp:Unet/tu-hf_hub:someone/net": "must name an encoder",
    "hf:./nowhere": "there is no folder ./nowhere",
    "no_such_module:build": "No module named 'no_such_module'; is it on the Python path",
    "OWN:biuld": "has no function or class 'biuld'; did you mean 'build'",
    "OWN:constant": "has no function or class 'constant'",
    "OWN:leaves": "OWN:leaves failed: SystemExit: 3",
    "hf:nowhere": "there is no folder nowhere, and on the hub it is hf:OWNER/NAME",
    "OWN:number": "must return a torch.nn.Module, it returned int",
}


@pytest.mark.parametrize("address", BAD)
def test_a_wrong_address_is_refused(address: str, own: str) -> None:
    with pytest.raises(
        (ValueError, FileNotFoundError),
        match=BAD[address].replace("OWN", own) if address.startswith("OWN") else BAD[address],
    ):
        selfadapt.create_model(address.replace("OWN", own), trust=True)


def test_options_are_for_architectures_that_have_them(own: str) -> None:
    with pytest.raises(ValueError, match="takes no options, got style"):
        selfadapt.create_model(f"{own}:build", trust=True, style="caffe")
    with pytest.raises(ValueError, match=r"has no option 'style'; known: norm, dropout"):
        selfadapt.create_model("smp:Unet/resnet18", style="caffe")


def test_what_is_not_installed_is_named_with_the_command_that_installs_it() -> None:
    """In a process of its own, where the libraries cannot be imported."""
    code = (
        "import sys\n"
        "for name in ('timm', 'segmentation_models_pytorch', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "import selfadapt\n"
        "for name in ('hrnet_w18', 'smp:Unet/resnet18', 'hf:a/b'):\n"
        "    try:\n"
        "        selfadapt.create_model(name)\n"
        "    except ModuleNotFoundError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split("install it with: ")[1] for line in lines] == [
        "pip install 'selfadapt[models]'",
        "pip install 'selfadapt[models]'",
        "pip install 'selfadapt[hf]'",
    ]


def test_open_model_takes_a_file_or_an_address(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    selfadapt.save_model(selfadapt.create_model("smp:Unet/resnet18", classes=2), path)
    assert len(selfadapt.open_model(path).spec.classes) == 2
    weights = selfadapt.create_model("smp:Unet/resnet18", classes=3).state_dict()
    torch.save(weights, tmp_path / "w.pth")
    opened = selfadapt.open_model("smp:Unet/resnet18", weights=tmp_path / "w.pth")
    assert len(opened.spec.classes) == 3
    for name in ("smp:Unet/resnet18", "hrnet_w18"):
        with pytest.raises(ValueError, match="comes without weights: give those of the whole"):
            selfadapt.open_model(name)
    with pytest.raises(ValueError, match="comes without weights"):
        selfadapt.open_model("torchvision:fcn_resnet50", classes=3)
    torch.save(resnet18(weights=None).state_dict(), tmp_path / "backbone.pth")
    with pytest.raises(ValueError, match=r"backbone\.pth does not fit this network: it lacks"):
        selfadapt.open_model("smp:Unet/resnet18", weights=tmp_path / "backbone.pth")
    with pytest.raises(
        ValueError, match="records its own architecture and classes: leave out classes"
    ):
        selfadapt.open_model(path, classes=3)
    with pytest.raises(FileNotFoundError, match=r"there is no file net\.pth"):
        selfadapt.open_model("net.pth")
