"""Confidence intervals of differences, the share of images made worse, rank correlations."""

from collections.abc import Iterable, Sequence
from math import nan
from zlib import crc32

import torch
from torch import Tensor

from selfadapt.metrics import Counts, iou
from selfadapt.protocol.results import DomainScores

RESAMPLES = 1000
WORSE = (0.0, 0.05, 0.10)
"""Losses of IoU beyond which an image counts as worse."""
EPSILON = 1e-6
"""Tolerance for rounding errors of an IoU."""


def worse(changes: Iterable[float]) -> list[float]:
    """Return the share of images made worse: at all, by more than 5 and by more than 10 points."""
    changes = list(changes)
    if not changes:
        return [nan] * len(WORSE)
    return [sum(c < -limit - EPSILON for c in changes) / len(changes) for limit in WORSE]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation of two lists without ties; NaN for fewer than two values.

    Example:
        >>> rank_correlation([0.1, 0.2, 0.9], [10, 30, 20])
        0.5
    """
    ranks = torch.tensor([first, second]).argsort(dim=1).argsort(dim=1).double()
    return round(float(torch.corrcoef(ranks)[0, 1]), 6) if len(first) > 1 else nan


def quality_correlation(scores: DomainScores) -> float:
    """Return the rank correlation of the estimated quality with the mean IoU of an image."""
    names = [name for name in scores.image_iou if name in scores.quality]
    pairs = ([of[name] for name in names] for of in (scores.quality, scores.image_iou))
    return rank_correlation(*pairs)


def change(after: DomainScores, before: DomainScores) -> float:
    """Return the change of mIoU on the images in both."""
    both = set(after.images) & set(before.images)
    counts_after, counts_before = (
        sum(
            (part for name, part in zip(s.images, s.parts, strict=True) if name in both),
            Counts.zero(s.num_classes),
        )
        for s in (after, before)
    )
    return float(iou(counts_after.confusion).nanmean() - iou(counts_before.confusion).nanmean())


def interval(after: DomainScores, before: DomainScores, domain: str) -> tuple[float, float]:
    """Return the 95 % interval of the change of mIoU, by a paired bootstrap over images."""
    return middle_95(bootstrap(after, before, domain))


def bootstrap(after: DomainScores, before: DomainScores, domain: str) -> Tensor:
    """Return the change of mIoU on samples of the images drawn with replacement ``(samples,)``.

    All methods use the same samples of a domain; different domains use different ones.
    """
    both = sorted(set(after.images) & set(before.images))
    if len(both) < 2:  # nothing to draw from
        return torch.full((RESAMPLES,), nan)
    generator = torch.Generator().manual_seed(crc32(domain.encode()))
    picks = torch.randint(len(both), (RESAMPLES, len(both)), generator=generator)
    times = torch.zeros(RESAMPLES, len(both)).scatter_add_(1, picks, torch.ones_like(picks).float())
    scores = []
    for part in (after, before):
        index = {name: i for i, name in enumerate(part.images)}
        matrices = part.confusions[[index[name] for name in both]].double()
        sums = torch.einsum("sn,nij->sij", times.double(), matrices)
        scores.append(iou(sums).nanmean(dim=-1))
    return scores[0] - scores[1]


def middle_95(changes: Tensor) -> tuple[float, float]:
    """Return the bounds of the middle 95 % of the samples."""
    if changes.isnan().all():
        return nan, nan
    ordered = changes[~changes.isnan()].sort().values
    return float(ordered[int(0.025 * len(ordered))]), float(ordered[int(0.975 * len(ordered))])
