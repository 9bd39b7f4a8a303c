"""The words of a command, spelled as the parser takes them."""

import os
from pathlib import Path
from typing import Any

import yaml

from selfadapt.cli.opening import switches

MOST_VALUES = 100_000
"""Values in a file of settings, unfolded: some lines of YAML can stand for billions."""
TRUE, FALSE = ("true", "yes"), ("false", "no")


def spelled(words: list[str]) -> list[str]:
    """Spell out what may be said in several ways.

    Settings from a file come first, so that what is given beside it counts, wherever it stands. A
    switch takes no word: what follows it may be an image. ``--fast false`` and ``--fast=false`` are
    understood as ``--no-fast`` all the same.

    Example:
        >>> spelled(["predict", "a.png", "--fast", "false", "b.png"])
        ['predict', 'a.png', '--no-fast', 'b.png']
    """
    if not words or words[0] != "predict":
        return words
    first, rest = [], []
    left = words[1:]
    while left:
        word, *left = left
        if word == "--":
            rest += [word, *left]
            break
        if word.startswith("--config=") or (word == "--config" and left):
            file = word.partition("=")[2] if "=" in word else left.pop(0)
            check_settings(file_of_settings(file), "a file of settings")
            first += ["--config", file]
        else:
            word, left = _switch(word, left)
            rest.append(word)
    return [words[0], *first, *rest]


class _Loader(yaml.SafeLoader):
    """Refuses what is said twice, of which YAML takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} is there twice", problem_mark=key.start_mark
                )
        return super().construct_mapping(node, deep)


def file_of_settings(word: str) -> Path:
    """Return the file; settings themselves cannot stand in its place, where nobody checks them."""
    if not os.path.isfile(word):
        raise FileNotFoundError(f"there is no file of settings {word}")
    return Path(word)


def check_settings(path: Path, what: str) -> None:
    """Raise ValueError unless a file may hold settings by name."""
    try:
        content = yaml.load(path.read_text(), _Loader)  # a SafeLoader
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} must be a YAML file, but {path} is no text") from error
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" in line {where.line + 1}" if where else ""
        reason = getattr(error, "problem", None) or "it cannot be read"
        raise ValueError(f"{what} must be YAML, but {path} is not: {reason}{line}") from error
    if content is None:
        raise ValueError(f"{what} must hold settings, but {path} is empty")
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ValueError(f"{what} must hold settings by name, but {path} holds a {kind}")
    for name in ("trust", "config", "recipe"):
        if content.get(name):
            raise ValueError(f"{path} must not say {name!r}: that is for the command line alone")
    if _num_values(content, {}) > MOST_VALUES:
        raise ValueError(f"{what} must be short, but {path} unfolds to over {MOST_VALUES} values")


def _num_values(content: Any, known: dict[int, int]) -> int:
    """Count the values in settings, those that are repeated by name included.

    Raises:
        ValueError: Settings name a class, which would be imported, and so run.
    """
    if not isinstance(content, dict | list):
        return 1
    if isinstance(content, dict) and "class_path" in content:
        raise ValueError("settings must be values, but a class_path is among them")
    if id(content) not in known:
        known[id(content)] = MOST_VALUES + 1  # as long as it is not known: it may hold itself
        parts = content.values() if isinstance(content, dict) else content
        known[id(content)] = 1 + sum(_num_values(part, known) for part in parts)
    return known[id(content)]


def _switch(word: str, left: list[str]) -> tuple[str, list[str]]:
    """Return a switch with its value in one word, and the words after it."""
    flag, equals, value = word.partition("=")
    if flag not in switches():
        return word, left
    if not equals and left and left[0].lower() in TRUE + FALSE and not Path(left[0]).exists():
        value, *left = left
    if value.lower() in FALSE:
        return flag.replace("--", "--no-", 1), left
    return (flag if not value or value.lower() in TRUE else word), left
