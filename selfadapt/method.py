"""The contract every method keeps: one image in, one result out, and the network untouched.

A method does in ``_compute`` what the network is needed for, and makes a result of it in
``_conclude``. All else is the same for every method and stands here: what comes in becomes a raw
tensor of a size that can be dealt with, times and notes are taken, and a prediction that is
worthless falls back to a simpler one. Each image is segmented by a private copy of the network, so
that methods of one network may be used by several threads.
"""

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from math import inf
from numbers import Real
from types import FunctionType
from typing import TypedDict

import torch
from torch import Tensor, nn

from selfadapt.checks import check_number
from selfadapt.cost import PIECE, Estimate, Rates, free_memory, measure
from selfadapt.dropout import random_state, seeded
from selfadapt.engine.network import Network
from selfadapt.fast import PLAIN, Fast
from selfadapt.fast.graphs import Graphs, Maps, has_hooks
from selfadapt.images import Image, load_image
from selfadapt.losses import CrossEntropy
from selfadapt.models.detect import (
    Probe,
    check_model,
    detect,
    is_normalisation_said,
    runs_original,
    unwrapped,
    usual_size,
)
from selfadapt.models.families import Selection, adapted_parameters
from selfadapt.models.interface import LOWEST, Interface
from selfadapt.modes import MAX_PIXELS, MODES, ModeName, check_mode, within_budget
from selfadapt.norm import Alpha, SaN, SaNReport, find_san
from selfadapt.pseudo import fuse, view_confidence
from selfadapt.result import ResizedMap, Result
from selfadapt.views import Size, View, size_of, undo_together, usable_views

SETTINGS = (bool, int, float, str, tuple, type(None), FunctionType, CrossEntropy)
"""Kinds of attributes that what was recorded for an image depends on."""
LARGE = 2**20
"""From so many pixels on it is checked whether there is enough memory."""
DIVERGED = "the loss became infinite, lr may be too high"
"""What no wider numbers would help against."""
LOW_CONFIDENCE = 0.6
"""Of the views' mean, below which most predictions for real and rendered streets were poor."""
UNLIKE = (
    "this image looks unlike those the network was trained on (low confidence over its views): "
    "look at the mask before you rely on it"
)


class Overflow(ArithmeticError):
    """A prediction in fp16 is not finite."""


class Stopped(Exception):
    """Whoever looks on, see ``Method.on_step``, does not want the image any more."""


