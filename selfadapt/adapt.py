"""Self-adaptation: the paper's method, one image at a time.

    views        the image at several scales, plain and flipped in gray        views.py
    pseudo-label the views' mean prediction, where it is sure                  pseudo.py
    steps        gradient descent on the cross-entropy to the pseudo-label     episode.py
    prediction   one forward pass with the tuned weights, which are dropped
    SaN          in every forward pass, BatchNorm mixes in the image           norm.py

The paper leaves open which statistics BatchNorm uses inside the loop. Both answers are here by
name: ``paper`` takes SaN with alpha there as everywhere, ``official`` does what the released code
does: image statistics alone, with running statistics that follow the image from step to step.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, sqrt
from numbers import Integral, Real
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfadapt.episode import Episode
from selfadapt.images import Image, load_image
from selfadapt.models.detect import detect
from selfadapt.models.families import adapted_parameters
from selfadapt.models.interface import Interface, lent
from selfadapt.names import nearest
from selfadapt.norm import Alpha, find_san, image_statistics, lent_san
from selfadapt.pseudo import check_psi, fuse, ignore_label, pseudo_label
from selfadapt.result import Result
from selfadapt.views import (
    SCALES,
    OfficialView,
    Size,
    View,
    paper_views,
    pil_resize,
    resize,
    size_of,
)


@dataclass(frozen=True)
class Mode:
    """What the two modes differ in."""

    lr: float
    """Learning rate, chosen on the validation domain."""
    drift: float | None
    """Momentum of the running statistics inside the loop; None: SaN with alpha, no drift."""
    strict: bool
    """A pseudo-label must exceed its threshold, not only reach it."""
    view: type[View]
    """How views are resampled."""


MODES = {
    "paper": Mode(lr=0.02, drift=None, strict=False, view=View),
    "official": Mode(lr=0.05, drift=0.1, strict=True, view=OfficialView),
}
OFFICIAL_SIZE = (1024, 2048)
MAX_PIXELS = 1024 * 2048


class SelfAdapt:
    """Segment an image with a network that first adapts itself to it, and leaves no trace.

    Args:
        model: Any segmentation network. It is never written to.
        alpha: Weight of the image statistics in SaN, 0 to 1; or weights by name pattern.
        psi: Confidence threshold of the pseudo-label, 0 to 1.
        lr: Learning rate of the steps (eta in the paper). None: the mode's own.
        steps: Number of steps.
        scales: Scales of the views, each taken plain and flipped in gray.
        adapt: Name patterns of the layers to adapt. None: the network's default.
        mode: ``paper``: the equations as written; ``official``: the released code, to the number.
        views: Views to take instead of those that ``scales`` gives.
        max_pixels: Larger images are scaled down to this many pixels, and the result is brought
            back. None: 2097152 (1024 x 2048); in official mode always exactly 1024 x 2048.
        compare: Also predict with the network as trained, for before and after.
        interface: What the network takes and gives, where that is not found out by itself.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
        >>> method = SelfAdapt(model, steps=2)
        >>> result = method(torch.rand(3, 32, 48))
        >>> tuple(result.label.shape), len(result.losses)
        ((32, 48), 2)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        alpha: Alpha = 0.1,
        psi: float = 0.7,
        lr: float | None = None,
        steps: int = 10,
        scales: Sequence[float] = SCALES,
        adapt: Sequence[str] | None = None,
        mode: Literal["paper", "official"] = "paper",
        views: Iterable[View] | None = None,
        max_pixels: int | None = None,
        compare: bool = True,
        interface: Interface | None = None,
    ) -> None:
        _check(model, psi, lr, steps, mode, max_pixels)
        self.model = _unwrapped(model)
        self.mode = mode
        self.psi = psi
        self.lr = MODES[mode].lr if lr is None else lr
        self.steps = steps
        self.max_pixels = max_pixels or MAX_PIXELS
        self.compare = compare
        self.san = find_san(self.model, alpha)
        self.selection = adapted_parameters(self.model, adapt)
        self.interface = detect(self.model, interface)
        self.views = self._usable_views(paper_views(scales) if views is None else views)
        self.notes = self._model_notes()

    def __repr__(self) -> str:
        alphas = ", ".join(f"{alpha:g}" for alpha in sorted(set(self.san.converted.values())))
        interface = self.interface
        return (
            f"SelfAdapt({type(self.model).__name__}, {self.mode} mode, {self.steps} steps, "
            f"lr={self.lr:g}, psi={self.psi:g}, alpha={alphas or 'none'})\n"
            f"  views: {', '.join(map(str, self.views))}\n"
            f"  layers: {self.selection.reason}\n"
            f"  normalisation: {self.san}\n"
            f"  input: {interface.channels} channels, mean {interface.mean}, std {interface.std}"
        )

    def __call__(self, image: Image, *, normalized: bool = False) -> Result:
        """Adapt to ``image`` and segment it.

        Args:
            image: A path, a PIL image, an array ``(H, W, C)`` or a tensor ``(C, H, W)``, raw.
            normalized: ``image`` is a float tensor with the network's normalisation applied.

        Returns:
            Probabilities at the image's own size, and what led to them.
        """
        start = time.perf_counter()
        with torch.inference_mode(False), torch.no_grad(), _uncached_autocast(), lent(self.model):
            whole = self._load(image, normalized)
            image = self._within_budget(whole)
            result = self._segment(image, size_of(whole))
            if whole.is_cuda:
                torch.cuda.synchronize(whole.device)
        notes = self.notes + result.notes
        if size_of(image) != size_of(whole):
            notes += (f"adapted at {_text(image)}, the image is {_text(whole)}",)
        return replace(result, seconds=time.perf_counter() - start, notes=notes)

    def _segment(self, image: Tensor, size: Size) -> Result:
        """Run the method on a raw image ``(C, H, W)``; the result's maps have the given size."""
        source = Episode(self.model, self.interface).logits(image) if self.compare else None
        with lent_san(self.model, self.san):
            network = Episode(self.model, self.interface, self.selection.names)
            fused = fuse(self._view_probs(network, image))
            ignore = ignore_label(len(fused))
            label = pseudo_label(fused, self.psi, ignore=ignore, strict=MODES[self.mode].strict)
            losses = self._adapt(network, image, label, ignore)
            logits = network.logits(image)
        logits, notes = self._guarded(image, fused, losses, logits)
        if source is not None and not _finite(source):
            source, notes = None, (*notes, "the source network's prediction is not finite")
        views_failed = bool(fused.isnan().any())
        return Result(
            probs=_brought_back(logits[0], size).softmax(dim=0),
            source_probs=None if source is None else _brought_back(source[0], size).softmax(dim=0),
            fused_probs=None if views_failed else _brought_back(fused, size),
            pseudo_label=None if views_failed else _label_brought_back(label, size),
            losses=losses,
            notes=notes,
        )

    def _view_probs(self, network: Episode, image: Tensor) -> Iterator[Tensor]:
        for view in self.views:
            yield view.undo(network.probs(view.make(image)), size_of(image))

    def _adapt(
        self, network: Episode, image: Tensor, label: Tensor, ignore: int
    ) -> tuple[float, ...]:
        """Fit the network to the pseudo-label; return the loss before each step."""
        if not self.steps or bool((label == ignore).all()):
            return ()
        drift = MODES[self.mode].drift
        loss = partial(F.cross_entropy, target=label[None], ignore_index=ignore)
        with nullcontext() if drift is None else image_statistics(self.model, drift):
            losses = [network.step(image, loss, self.lr) for _ in range(self.steps)]
        return tuple(torch.stack(losses).tolist())

    def _guarded(
        self, image: Tensor, fused: Tensor, losses: Sequence[float], logits: Tensor
    ) -> tuple[Tensor, tuple[str, ...]]:
        """Return the prediction, or SaN's, or the source network's, with notes of what happened."""
        trouble = _trouble(fused, losses, logits, self.steps)
        if trouble is None:
            if losses and losses[-1] > losses[0]:
                return logits, (
                    f"the loss rose from {losses[0]:.3g} to {losses[-1]:.3g}: lower lr",
                )
            return logits, ()
        with lent_san(self.model, self.san):
            logits = Episode(self.model, self.interface).logits(image)
        if _finite(logits):
            return logits, (f"{trouble}: this is the prediction with SaN, without adaptation",)
        logits = Episode(self.model, self.interface).logits(image)
        if _finite(logits):
            note = f"{trouble}, nor is SaN's: this is the prediction of the network as trained"
            return logits, (note,)
        raise ValueError("the network's own prediction for this image is not finite")

    def _load(self, image: Image, normalized: bool) -> Tensor:
        loaded = load_image(image, self.interface.channels or 3, normalized=normalized)
        weight = next(p for p in self.model.parameters() if p.is_floating_point())
        loaded = loaded.to(weight.device, torch.promote_types(weight.dtype, torch.float32))
        return self.interface.denormalize(loaded) if normalized else loaded

    def _within_budget(self, image: Tensor) -> Tensor:
        height, width = size_of(image)
        shrink = sqrt(self.max_pixels / (height * width))
        if shrink >= 1:
            return image
        if self.mode == "official":
            return pil_resize(image, OFFICIAL_SIZE)
        return resize(image, (max(1, int(height * shrink)), max(1, int(width * shrink))))

    def _usable_views(self, views: Iterable[View]) -> tuple[View, ...]:
        """Make plain views the mode's own, and leave gray out where the network has no colour."""
        usable = []
        for view in (views,) if isinstance(views, View) else views:
            if not isinstance(view, View):
                raise TypeError(
                    f"views must be View objects, got {type(view).__name__}; "
                    "use scales= for numbers"
                )
            if self.interface.channels != 3:
                view = replace(view, gray=False)
            if type(view) is View:
                view = MODES[self.mode].view(view.scale, view.flip, view.gray)
            usable.append(view)
        if not usable:
            raise ValueError("at least one view is needed, got no scales or views")
        return tuple(dict.fromkeys(usable))

    def _model_notes(self) -> tuple[str, ...]:
        notes = []
        if not self.san.converted:
            notes.append(str(self.san))
        if "last third" in self.selection.reason:
            notes.append(self.selection.reason)
        if self.interface.size is not None:
            height, width = self.interface.size
            notes.append(f"the network takes {width}x{height} pixels only: images are resized")
        if self.interface.channels != 3:
            notes.append(f"input channels: {self.interface.channels}, so no view is turned gray")
        return tuple(notes)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the network behind torch.compile or a wrapper for several devices."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return _unwrapped(model.module)
    return model


