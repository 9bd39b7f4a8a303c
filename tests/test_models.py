import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import segmentation_models_pytorch as smp
import torch
import torchvision
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import selfadapt
from conftest import TinyNet, random_image, seeded
from networks import NETWORKS, segformer
from selfadapt import Interface
from selfadapt.labels import CITYSCAPES_19, SYNTHIA_16
from selfadapt.models.detect import IMAGENET_MEAN, IMAGENET_STD, detect
from selfadapt.models.families import adapted_parameters
from selfadapt.models.interface import main_output

VARIANTS = [
    (name, style)
    for name in ("deeplabv1_resnet50", "deeplabv1_resnet101")
    for style in ("pytorch", "caffe")
]


def test_a_sigmoid_for_each_class_is_undone() -> None:
    plain = seeded(lambda: TinyNet(4))
    model = nn.Sequential(plain, nn.Sigmoid())
    image = random_image()
    method = selfadapt.create_method("source", model)
    assert method.interface.activated == "sigmoid"
    expected = selfadapt.create_method("source", plain)(image)
    torch.testing.assert_close(method(image).probs, expected.probs, rtol=0, atol=0.02)


# DeepLabv1


@pytest.mark.parametrize(("name", "style"), VARIANTS)
def test_deeplabv1_has_the_stated_layout(name: str, style: Any) -> None:
    model = selfadapt.create_model(name, classes=7, style=style)
    net = model.backbone
    with torch.no_grad():
        x = torch.rand(1, 3, 65, 97)
        assert tuple(model(x).shape) == (1, 7, 65, 97)
        stem = net.maxpool(net.conv1(x))
        features = net.layer4(net.layer3(net.layer2(net.layer1(stem))))
    assert tuple(features.shape) == (1, 2048, 9, 13)  # output stride 8
    blocks = {"deeplabv1_resnet50": 6, "deeplabv1_resnet101": 23}[name]
    assert [block.conv2.dilation[0] for block in net.layer3] == [1] + [2] * (blocks - 1)
    assert [block.conv2.dilation[0] for block in net.layer4] == [1, 4, 4]
    strides = net.layer2[0].conv1.stride[0], net.layer2[0].conv2.stride[0]
    assert strides == ((2, 1) if style == "caffe" else (1, 2))


def test_the_dilation_layouts_differ_in_the_first_blocks_only() -> None:
    for dilation, rates in {"torchvision": (1, 2), "every block": (2, 4)}.items():
        net = selfadapt.create_model("deeplabv1_resnet50", classes=2, dilation=dilation).backbone
        assert (net.layer3[0].conv2.dilation[0], net.layer4[0].conv2.dilation[0]) == rates
        assert {block.conv2.dilation[0] for block in net.layer4[1:]} == {4}


@pytest.mark.parametrize(("name", "style"), VARIANTS)
def test_released_checkpoints_load_and_predict_the_same(
    name: str, style: Any, tmp_path: Path
) -> None:
    model = seeded(lambda: selfadapt.create_model(name, classes=16, style=style))
    released = {"module.backbone.fc.weight": torch.rand(1000, 2048)}
    for key, value in model.state_dict().items():
        owner, _, last = key.rpartition(".")
        if isinstance(model.get_submodule(owner), nn.BatchNorm2d):
            released[f"module.{owner}.batch_norm.{last}"] = value
            released[f"module.{owner}.alpha"] = torch.tensor(0.1)
        else:
            released[f"module.{key}"] = value
    torch.save(released, tmp_path / "gta_alpha0.1.pth")
    loaded = selfadapt.create_model(
        name, classes=16, style=style, weights=tmp_path / "gta_alpha0.1.pth"
    )
    x = torch.rand(1, 3, 33, 41)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))


def test_backbone_weights_load_alone(tmp_path: Path) -> None:
    imagenet = torchvision.models.resnet50(weights=None)
    wrapped = {f"model.module.{name}": value for name, value in imagenet.state_dict().items()}
    torch.save({"model": {"state_dict": wrapped}}, tmp_path / "resnet50.pth")
    with pytest.warns(UserWarning, match="has the backbone only: the head is randomly"):
        model = selfadapt.create_model("deeplabv1_resnet50", weights=tmp_path / "resnet50.pth")
    assert torch.equal(model.backbone.conv1.weight, imagenet.conv1.weight)
    assert len(model.spec.classes) == 19


# saving and loading


