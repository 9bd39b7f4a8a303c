"""Networks that do what one would rather they did not, some of it common."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class Odd(nn.Module):
    """Two frozen layers, two tuned ones and a tuned head, and some way through them."""

    def __init__(self, way: Callable[["Odd", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.second = conv(3, 6), nn.BatchNorm2d(6), conv(6, 6)
        self.act = nn.ReLU(inplace=True)
        self.parts = Parts()
        self.state = State()
        self.tuned = nn.Sequential(conv(3, 6), nn.BatchNorm2d(6))
        self.tuned2 = conv(6, 6)
        self.tuned_bias = nn.Parameter(torch.zeros(1, 6, 1, 1))
        self.head = nn.Conv2d(6, 4, 1)
        self.register_buffer("count", torch.zeros(()))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.way(self, x))


class Parts(nn.Module):
    """Returns its results in many forms."""

    def forward(self, x: Tensor, form: str, scale: Tensor | None = None) -> Any:
        x = x if scale is None else x * scale
        if form == "list":
            return [x, x + 1, x * 2]
        if form == "dict":
            return {"a": x, "b": x + 1}
        if form == "dataclass":
            return Pair(x, x + 1)
        if form == "view":
            return x.view(x.shape[0], 2, -1, *x.shape[2:])
        return x * self.kept if form == "kept" else x


class State(nn.Module):
    """Counts how often it is run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x * (1 + 0.1 * self.runs)


@dataclass
class Pair:
    a: Tensor
    b: Tensor


def in_place_modules(net: Odd, x: Tensor) -> Tensor:
    return net.tuned2(net.act(net.second(net.act(net.norm(net.first(x))))))


def in_place_functions(net: Odd, x: Tensor) -> Tensor:
    y = F.relu(net.norm(net.first(x)), inplace=True)
    z = net.second(y).add_(1)
    z += y
    return net.tuned2(z.relu_().mul_(0.5))


def frozen_added_to_tuned(net: Odd, x: Tensor) -> Tensor:
    y = net.tuned(x)
    y += net.second(net.first(x))
    return y.relu_()


def tuned_added_to_frozen(net: Odd, x: Tensor) -> Tensor:
    y = net.second(net.first(x))
    y += net.tuned(x)
    return F.relu(y, inplace=True)


def tuned_added_to_a_view_of_frozen(net: Odd, x: Tensor) -> Tensor:
    y = net.first(x)
    y[:, :3] += net.tuned(x)[:, 3:]
    return y


def tuned_put_into_frozen(net: Odd, x: Tensor) -> Tensor:
    y = net.first(x)
    y[:, 1:4] = net.tuned(x)[:, :3]
    return y


def tuned_added_into_a_list(net: Odd, x: Tensor) -> Tensor:
    ys = [net.first(x), net.second(net.first(x))]
    torch._foreach_add_(ys, [net.tuned(x)] * 2)
    return ys[0] - ys[1]


def tuned_written_out(net: Odd, x: Tensor) -> Tensor:
    y = net.first(x)
    with torch.no_grad():
        torch.add(y, net.tuned(x), out=y)
    return net.tuned2(y)


def used_twice(net: Odd, x: Tensor) -> Tensor:
    y = net.first(x)
    z = net.second(net.norm(y))
    return net.second(net.norm(z)) + net.second(net.tuned(x)) - net.tuned2(net.second(y))


def used_before_a_change(net: Odd, x: Tensor) -> Tensor:
    y = net.first(x)
    moved = y + net.tuned_bias  # keeps nothing of y
    net.act(y)
    return moved - net.tuned2(y)


def used_before_and_after_a_change(net: Odd, x: Tensor) -> Tensor:
    y = net.first(x)
    a = net.second(y)
    y.mul_(-0.5)
    return net.tuned2(a - net.second(y))


def used_second_before_a_change(net: Odd, x: Tensor) -> Tensor:
    y = net.first(x)
    moved = net.tuned_bias + y
    y.relu_()
    return net.tuned2(y) - moved


def changed_behind_its_back(net: Odd, x: Tensor) -> Tensor:
    y = net.first(x)
    y.data.mul_(0.5)
    return net.tuned2(y)


def changed_through_a_view(net: Odd, x: Tensor) -> Tensor:
    y = net.first(x)
    y.view(-1).relu_()
    y.flatten(2)[..., :7].mul_(2)
    return net.tuned2(y)


