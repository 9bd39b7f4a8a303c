"""What a method returns for one image."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """A segmented image, and how it came about. All maps have the image's own size."""

    probs: Tensor
    """Class probabilities ``(C, H, W)``."""
    source_probs: Tensor | None = None
    """Class probabilities of the network as trained ``(C, H, W)``."""
    fused_probs: Tensor | None = None
    """Mean class probabilities of the views ``(C, H, W)``."""
    pseudo_label: Tensor | None = None
    """Labels the network was adapted to ``(H, W)``; pixels left out are 255, or -1 where 255 is a
    class."""
    losses: tuple[float, ...] = ()
    """Loss before each step: cross-entropy to the pseudo-label, or an entropy."""
    seconds: float = 0.0
    """Time the call took."""
    notes: tuple[str, ...] = ()
    """What a user should know about this result, such as a fall-back."""

    def __repr__(self) -> str:
        classes, height, width = self.probs.shape
        return (
            f"Result({width}x{height}, {classes} classes, {len(self.losses)} steps, "
            f"{self.seconds:.2f} s, notes={self.notes})"
        )

    @property
    def label(self) -> Tensor:
        """Most likely class of each pixel ``(H, W)``, int64."""
        return self.probs.argmax(dim=0)

    @property
    def confidence(self) -> Tensor:
        """Probability of the most likely class of each pixel ``(H, W)``."""
        return self.probs.amax(dim=0)
