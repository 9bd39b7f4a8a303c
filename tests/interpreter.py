"""Triton's kernels on the CPU, one line at a time, in place of those on a GPU.

Triton decides when it is imported: the environment must say TRITON_INTERPRET=1 by then.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from selfadapt.engine import Fast
from selfadapt.engine.kernels import launch
from selfadapt.engine.kernels import triton_kernels as kernels
from selfadapt.engine.settings import Plan

_patch = interpreter._patch_lang_tensor


def _patch_with_index(tensor: Any, scope: Any) -> None:
    """Make whole numbers of one element usable as such, which newer NumPy refuses."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_index

KERNELS = ("moments", "combine", "apply", "gradient_sums", "gradient_apply", "cell_losses")


class Counted:
    """A kernel that counts how often it is started."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.starts = kernel, 0

    def __getitem__(self, grid: Any) -> Any:
        self.starts += 1
        return self.kernel[grid]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counted]:
    """Let the kernels take what lies on the CPU; return how often they are started."""

    def takes_features(x: Tensor) -> bool:
        return x.dtype == torch.float32 and launch.channels_are_last(x)

    def takes_scores(scores: Tensor) -> bool:
        return scores.dtype == torch.float32 and scores.dim() == 4 and len(scores) == 1

    monkeypatch.setattr(launch, "takes_features", takes_features)
    monkeypatch.setattr(launch, "takes_scores", takes_scores)
    monkeypatch.setattr(launch, "takes_products", lambda x: True)
    real = Fast.plan

    def plan(self: Fast, device: torch.device, **reasons: str) -> Plan:
        plan = real(self, device, **reasons)
        running = {name for name in ("kernels", "channels_last") if getattr(self, name)}
        reasons = {name: why for name, why in plan.reasons.items() if name not in running}
        return replace(plan, reasons=reasons)

    monkeypatch.setattr(Fast, "plan", plan)
    counted = {name: Counted(getattr(kernels, name)) for name in KERNELS}
    for name, kernel in counted.items():
        monkeypatch.setattr(kernels, name, kernel)
    return counted
