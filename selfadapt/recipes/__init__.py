"""The recipes that come with the package, by name: ``train/`` and ``evaluate/``."""

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
    """Return the file of a recipe, by its path or by the name of one in the package."""
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
    """Return in words where two recipes differ.

    Example:
        >>> differences({"lr": 0.1, "a": {"b": 1}}, {"lr": 0.2, "a": {"b": 1}})
        ['lr: 0.1 -> 0.2']
    """
    found = []
    for key in {**old, **new}:
        before, after = (_by_name(content.get(key)) for content in (old, new))
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key}: {before} -> {after}")
    return found


def _by_name(value: Any) -> Any:
    """Return a list of parts as the parts by number, anything else as it is."""
    parts = isinstance(value, list) and all(isinstance(part, Mapping) for part in value)
    return {str(number): part for number, part in enumerate(value)} if parts and value else value
