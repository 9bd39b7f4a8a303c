"""Tables, texts and curves of the results, as HTML in the colours of the page."""

from collections.abc import Sequence
from html import escape
from math import isfinite

from torch import Tensor

from selfadapt.app.run import Outcome, mean_iou
from selfadapt.labels import class_colors
from selfadapt.method import UNLIKE

WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM = 360, 170, 48, 12, 24
"""Size of the loss curve and its margins."""
MIN_SHARE = 0.005
"""Classes with a smaller share of the pixels are only listed if the share changes."""


def class_shares(label: Tensor, num_classes: int) -> list[float]:
    """Return the share of the pixels of each class in a label map ``(H, W)``.

    Example:
        >>> import torch
        >>> class_shares(torch.tensor([[0, 0], [0, 2]]), 3)
        [0.75, 0.0, 0.25]
    """
    return (label.flatten().bincount(minlength=num_classes) / label.numel()).tolist()


def legend(outcome: Outcome) -> str:
    """Return a table of the visible classes: colour, area before, area after."""
    names = outcome.names
    after = class_shares(outcome.label, len(names))
    source = outcome.source_label
    before = [None] * len(names) if source is None else class_shares(source, len(names))
    rows = [
        f'<tr><td><i style="background:rgb{color}"></i>{escape(name)}</td>'
        f"<td>{_percent(old)}</td><td>{_percent(new)}</td><td>{_change(old, new)}</td></tr>"
        for name, color, old, new in zip(names, class_colors(names), before, after, strict=True)
        if (old or new) and not (len(names) > 2 and _is_negligible(old, new))
    ]
    head = "<tr><th>class</th><th>before</th><th>after</th><th>change</th></tr>"
    return f'<table class="legend">{head}{"".join(rows)}</table>'


def _is_negligible(before: float | None, after: float) -> bool:
    """Return True for a class with few pixels whose share does not change."""
    return max(before or 0.0, after) < MIN_SHARE and _change(before, after) in ("", "+0.0")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _change(before: float | None, after: float) -> str:
    return "" if before is None else f"{round(100 * (after - before), 1) + 0.0:+.1f}"


def summary(outcome: Outcome, ground_truth: Tensor | None = None) -> str:
    """Return the score, settings, time and notes of a method.

    Args:
        outcome: The result of a method.
        ground_truth: Labels of a rendered street ``(H, W)``, indices in ``STREETS_9``.
    """
    settings = ", ".join(f"{name} {_value(value)}" for name, value in outcome.settings.items())
    parts = [f"<b>{escape(outcome.method)}</b>" + (f" with {settings}" if settings else "")]
    parts.append(f"{outcome.seconds:.2f} s")
    if outcome.quality is not None:
        parts.append(f"estimated quality {outcome.quality:.2f} of 1")
    if outcome.changed is not None:
        parts.append(f"{outcome.changed:.1%} of the pixels changed")
    warning = f'<p class="warning">{escape(UNLIKE)}</p>' if UNLIKE in outcome.notes else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in outcome.notes if note != UNLIKE)
    notes = f"<ul>{notes}</ul>" if notes else ""
    return f"{_score(outcome, ground_truth)}{warning}<p>{' &middot; '.join(parts)}</p>{notes}"


def _score(outcome: Outcome, ground_truth: Tensor | None) -> str:
    after = None if ground_truth is None else mean_iou(outcome.label, ground_truth, outcome.names)
    if ground_truth is None or after is None:
        return ""
    source = outcome.source_label
    before = None if source is None else mean_iou(source, ground_truth, outcome.names)
    prefix = "" if before is None else f"{100 * before:.1f} &rarr; "
    return (
        f'<p class="score">{prefix}{100 * after:.1f} % mIoU <small>against the exact labels of '
        "this rendered street</small></p>"
    )


def report(outcomes: Sequence[Outcome], ground_truth: Tensor | None = None) -> str:
    """Return a section for each method: summary, classes, loss curve."""
    return "".join(
        f'<section class="method">{summary(outcome, ground_truth)}'
        f'<div class="details">{legend(outcome)}'
        f"<div><p><b>Loss</b> before each step</p>{curve(outcome.losses)}</div></div></section>"
        for outcome in outcomes
    )


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return "/".join(f"{item:g}" for item in value)
    return f"{value:g}"


def curve(losses: Sequence[float]) -> str:
    """Return the loss before each step as an SVG, or a sentence if there is no curve to draw."""
    if not losses:
        return "<p>No gradient steps were taken.</p>"
    if not all(map(isfinite, losses)):
        return "<p>The loss is not finite.</p>"
    low, high = min(losses), max(losses)
    margin = 0.1 * (high - low or abs(high) or 1)
    x_step = (WIDTH - LEFT - RIGHT) / max(1, len(losses) - 1)
    y_scale = (HEIGHT - BOTTOM) / (high - low + 2 * margin)
    points = [
        (LEFT + i * x_step, (high + margin - loss) * y_scale) for i, loss in enumerate(losses)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{loss:.4g}</title></circle>'
        for (x, y), loss in zip(points, losses, strict=True)
    )
    texts = [_text(LEFT - 6, margin * y_scale + 4, f"{high:.3g}", "end")]
    if low < high:
        texts.append(_text(LEFT - 6, (high + margin - low) * y_scale + 4, f"{low:.3g}", "end"))
    texts.append(_text(LEFT, HEIGHT - 6, "step 1", "start"))
    if len(losses) > 1:
        texts.append(_text(WIDTH - RIGHT, HEIGHT - 6, str(len(losses)), "end"))
    description = f"loss from {losses[0]:.3g} to {losses[-1]:.3g} in {len(losses)} steps"
    return (
        f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{description}">'
        f'<path d="M{LEFT} 0V{HEIGHT - BOTTOM}H{WIDTH}"/><polyline points="{line}"/>{dots}'
        f"{''.join(texts)}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
