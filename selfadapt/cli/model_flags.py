"""Flags that name a network and a method, made from signatures, and what they open."""

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
from selfadapt.models.address import is_foreign
from selfadapt.models.interface import Interface
from selfadapt.patterns import nearest
from selfadapt.steps import STEP_RULES

NOT_FLAGS = {"views", "interface", "compare"}
SHIPPED = "streets"
"""The network that comes with the package."""
SWITCHES = (bool, bool | Fast)
NAMED = {"loss": LOSSES, "step": STEP_RULES}
"""Settings that are named on the command line, and may be functions in Python."""
LISTS: dict[Any, type] = {Sequence[float]: float, Sequence[str] | None: str}


class Given(list[str]):
    """Words that were given by flag, not by a file of settings."""


class Collect(Action):
    """Takes a flag that may be given several times; these count in place of those of a file."""

    def __call__(self, parser: Any, namespace: Any, value: Any, flag: str | None = None) -> None:
        """Add a word to those before."""
        before = getattr(namespace, self.dest, None)
        kept = before if isinstance(before, Given) else ()
        setattr(namespace, self.dest, Given([*kept, value]))


def as_list(value: Any) -> list[str]:
    """Return what a file of settings may give as one text or as a list."""
    if value is None:
        return []
    return [str(one) for one in value] if isinstance(value, list | tuple) else [str(value)]


def model_arguments(
    parser: ArgumentParser, *, several: str | None = None, default: str | None = None
) -> None:
    """Add the flags that name a network.

    Args:
        parser: Where to add them.
        several: What more than one network is for, if that makes sense.
        default: The network that is taken where none is named.
    """
    text = "A file saved by save_model; or a name or address, see selfadapt models."
    if several is not None:
        text += f" Once more for each network {several}."
    if default is not None:
        text += f" By default {default}."
    model = parser.add_argument(
        "--model", action=Collect, required=default is None, metavar="MODEL", help=text
    )
    weights = parser.add_argument(
        "--weights", action=Collect, metavar="FILE", help="Weights, one for each --model by name."
    )
    complete_files(model)
    complete_files(weights)
    parser.add_argument(
        "--classes", nargs="+", metavar="CLASS",
        help="What they predict: the name of a class space, the names of the classes, their "
        "number, or a file: a name on each line, or JSON or YAML with names and colours.",
    )  # fmt: skip
    parser.add_argument(
        "--channels", type=int, metavar="N", help="Channels the network takes, if not found out."
    )
    for name, text in (("mean", "Mean"), ("std", "Standard deviation")):
        parser.add_argument(
            f"--{name}", nargs="+", type=float, metavar="NUMBER",
            help=f"{text} that its input is normalised with, one for each channel, red first, of "
            "values from 0 to 1.",
        )  # fmt: skip
    parser.add_argument(
        "--trust",
        action="store_true",
        help="Run code of your own: --model MODULE:FUNCTION, --method MODULE:CLASS.",
    )
    device_argument(parser)


def device_argument(parser: ArgumentParser) -> None:
    """Add the flag that says where to compute."""
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1 ...; auto takes a GPU if there is one."
    )


def method_arguments(parser: ArgumentParser) -> None:
    """Add the flags that name a method, and those of its settings."""
    parser.add_argument(
        "--method",
        default="self-adapt",
        metavar="NAME",
        help="See selfadapt methods; or a class of your own, MODULE:CLASS, with --trust.",
    )
    group = parser.add_argument_group("settings of the method")
    for name, setting in _settings().items():
        group.add_argument(_flag(name), default=SUPPRESS, **setting)


def _settings() -> dict[str, dict[str, Any]]:
    """Return every setting of every method that can be given by flag, and how it is parsed."""
    return _settings_of(tuple(METHODS))


