"""Published numbers, as the paper prints them, with who measured what: ``published.csv``."""

import csv
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import NamedTuple

NAMES = {
    "source": ("t-BN", "baseline"),
    "p-bn": ("p-BN",),
    "san": ("SaN",),
    "tta": ("TTA",),
    "mc-dropout": ("MC-dropout", "SaN + MC-dropout"),
    "tent": ("Tent",),
    "entropy": ("entropy minimisation",),
    "self-adapt": ("self-adaptation",),
}
"""What the paper calls our methods."""
HEADLINE = ("2a", "7a", "3", "2b", "7b", "5a", "5b", "12", "13")
"""Tables whose rows are with the paper's own settings, in the order in which they are looked at."""


class Number(NamedTuple):
    """A number in one of the paper's tables."""

    table: str
    source: str
    network: str
    method: str
    cite: str
    domain: str
    setting: str
    metric: str
    value: float


@cache
def published() -> tuple[Number, ...]:
    """Return all numbers."""
    text = (files("selfadapt") / "report" / "published.csv").read_text()
    header, *rows = csv.reader(text.splitlines())
    assert tuple(header) == Number._fields
    return tuple(Number._make([*texts, float(value)]) for *texts, value in rows)


def find_number(
    source: str | None, network: str, method: str, domain: str, metric: str = "mIoU"
) -> Number | None:
    """Return the paper's number for one of our methods, where it has one.

    Example:
        >>> find_number("gta", "deeplabv1_resnet50", "san", "cityscapes").value
        37.54
    """
    names = NAMES.get(method, ())
    found = [
        number
        for number in published()
        if (number.source, number.network) == (source, network)
        and (number.domain, number.metric) == (domain, metric)
        and number.method in names
        and number.table in HEADLINE
    ]
    found.sort(key=lambda number: (names.index(number.method), HEADLINE.index(number.table)))
    return found[0] if found else None


def compared(source: str | None) -> Iterator[Number]:
    """Yield what the paper holds itself against: methods for domain generalisation (Table 4)."""
    for number in published():
        if number.table == "4" and number.source == source and number.metric == "mIoU":
            yield number
