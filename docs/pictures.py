"""Draw the pictures of the pages from the built-in streets and the network of the package.

python docs/pictures.py [front] [demo] [steps] [mixing]
"""

import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from selfadapt import SelfAdapt, create_method, open_model, paper_views
from selfadapt.demo.pictures import confidence
from selfadapt.images import colored, load_image, to_pil
from selfadapt.labels import STREETS_9, class_colors
from selfadapt.metrics import Score
from selfadapt.result import Result
from selfadapt.streets import TARGETS, render

HERE = Path(__file__).parent
COLORS = class_colors(STREETS_9)
SEEDS = {"haze": 0, "night": 1, "rain": 2, "south": 3, "old camera": 4}
SCENE = ("old camera", 4)
FRONT = ("rain", 9)
"""The scene of the README, for how it looks; its gain is below the mean of its look."""
WIDTH, GAP, LINE = 320, 8, 26
INK, PAPER = (60, 66, 74), "white"


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return the font that comes with PIL."""
    return ImageFont.load_default(size)


def tile(picture: Image.Image, text: str = "") -> Image.Image:
    """Resize a picture to the common width, with a line of text above."""
    height = round(picture.height * WIDTH / picture.width)
    head = LINE if text else 0
    made = Image.new("RGB", (WIDTH, height + head), PAPER)
    how = Image.Resampling.BILINEAR
    made.paste(picture.resize((WIDTH, height), how), (0, head))
    ImageDraw.Draw(made).text((2, 3), text, INK, font(16))
    return made


def beside(pictures: list[Image.Image]) -> Image.Image:
    """Put pictures next to each other, on one base line."""
    width = sum(picture.width + GAP for picture in pictures) - GAP
    made = Image.new("RGB", (width, max(picture.height for picture in pictures)), PAPER)
    left = 0
    for picture in pictures:
        made.paste(picture, (left, made.height - picture.height))
        left += picture.width + GAP
    return made


def below(pictures: list[Image.Image]) -> Image.Image:
    """Put pictures below each other."""
    height = sum(picture.height + GAP for picture in pictures) - GAP
    made = Image.new("RGB", (max(picture.width for picture in pictures), height), PAPER)
    top = 0
    for picture in pictures:
        made.paste(picture, (0, top))
        top += picture.height + GAP
    return made


def painted(label: torch.Tensor) -> Image.Image:
    """Paint a label, white where pixels are ignored."""
    return colored(label.where(label < len(COLORS), len(COLORS)), [*COLORS, (255, 255, 255)])


def segmented(look: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, Result]:
    """Return a rendered image, its label, and the result of self-adaptation."""
    image, label = render(look, seed)
    result = SelfAdapt(open_model("streets"), alpha=0.3, lr=0.05)(image)
    return load_image(image), torch.from_numpy(label).long(), result


def before_and_after() -> Image.Image:
    """Show five looks: image, source prediction, adapted prediction, confidence, ground truth."""
    titles = ["image", "network as trained", "after self-adaptation", "confidence", "ground truth"]
    rows = []
    for look in TARGETS:
        image, label, result = segmented(look, SEEDS[look])
        source = result.source_probs.argmax(dim=0)
        pictures = [to_pil(image), painted(source), painted(result.label),
                    confidence(result.confidence), painted(label)]  # fmt: skip
        rows.append(beside([tile(p, t) for p, t in zip(pictures, titles, strict=True)]))
        titles = [""] * len(titles)
    return below(rows)


def front() -> Image.Image:
    """Show one scene in a row: image, as trained, adapted with its gain, and ground truth."""
    image, label, result = segmented(*FRONT)
    ious = []
    for probs in (result.source_probs, result.probs):
        score = Score(len(STREETS_9))
        score.add(label, probs)
        ious.append(100 * score.mean_iou)
    return beside([
        tile(to_pil(image), "image"),
        tile(painted(result.source_probs.argmax(dim=0)), f"network as trained: {ious[0]:.0f} mIoU"),
        tile(painted(result.label), f"self-adapted: {ious[1]:.0f} mIoU"),
        tile(painted(label), "ground truth"),
    ])  # fmt: skip


def steps() -> Image.Image:
    """Show the steps of the method: views, their mean, pseudo-label, result."""
    image, label, result = segmented(*SCENE)
    source = result.source_probs.argmax(dim=0)
    views = [(view, to_pil(view.make(image))) for view in paper_views()]
    first = [view_tile(picture, str(view)) for view, picture in views]
    top = beside([tile(to_pil(image), "1  the image, and its views at 0.25, 0.5, 0.75"), *first])
    second = beside([
        tile(painted(source), "network as trained"),
        tile(painted(result.fused_probs.argmax(dim=0)), "2  mean of the views"),
        tile(painted(result.pseudo_label), "3  pseudo-label, white: ignored"),
    ])  # fmt: skip
    third = beside([
        tile(loss_curve(result.losses), "4  loss, five gradient steps"),
        tile(painted(result.label), "5  prediction, adapted"),
        tile(painted(label), "ground truth"),
    ])  # fmt: skip
    return below([top.resize((second.width, round(top.height * second.width / top.width))),
                  second, third])  # fmt: skip


def view_tile(picture: Image.Image, text: str) -> Image.Image:
    """Show a view at its own size beside the image's."""
    scale = WIDTH / 768
    small = picture.resize((round(picture.width * scale), round(picture.height * scale)))
    made = Image.new("RGB", (small.width, small.height + 18), PAPER)
    made.paste(small, (0, 0))
    ImageDraw.Draw(made).text((1, small.height + 2), text.split()[0], INK, font(12))
    return made


def loss_curve(losses: tuple[float, ...]) -> Image.Image:
    """Draw the loss before each step."""
    width, height, edge = 640, 320, 40
    made = Image.new("RGB", (width, height), (247, 248, 250))
    pen = ImageDraw.Draw(made)
    across = [edge + i * (width - 2 * edge) / (len(losses) - 1) for i in range(len(losses))]
    down = [height - edge - loss / max(losses) * (height - 2 * edge) for loss in losses]
    points = list(zip(across, down, strict=True))
    pen.line([(edge, edge / 2), (edge, height - edge), (width - edge / 2, height - edge)], INK, 2)
    pen.line(points, (11, 98, 196), 5, joint="curve")
    for x, y in points:
        pen.ellipse([x - 7, y - 7, x + 7, y + 7], (11, 98, 196))
    pen.text((edge + 14, down[0] - 12), f"{losses[0]:.2f}", INK, font(24))
    pen.text((across[-1] - 50, down[-1] - 40), f"{losses[-1]:.2f}", INK, font(24))
    return made


def mixing() -> Image.Image:
    """Show one image with more and more of its own statistics in every BatchNorm layer."""
    image, label = render("rain", 2)
    network = open_model("streets")
    tiles = [tile(Image.fromarray(image), "image, in rain")]
    for alpha in (0.0, 0.3, 0.6, 1.0):
        mixed = create_method("san", network, alpha=alpha)(image).label
        right = (mixed.numpy() == label).mean()
        tiles.append(tile(painted(mixed), f"alpha {alpha:g}: {right:.0%} right"))
    tiles.append(tile(painted(torch.from_numpy(label).long()), "ground truth"))
    return below([beside(tiles[:3]), beside(tiles[3:])])


if __name__ == "__main__":
    drawings = {"front": front, "demo": before_and_after, "steps": steps, "mixing": mixing}
    for name in sys.argv[1:] or drawings:
        drawings[name]().quantize(256, dither=Image.Dither.NONE).save(
            HERE / f"{name}.png", optimize=True
        )
