"""What a user asks for. It comes over the network, so that every part of it is checked here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfadapt.adapt import LR
from selfadapt.checks import check_number
from selfadapt.methods import settings_of
from selfadapt.names import nearest

SETTINGS = ("alpha", "psi", "lr", "steps", "scales")
"""Settings there are controls for."""
SHARED = ("alpha", "scales")
"""Those that methods beside the first take too; the others belong to one method."""
SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
MAX_STEPS, MAX_LR, MAX_METHODS = 50, 1.0, 4
MAX_SEED = 9999
RANGES = {"alpha": (0, 1), "psi": (0, 1), "lr": (1e-6, MAX_LR), "steps": (0, MAX_STEPS)}


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A network, and the methods to run with it."""

    model: str
    methods: Mapping[str, dict[str, Any]]
    """Name -> settings, in the order they are run in."""


def wished(
    offers: Mapping[str, Sequence[str]],
    model: object,
    method: object,
    beside: object,
    settings: Mapping[str, Any],
) -> Wish:
    """Check what is asked for, whatever it may be.

    Args:
        offers: Networks by name, and the methods that can be run with each.
        model: The network's name.
        method: The name of the method that has the settings.
        beside: Names of other methods.
        settings: A value for each of ``SETTINGS``.

    Raises:
        ValueError: Something is not on offer, or out of its range.
    """
    name = _known("network", model, offers)
    if not isinstance(beside, list | tuple):
        raise ValueError(f"methods to compare with must be a list of names, got {beside!r}")
    names = dict.fromkeys(_known("method", each, offers[name]) for each in (method, *beside))
    if len(names) > MAX_METHODS:
        raise ValueError(f"{MAX_METHODS} methods can be run at once, got {len(names)}")
    first, *others = names
    given = {first: _had(first, SETTINGS, settings)}
    given |= {each: _had(each, SHARED, settings) for each in others}
    return Wish(model=name, methods={each: _checked(had) for each, had in given.items()})


def _known(sort: str, name: object, known: Mapping[str, Any] | Sequence[str]) -> str:
    if not isinstance(name, str) or name not in known:
        guess = nearest(str(name)[:40], known)
        raise ValueError(
            f"unknown {sort} {str(name)[:40]!r};{guess} there are {', '.join(known)} here"
        )
    return name


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in settings.items():
        if name == "scales":
            _check_scales(value)
        else:
            low, high = RANGES[name]
            check_number(name, value, low, high, whole=name == "steps")
    scales = {"scales": tuple(sorted(set(settings["scales"])))} if "scales" in settings else {}
    return {**settings, **scales}


def _check_scales(scales: object) -> None:
    if not isinstance(scales, list | tuple) or not scales or len(scales) > len(SCALES):
        raise ValueError(f"scales must be a list of 1 to {len(SCALES)} numbers, got {scales!r}")
    for scale in scales:
        check_number("each scale", scale, min(SCALES), max(SCALES))


def _had(method: str, names: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the settings that a method has."""
    return {name: settings[name] for name in names if name in settings_of(method)}


def defaults(method: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of its settings that a method starts with.

    Args:
        method: The method's name.
        chosen: Values chosen for the network; its ``lr`` is self-adaptation's.
    """
    known = settings_of(method)
    values = {name: known[name].default for name in SETTINGS if name in known}
    if "lr" in values and values["lr"] is None:
        values["lr"] = LR["paper"]
    taken = ("alpha", "lr") if method == "self-adapt" else ("alpha",)
    return values | {name: chosen[name] for name in taken if name in chosen and name in values}
