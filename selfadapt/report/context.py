"""Sections of a report, their items, and the context that they are made from."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any, Literal

from selfadapt.protocol.results import DomainScores, Results
from selfadapt.report.formats import Cell, Grid
from selfadapt.report.published import (
    Number,
    find_number,
    find_sweep_value,
    is_published,
    published_names,
)

MEANS = ({"cityscapes", "bdd", "idd"}, {"acdc-fog", "acdc-rain", "acdc-snow"})
"""Sets of domains that the paper reports a mean of."""


@dataclass
class ReportItem:
    """A table or a figure with its caption; ``name`` is the stem of its files."""

    name: str
    caption: str
    grid: Grid | None = None
    figure: Any = None


@dataclass
class Section:
    """A section of the report."""

    title: str
    text: str
    items: list[ReportItem] = field(default_factory=list)
    pictures: list[dict[str, Any]] = field(default_factory=list)
    """Entries of the run's ``pictures/index.json``."""

    @property
    def anchor(self) -> str:
        """The address of the section in the page."""
        return self.title.lower().replace(" ", "-")


class ReportContext:
    """Results, record and pictures of a run, and tables of them."""

    def __init__(
        self, results: Results, record: dict[str, Any], pictures: Sequence[dict[str, Any]]
    ) -> None:
        self.results, self.record, self.pictures = results, record, list(pictures)

    def labels(self, methods: Collection[str]) -> list[str]:
        """Return the labels of the given methods, in the order of the recipe."""
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
        """Return a table of methods by targets, with published values where the paper has them.

        Args:
            labels: The methods.
            value: The value to show of their scores.
            metric: Name of the metric in the paper; None: the paper does not report it.
            best: Whether higher or lower is better.
        """
        results = self.results
        columns = ("method", *results.targets, *(["mean"] if len(results.targets) > 1 else []))
        rows: list[tuple[Cell, ...]] = []
        for label in labels:
            scores = [results.scores(label, domain) for domain in results.targets]
            values = [100 * value(s) if s.counts.confusion.any() else nan for s in scores]
            means = [results.mean(values)] if len(values) > 1 else []
            rows.append((label, *values, *means))
            if metric and (row := self._published_row(label, metric)) is not None:
                rows.append(row)
        return Grid(columns, rows, best)

    def sweep_values(
        self, label: str, setting: str, values: Sequence[float | None]
    ) -> list[float | None]:
        """Return the paper's mIoU on Cityscapes for values of a setting of self-adaptation."""
        source, network = self.results.config.source, self.network(label)
        if self.results.method(label).method != "self-adapt":
            return [None] * len(values)
        return [
            None if v is None else find_sweep_value(source, network, setting, v) for v in values
        ]

    def _spec(self, label: str) -> dict[str, Any]:
        name = self.results.trial(label).networks[0]
        spec: dict[str, Any] = self.record["networks"][name]
        return spec

    def _published_row(self, label: str, metric: str) -> tuple[Cell, ...] | None:
        config, spec = self.results.config, self._spec(label)
        names = published_names(self.results.trial(label), spec["norm"], spec["dropout"])

        def find(domain: str) -> Number | None:
            return find_number(config.source, spec["name"], names, domain, metric)

        comparable = [is_published(d, config.source, config.classes) for d in config.targets]
        targets = zip(config.targets, comparable, strict=True)
        numbers = [find(domain.dataset) if same else None for domain, same in targets]
        if not any(numbers):
            return None
        if len(numbers) > 1:
            averaged = {domain.dataset for domain in config.targets if domain.in_mean}
            numbers.append(find("mean") if averaged in MEANS and all(comparable) else None)
        # as text, so that only our own values are set in bold
        return (f"{label}, published", *(f"{n.value:.2f}" if n else "-" for n in numbers))
