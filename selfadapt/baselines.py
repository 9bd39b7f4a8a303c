"""The methods self-adaptation is compared with, each a short class under the same contract.

All of them also take the settings that every method has: ``mode``, ``max_pixels``, ``compare``,
``fast`` and ``interface``, see ``Method``.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NoReturn, Unpack

import torch
from torch import Tensor, nn

from selfadapt.batches import BatchSegmenter
from selfadapt.checks import check_number
from selfadapt.computed import Computed
from selfadapt.cost import Estimate
from selfadapt.dropout import DropoutAfterReLU, check_rate, dropout_layers, seeded
from selfadapt.engine import Network
from selfadapt.explain import Explanation
from selfadapt.images import Image, load_image
from selfadapt.method import Common, Method
from selfadapt.norm import Alpha
from selfadapt.pseudo import fuse
from selfadapt.result import Result
from selfadapt.views import SCALES, View

# one forward pass


class SaNOnly(Method):
    """Mix the image's statistics into BatchNorm, in one forward pass (Bahmani et al., 2023).

    Args:
        model: Any segmentation network. It is never modified.
        alpha: Weight of the image statistics in SaN, 0 to 1; or weights by name pattern.
        **common: See ``Method``.
    """

    def compute(self, network: Network, image: Tensor) -> Computed:
        """Predict."""
        return Computed(logits=network.logits(image))

    def compute_batch(self, network: Network, images: Tensor) -> Sequence[Computed]:
        """Predict for each image of a batch."""
        return [Computed(logits=logits) for logits in network.logits(images).split(1)]

    def work(self) -> tuple[float, float]:
        """Return the number of forward passes and steps per image, without the one to compare."""
        return 1.0, 0.0


class Source(SaNOnly):
    """Predict with the network as trained (t-BN)."""

    def __init__(self, model: nn.Module, **common: Unpack[Common]) -> None:
        super().__init__(model, alpha=0.0, **common)


class PredictionBN(SaNOnly):
    """Normalise with the image's statistics alone (p-BN; Nado et al., 2020)."""

    def __init__(self, model: nn.Module, **common: Unpack[Common]) -> None:
        super().__init__(model, alpha=1.0, **common)


# means over several passes


