"""Tuning: choose settings by mean IoU on the validation domain, without reading the targets."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from selfadapt.protocol.recipe import MethodConfig


@dataclass
class Choice:
    """The settings tried for a method, and those chosen."""

    tried: list[tuple[dict[str, Any], float]] = field(default_factory=list)
    """Settings and their mean IoU on the validation domain."""
    chosen: dict[str, Any] = field(default_factory=dict)
    """The tuned settings."""


def choose(
    method: MethodConfig,
    score: Callable[[Sequence[dict[str, Any]]], Sequence[float]],
    start: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Choice:
    """Choose the settings of a method with the highest score; the first of equals.

    Args:
        method: The method.
        score: Returns the mean IoU on the validation domain for each of some settings.
        start: Tuned settings taken from another method.
        settings: The method's settings without tuning.
    """
    choice = Choice(chosen=dict(start))
    for candidates in _stages(method, choice, settings):
        scores = score(candidates)
        earlier = [values for values, _ in choice.tried]
        for values, value_score in zip(candidates, scores, strict=True):
            if values not in earlier:
                choice.tried.append((values, value_score))
        best = max(range(len(scores)), key=scores.__getitem__)
        choice.chosen = dict(candidates[best])
    return choice


def num_candidates(method: MethodConfig) -> int:
    """Return the number of different settings tried for a method."""
    counts = [len(values) for values in method.tune.values()]
    if method.search == "grid":
        return prod(counts) if counts else 0
    return sum(counts) - max(0, len(counts) - 1)  # each stage includes the best so far


def _stages(
    method: MethodConfig, choice: Choice, settings: Mapping[str, Any]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the candidates of each stage; ``search`` in turn has one stage per setting."""
    if not method.tune:
        return
    if method.search == "grid":
        combinations = product(*method.tune.values())
        yield [
            {**choice.chosen, **dict(zip(method.tune, combination, strict=True))}
            for combination in combinations
        ]
        return
    first = {
        name: settings[name] if settings.get(name) in values else values[0]
        for name, values in method.tune.items()
    }
    choice.chosen = {**choice.chosen, **first}
    for name, values in method.tune.items():
        yield [{**choice.chosen, name: value} for value in values]
