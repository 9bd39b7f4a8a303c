import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import selfadapt
from selfadapt.models.detect import IMAGENET_MEAN, IMAGENET_STD

torch.set_num_threads(1)

collect_ignore_glob = []
if os.environ.get("TRITON_INTERPRET") != "1":  # see test_fast_kernels.py
    collect_ignore_glob += ["interpret*.py"]

SLOW_MODULES = {
    "app_browser", "app_photographs", "app_security", "bench", "contract", "demo", "docs",
    "export", "fast_kernels", "fast_reuse", "graphs", "guards", "install", "journal", "models",
    "parity", "photographs", "predict_run", "predict_video", "protocol", "readme", "report",
    "resume", "shipped", "train", "weights", "zoo",
}  # fmt: skip
"""Names of test modules that start processes, serve pages or run large networks."""
DATA = Path(os.environ.get("SELFADAPT_DATA", Path(__file__).resolve().parents[2] / "shared"))


def needs_data(*parts: str) -> Path:
    """Return a path of the measuring data, or skip the test where there is none."""
    path = DATA.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs {'/'.join(parts)} of the measuring data, see SELFADAPT_DATA")
    return path


class TinyNet(nn.Module):
    """Two convolutions with BatchNorm and a classifier at half the size of the image."""

    interface = selfadapt.Interface(mean=IMAGENET_MEAN, std=IMAGENET_STD)

    def __init__(
        self, classes: int = 3, channels: int = 3, form: Callable[[Tensor], Any] = lambda y: y
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 6, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(6)
        self.body = nn.Conv2d(6, 8, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(8, eps=1e-3)
        self.head = nn.Conv2d(8, classes, 1)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        x = self.norm1(self.stem(x)).relu()
        x = self.norm2(self.body(x)).relu()
        return self.form(self.head(x))


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a network with weights and statistics that look trained: none is trivial."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build()
        for name, value in model.named_buffers():
            if name.endswith("running_mean"):
                value.normal_(0, 0.2)
            elif name.endswith("running_var"):
                value.uniform_(0.5, 1.5)
        for name, value in model.named_parameters():
            if name.endswith("bias"):
                value.data.add_(torch.randn_like(value), alpha=0.1)
    return model.eval()


def random_image(height: int = 32, width: int = 48, channels: int = 3, seed: int = 0) -> Tensor:
    """Return smooth noise in [0, 1] of 8-bit values, as a photograph would give."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand((1, channels, height // 8 + 2, width // 8 + 2), generator=generator)
    smooth = nn.functional.interpolate(coarse, (height, width), mode="bicubic")[0].clamp(0, 1)
    return (smooth * 255).round() / 255


@pytest.fixture
def tiny() -> nn.Module:
    return seeded(TinyNet)


@pytest.fixture
def image() -> Tensor:
    return random_image()


def snapshot(model: nn.Module, *, copy: bool = True) -> dict[str, Any]:
    """Take down everything about a model that a method must leave as it was.

    To compare the model with an earlier snapshot at once, its values need not be copied.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "values": {n: v.detach().clone() if copy else v.detach() for n, v in tensors.items()},
        "storage": {name: (id(value), value.data_ptr()) for name, value in tensors.items()},
        "requires_grad": {name: value.requires_grad for name, value in tensors.items()},
        "grads": {
            name: None if value.grad is None else (id(value.grad), value.grad.clone())
            for name, value in model.named_parameters()
        },
        "modules": {
            name: (type(module), module.training, *(dict(hooks) for hooks in _hooks(module)))
            for name, module in model.named_modules()
        },
        "attributes": {
            name: {key: id(value) for key, value in module.__dict__.items() if key != "training"}
            for name, module in model.named_modules()
        },
        "keys": list(model.state_dict()),
    }


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
        module._state_dict_hooks,
    )


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Compare two snapshots bit by bit."""
    for name, value in before["values"].items():
        assert torch.equal(value, after["values"][name]), f"{name} changed"
    for name, grad in before["grads"].items():
        if grad is None:
            assert after["grads"][name] is None, f"{name} has a gradient now"
        else:
            assert after["grads"][name][0] == grad[0], f"{name} has another gradient now"
            assert torch.equal(after["grads"][name][1], grad[1]), f"the gradient of {name} changed"
    for part in ("storage", "requires_grad", "modules", "attributes", "keys"):
        assert before[part] == after[part], f"{part} changed"


def pytest_collection_finish() -> None:
    """Leave what the imports made out of garbage collections, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of slow modules."""
    for item in items:
        if item.path.stem.removeprefix("test_") in SLOW_MODULES:
            item.add_marker(pytest.mark.slow)
