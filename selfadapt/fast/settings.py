"""The shortcuts, each with its switch."""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch

Precision = Literal["auto", "fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Fast:
    """Shortcuts to the same result. All but ``reuse`` are for GPUs.

    Example:
        >>> Fast(precision="fp32").half(torch.device("cuda")) is None
        True
    """

    reuse: bool = True
    """Run frozen layers once for all steps."""
    precision: Precision = "auto"
    """Numbers the network computes with: 16 bits, but for weights that are tuned, statistics,
    scores, upsampling and loss. ``auto``: where a card is made for it, fp16 to predict, for its
    finer steps, bf16 to adapt, for its range, and bf16 for both where fp16 overflows; ``bf16``;
    ``fp32``: the network's own."""
    channels_last: bool = True
    """Keep the channels of a pixel together in memory."""
    kernels: bool = True
    """Normalise, add and take ReLU in one pass; take losses of scores before they are upsampled.
    Needs ``channels_last``."""
    batches: bool = True
    """Run views of one size through the network together."""
    graphs: bool = True
    """Record what an image takes, and replay it for the next of the same size."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "precision" and not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        if self.precision not in ("auto", "fp32", "bf16"):
            raise ValueError(f"precision must be auto, fp32 or bf16, got {self.precision!r}")

    def half(self, device: torch.device, *, steps: bool = False) -> torch.dtype | None:
        """Return what the network computes with on a device, to predict or in steps; None: its own.

        Example:
            >>> Fast(precision="bf16").half(torch.device("cpu"))
            torch.bfloat16
        """
        if self.precision == "auto":
            if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
                return None
            return torch.bfloat16 if steps else torch.float16
        return torch.bfloat16 if self.precision == "bf16" else None

    def keeps_channels_last(self, device: torch.device) -> bool:
        """Say whether features lie pixel by pixel in memory."""
        return self.channels_last and device.type == "cuda"

    def fuses(self, device: torch.device) -> bool:
        """Say whether operations are joined."""
        return self.kernels and self.keeps_channels_last(device) and has_kernels(device)


PLAIN = Fast(
    reuse=False, precision="fp32", channels_last=False, kernels=False, batches=False, graphs=False
)
"""No shortcut."""


@cache
def has_kernels(device: torch.device) -> bool:
    """Say whether a GPU can run the kernels."""
    found = find_spec("triton") is not None
    return found and torch.cuda.get_device_capability(device) >= (8, 0)
