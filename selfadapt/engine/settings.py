"""Which optimizations are on, and which run on a device."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch

Precision = Literal["auto", "fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Fast:
    """Optimizations that leave the result the same, each with its switch.

    ``reuse`` and ``san_batchnorm`` run on any device, the others on GPUs.

    Example:
        >>> Fast(precision="fp32").plan(torch.device("cpu")).running
        ('reuse', 'san_batchnorm')
    """

    reuse: bool = True
    """Run frozen layers once for all steps."""
    san_batchnorm: bool = True
    """Compute SaN by PyTorch's own BatchNorm kernels, which need less memory and fewer passes."""
    precision: Precision = "auto"
    """Numbers the network computes with: 16 bits, but for weights that are tuned, statistics,
    scores, upsampling and loss. ``auto``: on GPUs made for it, fp16 to predict, for its finer
    steps, bf16 to adapt, for its range, and bf16 for both where fp16 overflows; ``bf16``;
    ``fp32``: the network's own."""
    channels_last: bool = True
    """Keep the channels of a pixel together in memory."""
    kernels: bool = True
    """Normalise, add and take ReLU in one pass; take losses of scores before they are upsampled.
    Needs ``channels_last``."""
    batches: bool = True
    """Run views of one size through the network together."""
    graphs: bool = True
    """Record the work for an image in a CUDA graph, and replay it for the next of the same size."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "precision" and not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        if self.precision not in ("auto", "fp32", "bf16"):
            raise ValueError(f"precision must be auto, fp32 or bf16, got {self.precision!r}")

    def plan(
        self, device: torch.device, *, reuse: str = "", graphs: str = "", precision: str = ""
    ) -> "Plan":
        """Return what runs on a device.

        Args:
            device: Where the network is.
            reuse: Why the network's layers cannot be reused, if so.
            graphs: Why nothing can be recorded, if so.
            precision: Why the numbers are to stay as they are, if so.
        """
        cuda, off = device.type == "cuda", "switched off"
        gpu_only = "" if cuda else "for GPUs only"
        reasons = {
            "reuse": reuse if self.reuse else off,
            "san_batchnorm": "" if self.san_batchnorm else off,
            "channels_last": gpu_only if self.channels_last else off,
            "batches": gpu_only if self.batches else off,
            "graphs": (gpu_only or graphs) if self.graphs else off,
        }
        if not self.kernels:
            reasons["kernels"] = off
        elif reasons["channels_last"]:
            reasons["kernels"] = gpu_only or "needs channels_last"
        elif not has_kernels(device):
            reasons["kernels"] = "needs Triton and a GPU of compute capability 8 or more"
        predict = adapt = None
        if precision:
            reasons["precision"] = precision
        elif self.precision == "bf16":
            predict = adapt = torch.bfloat16
        elif self.precision == "fp32":
            reasons["precision"] = off
        elif not cuda or torch.cuda.get_device_capability(device) < (8, 0):
            reasons["precision"] = gpu_only or "needs compute capability 8.0 for 16-bit"
        else:
            predict, adapt = torch.float16, torch.bfloat16
        return Plan(predict, adapt, {name: why for name, why in reasons.items() if why})


@dataclass(frozen=True)
class Plan:
    """The optimizations that run on a device, and why the others do not."""

    predict: torch.dtype | None = None
    """Dtype of predictions; None: the network's own."""
    adapt: torch.dtype | None = None
    """Dtype of steps; None: the network's own."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why an optimization does not run, by its name in ``Fast``."""

    @property
    def running(self) -> tuple[str, ...]:
        """The names of the optimizations that run."""
        return tuple(name for name in Fast.__dataclass_fields__ if name not in self.reasons)

    def runs(self, name: str) -> bool:
        """Return True if the optimization of this name in ``Fast`` runs."""
        return name not in self.reasons


NO_OPTIMIZATIONS = Fast(
    reuse=False, san_batchnorm=False, precision="fp32", channels_last=False, kernels=False,
    batches=False, graphs=False,
)  # fmt: skip


def as_fast(fast: bool | Fast) -> Fast:
    """Return the settings that ``fast`` stands for: all optimizations, none, or those it names."""
    if isinstance(fast, bool):
        return Fast() if fast else NO_OPTIMIZATIONS
    if not isinstance(fast, Fast):
        raise TypeError(f"fast must be True, False or a Fast object, got {fast!r}")
    return fast


@cache
def has_kernels(device: torch.device) -> bool:
    """Return True if a GPU can run the kernels."""
    has_triton = find_spec("triton") is not None
    return has_triton and torch.cuda.get_device_capability(device) >= (8, 0)
