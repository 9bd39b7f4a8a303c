"""Settings that are not what they must be, refused with one and the same sentence."""

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
    good = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    if not (good and low <= value <= high):  # type: ignore[operator]
        sort = "a whole number" if whole else "a number"
        span = f"{low} or more" if high == inf else f"{low} to {high}"
        raise ValueError(f"{name} must be {sort}, {span}, got {shortened(value)}")


def shortened(value: object, length: int = 80) -> str:
    """Return how Python writes a value that came from a file, cut to a length a person reads.

    Example:
        >>> shortened("a" * 100, 10)
        "'aaaaaaaaa..."
    """
    if isinstance(value, str | bytes):
        value = value[:length]  # it may have millions of characters
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # nested too deeply, or a number of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= length else f"{text[:length]}..."


def check_given(config: Any) -> None:
    """Raise ValueError where a setting of a dataclass is null that may not be."""
    for field in fields(config):
        if getattr(config, field.name) is None and field.default is not None:
            raise ValueError(f"{field.name} must have a value, got null; or leave it out")
