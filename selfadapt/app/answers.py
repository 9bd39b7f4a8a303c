"""What programs are sent of a result: a PNG, JSON or an NPZ file."""

import io
import json
from collections.abc import Mapping
from math import isfinite

import numpy as np

from selfadapt.app.asgi import Refused
from selfadapt.app.limits import MAX_HEADER, MAX_NOTE
from selfadapt.app.requests import Request
from selfadapt.checks import shortened
from selfadapt.images import encode, label_image
from selfadapt.labels import Color
from selfadapt.patterns import alternatives
from selfadapt.predict.outputs import add_array, add_probs, open_npz
from selfadapt.result import Result

FORMATS = {"png": "image/png", "json": "application/json", "npz": "application/x-npz"}
"""Media type of each format; the first is the default."""


def as_png(result: Result, classes: Mapping[str, Color]) -> bytes:
    """Return the label as an image whose values are the class ids, with a palette."""
    return encode(label_image(result.label, [*classes.values()]), "PNG", compress_level=3)


def as_npz(result: Result, classes: Mapping[str, Color], *, probs: bool = False) -> bytes:
    """Return an NPZ file with label, confidence, names of the classes and perhaps probabilities."""
    file = io.BytesIO()
    with open_npz(file) as archive:
        kind = np.uint8 if len(classes) <= 256 else np.int32
        add_array(archive, "label", result.label.cpu().numpy().astype(kind))
        add_array(archive, "confidence", result.confidence.cpu().numpy().astype(np.float16))
        add_array(archive, "classes", np.array([*classes]))
        if probs:
            add_probs(archive, result.stored_probs)
    return file.getvalue()


def as_json(result: Result, classes: Mapping[str, Color], request: Request) -> bytes:
    """Return settings, notes and losses, and the pixels of each class as run lengths."""
    label = result.label.cpu().numpy()
    counts = run_lengths(label, len(classes))
    [(method, settings)] = request.methods.items()
    content = {
        "model": request.model,
        "method": method,
        "settings": settings,
        "height": label.shape[0],
        "width": label.shape[1],
        "classes": [
            {
                "id": index,
                "name": name,
                "color": color,
                "share": round(sum(counts[index][1::2]) / label.size, 6),
                "rle": {"size": label.shape, "counts": counts[index]},
            }
            for index, (name, color) in enumerate(classes.items())
        ],
        "losses": [loss if isfinite(loss) else None for loss in result.losses],
        "quality": result.quality,
        "seconds": round(result.seconds, 3),
        "notes": result.notes,
    }
    return json.dumps(content, separators=(",", ":")).encode()


def run_lengths(label: np.ndarray, num_classes: int) -> list[list[int]]:
    """Return the mask of each class in COCO's uncompressed run-length encoding.

    Counts go down one column after the other: pixels outside of the mask (0 if the first pixel is
    inside), then pixels inside, then outside and so on.

    Args:
        label: Class ids ``(H, W)``.
        num_classes: Number of classes.

    Example:
        >>> run_lengths(np.array([[0, 1], [0, 0]]), 2)
        [[0, 2, 1, 1], [2, 1, 1]]
    """
    pixels = label.ravel(order="F")
    starts = np.flatnonzero(np.r_[True, pixels[1:] != pixels[:-1]])
    ends, ids = np.r_[starts[1:], pixels.size], pixels[starts]
    counts = []
    for index in range(num_classes):
        inside = ids == index
        changes = np.stack([starts[inside], ends[inside]], axis=1).ravel()
        lengths = np.diff(changes, prepend=0, append=pixels.size).tolist()
        counts.append(lengths[:-1] if lengths[-1] == 0 else lengths)
    return counts


def headers_of(result: Result) -> dict[str, str]:
    """Return time, quality and notes as headers: ASCII, and of a length that proxies pass on."""
    notes = [note[:MAX_NOTE] for note in result.notes]
    while len(text := json.dumps(notes)) > MAX_HEADER:
        notes.pop()
    headers = {"selfadapt-seconds": f"{result.seconds:.3f}", "selfadapt-notes": text}
    if result.quality is not None:
        headers["selfadapt-quality"] = f"{result.quality:.3f}"
    return headers


def choose_format(name: str | None, accept: str) -> str:
    """Return the format that a request asks for.

    Args:
        name: Name of a format, which takes precedence.
        accept: The ``Accept`` header; may be empty.

    Raises:
        ValueError: There is no format of this name.
        Refused: None of the accepted media types is available.

    Example:
        >>> choose_format(None, "application/json;q=0.5, image/*")
        'png'
    """
    if name is not None:
        if name not in FORMATS:
            shown = name[:40]
            raise ValueError(f"unknown format {shown!r}{alternatives(shown, FORMATS)}")
        return name
    best, best_weight = "", 0.0
    for part in (accept or "*/*").split(","):
        media_range, *parameters = part.lower().replace(" ", "").split(";")
        weight = next((p[2:] for p in parameters if p.startswith("q=")), "1")
        for form, media_type in FORMATS.items():
            fits = media_range in ("*/*", f"{media_type.partition('/')[0]}/*", media_type)
            if fits and weight.replace(".", "", 1).isdecimal() and float(weight) > best_weight:
                best, best_weight = form, float(weight)
    if not best:
        types = ", ".join(FORMATS.values())
        raise Refused(
            406, f"Accept must have one of {types}, or use format=, got {shortened(accept)}"
        )
    return best
