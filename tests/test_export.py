"""What is exported gives what the method gives, at any size."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import selfadapt
from conftest import TinyNet, assert_same, random_image, seeded, snapshot
from networks import NETWORKS
from selfadapt import METHODS, Interface, create_method
from selfadapt.cli import main
from selfadapt.export import export_onnx, export_program
from selfadapt.export.trace import EXPORTABLE, trace

SIZES = ((97, 203), (32, 48), (61, 20), (8, 9))
LIGHT = (
    "toy", "toy binary", "toy dict", "toy one channel", "own U-Net", "frozen BatchNorm",
    "toy with SN",
)  # fmt: skip
Run = Callable[[Tensor], tuple[np.ndarray, np.ndarray]]


def run_onnx(path: Path) -> Run:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda image: session.run(["probs", "label"], {"image": image[None].numpy()})


def run_program(path: Path) -> Run:
    module = torch.export.load(path).module()
    return lambda image: tuple(part.detach().numpy() for part in module(image[None]))


def assert_agrees(run: Run, segment: Any, sizes: Any = SIZES, channels: int = 3) -> None:
    for seed, size in enumerate(sizes):
        image = random_image(*size, channels, seed=seed)
        probs, label = run(image)
        expected = segment(image)
        assert probs.shape == (1, *expected.probs.shape)
        assert np.abs(probs[0] - expected.probs.numpy()).max() <= 1e-4
        assert label.dtype == np.int64
        assert np.array_equal(label, probs.argmax(axis=1))


@pytest.mark.parametrize("method", EXPORTABLE)
def test_an_onnx_file_gives_what_the_method_gives(
    tiny: nn.Module, method: str, tmp_path: Path
) -> None:
    before, random_state = snapshot(tiny), torch.get_rng_state()
    difference = export_onnx(tiny, tmp_path / "net.onnx", method=method)
    assert_same(before, snapshot(tiny))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert 0 <= difference <= 1e-4
    assert_agrees(run_onnx(tmp_path / "net.onnx"), create_method(method, tiny))
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]


def test_a_program_gives_what_the_method_gives(tiny: nn.Module, tmp_path: Path) -> None:
    before = snapshot(tiny)
    export_program(tiny, tmp_path / "net.pt2", alpha=0.3)
    assert_same(before, snapshot(tiny))
    assert_agrees(run_program(tmp_path / "net.pt2"), create_method("san", tiny, alpha=0.3))


def test_alpha_is_in_the_file(tiny: nn.Module, tmp_path: Path, image: Tensor) -> None:
    export_onnx(tiny, tmp_path / "some.onnx", alpha=0.6)
    export_onnx(tiny, tmp_path / "layers.onnx", alpha={"norm1": 0.6, "*": 0.0})
    some, layers = (run_onnx(tmp_path / f"{name}.onnx")(image)[0] for name in ("some", "layers"))
    assert np.abs(some - layers).max() > 1e-3
    by_layer = create_method("san", tiny, alpha={"norm1": 0.6, "*": 0.0})
    assert_agrees(run_onnx(tmp_path / "layers.onnx"), by_layer)


@pytest.mark.parametrize("network", LIGHT)
def test_networks_of_any_form_are_exported(network: str, tmp_path: Path) -> None:
    case = NETWORKS[network]
    model = seeded(case.build)
    export_onnx(model, tmp_path / "net.onnx")
    segment = create_method("san", model)
    assert_agrees(run_onnx(tmp_path / "net.onnx"), segment, channels=case.channels)


@pytest.mark.slow
def test_a_transformer_is_exported(tmp_path: Path) -> None:
    model = seeded(NETWORKS["hf SegFormer"].build)
    export_onnx(model, tmp_path / "net.onnx")
    assert_agrees(run_onnx(tmp_path / "net.onnx"), create_method("san", model))


@pytest.mark.slow
def test_the_network_of_the_streets_is_exported(tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "net.onnx"
    program = tmp_path / "net.pt2"
    assert run("--model", "streets", "--alpha", "0.3", "--onnx", out, "--pt2", program) == 0
    written = capfd.readouterr()
    assert written.err == ""
    assert [line.split()[:2] for line in written.out.splitlines()] == [
        [str(out), "written;"],
        [str(program), "written;"],
    ]
    model = selfadapt.open_model("streets")
    segment = create_method("san", model, alpha=0.3)
    for run_file in (run_onnx(out), run_program(program)):
        assert_agrees(run_file, segment, SIZES[:2])
    about = {prop.key: prop.value for prop in onnx.load(out).metadata_props}
    assert json.loads(about["classes"]) == list(model.spec.classes)
    assert about["method"] == "san"
    assert json.loads(about["alpha"]) == 0.3
    assert about["selfadapt_version"] == selfadapt.__version__
    assert about["network"] == model.spec.name
    beside = {"selfadapt.json": ""}
    torch.export.load(program, extra_files=beside)
    assert json.loads(beside["selfadapt.json"])["classes"] == list(model.spec.classes)


def test_height_and_width_are_free_and_named(tiny: nn.Module, tmp_path: Path) -> None:
    export_onnx(tiny, tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    (image,), (probs, label) = session.get_inputs(), session.get_outputs()
    assert (image.name, image.shape) == ("image", [1, 3, "height", "width"])
    assert (probs.name, probs.shape) == ("probs", [1, 3, "height", "width"])
    assert (label.name, label.shape) == ("label", [1, "height", "width"])


@pytest.mark.parametrize("kind", ["onnx", "pt2"])
def test_a_batch_has_the_statistics_of_each_image(
    kind: str, tiny: nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / f"net.{kind}"
    export: Any = export_onnx if kind == "onnx" else export_program
    export(tiny, path, alpha=0.6, batch=True)
    images = torch.stack([random_image(40, 51, seed=seed) * (1 - seed / 5) for seed in range(4)])
    if kind == "onnx":
        session = onnxruntime.InferenceSession(path)
        assert session.get_inputs()[0].shape == ["batch", 3, "height", "width"]
        assert session.get_outputs()[1].shape == ["batch", "height", "width"]
        probs, label = session.run(["probs", "label"], {"image": images.numpy()})
    else:
        probs, label = (part.detach().numpy() for part in torch.export.load(path).module()(images))
    segment = create_method("san", tiny, alpha=0.6)
    assert probs.shape == (4, 3, 40, 51)
    for image, found in zip(images, probs, strict=True):
        assert np.abs(found - segment(image).probs.numpy()).max() <= 1e-4
    assert np.array_equal(label, probs.argmax(axis=1))
    assert_agrees(run_onnx(path) if kind == "onnx" else run_program(path), segment)


def test_a_network_that_mixes_images_is_not_exported_for_batches(tmp_path: Path) -> None:
    model = seeded(lambda: nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), TinyNet()))
    with pytest.raises(ValueError, match=r"differ by .* is not written; try without --batch"):
        export_program(model, tmp_path / "net.pt2", batch=True)
    assert list(tmp_path.iterdir()) == []
    export_program(model, tmp_path / "net.pt2")


def test_rules_of_the_network_are_inside(tmp_path: Path) -> None:
    model = seeded(TinyNet)
    interface = Interface(
        mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7), bgr=True, divisor=8, minimum=32
    )
    export_onnx(model, tmp_path / "net.onnx", interface=interface)
    segment = create_method("san", model, interface=interface)
    assert_agrees(run_onnx(tmp_path / "net.onnx"), segment)


def test_a_network_of_one_size_is_exported_for_all(tmp_path: Path) -> None:
    model = seeded(TinyNet)
    interface = Interface(size=(64, 64))
    export_onnx(model, tmp_path / "net.onnx", interface=interface)
    segment = create_method("san", model, interface=interface)
    assert_agrees(run_onnx(tmp_path / "net.onnx"), segment)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_numbers_become_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    model = seeded(TinyNet).to(dtype)
    before = snapshot(model)
    export_onnx(model, tmp_path / "net.onnx")
    assert_same(before, snapshot(model))
    assert_agrees(run_onnx(tmp_path / "net.onnx"), create_method("san", model))


def test_san_that_was_applied_before_stays_and_does_not_count(
    tiny: nn.Module, tmp_path: Path
) -> None:
    selfadapt.apply_san(tiny, 0.9)
    before = snapshot(tiny)
    export_onnx(tiny, tmp_path / "net.onnx", method="source")
    assert_same(before, snapshot(tiny))
    selfadapt.remove_san(tiny)
    assert_agrees(run_onnx(tmp_path / "net.onnx"), create_method("source", tiny))


class ByParity(TinyNet):
    """A network that decides by the width of the image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (3 if x.shape[-1] % 2 else 1)


