"""Adapt once, use many times: a network adapted to one image, in the form of the caller's.

The tuned weights are written into a copy of the caller's network, and so are the statistics that
SaN normalised the image with: in each BatchNorm layer they take the place of the running ones. What
results is a plain network: a part of an image is normalised as the whole image was.

In ``auto`` mode a prediction is a mean of three: as trained, with SaN, and adapted. One network
cannot give that. It gets what lies between these three in the same proportions: weights and alpha.
"""

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from selfadapt.checks import first_few
from selfadapt.computed import DIVERGED, Computed
from selfadapt.copying import private_copy
from selfadapt.engine import Network
from selfadapt.images import Image
from selfadapt.method import Method
from selfadapt.models.checkpoint import save_model
from selfadapt.norm import SaNReport
from selfadapt.result import Result
from selfadapt.views import Size


class AdaptError(ValueError):
    """No single network gives what a method predicts, or it could not be adapted."""


class Adapted(Method):
    """Segments images with a network that was adapted to one, without further steps.

    It is what ``method.adapt(image)`` returns, and itself a method: ``adapted(other)``.

    Args:
        method: The method that adapted it.
        network: The adapted network.
        result: The result for the image it was adapted to.
        share: Weight of the tuned weights in it.
        temperature: What class scores are divided by.
        notes: What to know beside the notes of the method.

    Attributes:
        method: The method that adapted it.
        module: The adapted network: a ``torch.nn.Module`` in evaluation mode, which takes and gives
            what the caller's does, with the same ``state_dict`` keys. Its parameters require no
            gradient. It knows nothing of ``temperature``.
        result: The result for the image it was adapted to.
        share: Weight of the tuned weights in the network, 0 to 1; the rest is as trained. Below 1
            in ``auto`` mode only, where the image gave less reason to adapt.
        temperature: What class scores are divided by, so that probabilities are calibrated as in
            ``auto`` mode; 1 in other modes.
    """

    def __init__(
        self,
        method: Method,
        network: nn.Module,
        result: Result,
        share: float,
        temperature: float,
        notes: tuple[str, ...],
    ) -> None:
        super().__init__(
            network, alpha=0.0, mode=method.mode,
            max_pixels=None if method.mode == "official" else method.max_pixels,
            compare=method.compare, fast=replace(method.fast, graphs=False),
            interface=method.interface,
        )  # fmt: skip
        self.result, self.share, self.temperature = result, share, temperature
        self.notes = (*method.notes, *notes)
        self.method = method

    @property
    def module(self) -> nn.Module:
        """The adapted network."""
        return self.model

    def compute(self, network: Network, image: Tensor) -> Computed:
        """Predict."""
        logits = self.method._predict(network, image, self.share)
        return Computed(logits=logits / self.temperature)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the network to a file that describes itself, see ``save_model``.

        The temperature is not written.

        Args:
            path: The file to write, atomically.
        """
        save_model(self.module, path)

    def _source_network(self) -> Network:
        return self.method._source_network()


def adapt(method: Method, image: Image, normalized: bool) -> Adapted:
    """Return the network that a method adapted to an image, see ``Method.adapt``."""
    name = type(method).__name__
    if not changes_network(method):
        raise AdaptError(f"{name} changes nothing in this network: there is nothing to keep")
    kept: list[tuple[nn.Module, float, float, tuple[str, ...]]] = []

    def compute(image: Tensor) -> Computed:
        network = method._network()
        computed = method._compute_all(image, network)
        if computed.logits is None:
            raise AdaptError(f"{name} averages several predictions: no single network gives that")
        shares = computed.adapted_share, computed.san_share, computed.temperature
        share, san_share, temperature = (1.0 if s is None else float(s) for s in shares)
        san_share = share + (1 - share) * san_share
        module, notes = _adapted_network(method, network, image, share, san_share)
        kept[:] = [(module, share, temperature, notes)]
        return computed

    def run(image: Tensor, size: Size) -> Computed:
        computed = method.engine.run(compute, image, size, variant=None)
        if computed.trouble() not in (None, DIVERGED) and method.engine.avoid_fp16():
            computed = method.engine.run(compute, image, size, variant=None)
        if trouble := computed.trouble():
            raise AdaptError(f"the network cannot be adapted to this image: {trouble}")
        return computed

    result = method._segment(image, normalized, run)
    module, share, temperature, notes = kept[0]
    return Adapted(method, module, result, share, temperature, notes)


def changes_network(method: Method) -> bool:
    """Return True if a method changes weights or statistics of the network for an image."""
    return method.selection is not None or any(method.san.converted.values())


def _adapted_network(
    method: Method, network: Network, image: Tensor, share: float, san_share: float
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a copy of the caller's network that is adapted to an image, and notes on it.

    Args:
        method: The method.
        network: Its network for the image, after ``compute``.
        image: A raw image.
        share: Weight of the tuned weights; the rest is as trained.
        san_share: Weight of alpha.
    """
    module = private_copy(method.model)
    weights = dict(module.named_parameters())
    for name, tuned in network.tuned.items():
        weights[name].lerp_(tuned.to(weights[name].dtype), share)
    for name in method.san.converted:  # in official mode these follow the image in the steps
        used: Any = network.model.get_submodule(name)
        _set_statistics(module.get_submodule(name), used.running_mean, used.running_var)
    alphas = {name: san_share * alpha for name, alpha in method.san.converted.items()}
    recorder = Network(module, method.interface, SaNReport(alphas))
    statistics = recorder.mixed_statistics(image)
    for name, uses in statistics.items():
        means, variances = zip(*uses, strict=True)
        mean, var = torch.stack(means).mean(dim=0), torch.stack(variances).mean(dim=0)
        _set_statistics(module.get_submodule(name), mean, var)
    several = [name for name, uses in statistics.items() if len(uses) > 1]
    if not several:
        return module, ()
    return module, (
        f"{first_few(several, 3)}: used several times in a forward pass, each time with other "
        "statistics of the image; the adapted network has their mean",
    )


def _set_statistics(layer: Any, mean: Tensor, var: Tensor) -> None:
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(var)
