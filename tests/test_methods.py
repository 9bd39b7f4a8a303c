import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import selfadapt
from conftest import TinyNet, assert_same, random_image, seeded, snapshot
from selfadapt import METHODS, Interface, View, create_method
from selfadapt.methods import settings_of

SCALES = (0.25, 0.5, 0.75)
ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
SETTINGS: dict[str, dict[str, Any]] = {
    "source": {},
    "p-bn": {},
    "san": {"alpha": 0.1},
    "tta": {"alpha": 0.1, "scales": SCALES, "views": None},
    "mc-dropout": {"passes": 10, "rate": None, "seed": 0, "alpha": 0.0},
    "tent": {"steps": 10, "lr": 0.01, "alpha": 0.1},
    "entropy": {"steps": 10, "lr": 0.0005, "alpha": 0.1, "adapt": None},
    "memo": {
        "steps": 1, "lr": 0.01, "alpha": 0.1, "adapt": None, "scales": SCALES, "views": None,
    },
    "intent": {"alphas": ALPHAS},
    "ensemble": {"alpha": 0.1, "tta": False, "scales": SCALES, "views": None},
    "self-adapt": {
        "alpha": 0.1, "psi": 0.7, "lr": None, "steps": None, "loss": None,
        "step": None, "scales": SCALES, "step_scale": 1.0,
        "final_scales": None, "final_weight": 0.5, "preset": None, "budget_ms": None, "adapt": None,
        "views": None, "mode": "auto",
    },
}  # fmt: skip
COMMON: dict[str, Any] = {
    "mode": "paper", "max_pixels": None, "compare": True, "fast": True, "interface": None,
}  # fmt: skip


@pytest.fixture
def image() -> Tensor:
    return random_image(19, 26)


# by name


def test_the_methods_have_the_names_of_the_tables() -> None:
    assert list(METHODS) == list(SETTINGS)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_by_name_is_that_of_its_class(name: str, tiny: nn.Module, image: Tensor) -> None:
    method = create_method(name, tiny)
    assert type(method) is METHODS[name]
    assert torch.equal(method(image).probs, METHODS[name](tiny)(image).probs)


def test_no_two_methods_are_the_same(tiny: nn.Module, image: Tensor) -> None:
    names = [name for name in METHODS if name != "ensemble"]
    probs = [create_method(name, tiny)(image).probs for name in names]
    for i, name in enumerate(names):
        for j in range(i):
            assert not torch.allclose(probs[i], probs[j], rtol=0, atol=1e-6), f"{name}, {names[j]}"


