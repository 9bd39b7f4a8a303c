"""Checks and normalisation of command-line arguments before the parser sees them."""

import os
from pathlib import Path
from typing import Any

import yaml

from selfadapt.cli.commands import RECIPE_COMMANDS
from selfadapt.cli.model_flags import switches
from selfadapt.methods import load_own
from selfadapt.own import is_own
from selfadapt.recipes import find_recipe

MAX_VALUES = 100_000
"""Maximum number of values in a settings file with aliases expanded: a few lines of YAML can stand
for billions of values."""
TRUE, FALSE = ("true", "yes"), ("false", "no")


def load_trusted(args: list[str]) -> None:
    """Import the user's own code given with ``--trust``, so that its settings become flags.

    Only the command line is read here: settings files cannot contain ``trust``.
    """
    if "--trust" not in args:
        return
    for kind in ("method", "loss", "step"):
        for name in filter(is_own, _values(args, f"--{kind}")):
            load_own(name, kind)
    if args[0] == "methods":
        for name in filter(is_own, args):
            load_own(name)


def expand_recipe(args: list[str]) -> list[str]:
    """Replace the RECIPE after a command by ``--recipe PATH``, and check all recipes."""
    if len(args) < 2 or args[0] not in RECIPE_COMMANDS:
        return args
    for value in _values(args, "--recipe"):
        check_settings(settings_path(value), "a recipe")
    if args[1].startswith("-"):
        return args
    path = find_recipe(args[1], RECIPE_COMMANDS[args[0]])
    check_settings(path, "a recipe")
    return [args[0], "--recipe", str(path), *args[2:]]


def normalize_switches(args: list[str]) -> list[str]:
    """Normalise the arguments of ``predict``.

    ``--config`` moves to the front, so that flags override it wherever they are. A switch consumes
    the next argument only if that is a boolean, as otherwise it may be an image: ``--fast false``
    and ``--fast=false`` become ``--no-fast``.

    Example:
        >>> normalize_switches(["predict", "a.png", "--fast", "false", "b.png"])
        ['predict', 'a.png', '--no-fast', 'b.png']
    """
    if not args or args[0] != "predict":
        return args
    config, other = [], []
    remaining = args[1:]
    while remaining:
        arg, *remaining = remaining
        flag, equals, value = arg.partition("=")
        if arg == "--":
            other += [arg, *remaining]
            break
        if flag == "--config" and (equals or remaining):
            path = value if equals else remaining.pop(0)
            check_settings(settings_path(path), "a settings file")
            config += ["--config", path]
            continue
        if flag in switches():
            following = remaining[0] if remaining and not equals else ""
            if following.lower() in TRUE + FALSE and not Path(following).exists():
                value = remaining.pop(0)
            if value.lower() in FALSE:
                arg = flag.replace("--", "--no-", 1)
            elif not value or value.lower() in TRUE:
                arg = flag
        other.append(arg)
    return [args[0], *config, *other]


def _values(args: list[str], flag: str) -> list[str]:
    """Return the values of a flag, given as ``--flag VALUE`` or ``--flag=VALUE``."""
    values = []
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        name, _, value = arg.partition("=")
        if name == flag:
            values.append(value or following)
    return values


class _UniqueKeyLoader(yaml.SafeLoader):
    """Raises an error for duplicate keys, of which YAML silently keeps the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys: list[Any] = []
        for key, _ in node.value:
            if key.value in keys:
                raise yaml.MarkedYAMLError(
                    problem=f"duplicate key {key.value!r}", problem_mark=key.start_mark
                )
            keys.append(key.value)
        return super().construct_mapping(node, deep)


def settings_path(text: str) -> Path:
    """Return the path of a settings file; refuse inline settings, which would not be checked."""
    if not os.path.isfile(text):
        raise FileNotFoundError(f"there is no settings file {text}")
    return Path(text)


def check_settings(path: Path, kind: str) -> None:
    """Raise ValueError unless a file is a YAML mapping of settings without unsafe content."""
    try:
        content = yaml.load(path.read_text(), _UniqueKeyLoader)  # a SafeLoader
    except UnicodeDecodeError as error:
        raise ValueError(f"{kind} must be a YAML file, but {path} is not text") from error
    except RecursionError as error:
        raise ValueError(f"{kind} must be YAML, but {path} is nested too deeply") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or "it cannot be read"
        raise ValueError(f"{kind} must be YAML, but {path} is not: {reason}{line}") from error
    if content is None:
        raise ValueError(f"{kind} must contain settings, but {path} is empty")
    if not isinstance(content, dict):
        found = type(content).__name__
        raise ValueError(f"{kind} must be a mapping of settings, but {path} contains a {found}")
    for name in ("trust", "config", "recipe"):
        if content.get(name):
            raise ValueError(f"{path} must not set {name!r}: only the command line may")
    if _num_values(content, {}) > MAX_VALUES:
        raise ValueError(f"{kind} must be short, but {path} expands to over {MAX_VALUES} values")


def _num_values(content: Any, counts: dict[int, int]) -> int:
    """Count the values in settings with YAML aliases expanded.

    Raises:
        ValueError: The settings contain a ``class_path``, which the parser would import and so run.
    """
    if not isinstance(content, dict | list):
        return 1
    if isinstance(content, dict) and "class_path" in content:
        raise ValueError("settings must be plain values, but they contain a class_path")
    if id(content) not in counts:
        counts[id(content)] = MAX_VALUES + 1  # until it is counted: it may contain itself
        parts = content.values() if isinstance(content, dict) else content
        counts[id(content)] = 1 + sum(_num_values(part, counts) for part in parts)
    return counts[id(content)]