def _check(
    model: nn.Module, psi: float, lr: float | None, steps: int, mode: str, max_pixels: int | None
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "a TorchScript model cannot be adapted, its weights are fixed; give the nn.Module "
            "it was made from"
        )
    tensors = [*model.parameters(), *model.buffers()]
    if any(isinstance(t, nn.UninitializedParameter | nn.UninitializedBuffer) for t in tensors):
        raise ValueError("this model has lazy layers without weights yet; run it on an image once")
    if any(t.is_meta for t in tensors):
        raise ValueError("this model has weights on the meta device, which hold no numbers")
    check_psi(psi)
    if mode not in MODES:
        guess = nearest(str(mode), MODES)
        raise ValueError(f"unknown mode {mode!r};{guess} known: {', '.join(MODES)}")
    if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 0:
        raise ValueError(f"steps must be a whole number, 0 or more, got {steps!r}")
    if lr is not None and not (isinstance(lr, Real) and 0 < lr < float("inf")):
        raise ValueError(f"lr must be a positive number, got {lr!r}")
    if max_pixels is not None and mode == "official":
        raise ValueError("max_pixels cannot be set in official mode, which has 1024 x 2048")
    if max_pixels is not None and not (isinstance(max_pixels, Integral) and max_pixels > 0):
        raise ValueError(f"max_pixels must be a positive whole number, got {max_pixels!r}")


