"""The results of an evaluation: its recipe, tuned settings, and sums over the rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from selfadapt.journal import read_errors, read_rows
from selfadapt.metrics import Counts, iou
from selfadapt.protocol.folder import read_record
from selfadapt.protocol.recipe import DomainConfig, EvaluateConfig, MethodConfig, NetworkConfig
from selfadapt.protocol.rows import TrialKey, counts_of
from selfadapt.protocol.trials import Trial, sweeps_of, trial_of
from selfadapt.protocol.tune import Choice
from selfadapt.runs.store import read_json


@dataclass
class DomainScores:
    """The rows of one trial on one domain."""

    num_classes: int
    images: list[str] = field(default_factory=list)
    """Names of the images that were segmented, sorted."""
    parts: list[Counts] = field(default_factory=list)
    """The counts of each image."""
    ms: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    quality: dict[str, float] = field(default_factory=dict)
    """Estimated quality of each image, of methods that estimate it."""
    notes: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    """Images that were not segmented, and why."""

    @cached_property
    def counts(self) -> Counts:
        """The sum over all images."""
        return sum(self.parts, Counts.zero(self.num_classes))

    @cached_property
    def confusions(self) -> Tensor:
        """The confusion matrix of each image ``(N, C, C)``."""
        return torch.stack([part.confusion for part in self.parts])

    @property
    def mean_iou(self) -> float:
        """Mean over the classes that occur in the domain, from one confusion matrix."""
        return float(iou(self.counts.confusion).nanmean())

    @cached_property
    def image_iou(self) -> dict[str, float]:
        """Mean IoU of each image over the classes in its label, if there are any."""
        scores = {
            name: float(iou(part.confusion).nanmean())
            for name, part in zip(self.images, self.parts, strict=True)
        }
        return {name: score for name, score in scores.items() if score == score}

    def changes(self, reference: "DomainScores") -> dict[str, float]:
        """Return the IoU of each image minus that of a reference."""
        before = reference.image_iou
        return {n: after - before[n] for n, after in self.image_iou.items() if n in before}


class Results:
    """The results of an evaluation."""

    def __init__(
        self,
        config: EvaluateConfig,
        choices: Mapping[str, Choice],
        rows: Mapping[TrialKey, Mapping[str, Any]],
        errors: Mapping[TrialKey, str] | None = None,
    ) -> None:
        self.config, self.choices = config, choices
        self.errors = errors or {}
        """All failures, also with settings that were not chosen."""
        self._by_trial: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for key in sorted(rows):
            self._by_trial.setdefault((key.domain, key.trial), []).append(rows[key])
        self._scores: dict[tuple[str, str], DomainScores] = {}

    @property
    def targets(self) -> list[str]:
        """The names of the target domains."""
        return [domain.label for domain in self.config.targets]

    def mean(self, values: Sequence[float]) -> float:
        """Return the mean over the targets of one value per target, without excluded targets."""
        targets = zip(values, self.config.targets, strict=True)
        return mean(value for value, target in targets if target.in_mean)

    @property
    def averaged(self) -> str:
        """The targets in the mean as text."""
        excluded = [target.label for target in self.config.targets if not target.in_mean]
        return "targets" + (f" but {', '.join(excluded)}" if excluded else "")

    @property
    def validation(self) -> str:
        """The name of the validation domain."""
        return self.config.domains[0].label

    @property
    def methods(self) -> list[str]:
        """The labels of the methods."""
        return [method.name for method in self.config.methods]

    def method(self, label: str) -> MethodConfig:
        """Return the part of the recipe with this label."""
        return next(method for method in self.config.methods if method.name == label)

    def trial(self, label: str) -> Trial:
        """Return the trial of a method with its tuned settings."""
        return trial_of(self.config, self.method(label), **self.choices[label].chosen)

    def sweeps(self, label: str) -> dict[tuple[str, str], Trial]:
        """Return the trials of a method's sweeps, by setting and value."""
        return sweeps_of(self.config, self.method(label), self.choices[label].chosen)

    def scores(self, label: str, domain: str) -> DomainScores:
        """Return the scores of a method on a domain."""
        return self.scores_of(self.trial(label), domain)

    def scores_of(self, trial: Trial, domain: str) -> DomainScores:
        """Return the scores of a trial on a domain."""
        key = domain, trial.key
        if key not in self._scores:
            scores = DomainScores(len(self.config.space.names))
            for row in self._by_trial.pop(key, ()):
                if "error" in row:
                    scores.errors[row["image"]] = row["error"]
                    continue
                scores.images.append(row["image"])
                scores.parts.append(counts_of(dict(row)))
                scores.ms.append(row["ms"])
                if row["mb"] is not None:
                    scores.megabytes.append(row["mb"])
                scores.notes += row["notes"]
                if (quality := row.get("quality")) is not None:
                    scores.quality[row["image"]] = quality
            self._scores[key] = scores
        return self._scores[key]

    def trials(self) -> dict[str, Trial]:
        """Return all trials that are scored on every domain, by their keys."""
        swept = (trial for label in self.methods for trial in self.sweeps(label).values())
        return {trial.key: trial for trial in (*map(self.trial, self.methods), *swept)}

    def errors_of_tuning(self, label: str) -> dict[str, dict[str, str]]:
        """Return the validation images that failed only with some tried settings, by settings."""
        scored, reported = self.trials(), self.scores(label, self.validation).errors
        failures = {}
        for settings, _ in self.choices[label].tried:
            trial = trial_of(self.config, self.method(label), **settings)
            if trial.key not in scored:
                errors = {
                    key.image: reason
                    for key, reason in self.errors.items()
                    if (key.domain, key.trial) == (self.validation, trial.key)
                    and key.image not in reported
                }
                failures[" ".join(f"{name}={value}" for name, value in settings.items())] = errors
        return failures

    def num_missing(self, images: Mapping[str, int]) -> int:
        """Return the number of missing rows, given the number of images of each domain."""
        missing = 0
        for domain, number in images.items():
            for trial in self.trials().values():
                scores = self.scores_of(trial, domain)
                missing += number - len(scores.images) - len(scores.errors)
        return missing

    def reference(self, label: str) -> str | None:
        """Return the label of ``source`` with the same network, the reference of a method."""
        networks = self.trial(label).networks
        for other in self.config.methods:
            if other.method == "source" and self.trial(other.name).networks == networks[:1]:
                return other.name
        return None


