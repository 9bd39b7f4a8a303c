"""A network as an exportable module, from raw images to labels."""

from collections.abc import Sequence
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfadapt.models.interface import MIN_LOGIT, Interface


class Forward(nn.Module):
    """A network from raw images to class probabilities and labels.

    Unlike ``Interface.logits``, no Python branch depends on the size of the image, so a graph
    traced at one size is valid for all.

    Args:
        model: The network, with SaN.
        interface: Its interface, fully detected.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, interface: Interface) -> None:
        super().__init__()
        self.model, self.interface = model, interface
        self.register_buffer("mean", torch.tensor(interface.mean).reshape(-1, 1, 1))
        self.register_buffer("std", torch.tensor(interface.std).reshape(-1, 1, 1))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities ``(B, classes, H, W)`` and labels ``(B, H, W)``."""
        x = (image - self.mean) / self.std
        x = x.flip(1) if self.interface.bgr else x
        size = height, width = x.shape[-2:]
        if self.interface.size is not None:
            x = F.interpolate(x, self.interface.size, mode="bilinear", antialias=True)
        else:
            size = torch.Size(map(self._padded, size))
            if (self.interface.divisor, self.interface.minimum) != (1, 1):
                x = F.pad(x, (0, size[1] - width, 0, size[0] - height), mode="replicate")
        logits = self.interface.class_logits(self.model(x)).clamp_min(MIN_LOGIT)
        logits = F.interpolate(logits, size, mode="bilinear", align_corners=False)
        probs = logits[..., :height, :width].softmax(dim=1)
        return probs, probs.argmax(dim=1)

    def _padded(self, length: int) -> int:
        """Round a length up to the next one that the network takes."""
        divisor = self.interface.divisor or 1
        quotient = (length + divisor - 1) // divisor  # ONNX rounds negative numbers up
        minimum = ceil((self.interface.minimum or 1) / divisor)
        return divisor * (quotient if minimum == 1 else torch.sym_max(quotient, minimum))


def adaptive_pool(x: Tensor, size: Sequence[int]) -> Tensor:
    """Average ``(B, C, H, W)`` to a size by matrix products; ONNX pooling needs a static size."""
    rows, columns = (_bins(*lengths) for lengths in zip(x.shape[-2:], size, strict=True))
    return rows @ x @ columns.T


def _bins(length: int, num: int) -> Tensor:
    """Return the weights ``(num, length)`` of the pixels in the mean of each bin."""
    pixel, first = torch.arange(length), torch.arange(num)[:, None] * length
    inside = (pixel >= first // num) & (pixel < (first + length + num - 1) // num)
    weights = inside.float()
    return weights / weights.sum(dim=1, keepdim=True)
