"""Masks to download: labels as ids and in colours, at the size of the uploaded image."""

import io
import json
import zipfile
from collections.abc import Sequence
from math import isfinite

from selfadapt.app.run import Outcome
from selfadapt.app.viewer import resize_nearest
from selfadapt.images import colored, encode, label_image
from selfadapt.labels import class_colors
from selfadapt.views import Size


def masks_zip(model: str, outcomes: Sequence[Outcome], size: Size) -> bytes:
    """Return a ZIP file with the masks of all methods and ``about.json``, their settings.

    Args:
        model: The network's name.
        outcomes: The results of the methods.
        size: Height and width of the masks.
    """
    labels = {outcome.method: outcome.label for outcome in outcomes}
    if (source := outcomes[0].source_label) is not None:
        labels = {"source": source, **labels}
    names = outcomes[0].names
    colors = class_colors(names)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for method, label in labels.items():
            label = resize_nearest(label, size)
            pictures = {"label": label_image(label, colors), "color": colored(label, colors)}
            for kind, picture in pictures.items():
                content = encode(picture, "PNG", compress_level=3)
                archive.writestr(f"{method}_{kind}.png", content)
        archive.writestr("about.json", json.dumps(_metadata(model, outcomes), indent=2))
    return file.getvalue()


def _metadata(model: str, outcomes: Sequence[Outcome]) -> dict[str, object]:
    names = outcomes[0].names
    colors = class_colors(names)
    return {
        "model": model,
        "classes": [
            {"id": index, "name": name, "color": colors[index]} for index, name in enumerate(names)
        ],
        "methods": [
            {
                "method": outcome.method,
                "settings": outcome.settings,
                "losses": [loss if isfinite(loss) else None for loss in outcome.losses],
                "seconds": round(outcome.seconds, 3),
                "notes": outcome.notes,
            }
            for outcome in outcomes
        ],
    }
