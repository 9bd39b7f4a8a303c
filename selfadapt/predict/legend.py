"""Text on pictures: legends of the class colours, and headings for the parts of a panel."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image as PILImage
from PIL import ImageDraw, ImageFont

from selfadapt.labels import Color

FOREGROUND, BACKGROUND = (40, 44, 52), (255, 255, 255)
MAX_ROWS = 4
"""Maximum number of rows in the legend below a panel."""
MAX_ENTRIES = 1024
"""Maximum number of classes in a separate legend; of the others it shows the number."""
MAX_COLUMN = 32
MAX_LETTERS = 32
LEGEND_TEXT = 16
"""Font size in a separate legend, in pixels."""


def text_size(height: int) -> int:
    """Return a readable font size for a picture of this height."""
    return min(max(height // 28, 13), 48)


def heading(text: str, width: int, size: int) -> PILImage.Image:
    """Return a heading for a picture of this width."""
    head = PILImage.new("RGB", (width, _line(size)), BACKGROUND)
    ImageDraw.Draw(head).text((size // 2, size // 4), text, FOREGROUND, _font(size))
    return head


def legend(names: Sequence[str], colors: Sequence[Color]) -> PILImage.Image:
    """Return a picture of all classes with their colours and indices, in columns."""
    size = LEGEND_TEXT
    shown = [f"{index}  {_cut(name)}" for index, name in enumerate(names[:MAX_ENTRIES])]
    swatches: list[Color] = list(colors[:MAX_ENTRIES])
    if len(names) > MAX_ENTRIES:
        shown.append(f"and {len(names) - MAX_ENTRIES} more, see classes.json")
        swatches.append(BACKGROUND)
    num_rows = min(len(shown), MAX_COLUMN)
    widths = [
        max(_entry_width(text, size) for text in shown[start : start + num_rows])
        for start in range(0, len(shown), num_rows)
    ]
    picture = PILImage.new("RGB", (sum(widths) + size, num_rows * _line(size) + size), BACKGROUND)
    for index, (text, color) in enumerate(zip(shown, swatches, strict=True)):
        column, row = divmod(index, num_rows)
        position = size // 2 + sum(widths[:column]), size // 2 + row * _line(size)
        _draw_entry(picture, position, text, color, size)
    return picture


def legend_below(
    names: Sequence[str], colors: Sequence[Color], labels: Sequence[np.ndarray], width: int,
    size: int,
) -> PILImage.Image:  # fmt: skip
    """Return a legend to put below a picture, of the same height for every image of this width.

    If not all classes fit, it shows those in ``labels``, the most frequent first.
    """
    order = list(range(len(names)))
    texts = [_cut(name) for name in names]
    positions = _layout([texts[index] for index in order[:MAX_ENTRIES]], width, size)
    if len(names) > MAX_ENTRIES or positions[-1][1] >= MAX_ROWS:
        counts = np.zeros(len(names), np.int64)
        for label in labels:
            counts += np.bincount(label.ravel(), minlength=len(names))
        order = [int(i) for i in np.argsort(-counts, kind="stable") if counts[i]]
        order = order[:MAX_ENTRIES]
        positions = _layout([texts[index] for index in order], width, size)
        num_rows = MAX_ROWS
    else:
        num_rows = positions[-1][1] + 1
    picture = PILImage.new("RGB", (width, num_rows * _line(size)), BACKGROUND)
    for index, (left, row) in zip(order, positions, strict=True):
        if row < num_rows:
            _draw_entry(picture, (left, row * _line(size)), texts[index], colors[index], size)
    return picture


def _layout(texts: Sequence[str], width: int, size: int) -> list[tuple[int, int]]:
    """Return the left edge and the row of each entry."""
    positions, left, row = [], size // 2, 0
    for text in texts:
        needed = _entry_width(text, size)
        if left + needed > width and left > size // 2:
            left, row = size // 2, row + 1
        positions.append((left, row))
        left += needed
    return positions


def _draw_entry(
    picture: PILImage.Image, position: tuple[int, int], text: str, color: Color, size: int
) -> None:
    draw = ImageDraw.Draw(picture)
    left, top = position
    draw.rectangle((left, top + size // 4, left + size, top + size // 4 + size), color)
    draw.text((left + size + size // 2, top + size // 4), text, FOREGROUND, _font(size))


def _entry_width(text: str, size: int) -> int:
    return round(_font(size).getlength(text)) + 3 * size


def _cut(name: str) -> str:
    return name if len(name) <= MAX_LETTERS else f"{name[: MAX_LETTERS - 3]}..."


def _line(size: int) -> int:
    return size + size // 2


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
