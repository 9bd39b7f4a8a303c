"""What a method computes for an image: the record that a ``Result`` is made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from selfadapt.views import Size, size_of

DIVERGED = "the loss is not finite, lr may be too high"
VIEWS_NOT_FINITE = "the views' predictions are not finite"
NOT_FINITE = "the prediction is not finite"


@dataclass(frozen=True, kw_only=True, eq=False)
class Computed:
    """What a method computes for an image; either ``logits`` or ``probs`` is the prediction.

    All tensors are on the device of the image. On a GPU their values may not be there yet, and
    ``Method.compute`` must not wait for them, so that it can be recorded.
    """

    logits: Tensor | None = None
    """Class scores ``(1, C, H, W)``."""
    probs: Tensor | None = None
    """Class probabilities ``(C, H, W)``."""
    fused: Tensor | None = None
    """Mean class probabilities of the views ``(C, H, W)``."""
    pseudo_label: Tensor | None = None
    """Labels the network was adapted to ``(H, W)``."""
    losses: Sequence[Tensor] = ()
    """Loss before each step."""
    quality: Tensor | None = None
    """Estimate of the prediction's mean IoU, a number in [0, 1]."""
    warnings: Mapping[str, Tensor] = field(default_factory=dict)
    """Notes that apply where their tensor is True."""
    notes: tuple[str, ...] = ()
    """Notes that apply in any case."""
    source_logits: Tensor | None = None
    """Class scores of the network as trained ``(1, C, H, W)``; the base class adds them."""
    source_probs: Tensor | None = None
    """Or its class probabilities ``(C, H, W)``."""
    adapted_share: Tensor | None = None
    """Weight of the tuned network in the prediction, the rest is without steps; None: 1."""
    san_share: Tensor | None = None
    """Weight of SaN in what is without steps, the rest is as trained; None: 1."""
    temperature: Tensor | None = None
    """What class scores were divided by; None: 1."""

    def __post_init__(self) -> None:
        if (self.logits is None) == (self.probs is None):
            raise ValueError("either logits or probs must be given")
        shape = self.logits.shape if self.logits is not None else (1, *self.probs.shape)  # type: ignore[union-attr]
        if len(shape) != 4 or shape[0] != 1:
            raise ValueError(
                "logits must be (1, C, H, W) and probs (C, H, W), got "
                f"{tuple(self.probs.shape if self.logits is None else self.logits.shape)}"  # type: ignore[union-attr]
            )
        if not all(isinstance(loss, Tensor) for loss in self.losses):
            raise ValueError("losses must be tensors, which are not waited for")

    def finish(self, size: Size, *, copy: bool) -> "Computed":
        """Return the same, with probabilities in the place of scores of the result's size.

        Args:
            size: Height and width of the result.
            copy: Share no memory with this.
        """
        copies: dict[int, Tensor] = {}

        def finished(value: Tensor) -> Tensor:
            return copies.setdefault(id(value), value.clone()) if copy else value

        values = self._fields()
        for scores, probs in (("logits", "probs"), ("source_logits", "source_probs")):
            logits = values[scores]
            if logits is not None and size_of(logits) == size:
                softmax = logits[0].softmax(dim=0)
                copies[id(softmax)] = softmax
                values |= {scores: None, probs: softmax}
        return Computed(**tree_map_only(Tensor, finished, values))

    @property
    def num_bytes(self) -> int:
        """Memory that the tensors take."""
        return sum(x.nbytes for x in tree_leaves(self._fields()) if isinstance(x, Tensor))

    def trouble(self) -> str | None:
        """Return what makes the prediction worthless, if anything."""
        if self.fused is not None and not is_finite(None, self.fused):
            return VIEWS_NOT_FINITE
        if self.losses and not bool(torch.stack(list(self.losses)).isfinite().all()):
            return DIVERGED
        return None if is_finite(self.logits, self.probs) else NOT_FINITE

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, eq=False)
class ComputedBatch:
    """What a method computes for several images of one size, by image."""

    images: Sequence[Computed]

    def finish(self, size: Size, *, copy: bool) -> "ComputedBatch":
        """Return the same, each image as ``Computed.finish`` does."""
        return ComputedBatch([computed.finish(size, copy=copy) for computed in self.images])

    @property
    def num_bytes(self) -> int:
        """Memory that the tensors take."""
        return sum(computed.num_bytes for computed in self.images)


def is_finite(logits: Tensor | None, probs: Tensor | None = None) -> bool:
    """Return True if scores ``(1, C, H, W)`` or probabilities ``(C, H, W)`` can be used.

    Scores of single classes may be -inf.
    """
    if logits is not None:
        return bool(logits.amax(dim=1).isfinite().all())
    return probs is None or bool(probs.sum().isfinite())
