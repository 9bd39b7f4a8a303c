"""Evaluate by the protocol: tune on the validation domain, freeze, then segment every target once.

    tune      settings by mean IoU on the validation domain                tune.py
    measure   one row for each image and trial                             journal.py, rows.py
    tables    sums over the rows                                           tables.py
    pictures  some images before and after adaptation                      pictures.py

Shares of a run are separate processes, which read the rows of the others in the journal. On the
validation domain each share segments its images, then all images that still lack rows, since every
share needs the tuned settings. On the targets it segments only its images. The last share to end
writes the tables.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from selfadapt.devices import cpu_threads, find_device, refuse_torchrun
from selfadapt.forecast import image_seconds, is_short
from selfadapt.journal import Journal, Row
from selfadapt.metrics import Counts, iou
from selfadapt.prefetch import num_readers, prefetch
from selfadapt.progress import ProgressBar, duration
from selfadapt.protocol.domains import Domain, open_domains
from selfadapt.protocol.folder import EvaluationFolder
from selfadapt.protocol.pictures import draw_pictures
from selfadapt.protocol.recipe import EvaluateConfig, MethodConfig
from selfadapt.protocol.results import read_results
from selfadapt.protocol.rows import TrialKey, counts_of
from selfadapt.protocol.scorer import Loaded, ScoreJob, Scorer, Workers
from selfadapt.protocol.tables import write_tables
from selfadapt.protocol.trials import (
    Trial,
    check_training,
    check_trials,
    load_own_code,
    open_network,
    sweeps_of,
    trial_of,
)
from selfadapt.protocol.tune import Choice, choose, num_candidates
from selfadapt.runs import WHOLE, Shard

IOU_INTERVAL_S = 0.5
"""Seconds between two updates of the mean IoU so far."""
LONG_RUN_S = 600.0
"""Duration of a run from which on the forecast says how to shorten it."""


def evaluate(
    config: EvaluateConfig,
    folder: str | Path,
    *,
    overwrite: bool = False,
    retry: bool = False,
    only_tune: bool = False,
    trust: bool = False,
    shard: Shard = WHOLE,
    log: Callable[[str], None] = lambda line: None,
    workers: Workers | None = None,
) -> Path:
    """Evaluate, or continue an evaluation that was stopped.

    Args:
        config: The recipe.
        folder: Output folder. An existing run of the same recipe and networks is continued; its
            rows are kept.
        overwrite: Replace an existing run.
        retry: Retry images that failed, or whose files have changed since.
        only_tune: Tune settings on the validation domain, without reading the targets.
        trust: Run the user's own code: networks at ``MODULE:FUNCTION``, methods at
            ``MODULE:CLASS``.
        shard: The share of the images to segment. Tables are written when all shares are done.
        log: Called with a line on the expected time, before the first image.
        workers: Segment the images instead of this process, whose networks stay on the CPU.

    Returns:
        The folder.
    """
    refuse_torchrun("evaluate")
    device = find_device("cpu" if workers else config.device)
    config = load_own_code(config, trust)
    check_training(config)
    domains = open_domains(config)
    models: dict[str, Any] = {
        name: open_network(network, trust).to(device) for name, network in config.networks.items()
    }
    for domain in domains:
        for note in domain.data.notes:
            warnings.warn(f"{domain.label}: {note}", stacklevel=2)
    check_trials(config, models)
    threads = cpu_threads(config.threads) if device.type == "cpu" else nullcontext()
    with EvaluationFolder(Path(folder), shard) as store, threads:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        name = workers.device_name if workers else name
        store.start(config, models, domains, name, overwrite=overwrite, retry=retry)
        with closing(store.journal(TrialKey)) as journal:
            if workers is not None:
                workers.start(config, domains, models)
            run = Evaluation(config, domains, models, journal, shard, workers)
            if line := run.forecast(only_tune=only_tune):
                log(line)
            choices = run.tune()
            store.write_choices(choices)
            if only_tune:
                return store.path
            run.measure_all(choices)
        if store.claim():
            results = read_results(store.path)
            if not results.num_missing({domain.label: len(domain.data) for domain in domains}):
                write_tables(store.path, results)
                draw_pictures(store.path, results, run)
    return store.path


class Evaluation(Scorer):
    """One evaluation, or a share of it."""

    def __init__(
        self,
        config: EvaluateConfig,
        domains: Sequence[Domain],
        models: Mapping[str, Any],
        journal: Journal[TrialKey],
        shard: Shard = WHOLE,
        workers: Workers | None = None,
    ) -> None:
        super().__init__(config, domains, models)
        self.journal, self.shard, self.workers = journal, shard, workers

    def tune(self) -> dict[str, Choice]:
        """Tune the settings of every method; return the choices by label."""
        choices: dict[str, Choice] = {}
        for method in self.config.methods:

            def score(candidates: Sequence[dict[str, Any]], of: MethodConfig = method) -> list:
                return self._validated(of, candidates)

            shared = choices[method.same_as].chosen if method.same_as else {}
            settings = trial_of(self.config, method).settings
            start = {n: v for n, v in shared.items() if n in settings and n not in method.settings}
            choices[method.name] = choose(method, score, start, settings)
        return choices

    def forecast(self, *, only_tune: bool) -> str | None:
        """Return a line on the expected time; None if it is unknown, as on a GPU."""
        times: dict[str, float] = {}
        for domain in self.domains[: 1 if only_tune else None] if self.workers is None else ():
            try:
                size = domain.usual_size()
            except (ValueError, OSError):  # reported when it is read
                continue
            if is_short({size: len(domain.data)}):
                continue
            total = num_trials = 0.0
            for method in self.config.methods:
                tried = num_candidates(method) if domain is self.domains[0] else 0
                if not only_tune:
                    tried = max(tried, 1) + sum(map(len, method.sweep.values()))
                seconds = image_seconds(self.method(trial_of(self.config, method)), size)
                if seconds is None:
                    return None
                total, num_trials = total + seconds * tried, num_trials + tried
            done = sum(key.domain == domain.label for key in self.journal.done)
            left = len(domain.data) - done / max(num_trials, 1)
            times[domain.label] = max(0.0, total * left / self.shard.total)
        if not (total_time := sum(times.values())):
            return None
        parts = ", ".join(f"{label} {duration(seconds)}" for label, seconds in times.items())
        hint = "; a limit or a smaller scale of the domains makes it shorter"
        return (
            f"this takes about {duration(total_time)} on this CPU ({parts})"
            f"{hint if total_time > LONG_RUN_S else ''}"
        )

    def measure_all(self, choices: dict[str, Choice]) -> None:
        """Segment all domains with the chosen settings, and with those of the sweeps."""
        trials: dict[str, Trial] = {}
        for method in self.config.methods:
            chosen = choices[method.name].chosen
            tuned = trial_of(self.config, method, **chosen)
            for trial in [tuned, *sweeps_of(self.config, method, chosen).values()]:
                trials[trial.key] = trial
        unique = list(trials.values())
        shares = {domain.label: self.shard.of(len(domain.data)) for domain in self.domains}
        left = sum(self._num_missing(d, shares[d.label], unique) for d in self.domains)
        with ProgressBar("evaluating", left, quiet=not left) as progress:
            for domain in self.domains:
                progress.update(name=domain.label, note="")
                self.measure(domain, shares[domain.label], unique, progress)

    def measure(
        self,
        domain: Domain,
        numbers: Iterable[int],
        trials: Sequence[Trial],
        progress: ProgressBar,
    ) -> None:
        """Segment these images of a domain with all trials, unless they already have rows."""
        missing = [n for n in numbers if self._missing(domain, n, trials)]
        num_classes = len(domain.data.space.names)
        confusion = np.zeros(num_classes**2, np.int64)  # of the last trial, to show its mean IoU
        shown_at = float("-inf")

        def write_row(row: Row, trial: Trial) -> None:
            nonlocal confusion, shown_at
            self.journal.write(row)
            if trial is trials[-1] and "error" not in row:
                confusion += row["confusion"]
                if time.monotonic() - shown_at >= IOU_INTERVAL_S:
                    shown_at = time.monotonic()
                    counts = torch.from_numpy(confusion).reshape(num_classes, num_classes)
                    progress.update(note=f"mIoU {100 * float(iou(counts).nanmean()):.1f}")
            progress.advance()

        def compute_and_write(compute_row: Callable[[], Row], trial: Trial) -> None:
            write_row(compute_row(), trial)

        if self.workers is not None:
            index = self.domains.index(domain)
            jobs = [ScoreJob(index, n, self._missing(domain, n, trials)) for n in missing]
            for job, rows in self.workers.rows(jobs):
                if isinstance(rows, ValueError):
                    keys = [
                        TrialKey(domain.label, domain.names[job.number], t.key) for t in job.trials
                    ]
                    rows = [self.failed(key, str(rows)) for key in keys]
                for trial, row in zip(job.trials, rows, strict=True):
                    write_row(row, trial)
            return
        with ThreadPoolExecutor(1) as row_writer:  # works while a GPU segments the next image
            written = row_writer.submit(lambda: None)
            for number, loaded in self._read(domain, missing):
                if self.shard.total > 1:
                    self.journal.refresh()
                for trial in self._missing(domain, number, trials):
                    compute_row = self.score(domain, number, loaded, trial)
                    if self._stream is None:  # a CPU is busy with the network anyway
                        write_row(compute_row(), trial)
                    else:
                        written.result()
                        written = row_writer.submit(compute_and_write, compute_row, trial)
            written.result()
        self._counted = None

    def _read(
        self, domain: Domain, numbers: Sequence[int]
    ) -> Iterator[tuple[int, Loaded | Exception]]:
        """Yield images with labels, by their number."""
        read = partial(self.load_or_error, domain)
        with closing(prefetch(read, numbers, num_readers())) as pairs:
            yield from zip(numbers, pairs, strict=True)

    def _missing(self, domain: Domain, number: int, trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials for which an image has no row."""
        name, done = domain.names[number], self.journal.done
        return [t for t in trials if TrialKey(domain.label, name, t.key) not in done]

    def _num_missing(self, domain: Domain, numbers: Iterable[int], trials: Sequence[Trial]) -> int:
        return sum(len(self._missing(domain, number, trials)) for number in numbers)

    def _validated(self, method: MethodConfig, settings: Sequence[dict[str, Any]]) -> list[float]:
        """Return the mean IoU of a method on the validation domain for each of some settings."""
        domain = self.domains[0]
        share = self.shard.of(len(domain.data))
        others = (number for number in range(len(domain.data)) if number not in share)
        trials = [trial_of(self.config, method, **values) for values in settings]
        numbers = [*share, *others]
        left = self._num_missing(domain, numbers, trials)
        with ProgressBar(f"tuning {method.name}", left, quiet=not left) as progress:
            self.measure(domain, numbers, trials, progress)
        totals = {trial.key: Counts.zero(len(domain.data.space.names)) for trial in trials}
        rows = self.journal.rows(lambda key: key.domain == domain.label and key.trial in totals)
        failed = {key.image for key, row in rows.items() if "error" in row}
        for key, row in rows.items():
            if key.image not in failed:  # compare all trials on the same images
                totals[key.trial] += counts_of(row)
        scores = [float(iou(totals[trial.key].confusion).nanmean()) for trial in trials]
        if any(score != score for score in scores):
            reasons = {row["error"] for row in rows.values() if "error" in row}
            raise ValueError(
                f"{method.name} cannot be tuned: no image of {domain.label} could be "
                f"scored{f' ({sorted(reasons)[0]})' if reasons else ''}"
            )
        return scores
