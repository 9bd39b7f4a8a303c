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

import inspect
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfadapt.checks import check_number
from selfadapt.episode import Episode
from selfadapt.fast import Fast
from selfadapt.fast.graphs import RECORD_AT, Maps
from selfadapt.method import DIVERGED, Method, brought_back, check_steps, probs_at
from selfadapt.models.interface import Interface, lent
from selfadapt.modes import MODES, ModeName
from selfadapt.norm import Alpha
from selfadapt.pacing import Pace, as_tuple, with_preset
from selfadapt.pseudo import check_psi, ignore_label, pseudo_label
from selfadapt.result import Result
from selfadapt.views import SCALES, Size, View, size_of

LR = {"paper": 0.02, "official": 0.05}
"""Learning rate of each mode, chosen on the validation domain."""


class SelfAdapt(Method):
    """Adapt the network to its own pseudo-label of the image (Bahmani et al., TMLR 2023).

    Args:
        model: Any segmentation network. It is never written to.
        alpha: Weight of the image statistics in SaN, 0 to 1; or weights by name pattern.
        psi: Confidence threshold of the pseudo-label, 0 to 1.
        lr: Learning rate of the steps (eta in the paper). None: the mode's own.
        steps: Number of steps.
        scales: Scales of the views, each taken plain and flipped in gray.
        step_scale: Scale of the image that the steps are taken on, up to 1.
        final_scales: Scales of views that the adapted network predicts beside the image.
        final_weight: Weight of their mean in the prediction, 0 to 1.
        preset: Settings that go together by name: ``realtime`` does with a few smaller steps. They
            take the place of what has its default value.
        budget_ms: Milliseconds for an image: as many of the steps are taken as fit, which is
            measured on the first image. Loading it does not count.
        adapt: Name patterns of the layers to adapt. None: the network's default.
        mode: ``paper``: the equations as written; ``official``: the released code, to the number.
        views: Views to take instead of those that ``scales`` gives.
        max_pixels: Larger images are scaled down to this many pixels, and the result is brought
            back. None: 2097152 (1024 x 2048); in official mode always exactly 1024 x 2048.
        compare: Also predict with the network as trained, for before and after.
        fast: Take shortcuts to the same result, on a GPU with 16-bit arithmetic. False: none; in
            Python a ``Fast`` says which.
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
        step_scale: float = 1.0,
        final_scales: Sequence[float] = (),
        final_weight: float = 0.5,
        preset: Literal["realtime"] | None = None,
        budget_ms: float | None = None,
        adapt: Sequence[str] | None = None,
        mode: ModeName = "paper",
        views: Iterable[View] | None = None,
        max_pixels: int | None = None,
        compare: bool = True,
        fast: bool | Fast = True,
        interface: Interface | None = None,
    ) -> None:
        scales, final_scales = as_tuple(scales), as_tuple(final_scales)
        given = {
            "mode": mode, "scales": scales, "steps": steps, "lr": lr, "step_scale": step_scale,
            "final_scales": final_scales, "final_weight": final_weight,
        }  # fmt: skip
        settings = with_preset(preset, given, inspect.signature(SelfAdapt).parameters)
        check_psi(psi)
        check_steps(settings["steps"], 1.0 if settings["lr"] is None else settings["lr"])
        check_number("step_scale", settings["step_scale"], 0.01, 1)
        check_number("final_weight", settings["final_weight"], 0, 1)
        pace = None if budget_ms is None else Pace(budget_ms)
        super().__init__(
            model, alpha=alpha, mode=mode, max_pixels=max_pixels, compare=compare, fast=fast,
            interface=interface,
        )  # fmt: skip
        self.psi = psi
        self.lr = LR[mode] if settings["lr"] is None else settings["lr"]
        self.steps, self.step_scale = settings["steps"], settings["step_scale"]
        self.final_scales, self.final_weight = settings["final_scales"], settings["final_weight"]
        self.preset, self.budget_ms = preset, budget_ms
        self._tune(self._adapted(adapt))
        self.views = self._choose_views(settings["scales"], views)
        none = self.final_scales == ()
        self._final_views = () if none else self._usable_views(self.final_scales)
        self._num_steps, self._pace = self.steps, pace

    def _compute(self, image: Tensor) -> Maps:
        with self._lent_san():
            network = self._episode(self.selection.names)
            small = image if self.step_scale == 1 else View(self.step_scale).make(image)
            fused = self._fused(network, image, self.views, size_of(small))
            ignore = ignore_label(len(fused))
            label = pseudo_label(fused, self.psi, ignore=ignore, strict=MODES[self.mode].strict)
            losses = self._adapt(network, small, label, ignore)
            logits = self._predicted(network, image)
        unsure = (label == ignore).all()
        checks = torch.stack([fused.isnan().any(), unsure]).to(losses)
        numbers = torch.cat((checks, losses))
        return {"logits": logits, "fused": fused, "label": label, "numbers": numbers}

    def _adapt(self, network: Episode, image: Tensor, label: Tensor, ignore: int) -> Tensor:
        """Fit the network to the pseudo-label; return the loss before each step."""
        loss = partial(F.cross_entropy, target=label[None], ignore_index=ignore)
        with self._loop_statistics():
            step = partial(network.step, image, loss, self.lr)
            return self._take_steps(step, self._num_steps, image)

    def _predicted(self, network: Episode, image: Tensor) -> Tensor:
        """Return the logits of the adapted network, averaged with its views where that is asked."""
        logits = network.logits(image)
        if not self._final_views:
            return logits
        mean = self._fused(network, image, self._final_views)[None]
        probs = logits.softmax(dim=1).lerp_(mean, self.final_weight)
        return probs.clamp_min_(1e-30).log_()

    def _conclude(self, image: Tensor, size: Size, maps: Maps) -> Result:
        views_failed, unsure, *losses = maps["numbers"].tolist()
        losses = [] if unsure else losses
        if unsure and self._num_steps and not views_failed:
            logits, notes = self._unadapted(image)
        else:
            logits, notes = self._sound(image, maps["logits"], _trouble(views_failed, losses))
        if not notes and losses and losses[-1] > losses[0]:
            notes = (f"the loss rose from {losses[0]:.3g} to {losses[-1]:.3g}: lower lr",)
        return Result(
            probs=probs_at(logits, size),
            fused_probs=None if views_failed else brought_back(maps["fused"], size),
            pseudo_label=None if views_failed else _label_brought_back(maps["label"], size),
            losses=tuple(losses),
            notes=notes,
        )

    def _unadapted(self, image: Tensor) -> tuple[Tensor, tuple[str, ...]]:
        """Return the logits where there is nothing to fit: the weights stay as they are.

        The released code goes through its steps all the same, so that statistics follow the image.
        """
        with lent(self.model), self._lent_san():
            network = self._episode()
            with self._loop_statistics():
                for _ in range(self._num_steps):
                    network.logits(image)
            logits = network.logits(image)
        note = "no pixel is sure enough for a pseudo-label: this is a prediction without adaptation"
        return self._sound(image, logits)[0], (note,)

    def _segment(self, image: Tensor, size: Size) -> Result:
        self._num_steps = self.steps
        if self._pace is None:
            return super()._segment(image, size)
        measure = partial(self._seconds, image, size)
        watcher, self.on_step = self.on_step, None  # measuring takes steps as well
        try:
            self._num_steps = self._pace.steps(self.steps, image[0].numel(), measure)
        finally:
            self.on_step = watcher
        result = super()._segment(image, size)
        if self._num_steps == self.steps:
            return result
        note = f"{self._num_steps} of {self.steps} steps fit into {self.budget_ms:g} ms"
        return replace(result, notes=(*result.notes, note))

    def _seconds(self, image: Tensor, size: Size, steps: int) -> float:
        """Return how long it takes with so many steps, once it has been prepared."""
        self._num_steps = steps
        for _ in range(RECORD_AT + 1 if image.is_cuda else 2):
            start = time.perf_counter()
            super()._segment(image, size)
            if image.is_cuda:
                torch.cuda.synchronize(image.device)
        return time.perf_counter() - start


def _trouble(views_failed: bool, losses: Sequence[float]) -> str | None:
    """Say what makes the adaptation worthless, if anything."""
    if views_failed:
        return "the views' predictions are not finite"
    if not all(map(isfinite, losses)):
        return DIVERGED
    return None


def _label_brought_back(label: Tensor, size: Size) -> Tensor:
    if size_of(label) == size:
        return label.clone()
    return F.interpolate(label[None, None].float(), size, mode="nearest-exact")[0, 0].long()
