"""Methods that minimise or weigh by the entropy of the prediction.

H(p) = - sum_c p_c log p_c, averaged over the pixels
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Unpack

import torch
from torch import Tensor, nn

from selfadapt.computed import Computed
from selfadapt.engine import Gradients, Network
from selfadapt.method import Common, Method, check_steps
from selfadapt.models.families import normalisation_parameters
from selfadapt.norm import Alpha, check_alpha, find_san
from selfadapt.views import SCALES, View, size_of

ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""The mixes that InTEnt averages over."""


def mean_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the predictions ``(1, C, H, W)``, averaged over the pixels.

    Example:
        >>> mean_entropy(torch.zeros(1, 2, 3, 3))
        tensor(0.6931)
    """
    log_probs = logits.log_softmax(dim=1).clamp_min(-80)  # a class may be ruled out with -inf
    return -(log_probs.exp() * log_probs).sum(dim=1).mean()


class _MinimisesEntropy(Method):
    """Gradient descent on the entropy of the prediction, then one prediction."""

    def __init__(
        self, model: nn.Module, *, steps: int, lr: float, alpha: Alpha, **common: Unpack[Common]
    ) -> None:
        check_steps(steps, lr)
        super().__init__(model, alpha=alpha, **common)
        self.steps, self.lr = steps, lr

    def compute(self, network: Network, image: Tensor) -> Computed:
        """Take the steps, and predict."""
        with self._loop_statistics(network):
            losses = [self._step(network, image) for _ in range(self.steps)]
        return Computed(logits=network.logits(image), losses=losses)

    def work(self) -> tuple[float, float]:
        """Return the number of forward passes and steps per image, without the one to compare."""
        return 1.0, float(self.steps)

    def _step(self, network: Network, image: Tensor) -> Tensor:
        """Take one step; return the entropy before it."""
        return network.step(image, mean_entropy, self.lr)


class EntropyMin(_MinimisesEntropy):
    """Minimise the entropy of the prediction on the layers that self-adaptation tunes (Table 5b).

    Args:
        model: Any segmentation network. It is never modified.
        steps: Number of steps.
        lr: Learning rate of the steps.
        alpha: Weight of the image statistics in SaN, 0 to 1; or weights by name pattern.
        adapt: Name patterns of the layers to adapt. None: the network's default.
        **common: See ``Method``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        steps: int = 10,
        lr: float = 0.0005,
        alpha: Alpha = 0.1,
        adapt: Sequence[str] | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(model, steps=steps, lr=lr, alpha=alpha, **common)
        self._select_layers(adapt)


class Tent(_MinimisesEntropy):
    """Minimise the entropy by BatchNorm's scale and shift alone (Tent; Wang et al., 2021).

    Episodic: every image starts from the source weights. The prediction is made after the last
    step; the original gives the one before it.

    Args:
        model: Any segmentation network. It is never modified.
        steps: Number of steps.
        lr: Learning rate of the steps.
        alpha: Weight of the image statistics in SaN, 0 to 1; the original has 1.
        **common: See ``Method``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        steps: int = 10,
        lr: float = 0.01,
        alpha: Alpha = 0.1,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(model, steps=steps, lr=lr, alpha=alpha, **common)
        self._select(normalisation_parameters(self.model))


class MEMO(_MinimisesEntropy):
    """Minimise the entropy of the mean prediction over views (MEMO; Zhang et al., 2022).

    Views are undone before they are averaged, as a pixel's class does not change with them. The
    mean is computed first, without gradients; then the gradient is accumulated view by view. This
    gives the gradient of all views at once with the memory of one. Official mode
    changes the views and the size cap; BatchNorm takes SaN with alpha in both modes.

    Args:
        model: Any segmentation network. It is never modified.
        steps: Number of steps.
        lr: Learning rate of the steps.
        alpha: Weight of the image statistics in SaN, 0 to 1; or weights by name pattern.
        adapt: Name patterns of the layers to adapt. None: the network's default.
        scales: Scales of the views, each taken plain and flipped in gray.
        views: Views to take instead of those that ``scales`` gives.
        **common: See ``Method``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        steps: int = 1,
        lr: float = 0.01,
        alpha: Alpha = 0.1,
        adapt: Sequence[str] | None = None,
        scales: Sequence[float] = SCALES,
        views: Iterable[View] | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(model, steps=steps, lr=lr, alpha=alpha, **common)
        self._select_layers(adapt)
        self.views = self._choose_views(scales, views)
        self._note_gray()

    def _loop_statistics(self, network: Network) -> AbstractContextManager[None]:
        return nullcontext()

    def work(self) -> tuple[float, float]:
        """Return the number of forward passes and steps per image, without the one to compare."""
        views = self._area(self.views)
        return 1.0 + self.steps * views, self.steps * views

    def _step(self, network: Network, image: Tensor) -> Tensor:
        """Take one step on the entropy of the mean, view by view; return that entropy."""
        size = size_of(image)
        mean = network.mean_probs(image, self.views)
        log_mean = mean.clamp_min(1e-30).log()
        grad = -(log_mean + 1) / (mean[0].numel() * len(self.views))  # dH / d(a view's probs)
        total: Gradients = [None] * len(network.tuned)
        for view in self.views:

            def view_loss(logits: Tensor, view: View = view) -> Tensor:
                return (view.undo(logits[0].softmax(dim=0), size) * grad).sum()

            total = _sum(total, network.gradients(view.make(image), view_loss)[1])
        entropy = -(mean * log_mean).sum(dim=0).mean()
        network.descend(total, entropy, self.lr)
        return entropy


