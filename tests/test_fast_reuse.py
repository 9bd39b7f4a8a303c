"""Layers that are frozen are run once, and nothing comes out differently."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import selfadapt
from conftest import TinyNet, assert_same, random_image, seeded, snapshot
from networks import NETWORKS
from oddities import WAYS, Odd, conv, in_place_modules, used_before_a_change
from selfadapt import SelfAdapt, create_method
from selfadapt.engine import Fast, Network
from selfadapt.engine.reuse import Reuse, frozen_modules
from selfadapt.models.detect import detect

CLOSE = {"rtol": 0, "atol": 1e-5}
QUICK = {"scales": (0.5,), "lr": 0.01, "compare": False}


def assert_equal_results(fast: selfadapt.Result, plain: selfadapt.Result) -> None:
    assert fast.losses == pytest.approx(plain.losses, abs=2e-5)
    torch.testing.assert_close(fast.probs, plain.probs, **CLOSE)
    if plain.pseudo_label is not None:
        assert torch.equal(fast.pseudo_label, plain.pseudo_label)


@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_adapts_to_the_same(network: str) -> None:
    case = NETWORKS[network]
    model = seeded(case.build)
    before, image = snapshot(model), random_image(32, 40, case.channels)
    interface = detect(model)
    for mode in ("paper", "official"):
        settings = {**QUICK, "mode": mode, "steps": 3, "lr": 1e-4, "interface": interface}
        fast = SelfAdapt(model, **settings)(image)
        assert_same(before, snapshot(model, copy=False))
        plain = SelfAdapt(model, **settings, fast=Fast(reuse=False))(image)
        assert plain.losses[2] != plain.losses[0]
        assert_equal_results(fast, plain)


@pytest.mark.parametrize("mode", ["paper", "official"])
@pytest.mark.parametrize("method", ["tent", "entropy", "memo"])
@pytest.mark.parametrize("network", ["toy", "own deeplabv1_resnet18_slim", "hf SegFormer"])
def test_every_method_that_takes_steps_gives_the_same(network: str, method: str, mode: Any) -> None:
    build = NETWORKS[network].build if network in NETWORKS else slim
    model, image = seeded(build), random_image(32, 40)
    results = [
        create_method(method, model, steps=3, mode=mode, fast=Fast(reuse=reuse))(image)
        for reuse in (True, False)
    ]
    assert_equal_results(*results)


def slim() -> nn.Module:
    return selfadapt.create_model("deeplabv1_resnet18_slim", classes=5)


def count_runs(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    runs: list[int] = []
    forward = module._conv_forward if isinstance(module, nn.Conv2d) else module.forward
    name = "_conv_forward" if isinstance(module, nn.Conv2d) else "forward"

    def counted(*args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return forward(*args, **kwargs)

    monkeypatch.setitem(module.__dict__, name, counted)
    return runs


@pytest.mark.parametrize(("fast", "expected"), [(True, 1), (False, 5), (Fast(reuse=False), 5)])
def test_a_frozen_layer_runs_once_for_all_steps(
    fast: bool | Fast, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, image = seeded(slim), random_image(32, 40)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    method = SelfAdapt(
        model, mode="paper", steps=4, views=[selfadapt.View(0.5)], compare=False, fast=fast
    )
    first, last = (count_runs(convolutions[i], monkeypatch) for i in (0, -1))
    method(image)
    assert len(first) == expected + 1  # and the view
    assert len(last) == 4 + 1 + 1


def test_running_statistics_of_layers_that_are_not_run_again_drift_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    networks: list[Network] = []

    class Recorded(Network):
        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, **how)
            networks.append(self)

    monkeypatch.setattr("selfadapt.engine.engine.Network", Recorded)
    model = seeded(slim)
    for fast in (True, False):
        method = SelfAdapt(model, mode="official", steps=3, fast=fast, compare=False, lr=0.001)
        method(random_image(32, 40))
    fast_one, plain = networks
    moved = 0
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(fast_one.buffers[name], plain.buffers[name], **CLOSE)
        moved += not torch.equal(plain.buffers[name], buffer)
    assert moved >= 20
    for name, weight in plain.tuned.items():
        torch.testing.assert_close(fast_one.tuned[name], weight, **CLOSE)


@pytest.mark.parametrize("mode", ["paper", "official"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_an_odd_network_adapts_to_the_same(way: Callable[..., Tensor], mode: Any) -> None:
    model = seeded(lambda: Odd(way))
    image = random_image(24, 28)
    settings = {"mode": mode, "steps": 4, **QUICK, "lr": 0.05}
    settings["adapt"] = ["tuned", "tuned2", "tuned_bias", "head"]
    plain = SelfAdapt(model, fast=Fast(reuse=False), **settings)(image)
    before = snapshot(model)
    fast = SelfAdapt(model, fast=True, **settings)(image)
    assert_same(before, snapshot(model))
    assert plain.losses[3] != plain.losses[0]
    assert_equal_results(fast, plain)


def test_explain_is_about_the_latest_image() -> None:
    model = seeded(lambda: Odd(used_before_a_change))
    method = SelfAdapt(model, mode="paper", steps=3, **QUICK)
    method(random_image(24, 28))
    assert "the network changes" in method.explain().optimizations["reuse"]
    model.way = in_place_modules
    method(random_image(24, 28))
    assert method.explain().optimizations["reuse"] == ""


class Tied(nn.Module):
    """A frozen layer and a tuned one have the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.frozen, self.tuned = conv(3, 6), conv(6, 6), conv(6, 6)
        self.frozen.weight = self.tuned.weight
        self.head = nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tuned(self.frozen(self.stem(x)).relu()))