def _trouble(fused: Tensor, losses: Sequence[float], logits: Tensor, steps: int) -> str | None:
    """Say what makes the adapted prediction worthless, if anything."""
    if fused.isnan().any():
        return "the views' predictions are not finite"
    if steps and not losses:
        return "no pixel is sure enough for a pseudo-label"
    if not all(map(isfinite, losses)):
        return "the loss became infinite, lr may be too high"
    return None if _finite(logits) else "the adapted prediction is not finite"


def _finite(logits: Tensor) -> bool:
    """Say whether scores ``(1, C, H, W)`` make probabilities; single classes may be -inf."""
    return not bool(logits.softmax(dim=1).isnan().any())


def _uncached_autocast() -> torch.autocast:
    """Keep the caller's autocast, but not its cache: that would hold weights of before a step."""
    device = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    return torch.autocast(
        device,
        dtype=torch.get_autocast_dtype(device),
        enabled=torch.is_autocast_enabled(device),
        cache_enabled=False,
    )


def _brought_back(maps: Tensor, size: Size) -> Tensor:
    """Bring ``(C, h, w)`` to the image's own size."""
    if size_of(maps) == size:
        return maps
    return F.interpolate(maps[None], size, mode="bilinear", align_corners=False)[0]


def _label_brought_back(label: Tensor, size: Size) -> Tensor:
    if size_of(label) == size:
        return label
    return F.interpolate(label[None, None].float(), size, mode="nearest-exact")[0, 0].long()


def _text(image: Tensor) -> str:
    return f"{image.shape[-1]}x{image.shape[-2]}"