@pytest.mark.parametrize("classes", [3, "cityscapes-19", "synthia-16", ("cat", "dog")])
def test_a_saved_network_needs_nothing_but_its_path(classes: Any, tmp_path: Path) -> None:
    model = seeded(
        lambda: selfadapt.create_model("deeplabv1_resnet50", classes=classes, style="caffe")
    )
    path = tmp_path / "net.safetensors"
    selfadapt.save_model(model, path)
    loaded = selfadapt.load_model(path)
    assert loaded.spec == model.spec
    assert loaded.interface == model.interface
    assert not loaded.training
    x = torch.rand(1, 3, 33, 41)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    assert [p.name for p in tmp_path.iterdir()] == ["net.safetensors"]


def test_the_whole_interface_is_saved(tmp_path: Path) -> None:
    model = selfadapt.create_model("deeplabv1_resnet50", classes=2)
    model.interface = Interface(mean=(0.1, 0.2, 0.3), std=(1.0,) * 3, bgr=True, divisor=8)
    selfadapt.save_model(model, tmp_path / "net.pt")  # the suffix does not matter
    assert selfadapt.load_model(tmp_path / "net.pt").interface == model.interface


def test_weights_saved_with_other_options_are_warned_about(tmp_path: Path) -> None:
    model = selfadapt.create_model("deeplabv1_resnet50", classes=2, style="caffe")
    selfadapt.save_model(model, tmp_path / "net.safetensors")
    with pytest.warns(UserWarning, match="saved with style='caffe', but is used with style='pyto"):
        selfadapt.create_model(
            "deeplabv1_resnet50", classes=2, weights=tmp_path / "net.safetensors"
        )


@pytest.mark.parametrize(
    "metadata", [{"classes": "unknown-7"}, {"interface": "{"}, {"interface": '{"colour": 1}'}]
)
def test_metadata_that_cannot_be_read_is_said_to_be(
    metadata: dict[str, str], tmp_path: Path
) -> None:
    metadata = {"arch": "deeplabv1_resnet50", **metadata}
    save_file({"a": torch.zeros(1)}, tmp_path / "net.safetensors", metadata=metadata)
    with pytest.raises(ValueError, match="does not describe a valid network"):
        selfadapt.load_model(tmp_path / "net.safetensors")


def test_a_saved_backbone_is_not_a_network(tmp_path: Path) -> None:
    backbone = torchvision.models.resnet50(weights=None).state_dict()
    metadata = {"arch": "deeplabv1_resnet50", "style": "pytorch"}
    save_file(backbone, tmp_path / "net.safetensors", metadata=metadata)
    with pytest.raises(ValueError, match=r"does not fit this network: it lacks cls_head\.weight"):
        selfadapt.load_model(tmp_path / "net.safetensors")


def test_options_in_other_words_are_read_and_unknown_ones_refused(tmp_path: Path) -> None:
    model = selfadapt.create_model("deeplabv1_resnet50", classes=2)
    path = tmp_path / "net.safetensors"
    facts = {"arch": "deeplabv1", "backbone": "resnet50", "classes": '["a", "b"]'}
    save_file(model.state_dict(), path, metadata={**facts, "dilation": "2 and 4 in every block"})
    assert selfadapt.load_model(path).spec.options["dilation"] == "every block"
    save_file(model.state_dict(), path, metadata={**facts, "style": "keras"})
    with pytest.raises(ValueError, match="style of deeplabv1_resnet50 must be one of"):
        selfadapt.load_model(path)


def test_half_the_bytes_but_statistics_in_full(tmp_path: Path) -> None:
    model = seeded(lambda: selfadapt.create_model("deeplabv1_resnet50", classes=2))
    model.backbone.bn1.running_var.fill_(1e6)
    selfadapt.save_model(model, tmp_path / "net.safetensors", dtype=torch.float16)
    with safe_open(tmp_path / "net.safetensors", "pt") as file:
        assert file.get_tensor("backbone.conv1.weight").dtype == torch.float16
        assert file.get_tensor("backbone.bn1.running_var").dtype == torch.float32
    loaded = selfadapt.load_model(tmp_path / "net.safetensors")
    assert loaded.backbone.conv1.weight.dtype == torch.float32
    assert torch.equal(loaded.backbone.bn1.running_var, model.backbone.bn1.running_var)


