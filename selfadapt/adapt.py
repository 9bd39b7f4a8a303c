"""Self-adaptation: the paper's method, one image at a time.

    views        the image at several scales, plain and flipped in gray        views.py
    pseudo-label the views' mean prediction, where it is confident             pseudo.py
    steps        gradient descent on the cross-entropy to the pseudo-label     engine/network.py
    prediction   one forward pass with the tuned weights, which are dropped
    SaN          in every forward pass, BatchNorm mixes in the image           norm.py

The paper leaves open which statistics BatchNorm uses inside the loop. The mode decides: ``paper``
uses SaN with alpha there as everywhere; ``official`` does what the released code does: image
statistics alone, with running statistics that follow the image from step to step. ``auto`` is
``paper`` with another loss and other steps, and adapts only where that helps (auto.py).
"""

import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from selfadapt.adapted import Adapted, AdaptError
from selfadapt.auto import (
    StatisticsShift,
    adapted_share,
    expected_confidence,
    quality,
    sampled,
    san_share,
    temperature,
)
from selfadapt.budget import TimeBudget, as_tuple, with_preset
from selfadapt.checks import check_number
from selfadapt.computed import Computed
from selfadapt.engine import RECORD_AT, Fast, Network
from selfadapt.images import Image
from selfadapt.losses import FUSED, Loss, find_loss
from selfadapt.method import Method, check_steps
from selfadapt.models.interface import Interface
from selfadapt.modes import MODES, ModeName, check_mode
from selfadapt.norm import Alpha
from selfadapt.pseudo import check_psi, ignore_label, pseudo_label
from selfadapt.steps import StepRule, find_step_rule, fixed_length
from selfadapt.views import SCALES, Size, View, resize, size_of

PATH_LENGTH = 0.4
"""Default length of all steps of fixed length together, the same for all architectures."""
NO_PIXEL = (
    "no pixel is confident enough for a pseudo-label: the network was not adapted to this image"
)
NOT_NEEDED = (
    "smaller views of the image show the network nothing that it does not see in the image: it was "
    "not adapted"
)


class SourcePrediction(NamedTuple):
    """What the network as trained gives for an image."""

    logits: Tensor
    """Class scores ``(1, C, H, W)``."""
    shift: Tensor | None
    """How far the image's statistics are from those of the training data, see auto.py."""


