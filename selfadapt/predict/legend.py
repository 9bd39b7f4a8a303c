"""Words on pictures: which colour is which class, and what each part of a panel shows."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image as PILImage
from PIL import ImageDraw, ImageFont

from selfadapt.labels import Color

INK, PAPER = (40, 44, 52), (255, 255, 255)
MAX_ROWS = 4
"""Rows of the legend below a panel."""
MAX_ENTRIES = 1024
"""Classes in a legend of its own; further ones are counted."""
MAX_COLUMN = 32
MAX_LETTERS = 32
LEGEND_TEXT = 16
"""Height of the letters in a legend of its own, in pixels."""


def text_size(height: int) -> int:
    """Return the size of letters that can be read on a picture of this height."""
    return min(max(height // 28, 13), 48)


def heading(text: str, width: int, size: int) -> PILImage.Image:
    """Return a line of text as the head of a picture of this width."""
    head = PILImage.new("RGB", (width, _line(size)), PAPER)
    ImageDraw.Draw(head).text((size // 2, size // 4), text, INK, _font(size))
    return head


def legend(names: Sequence[str], colors: Sequence[Color]) -> PILImage.Image:
    """Return a picture of all classes with their colours and indices, in columns."""
    size = LEGEND_TEXT
    shown = [f"{index}  {_cut(name)}" for index, name in enumerate(names[:MAX_ENTRIES])]
    swatches: list[Color] = list(colors[:MAX_ENTRIES])
    if len(names) > MAX_ENTRIES:
        shown.append(f"and {len(names) - MAX_ENTRIES} more, see classes.json")
        swatches.append(PAPER)
    num_rows = min(len(shown), MAX_COLUMN)
    widths = [
        max(_entry_width(text, size) for text in shown[start : start + num_rows])
        for start in range(0, len(shown), num_rows)
    ]
    picture = PILImage.new("RGB", (sum(widths) + size, num_rows * _line(size) + size), PAPER)
    for index, (text, color) in enumerate(zip(shown, swatches, strict=True)):
        column, row = divmod(index, num_rows)
        at = size // 2 + sum(widths[:column]), size // 2 + row * _line(size)
        _draw_entry(picture, at, text, color, size)
    return picture


def legend_below(
    names: Sequence[str], colors: Sequence[Color], labels: Sequence[np.ndarray], width: int,
    size: int,
) -> PILImage.Image:  # fmt: skip
    """Return a legend for below a picture, as high for every image of this width.

    Where there is no room for all classes it has those in ``labels``, the most frequent first.
    """
    order = list(range(len(names)))
    texts = [_cut(name) for name in names]
    places = _placed([texts[index] for index in order[:MAX_ENTRIES]], width, size)
    if len(names) > MAX_ENTRIES or places[-1][1] >= MAX_ROWS:
        counts = np.zeros(len(names), np.int64)
        for label in labels:
            counts += np.bincount(label.ravel(), minlength=len(names))
        order = [int(i) for i in np.argsort(-counts, kind="stable") if counts[i]]
        order = order[:MAX_ENTRIES]
        places = _placed([texts[index] for index in order], width, size)
        num_rows = MAX_ROWS
    else:
        num_rows = places[-1][1] + 1
    picture = PILImage.new("RGB", (width, num_rows * _line(size)), PAPER)
    for index, (left, row) in zip(order, places, strict=True):
        if row < num_rows:
            _draw_entry(picture, (left, row * _line(size)), texts[index], colors[index], size)
    return picture


def _placed(texts: Sequence[str], width: int, size: int) -> list[tuple[int, int]]:
    """Return where entries begin, and in which row, from left to right."""
    places, left, row = [], size // 2, 0
    for text in texts:
        needed = _entry_width(text, size)
        if left + needed > width and left > size // 2:
            left, row = size // 2, row + 1
        places.append((left, row))
        left += needed
    return places


def _draw_entry(
    picture: PILImage.Image, at: tuple[int, int], text: str, color: Color, size: int
) -> None:
    draw = ImageDraw.Draw(picture)
    left, top = at
    draw.rectangle((left, top + size // 4, left + size, top + size // 4 + size), color)
    draw.text((left + size + size // 2, top + size // 4), text, INK, _font(size))


def _entry_width(text: str, size: int) -> int:
    return round(_font(size).getlength(text)) + 3 * size


def _cut(name: str) -> str:
    return name if len(name) <= MAX_LETTERS else f"{name[: MAX_LETTERS - 3]}..."


def _line(size: int) -> int:
    return size + size // 2


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