def test_san_does_not_change_what_is_saved(tmp_path: Path) -> None:
    model = seeded(lambda: selfadapt.create_model("deeplabv1_resnet50", classes=2))
    selfadapt.apply_san(model, 0.3)
    selfadapt.save_model(model, tmp_path / "net.safetensors")
    loaded = selfadapt.load_model(tmp_path / "net.safetensors")
    assert type(loaded.backbone.bn1) is nn.BatchNorm2d
    assert list(loaded.state_dict()) == list(model.state_dict())


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    model = selfadapt.create_model("smp:FPN/mobilenet_v2", classes=2)
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere to write net\.saf"):
        selfadapt.save_model(model, tmp_path / "nowhere" / "net.safetensors")
    with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype such as torch\.float16"):
        selfadapt.save_model(model, tmp_path / "net.safetensors", dtype=torch.int8)
    assert not list(tmp_path.iterdir())


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "net.safetensors"
    path.write_bytes(b"old")
    model = selfadapt.create_model("deeplabv1_resnet50", classes=2)

    def full(target: Path, content: bytes) -> None:
        with target.open("wb") as file:
            file.write(content[:100])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        selfadapt.save_model(model, path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["net.safetensors"]


def test_a_file_that_names_no_architecture_says_what_to_do(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "net.safetensors")
    with pytest.raises(ValueError, match=r"does not name its architecture; load it with create_mo"):
        selfadapt.load_model(tmp_path / "net.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors", metadata={"arch": "vgg"})
    with pytest.raises(ValueError, match="unknown model 'vgg'; known: streets, deeplabv1_res"):
        selfadapt.load_model(tmp_path / "other.safetensors")


def test_the_class_spaces() -> None:
    assert len(CITYSCAPES_19) == 19
    assert len(SYNTHIA_16) == 16
    assert CITYSCAPES_19[13] == "car"
    assert SYNTHIA_16[9:12] == ("sky", "person", "rider")


# which layers adapt


@pytest.mark.parametrize(
    ("name", "frozen", "adapted"),
    [
        (
            "own deeplabv1_resnet50",
            {"backbone.conv1", "backbone.bn1", "backbone.layer1", "backbone.layer2"},
            {"backbone.layer3", "backbone.layer4", "cls_head.weight", "cls_head.bias"},
        ),
        (
            "smp Unet",
            {"encoder.conv1", "encoder.bn1", "encoder.layer1", "encoder.layer2"},
            {"encoder.layer3", "encoder.layer4", "decoder.blocks", "segmentation_head.0"},
        ),
    ],
)
def test_resnets_adapt_the_last_two_stages_and_the_head(
    name: str, frozen: set[str], adapted: set[str]
) -> None:
    model = NETWORKS[name].build()
    chosen = adapted_parameters(model).names
    assert {".".join(n.split(".")[:2]) for n in chosen} == adapted
    left = {n for n, _ in model.named_parameters()} - set(chosen)
    assert {".".join(n.split(".")[:2]) for n in left} == frozen


def test_deep_resnets_adapt_the_last_stage_and_the_head() -> None:
    model = selfadapt.create_model("deeplabv1_resnet101", classes=2)
    chosen = adapted_parameters(model).names
    assert {n.split(".")[1] for n in chosen if n.startswith("backbone")} == {"layer4"}
    assert "cls_head.weight" in chosen


def test_hrnets_adapt_the_last_stage_and_the_head() -> None:
    chosen = adapted_parameters(NETWORKS["timm hrnet"].build()).names
    stages = {n.split(".")[2] for n in chosen if n.startswith("encoder")}
    assert "stage4" in stages
    assert "transition3" in stages
    assert not stages & {"conv1", "conv2", "layer1", "transition1", "transition2", "stage2"}
    assert "stage3" not in stages
    assert any(n.startswith("segmentation_head") for n in chosen)


def test_in_official_mode_hrnets_adapt_what_the_released_code_does() -> None:
    model = selfadapt.create_model("hrnet_w18", classes=2)
    method = selfadapt.SelfAdapt(model, mode="official")
    frozen = {"conv1", "bn1", "transition1", "stage2", "transition2", "stage3"}
    names = {n for n, _ in model.named_parameters() if n.split(".")[1] not in frozen}
    assert set(method.selection.names) == names
    assert "backbone.layer1.0.conv1.weight" in names


def test_unknown_networks_adapt_their_last_third_and_say_so() -> None:
    model = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(9)))
    selection = adapted_parameters(model)
    expected = ("6.weight", "6.bias", "7.weight", "7.bias", "8.weight", "8.bias")
    assert selection.names == expected
    assert "the last third of its layers is adapted, from '6.weight' on" in selection.reason
    assert selection.reason in selfadapt.SelfAdapt(model).notes