class TTA(Method):
    """Average the predictions over scaled, flipped and gray views (test-time augmentation).

    Args:
        model: Any segmentation network. It is never modified.
        alpha: Weight of the image statistics in SaN, 0 to 1; 0: without SaN.
        scales: Scales of the views, each taken plain and flipped in gray.
        views: Views to take instead of those that ``scales`` gives.
        **common: See ``Method``.
    """

    is_single_network = False

    def __init__(
        self,
        model: nn.Module,
        *,
        alpha: Alpha = 0.1,
        scales: Sequence[float] = SCALES,
        views: Iterable[View] | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(model, alpha=alpha, **common)
        self.views = self._choose_views(scales, views)
        self._note_gray()

    def compute(self, network: Network, image: Tensor) -> Computed:
        """Predict on every view, and average."""
        fused = network.mean_probs(image, self.views)
        return Computed(probs=fused, fused=fused)

    def compute_batch(self, network: Network, images: Tensor) -> Sequence[Computed]:
        """Predict on every view of each image of a batch, and average."""
        fused = network.mean_probs(images, self.views)
        return [Computed(probs=probs, fused=probs) for probs in fused]

    def work(self) -> tuple[float, float]:
        """Return the number of forward passes and steps per image, without the one to compare."""
        return self._area(self.views), 0.0


class MCDropout(Method):
    """Average several passes with dropout switched on (Gal and Ghahramani, 2016).

    Args:
        model: Any segmentation network. It is never modified.
        passes: Number of passes.
        rate: Dropout rate. None: as the network was trained. A network that uses no dropout layer
            gets dropout after every ReLU, at 0.1 if None.
        seed: Seed of the random numbers: the same image gives the same result.
        alpha: Weight of the image statistics in SaN, 0 to 1; 0: without SaN.
        **common: See ``Method``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        passes: int = 10,
        rate: float | None = None,
        seed: int = 0,
        alpha: Alpha = 0.0,
        **common: Unpack[Common],
    ) -> None:
        check_number("passes", passes, 1, whole=True)
        check_number("seed", seed, 0, 2**63 - 1, whole=True)
        if rate is not None:
            check_rate(rate)
        super().__init__(model, alpha=alpha, **common)
        self.passes, self.rate, self.seed = passes, rate, seed
        self.engine.is_random = True  # a replay would repeat the same dropout masks
        self._layers, num_relus = self._dropout_layers()
        if not (self._layers or num_relus):
            raise ValueError(
                "MC-dropout needs dropout layers, or ReLUs to put dropout after, and this network "
                "has neither"
            )
        if not self._layers:
            self.notes += (
                "this network uses no dropout layer, "
                f"so {rate or 0.1:g} is put after each of its {num_relus} ReLUs",
            )

    def compute(self, network: Network, image: Tensor) -> Computed:
        """Predict several times with dropout, and average."""
        for name in self._layers:
            layer: Any = network.model.get_submodule(name)
            layer.training = True
            layer.p = layer.p if self.rate is None else self.rate
        dropout = nullcontext() if self._layers else DropoutAfterReLU(self.rate or 0.1)
        with seeded(self.seed, image.device), dropout:
            return Computed(probs=fuse(network.probs(image) for _ in range(self.passes)))

    def work(self) -> tuple[float, float]:
        """Return the number of forward passes and steps per image, without the one to compare."""
        return float(self.passes), 0.0

    def _dropout_layers(self) -> tuple[list[str], int]:
        """Run an empty image; return the dropout layers that took part, and the number of ReLUs."""
        image = self._load(torch.zeros(self.interface.channels or 3, 32, 32), normalized=False)
        used: dict[str, None] = {}
        after_relu = DropoutAfterReLU(0.1)
        with torch.inference_mode(False), torch.no_grad(), seeded(0, image.device), after_relu:
            network = self._network()
            layers = {layer: name for name, layer in network.model.named_modules()}
            for layer in dropout_layers(network.model):
                layer.register_forward_hook(lambda layer, *_: used.setdefault(layers[layer]))
            network.logits(image)
        return list(used), after_relu.num


class Ensemble(BatchSegmenter):
    """Average several networks, each with SaN and, if wanted, over views (Hansen et al., 1990).

    Args:
        model: The networks, or one.
        alpha: Weight of the image statistics in SaN, 0 to 1; 0: without SaN.
        tta: Average each network over views as well, see ``TTA``.
        scales: Scales of these views, each taken plain and flipped in gray.
        views: Views to take instead of those that ``scales`` gives.
        **common: See ``Method``.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        *,
        alpha: Alpha = 0.1,
        tta: bool = False,
        scales: Sequence[float] = SCALES,
        views: Iterable[View] | None = None,
        **common: Unpack[Common],
    ) -> None:
        if not isinstance(model, nn.Module | Iterable):
            raise TypeError(f"an ensemble is of torch.nn.Modules, got {type(model).__name__}")
        if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
            model = (model,)
        networks: tuple[nn.Module, ...] = tuple(model)
        if not networks:
            raise ValueError("an ensemble needs at least one network, got none")
        _check_same_classes(networks)
        views = views if views is None or isinstance(views, View) else tuple(views)
        self.members: tuple[Method, ...] = tuple(
            TTA(network, alpha=alpha, scales=scales, views=views, **common)
            if tta
            else SaNOnly(network, alpha=alpha, **common)
            for network in networks
        )
        self.notes = tuple(dict.fromkeys(n for member in self.members for n in member.notes))
        self.interface = self.members[0].interface

    def __repr__(self) -> str:
        return f"Ensemble of {len(self.members)}, each\n{self.members[0]!r}"

    def explain(self) -> Explanation:
        """Return the decisions made for the first network and its device, and why."""
        first = self.members[0].explain()
        return replace(first, title=f"Ensemble of {len(self.members)}, the first: {first.title}")

    def estimate(self, height: int, width: int) -> Estimate:
        """Estimate the time and memory of an image of this size on a CPU, see ``Method``."""
        each = [member.estimate(height, width) for member in self.members]
        seconds = sum(estimate.seconds for estimate in each)
        plain = sum(estimate.plain_seconds for estimate in each)
        return Estimate(seconds, plain, 0.0, max(estimate.num_bytes for estimate in each))

    def adapt(self, image: Image, *, normalized: bool = False) -> NoReturn:
        """Raise ValueError: the prediction is that of several networks."""
        raise ValueError("an ensemble has several networks: adapt each of them by itself")

    def __call__(self, image: Image, *, normalized: bool = False) -> Result:
        """Segment ``image`` with each network, and average their probabilities."""
        start, given = time.perf_counter(), None if normalized else image
        channels = {member.interface.channels or 3 for member in self.members}
        if not normalized and len(channels) == 1:  # read a file once
            image = load_image(image, channels.pop())
        mean = self.members[0](image, normalized=normalized)
        for num, member in enumerate(self.members[1:], start=1):
            mean = _averaged(mean, num, member(image, normalized=normalized))
        return mean._replace(image=given, seconds=time.perf_counter() - start)


def _check_same_classes(networks: Sequence[nn.Module]) -> None:
    """Raise ValueError where networks that name their classes do not name the same ones."""
    specs = [getattr(network, "spec", None) for network in networks]
    named = [getattr(spec, "classes", None) for spec in specs]
    names = dict.fromkeys(classes for classes in named if classes)
    if len(names) > 1:
        first, second, *_ = names
        raise ValueError(
            f"the networks of an ensemble must have the same classes, got {', '.join(first)} "
            f"and {', '.join(second)}"
        )


def _averaged(mean: Result, num: int, other: Result) -> Result:
    """Update the mean of ``num`` results with another; a map that either lacks is dropped."""
    if len(mean.probs) != len(other.probs):
        raise ValueError(
            "the networks of an ensemble must have the same classes, "
            f"got {len(mean.probs)} and {len(other.probs)} of them"
        )

    def average(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        if a is None or b is None:
            return None
        return (num * a + b.to(a.device)) / (num + 1)

    return Result(
        probs=(num * mean.probs + other.probs.to(mean.probs.device)) / (num + 1),
        source_probs=average(mean.source_probs, other.source_probs),
        fused_probs=average(mean.fused_probs, other.fused_probs),
        notes=tuple(dict.fromkeys(mean.notes + other.notes)),
        classes=mean.classes,
    )
