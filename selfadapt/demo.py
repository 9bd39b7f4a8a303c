"""A first look without any data: a small network trained by day meets other looks of its streets.

Network and streets come with the package. Settings were chosen on the ``dusk`` look, not on those
that are shown.
"""

import base64
import html
import io
from pathlib import Path

import torch
from PIL import Image as PILImage
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from selfadapt.adapt import SelfAdapt
from selfadapt.data import Dataset, open_dataset
from selfadapt.files import make_folder, written_whole
from selfadapt.images import colored, load_image, to_pil
from selfadapt.labels import STREETS_9, class_colors
from selfadapt.metrics import Score
from selfadapt.models import open_model
from selfadapt.result import Result
from selfadapt.streets import TARGETS

NUM_IMAGES, NUM_PICTURES = 2, 2
WAYS = ("source", "SaN", "TTA", "self-adaptation")
ALPHA, LR, STEPS = 0.3, 0.05, 10
GAP = 6


def demo(folder: Path, *, overwrite: bool = False) -> Path:
    """Adapt, print tables and write a report; return the report's path."""
    report, picture = folder / "report.html", folder / "picture.png"
    for path in (report, picture):
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} would be replaced; choose another folder or --overwrite")
    make_folder(folder)
    console = Console()
    model = open_model("streets")
    methods = [SelfAdapt(model, alpha=ALPHA, lr=LR, steps=steps) for steps in (0, STEPS)]
    sections, firsts = [], []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("adapting", total=len(TARGETS) * NUM_IMAGES)
        for look in TARGETS:
            domain = open_dataset("streets", split=look, space="streets-9", limit=NUM_IMAGES)
            scores, panels = {way: Score(len(STREETS_9)) for way in WAYS}, []
            for sample in (domain[number] for number in range(len(domain))):
                image, label = load_image(sample.image), torch.from_numpy(sample.label).long()
                plain, adapted = (method(image) for method in methods)
                _add(scores, label, plain, adapted)
                panels.append(_panel(image, plain, adapted, label))
                progress.advance(task)
            rows = [(way, f"{s.mean_iou:.1%}", f"{s.ece:.1%}") for way, s in scores.items()]
            console.print(_table(domain, rows))
            sections.append(_section(look, rows, panels[:NUM_PICTURES]))
            firsts.append(panels[0])
    with written_whole(report) as aside:
        aside.write_text(PAGE.replace("SECTIONS", "".join(sections)))
    with written_whole(picture) as aside:
        _stacked(firsts).save(aside, format="PNG", optimize=True)
    console.print(f"the report is in {report}", soft_wrap=True)
    return report


def _add(scores: dict[str, Score], label: Tensor, plain: Result, adapted: Result) -> None:
    """Count the ways of segmenting an image; a method without steps has three of them."""
    ways = plain.source_probs, plain.probs, plain.fused_probs, adapted.probs
    for score, probs in zip(scores.values(), ways, strict=True):
        assert probs is not None
        score.add(label, probs)


def _table(domain: Dataset, rows: list[tuple[str, str, str]]) -> Table:
    table = Table("method", "mIoU", "ECE", title=f"{domain.name}, {len(domain)} images")
    for row in rows:
        table.add_row(*row)
    return table


def _panel(image: Tensor, plain: Result, adapted: Result, label: Tensor) -> PILImage.Image:
    """Put image, source prediction, adapted prediction and ground truth side by side."""
    assert plain.source_probs is not None
    colors = class_colors(STREETS_9)
    masks = plain.source_probs.argmax(dim=0), adapted.label, label
    pictures = [to_pil(image), *(colored(mask, colors) for mask in masks)]
    width, height = pictures[0].size
    panel = PILImage.new("RGB", (4 * (width + GAP) - GAP, height), "white")
    for index, picture in enumerate(pictures):
        panel.paste(picture, (index * (width + GAP), 0))
    return panel


def _stacked(panels: list[PILImage.Image]) -> PILImage.Image:
    """Put panels below each other, at a third of their size."""
    small = [panel.reduce(3) for panel in panels]
    step = small[0].height + GAP
    picture = PILImage.new("RGB", (small[0].width, len(small) * step - GAP), "white")
    for index, panel in enumerate(small):
        picture.paste(panel, (0, index * step))
    return picture


def _section(look: str, rows: list[tuple[str, str, str]], panels: list[PILImage.Image]) -> str:
    cells = "".join(f"<tr><td>{'</td><td>'.join(map(html.escape, row))}</td></tr>" for row in rows)
    pictures = ""
    for panel in panels:
        file = io.BytesIO()
        panel.save(file, "PNG")
        data = base64.b64encode(file.getvalue()).decode()
        alt = f"{look}: image, source prediction, adapted prediction, ground truth"
        pictures += f'<img alt="{alt}" src="data:image/png;base64,{data}">'
    return (
        f"<h2>{look}</h2><table><tr><th>method</th><th>mIoU</th><th>ECE</th></tr>{cells}</table>"
        f"<p>image | source prediction | after self-adaptation | ground truth</p>{pictures}"
    )


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>selfadapt demo</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1400px; margin: 2rem auto; padding: 0 1rem }
img { width: 100%; margin-bottom: 6px }
table { border-collapse: collapse } td, th { padding: .2rem 1rem .2rem 0; text-align: left }
</style>
<h1>A network trained by day meets other looks of its streets</h1>
<p>A small network was trained on rendered streets by day. Settings were chosen on another look,
dusk, not on those below. Each image is segmented on its own, and the network starts
from the same weights every time.</p>
SECTIONS
</html>
"""
