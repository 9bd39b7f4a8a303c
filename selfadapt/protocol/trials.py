"""Trials: a method with all settings and its networks. Every row belongs to one trial."""

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
    load_own,
    settings_of,
)
from selfadapt.models.create import create_model, open_model
from selfadapt.own import is_own
from selfadapt.protocol.recipe import (
    EvaluateConfig,
    MethodConfig,
    NetworkConfig,
    plain,
    same_images,
)
from selfadapt.pseudo import IGNORE
from selfadapt.views import View

EXCLUDED = ("compare", "interface")
"""Settings that do not change a prediction, or cannot be written as JSON."""


@dataclass(frozen=True)
class Trial:
    """A method, the names of its networks, and all of its settings."""

    method: str
    networks: tuple[str, ...]
    settings: dict[str, Any]
    precision: str = "fp32"
    defaults: dict[str, Any] = field(default_factory=dict, compare=False)
    """The default settings of the method."""

    @cached_property
    def key(self) -> str:
        """A short text that identifies the trial."""
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
        """Return the settings that differ from the defaults as text."""
        given = {k: v for k, v in self.settings.items() if plain(v) != plain(self.defaults.get(k))}
        if self.precision != "fp32":
            given["precision"] = self.precision
        return ", ".join(f"{name}={value}" for name, value in given.items())


def trial_of(config: EvaluateConfig, method: MethodConfig, **settings: Any) -> Trial:
    """Return the trial of a method with the fixed settings of the recipe and these."""
    defaults = method.defaults or defaults_of(method.method)
    networks = tuple(config.networks_of(method))
    merged = {**defaults, **method.settings, **settings}
    return Trial(method.method, networks, merged, method.precision, defaults)


def defaults_of(method: str) -> dict[str, Any]:
    """Return the defaults of a method's settings that affect predictions."""
    settings = settings_of(method).items()
    return {name: setting.default for name, setting in settings if name not in EXCLUDED}


def load_own_code(config: EvaluateConfig, trust: bool) -> EvaluateConfig:
    """Import the user's own code if trusted; return the recipe with defaults of own methods."""
    methods = []
    for method in config.methods:
        for kind in ("loss", "step") if trust else ():
            tried = [*method.tune.get(kind, ()), *method.sweep.get(kind, ())]
            for name in filter(is_own, [method.settings.get(kind), *tried]):
                load_own(name, kind)
        if is_own(method.method):
            if trust and method.method not in METHODS:
                load_own(method.method)
            method.check_settings()
            method = replace(method, defaults=plain(defaults_of(method.method)))
        methods.append(method)
    return replace(config, methods=methods)


def sweeps_of(
    config: EvaluateConfig, method: MethodConfig, chosen: Mapping[str, Any]
) -> dict[tuple[str, str], Trial]:
    """Return the trials of a method's sweeps by setting and value; other settings are as chosen."""
    return {
        (setting, json.dumps(value)): trial_of(config, method, **{**chosen, setting: value})
        for setting, values in method.sweep.items()
        for value in values
    }


def check_trials(config: EvaluateConfig, models: Mapping[str, Any]) -> None:
    """Create every method with every value to try, to raise errors before the run."""
    if len(config.space.names) < 2:
        raise ValueError(
            f"at least two classes must be scored, got {config.space.names[0]}; for one class and "
            "the rest use classes: [background, ...]"
        )
    for name, model in models.items():
        if not model.spec.classes:
            raise ValueError(
                f"the classes of the network {name} are not known: name them in their order, as "
                f"in networks: {{{name}: {{place: ..., classes: [road, sky]}}}}"
            )
        if all(config.space.index(label) == IGNORE for label in model.spec.classes):
            raise ValueError(
                f"no class of the network {name} is scored: it has "
                f"{', '.join(model.spec.classes)}, scored are {', '.join(config.space.names)}"
            )
    for method in config.methods:
        varied = [*method.tune.items(), *method.sweep.items()]
        tried = [{setting: value} for setting, values in varied for value in values]
        for settings in ({}, *tried):
            try:
                trial_of(config, method, **settings).build(models)
            except ValueError as error:
                raise ValueError(f"{method.name}: {error}") from error


def check_training(config: EvaluateConfig) -> None:
    """Raise ValueError for a network that was trained or chosen on images of a target.

    That is read from the folder of its training run. Training on another split of the dataset of a
    target is allowed: it gives an upper bound.
    """
    for name, network in config.networks.items():
        files = [Path(path) for path in (network.place, network.weights) if path is not None]
        files += [path.resolve() for path in files]  # the recipe is beside the target of a link
        folders = [path.parent if path.is_file() else path for path in files]
        recipes = [folder / "recipe.json" for folder in dict.fromkeys(folders)]
        seen = [domain for path in recipes if path.is_file() for domain in _training_domains(path)]
        for purpose, domain in seen:
            for target in config.targets:
                if same_images(target, domain):
                    raise ValueError(
                        f"the network {name} {purpose} {domain.dataset}/{domain.split}, which is "
                        f"the target {target.label}; use another network, or leave out the target"
                    )


def _training_domains(path: Path) -> list[tuple[str, DataConfig]]:
    """Return the domains of a training run with their purpose."""
    try:
        recipe = json.loads(path.read_text())
        parts = (("was trained on", recipe["source"]), ("was chosen on", recipe["validation"]))
        return [(purpose, DataConfig(**domain)) for purpose, domain in parts if domain is not None]
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{path} is not the recipe of a training run ({error})") from error


def open_network(config: NetworkConfig, trust: bool = False) -> nn.Module:
    """Open a trained network; with ``trust`` also one created by the user's own code."""
    if not config.options:
        return open_model(config.place, weights=config.weights, classes=config.classes, trust=trust)
    if config.weights is None:
        raise ValueError(f"{config.place} has options but no weights: give a file of weights")
    options: dict[str, Any] = dict(config.options)
    return create_model(config.place, weights=config.weights, classes=config.classes, **options)
