"""Requests of visitors: methods and settings, validated because they come over the network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfadapt.adapt import STEP_LENGTH
from selfadapt.app.limits import MAX_LR, MAX_METHODS, MAX_STEPS
from selfadapt.checks import check_number
from selfadapt.methods import settings_of
from selfadapt.patterns import alternatives

SETTINGS = ("alpha", "psi", "lr", "steps", "scales")
"""Settings with a control on the page."""
SHARED = ("alpha", "scales")
"""Settings that apply to all methods; the others apply to the first method only."""
SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
RANGES = {"alpha": (0, 1), "psi": (0, 1), "lr": (1e-6, MAX_LR), "steps": (0, MAX_STEPS)}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A network and the methods to run with it."""

    model: str
    methods: Mapping[str, dict[str, Any]]
    """Settings by method name, in the order of the runs."""


def validated(
    model: str, offered: Sequence[str], method: object, others: object, settings: Mapping[str, Any]
) -> Request:
    """Check the requested methods and settings, which may be of any type.

    Args:
        model: Name of a network.
        offered: Names of the methods it supports.
        method: Name of the method that takes the settings.
        others: Names of further methods to compare with.
        settings: A value for each of ``SETTINGS``.

    Raises:
        ValueError: A method is unknown or a setting is out of range.
    """
    if not isinstance(others, list | tuple):
        raise ValueError(f"methods to compare with must be a list of names, got {others!r}")
    names = list(dict.fromkeys(check_method(name, offered) for name in (method, *others)))
    if len(names) > MAX_METHODS:
        raise ValueError(f"{MAX_METHODS} methods can be run at once, got {len(names)}")
    methods = {}
    for index, name in enumerate(names):
        allowed = SETTINGS if index == 0 else SHARED
        values = {key: settings[key] for key in allowed if key in settings_of(name)}
        for key, value in values.items():
            if key == "scales":
                _check_scales(value)
                values[key] = tuple(sorted(set(value)))
            else:
                check_number(key, value, *RANGES[key], whole=key == "steps")
        methods[name] = values
    return Request(model=model, methods=methods)


def check_method(name: object, offered: Sequence[str]) -> str:
    """Return the name of a method if it is offered, else raise ValueError."""
    if not isinstance(name, str) or name not in offered:
        shown = str(name)[:40]
        raise ValueError(f"unknown method {shown!r} for this network{alternatives(shown, offered)}")
    return name


def _check_scales(scales: object) -> None:
    if not isinstance(scales, list | tuple) or not scales or len(scales) > len(SCALES):
        raise ValueError(f"scales must be a list of 1 to {len(SCALES)} numbers, got {scales!r}")
    for scale in scales:
        check_number("each scale", scale, min(SCALES), max(SCALES))


def defaults(method: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default values of the settings of a method.

    Args:
        method: The method's name.
        chosen: Values tuned for the network; ``lr`` applies to self-adaptation only.
    """
    parameters = settings_of(method)
    values = {name: parameters[name].default for name in SETTINGS if name in parameters}
    if "lr" in values and values["lr"] is None:
        values["lr"] = STEP_LENGTH
    tuned = ("alpha", "lr") if method == "self-adapt" else ("alpha",)
    return values | {name: chosen[name] for name in tuned if name in chosen and name in values}