# what a network takes and gives


def test_normalisation_is_known_for_the_libraries_networks(tmp_path: Path) -> None:
    half = (0.5, 0.5, 0.5)
    assert detect(TinyNet()).mean == IMAGENET_MEAN
    net = smp.Unet("inceptionv4", encoder_weights=None, classes=2)
    assert detect(net).std == half
    net = smp.FPN("tu-mobilenetv3_small_050", encoder_weights=None, classes=2)
    timm_config = net.encoder.model.pretrained_cfg
    assert detect(net).mean == tuple(timm_config["mean"])
    net.encoder.model.pretrained_cfg = {**timm_config, "mean": half, "std": half}
    assert detect(net).mean == half
    assert detect(net, Interface(mean=IMAGENET_MEAN, std=IMAGENET_STD)).mean == IMAGENET_MEAN


def test_normalisation_of_a_hugging_face_folder_is_read(tmp_path: Path) -> None:
    model = segformer()
    assert detect(model).mean == IMAGENET_MEAN
    model.save_pretrained(tmp_path)
    rules: dict[str, Any] = {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(rules))
    model = type(model).from_pretrained(tmp_path)
    interface = detect(model)
    assert (interface.mean, interface.std) == ((0.5,) * 3, (0.25,) * 3)
    rules = {"do_normalize": False, "do_flip_channel_order": True}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(rules))
    interface = detect(model)
    assert (interface.mean, interface.bgr) == ((0.0,) * 3, True)
    image = random_image()
    assert torch.equal(interface.normalize(image)[0], image.flip(0))
    assert torch.equal(interface.denormalize(interface.normalize(image)[0]), image)


@pytest.mark.parametrize(
    ("name", "divisor"), [("toy", 1), ("own U-Net", 4), ("smp FPN", 32), ("hf SegFormer", 1)]
)
def test_the_sizes_a_network_needs_are_found_out(name: str, divisor: int) -> None:
    assert detect(NETWORKS[name].build()).divisor == divisor


def test_patches_of_14_pixels_are_found_out() -> None:
    model = Picky(lambda height, width: height % 14 == width % 14 == 0)
    assert detect(model).divisor == 14


class Picky(TinyNet):
    """A network that takes few sizes."""

    def __init__(self, takes: Callable[[int, int], bool], **options: Any) -> None:
        super().__init__(**options)
        self.takes = takes

    def forward(self, x: Tensor) -> Any:
        if not self.takes(*x.shape[-2:]):
            raise RuntimeError("wrong size")
        return super().forward(x)


def test_a_smallest_size_is_found_out_and_kept() -> None:
    model = seeded(lambda: Picky(lambda height, width: min(height, width) > 40))
    interface = detect(model)
    assert (interface.divisor, interface.minimum) == (1, 64)
    result = selfadapt.SelfAdapt(model, steps=1)(random_image(50, 97))
    assert tuple(result.label.shape) == (50, 97)


def test_a_network_of_one_size_gets_it() -> None:
    model = seeded(lambda: Picky(lambda *size: size == (224, 224)))
    method = selfadapt.SelfAdapt(model, steps=1)
    assert method.interface.size == (224, 224)
    result = method(random_image(50, 97))
    assert tuple(result.label.shape) == (50, 97)
    assert "the network takes 224x224 pixels only: images are resized" in result.notes
    model = seeded(lambda: Picky(lambda *size: size == (48, 80)))
    method = selfadapt.SelfAdapt(model, steps=1, interface=Interface(size=(48, 80)))
    assert tuple(method(random_image(50, 97)).label.shape) == (50, 97)


def test_a_large_smallest_size_is_found_out() -> None:
    interface = detect(Picky(lambda height, width: min(height, width) > 300))
    assert (interface.divisor, interface.minimum) == (1, 512)


def test_the_size_a_configuration_records_is_tried() -> None:
    model = Picky(lambda *size: size == (100, 100))
    assert detect(model).size is None
    model.config = SimpleNamespace(image_size=100)
    assert detect(model).size == (100, 100)


