"""Trials: a method with all of its settings and its networks. Every row is of one trial."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from selfadapt.data import DataConfig
from selfadapt.engine import Fast
from selfadapt.methods import (
    METHODS,
    Segments,
    create_method,
    is_own_method,
    load_method,
    settings_of,
)
from selfadapt.models.create import create_model, open_model
from selfadapt.protocol.recipe import (
    EvaluateConfig,
    MethodConfig,
    NetworkConfig,
    plain,
    same_images,
)
from selfadapt.pseudo import IGNORE
from selfadapt.views import View

HIDDEN = ("compare", "interface")
"""Settings that do not change a prediction, or cannot be written down."""


@dataclass(frozen=True)
class Trial:
    """A method, its networks by name, and every setting it has."""

    method: str
    networks: tuple[str, ...]
    settings: dict[str, Any]
    precision: str = "fp32"
    defaults: dict[str, Any] = field(default_factory=dict, compare=False)
    """What the settings are where nothing is said."""

    @cached_property
    def key(self) -> str:
        """A short text that is the same for the same trial, and for no other."""
        content = [self.method, self.networks, plain(self.settings), self.precision]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    def build(self, models: Mapping[str, nn.Module]) -> Segments:
        """Create the method."""
        settings = {**self.settings, "compare": False}
        if settings.get("fast") is True and self.precision == "fp32":
            settings["fast"] = Fast(precision="fp32")
        if (views := settings.get("views")) is not None:
            if not isinstance(views, list | tuple):
                raise ValueError(f"views must be a list such as [1, 0.5 flipped], got {views!r}")
            settings["views"] = [View.parse(text) for text in settings["views"]]
        networks = [models[name] for name in self.networks]
        model = networks if self.method == "ensemble" else networks[0]
        try:
            return create_method(self.method, model, **settings)
        except TypeError as error:  # a setting of the wrong type
            raise ValueError(f"{self.method}: {error}") from error

    def shown(self) -> str:
        """Return in words which settings differ from those the method has by itself."""
        given = {k: v for k, v in self.settings.items() if plain(v) != plain(self.defaults.get(k))}
        if self.precision != "fp32":
            given["precision"] = self.precision
        return ", ".join(f"{name}={value}" for name, value in given.items())


def trial_of(config: EvaluateConfig, method: MethodConfig, **settings: Any) -> Trial:
    """Return the trial of a method with what is fixed in the recipe and these settings."""
    defaults = method.defaults or defaults_of(method.method)
    networks = tuple(config.networks_of(method))
    chosen = {**defaults, **method.settings, **settings}
    return Trial(method.method, networks, chosen, method.precision, defaults)


def defaults_of(method: str) -> dict[str, Any]:
    """Return the defaults of a method's settings that decide a prediction."""
    settings = settings_of(method).items()
    return {name: setting.default for name, setting in settings if name not in HIDDEN}


def with_own_methods(config: EvaluateConfig, trust: bool) -> EvaluateConfig:
    """Return a recipe with the defaults of methods of the user's own; their code is imported."""
    methods = []
    for method in config.methods:
        if is_own_method(method.method):
            if trust and method.method not in METHODS:
                load_method(method.method)
            method.check_settings()
            method = replace(method, defaults=plain(defaults_of(method.method)))
        methods.append(method)
    return replace(config, methods=methods)


def sweeps_of(
    config: EvaluateConfig, method: MethodConfig, chosen: Mapping[str, Any]
) -> dict[tuple[str, str], Trial]:
    """Return the trials of the sweeps of a method, by setting and value; the rest is as chosen."""
    return {
        (setting, json.dumps(value)): trial_of(config, method, **{**chosen, setting: value})
        for setting, values in method.sweep.items()
        for value in values
    }


def check_trials(config: EvaluateConfig, models: Mapping[str, Any]) -> None:
    """Create every method with every value it is to be tried with, so that none fails later."""
    if len(config.space.names) < 2:
        raise ValueError(
            f"two classes or more must be scored, got {config.space.names[0]}; for one and what "
            "is not it, say classes: [background, ...]"
        )
    for name, model in models.items():
        if not model.spec.classes:
            raise ValueError(
                f"the classes of the network {name} are not known: name them in their order, as "
                f"in networks: {{{name}: {{place: ..., classes: [road, sky]}}}}"
            )
        if all(config.space.index(known) == IGNORE for known in model.spec.classes):
            raise ValueError(
                f"no class of the network {name} is scored: it has "
                f"{', '.join(model.spec.classes)}, scored are {', '.join(config.space.names)}"
            )
    for method in config.methods:
        values = [*method.tune.items(), *method.sweep.items()]
        tried = [{setting: value} for setting, found in values for value in found]
        for settings in ({}, *tried):
            try:
                trial_of(config, method, **settings).build(models)
            except ValueError as error:
                raise ValueError(f"{method.name}: {error}") from error


def check_training(config: EvaluateConfig) -> None:
    """Refuse a network that was trained or chosen on images of a target, as its run's folder says.

    A bound by design, trained on another split of the target's dataset, is none of these.
    """
    for name, network in config.networks.items():
        places = [Path(place) for place in (network.place, network.weights) if place is not None]
        places += [place.resolve() for place in places]  # a link is found beside what it is of
        folders = [place.parent if place.is_file() else place for place in places]
        paths = [folder / "recipe.json" for folder in dict.fromkeys(folders)]
        known = [seen for path in paths if path.is_file() for seen in _domains_seen(path)]
        for does, seen in known:
            for target in config.targets:
                if same_images(target, seen):
                    raise ValueError(
                        f"the network {name} {does} {seen.dataset}/{seen.split}, which is the "
                        f"target {target.label}; take another network, or leave out the target"
                    )


def _domains_seen(path: Path) -> list[tuple[str, DataConfig]]:
    """Return the domains of a training run, and what they were for."""
    try:
        recipe = json.loads(path.read_text())
        parts = (("was trained on", recipe["source"]), ("was chosen on", recipe["validation"]))
        return [(does, DataConfig(**content)) for does, content in parts if content is not None]
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{path} is not what a training run writes ({error})") from error


def open_network(config: NetworkConfig, trust: bool = False) -> nn.Module:
    """Open a trained network; ``trust``: also one that code of the user's own makes."""
    if not config.options:
        place, weights, classes = config.place, config.weights, config.classes
        return open_model(place, weights=weights, classes=classes, trust=trust)
    if config.weights is None:
        raise ValueError(f"{config.place} has options, but no weights: give weights, a file")
    options: dict[str, Any] = dict(config.options)
    return create_model(config.place, weights=config.weights, classes=config.classes, **options)
