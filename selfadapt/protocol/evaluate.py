"""Evaluate by the protocol: tune on the validation domain, freeze, then segment every target once.

    tune      settings by mean IoU on the validation domain                tune.py
    measure   one row for each image and trial, as it goes                 journal.py, rows.py
    tables    the rows added up                                            tables.py
    pictures  some images before and after                                 pictures.py

Shares of a run are processes of their own, which read in the journal what the others have done. Of
the validation domain each does its images, then those that still lack rows: all need its settings.
Of the targets it does its images alone. Whoever is the last adds the rows up.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from torch import Tensor

from selfadapt.cost import duration
from selfadapt.data import Sample
from selfadapt.devices import find_device, refuse_torchrun
from selfadapt.engine import described
from selfadapt.engine.counting import count_pixels
from selfadapt.forecast import image_seconds, is_short
from selfadapt.images import read_image, rescale
from selfadapt.journal import Journal, Row
from selfadapt.labels import predicted_names
from selfadapt.methods import Segments
from selfadapt.metrics import Counts, iou, to_class_space
from selfadapt.optional import without_unsafe_advice
from selfadapt.prefetch import num_readers, prefetch
from selfadapt.protocol.domains import Domain, open_domains
from selfadapt.protocol.folder import RunFolder
from selfadapt.protocol.pictures import draw_pictures
from selfadapt.protocol.recipe import EvaluateConfig, MethodConfig
from selfadapt.protocol.results import read_results
from selfadapt.protocol.rows import Key, counts_of, row_of
from selfadapt.protocol.tables import write_tables
from selfadapt.protocol.trials import (
    Trial,
    check_training,
    check_trials,
    open_network,
    sweeps_of,
    trial_of,
    with_own_methods,
)
from selfadapt.protocol.tune import Choice, choose, num_candidates
from selfadapt.result import Result
from selfadapt.runs import WHOLE, Shard

LOOK_EVERY = 0.5
"""Seconds between two looks at the mean IoU so far."""
LONG_RUN = 600.0
"""Seconds from which on it is said what would be shorter."""
LONGEST_PAUSE = 0.05
"""Seconds that the row of an image waits at most, on a GPU, for the middle of the next image: then
the thread that segments it waits for the GPU, and does not need Python nor the driver itself."""


def evaluate(
    config: EvaluateConfig,
    folder: str | Path,
    *,
    overwrite: bool = False,
    retry: bool = False,
    only_tune: bool = False,
    trust: bool = False,
    shard: Shard = WHOLE,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Evaluate, or go on with an evaluation that was stopped.

    Args:
        config: The recipe.
        folder: Where the run is written. A run of the same recipe and networks that is there goes
            on; rows that are there are not done again.
        overwrite: Start anew, in the place of a run that is there.
        retry: Try images again that could not be segmented, or were other files then.
        only_tune: Choose settings on the validation domain, and do not touch a target.
        trust: Run code of the user's own: networks at ``MODULE:FUNCTION``, methods at
            ``MODULE:CLASS``.
        shard: The share of the images to do here. Tables are there when all shares are done.
        say: Takes a line on what it will take, before the first image.

    Returns:
        The folder.
    """
    refuse_torchrun("evaluate")
    device = find_device(config.device)
    config = with_own_methods(config, trust)
    check_training(config)
    domains = open_domains(config)
    models: dict[str, Any] = {
        name: open_network(network, trust).to(device) for name, network in config.networks.items()
    }
    for domain in domains:
        for note in domain.data.notes:
            warnings.warn(f"{domain.label}: {note}", stacklevel=2)
    check_trials(config, models)
    with RunFolder(Path(folder), shard) as place, _threads(config.threads, device):
        place.start(config, models, domains, device, overwrite=overwrite, retry=retry)
        with closing(place.journal(Key)) as journal:
            run = Evaluation(config, domains, models, journal, shard)
            if line := run.forecast(only_tune=only_tune):
                say(line)
            choices = run.tune()
            place.write_choices(choices)
            if only_tune:
                return place.path
            run.measure_all(choices)
        if place.claim():
            results = read_results(place.path)
            if not results.num_missing({domain.label: len(domain.data) for domain in domains}):
                write_tables(place.path, results)
                draw_pictures(place.path, results, run)
    return place.path


