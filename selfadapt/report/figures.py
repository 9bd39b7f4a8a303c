"""Figures of a report. Their numbers are also in a table."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from selfadapt.optional import import_optional

COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c")
MARKERS = ("o", "s", "^", "D")
Points = Sequence[tuple[float, float]]


def curves(
    lines: Mapping[str, Points], x: str, y: str, *, marked: Mapping[str, float] | None = None
) -> Any:
    """Draw a line for each name, and a vertical line for each entry of ``marked``."""
    figure, axes = _figure(6, 3.8)
    for number, (name, points) in enumerate(lines.items()):
        axes.plot(*zip(*points, strict=True), marker=".", color=_color(number), label=_label(name))
    for name, value in (marked or {}).items():
        axes.axvline(value, color="#999999", linestyle=":", linewidth=1, label=_label(name))
    axes.set(xlabel=x, ylabel=y)
    axes.legend(fontsize=8)
    return figure


def scatter(groups: Mapping[str, Sequence[tuple[float, float, str]]], x: str, y: str) -> Any:
    """Draw the points of each group; groups of several points are connected and annotated."""
    figure, axes = _figure(7.6, 4.2)
    for number, (name, points) in enumerate(groups.items()):
        coordinates = [(a, b) for a, b, _ in points]
        axes.plot(
            *zip(*coordinates, strict=True), label=_label(name),
            linestyle="-" if len(points) > 1 else "",
            marker=MARKERS[number // len(COLORS) % len(MARKERS)], color=_color(number),
        )  # fmt: skip
        for a, b, text in points if len(points) > 1 else ():
            axes.annotate(
                _label(text), (a, b), xytext=(4, -10), textcoords="offset points", fontsize=7
            )
    axes.set(xlabel=x, ylabel=y, xscale="log")
    ticks = import_optional("matplotlib.ticker", "report")
    axes.xaxis.set_major_locator(ticks.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def reliability_diagrams(bins: Mapping[str, Tensor]) -> Any:
    """Draw accuracy over confidence for each method, with the share of pixels as bars."""
    figure, panels = _panels(len(bins), 4, 2.6, 2.7)
    for axes, (name, (pixels, accuracy, confidence)) in zip(panels, bins.items(), strict=True):
        width = 1 / len(pixels)
        left = torch.arange(len(pixels)) * width
        axes.bar(left, pixels / pixels.sum(), width, align="edge", color="#dddddd")
        axes.plot([0, 1], [0, 1], color="#999999", linestyle=":")
        axes.plot(confidence, accuracy, marker="o", markersize=3, color=COLORS[0])
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
        axes.set_title(_label(name), fontsize=9)
    return figure


def histograms(changes: Mapping[str, Sequence[float]]) -> Any:
    """Draw a histogram of the change of IoU by image for each method."""
    figure, panels = _panels(len(changes), 3, 3.4, 2.5)
    all_values = [100 * value for values in changes.values() for value in values]
    edges = torch.linspace(min([*all_values, -1]), max([*all_values, 1]), 25).tolist()
    for number, (name, values) in enumerate(changes.items()):
        panels[number].hist([100 * value for value in values], edges, color=_color(number))
        panels[number].axvline(0, color="black", linewidth=0.8)
        panels[number].set_title(_label(name), fontsize=9)
        panels[number].set(xlabel="change of IoU (points)", ylabel="images")
    return figure


def _label(text: str) -> str:
    """Escape ``$``, which starts a formula, and a leading ``_``, which hides a legend entry."""
    return (f" {text}" if text.startswith("_") else text).replace("$", r"\$")


def _figure(width: float, height: float) -> tuple[Any, Any]:
    figure = import_optional("matplotlib.figure", "report").Figure(
        (width, height), layout="constrained"
    )
    return figure, figure.subplots()


def _panels(number: int, columns: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """Return a figure with a number of panels, in rows of at most ``columns``."""
    columns = min(columns, number)
    rows = -(-number // columns)
    figure = import_optional("matplotlib.figure", "report").Figure(
        (width * columns, height * rows), layout="constrained"
    )
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels[number:]:
        axes.set_axis_off()
    return figure, panels[:number]


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]
