"""Normalisation layers to train a network with instead of BatchNorm (Table 6).

Both mix several normalisations with weights that are learned on the source domain and then fixed,
whereas SaN mixes statistics at inference. Their other weights have BatchNorm's names, so that
checkpoints of BatchNorm networks, such as ImageNet weights, can be loaded.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from selfadapt.norm import is_batchnorm


class _Norm(_NormBase):
    """Scale, shift and running statistics, with BatchNorm's names."""

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

    ``rho``, one value per channel, is learned in [0, 1] and starts at 1, which is BatchNorm.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(num_features, eps, momentum)
        self.rho = nn.Parameter(torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``(B, C, H, W)``."""
        batch = F.batch_norm(
            x, self.running_mean, self.running_var, None, None, self.training,
            self.momentum, self.eps,
        )  # fmt: skip
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        var, mean = torch.var_mean(wide, dim=(2, 3), correction=0, keepdim=True)
        instance = (wide - mean) * torch.rsqrt(var + self.eps)
        # Clamp with a straight-through gradient, so that values outside [0, 1] can return.
        rho = self.rho + (self.rho.clamp(0, 1) - self.rho).detach()
        rho, weight, bias = (value[:, None, None] for value in (rho, self.weight, self.bias))
        return ((rho * batch + (1 - rho) * instance) * weight + bias).to(x.dtype)


class SwitchableNorm2d(_Norm):
    """Switchable Normalization (Luo et al., 2019): a learned mean of three kinds of statistics.

    Statistics of instance, layer and batch are averaged with the softmax of ``mean_weight`` and
    ``var_weight``. At inference the running statistics replace those of the batch.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(num_features, eps, momentum)
        self.mean_weight = nn.Parameter(torch.ones(3))
        self.var_weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``(B, C, H, W)``."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        var_in, mean_in = torch.var_mean(wide, dim=(2, 3), correction=0, keepdim=True)
        mean_ln, var_ln = _pooled(mean_in, var_in, dim=1)
        if self.training:
            mean_bn, var_bn = _pooled(mean_in, var_in, dim=0)
            with torch.no_grad():
                self.running_mean.lerp_(mean_bn.flatten().to(self.running_mean), self.momentum)
                self.running_var.lerp_(var_bn.flatten().to(self.running_var), self.momentum)
        else:
            mean_bn, var_bn = (
                value[:, None, None] for value in (self.running_mean, self.running_var)
            )
        mean = _mixed(self.mean_weight, mean_in, mean_ln, mean_bn)
        var = _mixed(self.var_weight, var_in, var_ln, var_bn)
        y = (wide - mean) * torch.rsqrt(var + self.eps)
        return (y * self.weight[:, None, None] + self.bias[:, None, None]).to(x.dtype)


def _pooled(mean: Tensor, var: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return mean and variance pooled over ``dim`` from those of equally large parts."""
    var_of_means, pooled = torch.var_mean(mean, dim=dim, correction=0, keepdim=True)
    return pooled, var.mean(dim, keepdim=True) + var_of_means


def _mixed(weight: Tensor, *values: Tensor) -> Tensor:
    shares = weight.softmax(dim=0)
    return shares[0] * values[0] + shares[1] * values[1] + shares[2] * values[2]


NORMS = {"bn": nn.BatchNorm2d, "bin": BatchInstanceNorm2d, "sn": SwitchableNorm2d}
"""Name -> layer."""

MIXING_WEIGHTS = ("rho", "mean_weight", "var_weight")
"""Weights that a checkpoint of the BatchNorm network does not have."""


def replace_batchnorm(model: nn.Module, norm: str) -> None:
    """Replace every BatchNorm layer of ``model`` by another normalisation.

    Scale, shift and running statistics are shared with the replaced layers.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        >>> replace_batchnorm(model, "sn")
        >>> type(model[1]).__name__
        'SwitchableNorm2d'
    """
    if norm == "bn":
        return
    layers = {module: name for name, module in model.named_modules() if is_batchnorm(module)}
    if not layers:
        raise ValueError(f"norm={norm!r} replaces BatchNorm, and this network has none")
    for layer, name in layers.items():
        if type(layer) is not nn.BatchNorm2d or not (layer.affine and layer.track_running_stats):
            raise ValueError(
                f"norm={norm!r} replaces plain BatchNorm2d layers with scale, shift and running "
                f"statistics, but {name!r} is {layer!r}"
            )
    replacements: dict[nn.Module, nn.Module] = {}
    for layer in cast(list[nn.BatchNorm2d], list(layers)):
        new = NORMS[norm](layer.num_features, layer.eps, layer.momentum or 0.1)
        for kind in ("weight", "bias", "running_mean", "running_var"):
            setattr(new, kind, getattr(layer, kind))
        replacements[layer] = new.to(layer.weight).train(layer.training)
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):  # a layer may have several names
            if child in replacements:
                setattr(module, name, replacements[child])
