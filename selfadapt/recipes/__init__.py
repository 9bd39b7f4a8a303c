"""Recipes of the package, in ``train/`` and ``evaluate/``."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from selfadapt.patterns import nearest

Kind = Literal["train", "evaluate"]


def shipped_recipes(kind: Kind) -> dict[str, Path]:
    """Return the files of the shipped recipes, by name."""
    paths = (Path(str(file)) for file in (files("selfadapt") / "recipes" / kind).iterdir())
    return {path.stem: path for path in sorted(paths) if path.suffix == ".yaml"}


def find_recipe(name: str, kind: Kind) -> Path:
    """Return the file of a recipe, given its path or the name of a recipe of the package."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = shipped_recipes(kind)
    if name in shipped:
        return shipped[name]
    raise FileNotFoundError(
        f"there is no recipe {name};{nearest(name, shipped)} give a YAML file, or one of "
        f"{', '.join(shipped)}"
    )


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the differences of two recipes, each as a line of text.

    Example:
        >>> differences({"lr": 0.1, "a": {"b": 1}}, {"lr": 0.2, "a": {"b": 1}})
        ['lr: 0.1 -> 0.2']
        >>> differences({}, {"psi": 0.6})
        ['psi: default -> 0.6']
    """
    lines = []
    for key in {**old, **new}:
        before, after = (_as_mapping(content.get(key)) for content in (old, new))
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            values = ["default" if value is None else value for value in (before, after)]
            lines.append(f"{prefix}{key}: {values[0]} -> {values[1]}")
    return lines


def _as_mapping(value: Any) -> Any:
    """Convert a list of mappings to a mapping by index; return other values unchanged."""
    if not (value and isinstance(value, list) and all(isinstance(part, Mapping) for part in value)):
        return value
    return {str(index): part for index, part in enumerate(value)}