@cache
def _settings_of(methods: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for method in methods:
        texts = setting_texts(method)
        for name, parameter in settings_of(method).items():
            if name not in NOT_FLAGS | set(found):
                kind = parameter.annotation
                if kind is parameter.empty or isinstance(kind, str):  # of a method of one's own
                    kind = str if parameter.default is None else type(parameter.default)
                shape: dict[str, Any] = {"type": kind}
                if name in NAMED:
                    shape = {"type": str}
                elif kind in LISTS:
                    shape = {"nargs": "+", "type": LISTS[kind]}
                elif kind in SWITCHES:
                    shape = {"action": ActionYesNo(no_prefix="no-")}
                owners = [other for other in METHODS if name in settings_of(other)]
                text = texts[name]
                if len(owners) < len(METHODS):
                    text += f" Of {', '.join(owners)}."
                named = {} if kind in SWITCHES else {"metavar": name.upper()}
                found[name] = {**shape, **named, "help": text}
    return found


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def switches() -> list[str]:
    """Return the flags that are on or off."""
    return [_flag(name) for name, shape in _settings().items() if "action" in shape]


def setting_texts(method: str) -> dict[str, str]:
    """Return what each setting of a method means, from the docstrings of the classes."""
    texts = {}
    for owner in (Method, *reversed(find_method(method).__mro__)):
        for parameter in docstring_parser.parse(owner.__doc__ or "").params:
            text = " ".join((parameter.description or "").split())
            texts[parameter.arg_name] = text.replace("``", "")
    return {setting: texts.get(setting, "") for setting in settings_of(method)}


def open_models(args: Namespace) -> list[Any]:
    """Return the networks that are asked for, where they are to compute."""
    device = find_device(args.device)
    places = as_list(args.model)
    weights: Sequence[str | None] = as_list(args.weights) or [None] * len(places)
    if len(weights) != len(places):
        raise ValueError(f"got {len(weights)} --weights for {len(places)} --model")
    interface = _interface(args)
    classes = named_classes(as_list(args.classes))
    models = []
    for place, file in zip(places, weights, strict=True):
        with redirect_stdout(sys.stderr):  # other libraries speak, and what is printed is ours
            model = open_model(place, weights=file, classes=classes, trust=args.trust)
        _set_interface(model, place, interface)
        try:
            models.append(model.to(device))
        except NotImplementedError as error:
            raise ValueError(f"{place} cannot be moved to {device}: {error}") from error
    return models


def named_classes(words: list[str]) -> int | str | list[str] | dict[str, Color | None] | None:
    """Return the classes that words name: a class space, a number, a file, or the names."""
    if len(words) != 1:
        return words or None
    (word,) = words
    if word in CLASS_SPACES:
        return word
    if word.isdecimal():
        return int(word[:10])  # more digits are too many classes in any case
    if Path(word).suffix.lower() in SUFFIXES or os.sep in word or Path(word).is_file():
        return read_classes(Path(word))
    if nearest(word, CLASS_SPACES):
        class_space(word)  # which is unknown, and says what is known
    return [word]


def _interface(args: Namespace) -> dict[str, Any]:
    """Return what flags say about the input of the networks."""
    names = ("channels", "mean", "std")
    given = {name: args[name] for name in names if args.get(name) is not None}
    if ("mean" in given) != ("std" in given):
        raise ValueError("--mean and --std go together: give both")
    if any(not -1 <= number <= 1 for number in given.get("mean", ())):
        raise ValueError(
            f"--mean must be of images with values from 0 to 1, got {args.mean}; divide by 255 "
            "what is given for values up to 255, and --std as well"
        )
    Interface(**given)
    if "mean" in given:
        count = given.setdefault("channels", len(given["mean"]))
        if not len(given["mean"]) == len(given["std"]) == count:
            raise ValueError(
                f"--mean and --std must have one number for each of the {count} channels, got "
                f"{len(given['mean'])} and {len(given['std'])}"
            )
    return given


def _set_interface(model: Any, place: str, given: dict[str, Any]) -> None:
    """Set what flags say about the input of a network."""
    if not given:
        return
    channels = given["channels"]
    layers = {layer.in_channels for layer in model.modules() if isinstance(layer, nn.Conv2d)}
    takes = layers if is_foreign(model.spec.name) else {model.spec.channels}
    if takes and channels not in takes:
        count = next(iter(takes)) if len(takes) == 1 else "other numbers of"
        raise ValueError(f"{place} takes {count} channels, got flags for {channels}")
    own = getattr(model, "interface", None)
    model.interface = replace(own if isinstance(own, Interface) else Interface(), **given)


def shown_classes(args: Namespace, model: Any) -> Classes:
    """Return the names of a network's classes, with the colours that a file gives them."""
    classes = named_classes(as_list(args.classes))
    return classes if isinstance(classes, Mapping) else model.spec.classes


def given_settings(args: Namespace) -> dict[str, Any]:
    """Return the settings of the method that were given."""
    return {name: args[name] for name in _settings() if name in args}


def open_method(args: Namespace, *, compare: bool = False) -> tuple[Segments, Classes, list[Any]]:
    """Return the method that is asked for, its classes, and its networks.

    With ``compare``, it also predicts with the network as trained.
    """
    given = given_settings(args)
    check_method(args.method, given)
    places = as_list(args.model)
    if len(places) > 1 and args.method != "ensemble":
        raise ValueError(f"--method {args.method} takes one --model, got {len(places)}")
    models = open_models(args)
    network = models if args.method == "ensemble" else models[0]
    try:
        method = create_method(args.method, network, compare=compare, **given)
    except TypeError as error:  # the network is no segmentation network, or a setting no number
        raise ValueError(str(error)) from error
    return method, shown_classes(args, models[0]), models
