"""Self-adaptation: the paper's method, one image at a time.

    views        the image at several scales, plain and flipped in gray        views.py
    pseudo-label the views' mean prediction, where it is sure                  pseudo.py
    steps        gradient descent on the cross-entropy to the pseudo-label     engine/network.py
    prediction   one forward pass with the tuned weights, which are dropped
    SaN          in every forward pass, BatchNorm mixes in the image           norm.py

The paper leaves open which statistics BatchNorm uses inside the loop. Both answers are here by
name: ``paper`` takes SaN with alpha there as everywhere, ``official`` does what the released code
does: image statistics alone, with running statistics that follow the image from step to step.
"""

import inspect
import time
from collections.abc import Iterable, Sequence
from functools import partial
from math import inf, isfinite
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfadapt.checks import check_number
from selfadapt.engine.network import Network
from selfadapt.fast import Fast
from selfadapt.fast.graphs import RECORD_AT, Maps
from selfadapt.losses import Loss, find_loss
from selfadapt.method import DIVERGED, Method, check_steps, probs_at, resize_to
from selfadapt.models.interface import Interface
from selfadapt.modes import MODES, ModeName
from selfadapt.norm import Alpha
from selfadapt.pacing import Pace, as_tuple, with_preset
from selfadapt.pseudo import check_psi, ignore_label, pseudo_label
from selfadapt.result import Result
from selfadapt.steps import StepRule, find_step_rule, fixed_length
from selfadapt.views import SCALES, Size, View, size_of

LR = {"paper": 0.02, "official": 0.05}
"""Learning rate of each mode, chosen on the validation domain."""
STEP_LENGTH = 0.05
"""Learning rate of steps of fixed length, on networks of very different make."""
SMALL_LOSS = 0.5
"""A loss that stays below this, or below twice what it was, is none to worry about."""


