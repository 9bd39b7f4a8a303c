"""What the README and the pages show, found and run: blocks of Python, commands for a shell.

Blocks marked ``python`` and ``sh`` are run, in order, in one folder for each page. What needs data,
a download or much time is marked ``console``, and has a prompt.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import rasterio
import torch

import selfadapt
from conftest import random_image
from selfadapt.cli import main, make_parser
from selfadapt.cli.arguments import expand_recipe
from selfadapt.images import to_pil

ROOT = Path(__file__).parents[1]
SHORT = {
    "train": [
        "--epochs=1", "--source.limit=8", "--validation.limit=1", "--machine.measure=false",
        "--machine.workers=0", "--augment.crop=[32,32]", "--alphas=[0.1]", "--statistics_batches=1",
    ],
    "evaluate": ["--methods=[{method: source}, {method: san}]", "--pictures=0"],
    "demo": ["--looks", "haze", "--scenes=1", "--steps=0"],
}  # fmt: skip
"""Flags that make commands end soon."""
ADDRESS = "http://127.0.0.1:7860"
"""Where ``selfadapt serve`` is reached."""
ENDLESS = ("serve",)
"""Verbs that wait for someone: their commands are only parsed."""


def blocks(page: Path, language: str) -> list[str]:
    """Return the blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each selfadapt command."""
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("selfadapt"):
                yield shlex.split(line, comments=True)[1:]


def run_blocks(page: Path, address: str = ADDRESS) -> dict[str, object]:
    """Run the Python of a page in the working folder; return the names it defines.

    Args:
        page: The page.
        address: Of a server that answers in the place of ``ADDRESS``.
    """
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        block = block.replace(ADDRESS, address)
        exec(block.replace('weights="DEFAULT"', "weights=None, weights_backbone=None"), names)
    return names


def run_commands(page: Path) -> None:
    """Run the commands of a page in the working folder."""
    for words in commands(page):
        if words[0] in ENDLESS:
            make_parser().parse_args(expand_recipe(words))
            continue
        with pytest.raises(SystemExit) as caught:
            main(words if "--image" in words else words + SHORT.get(words[0], []))
        assert caught.value.code == 0, words


def prepare() -> None:
    """Put into the working folder what the pages speak of."""
    to_pil(random_image(48, 64)).save("street.jpg")
    Path("photos").mkdir()
    to_pil(random_image(24, 32)).save("photos/a.png")
    for kind in ("images", "labels"):
        Path("mine", kind).mkdir(parents=True)
    to_pil(random_image(24, 32)).save("mine/images/a.png")
    to_pil(torch.zeros(24, 32)).convert("L").save("mine/labels/a.png")
    selfadapt.save_model(selfadapt.open_model("streets"), "net.safetensors")
    levels = (random_image(40, 56, channels=4) * 4000).numpy().astype("uint16")
    transform = rasterio.transform.from_origin(5e5, 5.2e6, 0.5, 0.5)
    with rasterio.open(
        "scene.tif", "w", driver="GTiff", width=56, height=40, count=4, dtype="uint16",
        crs="EPSG:32632", transform=transform,
    ) as file:  # fmt: skip
        file.write(levels)
