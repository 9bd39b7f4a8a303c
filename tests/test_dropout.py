from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selfadapt
from conftest import assert_same, seeded, snapshot
from selfadapt.dropout import DropoutAfterReLU, dropout_layers
from selfadapt.dropout import seeded as dice

CPU = torch.device("cpu")


class ReLUNet(nn.Module):
    """Three ReLU layers, one of them inside a block and one in place, and one function."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.body = nn.Conv2d(6, 6, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Conv2d(6, 6, 1)
        self.act = nn.ReLU()
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.body(self.stem(x)))
        return self.head(F.relu(self.act(self.last(x)) - 0.1))


class Shared(nn.Module):
    """One ReLU layer, used twice, in forms that differ."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        self.act = nn.ReLU()
        if form == "two names":
            self.again = self.act
        if form == "two parents":
            self.block = nn.Sequential(self.act)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        second = {"one name": "act", "two names": "again", "two parents": "block"}[self.form]
        return getattr(self, second)(self.conv2(self.act(self.conv1(x))))


FORMS = ("one name", "two names", "two parents")


@pytest.fixture
def net() -> nn.Module:
    return seeded(ReLUNet)


@pytest.fixture
def x() -> Tensor:
    return torch.randn((1, 3, 16, 20), generator=torch.Generator().manual_seed(0))


def dropped(x: Tensor, rate: float) -> Tensor:
    return x * torch.empty_like(x).bernoulli_(1 - rate) / (1 - rate)


# add_dropout


def test_every_relu_layer_is_followed_by_dropout(net: nn.Module, x: Tensor) -> None:
    assert selfadapt.add_dropout(net, 0.3) == 3
    net.train()
    net.stem[1].eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        result = net(x)
        torch.manual_seed(3)
        y = dropped(net.stem[1](net.stem[0](x)).clamp(min=0), 0.3)
        y = dropped(net.body(y).clamp(min=0), 0.3)
        y = dropped(net.last(y).clamp(min=0), 0.3)
        expected = net.head((y - 0.1).clamp(min=0))
    torch.testing.assert_close(result, expected)


def test_in_evaluation_the_network_gives_what_it_gave(net: nn.Module, x: Tensor) -> None:
    expected = net(x)
    selfadapt.add_dropout(net, 0.5)
    assert torch.equal(net.eval()(x), expected)


@pytest.mark.parametrize("training", [False, True])
def test_the_new_layers_are_in_the_mode_of_the_network(net: nn.Module, training: bool) -> None:
    net.train(training)
    selfadapt.add_dropout(net, 0.5)
    assert {module.training for module in net.modules()} == {training}


def test_a_network_in_evaluation_gives_what_it_gave_at_once(net: nn.Module, x: Tensor) -> None:
    expected = net(x)
    selfadapt.add_dropout(net, 0.5)
    assert torch.equal(net(x), expected)


def test_no_name_in_the_state_dict_changes(net: nn.Module, x: Tensor) -> None:
    names = list(net.state_dict())
    tensors = {name: value.data_ptr() for name, value in net.state_dict().items()}
    selfadapt.add_dropout(net)
    assert list(net.state_dict()) == names
    assert {name: value.data_ptr() for name, value in net.state_dict().items()} == tensors
    other = seeded(ReLUNet, seed=1)
    net.load_state_dict(other.state_dict())
    assert torch.equal(net.eval()(x), other(x))


def test_called_again_it_changes_the_rate_alone(net: nn.Module) -> None:
    selfadapt.add_dropout(net, 0.1)
    modules = list(net.modules())
    assert selfadapt.add_dropout(net, 0.4) == 3
    assert all(a is b for a, b in zip(net.modules(), modules, strict=True))
    assert [layer.p for layer in dropout_layers(net)] == [0.4] * 3


def test_a_relu_that_came_later_gets_dropout_too(net: nn.Module) -> None:
    selfadapt.add_dropout(net, 0.1)
    net.body = nn.Sequential(net.body, nn.ReLU())
    assert selfadapt.add_dropout(net, 0.2) == 4
    assert [layer.p for layer in dropout_layers(net)] == [0.2] * 4


@pytest.mark.parametrize("form", FORMS)
def test_a_shared_layer_drops_wherever_it_is_used(form: str, x: Tensor) -> None:
    model = seeded(lambda: Shared(form))
    selfadapt.add_dropout(model, 0.3)
    model.train()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        result = model(x)
        torch.manual_seed(3)
        y = dropped(model.conv1(x).clamp(min=0), 0.3)
        expected = dropped(model.conv2(y).clamp(min=0), 0.3)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_shared_layer_counts_once(form: str) -> None:
    model = seeded(lambda: Shared(form))
    assert selfadapt.add_dropout(model, 0.3) == 1
    assert len(dropout_layers(model)) == 1