class SelfAdapt(Method):
    """Adapt the network to its own pseudo-label of the image (Bahmani et al., TMLR 2023).

    Args:
        model: Any segmentation network. It is never modified.
        alpha: Weight of the image statistics in SaN, 0 to 1; or weights by name pattern.
        psi: Confidence threshold of the pseudo-label, 0 to 1.
        lr: Learning rate of the steps (eta in the paper). None: 0.4 / steps for steps of fixed
            length, in official mode 0.05, else 0.02.
        steps: Number of steps. None: 5 in auto mode, else 10.
        loss: Name in ``LOSSES``, or a function of scores and labels. None: the mode's.
            ``cross-entropy``; ``smoothed-cross-entropy`` has a label smoothing of 0.1;
            ``balanced-cross-entropy`` has it, too, and lets rare classes count for more.
        step: Step rule: name in ``STEP_RULES``, or a function of weights, gradients and lr. None:
            the mode's. ``gradient-descent``; ``fixed-length``: every step has the length lr.
        scales: Scales of the views, each taken plain and flipped in gray.
        step_scale: Scale of the image that the steps are taken on, up to 1.
        final_scales: Scales of views that the adapted network also predicts, to be averaged with
            its prediction for the image. None: the mode's.
        final_weight: Weight of the mean over these views in the prediction, 0 to 1.
        preset: Name of a set of settings: ``cpu`` takes three steps on a smaller image, with fewer
            views; ``realtime`` also scales images of more than 800000 pixels down. They replace
            default values; a setting given beside it that differs is an error.
        budget_ms: Time limit for an image in milliseconds: as many of ``steps`` are taken as fit,
            and at least one forward pass. Loading the image is not included, nor compilation on a
            GPU for the first images.
        adapt: Name patterns of the layers to adapt. None: the network's default.
        mode: ``auto``: ``balanced-cross-entropy`` and steps of ``fixed-length``, adapts where the
            image is unlike the training data, with calibrated probabilities and an estimate of the
            quality; ``paper``: the equations as written; ``official``: the released code, to the
            number.
        views: Views to take instead of those that ``scales`` gives.
        max_pixels: Larger images are scaled down to this many pixels, and the result is scaled
            up again. None: 2097152 (1024 x 2048); in official mode always exactly 1024 x 2048.
        compare: Also predict with the network as trained, for before and after.
        fast: Use optimizations that keep the result; on a GPU, 16-bit arithmetic. False: none; in
            Python a ``Fast`` says which.
        interface: What the network takes and gives, where that is not detected.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
        >>> method = SelfAdapt(model, steps=2, mode="paper")
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
        steps: int | None = None,
        loss: str | Loss | None = None,
        step: str | StepRule | None = None,
        scales: Sequence[float] = SCALES,
        step_scale: float = 1.0,
        final_scales: Sequence[float] | None = None,
        final_weight: float = 0.5,
        preset: Literal["cpu", "realtime"] | None = None,
        budget_ms: float | None = None,
        adapt: Sequence[str] | None = None,
        mode: ModeName = "auto",
        views: Iterable[View] | None = None,
        max_pixels: int | None = None,
        compare: bool = True,
        fast: bool | Fast = True,
        interface: Interface | None = None,
    ) -> None:
        scales, final_scales = as_tuple(scales), as_tuple(final_scales)
        given = {
            "mode": mode, "scales": scales, "steps": steps, "lr": lr, "step_scale": step_scale,
            "final_scales": final_scales, "final_weight": final_weight, "max_pixels": max_pixels,
        }  # fmt: skip
        settings = with_preset(preset, given, inspect.signature(SelfAdapt).parameters)
        check_psi(psi)
        check_mode(mode, settings["max_pixels"])
        steps = MODES[settings["mode"]].steps if settings["steps"] is None else settings["steps"]
        check_steps(steps, 1.0 if settings["lr"] is None else settings["lr"])
        loss = MODES[settings["mode"]].loss if loss is None else loss
        step = MODES[settings["mode"]].step if step is None else step
        find_loss(loss), find_step_rule(step)  # refuse unknown names before the network is run
        check_number("step_scale", settings["step_scale"], 0.01, 1)
        check_number("final_weight", settings["final_weight"], 0, 1)
        budget = None if budget_ms is None else TimeBudget(budget_ms)
        super().__init__(
            model, alpha=alpha, mode=settings["mode"], max_pixels=settings["max_pixels"],
            compare=compare, fast=fast, interface=interface,
        )  # fmt: skip
        self.psi = psi
        self.loss, self.step = loss, step
        is_fixed = find_step_rule(step) is fixed_length
        default_lr = PATH_LENGTH / max(steps, 1) if is_fixed else MODES[self.mode].lr
        self.lr = default_lr if settings["lr"] is None else settings["lr"]
        self.steps, self.step_scale = steps, settings["step_scale"]
        final_scales = settings["final_scales"]
        self.final_scales = MODES[self.mode].final_scales if final_scales is None else final_scales
        self.final_weight = settings["final_weight"]
        self.preset, self.budget_ms = preset, budget_ms
        self._select_layers(adapt)
        self.views = self._choose_views(settings["scales"], views)
        self._note_gray()
        self._final_views = self._choose_views(self.final_scales) if self.final_scales else ()
        self._budget = budget
        self._num_steps: int | None = None  # that fit into the budget on a GPU
        if budget is not None and self.engine.device.type != "cuda":
            self.estimate(1, 1)  # measures, before the clock of an image runs

    def compute(self, network: Network, image: Tensor) -> Computed:
        """Adapt the network to its pseudo-label of the image, and predict."""
        if self.mode == "auto":
            return self._compute_auto(network, image, self._source(image))
        small = self._step_image(image)
        fused = network.mean_probs(image, self.views, size_of(small))  # Eq. 1
        target = pseudo_label(
            fused, self.psi, ignore=ignore_label(len(fused)), strict=MODES[self.mode].strict
        )  # Eq. 2-4
        losses, warnings = self._take_steps(network, small, target, ignore_label(len(fused)))
        return Computed(
            logits=self._predict(network, image),
            fused=fused,
            pseudo_label=target,
            losses=losses,
            warnings=warnings,
            notes=self._steps_note(len(losses)),
        )

    def _compute_auto(self, network: Network, image: Tensor, source: SourcePrediction) -> Computed:
        """Compute the same in ``auto`` mode, which adapts as far as that is worth it."""
        small = self._step_image(image)
        size = size_of(small)
        san = network.logits(image).softmax(dim=1)[0]
        whole = resize(san, size).argmax(dim=0)
        plain, kept_san = san, None
        if source.shift is not None:
            kept_san = san_share(source.shift).to(san.dtype)
            plain = source.logits.softmax(dim=1)[0].lerp_(san, kept_san)
        del san  # a large map
        labels, samples, total = [], [], None
        for scale in sorted({view.scale for view in self.views}):
            views = [view for view in self.views if view.scale == scale]
            probs = network.mean_probs(image, views, size)
            labels.append(probs.argmax(dim=0))
            samples.append(sampled(probs, size))
            total = probs * len(views) if total is None else total.add_(probs, alpha=len(views))
        assert total is not None
        fused = total.div_(len(self.views))  # Eq. 1
        num_classes = len(fused)
        share = torch.ones((), device=image.device, dtype=fused.dtype)
        if len(labels) > 1:
            share = adapted_share(labels[0], labels[1], whole, num_classes)
        ignore = ignore_label(num_classes)
        target = pseudo_label(fused, self.psi, ignore=ignore)  # Eq. 2-4
        weight = share if kept_san is None else torch.maximum(share, kept_san)
        expected = expected_confidence(sampled(plain, size), samples[:2][-1], weight)
        estimate = quality(plain, fused)
        losses: list[Tensor] = []
        warnings = {NOT_NEEDED: share == 0}
        is_needed = image.is_cuda or bool(share > 0)  # a recording cannot branch
        if is_needed:
            losses, more = self._take_steps(network, small, target, ignore)
            warnings |= more
        if losses:
            adapted = self._predict(network, image).softmax(dim=1)[0]
            plain.lerp_(adapted, share.to(plain.dtype))
        scores = plain.log_()
        divisor = temperature(scores, expected)
        return Computed(
            logits=scores.div_(divisor)[None],
            fused=fused,
            pseudo_label=target,
            losses=losses,
            warnings=warnings,
            notes=self._steps_note(len(losses)) if is_needed else (),
            quality=estimate,
            adapted_share=share if losses else torch.zeros_like(share),
            san_share=kept_san,
            temperature=divisor,
        )

    def _source(self, image: Tensor) -> SourcePrediction:
        """Return what the network as trained predicts, and how far the image's statistics are."""
        network = self._source_network()
        with StatisticsShift(network.model, self.san.converted) as shift:
            logits = network.logits(image)
        return SourcePrediction(logits, shift.value)

    def _step_image(self, image: Tensor) -> Tensor:
        return image if self.step_scale == 1 else View(self.step_scale).make(image)

    def _take_steps(
        self, network: Network, image: Tensor, target: Tensor, ignore: int
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Take steps towards the pseudo-label; return the loss before each, and warnings."""
        is_empty = (target == ignore).all()
        loss, rule = self._loss_for(target, is_empty), find_step_rule(self.step)
        losses: list[Tensor] = []
        with self._loop_statistics(network):
            for _ in range(self.steps if self._num_steps is None else self._num_steps):
                if network.deadline < inf and time.perf_counter() > network.deadline:
                    break
                losses.append(network.step(image, loss, self.lr, rule))
        losses = [value.masked_fill(is_empty, 0.0) for value in losses]
        return losses, {NO_PIXEL: is_empty} if losses else {}

    def _predict(self, network: Network, image: Tensor, share: float = 1.0) -> Tensor:
        """Return class scores of the adapted network, averaged with those of its final views."""
        logits = network.logits(image)
        if self._final_views and share > 0:
            mean = network.mean_probs(image, self._final_views)[None]
            logits = logits.softmax(dim=1).lerp_(mean, share * self.final_weight).log_()
        return logits

    def _loss_for(self, target: Tensor, is_empty: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the loss of logits; its gradient is zero if no pixel has a label."""
        loss = find_loss(self.loss)
        if isinstance(loss, FUSED):  # its gradient is zero then
            return lambda logits: loss(logits, target[None])
        return lambda logits: loss(torch.where(is_empty, logits.detach(), logits), target[None])

    def _steps_note(self, num_steps: int) -> tuple[str, ...]:
        if self._budget is None or num_steps == self.steps:
            return ()
        return (f"{num_steps} of {self.steps} steps fit into {self.budget_ms:g} ms",)

    def topics(self) -> dict[str, str]:
        """Return what ``explain`` adds for this method, by topic."""
        loss, rule = find_loss(self.loss), find_step_rule(self.step)
        cost = "on scores at full size"
        if self.engine.plan().runs("kernels"):
            is_fused = isinstance(loss, FUSED)
            cost = (
                "computed before scores are upsampled"
                if is_fused
                else ("on scores at full size: it has no fused kernel, which costs time and memory")
            )
        name = self.loss if isinstance(self.loss, str) else repr(loss)
        step = self.step if isinstance(self.step, str) else getattr(rule, "__name__", repr(rule))
        return {"loss": f"{name}, {cost}", "step": step}

    def work(self) -> tuple[float, float]:
        """Return the number of forward passes and steps per image, without the one to compare."""
        steps = self.steps * self._area([View(self.step_scale)])
        passes = self._area(self.views) + self.prediction_passes()
        if self.mode == "auto":  # with SaN, and as trained
            passes += 2 - self.compare
        return passes, steps

    def prediction_passes(self) -> float:
        """Return the number of forward passes for a prediction once the network is adapted."""
        return 1 + self._area(self._final_views)

    def adapt(self, image: Image, *, normalized: bool = False) -> Adapted:
        """Return the network adapted to ``image``, see ``Method.adapt``."""
        if self._budget is not None:
            raise AdaptError("adapt takes all steps, whatever their time: leave out budget_ms")
        return super().adapt(image, normalized=normalized)

    # within a budget

    def _compute_all(self, image: Tensor, network: Network | None = None) -> Computed:
        if self._budget is not None and not image.is_cuda:
            return self._compute_in_time(image, time.perf_counter() + self._budget.seconds)
        if self.mode != "auto":
            return super()._compute_all(image, network)
        source = self._source(image)
        computed = self._compute_auto(network or self._network(), image, source)
        return replace(computed, source_logits=source.logits if self.compare else None)

    def _compute_in_time(self, image: Tensor, deadline: float) -> Computed:
        """Take as many steps as there is time for on a CPU, and at least one forward pass."""
        estimate = self.estimate(*size_of(image))
        plain, start, source = estimate.plain_seconds, time.perf_counter(), None
        is_auto = self.mode == "auto"
        if self.compare or is_auto:
            source = self._source(image)
            plain = max(plain, time.perf_counter() - start)
        last = self.prediction_passes() * plain
        step = estimate.step_seconds * plain / estimate.plain_seconds  # as slow as the pass was
        left = deadline - time.perf_counter()
        if left >= (self._area(self.views) + is_auto) * plain + last:
            network = self._network()
            network.deadline = deadline - last - step
            if source is not None and is_auto:
                computed = self._compute_auto(network, image, source)
            else:
                computed = self.compute(network, image)
        else:
            kind = "with SaN"
            if source is not None and left < 0:
                logits, kind = source.logits, "of the network as trained"
            else:
                logits = self._network().logits(image)
            note = f"{self.budget_ms:g} ms are too little to adapt: this is the prediction {kind}"
            computed = Computed(logits=logits, notes=(note,))
        shown = source.logits if source is not None and self.compare else None
        return replace(computed, source_logits=shown)

    def _computed(self, image: Tensor, size: Size) -> Computed:
        if self._budget is not None and image.is_cuda:
            measure = partial(self._seconds, image, size)
            on_step = self.on_step
            if on_step is not None:  # steps of the measurement are not reported, but take as long
                self.on_step = lambda number, loss: None
            try:
                self._num_steps = self._budget.steps(self.steps, image[0].numel(), measure)
            finally:
                self.on_step = on_step
        return super()._computed(image, size)

    def _seconds(self, image: Tensor, size: Size, steps: int) -> float:
        """Measure the time with ``steps`` steps on a GPU, after compilation and recording."""
        self._num_steps = steps
        for _ in range(RECORD_AT + 1):
            start = time.perf_counter()
            super()._computed(image, size)
            torch.cuda.synchronize(image.device)
        return time.perf_counter() - start
