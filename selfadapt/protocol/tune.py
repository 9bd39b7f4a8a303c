"""Tuning: settings are chosen on the validation domain by mean IoU, before any target is seen."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from selfadapt.protocol.recipe import MethodConfig


@dataclass
class Choice:
    """What was tried for a method, and what was chosen."""

    tried: list[tuple[dict[str, Any], float]] = field(default_factory=list)
    """Settings, and their mean IoU on the validation domain."""
    chosen: dict[str, Any] = field(default_factory=dict)
    """The tuned settings, frozen from here on."""


def choose(
    method: MethodConfig,
    score: Callable[[Sequence[dict[str, Any]]], Sequence[float]],
    start: Mapping[str, Any],
    own: Mapping[str, Any],
) -> Choice:
    """Choose the settings of a method; of equals the one that is named first.

    Args:
        method: What to tune.
        score: Returns the mean IoU on the validation domain for each of some settings.
        start: Settings that were chosen for another method and are taken over.
        own: The method's settings as they are without tuning.
    """
    choice = Choice(chosen=dict(start))
    for candidates in _stages(method, choice, own):
        scores = score(candidates)
        known = [settings for settings, _ in choice.tried]
        found = zip(candidates, scores, strict=True)
        choice.tried += [one for one in found if one[0] not in known]
        best = max(range(len(scores)), key=scores.__getitem__)
        choice.chosen = dict(candidates[best])
    return choice


def num_candidates(method: MethodConfig) -> int:
    """Return how many settings are tried for a method, each of them once."""
    counts = [len(values) for values in method.tune.values()]
    if method.search == "grid":
        return prod(counts) if counts else 0
    return sum(counts) - max(0, len(counts) - 1)  # each setting starts from the best so far


def _stages(
    method: MethodConfig, choice: Choice, own: Mapping[str, Any]
) -> Iterator[list[dict[str, Any]]]:
    """Yield what to try next; one setting after the other starts from what was chosen so far."""
    if not method.tune:
        return
    if method.search == "grid":
        combinations = product(*method.tune.values())
        yield [
            {**choice.chosen, **dict(zip(method.tune, combination, strict=True))}
            for combination in combinations
        ]
        return
    first = {n: own[n] if own.get(n) in values else values[0] for n, values in method.tune.items()}
    choice.chosen = {**choice.chosen, **first}
    for name, values in method.tune.items():
        yield [{**choice.chosen, name: value} for value in values]
