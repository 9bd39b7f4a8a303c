"""Presets of settings, and the number of steps that fit into a time budget."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from selfadapt.checks import check_number
from selfadapt.patterns import nearest

SHORT = {
    "mode": "auto", "scales": (0.25, 0.5), "steps": 3, "lr": 0.1, "step_scale": 0.5,
    "final_scales": (0.5,),
}  # fmt: skip
"""What the presets have in common."""
PRESETS: dict[str, dict[str, Any]] = {
    "cpu": SHORT,
    "realtime": {**SHORT, "max_pixels": 800_000},
}
"""Sets of settings by name, chosen on the validation domains."""
NEAR = 2
"""Sizes that differ by no more than this factor take time in proportion to their pixels."""


def as_tuple(numbers: Any) -> Any:
    """Return lists and arrays as tuples, which can be compared; all else as it is."""
    return tuple(numbers) if isinstance(numbers, Iterable) else numbers


def with_preset(
    preset: str | None, given: dict[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> dict[str, Any]:
    """Return settings, with default values replaced by those of a preset.

    Args:
        preset: Its name; None: no preset.
        given: Values of the settings that a preset may set.
        parameters: The method's parameters.
    """
    if preset is None:
        return given
    if not isinstance(preset, str) or preset not in PRESETS:
        guess = nearest(str(preset), PRESETS)
        raise ValueError(f"unknown preset {preset!r};{guess} known: {', '.join(PRESETS)}")
    for name, value in PRESETS[preset].items():
        if given[name] not in (parameters[name].default, value):
            raise ValueError(
                f"the preset {preset!r} sets {name} to {value!r}, got {given[name]!r}; leave out "
                "one of the two"
            )
    return given | PRESETS[preset]


class TimeBudget:
    """Computes how many steps fit into a time budget.

    Args:
        budget_ms: Milliseconds for an image.

    Example:
        >>> budget = TimeBudget(50)
        >>> budget.steps(10, 100, measure=lambda steps: 0.020 + 0.005 * steps)
        6
        >>> budget.steps(10, 150, measure=lambda steps: 1.0)  # already measured
        2
    """

    def __init__(self, budget_ms: float) -> None:
        check_number("budget_ms", budget_ms, 0)
        self.seconds = budget_ms / 1000
        self._times: dict[int, tuple[float, float]] = {}  # by pixels: of a step, and of the rest

    def steps(self, most: int, pixels: int, measure: Callable[[int], float]) -> int:
        """Return how many of ``most`` steps there is time for.

        Args:
            most: Number of steps without a limit.
            pixels: Pixels of the image.
            measure: Returns the seconds an image takes with a number of steps.
        """
        if not most:
            return 0
        near = min(self._times, key=lambda size: abs(size - pixels), default=0)
        if not near / NEAR <= pixels <= near * NEAR:
            first, second = measure(1), measure(2)
            step = max(second - first, first / 100)
            near, self._times[pixels] = pixels, (step, max(first - step, 0.0))
        step, rest = (seconds * pixels / near for seconds in self._times[near])
        fitting = (self.seconds - rest) / step + 1e-6
        return most if fitting >= most else max(0, int(fitting))