class SelfAdapt(Method):
    """Adapt the network to its own pseudo-label of the image (Bahmani et al., TMLR 2023).

    Args:
        model: Any segmentation network. It is never written to.
        alpha: Weight of the image statistics in SaN, 0 to 1; or weights by name pattern.
        psi: Confidence threshold of the pseudo-label, 0 to 1.
        lr: Learning rate of the steps (eta in the paper). None: the default of mode and step rule.
        steps: Number of steps.
        loss: Name in ``LOSSES``, or a function of scores and labels. ``cross-entropy``;
            ``smoothed-cross-entropy`` has a label smoothing of 0.1.
        step: Step rule: name in ``STEP_RULES``, or a function of weights, gradients and lr.
            ``gradient-descent``; ``fixed-length``: every step has the length lr.
        scales: Scales of the views, each taken plain and flipped in gray.
        step_scale: Scale of the image that the steps are taken on, up to 1.
        final_scales: Scales of views that the adapted network predicts beside the image.
        final_weight: Weight of their mean in the prediction, 0 to 1.
        preset: Settings that go together by name: ``realtime`` does with a few smaller steps. They
            take the place of what has its default value.
        budget_ms: Milliseconds for an image: as many of the steps are taken as fit, and at least
            one plain pass. Loading it does not count, nor what a GPU prepares on the first images.
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
        loss: str | Loss = "cross-entropy",
        step: str | StepRule = "gradient-descent",
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
        find_loss(loss), find_step_rule(step)  # refuse unknown names before the network is run
        check_number("step_scale", settings["step_scale"], 0.01, 1)
        check_number("final_weight", settings["final_weight"], 0, 1)
        pace = None if budget_ms is None else Pace(budget_ms)
        super().__init__(
            model, alpha=alpha, mode=mode, max_pixels=max_pixels, compare=compare, fast=fast,
            interface=interface,
        )  # fmt: skip
        self.psi = psi
        self.loss, self.step = loss, step
        default_lr = STEP_LENGTH if find_step_rule(step) is fixed_length else LR[mode]
        self.lr = default_lr if settings["lr"] is None else settings["lr"]
        self.steps, self.step_scale = settings["steps"], settings["step_scale"]
        self.final_scales, self.final_weight = settings["final_scales"], settings["final_weight"]
        self.preset, self.budget_ms = preset, budget_ms
        self._tune(self._adapted(adapt))
        self.views = self._choose_views(settings["scales"], views)
        none = self.final_scales == ()
        self._final_views = () if none else self._usable_views(self.final_scales)
        self._num_steps, self._pace = self.steps, pace

        if pace is not None and self._device().type != "cuda":
            self._rates = self._measure_rates()  # before the clock of an image runs

    def _compute(self, image: Tensor) -> Maps:
        return self._computed(image, self._num_steps)

    def _computed(self, image: Tensor, num_steps: int, deadline: float = inf) -> Maps:
        """Adapt the network and predict.

        Args:
            image: A raw image.
            num_steps: Steps to take, at most.
            deadline: No step is begun after this time.
        """
        network = self._network(self.selection.names)
        small = image if self.step_scale == 1 else View(self.step_scale).make(image)
        fused = self._fused(network, image, self.views, size_of(small))
        ignore = ignore_label(len(fused))
        label = pseudo_label(fused, self.psi, ignore=ignore, strict=MODES[self.mode].strict)
        loss, step_rule = find_loss(self.loss), find_step_rule(self.step)
        with self._loop_statistics(network):
            step = partial(
                network.step, small, lambda logits: loss(logits, label[None]), self.lr, step_rule
            )
            losses = self._take_steps(step, num_steps, image, deadline)
        logits = self._predicted(network, image)
        unsure = (label == ignore).all()
        checks = torch.stack([fused.isnan().any(), unsure]).to(losses)
        numbers = torch.cat((checks, losses))
        return {"logits": logits, "fused": fused, "label": label, "numbers": numbers}

    def _compute_all(self, image: Tensor) -> Maps:
        if self._pace is None or image.is_cuda:
            return super()._compute_all(image)
        return self._computed_in_time(image, time.perf_counter() + self._pace.seconds)

    def _computed_in_time(self, image: Tensor, deadline: float) -> Maps:
        """Do what there is time for on a CPU, and at least one plain pass."""
        estimate = self.estimate(*size_of(image))
        plain, start, source = estimate.plain_seconds, time.perf_counter(), {}
        if self.compare:
            logits = self._source(image)
            source = {"source_logits": logits}
            plain = max(plain, time.perf_counter() - start)
        views = sum(self._area(view.scale) for view in self.views)
        last = self._final_passes() * plain
        step = estimate.step_seconds * plain / estimate.plain_seconds  # as slow as the pass was
        left = deadline - time.perf_counter()
        if left >= views * plain + last:
            return self._computed(image, self.steps, deadline - last - step) | source
        if not self.compare or left >= 0:
            logits = self._network().logits(image)
        return {"logits": logits, "numbers": logits.new_zeros(2)} | source

    def _final_passes(self) -> float:
        return 1 + sum(self._area(view.scale) for view in self._final_views)

    def _work(self) -> tuple[float, float]:
        views = sum(self._area(view.scale) for view in self.views)
        return views + self._final_passes(), self.steps * self._area(self.step_scale)

    def _predicted(self, network: Network, image: Tensor) -> Tensor:
        """Return the logits of the adapted network, averaged with its views where that is asked."""
        logits = network.logits(image)
        if not self._final_views:
            return logits
        mean = self._fused(network, image, self._final_views)[None]
        probs = logits.softmax(dim=1).lerp_(mean, self.final_weight)
        return probs.clamp_min_(1e-30).log_()

    def _conclude(self, image: Tensor, size: Size, maps: Maps) -> Result:
        views_failed, unsure, *losses = maps["numbers"].tolist()
        steps_taken, losses = len(losses), [] if unsure else losses
        if unsure and steps_taken and not views_failed:
            logits, notes = self._unadapted(image, steps_taken)
        else:
            logits, notes = self._sound(image, maps["logits"], _trouble(views_failed, losses))
        if not notes and losses and losses[-1] > max(2 * losses[0], SMALL_LOSS):
            notes = (f"the loss rose from {losses[0]:.3g} to {losses[-1]:.3g}: lower lr",)
        if steps_taken < self.steps:
            budget = f"{self.budget_ms:g} ms"
            notes += (f"{steps_taken} of {self.steps} steps fit into {budget}",)
            if "fused" not in maps:
                source = maps.get("source_logits") is maps["logits"]
                kind = "of the network as trained" if source else "with SaN"
                notes = (f"{budget} are too little to adapt: this is the prediction {kind}",)
        viewed = "fused" in maps and not views_failed
        return Result(
            probs=probs_at(logits, size),
            fused_probs=resize_to(maps["fused"], size) if viewed else None,
            pseudo_label=_resized_label(maps["label"], size) if viewed else None,
            losses=tuple(losses),
            notes=notes,
        )

    def _unadapted(self, image: Tensor, steps: int) -> tuple[Tensor, tuple[str, ...]]:
        """Return the logits where there is nothing to fit: the weights stay as they are.

        The released code goes through its steps all the same, so that statistics follow the image.
        """
        network = self._network()
        with self._loop_statistics(network):
            for _ in range(steps):
                network.logits(image)
        logits = network.logits(image)
        note = "no pixel is sure enough for a pseudo-label: this is a prediction without adaptation"
        return self._sound(image, logits)[0], (note,)

    def _segment(self, image: Tensor, size: Size) -> Result:
        if self._pace is not None and image.is_cuda:
            measure = partial(self._seconds, image, size)
            watcher, self.on_step = self.on_step, None  # measuring takes steps as well
            try:
                self._num_steps = self._pace.steps(self.steps, image[0].numel(), measure)
            finally:
                self.on_step = watcher
        return super()._segment(image, size)

    def _seconds(self, image: Tensor, size: Size, steps: int) -> float:
        """Return how long it takes with so many steps, once it has been prepared."""
        self._num_steps = steps
        for _ in range(RECORD_AT + 1):
            start = time.perf_counter()
            super()._segment(image, size)
            torch.cuda.synchronize(image.device)
        return time.perf_counter() - start


def _trouble(views_failed: bool, losses: Sequence[float]) -> str | None:
    """Say what makes the adaptation worthless, if anything."""
    if views_failed:
        return "the views' predictions are not finite"
    if not all(map(isfinite, losses)):
        return DIVERGED
    return None


def _resized_label(label: Tensor, size: Size) -> Tensor:
    if size_of(label) == size:
        return label.clone()
    return F.interpolate(label[None, None].float(), size, mode="nearest-exact")[0, 0].long()
