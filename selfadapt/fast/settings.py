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
    """Arithmetic of the network: bf16 with float32 weights, statistics, upsampling and loss, where
    the card has it (auto) or in any case (bf16); or as the network is (fp32)."""
    channels_last: bool = True
    """Keep the channels of a pixel together in memory."""
    kernels: bool = True
    """Normalise, add and take ReLU in one pass; take losses of scores before they are upsampled."""
    graphs: bool = True
    """Record what an image takes, and replay it for the next of the same size."""

    def __post_init__(self) -> None:
        if self.precision not in ("auto", "fp32", "bf16"):
            raise ValueError(f"precision must be auto, fp32 or bf16, got {self.precision!r}")

    def half(self, device: torch.device) -> torch.dtype | None:
        """Return the kind of numbers the network computes with on a device, if not its own."""
        if self.precision == "fp32" or device.type != "cuda":
            return torch.bfloat16 if self.precision == "bf16" else None
        modern = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if modern or self.precision == "bf16" else None

    def keeps_channels_last(self, device: torch.device) -> bool:
        """Say whether features lie pixel by pixel in memory."""
        return self.channels_last and device.type == "cuda"

    def fuses(self, device: torch.device) -> bool:
        """Say whether operations are joined."""
        return self.kernels and self.keeps_channels_last(device) and _has_kernels(device)


PLAIN = Fast(reuse=False, precision="fp32", channels_last=False, kernels=False, graphs=False)
"""No shortcut."""


@cache
def _has_kernels(device: torch.device) -> bool:
    found = find_spec("triton") is not None
    return found and torch.cuda.get_device_capability(device) >= (8, 0)
