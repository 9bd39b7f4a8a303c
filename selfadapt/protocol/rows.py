"""Rows of the journal: the counts of one image and one trial."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from selfadapt.metrics import BINS, Counts


class TrialKey(NamedTuple):
    """Key of a journal row."""

    domain: str
    image: str
    trial: str


def row_of(
    key: TrialKey,
    counts: Counts,
    seconds: float,
    megabytes: float | None,
    notes: Sequence[str],
    sizes: Sequence[int] | None = None,
    quality: float | None = None,
) -> dict[str, Any]:
    """Return the row of a segmented image.

    Args:
        key: Its key.
        counts: Its counts.
        seconds: Time of the method.
        megabytes: Peak memory on a GPU.
        notes: Notes of the result.
        sizes: Sizes of its files in bytes.
        quality: Quality that the method estimates.
    """
    return {
        **key._asdict(),
        "bytes": sizes,
        "confusion": counts.confusion.flatten().tolist(),
        "bins": counts.bins.flatten().tolist(),
        "gaps": counts.gaps.tolist(),
        "ms": round(1000 * seconds, 3),
        "mb": None if megabytes is None else round(megabytes, 1),
        "notes": list(notes),
        "quality": None if quality is None else round(quality, 6),
    }


def counts_of(row: dict[str, Any]) -> Counts:
    """Return the counts of a row."""
    num_classes = len(row["gaps"])
    confusion = torch.tensor(row["confusion"]).reshape(num_classes, num_classes)
    bins = torch.tensor(row["bins"]).reshape(3, BINS)
    return Counts(confusion, bins, torch.tensor(row["gaps"]))
