"""Requests of visitors and programs: methods and settings, which come over the network."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfadapt.adapt import PATH_LENGTH
from selfadapt.app.limits import MAX_LR, MAX_METHODS, MAX_STEPS
from selfadapt.app.networks import Networks
from selfadapt.checks import check_number
from selfadapt.methods import settings_of
from selfadapt.modes import MODES
from selfadapt.patterns import alternatives

SETTINGS = ("alpha", "psi", "lr", "steps", "scales")
"""Settings with a control on the page."""
SHARED = ("alpha", "scales")
"""Settings that apply to all methods; the others apply to the first method only."""
SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
RANGES = {"alpha": (0, 1), "psi": (0, 1), "lr": (1e-6, MAX_LR), "steps": (0, MAX_STEPS)}
QUERY_SETTINGS = ("mode", *SETTINGS)
"""Settings that programs may give."""
QUERY = ("model", "method", *QUERY_SETTINGS, "format", "probs")
"""All parameters that programs may give."""
HELP = {
    "mode": "What self-adaptation computes: this project's default, the equations of the paper, "
    "or the released code.",
    "alpha": "Weight of the image's statistics in normalisation. 0: as trained.",
    "psi": "Confidence a pixel must reach, relative to the most confident of its class.",
    "lr": "Learning rate of the gradient steps.",
    "steps": "Gradient steps. More take longer.",
    "scales": "Sizes of the views, each as it is and flipped in gray.",
}


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
        settings: Values of ``QUERY_SETTINGS``. Those that a method does not have are left out.

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
        allowed = QUERY_SETTINGS if index == 0 else SHARED
        has = settings.keys() & settings_of(name)
        values = {key: settings[key] for key in allowed if key in has}
        for key, value in values.items():
            if key == "scales":
                _check_scales(value)
                values[key] = tuple(sorted(set(value)))
            elif key == "mode":
                if value not in MODES:
                    shown = str(value)[:40]
                    raise ValueError(f"unknown mode {shown!r}{alternatives(shown, MODES)}")
            else:
                check_number(key, value, *RANGES[key], whole=key == "steps")
        methods[name] = values
    return Request(model=model, methods=methods)


def check_query(query: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the parameters of an address; raise ValueError for unknown and repeated ones."""
    for name, count in Counter(name for name, _ in query).items():
        if name not in QUERY:
            shown = name[:40]
            raise ValueError(f"unknown parameter {shown!r}{alternatives(shown, QUERY)}")
        if count > 1:
            raise ValueError(f"{name} must be given once, got it {count} times")
    return dict(query)


def from_query(query: Mapping[str, str], networks: Networks) -> Request:
    """Return the request of a program.

    Args:
        query: Perhaps ``model``, ``method`` and settings; see ``QUERY``.
        networks: The networks to choose from; the first is the default.

    Raises:
        ValueError: A value is unknown or out of range, or the method does not have a setting.
    """
    model = query.get("model", next(iter(networks)))
    network = networks.get(model)
    method = check_method(query.get("method", network.methods[-1]), network.methods)
    offered = [name for name in QUERY_SETTINGS if name in settings_of(method)]
    given = {name: text for name, text in query.items() if name in QUERY_SETTINGS}
    for name in given:
        if name not in offered:
            has = ", ".join(offered)
            raise ValueError(f"the method {method!r} has no setting {name!r}; it has {has}")
    chosen = {name: value for name, value in network.chosen.items() if name in offered}
    if "mode" in given:
        chosen.pop("lr", None)  # each mode has its own
    tuned = {name: value for name, value in defaults(method, chosen).items() if name in chosen}
    settings = tuned | {name: _parsed(name, text) for name, text in given.items()}
    return validated(model, network.methods, method, [], settings)


def _parsed(name: str, text: str) -> Any:
    """Return the value of a setting; text that is not a number stays text, which is refused."""
    if name == "mode":
        return text
    if name == "scales":
        return [_parsed("scale", part) for part in text.split(",")]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


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
    if "steps" in values and values["steps"] is None:
        values["steps"] = MODES["auto"].steps
    if "lr" in values and values["lr"] is None:
        values["lr"] = PATH_LENGTH / values["steps"]
    tuned = ("alpha", "lr") if method == "self-adapt" else ("alpha",)
    return values | {name: chosen[name] for name in tuned if name in chosen and name in values}
