"""Images in, masks out: segment files and write what a person and a program want to see."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image as PILImage

from selfadapt.files import make_folder, written_whole
from selfadapt.images import Image, colored, load_image, overlay, to_pil
from selfadapt.labels import class_colors, class_names
from selfadapt.result import Result

OUTPUTS = ("label", "color", "overlay", "confidence")
"""What is written for NAME.jpg: NAME_label.png and so on."""


SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""What counts as an image in a folder; a file that is named may have any suffix."""


def find_images(inputs: Iterable[str | Path]) -> list[Path]:
    """Return the image files meant by files and folders, those of a folder sorted by name."""
    found: list[Path] = []
    for path in map(Path, inputs):
        if path.is_dir():
            files = (p for p in path.iterdir() if not p.name.startswith("."))
            inside = sorted(p for p in files if p.suffix.lower() in SUFFIXES)
            if not inside:
                raise FileNotFoundError(f"there are no images in the folder {path}")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise FileNotFoundError(f"there is no image file {path}")
    return list(dict.fromkeys(found))


def plan_outputs(images: Sequence[Path], folder: Path, *, overwrite: bool) -> list[Path]:
    """Return for each image the path its outputs start with, refusing to lose any file."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"the output must be a folder, but {folder} is a file")
    stems = Counter(image.stem for image in images)
    owners: dict[Path, Path] = {}
    for image in images:
        # a.jpg beside a.png: a_jpg and a_png
        name = image.stem if stems[image.stem] == 1 else image.name.replace(".", "_")
        if folder / name in owners:
            raise ValueError(
                f"{owners[folder / name]} and {image} would be written to the same files; "
                "segment them one after the other into two folders"
            )
        owners[folder / name] = image
    bases = list(owners)
    outputs = {path.resolve() for base in bases for path in output_paths(base).values()}
    for image in images:
        if image.resolve() in outputs:
            raise ValueError(f"the input {image} would be replaced by an output")
    present = [path for base in bases for path in output_paths(base).values() if path.exists()]
    if present and not overwrite:
        more = f" and {len(present) - 1} more" if len(present) > 1 else ""
        raise FileExistsError(
            f"{present[0]}{more} would be replaced; choose another folder or say --overwrite"
        )
    return bases


def output_paths(base: Path) -> dict[str, Path]:
    """Return the files written for one image, by what they show."""
    return {kind: base.with_name(f"{base.name}_{kind}.png") for kind in OUTPUTS}


def predict(
    method: Callable[[Image], Result],
    images: Sequence[Path],
    bases: Sequence[Path],
    classes: Sequence[str] | None = None,
) -> Iterator[tuple[Path, Result | Exception]]:
    """Segment each image and write its files; yield the result, or why it could not be read."""
    for image, base in zip(images, bases, strict=True):
        try:
            result = method(image)
        except (ValueError, FileNotFoundError) as error:
            yield image, error
            continue
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, LookupError, AssertionError) as error:  # the network's
            yield image, ValueError(f"the network failed: {type(error).__name__}: {error}")
            continue
        write_result(result, image, base, classes)
        yield image, result


def write_result(
    result: Result, image: Image, base: Path, classes: Sequence[str] | None = None
) -> None:
    """Write the label as ids and in colours, laid over the image, and its confidence."""
    names = list(classes or class_names(len(result.probs)))
    if len(names) == 1:
        names = ["background", *names]  # one output channel is two classes
    if len(names) != len(result.probs):
        raise ValueError(
            f"the network predicts {len(result.probs)} classes, but {len(names)} are named"
        )
    label = result.label
    painted = colored(label, class_colors(names))
    ids = label.cpu().numpy().astype(np.uint8 if len(names) <= 256 else np.uint16)
    pictures = {
        "label": PILImage.fromarray(ids),
        "color": painted,
        "overlay": overlay(load_image(image), painted),
        "confidence": to_pil(result.confidence).convert("L"),
    }
    make_folder(base.parent)
    for kind, path in output_paths(base).items():
        with written_whole(path) as aside:
            pictures[kind].save(aside, format="PNG")