def test_the_interface_is_the_same_wherever_it_is_found_out() -> None:
    class Counting(TinyNet):
        def forward(self, x: Tensor) -> Any:
            self.calls.add_(1)
            return super().forward(x).softmax(dim=1)

    model = seeded(Counting)
    model.register_buffer("calls", torch.zeros(()))
    expected = detect(model)
    assert expected.activated
    with torch.inference_mode():
        assert detect(model) == expected
    assert model.calls == 0


def test_a_network_that_takes_no_size_fails_in_its_own_words() -> None:
    method = selfadapt.SelfAdapt(seeded(lambda: Picky(lambda *_: False)))
    with pytest.raises(RuntimeError, match="wrong size"):
        method(random_image())


def test_padding_is_cut_off_again() -> None:
    seen = []

    def network(x: Tensor) -> Tensor:
        seen.append(tuple(x.shape))
        return x[:, :2]

    x = torch.rand(1, 3, 33, 70)
    logits = Interface(divisor=32).logits(network, x)
    assert seen == [(1, 3, 64, 96)]
    assert torch.equal(logits, x[:, :2])


def test_small_outputs_are_enlarged_as_their_family_does() -> None:
    x = torch.rand(1, 3, 32, 32)
    small = torch.rand(1, 5, 8, 8)
    expected = nn.functional.interpolate(small, (32, 32), mode="bilinear", align_corners=False)
    assert torch.equal(Interface().logits(lambda _: small, x), expected)


def test_one_channel_is_two_classes() -> None:
    scores = torch.randn(1, 1, 4, 4)
    logits = Interface().logits(lambda _: scores, torch.rand(1, 3, 4, 4))
    torch.testing.assert_close(logits.softmax(dim=1)[:, 1:], scores.sigmoid())


@pytest.mark.parametrize("classes", [1, 3])
def test_probabilities_are_recognised(classes: int) -> None:
    activation = "sigmoid" if classes == 1 else "softmax2d"
    net = seeded(
        lambda: smp.Unet("resnet18", encoder_weights=None, classes=classes, activation=activation)
    )
    interface = detect(net)
    assert interface.activated
    x = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        probs = interface.logits(net, x).softmax(dim=1)
        expected = net(x)
    torch.testing.assert_close(probs[:, -classes:], expected, atol=1e-4, rtol=0)
    assert not detect(seeded(lambda: TinyNet(1))).activated


class Gated(nn.Module):
    """A binary network; its last module is a sigmoid that is not its last operation."""

    def __init__(self, closing: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.head = nn.Conv2d(6, 1, 1)
        self.body = nn.Conv2d(3, 6, 3, padding=1)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 6, 1), nn.Sigmoid())
        self.closing = closing

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x).relu()
        return self.closing(self.head(features * self.gate(features)))


def test_a_closing_sigmoid_is_known_by_its_values_not_its_name() -> None:
    assert detect(seeded(lambda: Gated(torch.sigmoid))).activated
    assert not detect(seeded(lambda: Gated(lambda y: y))).activated
    model = seeded(lambda: Gated(torch.sigmoid))
    result = selfadapt.SelfAdapt(model, steps=0)(random_image())
    with torch.no_grad():
        expected = model(detect(model).normalize(random_image()))[0]
    torch.testing.assert_close(result.source_probs[1:], expected, atol=1e-5, rtol=0)


def test_a_closing_sigmoid_is_known_at_the_sizes_the_network_takes() -> None:
    for takes in (lambda h, w: h % 14 == w % 14 == 0, lambda h, w: min(h, w) > 300):
        model = seeded(lambda takes=takes: Picky(takes, classes=1, form=torch.sigmoid))
        assert detect(model).activated


def test_channels_are_found_out_by_trying() -> None:
    assert detect(seeded(lambda: Gated(lambda y: y))).channels == 3  # its head comes first
    assert detect(seeded(lambda: TinyNet(channels=17))).channels == 17


def test_scores_with_the_classes_last_are_refused() -> None:
    model = seeded(lambda: TinyNet(form=lambda y: y.permute(0, 2, 3, 1)))
    with pytest.raises(TypeError, match=r"number of classes changes with the size of the image"):
        selfadapt.SelfAdapt(model)


def test_outputs_of_any_form() -> None:
    scores = torch.rand(1, 2, 4, 4)

    class Output:
        logits = scores

    forms = (scores, {"out": scores, "aux": 0}, {"logits": scores, "loss": 0}, {"pred": scores},
             {"anything": scores}, (scores, 1), [scores], [{"out": scores}], Output())  # fmt: skip
    for form in forms:
        assert main_output(form) is scores


