"""Triton's kernels on the CPU, one line at a time, in place of those on a GPU.

Triton decides when it is imported: the environment must say TRITON_INTERPRET=1 by then.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from selfadapt.fast import Fast, kernels, launch

_patch = interpreter._patch_lang_tensor


def _patch_with_index(tensor: Any, scope: Any) -> None:
    """Make whole numbers of one element usable as such, which newer NumPy refuses."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_index

KERNELS = ("moments", "settle", "apply", "gradient_sums", "gradient_apply", "cell_losses")


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
    monkeypatch.setattr(Fast, "fuses", lambda self, device: self.kernels)
    monkeypatch.setattr(Fast, "keeps_channels_last", lambda self, device: self.channels_last)
    counted = {name: Counted(getattr(kernels, name)) for name in KERNELS}
    for name, kernel in counted.items():
        monkeypatch.setattr(kernels, name, kernel)
    return counted
