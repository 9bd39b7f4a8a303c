"""Networks of others that do unusual things: their weights stay theirs, and results are right."""

import copy
import gc
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import selfadapt
from conftest import assert_same, random_image, seeded, snapshot
from selfadapt import Interface, SelfAdapt, apply_san
from selfadapt.baselines import SaNOnly, Source
from selfadapt.engine import Network
from selfadapt.models.families import adapted_parameters
from selfadapt.norm import forward_context
from selfadapt.result import Result

QUICK: dict[str, Any] = {"scales": (0.5, 1.0), "compare": False, "lr": 0.1}
KNOWN = Interface(channels=3, minimum=1, divisor=1, activated=False)


def conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class Prototypes(nn.Module):
    """Brings its prototypes to length 1 whenever it is run, and keeps a mean of its features."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = conv(3, 8), nn.BatchNorm2d(8)
        self.prototypes = nn.Parameter(3 * torch.randn(4, 8), requires_grad=False)
        self.mean = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.prototypes.data.copy_(F.normalize(self.prototypes, dim=1))
        y = self.norm(self.body(x)).relu()
        self.mean.data.lerp_(y.detach().mean((0, 2, 3)), 0.5)
        return torch.einsum("bchw,kc->bkhw", y, self.prototypes)


@pytest.mark.parametrize("interface", [None, KNOWN], ids=["found out", "given"])
@pytest.mark.parametrize("fast", [True, False])
def test_a_network_that_writes_to_its_weights_keeps_them(
    interface: Interface | None, fast: bool
) -> None:
    model, image = seeded(Prototypes), random_image(24, 28)
    before = snapshot(model)
    method = SelfAdapt(model, adapt=["body"], steps=2, fast=fast, interface=interface, **QUICK)
    assert_same(before, snapshot(model))
    one, other = method(image), method(image)
    assert_same(before, snapshot(model))
    assert model.mean.equal(torch.zeros(8))
    assert torch.equal(one.probs, other.probs)


class Back(nn.Module):
    """Leaves features on itself for whoever runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv(3, 6), conv(6, 6)
        self.skip: Tensor | None = None
        self.all: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        self.skip = x
        self.all.append(x)
        return self.second(x).relu()


class Sideways(nn.Module):
    """Takes what its back leaves, and clears it away."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.back, self.head, self.kind = Back(), nn.Conv2d(6, 4, 1), kind

    def forward(self, x: Tensor) -> Tensor:
        self.back.skip = None
        self.back.all.clear()
        y = self.back(x)
        if self.kind == "attribute" and self.back.skip is not None:
            y = y + self.back.skip
        if self.kind == "list" and self.back.all:
            y = y + self.back.all[0]
        return self.head(y)


class Cell(nn.Module):
    """Remembers what it was given, as recurrent layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.kept = conv(6, 6), None

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x) if self.kept is None else self.mix(x) + self.kept
        self.kept = 0.5 * y
        return y.relu()


