"""Rows of the journal: what is written down of one image and one trial."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from selfadapt.metrics import BINS, Counts


class Key(NamedTuple):
    """What a row is about."""

    domain: str
    image: str
    trial: str


def row_of(
    key: Key,
    counts: Counts,
    seconds: float,
    megabytes: float | None,
    notes: Sequence[str],
    sizes: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the row of an image that was segmented; ``sizes``: bytes of its files."""
    return {
        **key._asdict(),
        "bytes": sizes,
        "confusion": counts.confusion.flatten().tolist(),
        "bins": counts.bins.flatten().tolist(),
        "gaps": counts.gaps.tolist(),
        "ms": round(1000 * seconds, 3),
        "mb": None if megabytes is None else round(megabytes, 1),
        "notes": list(notes),
    }


def counts_of(row: dict[str, Any]) -> Counts:
    """Return the counts of a row."""
    num = len(row["gaps"])
    confusion = torch.tensor(row["confusion"]).reshape(num, num)
    bins = torch.tensor(row["bins"]).reshape(3, BINS)
    return Counts(confusion, bins, torch.tensor(row["gaps"]))
