"""Validation of settings, with uniform error messages."""

from collections.abc import Sequence
from dataclasses import fields
from math import inf
from numbers import Integral, Real
from typing import Any


def check_number(
    name: str, value: object, low: float, high: float = inf, *, whole: bool = False
) -> None:
    """Raise ValueError unless ``value`` is a number from ``low`` to ``high``.

    Example:
        >>> check_number("steps", -1, 0, whole=True)
        Traceback (most recent call last):
        ValueError: steps must be a whole number, 0 or more, got -1
    """
    is_valid_type = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    if not (is_valid_type and low <= value <= high):  # type: ignore[operator]
        kind = "a whole number" if whole else "a number"
        span = f"{low} or more" if high == inf else f"{low} to {high}"
        raise ValueError(f"{name} must be {kind}, {span}, got {shortened(value)}")


def shortened(value: object, length: int = 80) -> str:
    """Return the ``repr`` of an untrusted value, shortened to ``length`` characters.

    Example:
        >>> shortened("a" * 100, 10)
        "'aaaaaaaaa..."
    """
    if isinstance(value, str | bytes):
        value = value[:length]  # avoids the repr of millions of characters
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # nested too deeply, or a number of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= length else f"{text[:length]}..."


def first_few(items: Sequence[object], number: int) -> str:
    """Return the first items as text, and how many more there are.

    Example:
        >>> first_few(["a", "b", "c"], 1)
        'a and 2 more'
    """
    more = f" and {len(items) - number} more" if len(items) > number else ""
    return ", ".join(map(str, items[:number])) + more


def check_not_none(config: Any) -> None:
    """Raise ValueError if a setting of a dataclass is None although its default is not."""
    for field in fields(config):
        if getattr(config, field.name) is None and field.default is not None:
            raise ValueError(f"{field.name} must have a value, got null; or leave it out")
