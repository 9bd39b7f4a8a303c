"""Published numbers as printed in the paper, with their source: ``published.csv``."""

import csv
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from selfadapt.protocol.recipe import DomainConfig
from selfadapt.protocol.trials import Trial

PAPER = "Bahmani et al., TMLR 2023"
MAIN_TABLES = ("2a", "7a", "3", "2b", "7b", "8", "5a", "5b", "6", "12", "13", "4")
"""Tables with the paper's default settings, in order of precedence."""
SPACES = {"gta": "cityscapes-19", "synthia": "synthia-16"}
"""The class space that networks of each source domain are scored in."""


class Number(NamedTuple):
    """A value in one of the paper's tables; the columns of ``published.csv``."""

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


def published_names(trial: Trial, norm: str = "bn", dropout: float = 0.0) -> tuple[str, ...]:
    """Return the names of a trial in the paper; empty if the paper has no such method.

    Example:
        >>> published_names(Trial("san", ("net",), {"alpha": 0.1}))
        ('SaN',)
    """
    alpha = trial.settings.get("alpha", 0)
    if trial.method == "mc-dropout":
        return ("SaN + MC-dropout",) if alpha else ("MC-dropout",)
    if norm != "bn" or dropout:
        return (norm.upper(),) if trial.method == "source" and not dropout else ()
    plain: dict[str, tuple[str, ...]] = {
        "source": ("t-BN", "baseline", "No Adapt"),
        "p-bn": ("p-BN",),
    }
    with_san: dict[str, tuple[str, ...]] = {
        "san": ("SaN",), "tta": ("TTA",), "self-adapt": ("self-adaptation",), "tent": ("Tent",),
        "entropy": ("entropy minimisation",),
    }  # fmt: skip
    if trial.method in plain:
        return plain[trial.method]
    return with_san.get(trial.method, ()) if alpha else ()


def find_number(
    source: str | None, network: str, names: Sequence[str], domain: str, metric: str = "mIoU"
) -> Number | None:
    """Return the paper's number for a network and a method, or None.

    Example:
        >>> find_number("gta", "deeplabv1_resnet50", ["SaN"], "cityscapes").value
        37.54
    """
    candidates = [
        number
        for number in published()
        if (number.source, number.network) == (source, network)
        and (number.domain, number.metric) == (domain, metric)
        and number.method in names
        and number.table in MAIN_TABLES
        and (number.table != "4" or number.cite == PAPER)
    ]
    return min(candidates, key=lambda number: MAIN_TABLES.index(number.table), default=None)


def find_sweep_value(source: str | None, network: str, setting: str, value: float) -> float | None:
    """Return the mIoU on Cityscapes in Table 9 for a value of psi or of the learning rate.

    Example:
        >>> find_sweep_value("gta", "deeplabv1_resnet50", "psi", 0.1)
        44.0
    """
    for number in published():
        settings = dict(part.split("=") for part in number.setting.split("; ") if "=" in part)
        if (
            (number.table, number.source, number.network) == ("9", source, network)
            and (settings.get("sweep"), number.metric) == (setting, "mIoU")
            and float(settings.get(setting, "nan")) == value
        ):
            return number.value
    return None


def is_published(domain: DomainConfig, source: str | None, classes: object) -> bool:
    """Return True if a domain is scored as in the paper: all images, unscaled, same classes."""
    whole = domain.limit is None and domain.names is None and domain.scale == 1
    return whole and domain.split == "val" and SPACES.get(str(source)) == classes


def compared_methods(source: str | None) -> Iterator[Number]:
    """Yield the mIoU of the methods for domain generalisation in Table 4."""
    for number in published():
        if number.table == "4" and number.source == source and number.metric == "mIoU":
            yield number
