"""How long an image may take: settings that go together, and steps that fit into a budget."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from selfadapt.checks import check_number
from selfadapt.names import nearest

PRESETS: dict[str, dict[str, Any]] = {
    "realtime": {
        "mode": "paper", "scales": (0.25, 0.5), "steps": 2, "lr": 0.015, "step_scale": 0.75,
        "final_scales": (0.5,), "final_weight": 0.65,
    },
}  # fmt: skip
"""Settings that go together, chosen on the validation domain."""


def with_preset(
    preset: str | None, given: dict[str, Any], own: Mapping[str, inspect.Parameter]
) -> dict[str, Any]:
    """Return settings, with those of a preset in the place of what a method has by itself.

    Args:
        preset: Its name; None: no preset.
        given: The settings a preset may set, as they were given.
        own: The method's parameters.
    """
    if preset is None:
        return given
    if preset not in PRESETS:
        guess, known = nearest(str(preset), PRESETS), ", ".join(PRESETS)
        raise ValueError(f"unknown preset {preset!r};{guess} known: {known}")
    for name, value in PRESETS[preset].items():
        kept = tuple(given[name]) if isinstance(given[name], list) else given[name]
        if kept not in (own[name].default, value):
            raise ValueError(
                f"the preset {preset!r} sets {name} to {value!r}, got {given[name]!r}; leave out "
                "one of the two"
            )
    return given | PRESETS[preset]


class Pace:
    """Finds out how many steps fit into a budget. Time is in proportion to the pixels.

    Args:
        budget_ms: Milliseconds for an image.

    Example:
        >>> pace = Pace(50)
        >>> pace.steps(10, 100, measure=lambda steps: 0.020 + 0.005 * steps)
        6
        >>> pace.steps(10, 200, measure=lambda steps: 1.0)  # known by now
        1
    """

    def __init__(self, budget_ms: float) -> None:
        check_number("budget_ms", budget_ms, 0)
        self.seconds = budget_ms / 1000
        self._of_pixel: tuple[float, float] | None = None  # a step, and all the rest

    def steps(self, most: int, pixels: int, measure: Callable[[int], float]) -> int:
        """Return how many of ``most`` steps there is time for.

        Args:
            most: Steps that are wanted.
            pixels: Pixels of the image.
            measure: Returns the seconds an image takes with a number of steps.
        """
        if self._of_pixel is None:
            one, two = measure(1), measure(2)
            step = max(two - one, 1e-6)
            self._of_pixel = step / pixels, max(one - step, 0.0) / pixels
        step, rest = (seconds * pixels for seconds in self._of_pixel)
        return max(0, min(most, int((self.seconds - rest) / step + 1e-6)))
