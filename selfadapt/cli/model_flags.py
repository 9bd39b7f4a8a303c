"""Flags for networks, methods and their settings, and functions that open what they name."""

import os
import sys
from argparse import SUPPRESS, Action
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import docstring_parser
from jsonargparse import ActionYesNo, ArgumentParser, Namespace
from torch import nn

from selfadapt import METHODS, create_method, open_model
from selfadapt.classfile import SUFFIXES, read_classes
from selfadapt.cli.commands import complete_files
from selfadapt.devices import find_device
from selfadapt.engine import Fast
from selfadapt.labels import CLASS_SPACES, Classes, Color, class_space
from selfadapt.losses import LOSSES
from selfadapt.method import Method
from selfadapt.methods import Segments, check_method, find_method, settings_of
from selfadapt.models.address import is_external
from selfadapt.models.interface import Interface
from selfadapt.patterns import nearest
from selfadapt.steps import STEP_RULES

NOT_FLAGS = {"views", "interface", "compare"}
SWITCH_TYPES = (bool, bool | Fast)
BY_NAME = {"loss": LOSSES, "step": STEP_RULES}
"""Settings that the command line takes by name, and Python also as functions."""
LIST_TYPES: dict[Any, type] = {Sequence[float]: float, Sequence[str] | None: str}


class FlagValues(list[str]):
    """Values that come from flags, not from a settings file."""


class CollectAction(Action):
    """Collects the values of a repeatable flag; they replace those of a settings file."""

    def __call__(self, parser: Any, namespace: Any, value: Any, flag: str | None = None) -> None:
        """Append a value to those of earlier flags."""
        values = getattr(namespace, self.dest, None)
        earlier = values if isinstance(values, FlagValues) else ()
        setattr(namespace, self.dest, FlagValues([*earlier, value]))


def as_list(value: Any) -> list[str]:
    """Return a setting that may be None, a single value or a list as a list of strings."""
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]


def model_arguments(
    parser: ArgumentParser, *, several: str | None = None, default: str | None = None
) -> None:
    """Add the flags for networks.

    Args:
        parser: The parser.
        several: The purpose of further networks, if the command takes several.
        default: The network without ``--model``; None: the flag is required.
    """
    text = "A file saved by save_model; or a name or address, see selfadapt models."
    if several is not None:
        text += f" Repeat it for each network {several}."
    if default is not None:
        text += f" By default {default}."
    model = parser.add_argument(
        "--model", action=CollectAction, required=default is None, metavar="MODEL", help=text
    )
    weights = parser.add_argument(
        "--weights",
        action=CollectAction,
        metavar="FILE",
        help="Weights, one file for each --model.",
    )
    complete_files(model)
    complete_files(weights)
    parser.add_argument(
        "--classes", nargs="+", metavar="CLASS",
        help="The classes: the name of a class space, class names, their number, or a file with a "
        "name per line, or JSON or YAML with names and colours.",
    )  # fmt: skip
    parser.add_argument(
        "--channels", type=int, metavar="N", help="Input channels of the network, if not detected."
    )
    for name, text in (("mean", "Mean"), ("std", "Standard deviation")):
        parser.add_argument(
            f"--{name}", nargs="+", type=float, metavar="NUMBER",
            help=f"{text} for input normalisation, one number per channel, red first, for pixel "
            "values from 0 to 1.",
        )  # fmt: skip
    parser.add_argument(
        "--trust",
        action="store_true",
        help="Run your own code: --model MODULE:FUNCTION, --method MODULE:CLASS.",
    )
    device_argument(parser)


def device_argument(parser: ArgumentParser) -> None:
    """Add the flag for the device."""
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1 ...; auto: a GPU if available."
    )


def method_arguments(parser: ArgumentParser) -> None:
    """Add the flag for the method, and one for each setting of any method."""
    parser.add_argument(
        "--method",
        default="self-adapt",
        metavar="NAME",
        help="See selfadapt methods; or your own class, MODULE:CLASS, with --trust.",
    )
    group = parser.add_argument_group("settings of the method")
    for name, options in _setting_options().items():
        group.add_argument(_flag(name), default=SUPPRESS, **options)


def _setting_options() -> dict[str, dict[str, Any]]:
    """Return the ``add_argument`` options of every setting of any method that has a flag."""
    return _setting_options_of(tuple(METHODS))


