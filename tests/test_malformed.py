"""Files of networks that are damaged or lie are refused in words, before they take memory."""

import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import selfadapt
from conftest import random_image
from networks import segformer
from runs import run_cli
from selfadapt.images import to_pil

DEEP = "[" * 100_000
SHIPPED = Path(selfadapt.__file__).parent / "weights" / "streets.safetensors"
Content = tuple[dict[str, str], dict[str, Tensor]]


@pytest.fixture(scope="module")
def shipped() -> Content:
    with safe_open(SHIPPED, "pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


METADATA = {
    "channels by the billion": ({"channels": "1000000000"}, "channels must be a whole number, 1"),
    "channels of 5000 digits": ({"channels": "9" * 5000}, "channels must be a number, got '999"),
    "other channels": ({"channels": "4"}, "takes 3 channels, got 4"),
    "classes by the billion": ({"classes": "1000000000"}, "its classes must be different names"),
    "classes that the weights have not": ({"classes": "60000"}, "has 9 classes, but 60000 are"),
    "classes nested": ({"classes": DEEP}, "its classes must be different names"),
    "classes twice": ({"classes": '["a", "a"]'}, "must be different names"),
    "classes that steer a terminal": ({"classes": '["\\u001b[31m"]'}, "its classes must be"),
    "classes without a name": ({"classes": '["", " "]'}, "its classes must be"),
    "a class of a million letters": ({"classes": json.dumps(["a" * 10**6])}, r"aaa\.\.\."),
    "an architecture of a million letters": ({"arch": "x" * 10**6}, r"unknown model 'x+\.\.\."),
    "an architecture that is code": ({"arch": "os:system"}, "unknown model 'os:system'"),
    "a rate that is none": ({"dropout": "nan"}, "dropout rate must lie between 0 and 1"),
    "a rate in letters": ({"dropout": "much"}, "dropout must be a number, got 'much'"),
    "an interface nested": ({"interface": DEEP}, "its interface is nested too deeply"),
    "an interface that is a list": ({"interface": "[1]"}, "must be names and values, got .1."),
    "an interface with code": ({"interface": '{"output": "os.system"}'}, "no setting 'output'"),
}
INTERFACE = {
    "channels": (10**9, "channels must be a whole number, 1 to 1024, got 1000000000"),
    "divisor": (10**9, "divisor must be a whole number, 1 to 2048, got 1000000000"),
    "minimum": (-4, "minimum must be a whole number, 1 to 2048, got -4"),
    "size": ([10**5, 10**5], "size must be a height and a width in pixels, 8388608"),
    "mean": ([10**400, 0, 0], "mean must be finite numbers"),
    "std": ([0, 1, 1], "std must be positive"),
    "bgr": ("no", "bgr must be True or False, got 'no'"),
    "activated": ([], "activated must be True, False or 'sigmoid'"),
}
VALUES = {
    "size": [([0, 0], "size must"), ([1, 2, 3], "size must"), ([True, True], "size must")],
    "mean": [([0, 0], "one number for each of the 3 input"), ("abc", "mean must be a tuple")],
    "std": [([float("nan"), 1, 1], "std must be finite"), ([-1, 1, 1], "std must be positive")],
    "divisor": [(1.5, "divisor must"), (True, "divisor must"), (0, "divisor must")],
}
LIES = [
    *((metadata, message) for metadata, message in METADATA.values()),
    *(({"interface": {name: value}}, message) for name, (value, message) in INTERFACE.items()),
    *(
        ({"interface": {name: value}}, message)
        for name, values in VALUES.items()
        for value, message in values
    ),
]


@pytest.mark.parametrize(("changed", "message"), LIES)
def test_what_a_file_says_of_its_network_is_bounded(
    changed: dict[str, Any], message: str, shipped: Content, tmp_path: Path
) -> None:
    metadata, tensors = shipped
    if isinstance(changed.get("interface"), dict):
        interface = json.loads(metadata["interface"]) | changed["interface"]
        changed = {"interface": json.dumps(interface)}
    save_file(tensors, tmp_path / "net.safetensors", {**metadata, **changed})
    with pytest.raises(ValueError, match=message) as raised:
        selfadapt.open_model(tmp_path / "net.safetensors")
    assert len(str(raised.value)) < 1000


def as_dtype(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_weights_of_few_bits_are_numbers(
    dtype: torch.dtype, shipped: Content, tmp_path: Path
) -> None:
    metadata, tensors = shipped
    few = {name: as_dtype(dtype)(tensor) for name, tensor in tensors.items()}
    save_file(few, tmp_path / "net.safetensors", metadata)
    loaded = selfadapt.open_model(tmp_path / "net.safetensors").state_dict()
    assert all(torch.equal(loaded[name], few[name].to(loaded[name])) for name in few)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_weights_that_are_no_floats_are_refused(
    dtype: torch.dtype, shipped: Content, tmp_path: Path
) -> None:
    metadata, tensors = shipped
    kinds = {name: as_dtype(dtype)(tensor) for name, tensor in tensors.items()}
    save_file(kinds, tmp_path / "net.safetensors", metadata)
    with pytest.raises(ValueError, match="must hold weights in floating point"):
        selfadapt.open_model(tmp_path / "net.safetensors")


def packed(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def of_shape(shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, 4]}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        struct.pack("<Q", 2**62) + b"{}",
        packed(b'{"a":' * 100_000),
        packed([]),
        packed({"__metadata__": {"arch": 5}, **of_shape([1])}, bytes(4)),
        packed({"__metadata__": {"arch": {"a": 1}}}),
        packed({"__metadata__": {"arch": "deeplabv1_resnet18_slim"}}),
        packed(of_shape([10**12]), bytes(4)),
        packed(of_shape([2**63, 2]), bytes(4)),
        packed(of_shape([-1]), bytes(4)),
        packed(of_shape([1], "X9"), bytes(4)),
        packed(of_shape([4], "F8_E8M0"), bytes(4)),
        SHIPPED.read_bytes()[:5000],
    ],
)
def test_headers_that_lie_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "net.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"net\.safetensors"):
        selfadapt.open_model(tmp_path / "net.safetensors")


