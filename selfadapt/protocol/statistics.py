"""How sure a difference is, and how many images it is paid with."""

from collections.abc import Iterable
from math import nan
from zlib import crc32

import torch
from torch import Tensor

from selfadapt.metrics import Counts, iou
from selfadapt.protocol.results import Scores

RESAMPLES = 1000
WORSE = (0.0, 0.05, 0.10)
"""An image is made worse by more than this much IoU."""
EPSILON = 1e-6
"""What rounding may do to an IoU."""


def worse(changes: Iterable[float]) -> list[float]:
    """Return the share of images made worse: at all, by more than 5, by more than 10 points."""
    changes = list(changes)
    if not changes:
        return [nan] * len(WORSE)
    return [sum(c < -limit - EPSILON for c in changes) / len(changes) for limit in WORSE]


def change(after: Scores, before: Scores) -> float:
    """Return the change of mIoU on the images that both have segmented."""
    both = set(after.images) & set(before.images)
    one, other = (
        sum(
            (part for name, part in zip(s.images, s.parts, strict=True) if name in both),
            Counts.zero(s.num_classes),
        )
        for s in (after, before)
    )
    return float(iou(one.confusion).nanmean() - iou(other.confusion).nanmean())


def interval(after: Scores, before: Scores, domain: str) -> tuple[float, float]:
    """Return the 95 % interval of the change of mIoU, by a paired bootstrap over images."""
    return ends(resampled(after, before, domain))


def resampled(after: Scores, before: Scores, domain: str) -> Tensor:
    """Return the change of mIoU in samples of the images, drawn with replacement ``(samples,)``.

    The samples of a domain are the same for all methods, and those of two domains are not.
    """
    both = sorted(set(after.images) & set(before.images))
    if len(both) < 2:  # nothing to draw from
        return torch.full((RESAMPLES,), nan)
    generator = torch.Generator().manual_seed(crc32(domain.encode()))
    picks = torch.randint(len(both), (RESAMPLES, len(both)), generator=generator)
    times = torch.zeros(RESAMPLES, len(both)).scatter_add_(1, picks, torch.ones_like(picks).float())
    scores = []
    for one in (after, before):
        places = {name: place for place, name in enumerate(one.images)}
        matrices = one.confusions[[places[name] for name in both]].double()
        sums = torch.einsum("sn,nij->sij", times.double(), matrices)
        scores.append(iou(sums).nanmean(dim=-1))
    return scores[0] - scores[1]


def ends(changes: Tensor) -> tuple[float, float]:
    """Return where the middle 95 % of samples begin and end."""
    if changes.isnan().all():
        return nan, nan
    ordered = changes[~changes.isnan()].sort().values
    return float(ordered[int(0.025 * len(ordered))]), float(ordered[int(0.975 * len(ordered))])