class Loaded(NamedTuple):
    """An image and its label, ready to be segmented and scored."""

    sample: Sample
    image: Tensor
    label: Tensor
    sizes: list[int] | None = None
    """Bytes of the two files, where they are in files."""


class Running:
    """The mean IoU so far of a domain, which is worked out no more often than anybody looks."""

    def __init__(self, domain: Domain) -> None:
        self._confusion = np.zeros(len(domain.data.space.names) ** 2, np.int64)
        self._looked = float("-inf")

    def add(self, row: Row) -> bool:
        """Add an image; say whether it is time to look again."""
        self._confusion += row["confusion"]
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY:
            return False
        self._looked = now
        return True

    @property
    def mean_iou(self) -> float:
        """The mean IoU of the images so far."""
        num = isqrt(len(self._confusion))
        return float(iou(torch.from_numpy(self._confusion).reshape(num, num)).nanmean())


class Evaluation:
    """One evaluation, or a share of it."""

    def __init__(
        self,
        config: EvaluateConfig,
        domains: Sequence[Domain],
        models: dict[str, Any],
        journal: Journal[Key],
        shard: Shard = WHOLE,
    ) -> None:
        self.config, self.domains, self.models = config, domains, models
        self.journal, self.shard = journal, shard
        self._methods: dict[str, Segments] = {}
        self._device = next(next(iter(models.values())).parameters()).device
        self._beside = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._counted: Tensor | None = None  # the last map, which is counted on that stream

    def tune(self) -> dict[str, Choice]:
        """Choose the settings of every method; return what was tried and chosen, by label."""
        choices: dict[str, Choice] = {}
        for method in self.config.methods:

            def score(candidates: Sequence[dict[str, Any]], of: MethodConfig = method) -> list:
                return self._validated(of, candidates)

            shared = choices[method.same_as].chosen if method.same_as else {}
            known = trial_of(self.config, method).settings
            taken = {n: v for n, v in shared.items() if n in known and n not in method.settings}
            choices[method.name] = choose(method, score, taken, known)
        return choices

    def forecast(self, *, only_tune: bool) -> str | None:
        """Return a line on what it will take, about; None where that is not known, as on a GPU."""
        times: dict[str, float] = {}
        for domain in self.domains[: 1 if only_tune else None]:
            try:
                size = domain.usual_size()
            except (ValueError, OSError):  # it is reported when it is read
                continue
            if is_short({size: len(domain.data)}):
                continue
            total = num_trials = 0.0
            for method in self.config.methods:
                tried = num_candidates(method) if domain is self.domains[0] else 0
                if not only_tune:
                    tried = max(tried, 1) + sum(map(len, method.sweep.values()))
                seconds = image_seconds(self._method(trial_of(self.config, method)), size)
                if seconds is None:
                    return None
                total, num_trials = total + seconds * tried, num_trials + tried
            done = sum(key.domain == domain.label for key in self.journal.done)
            left = len(domain.data) - done / max(num_trials, 1)
            times[domain.label] = max(0.0, total * left / self.shard.total)
        if not (whole := sum(times.values())):
            return None
        each = ", ".join(f"{label} {duration(seconds)}" for label, seconds in times.items())
        shorter = "; a limit or a smaller scale of the domains makes it shorter"
        return (
            f"this takes about {duration(whole)} on this CPU ({each})"
            f"{shorter if whole > LONG_RUN else ''}"
        )

    def measure_all(self, choices: dict[str, Choice]) -> None:
        """Segment all domains with the chosen settings, and with those of the sweeps."""
        trials: dict[str, Trial] = {}
        for method in self.config.methods:
            chosen = choices[method.name].chosen
            own = [trial_of(self.config, method, **chosen)]
            for trial in [*own, *sweeps_of(self.config, method, chosen).values()]:
                trials[trial.key] = trial
        every = list(trials.values())
        with self.progress() as progress:
            shares = {domain.label: self.shard.of(len(domain.data)) for domain in self.domains}
            left = sum(self._num_missing(d, shares[d.label], every) for d in self.domains)
            overall = progress.add_task("all domains", total=left, said="", visible=left > 0)
            for domain in self.domains:
                self.measure(domain, shares[domain.label], every, domain.label, progress, overall)

    def measure(
        self,
        domain: Domain,
        numbers: Iterable[int],
        trials: Sequence[Trial],
        name: str,
        progress: Progress,
        overall: TaskID | None = None,
    ) -> None:
        """Make sure that there is a row for every trial and these images of a domain."""
        missing = [n for n in numbers if self._missing(domain, n, trials)]
        total = self._num_missing(domain, missing, trials)
        task = progress.add_task(name, total=total, said="", visible=total > 0)
        running = Running(domain)

        def note(row_of_image: Callable[[], Row], trial: Trial) -> None:
            row = row_of_image()
            self.journal.write(row)
            if trial is trials[-1] and "error" not in row and running.add(row):
                progress.update(task, said=f"mIoU {100 * running.mean_iou:.1f}")
            for one in (task, overall):
                if one is not None:
                    progress.advance(one)

        with ThreadPoolExecutor(1) as clerk:  # notes a row while a GPU segments the next image
            noted = clerk.submit(lambda: None)
            for number, loaded in self._read(domain, missing):
                if self.shard.total > 1:
                    self.journal.refresh()
                for trial in self._missing(domain, number, trials):
                    row_of_image = self._segment(domain, number, loaded, trial)
                    if self._beside is None:  # a CPU has no hand free
                        note(row_of_image, trial)
                    else:
                        noted.result()
                        noted = clerk.submit(note, row_of_image, trial)
            noted.result()
        self._counted = None

    def load(self, domain: Domain, number: int) -> Loaded:
        """Read an image, enlarged as the recipe says, and its label."""
        sample = domain.data[number]
        image = read_image(rescale(sample.image, domain.config.scale))
        label = torch.from_numpy(sample.label)
        if self._beside is not None:  # from there they reach a GPU faster
            image, label = image.pin_memory(), label.pin_memory()
        return Loaded(sample, image, label, domain.file_sizes(number))

    def _read(
        self, domain: Domain, numbers: Sequence[int]
    ) -> Iterator[tuple[int, Loaded | Exception]]:
        """Yield images with labels, by their number."""

        def read(number: int) -> Loaded | Exception:
            try:
                return self.load(domain, number)
            except (ValueError, OSError) as error:
                return error

        with closing(prefetch(read, numbers, num_readers())) as every:
            yield from zip(numbers, every, strict=True)

    def predict(self, domain: Domain, loaded: Loaded, trial: Trial) -> tuple[Tensor, Result]:
        """Return the probabilities of the classes to score, and the method's result."""
        with _autocast(trial.precision, self.models[trial.networks[0]]):
            result = self._method(trial)(loaded.image)
        size = loaded.label.shape
        probs = result.probs.float()
        if probs.shape[-2:] != size:
            probs = F.interpolate(probs[None], size, mode="bilinear", align_corners=False)[0]
        classes = predicted_names(self.models[trial.networks[0]].spec.classes, len(probs))
        return to_class_space(probs, classes, domain.data.space), result

    def _segment(
        self, domain: Domain, number: int, loaded: Loaded | Exception, trial: Trial
    ) -> Callable[[], Row]:
        """Segment an image; return what waits until it is counted and gives its row."""
        key = Key(domain.label, domain.names[number], trial.key)
        if isinstance(loaded, Exception):
            unread = self._failed(key, str(loaded))
            return lambda: unread
        if self._beside is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
        try:
            probs, result = self.predict(domain, loaded, trial)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(f"{key.domain}, {key.image}, {trial.method}") from error
        except (OSError, MemoryError):
            raise
        except Exception as error:  # the network's
            if self._beside is not None:
                torch.cuda.synchronize(self._device)  # raises again if it is the GPU that is broken
            failed = self._failed(key, _reason(trial, error))
            return lambda: failed
        megabytes = None if self._beside is None else self._peak(probs)
        seconds, notes = result.seconds, result.notes  # its other maps need not wait for the row

        def row_of_image() -> Row:
            if self._beside is not None:
                time.sleep(min(seconds / 2, LONGEST_PAUSE))
            try:
                with torch.cuda.stream(self._beside):
                    counts = count_pixels(loaded.label.to(probs.device, non_blocking=True), probs)
            except ValueError as error:
                return self._failed(key, _reason(trial, error))
            return row_of(key, counts, seconds, megabytes, notes, loaded.sizes)

        return row_of_image

    def _peak(self, probs: Tensor) -> float:
        """Return the memory that an image took on a GPU, in MiB, once its map is there.

        The map of the image before was there all the time; it may go now.
        """
        torch.cuda.current_stream(self._device).synchronize()
        memory = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
        before = 0 if self._counted is None else self._counted.untyped_storage().nbytes()
        self._counted = probs
        return (memory["peak"] - before) / 2**20

    def _failed(self, key: Key, reason: str) -> Row:
        if self.config.unreadable == "stop":
            raise ValueError(f"{key.domain}, {key.image}: {reason}; what was done before is kept")
        return {**key._asdict(), "error": reason}

    def _method(self, trial: Trial) -> Segments:
        if trial.key not in self._methods:
            self._methods[trial.key] = trial.build(self.models)
        return self._methods[trial.key]

    def _done(self, domain: Domain, number: int, trial: Trial) -> bool:
        return Key(domain.label, domain.names[number], trial.key) in self.journal.done

    def _missing(self, domain: Domain, number: int, trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials that an image has no row for."""
        return [trial for trial in trials if not self._done(domain, number, trial)]

    def _num_missing(self, domain: Domain, numbers: Iterable[int], trials: Sequence[Trial]) -> int:
        return sum(len(self._missing(domain, number, trials)) for number in numbers)

    def progress(self) -> Progress:
        """Return what shows how far a run has come."""
        columns = (
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"), TimeRemainingColumn(),
        )  # fmt: skip
        return Progress(  # drawing it takes milliseconds
            *columns, console=Console(stderr=True), refresh_per_second=2
        )

    def _validated(self, method: MethodConfig, settings: Sequence[dict[str, Any]]) -> list[float]:
        """Return the mean IoU of a method on the validation domain, with each of some settings."""
        domain = self.domains[0]
        own = self.shard.of(len(domain.data))
        others = (number for number in range(len(domain.data)) if number not in own)
        trials = [trial_of(self.config, method, **one) for one in settings]
        with self.progress() as progress:
            self.measure(domain, [*own, *others], trials, f"tuning {method.name}", progress)
        totals = {trial.key: Counts.zero(len(domain.data.space.names)) for trial in trials}
        rows = self.journal.rows(lambda key: key.domain == domain.label and key.trial in totals)
        failed = {key.image for key, row in rows.items() if "error" in row}
        for key, row in rows.items():
            if key.image not in failed:  # all are compared on the same images
                totals[key.trial] += counts_of(row)
        scores = [float(iou(totals[trial.key].confusion).nanmean()) for trial in trials]
        if any(score != score for score in scores):
            reasons = {row["error"] for row in rows.values() if "error" in row}
            raise ValueError(
                f"{method.name} has nothing to choose by: no image of {domain.label} could be "
                f"scored{f' ({sorted(reasons)[0]})' if reasons else ''}"
            )
        return scores


@contextmanager
def _threads(number: int, device: torch.device) -> Iterator[None]:
    """Compute with this many threads on a CPU, whatever it was before."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _reason(trial: Trial, error: Exception) -> str:
    return f"{trial.method} failed: {without_unsafe_advice(described(error))}"


def _autocast(precision: str, model: Any) -> torch.autocast:
    device = next(model.parameters()).device.type
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device, kinds.get(precision), enabled=precision in kinds)