@pytest.mark.parametrize("adapt", [["tuned", "head"], ["frozen", "head"]])
def test_shared_weights_are_tuned_wherever_they_are(adapt: list[str]) -> None:
    model, image = seeded(Tied), random_image(24, 28)
    settings = {"steps": 3, "adapt": adapt, **QUICK}
    results = [SelfAdapt(model, fast=fast, **settings)(image) for fast in (True, False)]
    assert_equal_results(*results)
    assert list(frozen_modules(model, ["frozen.weight"])) == [model.stem, model.head]


# what is reused, to the call


class Counter:
    runs = 0


class Counting(nn.Module):
    """Counts elsewhere: a number on itself would be a state, which is not reused."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    @property
    def runs(self) -> int:
        return self.counter.runs

    def forward(self, x: Any, *others: Any, **named: Any) -> Any:
        self.counter.runs += 1
        return x + 1 if isinstance(x, Tensor) else [part + 1 for part in x]


@pytest.fixture
def net() -> nn.Module:
    return nn.ModuleDict({"counting": Counting(), "tuned": nn.Conv2d(1, 1, 1)})


def test_equal_but_different_inputs_are_not_taken_for_each_other(net: nn.Module) -> None:
    x, other = torch.ones(2), torch.zeros(2)
    reuse = Reuse(net, ["tuned.weight"], [x, other])
    layer = net["counting"]
    with reuse.running():
        assert torch.equal(layer(x), layer(x))
        assert layer.runs == 1
        assert torch.equal(layer(other), torch.ones(2))
        layer(x, 1), layer(x, 1.0), layer(x, True), layer(x, slice(1)), layer(x, (1, None, None))
        layer(x, name=1), layer([x]), layer([x, other]), layer([other, x])
        assert layer.runs == 11
        layer(x, True), layer(x, slice(1)), layer([other, x])
        assert layer.runs == 11
        layer(torch.ones(2)), layer(x, torch.ones(2))
        assert layer.runs == 13
    layer(x)
    assert layer.runs == 14
    assert "forward" not in layer.__dict__


def test_a_list_that_was_returned_may_be_changed(net: nn.Module) -> None:
    x = torch.ones(2)
    with Reuse(net, ["tuned.weight"], [x]).running():
        for _ in range(3):
            returned = net["counting"]([x, x])
            assert len(returned) == 2
            returned.clear()
    assert net["counting"].runs == 1


def test_a_list_that_a_layer_empties_is_emptied_each_time() -> None:
    class Popping(Counting):
        def forward(self, x: Any, *others: Any, **named: Any) -> Any:
            return x.pop() * 2

    net = nn.ModuleDict({"popping": Popping(), "tuned": nn.Conv2d(1, 1, 1)})
    x = torch.ones(2)
    with Reuse(net, ["tuned.weight"], [x]).running():
        for _ in range(3):
            given = [x, x]
            net["popping"](given)
            assert len(given) == 1


def test_functions_of_constants_are_run_once() -> None:
    x, w = torch.ones(2), torch.ones(2, requires_grad=True)
    reuse = Reuse(nn.ModuleList(), [], [x])
    with reuse.running():
        y = x.exp().relu_()
        assert x.exp().relu_() is y
        assert y[:1] is y[:1]
        assert (x * w) is not (x * w)
        assert x.tolist() == [1, 1]
    assert reuse.usable


def test_a_size_that_was_asked_for_is_no_use_of_a_tensor() -> None:
    x = torch.ones(2, 3)
    reuse = Reuse(nn.ModuleList(), [], [x])
    with reuse.running():
        for _ in range(2):
            y = x.exp()
            assert (y.size(), y.dim(), y.shape, y.numel()) == ((2, 3), 2, (2, 3), 6)
            y.relu_()
    assert reuse.usable


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y, w: y.add_(w),
        lambda x, y, w: x.add_(1),
        lambda x, y, w: x.view(-1).add_(1),
        lambda x, y, w: (y + w, y.relu_()),
        lambda x, y, w: y.data.add_(1),
        lambda x, y, w: setattr(y, "data", torch.ones(2)),
    ],
)
def test_nothing_is_reused_once_constants_change(change: Callable[..., Any]) -> None:
    x, w = torch.ones(2), torch.ones(2, requires_grad=True)
    reuse = Reuse(nn.ModuleList(), [], [x])
    with reuse.running():
        change(x, x.exp(), w)
    assert not reuse.usable
    with reuse.running():
        assert x.exp() is not x.exp()


def test_frozen_modules_are_the_largest_without_a_tuned_weight() -> None:
    model = nn.Sequential(
        nn.Sequential(conv(3, 3), nn.BatchNorm2d(3)),
        nn.ModuleList([conv(3, 3), conv(3, 3)]),
        nn.Sequential(conv(3, 3), conv(3, 3)),
    )
    found = list(frozen_modules(model, ["2.0.weight"]))
    assert found == [model[0], model[1][0], model[1][1], model[2][1]]
    assert list(frozen_modules(TinyNet(), [])) != []


def test_an_error_in_a_frozen_layer_leaves_no_trace(tiny: nn.Module) -> None:
    method = SelfAdapt(tiny, mode="paper", steps=2, views=[selfadapt.View(0.5)], compare=False)
    image = random_image()
    expected = method(image)
    runs = 0

    def fail(*_: Any) -> None:
        nonlocal runs
        runs += 1
        if runs == 2:
            raise RuntimeError("in the middle")

    handle = tiny.stem.register_forward_hook(fail)
    before = snapshot(tiny)
    with pytest.raises(RuntimeError, match="in the middle"):
        method(image)
    assert_same(before, snapshot(tiny))
    handle.remove()
    assert torch.equal(method(image).probs, expected.probs)


class Sideways(TinyNet):
    """Passes features on by a list, which a part that is not run again would not fill."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []
        self.encoder = Appending(self.features)

    def forward(self, x: Tensor) -> Any:
        self.encoder(x)
        return super().forward(x) + 0 * self.features.pop().mean()


class Appending(nn.Module):
    def __init__(self, features: list[Tensor]) -> None:
        super().__init__()
        self.layer, self.features = nn.Conv2d(3, 2, 1), features

    def forward(self, x: Tensor) -> Tensor:
        self.features.append(self.layer(x))
        return x * 1


def test_features_that_are_passed_on_sideways_are_there_in_every_step() -> None:
    model, image = seeded(Sideways), random_image()
    expected = SelfAdapt(model, mode="paper", steps=3, fast=Fast(reuse=False), adapt=["head"])(
        image
    )
    method = SelfAdapt(model, mode="paper", steps=3, adapt=["head"])
    for _ in range(2):
        assert torch.equal(method(image).probs, expected.probs)
    assert not any("optimizations" in note for note in method.notes)


def test_whoever_looks_on_sees_every_run() -> None:
    model, image = seeded(TinyNet), random_image()
    method = SelfAdapt(model, mode="paper", steps=4, scales=(0.5,), compare=False, adapt=["head"])
    runs: list[int] = []
    model.stem.register_forward_hook(lambda *_: runs.append(1))
    method(image)
    assert len(runs) == 2 + 4 + 1