def test_several_networks_are_for_an_ensemble(tiny: nn.Module, image: Tensor) -> None:
    other = seeded(TinyNet, 1)
    result = create_method("ensemble", [tiny, other])(image)
    expected = sum(create_method("san", model)(image).probs for model in (tiny, other)) / 2
    torch.testing.assert_close(result.probs, expected)
    for name in METHODS:
        if name != "ensemble":
            with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"):
                create_method(name, [tiny, other])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "tnet",
            r"unknown method 'tnet'; did you mean 'tent'\? known: source, p-bn, san, tta, ",
        ),
        ("self-adpt", r"did you mean 'self-adapt'\?"),
        ("Ensemble", r"did you mean 'ensemble'\?"),
        ("xyzzy", "unknown method 'xyzzy'; known: source, .*, self-adapt"),
        ("", "unknown method ''; known: source"),
        (None, "unknown method None; .*known: source"),
    ],
)
def test_an_unknown_method_is_refused(tiny: nn.Module, name: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_method(name, tiny)


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        (
            "tent",
            "step",
            r"method 'tent' has no setting 'step'; did you mean 'steps'\? it has st",
        ),
        (
            "tent",
            "adapt",
            "'tent' has no setting 'adapt';.* it has steps, lr, alpha, mode, max",
        ),
        (
            "source",
            "alpha",
            "no setting 'alpha';.* it has mode, max_pixels, compare, fast, interface$",
        ),
        ("p-bn", "alpha", "no setting 'alpha'"),
        ("intent", "alpha", r"no setting 'alpha'; did you mean 'alphas'\?"),
        ("san", "psi", "no setting 'psi'; it has alpha, mode"),
        ("mc-dropout", "steps", "it has passes, rate, seed, alpha, mode"),
        ("ensemble", "models", r"no setting 'models'; did you mean 'mode'\?"),
        ("self-adapt", "passes", "no setting 'passes'; .*it has alpha, psi, lr, steps"),
    ],
)
def test_an_unknown_setting_is_refused(
    tiny: nn.Module, name: str, setting: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        create_method(name, tiny, **{setting: 0.3})


@pytest.mark.parametrize("name", METHODS)
def test_no_method_takes_a_setting_it_does_not_have(name: str, tiny: nn.Module) -> None:
    """Also by its class: a setting of another method that is overlooked would mislead."""
    everything = {key: value for own in SETTINGS.values() for key, value in own.items()}
    everything |= {"adapt": ["head"], "lr": 0.1, "rate": 0.1, "views": [View()]}
    for setting, value in everything.items():
        if setting not in COMMON | SETTINGS[name]:
            with pytest.raises(TypeError, match=f"argument '{setting}'"):
                METHODS[name](tiny, **{setting: value})


# settings


@pytest.mark.parametrize("name", METHODS)
def test_settings_have_their_defaults_and_the_common_ones_come_last(name: str) -> None:
    known = settings_of(name)
    assert {key: setting.default for key, setting in known.items()} == COMMON | SETTINGS[name]
    if name != "self-adapt":
        assert list(known) == [*SETTINGS[name], *COMMON]
    assert all(isinstance(setting, inspect.Parameter) for setting in known.values())


def test_the_settings_of_an_unknown_method_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown method 'tnet'; did you mean 'tent'\?"):
        settings_of("tnet")


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_can_be_given(name: str, tiny: nn.Module, image: Tensor) -> None:
    given = {key: setting.default for key, setting in settings_of(name).items()}
    expected = create_method(name, tiny)(image)
    result = create_method(name, tiny, **given)(image)
    assert torch.equal(result.probs, expected.probs)
    assert (result.losses, result.notes) == (expected.losses, expected.notes)


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_of_its_own_is_explained(name: str) -> None:
    for setting in SETTINGS[name]:
        assert f"\n    {setting}: " in (inspect.getdoc(METHODS[name]) or "")


@pytest.mark.parametrize("name", METHODS)
def test_printing_says_which_settings(name: str, tiny: nn.Module) -> None:
    text = repr(create_method(name, tiny))
    member = {"ensemble": "SaNOnly"}.get(name, METHODS[name].__name__)
    assert f"{member}(TinyNet" in text
    assert ", )" not in text
    shown = SETTINGS["san" if name == "ensemble" else name]
    for setting, default in shown.items():
        by_mode = ("lr", "steps", "loss", "step", "final_scales")
        if setting not in ("scales", "views", "adapt") and (default or setting not in by_mode):
            assert f"{setting}={default!r}" in text
    assert ("0.25 flipped gray" in text) == (name in ("tta", "memo", "self-adapt"))


def test_printing_says_which_mode(tiny: nn.Module) -> None:
    for name in METHODS:
        assert "mode='official'" in repr(create_method(name, tiny, mode="official")), name


WRONG: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "san alpha": ("san", {"alpha": 1.5}, ValueError, r"alpha must lie in \[0, 1\].*got 1.5"),
    "san alpha text": ("san", {"alpha": "high"}, ValueError, r"alpha must lie in .*got 'high'"),
    "san alpha none": ("san", {"alpha": None}, ValueError, r"alpha must lie in .*got None"),
    "san alpha by layer": ("san", {"alpha": {"nrom1": 0.1}}, ValueError, "did you mean 'norm1'"),
    "tta alpha": ("tta", {"alpha": -0.1}, ValueError, r"alpha must lie in \[0, 1\].*got -0.1"),
    "tta no scales": ("tta", {"scales": ()}, ValueError, "at least one view is needed"),
    "tta no views": ("tta", {"views": []}, ValueError, "at least one view is needed"),
    "tta scale zero": ("tta", {"scales": (0.5, 0)}, ValueError, "4 at most, got 0"),
    "tta scale text": ("tta", {"scales": "0.5"}, ValueError, "4 at most, got '0'"),
    "tta views": ("tta", {"views": [0.5]}, TypeError, "must be View objects, got float; use sc"),
    "no passes": ("mc-dropout", {"passes": 0}, ValueError, "passes must be .* 1 or more, got 0"),
    "passes negative": ("mc-dropout", {"passes": -3}, ValueError, "passes must be .* got -3"),
    "passes a fraction": ("mc-dropout", {"passes": 2.5}, ValueError, "whole number, .* got 2.5"),
    "passes a bool": ("mc-dropout", {"passes": True}, ValueError, "whole number, .* got True"),
    "passes none": ("mc-dropout", {"passes": None}, ValueError, "whole number, .* got None"),
    "rate above one": ("mc-dropout", {"rate": 1.5}, ValueError, "rate must lie .* 1, got 1.5"),
    "rate one": ("mc-dropout", {"rate": 1.0}, ValueError, "rate must lie between .* got 1.0"),
    "rate zero": ("mc-dropout", {"rate": 0.0}, ValueError, "rate must lie between .* got 0.0"),
    "rate negative": ("mc-dropout", {"rate": -0.1}, ValueError, "rate must lie .* got -0.1"),
    "rate text": ("mc-dropout", {"rate": "0.1"}, ValueError, "rate must lie .* got '0.1'"),
    "rate a bool": ("mc-dropout", {"rate": True}, ValueError, "rate must lie .* got True"),
    "rate NaN": ("mc-dropout", {"rate": float("nan")}, ValueError, "rate must lie .* got nan"),
    "seed negative": ("mc-dropout", {"seed": -1}, ValueError, "seed must be .* 0 to 9223.*got -1"),
    "seed a fraction": ("mc-dropout", {"seed": 1.5}, ValueError, "seed must be .* got 1.5"),
    "seed none": ("mc-dropout", {"seed": None}, ValueError, "seed must be .* got None"),
    "seed too long": ("mc-dropout", {"seed": 2**64}, ValueError, "seed must be .* got 18446744"),
    "mc-dropout alpha": ("mc-dropout", {"alpha": 2}, ValueError, r"alpha must lie in .* got 2"),
    "tent steps": ("tent", {"steps": -1}, ValueError, "steps must be .* 0 or more, got -1"),
    "tent steps a fraction": ("tent", {"steps": 1.5}, ValueError, "whole number, .* got 1.5"),
    "tent lr zero": ("tent", {"lr": 0}, ValueError, "lr must be a positive number, got 0"),
    "tent lr NaN": ("tent", {"lr": float("nan")}, ValueError, "positive number, got nan"),
    "tent lr none": ("tent", {"lr": None}, ValueError, "lr must be a positive number, got None"),
    "tent lr text": ("tent", {"lr": "0.1"}, ValueError, "positive number, got '0.1'"),
    "tent alpha": ("tent", {"alpha": 1.1}, ValueError, r"alpha must lie in \[0, 1\].*got 1.1"),
    "entropy steps": ("entropy", {"steps": -1}, ValueError, "steps must be .* got -1"),
    "entropy lr": ("entropy", {"lr": -0.1}, ValueError, "lr must be a positive number, got -0.1"),
    "entropy lr none": ("entropy", {"lr": None}, ValueError, "positive number, got None"),
    "entropy layers": ("entropy", {"adapt": ["haed"]}, ValueError, r"did you mean 'head'\?"),
    "entropy no layers": ("entropy", {"adapt": []}, ValueError, "name at least one layer"),
    "entropy adapt": ("entropy", {"adapt": 3}, TypeError, "list of name patterns, got 3"),
    "memo steps": ("memo", {"steps": "2"}, ValueError, "steps must be .* got '2'"),
    "memo lr": ("memo", {"lr": float("inf")}, ValueError, "positive number, got inf"),
    "memo lr none": ("memo", {"lr": None}, ValueError, "positive number, got None"),
    "memo layers": ("memo", {"adapt": ["haed"]}, ValueError, r"did you mean 'head'\?"),
    "memo no scales": ("memo", {"scales": ()}, ValueError, "at least one view is needed"),
    "memo views": ("memo", {"views": [0.5]}, TypeError, "must be View objects, got float"),
    "no alphas": ("intent", {"alphas": ()}, ValueError, r"alphas must be a list .* got \(\)"),
    "alphas too large": ("intent", {"alphas": (2,)}, ValueError, r"alpha must lie in .* got 2"),
    "one alpha too large": ("intent", {"alphas": (0.1, 1.2)}, ValueError, "must lie .* got 1.2"),
    "one alpha negative": ("intent", {"alphas": (-0.1, 0.5)}, ValueError, "must lie .* got -0.1"),
    "one alpha text": ("intent", {"alphas": (0.5, "a")}, ValueError, "must lie .* got 'a'"),
    "alphas NaN": ("intent", {"alphas": (float("nan"),)}, ValueError, "must lie .* got nan"),
    "alphas a number": ("intent", {"alphas": 0.5}, ValueError, "must be a list .* got 0.5"),
    "alphas text": ("intent", {"alphas": "0.5"}, ValueError, "must be a list .* got '0.5'"),
    "alphas none": ("intent", {"alphas": None}, ValueError, "must be a list .* got None"),
    "alphas by layer": (
        "intent",
        {"alphas": ({"norm1": 0.1}, {"norm2": 0.2})},
        ValueError,
        "alpha.* got .*norm1",
    ),
    "ensemble alpha": ("ensemble", {"alpha": 1.5}, ValueError, r"alpha must lie in .* got 1.5"),
    "ensemble no scales": (
        "ensemble", {"tta": True, "scales": ()}, ValueError, "at least one view is needed",
    ),
    "ensemble views": (
        "ensemble", {"tta": True, "views": [0.5]}, TypeError, "must be View objects, got float",
    ),
    "self-adapt psi": ("self-adapt", {"psi": 1.4}, ValueError, r"psi must lie in .* got 1.4"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_setting_is_refused(case: str, tiny: nn.Module) -> None:
    name, settings, error, message = WRONG[case]
    before, dice = snapshot(tiny), torch.get_rng_state()
    with pytest.raises(error, match=message):
        create_method(name, tiny, **settings)
    assert_same(before, snapshot(tiny))
    assert torch.equal(torch.get_rng_state(), dice)


WRONG_COMMON: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "mode": ({"mode": "offical"}, ValueError, "unknown mode 'offical'; did you mean 'official'"),
    "max_pixels zero": ({"max_pixels": 0}, ValueError, "max_pixels must be a positive .* got 0"),
    "max_pixels text": ({"max_pixels": "9"}, ValueError, "max_pixels must be .* got '9'"),
    "max_pixels in official mode": (
        {"mode": "official", "max_pixels": 99}, ValueError, "cannot be set in official mode",
    ),
    "fast": ({"fast": "yes"}, TypeError, "fast must be True, False or a Fast object, got 'yes'"),
    "interface": ({"interface": {}}, TypeError, "interface must be an Interface, got dict"),
    "interface of other channels": (
        {"interface": Interface(mean=(0.5,), std=(0.5,))}, ValueError, "each of the 3 input chann",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("case", WRONG_COMMON)
def test_a_wrong_setting_is_refused_by_every_method(case: str, name: str, tiny: nn.Module) -> None:
    settings, error, message = WRONG_COMMON[case]
    with pytest.raises(error, match=message):
        create_method(name, tiny, **settings)


@pytest.mark.parametrize("name", METHODS)
def test_what_is_not_a_network_is_refused_by_every_method(name: str) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        create_method(name, "resnet")
    with pytest.raises(TypeError, match="a TorchScript model cannot be adapted"):
        create_method(name, torch.jit.script(nn.Conv2d(3, 2, 1)))


WRONG_IMAGES: dict[str, tuple[Any, type[Exception], str]] = {
    "two channels": (torch.rand(2, 8, 8), ValueError, "takes 3 channels, got an image with 2"),
    "a batch": (torch.rand(2, 3, 8, 8), ValueError, r"shape \(3, H, W\), got \(2, 3, 8, 8\)"),
    "8-bit values": (torch.full((3, 8, 8), 200.0), ValueError, r"must lie in \[0, 1\]"),
    "NaN": (torch.full((3, 8, 8), float("nan")), ValueError, "NaN or infinite"),
    "no file": ("nowhere.png", FileNotFoundError, r"there is no image file nowhere\.png"),
    "a number": (3, TypeError, "an image must be a path.*got int"),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_wrong_image_is_refused_by_every_method(name: str, tiny: nn.Module) -> None:
    method = create_method(name, tiny)
    before = snapshot(tiny)
    for image, error, message in WRONG_IMAGES.values():
        with pytest.raises(error, match=message):
            method(image)
    with pytest.raises(TypeError, match=r"normalized=True takes a float tensor .* got str"):
        method("nowhere.png", normalized=True)
    assert_same(before, snapshot(tiny))


# what every method has in common


@pytest.mark.parametrize("name", METHODS)
def test_comparing_is_optional(name: str, tiny: nn.Module, image: Tensor) -> None:
    compared = create_method(name, tiny)(image)
    plain = create_method(name, tiny, compare=False)(image)
    assert plain.source_probs is None
    assert torch.equal(plain.probs, compared.probs)
    source = create_method("source", tiny)(image).probs
    torch.testing.assert_close(compared.source_probs, source)


@pytest.mark.parametrize("name", METHODS)
def test_normalised_tensors_give_the_same(name: str, tiny: nn.Module, image: Tensor) -> None:
    mean = torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1)
    method = create_method(name, tiny)
    result = method((image - mean) / std, normalized=True)
    torch.testing.assert_close(result.probs, method(image).probs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_the_caller_may_be_inside_no_grad_or_inference_mode(
    name: str, tiny: nn.Module, image: Tensor
) -> None:
    expected = create_method(name, tiny)(image).probs
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            result = create_method(name, tiny)(image.clone())
        assert torch.equal(result.probs, expected)
        assert not result.probs.requires_grad


@pytest.mark.parametrize("name", METHODS)
def test_half_precision_is_nearly_the_same(name: str, tiny: nn.Module, image: Tensor) -> None:
    expected = create_method(name, tiny)(image).probs
    half = seeded(TinyNet).half()
    before = snapshot(half)
    result = create_method(name, half)(image)
    assert result.probs.dtype == torch.float32
    torch.testing.assert_close(result.probs, expected, rtol=0, atol=0.02)
    assert_same(before, snapshot(half))


@pytest.mark.parametrize("name", METHODS)
def test_an_interface_that_is_given_is_kept(name: str, tiny: nn.Module, image: Tensor) -> None:
    """A network that takes blue first sees the colours the other way round."""
    swapped = seeded(TinyNet)
    swapped.stem.weight.data = swapped.stem.weight.data.flip(1)
    ordinary = Interface(mean=(0.5,) * 3, std=(0.25,) * 3)
    expected = create_method(name, tiny, interface=ordinary)(image).probs
    bgr = Interface(mean=(0.5,) * 3, std=(0.25,) * 3, bgr=True)
    result = create_method(name, swapped, interface=bgr)(image)
    torch.testing.assert_close(result.probs, expected, rtol=0, atol=1e-4)
    assert not torch.allclose(create_method(name, tiny)(image).probs, expected, atol=1e-3)


@pytest.mark.parametrize("name", METHODS)
def test_a_large_image_comes_back_at_its_size(name: str, tiny: nn.Module) -> None:
    result = create_method(name, tiny, max_pixels=19 * 26)(random_image(38, 52))
    for probs in (result.probs, result.source_probs):
        assert tuple(probs.shape) == (3, 38, 52)
        torch.testing.assert_close(probs.sum(dim=0), torch.ones(38, 52))
    assert "segmented at 26x19, the image is 52x38" in result.notes


@pytest.mark.parametrize("name", ["tta", "memo", "self-adapt"])
def test_views_are_the_modes_own_kind(name: str, tiny: nn.Module) -> None:
    for mode, kind in (("paper", "View"), ("official", "OfficialView")):
        method = create_method(name, tiny, views=[View(0.5), View(1.0, flip=True)], mode=mode)
        assert [type(view).__name__ for view in method.views] == [kind, kind]


def test_the_package_offers_them() -> None:
    assert selfadapt.create_method is create_method
    assert selfadapt.METHODS is METHODS