@pytest.mark.parametrize("form", FORMS)
def test_a_shared_layer_is_the_same_after_a_second_call(form: str) -> None:
    model = seeded(lambda: Shared(form))
    num = selfadapt.add_dropout(model, 0.3)
    modules = list(model.modules())
    assert selfadapt.add_dropout(model, 0.2) == num
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))


def test_dropout_that_was_there_keeps_its_rate(net: nn.Module) -> None:
    net.body = nn.Sequential(net.body, nn.Dropout(0.7))
    assert selfadapt.add_dropout(net, 0.2) == 3
    assert sorted(layer.p for layer in dropout_layers(net)) == [0.2, 0.2, 0.2, 0.7]


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.GELU()),
        lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.SiLU(), nn.LeakyReLU()),
    ],
)
def test_a_network_without_relu_layers_is_refused(build: Callable[[], nn.Module]) -> None:
    model = seeded(build)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"this network has none; does it call F\.relu instead"):
        selfadapt.add_dropout(model)
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("rate", [0, 1, 1.5, -0.1, True, "0.1", None, float("nan")])
def test_a_wrong_rate_is_refused(net: nn.Module, rate: Any) -> None:
    before = snapshot(net)
    with pytest.raises(ValueError, match="dropout rate must lie between 0 and 1, got"):
        selfadapt.add_dropout(net, rate)
    assert_same(before, snapshot(net))


# dropout layers


def test_only_layers_that_drop_something_are_found() -> None:
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
    dropping = [kind(0.1) for kind in kinds]
    model = nn.Sequential(nn.ReLU(), nn.Dropout(0.0), *dropping, nn.Sequential(dropping[0]))
    assert dropout_layers(model) == dropping


# DropoutAfterReLU


RELUS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer": nn.ReLU(),
    "layer in place": nn.ReLU(inplace=True),
    "function": F.relu,
    "function in place": lambda x: F.relu(x, inplace=True),
    "F.relu_": F.relu_,
    "torch.relu": torch.relu,
    "torch.relu_": torch.relu_,
    "method": lambda x: x.relu(),
    "method in place": lambda x: x.relu_(),
}


@pytest.mark.parametrize("form", RELUS)
@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_any_form_of_relu_is_followed_by_dropout(form: str, rate: float, x: Tensor) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected = dropped(x.clamp(min=0), rate)
        torch.manual_seed(3)
        with DropoutAfterReLU(rate) as dropout:
            result = RELUS[form](x.clone())
    torch.testing.assert_close(result, expected)
    assert dropout.num == 1
    assert torch.equal(RELUS[form](x.clone()), x.clamp(min=0))


@pytest.mark.parametrize(
    "function", [torch.sigmoid, F.gelu, F.leaky_relu, F.silu, lambda x: x.clamp(min=0), nn.Tanh()]
)
def test_other_functions_are_left_alone(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    expected = function(x)
    with DropoutAfterReLU(0.5) as dropout:
        assert torch.equal(function(x), expected)
    assert dropout.num == 0


def test_a_whole_network_is_followed_and_not_changed(net: nn.Module, x: Tensor) -> None:
    expected, before = net(x), snapshot(net)
    with DropoutAfterReLU(0.5) as dropout:
        first, second = net(x), net(x)
    assert dropout.num == 8
    assert not torch.equal(first, expected)
    assert not torch.equal(first, second)
    assert torch.equal(net(x), expected)
    assert_same(before, snapshot(net))


def test_dropout_ends_with_an_exception(x: Tensor) -> None:
    with pytest.raises(RuntimeError, match="in the middle"), DropoutAfterReLU(0.5):
        raise RuntimeError("in the middle")
    assert torch.equal(x.relu(), x.clamp(min=0))


# seeded random numbers


def test_the_same_seed_gives_the_same_numbers() -> None:
    drawn = []
    for seed in (0, 1, 0):
        with dice(seed, CPU):
            drawn.append(torch.rand(5))
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(drawn[1], torch.rand(5, generator=generator))


def test_outside_the_numbers_go_on_as_if_none_had_been_drawn() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        expected = torch.rand(4)
        torch.manual_seed(9)
        first = torch.rand(2)
        with dice(0, CPU):
            torch.rand(7)
        with pytest.raises(ValueError, match="dropout probability"), dice(0, CPU):
            F.dropout(torch.rand(7), p=2.0)
        assert torch.equal(torch.cat((first, torch.rand(2))), expected)
