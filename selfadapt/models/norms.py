"""Normalisations a network can be built with before training, instead of BatchNorm (Table 6).

Both mix several normalisations with weights that are learned on the source domain and then fixed,
where SaN mixes statistics at inference. Their other weights have BatchNorm's names, so that a
checkpoint of the BatchNorm network, ImageNet's above all, loads into them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class _Norm(_NormBase):
    """What BatchNorm keeps: scale, shift and running statistics, under its names."""

    weight: nn.Parameter
    bias: nn.Parameter
    running_mean: Tensor
    running_var: Tensor
    momentum: float

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(num_features, eps, momentum)


class BatchInstanceNorm2d(_Norm):
    """Batch-Instance Normalization (Nam and Kim, 2018): between batch and instance normalisation.

        y = (rho * x_batch + (1 - rho) * x_instance) * weight + bias

    ``rho``, one for each channel, is learned in [0, 1] and starts at 1, which is BatchNorm.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(num_features, eps, momentum)
        self.rho = nn.Parameter(torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``(B, C, H, W)``."""
        if self.training:
            with torch.no_grad():  # what an optimiser's step has moved out of [0, 1] comes back
                self.rho.clamp_(0, 1)
        batch = F.batch_norm(
            x, self.running_mean, self.running_var, None, None, self.training,
            self.momentum, self.eps,
        )  # fmt: skip
        var, mean = torch.var_mean(x, dim=(2, 3), correction=0, keepdim=True)
        instance = (x - mean) * torch.rsqrt(var + self.eps)
        rho = self.rho if self.training else self.rho.clamp(0, 1)
        rho, weight, bias = (value[:, None, None] for value in (rho, self.weight, self.bias))
        return (rho * batch + (1 - rho) * instance) * weight + bias


class SwitchableNorm2d(_Norm):
    """Switchable Normalization (Luo et al., 2019): a learned mean of three kinds of statistics.

    Mean and variance are those of the instance, the layer and the batch, mixed by the softmax of
    ``mean_weight`` and ``var_weight``. At inference the batch's are the running ones.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(num_features, eps, momentum)
        self.mean_weight = nn.Parameter(torch.ones(3))
        self.var_weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``(B, C, H, W)``."""
        var_in, mean_in = torch.var_mean(x, dim=(2, 3), correction=0, keepdim=True)
        mean_ln, var_ln = _pooled(mean_in, var_in, dim=1)
        if self.training:
            mean_bn, var_bn = _pooled(mean_in, var_in, dim=0)
            with torch.no_grad():
                self.running_mean.lerp_(mean_bn.flatten(), self.momentum)
                self.running_var.lerp_(var_bn.flatten(), self.momentum)
        else:
            mean_bn, var_bn = (
                value[:, None, None] for value in (self.running_mean, self.running_var)
            )
        mean = _mixed(self.mean_weight, mean_in, mean_ln, mean_bn)
        var = _mixed(self.var_weight, var_in, var_ln, var_bn)
        x = (x - mean) * torch.rsqrt(var + self.eps)
        return x * self.weight[:, None, None] + self.bias[:, None, None]


def _pooled(mean: Tensor, var: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return mean and variance over ``dim`` as well, from those of equally large parts."""
    pooled = mean.mean(dim, keepdim=True)
    return pooled, (var + mean**2).mean(dim, keepdim=True) - pooled**2


def _mixed(weight: Tensor, *values: Tensor) -> Tensor:
    shares = weight.softmax(dim=0)
    return shares[0] * values[0] + shares[1] * values[1] + shares[2] * values[2]


NORMS = {"bn": nn.BatchNorm2d, "bin": BatchInstanceNorm2d, "sn": SwitchableNorm2d}
"""Name -> layer."""

MIXING = ("rho", "mean_weight", "var_weight")
"""Weights that a checkpoint of the BatchNorm network does not have."""


def replace_batchnorm(model: nn.Module, norm: str) -> None:
    """Put another normalisation in the place of every BatchNorm2d layer of ``model``.

    Scale, shift and running statistics stay the very tensors they were.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        >>> replace_batchnorm(model, "sn")
        >>> type(model[1]).__name__
        'SwitchableNorm2d'
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.BatchNorm2d and norm != "bn":
                layer = NORMS[norm](child.num_features, child.eps, child.momentum)
                for kind in ("weight", "bias", "running_mean", "running_var"):
                    setattr(layer, kind, getattr(child, kind))
                setattr(module, name, layer)