class Recurrent(nn.Module):
    """Runs a frozen cell several times on the same features."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.cell, self.head = conv(3, 6), Cell(), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, self.cell.kept = self.stem(x), None
        for _ in range(3):
            y = self.cell(x)
        return self.head(y)


@pytest.mark.parametrize(
    "build", [lambda: Sideways("attribute"), lambda: Sideways("list"), Recurrent]
)
def test_what_frozen_layers_keep_on_themselves_is_there_in_every_step(build: Any) -> None:
    model, image = seeded(build), random_image(24, 28)
    results = [
        SelfAdapt(model, adapt=["head"], steps=3, fast=fast, **QUICK)(image)
        for fast in (True, False)
    ]
    assert results[0].losses == results[1].losses
    assert torch.equal(results[0].probs, results[1].probs)


def test_features_go_with_their_image(tiny: nn.Module, image: Tensor) -> None:
    """Not when garbage is collected some day, which is late for what fills a GPU."""
    alive: list[ref[Any]] = []
    with pytest.MonkeyPatch.context() as patch:

        class Watched(Network):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                alive.append(ref(self))

        patch.setattr("selfadapt.engine.engine.Network", Watched)
        gc.disable()
        try:
            SelfAdapt(tiny, steps=2, **QUICK)(image)
            assert alive
            assert not any(one() is not None for one in alive)
        finally:
            gc.enable()


class Tokens(nn.Module):
    """Normalises tokens, or windows, that it has put into the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.head, self.kind = conv(3, 8), nn.Conv2d(8, 4, 1), kind
        self.norm: nn.Module = {"tokens": nn.BatchNorm1d}.get(kind, nn.BatchNorm2d)(8)
        self.norm.running_mean.uniform_(-0.2, 0.2)  # type: ignore[union-attr, operator]

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        batch, channels, height, width = y.shape
        if self.kind == "tokens":
            rows = y.permute(0, 2, 3, 1).reshape(-1, channels)
            y = self.norm(rows).reshape(batch, height, width, channels).permute(0, 3, 1, 2)
        elif self.kind == "windows":
            parts = y.reshape(batch, channels, 2, height // 2, width).transpose(1, 2)
            parts = self.norm(parts.reshape(-1, channels, height // 2, width))
            parts = parts.reshape(batch, 2, channels, height // 2, width).transpose(1, 2)
            y = parts.reshape(y.shape)
        else:
            y = self.norm(y)
        return self.head(y.relu())


@pytest.mark.parametrize("kind", ["tokens", "windows"])
@pytest.mark.parametrize("method", ["p-bn", "san", "self-adapt"])
@pytest.mark.parametrize("mode", ["paper", "official"])
def test_parts_of_an_image_in_the_batch_are_no_images(kind: str, method: str, mode: Any) -> None:
    image = random_image(24, 28)
    plain, parts = seeded(lambda: Tokens("plain")), seeded(lambda: Tokens(kind))
    parts.load_state_dict(plain.state_dict())
    settings = {"mode": mode, "compare": False}
    if method == "self-adapt":
        settings |= {"steps": 2, "adapt": ["body", "norm", "head"], **QUICK}
    one, other = (selfadapt.create_method(method, m, **settings)(image) for m in (plain, parts))
    torch.testing.assert_close(one.probs, other.probs, atol=1e-5, rtol=1e-4)


def test_images_that_cannot_be_told_apart_are_not_mixed() -> None:
    model = seeded(lambda: Tokens("tokens")).eval()
    apply_san(model, 0.5)
    with forward_context(2, None), pytest.raises(RuntimeError, match="cannot be told apart"):
        model(torch.rand(2, 3, 8, 8))


class Frozen(nn.Module):
    """BatchNorm as many repositories have it, with its epsilon in the code."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.1)):
            self.register_buffer(name, torch.full((channels,), value))
        self.register_buffer("running_var", torch.full((channels,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, 1, 1)
        scale = self.weight.reshape(shape) * (self.running_var.reshape(shape) + 1e-5).rsqrt()
        return x * scale + (self.bias.reshape(shape) - self.running_mean.reshape(shape) * scale)


FrozenBatchNorm = type("FrozenBatchNorm", (Frozen,), {})


def test_batchnorm_whose_epsilon_is_in_its_code_is_mixed(image: Tensor) -> None:
    usual: Any = seeded(lambda: nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1)))
    other = copy.deepcopy(usual)
    other[1] = FrozenBatchNorm(4)
    other[1].load_state_dict(usual[1].state_dict(), strict=False)
    one, same = (SaNOnly(model, alpha=0.3, compare=False)(image) for model in (usual, other))
    torch.testing.assert_close(one.probs, same.probs, atol=1e-6, rtol=1e-5)


def test_a_head_that_is_all_zeros_says_nothing_about_what_it_will_return(image: Tensor) -> None:
    model = seeded(lambda: nn.Sequential(conv(3, 6), nn.ReLU(), nn.Conv2d(6, 3, 1)))
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    expected = Source(model, compare=False)(image).label
    for value in model[2].parameters():
        nn.init.zeros_(value)
    method = Source(model, compare=False)
    assert method.interface.activated is False
    model.load_state_dict(trained)
    assert torch.equal(method(image).label, expected)


class Noisy(nn.Conv2d):
    """Draws dropout in evaluation, too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, training=True)


@pytest.mark.parametrize("interface", [None, KNOWN], ids=["found out", "given"])
def test_a_random_network_gives_the_same_twice(interface: Interface | None, image: Tensor) -> None:
    method = SelfAdapt(seeded(lambda: Noisy(3, 3, 1)), interface=interface, steps=2, **QUICK)
    state = torch.get_rng_state()
    assert torch.equal(method(image).probs, method(image).probs)
    assert torch.equal(torch.get_rng_state(), state)
    assert any("random" in note for note in method.notes)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_networks_that_share_a_part_wait_for_each_other(
    order: tuple[int, int], image: Tensor
) -> None:
    back = seeded(lambda: nn.Sequential(conv(3, 6), nn.BatchNorm2d(6), nn.ReLU()))
    heads = [seeded(lambda: nn.Conv2d(6, 4, 1), seed) for seed in (1, 2)]
    models = [nn.Sequential(back, head) for head in heads]
    both = nn.ModuleList(models)
    before = snapshot(both)
    methods = [SelfAdapt(models[index], steps=2, **QUICK) for index in order]
    expected = [method(image).probs for method in methods]
    wrong: list[Any] = []

    def work(index: int) -> None:
        for _ in range(12):
            try:
                result: Result = methods[index](image)
                if not torch.equal(result.probs, expected[index]):
                    wrong.append(index)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert_same(before, snapshot(both))


def test_a_tied_layer_is_found_by_either_name() -> None:
    model = nn.ModuleDict({"mid": nn.Conv2d(4, 4, 1), "head": nn.Conv2d(4, 4, 1)})
    model["head"].weight = model["mid"].weight
    assert adapted_parameters(model, ["head"]).names == ("mid.weight", "head.bias")
    assert adapted_parameters(model, ["mid"]).names == ("mid.weight", "mid.bias")


class Casting(nn.Module):
    """Halves its input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv2d(3, 3, 1).half()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.half()).float()


class Reentrant(nn.Module):
    """Computes its features anew in the backward pass, in the old way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = conv(3, 6), nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.head, self.first(x), use_reentrant=True)


@pytest.mark.parametrize(
    ("build", "advice"),
    [(Casting, "casts its input itself"), (Reentrant, "use_reentrant=False in the network")],
)
def test_what_a_network_must_not_do_is_said(build: Any, advice: str, image: Tensor) -> None:
    model = seeded(build)
    method = SelfAdapt(model, adapt=[n for n, _ in model.named_children()], steps=1, **QUICK)
    with pytest.raises(RuntimeError) as caught:
        method(image)
    assert advice in " ".join(caught.value.__notes__)


@pytest.mark.parametrize("activated", ["softmax", "Sigmoid", 3])
def test_an_unknown_activation_is_refused(activated: Any) -> None:
    with pytest.raises(ValueError, match="activated must be True, False or 'sigmoid'"):
        Interface(activated=activated)


class Box(nn.Module):
    """Leaves its features in something that others have as well."""

    def __init__(self, put: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.body, self.put = conv(3, 8), put

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x).relu()
        self.put(y)
        return y


class Shelf(nn.Module):
    """Adds to what a frozen layer has put away, in its place."""

    def __init__(self, place: Any, key: Any) -> None:
        super().__init__()
        self.place, self.key = place, key
        self.box = Box(self.put)
        self.box.place = place
        self.head = nn.Conv2d(8, 4, 1)

    def put(self, y: Tensor) -> None:
        inner = self.place
        if isinstance(inner, SimpleNamespace):
            inner.y = y
            return
        for key in self.key[:-1]:
            inner = inner[key]
        inner[self.key[-1]] = y

    def get(self) -> Tensor:
        inner = self.place
        if isinstance(inner, SimpleNamespace):
            return inner.y
        for key in self.key:
            inner = inner[key]
        return inner

    def forward(self, x: Tensor) -> Tensor:
        scores = self.head(self.box(x))
        self.put(self.get() + scores.mean(dim=1, keepdim=True))
        return scores + self.get().mean(dim=1, keepdim=True) * torch.ones(4, 1, 1).cumsum(0)


class Dilated(nn.Module):
    """Runs one frozen convolution in two ways, which it sets from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.shared, self.head = conv(3, 8), conv(8, 8), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, found = self.body(x).relu(), []
        for side in (1, 3):
            self.shared.dilation = self.shared.padding = (side, side)
            found.append(self.shared(x))
        return self.head(torch.cat(found, dim=1))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Shelf(SimpleNamespace(y=None), ()),
        lambda: Shelf(deque([None]), (0,)),
        lambda: Shelf({"a": {"b": None}}, ("a", "b")),
        lambda: Shelf({"a": [None]}, ("a", 0)),
        Dilated,
    ],
    ids=["object", "deque", "dict in dict", "list in dict", "attribute set from outside"],
)
def test_shortcuts_see_what_frozen_layers_share_with_others(build: Any) -> None:
    model, image = seeded(build), random_image(24, 28)
    fast, plain = (
        SelfAdapt(model, adapt=["head"], steps=3, fast=fast, **QUICK)(image)
        for fast in (True, False)
    )
    assert fast.losses == pytest.approx(plain.losses, rel=1e-5)
    torch.testing.assert_close(fast.probs, plain.probs)


class Stored(nn.Module):
    """Writes to tensors in containers of its own, and draws from dice of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = conv(3, 8), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
        self.kept = {"list": [torch.zeros(1)], "count": deque([0])}
        self.dice = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        self.kept["list"][0] += x.mean()
        self.kept["count"].append(1)
        noise = torch.rand(1, generator=self.dice)
        return self.head(self.norm(self.body(x)).relu()) * (1 + noise)


def test_what_a_network_holds_deep_inside_stays_as_it_was(image: Tensor) -> None:
    model = seeded(Stored)
    state = model.dice.get_state()
    method = SelfAdapt(model, steps=2, **QUICK)
    one, other = method(image), method(image)
    assert torch.equal(one.probs, other.probs)
    assert float(model.kept["list"][0]) == 0
    assert model.kept["count"] == deque([0])
    assert torch.equal(model.dice.get_state(), state)


def resnet(**stem: nn.Module) -> nn.Module:
    """Return what has the stages of a ResNet, after this stem."""
    stages = {f"layer{n}": nn.Conv2d(4, 4, 1) for n in range(1, 5)}
    model = nn.Module()
    for name, module in {**stem, **stages, "head": nn.Conv2d(4, 2, 1)}.items():
        model.add_module(name, module)
    return model


@pytest.mark.parametrize("names", [("conv1", "bn1", "conv2", "bn2"), ("layer0",), ("stem",)])
def test_the_stem_of_a_resnet_is_frozen_whatever_it_is_called(names: tuple[str, ...]) -> None:
    model = resnet(**{name: nn.Conv2d(4, 4, 1) for name in names}, pool=nn.MaxPool2d(2))
    selection = adapted_parameters(model)
    layers = list(dict.fromkeys(name.partition(".")[0] for name in selection.names))
    assert layers == ["layer3", "layer4", "head"]
    assert selection.reason == f"ResNet: all but {', '.join((*names, 'layer1', 'layer2'))}"


def test_two_backbones_are_both_frozen_below() -> None:
    model = nn.ModuleDict({"color": resnet(conv1=conv(3, 4)), "depth": resnet(conv1=conv(1, 4))})
    names = adapted_parameters(model).names
    layers = {name.rpartition(".")[0] for name in names}
    below = ("layer3", "layer4", "head")
    assert layers == {f"{path}.{one}" for path in ("color", "depth") for one in below}


class Conditional(nn.BatchNorm2d):
    """Takes something beside the features."""

    def forward(self, input: Tensor, scale: float = 1.0) -> Tensor:
        return scale * super().forward(input)


class Unusual(nn.Module):
    """Calls BatchNorm in other ways than others do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.other = conv(3, 8), nn.BatchNorm2d(8), Conditional(8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(input=self.body(x)).relu()
        return self.head(self.other(y, 2.0) + self.other(y, scale=3.0))


@pytest.mark.parametrize("method", ["source", "san", "self-adapt"])
def test_batchnorm_may_be_called_in_other_ways(method: str, image: Tensor) -> None:
    result = selfadapt.create_method(method, seeded(Unusual))(image)
    torch.testing.assert_close(result.probs.sum(dim=0), torch.ones(image.shape[1:]))


def test_a_batchnorm_whose_forward_is_replaced_is_not_said_to_be_mixed(tiny: nn.Module) -> None:
    """As some libraries do that move layers between devices."""
    norm = next(module for module in tiny.modules() if isinstance(module, nn.BatchNorm2d))
    norm.forward = norm.forward
    report = SaNOnly(tiny).san
    assert len(report.converted) == 1
    assert "has a replaced forward" in str(report)


class Named(nn.Module):
    """Returns an object, with an edge map beside the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.edge, self.head = conv(3, 8), nn.Conv2d(8, 1, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        return SimpleNamespace(edge=self.edge(y), out=self.head(y))


def test_scores_are_found_by_the_name_of_an_attribute(image: Tensor) -> None:
    assert len(Source(seeded(Named))(image).probs) == 4


@pytest.mark.parametrize("error", [AssertionError, IndexError, AttributeError])
def test_a_network_that_fails_for_its_own_reasons_is_explained(
    error: type[Exception], tiny: nn.Module, image: Tensor
) -> None:
    method = Source(tiny)

    def fail(*_: Any) -> None:
        raise error

    with tiny.register_forward_pre_hook(fail), pytest.raises(error) as caught:
        method(image)
    assert "it is called as model(images)" in caught.value.__notes__[0]


def test_threads_that_make_and_use_methods_do_not_wait_for_ever(image: Tensor) -> None:
    model = seeded(lambda: nn.Sequential(conv(3, 8), nn.ReLU(), nn.Conv2d(8, 4, 1)))
    dropping = selfadapt.create_method("mc-dropout", model, passes=2)
    pool = ThreadPoolExecutor(2)
    used = pool.submit(lambda: [dropping(image) for _ in range(40)])
    made = pool.submit(lambda: [Source(model) for _ in range(40)])
    assert len(used.result(timeout=60)) == len(made.result(timeout=60)) == 40
    pool.shutdown()


def test_an_interface_of_the_network_is_filled_in_by_its_library() -> None:
    model = nn.Conv2d(3, 4, 1)
    model.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
    model.interface = Interface(output=lambda output: output)
    method = Source(model)
    assert (method.interface.mean, method.interface.std) == ((0.5,) * 3, (0.25,) * 3)


def test_half_a_normalisation_is_an_assumption() -> None:
    notes = Source(nn.Conv2d(3, 4, 1), interface=Interface(mean=(0.5,) * 3)).notes
    assert "assumed" in notes[0]


def test_alpha_may_be_set_and_the_mode_may_not(tiny: nn.Module, image: Tensor) -> None:
    method = SaNOnly(tiny, alpha=0.0)
    method.alpha = 1.0
    assert "alpha=1.0" in repr(method)
    assert torch.equal(method(image).probs, SaNOnly(tiny, alpha=1.0)(image).probs)
    with pytest.raises(ValueError, match="alpha must lie"):
        method.alpha = 2.0
    assert method.alpha == 1.0
    with pytest.raises(AttributeError):
        method.mode = "official"


def test_an_error_of_the_caller_goes_with_its_features(tiny: nn.Module, image: Tensor) -> None:
    method, found = SelfAdapt(tiny, mode="paper", steps=2, **QUICK), []

    def fail(number: int, loss: float) -> None:
        large = torch.zeros(100)
        found.append(ref(large))
        raise KeyError("theirs")

    method.on_step = fail
    with pytest.raises(KeyError):
        method(image)
    gc.collect()
    assert found[0]() is None


def test_entropy_tunes_the_layers_self_adaptation_does() -> None:
    model = selfadapt.create_model("hrnet_w18", classes=2)
    for mode in ("paper", "official"):
        names = {
            name: selfadapt.create_method(name, model, mode=mode, interface=KNOWN).selection.names
            for name in ("self-adapt", "entropy", "memo")
        }
        assert names["self-adapt"] == names["entropy"] == names["memo"]


class Heads(nn.Module):
    """Has its head first and two more that nobody needs, and a layer that it runs by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(8, 4, 1)
        self.blocks = nn.ModuleList(conv(3 if n == 0 else 8, 8) for n in range(5))
        self.by_hand = nn.Conv2d(8, 8, 1)
        self.more = nn.ModuleList(nn.Conv2d(8, 4, 1) for _ in range(6))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x).relu()
        x = F.conv2d(x, self.by_hand.weight, self.by_hand.bias).relu()
        return {"aux": self.more[0](x), "out": self.head(x)}


def test_the_last_layers_are_those_that_run_last(image: Tensor) -> None:
    model = seeded(Heads)
    before, dice = snapshot(model), torch.get_rng_state()
    method = SelfAdapt(model, steps=1, **QUICK)
    assert_same(before, snapshot(model))
    assert torch.equal(torch.get_rng_state(), dice)
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in method.selection.names))
    assert layers == ["by_hand", "head"]
    assert method(image).losses


def test_where_the_order_cannot_be_found_out_it_is_that_of_the_parameters(image: Tensor) -> None:
    plain = nn.Sequential(conv(3, 8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    scripted = nn.Sequential(conv(3, 8), torch.jit.script(plain[1]), nn.Conv2d(8, 4, 1))
    assert SelfAdapt(scripted, steps=1, **QUICK).selection.names == ("2.weight", "2.bias")


class Patches(nn.Module):
    """Cuts off what is no whole patch."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Conv2d(3, 8, side, side), nn.BatchNorm2d(8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(x)).relu())


@pytest.mark.parametrize("side", [1, 2, 4, 14, 16])
def test_networks_of_patches_see_the_border_of_an_image(side: int) -> None:
    method = Source(seeded(lambda: Patches(side)))
    assert method.interface.divisor == side
    image = random_image(33, 47)
    other = image.clone()
    other[:, :, -1] = 1 - other[:, :, -1]
    assert not torch.equal(method(image).probs[:, :, -1], method(other).probs[:, :, -1])


def test_a_network_that_has_other_layers_now_takes_a_new_method(
    tiny: nn.Module, image: Tensor
) -> None:
    method = SelfAdapt(tiny, adapt=["head"], steps=1, **QUICK)
    nn.utils.parametrizations.weight_norm(tiny.head)
    with pytest.raises(ValueError, match=r"had head\.weight when this method was created"):
        method(image)


@pytest.mark.parametrize(("step", "expected"), [(128, 256), (48, 384), (56, 224)])
def test_sides_that_must_be_multiples_are_no_fixed_size(step: int, expected: int) -> None:
    """Images would be squashed to a square."""

    class Stepped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[-1] % step or x.shape[-2] % step:
                raise ValueError("no such size")
            return self.head(x)

    method = Source(seeded(Stepped))
    assert (method.interface.size, method.interface.divisor) == (None, expected)
    assert method(torch.rand(3, 100, 300)).probs.shape == (4, 100, 300)


def test_sets_and_arrays_are_as_they_were() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Conv2d(3, 4, 1)
            self.seen, self.gone, self.times = set[int](), {1, 2}, np.zeros(2)

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add(x.shape[-1])
            self.gone.discard(1)
            self.times += 1
            return self.head(x)

    model = seeded(Counting)
    kept = model.seen, model.gone, model.times
    Source(model)(torch.rand(3, 40, 60))
    assert (model.seen, model.gone, model.times.tolist()) == (set(), {1, 2}, [0, 0])
    assert (model.seen, model.gone) == kept[:2]
    assert model.times is kept[2]
