"""What the viewer of the page is given: the photo, and masks as numbers that it paints itself.

Numbers, not pictures: so the page can name the class under the pointer, and change the opacity or
the masks that it compares, without asking the server.
"""

import base64
import io
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfadapt.app.run import Outcome
from selfadapt.app.uploads import Upload
from selfadapt.images import to_pil
from selfadapt.labels import STREETS_9, class_colors
from selfadapt.views import Size, resize, size_of

WEB = Path(__file__).parent / "web"
"""Style, markup and script of the page."""
MAX_SIDE = 1600
"""Columns and rows that are sent at most."""
NO_CLASS = 2**16 - 1
"""In masks, where a pseudo-label leaves a pixel out."""


def scene(
    upload: Upload, outcomes: Sequence[Outcome], title: str, exact: Tensor | None = None
) -> dict[str, Any]:
    """Return what the viewer shows, as JSON.

    Args:
        upload: The image.
        outcomes: What the methods gave for it.
        title: What it is, in words.
        exact: Labels of a rendered street ``(H, W)``, as indices in ``STREETS_9``.
    """
    height, width = size_of(upload.image)
    shrink = min(1, MAX_SIDE / max(height, width))
    size = max(1, round(height * shrink)), max(1, round(width * shrink))
    photo = upload.image if shrink == 1 else resize(upload.image, size)
    file = io.BytesIO()
    to_pil(photo).save(file, "JPEG", quality=90)
    names = outcomes[0].names
    layers = []

    def add(name: str, label: Tensor | None, confidence: Tensor | None = None) -> None:
        if label is None:
            return
        ids = at_size(label, size)
        ids = torch.where((ids < 0) | (ids >= len(names)), NO_CLASS, ids)
        layer = {"name": name, "ids": _packed(ids.numpy().astype("<u2"))}
        if confidence is not None:
            percent = (at_size(confidence, size) * 100).round()
            layer["confidence"] = _packed(percent.numpy().astype(np.uint8))
        layers.append(layer)

    add("as trained", outcomes[0].source_label)
    for outcome in outcomes:
        add(outcome.method, outcome.label, outcome.confidence)
    for outcome in outcomes:
        add(f"pseudo-label of {outcome.method}", outcome.pseudo_label)
    if exact is not None and set(STREETS_9) <= set(names):
        index = torch.tensor([names.index(name) for name in STREETS_9])
        add("exact labels", index[exact.long()])
    return {
        "title": title,
        "width": size[1],
        "height": size[0],
        "photo": f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}",
        "names": names,
        "colors": class_colors(names),
        "layers": layers,
        "right": outcomes[0].method,
    }


def _packed(values: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(values.tobytes(), 6)).decode()


def at_size(values: Tensor, size: Size) -> Tensor:
    """Return ``(H, W)`` at another size; no value is mixed with another."""
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(int)
        for old, new in zip(size_of(values), size, strict=True)
    )
    return values[rows][:, columns]