class CallbackError(Exception):
    """Carries an error of ``on_step`` past the fall-backs for errors of the network."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Common(TypedDict, total=False):
    """Settings that every method takes, see ``Method``."""

    mode: ModeName
    max_pixels: int | None
    compare: bool
    fast: bool | Fast
    interface: Interface | None


class Method(ABC):
    """Segments one image at a time with one network, which it never writes to.

    Args:
        model: Any segmentation network.
        alpha: Weight of the image statistics in SaN, 0 to 1; or weights by name pattern.
        mode: ``paper``: the equations as written; ``official``: size cap, resampling of views,
            thresholds and the statistics inside a loop of steps are those of the released code.
        max_pixels: Larger images are scaled down to this many pixels, and the result is brought
            back. None: 2097152 (1024 x 2048); in official mode always exactly 1024 x 2048.
        compare: Also predict with the network as trained, for before and after.
        fast: Take shortcuts to the same result, on a GPU with 16-bit arithmetic. False: none; in
            Python a ``Fast`` says which.
        interface: What the network takes and gives, where that is not found out by itself.
    """

    on_step: Callable[[int, float], None] | None = None
    """Called after each gradient step with its number, from 1, and the loss before it. Raise
    ``Stopped`` in it to give the image up. Where shortcuts fail, steps begin anew."""

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
        self.model = unwrapped(model)
        self._mode: ModeName = mode
        self.max_pixels = max_pixels or MAX_PIXELS
        self.compare = compare
        self.fast = _fast(fast)
        self.alpha = alpha
        self._rates: Rates | None = None
        self.interface, self._draws = self._detect(interface)
        if self._draws:  # what is random differs from run to run
            self.fast = replace(self.fast, reuse=False, graphs=False)
        self.notes = self._model_notes(interface)

    @property
    def alpha(self) -> Alpha:
        """Weight of the image statistics in SaN."""
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: Alpha) -> None:
        self.san = find_san(self.model, alpha)
        self._alpha = alpha
        self._graphs = Graphs(self.model)  # what was recorded had another

    @property
    def mode(self) -> ModeName:
        """``paper`` or ``official``; another takes another method, with other defaults."""
        return self._mode

    def __repr__(self) -> str:
        own = (*inspect.signature(type(self)).parameters, "mode", "max_pixels")
        shown = [n for n in own if hasattr(self, n) and n not in ("model", "views", "interface")]
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in dict.fromkeys(shown))
        text = f"{type(self).__name__}({type(self.model).__name__}, {settings})"
        if views := getattr(self, "views", None):
            text += f"\n  views: {', '.join(map(str, views))}"
        if selection := getattr(self, "selection", None):
            text += f"\n  layers: {selection.reason}"
        text += f"\n  normalisation: {self.san}"
        channels, mean, std = self.interface.channels, self.interface.mean, self.interface.std
        return f"{text}\n  input: {channels} channels, mean {mean}, std {std}"

    def __call__(self, image: Image, *, normalized: bool = False) -> Result:
        """Segment ``image``.

        Args:
            image: A path, a PIL image, an array ``(H, W, C)`` or a tensor ``(C, H, W)``, raw.
            normalized: ``image`` is a float tensor with the network's normalisation applied.

        Returns:
            Probabilities at the image's own size, and what led to them.
        """
        start = time.perf_counter()
        with torch.inference_mode(False), torch.no_grad(), _uncached_autocast():
            whole = self._load(image, normalized)
            image = within_budget(whole, self.mode, self.max_pixels)
            if not whole.is_cuda and image[0].numel() >= LARGE:
                self._check_memory(image)
            with torch.cuda.device_of(whole):  # kernels are started on the current device
                result = self._segment(image, size_of(whole))
            if whole.is_cuda:
                torch.cuda.synchronize(whole.device)
        notes = self.notes + result.notes
        if size_of(image) != size_of(whole):
            notes += (f"segmented at {_text(image)}, the image is {_text(whole)}",)
        return result._replace(seconds=time.perf_counter() - start, notes=notes)

    def estimate(self, height: int, width: int) -> Estimate:
        """Return what an image of this size will take on a CPU, about.

        The first call runs the network on a small piece of noise.
        """
        if self._rates is None:
            self._rates = self._measure_rates()
        rates, one_size = self._rates, self.interface.size
        pixels = min(height * width, self.max_pixels)
        pixels = pixels if one_size is None else one_size[0] * one_size[1]
        passes, steps = self._work()
        plain, step = pixels * rates.forward, pixels * rates.step
        kept = 4 * rates.scores + (rates.saved if steps else 0)  # scores, probabilities, their sum
        seconds = (passes + self.compare) * plain + steps * step
        return Estimate(seconds, plain, step if steps else 0.0, pixels * kept)

    def _measure_rates(self) -> Rates:
        tuned = self.selection.names if hasattr(self, "selection") else ()
        with torch.inference_mode(False), torch.no_grad(), seeded(0, self._device()):
            noise = torch.rand(self.interface.channels or 3, *usual_size(self.interface, PIECE))
            return measure(partial(self._network, tuned), noise.to(self._device()))

    def _device(self) -> torch.device:
        return next(self.model.parameters(), torch.empty(0)).device

    def _work(self) -> tuple[float, float]:
        """Return how many forward passes and steps an image takes, beside the one to compare."""
        return 1.0, 0.0

    def _area(self, scale: float) -> float:
        """Return which part of an image's time a view of it takes."""
        return 1.0 if self.interface.size else min(1.0, scale**2)

    def _check_memory(self, image: Tensor) -> None:
        """Raise ValueError where there is not enough memory for an image."""
        height, width = size_of(image)
        try:
            needed = self.estimate(height, width).num_bytes
        except Exception:  # it may take no small image
            return
        free = free_memory()
        if free is not None and needed > free:
            gigabytes, left = f"{needed / 2**30:.1f} GB", f"{free / 2**30:.1f} GB"
            raise ValueError(
                f"an image of {width}x{height} pixels takes about {gigabytes} with this network "
                f"and method, and {left} are free; lower max_pixels, which is {self.max_pixels}, "
                "or take a method of one pass, such as san"
            )

    def _segment(self, image: Tensor, size: Size) -> Result:
        """Segment a raw image ``(C, H, W)``; the result's maps have the given size.

        A shortcut that a network cannot take is not taken again.
        """
        try:
            return self._try(image, size)
        except CallbackError as raised:
            callback_error = raised.error
        except Overflow:
            self._take_shortcuts(replace(self.fast, precision="bf16"))
            self.notes += ("this network's numbers are too large for fp16: bf16 is taken",)
            return self._try(image, size)
        except (torch.OutOfMemoryError, ValueError, Stopped):
            raise
        except Exception as error:
            runs = not image.is_cuda and isinstance(error, RuntimeError)
            if self.fast == PLAIN or runs:
                raise
            shortcuts = self.fast
            self._take_shortcuts(PLAIN)
            try:
                result = self._try(image, size)
            except Exception:
                self._take_shortcuts(shortcuts)
                raise
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            self.notes += (f"no shortcuts, this network fails with them ({reason})",)
            return result
        raise callback_error

    def _take_shortcuts(self, fast: Fast) -> None:
        self.fast = fast
        self._graphs = Graphs(self.model)

    def _try(self, image: Tensor, size: Size) -> Result:
        if not (self.fast.graphs and image.is_cuda and self.on_step is None):
            return self._concluded(image, size, self._compute_all(image))
        settings = tuple(v for v in vars(self).values() if isinstance(v, SETTINGS))
        with self._graphs.lock:  # the next image of another thread would write over these maps
            maps = self._graphs(self._compute_all, image, settings)
            return self._concluded(image, size, maps)

    def _concluded(self, image: Tensor, size: Size, maps: Maps) -> Result:
        result = self._conclude(image, size, maps)
        if "fused" in maps and view_confidence(maps["fused"]) < LOW_CONFIDENCE:
            result = result._replace(notes=(UNLIKE, *result.notes))
        return self._with_source(result, maps["source_logits"], size) if self.compare else result

    def _compute_all(self, image: Tensor) -> Maps:
        with seeded(0, image.device) if self._draws else nullcontext():
            source = {"source_logits": self._source(image)} if self.compare else {}
            return self._compute(image) | source

    @abstractmethod
    def _compute(self, image: Tensor) -> Maps:
        """Do all that the network is needed for. On a GPU this is recorded: it waits for nothing.

        Args:
            image: A raw image ``(C, H, W)``, on the network's device.

        Returns:
            What ``_conclude`` needs.
        """

    @abstractmethod
    def _conclude(self, image: Tensor, size: Size, maps: Maps) -> Result:
        """Make a result of what was computed; its maps are new, and have the given size."""

    def _detect(self, given: Interface | None) -> tuple[Interface, bool]:
        """Return the network's interface, and whether it draws random numbers in evaluation."""
        device = self._device()
        with seeded(0, device), runs_original(self.model) as runs:
            before = random_state(device)
            interface = detect(self.model, given)
            Probe(self.model).scores(interface, usual_size(interface))
            draws = not torch.equal(before, random_state(device))
        if runs:
            raise TypeError(
                "adaptation works on a copy of the network, and a copy of this one runs layers of "
                f"the original ({type(runs[0]).__name__}): some function refers to the network "
                "from outside; make it a method of the network"
            )
        return interface, draws

    def _choose_views(
        self, scales: Sequence[float], views: Iterable[View] | None
    ) -> tuple[View, ...]:
        """Return the views to take, and note it where they cannot be what was asked for."""
        channels = self.interface.channels
        if channels != 3:
            self.notes += (f"input channels: {channels}, so no view is turned gray",)
        return self._usable_views(scales, views)

    def _usable_views(
        self, scales: Sequence[float], views: Iterable[View] | None = None
    ) -> tuple[View, ...]:
        return usable_views(scales, views, MODES[self.mode].view, self.interface.channels)

    def _adapted(self, adapt: Sequence[str] | None) -> Selection:
        """Return the parameters to adapt: those that ``adapt`` names, or the default."""
        with seeded(0, self._device()):
            return adapted_parameters(
                self.model, adapt, released=self.mode == "official",
                used=lambda: Probe(self.model).used(self.interface),
            )  # fmt: skip

    def _tune(self, selection: Selection) -> None:
        """Take the parameters to adapt, and note it where they are a guess."""
        self.selection = selection
        self.notes += selection.notes

    def _source(self, image: Tensor) -> Tensor:
        """Return the logits ``(1, C, H, W)`` of the network as trained."""
        modules = self.model.named_modules()
        alphas = {name: 0.0 for name, module in modules if isinstance(module, SaN)}
        if self.fast.fuses(image.device):  # SaN with alpha 0 is BatchNorm, in fewer passes
            alphas |= dict.fromkeys(self.san.converted, 0.0)
        return self._network(san=SaNReport(alphas)).logits(image)

    def _network(self, tuned: Collection[str] = (), san: SaNReport | None = None) -> Network:
        """Return a private copy of the network, with SaN.

        Args:
            tuned: Names of the parameters to tune.
            san: The layers SaN is in. None: those that the method's alpha names.
        """
        fast = self.fast
        if has_hooks(self.model):  # whoever looks on sees every run
            fast = replace(fast, reuse=False)
        return Network(self.model, self.interface, tuned, fast, self.san if san is None else san)

    def _fused(
        self, network: Network, image: Tensor, views: Iterable[View], size: Size | None = None
    ) -> Tensor:
        """Return the mean prediction over views, in the image plane, or at another size."""
        views, size = list(views), size or size_of(image)
        if self.fast.batches and image.is_cuda:
            return fuse(self._grouped(network, image, views, size), len(views))
        return fuse(view.undo(network.probs(view.make(image)), size) for view in views)

    def _grouped(
        self, network: Network, image: Tensor, views: Sequence[View], size: Size
    ) -> Iterator[Tensor]:
        """Yield sums of predictions on views, those of one size in one go."""
        for group in _by_size(views, size_of(image)):
            if len(group) == 1:
                yield group[0].undo(network.probs(group[0].make(image)), size)
            else:
                probs = network.probs(torch.stack([view.make(image) for view in group]))
                yield from undo_together(group, probs, size)

    def _loop_statistics(self, network: Network) -> AbstractContextManager[None]:
        """Set the statistics BatchNorm uses in a loop of steps, which the modes differ in."""
        drift = MODES[self.mode].drift
        return nullcontext() if drift is None else network.image_statistics(drift)

    def _take_steps(
        self, step: Callable[[], Tensor], num: int, image: Tensor, deadline: float = inf
    ) -> Tensor:
        """Take so many steps, or those there is time for; return the loss before each."""
        losses: list[Tensor] = []
        while len(losses) < num and (deadline == inf or time.perf_counter() <= deadline):
            losses.append(step())
            if self.on_step is not None:
                self._tell(len(losses), float(losses[-1]))
        return torch.stack(losses) if losses else image.new_empty(0)

    def _tell(self, number: int, loss: float) -> None:
        """Tell whoever looks on; an error of theirs is none of the network's."""
        assert self.on_step is not None
        try:
            self.on_step(number, loss)
        except Stopped:
            raise
        except Exception as error:
            raise CallbackError(error) from error

    def _sound(
        self, image: Tensor, logits: Tensor, trouble: str | None = None
    ) -> tuple[Tensor, tuple[str, ...]]:
        """Return the logits, or where they are worthless those of a simpler way, with notes."""
        if trouble is None and finite(logits):
            return logits, ()
        return self._rescue(image, trouble or "the adapted prediction is not finite")

    def _rescue(self, image: Tensor, trouble: str) -> tuple[Tensor, tuple[str, ...]]:
        """Return the logits of SaN, or else of the source network, and a note of what happened."""
        if trouble != DIVERGED:
            self._check_overflow(image)
        logits = self._network().logits(image)
        if finite(logits):
            return logits, (f"{trouble}: this is the prediction with SaN, without adaptation",)
        logits = self._source(image)
        if finite(logits):
            trouble += ", and SaN's prediction is not finite"
            return logits, (f"{trouble}: this is the prediction of the network as trained",)
        raise ValueError("the network's own prediction for this image is not finite")

    def _check_overflow(self, image: Tensor) -> None:
        """Raise Overflow where it may be the numbers that are too small for the network."""
        if self.fast.half(image.device) == torch.float16:
            raise Overflow

    def _with_source(self, result: Result, source: Tensor, size: Size) -> Result:
        if not finite(source):
            self._check_overflow(source)
            note = "the source network's prediction is not finite"
            return result._replace(notes=(*result.notes, note))
        return result._replace(source_probs=probs_at(source, size))

    def _load(self, image: Image, normalized: bool) -> Tensor:
        weights = (p for p in self.model.parameters() if p.is_floating_point())
        weight = next(weights, torch.empty(0))
        channels = self.interface.channels or 3
        loaded = load_image(image, channels, normalized=normalized, device=weight.device)
        loaded = loaded.to(torch.promote_types(weight.dtype, torch.float32))
        return self.interface.denormalize(loaded) if normalized else loaded

    def _model_notes(self, given: Interface | None) -> tuple[str, ...]:
        notes = []
        channels = self.interface.channels or 3
        if not is_normalisation_said(self.model, given, channels):
            assumed = "ImageNet's mean and std are" if channels == 3 else "no normalisation is"
            notes.append(
                f"nothing says how this network's input is normalised, {assumed} assumed; say it "
                "with interface=Interface(mean=..., std=...), here or as the network's attribute"
            )
        if not self.san.converted and self.alpha != 0:
            notes.append(str(self.san))
        if self._draws:
            notes.append("the network draws random numbers: they start anew for each image")
        if self.interface.size is not None:
            height, width = self.interface.size
            notes.append(f"the network takes {width}x{height} pixels only: images are resized")
        return tuple(notes)


