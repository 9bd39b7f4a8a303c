"""Segment an image with a trial, and count its pixels."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from selfadapt.data import Sample
from selfadapt.engine import described
from selfadapt.engine.counting import count_pixels
from selfadapt.images import read_image, rescale
from selfadapt.journal import Row
from selfadapt.labels import predicted_names
from selfadapt.methods import Segments
from selfadapt.metrics import to_class_space
from selfadapt.optional import without_unsafe_advice
from selfadapt.protocol.domains import Domain
from selfadapt.protocol.recipe import EvaluateConfig
from selfadapt.protocol.rows import TrialKey, row_of
from selfadapt.protocol.trials import Trial
from selfadapt.result import Result

MAX_PAUSE_S = 0.05
"""Maximum pause in seconds, on a GPU, before the row of an image is computed: in the middle of the
next image, its thread waits for the GPU, and needs neither Python nor the driver."""


class Loaded(NamedTuple):
    """An image and its label, ready to be segmented and scored."""

    sample: Sample
    image: Tensor
    label: Tensor
    sizes: list[int] | None = None
    """Sizes of the two files in bytes; None for rendered images."""


class ScoreJob(NamedTuple):
    """An image to segment and score with some trials."""

    domain: int
    """Index of its domain."""
    number: int
    trials: Sequence[Trial]


class Workers(Protocol):
    """Segment and score images elsewhere, each worker with a ``Scorer``."""

    device_name: str

    def start(
        self, config: EvaluateConfig, domains: Sequence[Domain], models: Mapping[str, Any]
    ) -> None:
        """Start the workers."""

    def rows(self, jobs: Sequence[ScoreJob]) -> Iterator[tuple[ScoreJob, list[Row] | ValueError]]:
        """Yield the rows of each image, or why there are none."""

    def labels(self, job: ScoreJob) -> list[Tensor]:
        """Return the most likely scored classes of an image ``(H, W)`` for each trial."""


class Scorer:
    """Segments and scores images.

    Args:
        config: The recipe.
        domains: The domains.
        models: The networks by name.
    """

    def __init__(
        self, config: EvaluateConfig, domains: Sequence[Domain], models: Mapping[str, Any]
    ) -> None:
        self.config, self.domains, self.models = config, domains, models
        self._methods: dict[str, Segments] = {}
        self._device = next(next(iter(models.values())).parameters()).device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._counted: Tensor | None = None  # the last map, whose pixels are counted on that stream

    def load(self, domain: Domain, number: int) -> Loaded:
        """Read an image, scaled as in the recipe, and its label."""
        sample = domain.data[number]
        image = read_image(rescale(sample.image, domain.config.scale))
        label = torch.from_numpy(sample.label)
        if self._stream is not None:  # pinned memory is copied to a GPU faster
            image, label = image.pin_memory(), label.pin_memory()
        return Loaded(sample, image, label, domain.file_sizes(number))

    def load_or_error(self, domain: Domain, number: int) -> Loaded | Exception:
        """Read an image and its label; return the error if that fails."""
        try:
            return self.load(domain, number)
        except (ValueError, OSError) as error:
            return error

    def labels(self, job: ScoreJob) -> list[Tensor]:
        """Return the most likely scored classes of an image ``(H, W)`` for each trial."""
        domain = self.domains[job.domain]
        loaded = self.load(domain, job.number)
        return [self.predict(domain, loaded, t)[0].argmax(dim=0).cpu() for t in job.trials]

    def predict(self, domain: Domain, loaded: Loaded, trial: Trial) -> tuple[Tensor, Result]:
        """Return the probabilities of the scored classes, and the method's result."""
        with _autocast(trial.precision, self.models[trial.networks[0]]):
            result = self.method(trial)(loaded.image)
        size = loaded.label.shape
        probs = result.probs.float()
        if probs.shape[-2:] != size:
            probs = F.interpolate(probs[None], size, mode="bilinear", align_corners=False)[0]
        classes = predicted_names(self.models[trial.networks[0]].spec.classes, len(probs))
        return to_class_space(probs, classes, domain.data.space), result

    def score(
        self, domain: Domain, number: int, loaded: Loaded | Exception, trial: Trial
    ) -> Callable[[], Row]:
        """Segment an image; return a function that counts its pixels and returns the row."""
        key = TrialKey(domain.label, domain.names[number], trial.key)
        if isinstance(loaded, Exception):
            unreadable = self.failed(key, str(loaded))
            return lambda: unreadable
        if self._stream is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
        try:
            probs, result = self.predict(domain, loaded, trial)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(f"{key.domain}, {key.image}, {trial.method}") from error
        except (OSError, MemoryError):
            raise
        except Exception as error:  # raised by the network
            if self._stream is not None:
                torch.cuda.synchronize(self._device)  # raises again if the GPU itself has failed
            failed = self.failed(key, _reason(trial, error))
            return lambda: failed
        megabytes = None if self._stream is None else self._peak(probs)
        # So that the other maps of the result are freed:
        seconds, notes, quality = result.seconds, result.notes, result.quality

        def compute_row() -> Row:
            if self._stream is not None:
                time.sleep(min(seconds / 2, MAX_PAUSE_S))
            try:
                with torch.cuda.stream(self._stream):
                    counts = count_pixels(loaded.label.to(probs.device, non_blocking=True), probs)
            except ValueError as error:
                return self.failed(key, _reason(trial, error))
            return row_of(key, counts, seconds, megabytes, notes, loaded.sizes, quality)

        return compute_row

    def _peak(self, probs: Tensor) -> float:
        """Wait for the map of an image, and return the peak GPU memory of the image in MiB.

        The map of the previous image, in memory all the time, is subtracted and then freed.
        """
        torch.cuda.current_stream(self._device).synchronize()
        memory = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
        previous = 0 if self._counted is None else self._counted.untyped_storage().nbytes()
        self._counted = probs
        return (memory["peak"] - previous) / 2**20

    def failed(self, key: TrialKey, reason: str) -> Row:
        """Return the row of an image that failed, or raise ValueError as the recipe asks."""
        if self.config.unreadable == "stop":
            raise ValueError(f"{key.domain}, {key.image}: {reason}; finished rows are kept")
        return {**key._asdict(), "error": reason}

    def method(self, trial: Trial) -> Segments:
        """Return the method of a trial."""
        if trial.key not in self._methods:
            self._methods[trial.key] = trial.build(self.models)
        return self._methods[trial.key]


def _reason(trial: Trial, error: Exception) -> str:
    return f"{trial.method} failed: {without_unsafe_advice(described(error))}"


def _autocast(precision: str, model: Any) -> torch.autocast:
    device = next(model.parameters()).device.type
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device, kinds.get(precision), enabled=precision in kinds)
