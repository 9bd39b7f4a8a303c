"""A first look without any data: draw streets, train a small network on one look, adapt to others.

The world is drawn: sky, houses, trees, a road with cars, exact labels. The network is trained by
daylight, settings were chosen on the ``dusk`` look, and the results are reported on ``haze`` and
``night``, which nothing was tuned on.
"""

import base64
import html
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image as PILImage
from PIL import ImageDraw
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torchvision.transforms import v2 as T

from selfadapt.adapt import SelfAdapt
from selfadapt.files import written_whole
from selfadapt.images import colored, to_pil
from selfadapt.labels import class_colors
from selfadapt.metrics import calibration_bins, confusion_matrix, ece, iou
from selfadapt.models.detect import IMAGENET_MEAN, IMAGENET_STD

CLASSES = ("road", "sidewalk", "building", "vegetation", "sky", "car")
HEIGHT, WIDTH = 128, 256
NUM_SCENES, TRAIN_STEPS, BATCH = 300, 300, 8
NUM_TARGETS, NUM_PICTURES = 12, 3
TARGETS = ("haze", "night")
SETTINGS: dict[str, Any] = {"alpha": 0.5, "lr": 0.1, "scales": (1.0, 1.5, 2.0), "adapt": ("*",)}


def draw_street(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw one street by daylight: colours ``(H, W, 3)`` in [0, 1] and classes ``(H, W)``."""
    picture = PILImage.new("RGB", (WIDTH, HEIGHT))
    classes = PILImage.new("L", (WIDTH, HEIGHT))
    pens = ImageDraw.Draw(picture), ImageDraw.Draw(classes)
    horizon = int(rng.uniform(0.35, 0.5) * HEIGHT)
    vanish = int(rng.uniform(0.35, 0.65) * WIDTH)

    def paint(shape: str, where: object, name: str, color: tuple[float, ...]) -> None:
        shade = tuple(int(np.clip(c + rng.normal(0, 8), 0, 255)) for c in color)
        getattr(pens[0], shape)(where, fill=shade)
        getattr(pens[1], shape)(where, fill=CLASSES.index(name))

    paint("rectangle", (0, 0, WIDTH, horizon), "sky", (150, 190, 235))
    paint("rectangle", (0, horizon, WIDTH, HEIGHT), "sidewalk", (170, 160, 150))
    left, right = rng.uniform(-0.3, 0.2) * WIDTH, rng.uniform(0.8, 1.3) * WIDTH
    road = [(vanish - 4, horizon), (vanish + 4, horizon), (right, HEIGHT), (left, HEIGHT)]
    paint("polygon", road, "road", (95, 95, 100))
    x = -10.0
    while x < WIDTH:
        width = rng.uniform(18, 50)
        away = min(1.0, abs(x + width / 2 - vanish) / WIDTH + 0.15)
        top = horizon - away * rng.uniform(30, 75)
        if rng.random() < 0.65:
            tone = rng.uniform(90, 190)
            box = (x, top, x + width, horizon + away * 14)
            paint("rectangle", box, "building", (tone * 1.1, tone * 0.95, tone * 0.85))
            for window in np.arange(x + 4, x + width - 5, 9):
                for level in np.arange(top + 4, horizon - 5, 11):
                    pane = (float(window), float(level), float(window) + 4, float(level) + 5)
                    paint("rectangle", pane, "building", (70, 80, 95))
        else:
            crown = (x, min(top + 12, horizon - 8), x + width, horizon + 4)
            paint("ellipse", crown, "vegetation", (70, 125, 55))
            stem = (x + width / 2 - 2, horizon, x + width / 2 + 2, horizon + away * 14)
            paint("rectangle", stem, "vegetation", (90, 70, 45))
        x += width * rng.uniform(0.8, 1.3)
    for depth in np.sort(rng.uniform(0.2, 0.95, rng.integers(1, 5))):
        bottom = horizon + depth * (HEIGHT - horizon)
        size = 6 + depth * 22
        middle = vanish + depth * (rng.uniform(left, right) - vanish)
        body = tuple(rng.uniform(40, 230, 3))
        box = (middle - size, bottom - size * 0.7, middle + size, bottom)
        paint("rectangle", box, "car", body)
        roof = (middle - size * 0.6, bottom - size * 1.2, middle + size * 0.6, bottom - size * 0.7)
        paint("rectangle", roof, "car", tuple(0.5 * c + 30 for c in body))
    grain = rng.normal(0, 0.03, (HEIGHT, WIDTH, 1))
    return np.clip(np.asarray(picture) / 255 + grain, 0, 1), np.asarray(classes)


JITTER = T.Compose([T.ColorJitter(0.3, 0.3, 0.3, 0.1), T.RandomGrayscale(0.3)])
NORMALIZE = T.Normalize(IMAGENET_MEAN, IMAGENET_STD)

Look = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def _noise(image: np.ndarray, rng: np.random.Generator, strength: float) -> np.ndarray:
    return image + rng.normal(0, strength, image.shape)


LOOKS: dict[str, Look] = {
    "day": lambda image, rng: image * rng.uniform(0.85, 1.15),
    "dusk": lambda image, rng: _noise(image**1.3 * (0.75, 0.55, 0.5) + 0.04, rng, 0.02),
    "haze": lambda image, rng: _noise(0.45 * image + 0.55 * np.array((0.8, 0.8, 0.78)), rng, 0.01),
    "night": lambda image, rng: _noise(image**1.5 * (0.3, 0.34, 0.45) + 0.03, rng, 0.03),
}


def render(look: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return an image ``(3, H, W)`` in [0, 1] in the given look, and its label ``(H, W)``."""
    rng = np.random.default_rng(seed)
    image, label = draw_street(rng)
    image = np.clip(LOOKS[look](image, rng), 0, 1)
    levels = torch.from_numpy((image * 255).round()).permute(2, 0, 1) / 255
    return levels.float(), torch.from_numpy(label.copy()).long()


def small_network() -> nn.Module:
    """Return a network of seven convolutions with BatchNorm, for the drawn streets."""

    def block(inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> nn.Sequential:
        convolution = nn.Conv2d(
            inputs, outputs, 3, stride, padding=dilation, dilation=dilation, bias=False
        )
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

    return nn.Sequential(
        block(3, 24, stride=2),
        block(24, 48, stride=2),
        block(48, 48),
        block(48, 64, dilation=2),
        block(64, 64, dilation=4),
        block(64, 64, dilation=8),
        block(64, 64),
        nn.Conv2d(64, len(CLASSES), 1),
    )


def train() -> nn.Module:
    """Train the small network by daylight, with the paper's kind of augmentation."""
    scenes = [render("day", seed) for seed in range(NUM_SCENES)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = small_network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, TRAIN_STEPS, power=0.9)
        for _ in track(range(TRAIN_STEPS), "training by daylight", console=Console(stderr=True)):
            chosen = torch.randint(NUM_SCENES, (BATCH,)).tolist()
            images, labels = zip(*(_augmented(*scenes[index]) for index in chosen), strict=True)
            label = torch.stack(labels)
            logits = F.interpolate(model(torch.stack(images)), label.shape[-2:], mode="bilinear")
            optimizer.zero_grad()
            F.cross_entropy(logits, label).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def _augmented(image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Crop, flip and recolour a scene at random, and normalise it."""
    scale = float(torch.empty(1).uniform_(0.4, 1))
    height, width = int(HEIGHT * scale), int(WIDTH * scale)
    top, left = (
        int(torch.randint(HEIGHT - height + 1, ())),
        int(torch.randint(WIDTH - width + 1, ())),
    )
    area = slice(top, top + height), slice(left, left + width)
    image = F.interpolate(image[None, :, *area], (HEIGHT, WIDTH), mode="bilinear")[0]
    label = F.interpolate(label[None, None, *area].float(), (HEIGHT, WIDTH))[0, 0].long()
    image = JITTER(image)
    if torch.rand(()) < 0.5:
        image, label = image.flip(-1), label.flip(-1)
    return NORMALIZE(image), label


class Score:
    """What one way of segmenting reached over the images so far."""

    def __init__(self) -> None:
        self.confusion = torch.zeros(len(CLASSES), len(CLASSES), dtype=torch.int64)
        self.bins = torch.zeros(3, 10, dtype=torch.float64)

    def add(self, label: Tensor, probs: Tensor) -> None:
        """Count one image."""
        self.confusion += confusion_matrix(label, probs.argmax(dim=0), len(CLASSES))
        self.bins += calibration_bins(label, probs)

    def row(self) -> tuple[str, str]:
        """Return mean IoU and expected calibration error in percent."""
        return f"{float(iou(self.confusion).nanmean()):.1%}", f"{ece(self.bins):.1%}"


def demo(folder: Path, *, overwrite: bool = False) -> Path:
    """Train, adapt, print a table and write a report; return the report's path."""
    report, picture = folder / "report.html", folder / "picture.png"
    for path in (report, picture):
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} would be replaced; choose another folder or --overwrite")
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    model = train()
    san, adapt = SelfAdapt(model, steps=0, **SETTINGS), SelfAdapt(model, **SETTINGS)
    sections, firsts = [], []
    for look in TARGETS:
        scores = {name: Score() for name in ("source", "SaN", "TTA", "self-adaptation")}
        panels = []
        for seed in range(NUM_TARGETS):
            image, label = render(look, seed)
            plain, adapted = san(image), adapt(image)
            probs = plain.source_probs, plain.probs, plain.fused_probs, adapted.probs
            for score, prediction in zip(scores.values(), probs, strict=True):
                assert prediction is not None
                score.add(label, prediction)
            if seed < NUM_PICTURES:
                assert adapted.source_probs is not None
                before = adapted.source_probs.argmax(dim=0)
                panels.append(_panel(image, before, adapted.label, label))
        rows = [(name, *score.row()) for name, score in scores.items()]
        table = Table("method", "mIoU", "ECE", title=f"{NUM_TARGETS} images, {look}")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        sections.append(_section(look, rows, panels))
        firsts.append(panels[0])
    with written_whole(report) as aside:
        aside.write_text(PAGE.replace("SECTIONS", "".join(sections)))
    with written_whole(picture) as aside:
        _stacked(firsts).save(aside, format="PNG", optimize=True)
    console.print(f"the report is in {report}", soft_wrap=True)
    return report


def _panel(image: Tensor, before: Tensor, after: Tensor, label: Tensor) -> PILImage.Image:
    colors = class_colors(CLASSES)
    pictures = [to_pil(image), *(colored(mask, colors) for mask in (before, after, label))]
    panel = PILImage.new("RGB", (4 * WIDTH + 18, HEIGHT), "white")
    for index, picture in enumerate(pictures):
        panel.paste(picture, (index * (WIDTH + 6), 0))
    return panel


def _stacked(panels: list[PILImage.Image]) -> PILImage.Image:
    picture = PILImage.new("RGB", (panels[0].width, len(panels) * (HEIGHT + 6) - 6), "white")
    for index, panel in enumerate(panels):
        picture.paste(panel, (0, index * (HEIGHT + 6)))
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
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem }
img { width: 100%; image-rendering: pixelated; margin-bottom: 6px }
table { border-collapse: collapse } td, th { padding: .2rem 1rem .2rem 0; text-align: left }
</style>
<h1>A network trained by daylight meets haze and night</h1>
<p>A small network was trained on drawn streets by daylight. Settings were chosen on a third look,
dusk; nothing was tuned on the two below. Each image is segmented on its own, and the network starts
from the same weights every time.</p>
SECTIONS
</html>
"""
