"""Read and write files with the names and colours of classes (``--classes FILE``).

A text file has a name on each line. A JSON or YAML file has a list of names; a list of entries with
``name`` and ``color``, as in the ``classes.json`` of ``predict``; a mapping of names to colours; or
a mapping of indices to names, as ``id2label`` of Hugging Face.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from PIL import ImageColor

from selfadapt.checks import shortened
from selfadapt.labels import Color, class_names

MAX_BYTES = 2**22
SUFFIXES = (".json", ".txt", ".yaml", ".yml")


def read_classes(path: Path) -> dict[str, Color | None]:
    """Return the classes in a file, in the order of their index, with their colours or None.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: Names or colours are invalid, or names are not unique.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of classes {path}")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} is too large for a file of classes, {MAX_BYTES} bytes at most")
    try:
        text = path.read_text(encoding="utf-8-sig")
        entries = _entries(_parse(text, path.suffix.lower()))
        names = [name for name, _ in entries]
        class_names(names)
        return {name: _color(color) for name, color in entries}
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a text file with a class on each line") from error
    except RecursionError as error:
        raise ValueError(f"{path} holds no classes: it is nested too deeply") from error
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or "it cannot be read"
        raise ValueError(f"{path} is not YAML: {reason}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path} holds no classes: {error}") from error


def _parse(text: str, suffix: str) -> Any:
    if suffix == ".json":
        return json.loads(text, object_pairs_hook=_unique)
    if suffix in SUFFIXES and suffix != ".txt":
        return yaml.safe_load(text)
    lines = [line.strip() for line in text.rstrip().splitlines()]
    if "" in lines[:-1]:
        raise ValueError(f"line {lines.index('') + 1} is empty, and a line is the name of a class")
    return lines


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"{shortened(key)} is there twice")
        unique[key] = value
    return unique


def _entries(content: Any) -> list[tuple[str, Any]]:
    """Return pairs of name and colour from the content of a file."""
    if isinstance(content, Mapping):
        by_index = {str(key): name for key, name in content.items()}
        if by_index and all(key.isdecimal() for key in by_index):
            missing = [index for index in range(len(by_index)) if str(index) not in by_index]
            if missing:
                raise ValueError(f"there is no class with the index {missing[0]}")
            return [(by_index[str(index)], None) for index in range(len(by_index))]
        return list(content.items())
    if not isinstance(content, list):
        raise ValueError(f"it must be a list of names, or names with colours, got "
                         f"{shortened(content)}")  # fmt: skip
    entries = []
    for index, entry in enumerate(content):
        if not isinstance(entry, Mapping):
            entries.append((entry, None))
            continue
        if "name" not in entry:
            raise ValueError(f"a class must have a name, got {shortened(entry)}")
        if entry.get("index", index) != index:
            raise ValueError(
                f"classes must be in the order of their index, but at index {index} is "
                f"{shortened(entry['index'])}"
            )
        entries.append((entry["name"], entry.get("color")))
    return entries


def _color(color: Any) -> Color | None:
    if color is None:
        return None
    if isinstance(color, str):
        try:
            red, green, blue = ImageColor.getrgb(color)[:3]
        except ValueError:
            pass
        else:
            return red, green, blue
    elif (
        isinstance(color, list)
        and len(color) == 3
        and all(type(level) is int and 0 <= level <= 255 for level in color)
    ):
        return color[0], color[1], color[2]
    raise ValueError(
        f"a colour is written like [128, 64, 128] or '#804080', got {shortened(color)}"
    )


def classes_json(names: Sequence[str], colors: Sequence[Color]) -> str:
    """Return classes as JSON, with a line of index, name and colour for each."""
    rows = zip(range(len(names)), names, colors, strict=True)
    lines = [json.dumps({"index": i, "name": name, "color": color}) for i, name, color in rows]
    return "[\n" + ",\n".join(lines) + "\n]\n"