@cache
def _setting_options_of(methods: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    settings: dict[str, dict[str, Any]] = {}
    for method in methods:
        texts = setting_texts(method)
        for name, parameter in settings_of(method).items():
            if name in NOT_FLAGS or name in settings:
                continue
            kind = parameter.annotation
            if kind is parameter.empty or isinstance(kind, str):  # of a user's own method
                kind = str if parameter.default is None else type(parameter.default)
            options: dict[str, Any] = {"type": kind, "metavar": name.upper()}
            if name in BY_NAME:
                options["type"] = str
            elif kind in LIST_TYPES:
                options |= {"nargs": "+", "type": LIST_TYPES[kind]}
            elif kind in SWITCH_TYPES:
                options = {"action": ActionYesNo(no_prefix="no-")}
            owners = [other for other in METHODS if name in settings_of(other)]
            only_for = f" Only for {', '.join(owners)}." if len(owners) < len(METHODS) else ""
            settings[name] = {**options, "help": texts[name] + only_for}
    return settings


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def switches() -> list[str]:
    """Return the flags of boolean settings."""
    return [_flag(name) for name, options in _setting_options().items() if "action" in options]


def setting_texts(method: str) -> dict[str, str]:
    """Return the help text of each setting of a method, from the docstrings of its classes."""
    texts = {}
    for owner in (Method, *reversed(find_method(method).__mro__)):
        for parameter in docstring_parser.parse(owner.__doc__ or "").params:
            text = " ".join((parameter.description or "").split())
            texts[parameter.arg_name] = text.replace("``", "")
    return {setting: texts.get(setting, "") for setting in settings_of(method)}


def open_models(args: Namespace) -> list[Any]:
    """Return the networks given by flags, on the device given by flag."""
    device = find_device(args.device)
    addresses = as_list(args.model)
    weights: Sequence[str | None] = as_list(args.weights) or [None] * len(addresses)
    if len(weights) != len(addresses):
        raise ValueError(f"got {len(weights)} --weights for {len(addresses)} --model")
    interface = _interface_flags(args)
    classes = parse_classes(as_list(args.classes))
    models = []
    for address, path in zip(addresses, weights, strict=True):
        with redirect_stdout(sys.stderr):  # other libraries may print; stdout may have to be JSON
            model = open_model(address, weights=path, classes=classes, trust=args.trust)
        if interface:
            _set_interface(model, address, interface)
        try:
            models.append(model.to(device))
        except NotImplementedError as error:
            raise ValueError(f"{address} cannot be moved to {device}: {error}") from error
    return models


def parse_classes(values: list[str]) -> int | str | list[str] | dict[str, Color | None] | None:
    """Return the classes given by a flag: a class space, a number, a file, or class names."""
    if len(values) != 1:
        return values or None
    (value,) = values
    if value in CLASS_SPACES:
        return value
    if value.isdecimal():
        return int(value[:10])  # more digits are too many classes in any case
    if Path(value).suffix.lower() in SUFFIXES or os.sep in value or Path(value).is_file():
        return read_classes(Path(value))
    if nearest(value, CLASS_SPACES):
        class_space(value)  # raises an error that suggests the nearest one
    return [value]


def _interface_flags(args: Namespace) -> dict[str, Any]:
    """Return the input channels and normalisation given by flags, after checking them."""
    names = ("channels", "mean", "std")
    given = {name: args[name] for name in names if args.get(name) is not None}
    if ("mean" in given) != ("std" in given):
        raise ValueError("--mean and --std go together: give both")
    if any(not -1 <= number <= 1 for number in given.get("mean", ())):
        raise ValueError(
            f"--mean must be for pixel values from 0 to 1, got {args.mean}; if --mean and "
            "--std are for values up to 255, divide by 255"
        )
    if "mean" in given:
        given.setdefault("channels", len(given["mean"]))
    Interface(**given).check_lengths()
    return given


def _set_interface(model: Any, address: str, given: dict[str, Any]) -> None:
    """Set the input channels and normalisation of a network."""
    channels = given["channels"]
    layers = {layer.in_channels for layer in model.modules() if isinstance(layer, nn.Conv2d)}
    possible = layers if is_external(model.spec.name) else {model.spec.channels}
    if possible and channels not in possible:
        count = next(iter(possible)) if len(possible) == 1 else "other numbers of"
        raise ValueError(f"{address} takes {count} channels, got flags for {channels}")
    current = getattr(model, "interface", None)
    current = current if isinstance(current, Interface) else Interface()
    model.interface = replace(current, **given)


def given_settings(args: Namespace) -> dict[str, Any]:
    """Return the settings of the method that were given by flag or settings file."""
    return {name: args[name] for name in _setting_options() if name in args}


def open_method(args: Namespace, *, compare: bool = False) -> tuple[Segments, Classes, list[Any]]:
    """Return the method given by flags, its classes (with colours if given), and its networks.

    With ``compare``, it also predicts with the network as trained.
    """
    given = given_settings(args)
    check_method(args.method, given)
    num_models = len(as_list(args.model))
    if num_models > 1 and args.method != "ensemble":
        raise ValueError(f"--method {args.method} takes one --model, got {num_models}")
    models = open_models(args)
    network = models if args.method == "ensemble" else models[0]
    try:
        method = create_method(args.method, network, compare=compare, **given)
    except TypeError as error:  # not a segmentation network, or a setting of the wrong type
        raise ValueError(str(error)) from error
    classes = parse_classes(as_list(args.classes))
    if not isinstance(classes, Mapping):
        classes = models[0].spec.classes
    return method, classes, models
