"""The contract every method keeps: one image in, one result out, and the network untouched.

A method is one hook, ``compute``: what it does with a network and an image. A second one,
``compute_batch``, does the same for several images at once, where that is possible. All else is the
same for every method and stands here:

    __call__    load the image, fit it into the size limit, compute, make the result
    batch       the same for images of one size                                     batches.py
    _computed   compute; where that is not finite fall back to SaN, then to the network as trained
    _result     maps at the image's own size, losses, notes
    adapt       compute, and keep the network it made for many images                  adapted.py

How the network is run, and how fast, is up to ``engine``.
"""

import inspect
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from selfadapt.auto import LOW_QUALITY
from selfadapt.batches import BatchSegmenter
from selfadapt.checks import check_number
from selfadapt.computed import (
    DIVERGED,
    VIEWS_NOT_FINITE,
    Computed,
    ComputedBatch,
    is_finite,
)
from selfadapt.cost import SAMPLE_SIZE, Estimate, Rates, check_memory, estimate, measure
from selfadapt.dropout import random_state, seeded
from selfadapt.engine import Engine, Fast, Network, as_fast, described
from selfadapt.explain import Explanation, explain
from selfadapt.images import Image, load_image
from selfadapt.models.detect import (
    Probe,
    accepted_size,
    check_model,
    detect,
    is_normalisation_known,
    record_original_runs,
    unwrapped,
)
from selfadapt.models.families import Selection, adapted_parameters
from selfadapt.models.interface import MIN_LOGIT, Interface
from selfadapt.modes import MAX_PIXELS, MODES, ModeName, check_mode, within_budget
from selfadapt.norm import Alpha, SaN, SaNReport, find_san
from selfadapt.pseudo import view_confidence
from selfadapt.result import ResizedMap, Result
from selfadapt.views import Size, View, size_of, usable_views

if TYPE_CHECKING:
    from selfadapt.adapted import Adapted

LOW_CONFIDENCE = 0.6
"""Confidence of the views' mean below which most masks of streets were poor."""
UNLIKE = (
    "this image looks unlike those the network was trained on (low confidence over its views): "
    "look at the mask before you rely on it"
)
SMALL_LOSS = 0.5
"""A loss that stays below this, or below twice its first value, gets no warning."""


class Stopped(Exception):
    """Raised by ``Method.on_step`` to stop processing an image."""


class Common(TypedDict, total=False):
    """Settings that every method takes, see ``Method``."""

    mode: ModeName
    max_pixels: int | None
    compare: bool
    fast: bool | Fast
    interface: Interface | None


