"""Whole methods with the kernels, run by test_fast_kernels.py in Triton's interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import TinyNet, assert_same, random_image, seeded, snapshot
from interpreter import Counted, as_on_a_gpu  # noqa: F401
from selfadapt import create_method
from selfadapt.engine import Fast


class Block(nn.Module):
    """A network with shortcuts, in-place ReLU and a tuned part."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
        self.norm1, self.norm2, self.norm3 = (nn.BatchNorm2d(4) for _ in range(3))
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(4, 4, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm1(self.stem(x)))
        y = self.relu(self.norm2(self.conv1(x)))
        y = self.norm3(self.conv2(y))
        y += x
        return self.head(self.relu(y))


@pytest.mark.parametrize(
    ("method", "mode"),
    [
        ("self-adapt", "auto"),
        ("self-adapt", "paper"),
        ("self-adapt", "official"),
        ("tent", "official"),
        ("entropy", "paper"),
        ("tta", "paper"),
    ],
)
@pytest.mark.parametrize("build", [TinyNet, Block])
def test_a_method_gives_the_same(
    build: type[nn.Module],
    method: str,
    mode: Any,
    as_on_a_gpu: dict[str, Counted],  # noqa: F811
) -> None:
    model, image = seeded(build), random_image(14, 18)
    settings: dict[str, Any] = {"mode": mode}
    if method in ("self-adapt", "tent", "entropy"):
        settings |= {"steps": 2, "lr": 0.01}
    if method in ("self-adapt", "tta"):
        settings |= {"scales": (0.5,), "alpha": 0.5}
    if method in ("self-adapt", "entropy"):
        settings["adapt"] = ["norm2", "conv2", "norm3", "body", "head"]
        settings["adapt"] = [n for n in settings["adapt"] if n in dict(model.named_children())]
    plain = create_method(method, model, fast=False, **settings)(image)
    assert not any(kernel.starts for kernel in as_on_a_gpu.values())
    before = snapshot(model)
    fast = create_method(method, model, fast=Fast(graphs=False), **settings)(image)
    assert_same(before, snapshot(model))
    assert as_on_a_gpu["apply"].starts > 0
    num_losses = {"auto": 4, "paper": 2, "official": 2}[mode] if method == "self-adapt" else 0
    assert as_on_a_gpu["cell_losses"].starts == num_losses
    assert (as_on_a_gpu["gradient_sums"].starts > 0) == ("steps" in settings)
    assert fast.losses == pytest.approx(plain.losses, abs=1e-5)
    for name in ("probs", "source_probs", "fused_probs"):
        if getattr(plain, name) is not None:
            torch.testing.assert_close(getattr(fast, name), getattr(plain, name), rtol=0, atol=1e-5)