class InTEnt(Method):
    """Average predictions with several alphas, weighted by entropy (InTEnt; Dong et al., 2024).

    The original segments an object from its background and weighs both alike; here every class that
    is predicted counts alike. It takes the image's statistics from one pass with alpha 1, SaN from
    the pass itself. As there, the entropies of one image are normalised to [0, 1] before the
    softmax, so that the most confident alpha weighs e times as much as the least confident.

    Args:
        model: Any segmentation network. It is never modified.
        alphas: Weights of the image statistics in SaN to predict with.
        **common: See ``Method``.
    """

    is_single_network = False

    def __init__(
        self, model: nn.Module, *, alphas: Sequence[float] = ALPHAS, **common: Unpack[Common]
    ) -> None:
        if isinstance(alphas, str) or not isinstance(alphas, Sequence) or not alphas:
            raise ValueError(f"alphas must be a list of numbers in [0, 1], got {alphas!r}")
        for alpha in alphas:
            if isinstance(alpha, Mapping):
                raise ValueError(f"each alpha must be one number for all layers, got {alpha!r}")
            check_alpha(alpha)
        super().__init__(model, alpha=max(alphas), **common)
        self.alphas = tuple(alphas)
        self._mixes = tuple(find_san(self.model, alpha) for alpha in alphas)

    def compute(self, network: Network, image: Tensor) -> Computed:
        """Predict with each alpha, and average by entropy; drop predictions that are not finite."""
        predictions, entropies = [], []
        for mix in self._mixes:
            network.set_alpha(mix)
            probs = network.probs(image)
            predictions.append(probs)
            entropies.append(_balanced_entropy(probs))
        failed = torch.stack([probs.isnan().any() for probs in predictions])
        weights = _weights(torch.stack(entropies), failed)
        mean = sum(
            weight * probs.nan_to_num() for weight, probs in zip(weights, predictions, strict=True)
        )
        assert isinstance(mean, Tensor)
        return Computed(
            probs=mean,
            warnings={
                f"the prediction with alpha {alpha:g} is not finite": has_failed
                for alpha, has_failed in zip(self.alphas, failed, strict=True)
            },
        )

    def work(self) -> tuple[float, float]:
        """Return the number of forward passes and steps per image, without the one to compare."""
        return float(len(self.alphas)), 0.0


def _balanced_entropy(probs: Tensor) -> Tensor:
    """Return the entropy of ``(C, H, W)``, averaged over each class's pixels, then the classes."""
    entropy = torch.special.entr(probs).sum(dim=0).flatten()
    label = probs.argmax(dim=0).flatten()
    sums = entropy.new_zeros(len(probs)).index_add(0, label, entropy)
    counts = torch.zeros_like(sums).index_add(0, label, torch.ones_like(entropy))
    return (sums / counts.clamp_min(1)).sum() / (counts > 0).sum()


def _weights(entropies: Tensor, failed: Tensor) -> Tensor:
    """Return weights that sum to 1 for the predictions with each alpha, the lowest entropy highest.

    Failed predictions have weight 0; if all have failed, every weight is NaN.
    """
    least = entropies.masked_fill(failed, torch.inf).amin()
    most = entropies.masked_fill(failed, -torch.inf).amax()
    certainty = (most - entropies) / (most - least).clamp_min(1e-12)
    return certainty.masked_fill(failed, -torch.inf).softmax(dim=0)


def _sum(first: Gradients, second: Gradients) -> Gradients:
    pairs = zip(first, second, strict=True)
    return [b if a is None else a if b is None else a + b for a, b in pairs]
