"""Pictures of an evaluation: the best, the worst and the first images before and after."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import torch
from PIL import Image as PILImage

from selfadapt.data import Sample
from selfadapt.files import atomic_write, file_name, make_folder
from selfadapt.images import colored
from selfadapt.labels import class_colors
from selfadapt.protocol.folder import drawn_pictures
from selfadapt.protocol.results import Results
from selfadapt.protocol.scorer import ScoreJob
from selfadapt.pseudo import IGNORE

if TYPE_CHECKING:
    from selfadapt.protocol.evaluate import Evaluation

WIDTH = 480
"""Width of each of the pictures side by side."""
GAP = 6


class ExamplePicture(NamedTuple):
    """A file in the folder ``pictures``, and the image it shows."""

    file: str
    domain: str
    image: str
    kind: str
    """first, best or worst."""
    method: str
    change: float


def draw_pictures(folder: Path, results: Results, run: Evaluation) -> None:
    """Draw image, ground truth, and the predictions of source and ``shown_method``.

    The pictures are listed in ``pictures/index.json``.
    """
    label = shown_method(results)
    if not run.config.pictures or label is None:
        return
    reference = results.reference(label)
    assert reference is not None
    make_folder(folder / "pictures")
    earlier = drawn_pictures(folder)
    drawn = []
    for domain in run.domains:
        numbers = {name: number for number, name in enumerate(domain.names)}
        changes = results.scores(label, domain.label).changes(
            results.scores(reference, domain.label)
        )
        for kind, image in _chosen(changes, run.config.pictures):
            stem = file_name(f"{domain.label}-{kind}-{image}")
            content = f"{domain.label}/{image}/{results.trial(label).key}"
            name = f"{stem}-{crc32(content.encode()):08x}.png"
            drawn.append(ExamplePicture(name, domain.label, image, kind, label, changes[image]))
            path = folder / "pictures" / name
            if path in earlier:
                continue
            trials = [results.trial(method) for method in (reference, label)]
            job = ScoreJob(run.domains.index(domain), numbers[image], trials)
            maps = (run.workers or run).labels(job)
            sample = domain.data[job.number]
            with atomic_write(path) as temporary:
                _panel(sample, maps, results).save(temporary, format="PNG", optimize=True)
    with atomic_write(folder / "pictures" / "index.json") as temporary:
        temporary.write_text(json.dumps([picture._asdict() for picture in drawn], indent=1) + "\n")
    for path in earlier - {folder / "pictures" / picture.file for picture in drawn}:
        path.unlink()  # of settings chosen earlier


def shown_method(results: Results) -> str | None:
    """Return the method to show: self-adaptation, or else the last one that has a reference."""
    labels = [label for label in results.methods if results.reference(label) not in (None, label)]
    adapted = [label for label in labels if results.method(label).method == "self-adapt"]
    candidates = adapted or labels
    return candidates[-1] if candidates else None


def _chosen(changes: dict[str, float], number: int) -> Iterator[tuple[str, str]]:
    """Yield kind and name of the images to draw, each image once."""
    ordered = sorted(changes, key=lambda name: (changes[name], name))
    seen: set[str] = set()
    for kind, names in (("best", ordered[::-1]), ("worst", ordered), ("first", list(changes))):
        for name in [name for name in names if name not in seen][:number]:
            seen.add(name)
            yield kind, name


def _panel(sample: Sample, maps: list[torch.Tensor], results: Results) -> PILImage.Image:
    """Return image, ground truth and predictions side by side."""
    colors = [*class_colors(results.config.space.names), (0, 0, 0)]
    ignore = len(colors) - 1
    truth = torch.from_numpy(sample.label).long()
    truth[truth == IGNORE] = ignore
    pictures = [sample.image, *(colored(label, colors) for label in (truth, *maps))]
    height = max(1, round(sample.image.height * WIDTH / sample.image.width))
    panel = PILImage.new("RGB", (4 * (WIDTH + GAP) - GAP, height), "white")
    for index, picture in enumerate(pictures):
        resample = PILImage.Resampling.BILINEAR if index == 0 else PILImage.Resampling.NEAREST
        panel.paste(picture.resize((WIDTH, height), resample), (index * (WIDTH + GAP), 0))
    return panel
