"""Numbers in their ranges, refused with one and the same sentence."""

from math import inf
from numbers import Integral, Real


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
        raise ValueError(f"{name} must be {sort}, {span}, got {value!r}")