def read_results(folder: str | Path) -> Results:
    """Read the results of the evaluation in a folder."""
    folder = Path(folder)
    record = read_record(folder)
    try:
        chosen = read_json(folder / "chosen.json")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"the evaluation in {folder} has not chosen its settings yet; run selfadapt evaluate"
        ) from None
    try:
        config = config_of(record["recipe"])
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(
            f"{folder / 'record.json'} is damaged or of another version ({error}); use selfadapt "
            "evaluate with --overwrite to start again"
        ) from error
    try:
        choices = {method.name: Choice(**chosen[method.name]) for method in config.methods}
        for method in config.methods:
            choice = choices[method.name]
            for settings in (choice.chosen, *(tried for tried, _ in choice.tried)):
                trial_of(config, method, **settings)
            best = max((score for _, score in choice.tried), default=None)
            if choice.tried and (choice.chosen, best) not in map(tuple, choice.tried):
                raise ValueError(f"{choice.chosen} was not chosen")
            if not (method.tune or method.same_as) and choice.chosen:
                raise ValueError(f"{method.name} has no settings to tune")
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / 'chosen.json'} is damaged: it must list the tried settings of each method, "
            "and the best must be chosen; run selfadapt evaluate to write it again"
        ) from error
    keys = Results(config, choices, {}).trials()
    rows = read_rows(folder / "rows", TrialKey, lambda key: key.trial in keys)
    return Results(config, choices, rows, read_errors(folder / "rows", TrialKey))


def config_of(content: Mapping[str, Any]) -> EvaluateConfig:
    """Return the recipe in a record."""
    return EvaluateConfig(
        **{
            **content,
            "networks": {n: NetworkConfig(**network) for n, network in content["networks"].items()},
            "validation": DomainConfig(**content["validation"]),
            "targets": [DomainConfig(**domain) for domain in content["targets"]],
            "methods": [MethodConfig(**method) for method in content["methods"]],
        }
    )