def _by_size(views: Iterable[View], size: Size) -> list[list[View]]:
    """Put views together that have the same size."""
    groups: dict[Size, list[View]] = {}
    for view in views:
        groups.setdefault(view.size(size), []).append(view)
    return list(groups.values())


def probs_at(logits: Tensor, size: Size) -> Tensor | ResizedMap:
    """Return class probabilities ``(C, H, W)`` at a size, from scores ``(1, C, h, w)``."""
    if size_of(logits) == size:
        return logits[0].softmax(dim=0)
    return ResizedMap(logits[0].clamp_min(LOWEST), size, scores=True)


def resize_to(probs: Tensor, size: Size) -> Tensor | ResizedMap:
    """Return probabilities ``(C, h, w)`` at a size."""
    probs = probs.clone()  # what was computed is written over by the next image
    return probs if size_of(probs) == size else ResizedMap(probs, size, scores=False)


def finite(logits: Tensor) -> bool:
    """Say whether scores ``(1, C, H, W)`` make probabilities; single classes may be -inf."""
    return bool(logits.amax(dim=1).isfinite().all())


def check_steps(steps: int, lr: float) -> None:
    """Raise ValueError unless these are a number of steps and a learning rate."""
    check_number("steps", steps, 0, whole=True)
    if isinstance(lr, bool) or not isinstance(lr, Real) or not 0 < lr < float("inf"):
        raise ValueError(f"lr must be a positive number, got {lr!r}")


def _fast(fast: bool | Fast) -> Fast:
    if isinstance(fast, bool):
        return Fast() if fast else PLAIN
    if not isinstance(fast, Fast):
        raise TypeError(f"fast must be True, False or a Fast object, got {fast!r}")
    return fast


def _uncached_autocast() -> torch.autocast:
    """Keep the caller's autocast, but not its cache: that would hold weights of before a step."""
    device = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    return torch.autocast(
        device,
        dtype=torch.get_autocast_dtype(device),
        enabled=torch.is_autocast_enabled(device),
        cache_enabled=False,
    )


def _text(image: Tensor) -> str:
    return f"{image.shape[-1]}x{image.shape[-2]}"
