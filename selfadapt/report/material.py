"""What the sections of a report are made of, and what they are made from."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any, Literal

from selfadapt.protocol.results import DomainScores, Results
from selfadapt.report.formats import Cell, Grid
from selfadapt.report.published import Number, find_number, find_swept, is_published, names_of

MEANS = ({"cityscapes", "bdd", "idd"}, {"acdc-fog", "acdc-rain", "acdc-snow"})
"""The domains that the paper's means are over."""


@dataclass
class Exhibit:
    """A table or a figure with its caption; ``name`` is that of its files."""

    name: str
    caption: str
    grid: Grid | None = None
    figure: Any = None


@dataclass
class Section:
    """A part of the report."""

    title: str
    text: str
    exhibits: list[Exhibit] = field(default_factory=list)
    pictures: list[dict[str, Any]] = field(default_factory=list)
    """Files in the run's folder of pictures, and what they show."""


class Material:
    """What sections are made of: the results, and what the run's record says beside them."""

    def __init__(
        self, results: Results, record: dict[str, Any], pictures: Sequence[dict[str, Any]]
    ) -> None:
        self.results, self.record, self.pictures = results, record, list(pictures)

    def labels(self, methods: Collection[str]) -> list[str]:
        """Return the labels of rows of these methods, in the order of the recipe."""
        return [m.name for m in self.results.config.methods if m.method in methods]

    def network(self, label: str) -> str:
        """Return the architecture of a method's network."""
        return str(self._spec(label)["name"])

    def grid(
        self,
        labels: Sequence[str],
        value: Callable[[DomainScores], float],
        metric: str | None = "mIoU",
        best: Literal["high", "low"] = "high",
    ) -> Grid:
        """Return a number for each method and target, and the published below, if there is one.

        Args:
            labels: The methods.
            value: What to show of their scores.
            metric: What the paper calls that; None: it has no such number.
            best: Whether a high or a low number is good.
        """
        results = self.results
        columns = ("method", *results.targets, *(["mean"] if len(results.targets) > 1 else []))
        rows: list[tuple[Cell, ...]] = []
        for label in labels:
            scores = [results.scores(label, domain) for domain in results.targets]
            values = [100 * value(one) if one.counts.confusion.any() else nan for one in scores]
            means = [results.mean(values)] if len(values) > 1 else []
            rows.append((label, *values, *means))
            if metric and (row := self._published_row(label, metric)) is not None:
                rows.append(row)
        return Grid(columns, rows, best)

    def swept(self, label: str, setting: str, values: Sequence[float | None]) -> list[float | None]:
        """Return what the paper has on Cityscapes for values of a setting of self-adaptation."""
        source, network = self.results.config.source, self.network(label)
        if self.results.method(label).method != "self-adapt":
            return [None] * len(values)
        return [None if v is None else find_swept(source, network, setting, v) for v in values]

    def _spec(self, label: str) -> dict[str, Any]:
        name = self.results.trial(label).networks[0]
        spec: dict[str, Any] = self.record["networks"][name]
        return spec

    def _published_row(self, label: str, metric: str) -> tuple[Cell, ...] | None:
        config, spec = self.results.config, self._spec(label)
        names = names_of(self.results.trial(label), spec["norm"], spec["dropout"])

        def find(domain: str) -> Number | None:
            return find_number(config.source, spec["name"], names, domain, metric)

        same = [is_published(one, config.source, config.classes) for one in config.targets]
        targets = zip(config.targets, same, strict=True)
        numbers = [find(domain.dataset) if good else None for domain, good in targets]
        if not any(numbers):
            return None
        if len(numbers) > 1:
            averaged = {one.dataset for one in config.targets if one.in_mean}
            numbers.append(find("mean") if averaged in MEANS and all(same) else None)
        # as text: in bold stands the best of ours
        return (f"{label}, published", *(f"{one.value:.2f}" if one else "-" for one in numbers))