def changes_its_input(net: Odd, x: Tensor) -> Tensor:
    x -= 0.3
    x.mul_(1.1)
    return net.tuned2(net.first(x))


def changes_its_input_by_tuned_weights(net: Odd, x: Tensor) -> Tensor:
    x += net.tuned_bias[:, :3]
    return net.tuned2(net.first(x))


def changes_its_input_transposed(net: Odd, x: Tensor) -> Tensor:
    x.mT.mul_(0.5)
    return net.tuned2(net.first(x))


def changes_a_buffer(net: Odd, x: Tensor) -> Tensor:
    net.count += 1
    return net.tuned2(net.first(x) * net.count)


def changes_a_buffer_in_a_frozen_module(net: Odd, x: Tensor) -> Tensor:
    return net.tuned2(net.state(net.first(x)))


def list_outputs(net: Odd, x: Tensor) -> Tensor:
    outputs = net.parts(net.first(x), "list")
    last = outputs.pop()
    outputs[0] = net.tuned2(outputs[0])
    outputs.append(last)
    return sum(outputs) * len(outputs)


def dict_outputs(net: Odd, x: Tensor) -> Tensor:
    outputs = net.parts(net.first(x), form="dict")
    outputs["a"] = net.tuned2(outputs["a"])
    outputs.setdefault("c", outputs["a"])
    return outputs["a"] + outputs.pop("b") + outputs["c"]


def dataclass_outputs(net: Odd, x: Tensor) -> Tensor:
    pair = net.parts(net.first(x), "dataclass")
    pair.a = net.tuned2(pair.a)
    return pair.a + pair.b


def keyword_tensors(net: Odd, x: Tensor) -> Tensor:
    y = net.first(x)
    scale = net.tuned(x)
    a = net.parts(y, "plain", scale=y.mean())
    b = net.parts(y, form="plain", scale=scale)
    return net.tuned2(a) + b + net.parts(x=y, form="plain")


def views_of_frozen(net: Odd, x: Tensor) -> Tensor:
    view = net.parts(net.first(x), "view")
    flat = view.flatten(1, 2)
    return net.tuned2(net.act(flat))


def attention(net: Odd, x: Tensor) -> Tensor:
    y = F.adaptive_avg_pool2d(net.first(x), (4, 5))
    tokens = y.flatten(2).transpose(1, 2)
    left, right = tokens.split(3, dim=-1)
    mixed = F.scaled_dot_product_attention(left[None], right[None], tokens[None])[0]
    weights = torch.einsum("bnc,bmc->bnm", left, right).softmax(dim=-1)
    mixed = (mixed + weights @ tokens)[:, :, [5, 4, 3, 2, 1, 0]]
    mixed = mixed.transpose(1, 2).reshape(y.shape).clamp(-3, 3)
    return net.tuned2(F.interpolate(mixed, x.shape[-2:], mode="bilinear"))


def checkpointed(net: Odd, x: Tensor) -> Tensor:
    y = checkpoint(net.first, x, use_reentrant=False)
    y = checkpoint(lambda y: net.tuned2(net.act(net.second(y))), y, use_reentrant=False)
    return checkpoint(net.second, y, use_reentrant=False)


def reads_its_signature(net: Odd, x: Tensor) -> Tensor:
    scale = 1.0 if "form" in signature(net.parts.forward).parameters else 2.0
    return net.tuned2(net.first(x) * scale)


def keeps_features(net: Odd, x: Tensor) -> Tensor:
    net.parts.kept = net.tuned(x)
    return net.tuned2(net.parts(net.first(x), "kept"))


WAYS = [
    in_place_modules, in_place_functions, frozen_added_to_tuned, tuned_added_to_frozen,
    tuned_added_to_a_view_of_frozen, tuned_put_into_frozen, tuned_added_into_a_list,
    tuned_written_out, used_twice, used_before_a_change, used_before_and_after_a_change,
    used_second_before_a_change, changed_behind_its_back, changed_through_a_view,
    changes_its_input, changes_its_input_by_tuned_weights, changes_its_input_transposed,
    changes_a_buffer, changes_a_buffer_in_a_frozen_module, list_outputs, dict_outputs,
    dataclass_outputs, keyword_tensors, views_of_frozen, attention, checkpointed,
    reads_its_signature, keeps_features,
]  # fmt: skip