class Method(BatchSegmenter):
    """Segments images, each by itself, with one network, which it never modifies.

    Args:
        model: Any segmentation network.
        alpha: Weight of the image statistics in SaN, 0 to 1; or weights by name pattern.
        mode: ``paper``: the equations as written; ``official``: size cap, resampling of views,
            thresholds and the statistics inside a loop of steps are those of the released code;
            ``auto`` differs from ``paper`` in self-adaptation only.
        max_pixels: Larger images are scaled down to this many pixels, and the result is scaled
            up again. None: 2097152 (1024 x 2048); in official mode always exactly 1024 x 2048.
        compare: Also predict with the network as trained, for before and after.
        fast: Use optimizations that keep the result; on a GPU, 16-bit arithmetic. False: none; in
            Python a ``Fast`` says which.
        interface: What the network takes and gives, where that is not detected.
    """

    is_single_network: bool = True
    """The prediction is that of one network, not a mean over several passes: ``adapt`` works."""
    selection: Selection | None = None
    """The parameters that steps change, and how they were chosen."""

    def __init__(
        self,
        model: nn.Module,
        *,
        alpha: Alpha = 0.1,
        mode: ModeName = "paper",
        max_pixels: int | None = None,
        compare: bool = True,
        fast: bool | Fast = True,
        interface: Interface | None = None,
    ) -> None:
        check_model(model)
        check_mode(mode, max_pixels)
        optimizations = as_fast(fast)
        self.model = unwrapped(model)
        self._mode: ModeName = mode
        self.max_pixels = max_pixels or MAX_PIXELS
        self.compare = compare
        self.alpha = alpha
        self._rates: Rates | None = None
        self._measured_work: tuple[float, float] | None = None
        self.interface, is_random = self._detect(interface)
        self.engine = Engine(self.model, self.interface, optimizations, is_random)
        channels = self.interface.channels or 3
        self.is_normalisation_assumed = not is_normalisation_known(self.model, interface, channels)
        self.notes = self._model_notes()

    @abstractmethod
    def compute(self, network: Network, image: Tensor) -> Computed:
        """Compute the prediction for an image.

        On a GPU this is recorded in a CUDA graph and replayed for the next image, so it must not
        wait for values, as ``.item()`` or ``if tensor`` do.

        Args:
            network: A private copy of the network for this image, with SaN in it.
            image: A raw image ``(C, H, W)``, on the network's device.
        """

    def compute_batch(self, network: Network, images: Tensor) -> Sequence[Computed]:
        """Compute the predictions for several images of one size at once.

        Each must be what ``compute`` gives for its image. A class without this hook, and one whose
        ``compute`` is not of the same class, gets one image at a time.

        Args:
            network: A private copy of the network for these images, with SaN in it.
            images: Raw images ``(B, C, H, W)``, on the network's device.
        """
        raise NotImplementedError

    @property
    def takes_batches(self) -> bool:
        """Images of one size are computed together, each with its own result."""
        hooks = ({"compute", "compute_batch"} & vars(kind).keys() for kind in type(self).__mro__)
        return "compute_batch" in next(filter(None, hooks))

    def work(self) -> tuple[float, float] | None:
        """Return the number of forward passes and steps per image, without the one to compare.

        None: not known; ``estimate`` then runs ``compute`` on the small sample.
        """
        return None

    def prediction_passes(self) -> float:
        """Return the number of forward passes for a prediction once the network is adapted."""
        return 1.0

    def topics(self) -> dict[str, str]:
        """Return what ``explain`` adds for this method, by topic."""
        return {}

    @property
    def alpha(self) -> Alpha:
        """Weight of the image statistics in SaN."""
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: Alpha) -> None:
        self.san = find_san(self.model, alpha)
        self._alpha = alpha

    @property
    def mode(self) -> ModeName:
        """Name in ``MODES``. Read-only, as the defaults of other settings depend on it."""
        return self._mode

    @property
    def fast(self) -> Fast:
        """The optimizations that run where a device supports them."""
        return self.engine.fast

    @property
    def on_step(self) -> Callable[[int, float], None] | None:
        """Called after each gradient step with its number, from 1, and the loss before it.

        Raise ``Stopped`` in it to stop. Where an optimization fails, steps start again from 1.
        """
        return self.engine.on_step

    @on_step.setter
    def on_step(self, on_step: Callable[[int, float], None] | None) -> None:
        self.engine.on_step = on_step

    def __repr__(self) -> str:
        names = (*inspect.signature(type(self)).parameters, "mode", "max_pixels")
        hidden = ("model", "views", "interface", "adapt")
        shown = [n for n in names if hasattr(self, n) and n not in hidden]
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in dict.fromkeys(shown))
        text = f"{type(self).__name__}({type(self.model).__name__}, {settings})"
        if views := getattr(self, "views", None):
            text += f"\n  views: {', '.join(map(str, views))}"
        if self.selection is not None:
            text += f"\n  layers: {self.selection.reason}"
        text += f"\n  normalisation: {self.san}"
        channels, mean, std = self.interface.channels, self.interface.mean, self.interface.std
        return f"{text}\n  input: {channels} channels, mean {mean}, std {std}"

    def __call__(self, image: Image, *, normalized: bool = False) -> Result:
        """Segment ``image``.

        Args:
            image: A path, a PIL image, an array ``(H, W, C)`` or a tensor ``(C, H, W)``, raw.
            normalized: ``image`` is a float tensor with the network's normalisation applied.

        Returns:
            Probabilities at the image's own size, and how they came about.
        """
        return self._segment(image, normalized, self._computed)

    def adapt(self, image: Image, *, normalized: bool = False) -> "Adapted":
        """Return the network adapted to ``image``, to be used for many images.

        Args:
            image: As for a call.
            normalized: As for a call.

        Raises:
            ValueError: The method changes nothing in the network, its prediction is a mean over
                several, or the adaptation failed.

        Example:
            >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
            >>> from selfadapt import SelfAdapt
            >>> adapted = SelfAdapt(model, steps=1).adapt(torch.rand(3, 32, 48))
            >>> tuple(adapted(torch.rand(3, 20, 20)).label.shape)  # without further steps
            (20, 20)
            >>> tuple(adapted.module(torch.rand(8, 3, 16, 16)).shape)  # in the place of model
            (8, 2, 16, 16)
        """
        from selfadapt.adapted import adapt  # which builds on this module

        return adapt(self, image, normalized)

    def _segment(
        self, image: Image, normalized: bool, computed: Callable[[Tensor, Size], Computed]
    ) -> Result:
        """Load an image, and make a result of what ``computed`` returns for it and its size."""
        start = time.perf_counter()
        with torch.inference_mode(False), torch.no_grad():
            whole = self._load(image, normalized)
            scaled = within_budget(whole, self.mode, self.max_pixels)
            check_memory(scaled, self.estimate, self.max_pixels)
            result = self._result(computed(scaled, size_of(whole)), size_of(whole))
            if whole.is_cuda:
                torch.cuda.synchronize(whole.device)
        seconds = time.perf_counter() - start
        return self._described(result, None if normalized else image, seconds, whole, scaled)

    def _described(
        self, result: Result, image: Image | None, seconds: float, whole: Tensor, scaled: Tensor
    ) -> Result:
        """Add to a result what does not depend on its maps."""
        notes = self.notes + self.engine.notes + result.notes
        if size_of(scaled) != size_of(whole):
            notes += (f"segmented at {_text(scaled)}, the image is {_text(whole)}",)
        classes = getattr(getattr(self.model, "spec", None), "classes", None)
        return result._replace(seconds=seconds, notes=notes, image=image, classes=classes)

    def batch(
        self, images: Sequence[Image], *, normalized: bool = False
    ) -> list[Result | Exception]:
        """Segment images of one size at once; return an error in the place of a failed result.

        The ``seconds`` of a result are the time of the batch, divided by its images.
        """
        outcomes: list[Result | Exception] = []
        while left := images[len(outcomes) :]:
            part = left[: self._max_batch()]
            if len(part) > 1:
                outcomes += self._segment_batch(part, normalized)
            else:
                outcomes.append(self._outcome(part[0], normalized))
        return outcomes

    def _segment_batch(
        self, images: Sequence[Image], normalized: bool
    ) -> Sequence[Result | Exception]:
        """Return results or errors; none if fewer images have to be taken at a time."""
        start = time.perf_counter()

        def cost_of(height: int, width: int) -> Estimate:
            single = self.estimate(height, width)
            return replace(single, num_bytes=len(images) * single.num_bytes)

        with torch.inference_mode(False), torch.no_grad():
            try:
                whole = [self._load(image, normalized) for image in images]
            except Exception:  # of one of them
                return [self._outcome(image, normalized) for image in images]
            scaled = torch.stack([within_budget(w, self.mode, self.max_pixels) for w in whole])
            try:
                check_memory(scaled[0], cost_of, self.max_pixels)
            except ValueError:
                reason = f"there is not enough memory for {len(images)}"
                self.engine.limit_batch(len(images) // 2, reason)
                return ()
            size, variant = size_of(whole[0]), ("batch", self._variant())
            batch = self.engine.run_batch(self._compute_all_batch, scaled, size, variant)
            if batch is None:
                return ()
            outcomes: list[Result | Exception] = []
            for image, computed in zip(scaled, batch.images, strict=True):
                source = computed.source_logits, computed.source_probs
                try:
                    if computed.trouble() is not None or not is_finite(*source):
                        computed = self._computed(image, size)
                    outcomes.append(self._result(computed, size))
                except Exception as error:
                    outcomes.append(error)
            if scaled.is_cuda:
                torch.cuda.synchronize(scaled.device)
        seconds = (time.perf_counter() - start) / len(images)
        return [
            self._described(outcome, None if normalized else image, seconds, whole[0], scaled)
            if isinstance(outcome, Result)
            else outcome
            for image, outcome in zip(images, outcomes, strict=True)
        ]

    def _max_batch(self) -> int:
        """Return how many images may be computed at once."""
        engine = self.engine
        if not self.takes_batches or engine.is_random:
            return 1
        if engine.max_batch is None:  # try whether the network keeps the images apart
            engine.max_batch = sys.maxsize
            shape = 3, self.interface.channels or 3, *accepted_size(self.interface)
            noise = torch.rand(shape, generator=torch.Generator().manual_seed(0))
            noise[2] *= 0.3
            with torch.inference_mode(False), torch.no_grad():
                images = torch.stack([self._load(image, normalized=False) for image in noise])
                try:
                    network = Network(self.model, self.interface, self.san)
                    first, second = (network.probs(images[[0, beside]]) for beside in (1, 2))
                    if len(first) != 2 or not torch.allclose(first[0], second[0], atol=1e-4):
                        engine.limit_batch(1, "the network mixes the images of a batch")
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # networks raise many kinds of errors
                    engine.limit_batch(1, f"the network takes one only ({described(error)})")
        return engine.max_batch

    def estimate(self, height: int, width: int) -> Estimate:
        """Estimate the time and memory of an image of this size on a CPU.

        The first call runs the network on a small piece of noise.
        """
        with torch.inference_mode(False), torch.no_grad(), seeded(0, self.engine.device):
            if self._rates is None:
                make = partial(self.engine.network, self.san, self._tuned)
                self._rates = measure(make, self._noise())
            work = self.work()
            if work is None:
                work = self._measured_work = self._measured_work or self._measure_work()
        fixed = self.interface.size
        pixels = min(height * width, self.max_pixels) if fixed is None else fixed[0] * fixed[1]
        passes, steps = work
        return estimate(self._rates, pixels, passes + self.compare, steps)

    def _noise(self) -> Tensor:
        size = accepted_size(self.interface, SAMPLE_SIZE)
        return self._load(torch.rand(self.interface.channels or 3, *size), normalized=False)

    def _measure_work(self) -> tuple[float, float]:
        """Return the time of ``compute`` on a small piece of noise in forward passes."""
        noise, rates = self._noise(), self._rates
        assert rates is not None
        start = time.perf_counter()
        self.compute(self.engine.network(self.san, self._tuned), noise)  # without on_step
        return (time.perf_counter() - start) / (rates.forward * noise[0].numel()), 0.0

    def explain(self) -> Explanation:
        """Return the decisions made for this network and device, and why; ``print`` shows them."""
        return explain(self)

    # from image to result

    def _computed(self, image: Tensor, size: Size) -> Computed:
        """Compute; where that is not finite, fall back to SaN, then to the network as trained."""
        computed = self.engine.run(self._compute_all, image, size, self._variant())
        trouble = computed.trouble()
        is_source_finite = is_finite(computed.source_logits, computed.source_probs)
        overflows = trouble not in (None, DIVERGED) or not is_source_finite
        if overflows and self.engine.avoid_fp16():
            computed = self.engine.run(self._compute_all, image, size, self._variant())
            trouble = computed.trouble()
        if trouble is None:
            return computed
        fused = None if trouble == VIEWS_NOT_FINITE else computed.fused
        label = None if trouble == VIEWS_NOT_FINITE else computed.pseudo_label
        fall_backs = (
            (self._network, "this is the prediction with SaN, without adaptation"),
            (self._source_network, "this is the prediction of the network as trained"),
        )
        for make, note in fall_backs:
            plain = self.engine.run(partial(_predict, make), image, size, (note, self._variant()))
            if is_finite(plain.logits, plain.probs):
                return replace(
                    computed, logits=plain.logits, probs=plain.probs, fused=fused,
                    pseudo_label=label, quality=None, notes=(f"{trouble}: {note}",), warnings={},
                )  # fmt: skip
            trouble += ", and SaN's prediction is not finite"
        raise ValueError("the network's own prediction for this image is not finite")

    def _compute_all(self, image: Tensor, network: Network | None = None) -> Computed:
        """Compute, and add the prediction as trained, if wanted. A network given may be kept."""
        source = self._source_network().logits(image) if self.compare else None
        computed = self.compute(network or self._network(), image)
        if not isinstance(computed, Computed):
            name = f"{type(self).__name__}.compute"
            raise TypeError(f"{name} must return a Computed, got {type(computed).__name__}")
        return replace(computed, source_logits=source)

    def _compute_all_batch(self, images: Tensor) -> ComputedBatch:
        """Compute several images, and add the predictions as trained, if wanted."""
        source = self._source_network().logits(images) if self.compare else None
        batch = self.compute_batch(self._network(), images)
        if source is not None:
            pairs = zip(batch, source.split(1), strict=True)
            batch = [replace(computed, source_logits=logits) for computed, logits in pairs]
        return ComputedBatch(batch)

    def _result(self, computed: Computed, size: Size) -> Result:
        """Make a result of the given size."""
        losses = (
            torch.cat([loss.reshape(1) for loss in computed.losses]).tolist()
            if computed.losses
            else []
        )
        notes = [*computed.notes, *(n for n, applies in computed.warnings.items() if bool(applies))]
        if not notes and losses and losses[-1] > max(2 * losses[0], SMALL_LOSS):
            notes.append(f"the loss rose from {losses[0]:.3g} to {losses[-1]:.3g}: lower lr")
        fused, label = computed.fused, computed.pseudo_label
        source = computed.source_logits, computed.source_probs
        has_source = any(values is not None for values in source)
        quality = None if computed.quality is None else float(computed.quality)
        is_doubtful = fused is not None and bool(view_confidence(fused) < LOW_CONFIDENCE)
        if is_doubtful or (quality is not None and quality < LOW_QUALITY):
            notes.insert(0, UNLIKE)
        if has_source and not is_finite(*source):
            notes.append("the source network's prediction is not finite")
            has_source = False
        if label is not None and size_of(label) != size:
            maps = label[None, None].float()
            label = nn.functional.interpolate(maps, size, mode="nearest-exact")[0, 0].long()
        return Result(
            probs=_probs_at(computed.logits, computed.probs, size),
            source_probs=_probs_at(*source, size) if has_source else None,
            fused_probs=None if fused is None else _probs_at(None, fused, size),
            pseudo_label=label,
            losses=tuple(losses),
            quality=quality,
            notes=tuple(notes),
        )

    def _load(self, image: Image, normalized: bool) -> Tensor:
        weights = (p for p in self.model.parameters() if p.is_floating_point())
        weight = next(weights, torch.empty(0))
        channels = self.interface.channels or 3
        loaded = load_image(image, channels, normalized=normalized, device=weight.device)
        loaded = loaded.to(torch.promote_types(weight.dtype, torch.float32))
        return self.interface.denormalize(loaded) if normalized else loaded

    def _predict(self, network: Network, image: Tensor, share: float = 1.0) -> Tensor:
        """Return class scores of a network that is not changed any more.

        Args:
            network: The network.
            image: A raw image.
            share: Weight of its tuned weights; the rest is as trained.
        """
        return network.logits(image)

    def _variant(self) -> Hashable:
        """Return a key of everything but the image that a computation depends on: all settings."""
        hidden = ("notes", "_rates", "_measured_work", "engine", "model", "interface", "result")
        return tuple(_hashable(value) for name, value in vars(self).items() if name not in hidden)

    @property
    def _tuned(self) -> tuple[str, ...]:
        return () if self.selection is None else self.selection.names

    def _network(self) -> Network:
        """Return a private copy of the network, with SaN, and weights to tune."""
        return self.engine.network(self.san, self._tuned, self.on_step)

    def _source_network(self) -> Network:
        """Return a private copy of the network as trained."""
        modules = self.model.named_modules()
        alphas = {name: 0.0 for name, module in modules if isinstance(module, SaN)}
        if self.engine.plan().runs("kernels"):  # SaN with alpha 0 is BatchNorm, in fewer passes
            alphas |= dict.fromkeys(self.san.converted, 0.0)
        return self.engine.network(SaNReport(alphas))

    def _loop_statistics(self, network: Network) -> AbstractContextManager[None]:
        """Set the statistics BatchNorm uses in a loop of steps, as the mode has them."""
        momentum = MODES[self.mode].momentum
        return nullcontext() if momentum is None else network.image_statistics(momentum)

    # for subclasses

    def _detect(self, given: Interface | None) -> tuple[Interface, bool]:
        """Detect the network's interface, and whether it draws random numbers in evaluation."""
        device = next(self.model.parameters(), torch.empty(0)).device
        with seeded(0, device), record_original_runs(self.model) as runs:
            before = random_state(device)
            interface = detect(self.model, given)
            Probe(self.model).scores(interface, accepted_size(interface))
            is_random = not torch.equal(before, random_state(device))
        if runs:
            raise TypeError(
                "adaptation works on a copy of the network, and a copy of this one runs layers of "
                f"the original ({type(runs[0]).__name__}): some function refers to the network "
                "from outside; make it a method of the network"
            )
        return interface, is_random

    def _choose_views(
        self, scales: Sequence[float], views: Iterable[View] | None = None
    ) -> tuple[View, ...]:
        """Return the views that the network and the mode can use."""
        return usable_views(scales, views, MODES[self.mode].view, self.interface.channels)

    def _note_gray(self) -> None:
        """Add a note if no view can be turned gray."""
        if self.interface.channels != 3:
            self.notes += (f"input channels: {self.interface.channels}, so no view is turned gray",)

    def _select(self, selection: Selection) -> None:
        """Set the parameters that steps change; add a note where they are a guess."""
        self.selection = selection
        self.notes += selection.notes

    def _select_layers(self, adapt: Sequence[str] | None) -> None:
        """Set the layers that steps change: those that ``adapt`` names, or the default."""
        with seeded(0, self.engine.device):
            selection = adapted_parameters(
                self.model, adapt, released=self.mode == "official",
                used=lambda: Probe(self.model).used_parameters(self.interface),
            )  # fmt: skip
        self._select(selection)

    def _area(self, views: Iterable[View]) -> float:
        """Return the cost of views in forward passes at full size."""
        if self.interface.size is not None:
            return float(len(list(views)))
        return sum(min(1.0, view.scale**2) for view in views)

    def _model_notes(self) -> tuple[str, ...]:
        notes = []
        if self.is_normalisation_assumed:
            is_rgb = (self.interface.channels or 3) == 3
            assumed = "ImageNet's mean and std are" if is_rgb else "no normalisation is"
            notes.append(
                f"nothing says how this network's input is normalised, {assumed} assumed; give it "
                "with --mean and --std, in Python interface=Interface(mean=..., std=...)"
            )
        if not self.san.converted and self.alpha != 0:
            notes.append(str(self.san))
        if self.engine.is_random:
            notes.append(
                "the network draws random numbers: they start from the same seed for each image"
            )
        if self.interface.size is not None:
            height, width = self.interface.size
            notes.append(f"the network takes {width}x{height} pixels only: images are resized")
        return tuple(notes)


def check_steps(steps: int, lr: float) -> None:
    """Raise ValueError for an invalid number of steps or learning rate."""
    check_number("steps", steps, 0, whole=True)
    if isinstance(lr, bool) or not isinstance(lr, Real) or not 0 < lr < float("inf"):
        raise ValueError(f"lr must be a positive number, got {lr!r}")


def _probs_at(logits: Tensor | None, probs: Tensor | None, size: Size) -> Tensor | ResizedMap:
    """Return class probabilities at a size, from scores ``(1, C, h, w)`` or from probabilities."""
    if logits is None:
        assert probs is not None
        return probs if size_of(probs) == size else ResizedMap(probs, size, scores=False)
    if size_of(logits) == size:
        return logits[0].softmax(dim=0)
    return ResizedMap(logits[0].clamp_min(MIN_LOGIT), size, scores=True)


def _predict(make: Callable[[], Network], image: Tensor) -> Computed:
    return Computed(logits=make().logits(image))


class _ById:
    """Key for an object that cannot be hashed: compares by identity, and keeps the object alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _hashable(value: Any) -> Hashable:
    """Return a hashable key that is equal for values of the same content."""
    if isinstance(value, Mapping):
        return type(value), tuple((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_hashable, value))
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple(_hashable(getattr(value, f.name)) for f in fields(value))
    try:
        hash(value)
    except TypeError:
        return _ById(value)
    return value


def _text(image: Tensor) -> str:
    return f"{image.shape[-1]}x{image.shape[-2]}"
