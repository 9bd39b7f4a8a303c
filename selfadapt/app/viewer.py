"""Data for the viewer of the page: the photo, and masks as class ids that it draws itself.

With class ids instead of pictures, the page can name the class under the pointer and change the
opacity or the compared masks without a request to the server.
"""

import base64
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfadapt.app.limits import MAX_SIDE
from selfadapt.app.run import Outcome, remap_street_label
from selfadapt.app.uploads import Upload
from selfadapt.images import data_uri, encode, to_pil
from selfadapt.labels import class_colors
from selfadapt.views import Size, resize, size_of

WEB = Path(__file__).parent / "web"
"""Style, markup and script of the page."""
NO_CLASS = 2**16 - 1
"""Class id of pixels that a pseudo-label ignores."""


def viewer_data(
    upload: Upload, outcomes: Sequence[Outcome], title: str, ground_truth: Tensor | None = None
) -> dict[str, Any]:
    """Return the JSON content of the viewer.

    Args:
        upload: The image.
        outcomes: The results of the methods.
        title: Title of the image.
        ground_truth: Labels of a rendered street ``(H, W)``, as indices in ``STREETS_9``.
    """
    height, width = size_of(upload.image)
    scale = min(1, MAX_SIDE / max(height, width))
    size = max(1, round(height * scale)), max(1, round(width * scale))
    photo = upload.image if scale == 1 else resize(upload.image, size)
    names = outcomes[0].names
    layers = []

    def add(name: str, label: Tensor | None, confidence: Tensor | None = None) -> None:
        if label is None:
            return
        ids = resize_nearest(label, size)
        ids = torch.where((ids < 0) | (ids >= len(names)), NO_CLASS, ids)
        layer = {"name": name, "ids": _compressed(ids.numpy().astype("<u2"))}
        if confidence is not None:
            percent = (resize_nearest(confidence, size) * 100).round()
            layer["confidence"] = _compressed(percent.numpy().astype(np.uint8))
        layers.append(layer)

    add("as trained", outcomes[0].source_label)
    for outcome in outcomes:
        add(outcome.method, outcome.label, outcome.confidence)
    for outcome in outcomes:
        add(f"pseudo-label of {outcome.method}", outcome.pseudo_label)
    if ground_truth is not None:
        add("exact labels", remap_street_label(ground_truth, names))
    return {
        "title": title,
        "width": size[1],
        "height": size[0],
        "photo": data_uri(encode(to_pil(photo), "JPEG", quality=90), "JPEG"),
        "names": names,
        "colors": class_colors(names),
        "layers": layers,
        "right": outcomes[0].method,
    }


def _compressed(values: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(values.tobytes(), 6)).decode()


def resize_nearest(values: Tensor, size: Size) -> Tensor:
    """Resize a map ``(H, W)`` by nearest neighbour."""
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(int)
        for old, new in zip(size_of(values), size, strict=True)
    )
    return values[rows][:, columns]
