"""Class spaces of networks, and label tables of datasets.

The label files of a dataset have integer ids; a ``LabelTable`` maps each id to its name and class.
The classes of a network are a ``ClassSpace``, a tuple of names. Classes of datasets and networks
are matched by name.
"""

import colorsys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from selfadapt.checks import check_number, shortened
from selfadapt.patterns import alternatives
from selfadapt.pseudo import IGNORE

Color = tuple[int, int, int]
Classes = Sequence[str] | Mapping[str, Color | None]
"""Names of classes in the order of their index; a mapping also has their colours, None for the
default colour."""
MAX_CLASSES = 2**16
MAX_NAME = 200
"""Maximum length of a class name."""

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
"""The 19 evaluated classes in the order of train ids (cityscapesScripts, helpers/labels.py)."""


def check_class_names(names: Iterable[object]) -> None:
    """Raise ValueError unless all names are single lines of text, and not too many."""
    names = list(names)
    if len(names) > MAX_CLASSES:
        raise ValueError(f"a network has at most {MAX_CLASSES} classes, got {len(names)}")
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"class names must be strings, got {shortened(name)}")
        if not name.strip() or not name.isprintable() or len(name) > MAX_NAME:
            raise ValueError(
                f"the name of a class must be a line of 1 to {MAX_NAME} characters, got "
                f"{shortened(name)}"
            )


@dataclass(frozen=True)
class ClassSpace:
    """The classes that a network predicts, or that it is evaluated on.

    Example:
        >>> space = ClassSpace(("person", "car"), merges={"rider": "person", "bus": "car"})
        >>> space.index("bus"), space.index("sky")
        (1, 255)
    """

    names: tuple[str, ...]
    merges: Mapping[str, str] = field(default_factory=dict)
    """Other classes and the class of this space that they are mapped to."""

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("class names must be strings, at least one, got none")
        check_class_names(self.names)
        for old, new in self.merges.items():
            if new not in self.names or old in self.names:
                raise ValueError(
                    f"merges must map other classes to {', '.join(self.names)}, "
                    f"got {old!r} to {new!r}"
                )

    def index(self, name: str | None) -> int:
        """Return the train id of a class, 255 if it is not in this space."""
        if name is None:
            return IGNORE
        name = self.merges.get(name, name)
        return self.names.index(name) if name in self.names else IGNORE


@dataclass(frozen=True)
class LabelTable:
    """The meaning of the ids in the label files of a dataset.

    Example:
        >>> table = LabelTable("nowhere", {0: ("void", None), 7: ("Street", "road")})
        >>> table.lookup(ClassSpace(("sky", "road")))[[0, 7, 9]].tolist()
        [255, 1, 255]
    """

    origin: str
    """The source of the table."""
    ids: Mapping[int, tuple[str, str | None]]
    """Raw id -> its name in the origin, and its class; None: it is ignored."""

    def lookup(self, space: ClassSpace) -> np.ndarray:
        """Return the train id in ``space`` of every raw id ``(65536,)``, uint8."""
        if len(space.names) > IGNORE:
            raise ValueError(
                f"label files support at most {IGNORE} classes, got {len(space.names)}"
            )
        train_ids = np.full(65536, IGNORE, np.uint8)
        for raw_id, (_, name) in self.ids.items():
            train_ids[raw_id] = space.index(name)
        return train_ids


CITYSCAPES_19 = tuple(CITYSCAPES_COLORS)
SYNTHIA_16 = tuple(name for name in CITYSCAPES_19 if name not in ("terrain", "truck", "train"))
CARLA_13 = (*CITYSCAPES_19[: CITYSCAPES_19.index("person") + 1], "car")
STREETS_9 = (
    "road", "sidewalk", "building", "pole", "traffic sign", "vegetation", "sky", "person", "car",
)  # fmt: skip

CLASS_SPACES = {
    "cityscapes-19": ClassSpace(CITYSCAPES_19),
    "synthia-16": ClassSpace(SYNTHIA_16),
    "carla-13": ClassSpace(
        CARLA_13,
        merges={
            "rider": "person",  # in CARLA, person is any human, car any vehicle
            **dict.fromkeys(("truck", "bus", "train", "motorcycle", "bicycle"), "car"),
        },
    ),
    "streets-9": ClassSpace(STREETS_9),
}


def class_space(classes: int | str | Classes | ClassSpace) -> ClassSpace:
    """Return a class space from its name, from class names or from their number.

    If the names equal those of a predefined space, that space is returned, with its merges.

    Example:
        >>> class_space("cityscapes-19").names[:2]
        ('road', 'sidewalk')
        >>> class_space(2).names
        ('class 0', 'class 1')
    """
    if isinstance(classes, ClassSpace):
        return classes
    if isinstance(classes, str):
        if classes not in CLASS_SPACES:
            raise ValueError(
                f"unknown class space {classes!r}{alternatives(classes, CLASS_SPACES)}; "
                "or give a list of the classes"
            )
        return CLASS_SPACES[classes]
    if isinstance(classes, Sequence | Mapping):
        spaces = (space for space in CLASS_SPACES.values() if space.names == tuple(classes))
        return next(spaces, None) or ClassSpace(tuple(classes))
    check_number("the number of classes", classes, 1, MAX_CLASSES, whole=True)
    return ClassSpace(tuple(f"class {index}" for index in range(int(classes))))


def class_names(classes: int | str | Classes) -> tuple[str, ...]:
    """Return class names from their number, the name of a class space, or the names.

    Example:
        >>> class_names(2)
        ('class 0', 'class 1')
    """
    names = class_space(classes).names
    duplicates = [name for name, count in Counter(names).items() if count > 1]
    if duplicates:
        raise ValueError(f"class names must differ, got {duplicates[0]!r} more than once")
    return names


def predicted_names(classes: Classes | None, number: int) -> tuple[str, ...]:
    """Return the names of predicted classes, with default names if they are unknown.

    Example:
        >>> predicted_names(["road"], 2)  # a network with one output channel
        ('background', 'road')
    """
    names = tuple(classes or class_names(number))
    if len(names) == 1:  # a single output channel means two classes
        names = ("background", "foreground" if names == class_names(1) else names[0])
    if len(names) != number:
        raise ValueError(f"the network predicts {number} classes, but {len(names)} are named")
    return names


def class_colors(names: Sequence[str]) -> list[Color]:
    """Return a colour for each class: that of Cityscapes, else a distinct hue."""
    return [CITYSCAPES_COLORS.get(name, _hue(index)) for index, name in enumerate(names)]


def predicted_colors(classes: Classes | None, number: int) -> list[Color]:
    """Return the colours of predicted classes: those given, else the default colours.

    Example:
        >>> predicted_colors({"vessel": (255, 0, 0)}, 2)  # a network with one output channel
        [(0, 0, 0), (255, 0, 0)]
    """
    names = predicted_names(classes, number)
    given = classes if isinstance(classes, Mapping) else {}
    defaults = class_colors(names)
    if len(names) == 2 and len(given) == 1:
        defaults[0] = (0, 0, 0)  # background
    return [given.get(name) or color for name, color in zip(names, defaults, strict=True)]


def _hue(index: int) -> Color:
    hue = index * 0.618034 % 1  # steps of the golden ratio keep hues apart
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.75, 0.55 + 0.4 * (index % 2))
    return round(red * 255), round(green * 255), round(blue * 255)