@pytest.mark.parametrize(
    "metadata",
    [{"channels": "1000000000"}, {"interface": '{"channels": 1000000000}'}, {"classes": DEEP},
     {"interface": '{"divisor": 1000000000}'}, {"classes": '["\x1b[31m"]'}],
)  # fmt: skip
def test_the_command_line_says_it_in_words(
    metadata: dict[str, str], shipped: Content, tmp_path: Path, capsys: Any
) -> None:
    to_pil(random_image(16, 16)).save(tmp_path / "a.png")
    save_file(shipped[1], tmp_path / "net.safetensors", {**shipped[0], **metadata})
    command = ("predict", tmp_path / "a.png", "--model", tmp_path / "net.safetensors", "-o")
    assert run_cli(*command, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "does not describe a valid network" in error
    assert "Traceback" not in error
    assert "\x1b" not in error
    assert len(error) < 1000


def test_scales_are_bounded_on_the_command_line(tmp_path: Path, capsys: Any) -> None:
    to_pil(random_image(16, 16)).save(tmp_path / "a.png")
    command = ("predict", tmp_path / "a.png", "--model", "streets", "-o", tmp_path / "out")
    assert run_cli(*command, "--scales", "100") == 2
    assert "the scale of a view must be a positive number, 4 at most" in capsys.readouterr().err


PICKLED = {
    "a pickled model": torch.nn.Conv2d(1, 1, 1),
    "a number": 5,
    "no names": {1: torch.zeros(1), (2,): 3},
    "a name of a million letters": {"a" * 10**6: 1},
    "tensors of a trillion values": {"head.weight": torch.zeros(1).expand(10**6, 10**6)},
    "no values": {"head.weight": torch.zeros(3, device="meta")},
}


@pytest.mark.parametrize("case", PICKLED)
def test_checkpoints_of_torch_that_hold_no_weights_are_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "net.pth"
    torch.save(PICKLED[case], path)
    with pytest.raises(ValueError, match=r"net\.pth") as raised:
        selfadapt.open_model("deeplabv1_resnet18_slim", weights=path)
    assert len(str(raised.value)) < 1000
    chain = [raised.value, raised.value.__cause__, raised.value.__context__]
    assert not any("weights_only" in str(error) for error in chain)


def test_a_compressed_checkpoint_is_not_unpacked(shipped: Content, tmp_path: Path) -> None:
    torch.save(shipped[1], tmp_path / "net.pth")
    small = tmp_path / "small.pth"
    with (
        zipfile.ZipFile(tmp_path / "net.pth") as archive,
        zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as other,
    ):
        for part in archive.namelist():
            other.writestr(part, archive.read(part))
    with pytest.raises(ValueError, match=r"small\.pth is a compressed archive"):
        selfadapt.open_model("deeplabv1_resnet18_slim", weights=small)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"decoder_hidden_size": 30000}, "describes a network of 3602716234 values"),
        ({"depths": [2000, 1, 1, 1]}, "depths must be a number, -1000 to 1000, got 2000"),
        (
            {"model_type": "mine", "auto_map": {"AutoConfig": "x.Y"}},
            "it needs code that comes with it, which is not run",
        ),
    ],
)
def test_the_configuration_of_a_folder_is_bounded(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    segformer().save_pretrained(tmp_path / "net")
    path = tmp_path / "net" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ValueError, match=message) as raised:
        selfadapt.open_model(f"hf:{tmp_path / 'net'}")
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None
    assert "trust_remote_code" not in str(raised.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"classes": 10**8}, "its weights have"),
        ({"in_channels": 10**8}, "in_channels must be a whole number, 1 to 1024"),
        ({"encoder_depth": 10**6}, "encoder_depth must be"),
    ],
)
def test_the_configuration_of_smp_is_bounded(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    smp = pytest.importorskip("segmentation_models_pytorch")
    smp.Unet("mobilenet_v2", encoder_weights=None, classes=3).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ValueError, match=message):
        selfadapt.open_model(f"smp:{tmp_path}", classes=3)
