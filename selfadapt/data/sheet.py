"""A contact sheet of some pairs of a dataset, to check that labels fit their images."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image as PILImage
from PIL import ImageDraw, ImageOps

from selfadapt.data.samples import Dataset
from selfadapt.images import colored
from selfadapt.labels import class_colors

CELL = (256, 160)
"""Maximum width and height of an image."""
TEXT = 16
"""Height of the line with the name of the pair."""
COLUMNS = 3


def contact_sheet(datasets: Sequence[Dataset], number: int = 12) -> PILImage.Image:
    """Return evenly spaced pairs: the name, the image, and the image with the label as overlay.

    Args:
        datasets: The datasets, whose pairs are concatenated.
        number: Maximum number of pairs to show.
    """
    items = [(dataset, index) for dataset in datasets for index in range(len(dataset))]
    number = min(number, len(items))
    shown = [items[k] for k in np.linspace(0, len(items) - 1, number).round().astype(int)]
    columns = min(COLUMNS, number)
    width, height = 2 * CELL[0] + 4, CELL[1] + TEXT
    sheet = PILImage.new("RGB", (columns * width, -(-number // columns) * height), "white")
    for cell, (dataset, index) in enumerate(shown):
        sheet.paste(_cell(dataset, index), (cell % columns * width, cell // columns * height))
    return sheet


def _cell(dataset: Dataset, index: int) -> PILImage.Image:
    cell = PILImage.new("RGB", (2 * CELL[0], CELL[1] + TEXT), "white")
    draw = ImageDraw.Draw(cell)
    draw.text((2, 2), dataset.pairs[index].name, "black")
    try:
        sample = dataset[index]
    except (ValueError, OSError):
        draw.text((2, TEXT + 2), "cannot be shown, see the problems", "red")
        return cell
    image = ImageOps.contain(sample.image, CELL)
    label = PILImage.fromarray(sample.label).resize(image.size, PILImage.Resampling.NEAREST)
    painted = colored(torch.from_numpy(np.array(label)), class_colors(dataset.space.names))
    cell.paste(image, (0, TEXT))
    cell.paste(PILImage.blend(image, painted, 0.6), (CELL[0], TEXT))
    return cell