def test_networks_that_classify_masks() -> None:
    classes, masks = torch.randn(1, 7, 4), torch.randn(1, 7, 5, 6)
    output = {"class_queries_logits": classes, "masks_queries_logits": masks, "loss": None}
    scores = main_output(output)
    expected = torch.zeros(3, 5, 6)
    for query in range(7):
        for c in range(3):
            likely = classes[0, query].softmax(dim=0)[c]
            expected[c] += likely * masks[0, query].sigmoid()
    torch.testing.assert_close(scores[0].exp(), expected)


def test_a_callable_takes_the_scores_out_of_anything_else() -> None:
    model = seeded(lambda: TinyNet(form=lambda y: {"a": 0 * y, "b": y}))
    plain = seeded(TinyNet)
    method = selfadapt.SelfAdapt(
        model, steps=1, interface=Interface(output=lambda output: output["b"])
    )
    image = random_image()
    assert torch.equal(method(image).probs, selfadapt.SelfAdapt(plain, steps=1)(image).probs)


def test_networks_of_other_channels_have_no_gray_views() -> None:
    method = selfadapt.SelfAdapt(seeded(lambda: TinyNet(channels=4)))
    assert not any(view.gray for view in method.views)
    assert sum(view.flip for view in method.views) == 3
    assert method.interface.mean == (0.0,) * 4
    assert any("input channels: 4, so no view is turned gray" in note for note in method.notes)


def test_what_is_assumed_of_the_input_is_noted() -> None:
    net = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)))

    def notes(**settings: Any) -> str:
        return str(selfadapt.SelfAdapt(net, adapt=["2"], **settings).notes)

    assert "ImageNet's mean and std are assumed" in notes()
    assert notes(interface=Interface(mean=(0.5,) * 3, std=(0.5,) * 3)) == "()"
    net.interface = Interface(mean=(0.5,) * 3, std=(0.5,) * 3)
    assert notes() == "()"
    gray = nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    assert "no normalisation is assumed" in str(selfadapt.SelfAdapt(gray, adapt=["2"]).notes)


@pytest.mark.parametrize("address", ["torchvision:lraspp_mobilenet_v3_large", "smp:Unet/resnet18"])
def test_nothing_is_assumed_of_networks_of_known_libraries(address: str) -> None:
    method = selfadapt.SelfAdapt(seeded(lambda: selfadapt.create_model(address, classes=3)))
    assert "normalised" not in str(method.notes)


def test_what_a_network_was_trained_on_is_kept_in_its_file(tmp_path: Path) -> None:
    model: Any = selfadapt.open_model("streets")
    assert "synthetic street scenes" in model.spec.trained_on
    selfadapt.save_model(model, tmp_path / "net.safetensors")
    loaded: Any = selfadapt.open_model(tmp_path / "net.safetensors")
    assert loaded.spec == model.spec
    with pytest.raises(ValueError, match="trained_on must be a line of at most 200 characters"):
        replace(model.spec, trained_on="x" * 201)


def test_channels_of_a_network_of_smp_are_those_of_its_weights(tmp_path: Path) -> None:
    gray = smp.Unet("mobilenet_v2", encoder_weights=None, in_channels=1, classes=2)
    torch.save(gray.state_dict(), tmp_path / "gray.pth")
    model: Any = selfadapt.open_model("smp:Unet/mobilenet_v2", weights=tmp_path / "gray.pth")
    assert model.spec.channels == 1
    assert len(model.spec.classes) == 2
    selfadapt.save_model(model, tmp_path / "net.safetensors")
    loaded = selfadapt.load_model(tmp_path / "net.safetensors")
    result = selfadapt.create_method("san", loaded)(random_image(64, 96)[:1])
    assert result.label.shape == (64, 96)


@pytest.mark.parametrize("shape", [(1, 1, 8, 32, 32), (8, 3, 32, 32), (40, 32, 32)])
def test_volumes_are_to_be_given_slice_by_slice(shape: tuple[int, ...], tiny: nn.Module) -> None:
    with pytest.raises(ValueError, match="a volume slice by slice"):
        selfadapt.create_method("source", tiny)(torch.zeros(shape))
    volumes = nn.Sequential(nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2))
    with pytest.raises(ValueError, match="this network segments volumes"):
        selfadapt.SelfAdapt(volumes)
