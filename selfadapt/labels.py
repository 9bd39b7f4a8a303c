"""Class spaces: the classes a network knows, by name, with the colours they are painted in."""

import colorsys
from collections.abc import Sequence
from numbers import Integral

CITYSCAPES_COLORS = {
    "road": (128, 64, 128),
    "sidewalk": (244, 35, 232),
    "building": (70, 70, 70),
    "wall": (102, 102, 156),
    "fence": (190, 153, 153),
    "pole": (153, 153, 153),
    "traffic light": (250, 170, 30),
    "traffic sign": (220, 220, 0),
    "vegetation": (107, 142, 35),
    "terrain": (152, 251, 152),
    "sky": (70, 130, 180),
    "person": (220, 20, 60),
    "rider": (255, 0, 0),
    "car": (0, 0, 142),
    "truck": (0, 0, 70),
    "bus": (0, 60, 100),
    "train": (0, 80, 100),
    "motorcycle": (0, 0, 230),
    "bicycle": (119, 11, 32),
}
"""The 19 evaluated classes in train id order. Origin: cityscapesScripts, helpers/labels.py."""

CITYSCAPES_19 = tuple(CITYSCAPES_COLORS)
SYNTHIA_16 = tuple(name for name in CITYSCAPES_19 if name not in ("terrain", "truck", "train"))

CLASS_SPACES = {"cityscapes-19": CITYSCAPES_19, "synthia-16": SYNTHIA_16}


def class_names(classes: int | str | Sequence[str]) -> tuple[str, ...]:
    """Return the class names meant by a number, the name of a class space, or the names themselves.

    Example:
        >>> class_names(2)
        ('class 0', 'class 1')
        >>> class_names("cityscapes-19")[:2]
        ('road', 'sidewalk')
    """
    if isinstance(classes, str):
        if classes not in CLASS_SPACES:
            raise ValueError(
                f"unknown class space {classes!r}; known: {', '.join(CLASS_SPACES)}; "
                "or give a number of classes, or their names"
            )
        return CLASS_SPACES[classes]
    if isinstance(classes, Sequence):
        if not classes or not all(isinstance(name, str) for name in classes):
            raise ValueError(f"class names must be strings, at least one, got {classes!r}")
        return tuple(classes)
    if isinstance(classes, bool) or not isinstance(classes, Integral) or int(classes) < 1:
        raise ValueError(f"a network needs a whole number of classes, got {classes!r}")
    return tuple(f"class {index}" for index in range(int(classes)))


def class_colors(names: Sequence[str]) -> list[tuple[int, int, int]]:
    """Return a colour for each class: Cityscapes' own where it has one, else well apart hues."""
    return [CITYSCAPES_COLORS.get(name, _hue(index)) for index, name in enumerate(names)]


def _hue(index: int) -> tuple[int, int, int]:
    hue = index * 0.618034 % 1  # the golden ratio spreads any number of hues
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.75, 0.55 + 0.4 * (index % 2))
    return round(red * 255), round(green * 255), round(blue * 255)