@pytest.mark.parametrize("kind", ["onnx", "pt2"])
def test_a_network_that_depends_on_the_size_needs_one(kind: str, tmp_path: Path) -> None:
    model = seeded(ByParity)
    path = tmp_path / f"net.{kind}"
    export: Any = export_onnx if kind == "onnx" else export_program
    with pytest.raises(ValueError, match=r"any size, it fails at 128x160.*% 2.*--size 1024x512"):
        export(model, path)
    assert list(tmp_path.iterdir()) == []
    export(model, path, size=(60, 91))
    run_file = run_onnx(path) if kind == "onnx" else run_program(path)
    assert_agrees(run_file, create_method("san", model), [(60, 91)])


class Pooled(TinyNet):
    """A network that pools to 3x4 pixels, as pyramids do."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.stem(x)).relu()
        pooled = nn.functional.adaptive_avg_pool2d(x, (3, 4))
        x = x + nn.functional.interpolate(pooled, x.shape[-2:])
        return self.head(self.norm2(self.body(x)).relu())


def test_pooling_to_a_few_pixels_is_exported_for_any_size(tmp_path: Path) -> None:
    model = seeded(Pooled)
    export_onnx(model, tmp_path / "net.onnx")
    assert_agrees(run_onnx(tmp_path / "net.onnx"), create_method("san", model))


def test_a_file_that_differs_is_not_left_behind(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = trace(tiny)
    traced.probs[2][:] = 0.5
    for name in ("onnx", "pt2"):
        (tmp_path / f"old.{name}").write_text("old")
    monkeypatch.setattr("selfadapt.export.writing.trace", lambda model: traced)
    for export, name in ((export_onnx, "onnx"), (export_program, "pt2")):
        with pytest.raises(ValueError, match=r"for an image of 289x224 .* differ"):
            export(tiny, tmp_path / f"new.{name}")
        with pytest.raises(ValueError, match="is not written"):
            export(tiny, tmp_path / f"old.{name}", overwrite=True)
        assert (tmp_path / f"old.{name}").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.onnx", "old.pt2"]


@pytest.mark.parametrize("method", [name for name in METHODS if name not in EXPORTABLE])
def test_methods_of_more_than_a_pass_are_refused(
    tiny: nn.Module, method: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"'{method}' takes gradient steps, .* methods to export"):
        export_onnx(tiny, tmp_path / "net.onnx", method=method)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_names_the_extra(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'selfadapt\[onnx\]'"):
        export_onnx(tiny, tmp_path / "net.onnx")
    export_program(tiny, tmp_path / "net.pt2")


@pytest.mark.parametrize("size", [(32,), (0, 32), (32.0, 32), (True, 32)])
def test_sizes_that_are_none_are_refused(tiny: nn.Module, size: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="height"):
        export_onnx(tiny, tmp_path / "net.onnx", size=size)


def run(*args: Any) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["export", *map(str, args)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "give --onnx FILE, --pt2 FILE or both"),
        ("--onnx net.pt2", "must end in .onnx, got net.pt2"),
        ("--onnx net", "must end in .onnx, got net"),
        ("--pt2 net.onnx", "must end in .pt2"),
        ("--onnx nowhere/net.onnx", "there is no folder nowhere"),
        ("--onnx folder.onnx", "is a folder"),
        ("--onnx old.onnx", "old.onnx would be replaced"),
        ("--onnx new.onnx --pt2 old.pt2", "old.pt2 would be replaced"),
        ("--onnx new.onnx --method sna", "did you mean 'san'?"),
        ("--onnx new.onnx --method self-adapt", "'self-adapt' takes gradient steps"),
        ("--onnx new.onnx --alpha 1.5", "alpha must lie in [0, 1]"),
        ("--onnx new.onnx --alpha much", "alpha"),
        ("--onnx new.onnx --method source --alpha 0.1", "has no setting 'alpha'"),
        ("--onnx new.onnx --batch 3", "3"),
        ("--onnx new.onnx --size 512", "WIDTHxHEIGHT"),
        ("--onnx new.onnx --size 0x512", "WIDTHxHEIGHT"),
        ("--onnx new.onnx --model streets", "one network is exported at a time, got 2"),
        ("--onnx new.onnx --device cuda", "recorded on the CPU"),
        ("--onnx new.onnx --weights net.pth", "leave out weights"),
        ("--onnx new.onnx --steps 3", "steps"),
    ],
)
def test_wrong_usage_exits_2_without_a_traceback(
    flags: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.onnx").mkdir()
    for name in ("old.onnx", "old.pt2"):
        Path(name).write_text("old")
    assert run("--model", "streets", *flags.split()) == 2
    written = capfd.readouterr()
    assert written.out == ""
    assert message in written.err
    assert "Traceback" not in written.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder.onnx", "old.onnx", "old.pt2"]


def test_overwrite_replaces(tmp_path: Path, tiny: nn.Module) -> None:
    path = tmp_path / "net.onnx"
    path.write_text("old")
    export = partial(export_onnx, tiny, path)
    with pytest.raises(FileExistsError, match="--overwrite"):
        export()
    assert path.read_text() == "old"
    export(overwrite=True)
    assert_agrees(run_onnx(path), create_method("san", tiny), SIZES[:1])


def test_a_full_disk_is_said_so_and_leaves_no_file(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match=r"net.pt2 could not be written \(No space left"):
        export_program(tiny, tmp_path / "net.pt2", size=(32, 32))
    assert not list(tmp_path.iterdir())
