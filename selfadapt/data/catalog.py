"""The supported datasets: their folder layouts and label tables."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from selfadapt.data import tables
from selfadapt.data.layouts import Layout
from selfadapt.data.samples import WRONG_ID
from selfadapt.labels import LabelTable

TRAIN_VAL = {"train": "train", "val": "val"}


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """Facts about a dataset that are independent of its files on the disk."""

    layouts: tuple[Layout, ...] = ()
    """The first with both an image and a label is used."""
    splits: Mapping[str, str] = field(default_factory=dict)
    """The splits with labels and their folders; "" if the split has no folder."""
    withheld: tuple[str, ...] = ()
    """Splits whose labels are not public."""
    counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Number of pairs in each split; several numbers if there are several editions."""
    sizes_differ: bool = False
    """Some pairs are known to differ in size and are left out."""
    missing: str = ""
    """Advice if a split is not found."""
    wrong_id: str = WRONG_ID
    """Advice if a label has an id that is not in the table."""


def _cityscapes_like(labels: str, table: LabelTable) -> Layout:
    return Layout(
        "leftImg8bit/{split}/*/*_leftImg8bit.{png,jpg,jpeg}", "gtFine/{split}/*/*_" + labels, table
    )


def _acdc(condition: str, train: int, val: int) -> DatasetInfo:
    images = f"rgb_anon/{condition}/{{split}}/*/*_rgb_anon.png"
    labels = f"gt/{condition}/{{split}}/*/*_gt_"
    return DatasetInfo(
        layouts=(
            Layout(images, f"{labels}labelIds.png", tables.CITYSCAPES),
            Layout(images, f"{labels}labelTrainIds.png", tables.TRAIN_IDS),
        ),
        splits=TRAIN_VAL,
        withheld=("test",),
        counts={"train": (train,), "val": (val,)},
    )


def _wilddash(table: LabelTable) -> DatasetInfo:
    return DatasetInfo(
        layouts=(Layout("images/*.{jpg,jpeg,png}", "labels/*.png", table),),
        splits={"all": "", "val": ""},  # the public part is also called its validation set
        counts={"all": (4256,), "val": (4256,)},
        wrong_id="WildDash 1 is another dataset, and its panoptic files hold no ids of classes",
    )


NO_TABLE = LabelTable("a list of classes", {})
"""Placeholder in the layouts of ``folder``, whose table comes from its class list."""

SUFFIXES = "{png,jpg,jpeg,bmp,webp,tif,tiff}"

DATASETS = {
    "gta": DatasetInfo(
        layouts=(
            Layout("images/*.png", "labels/*.png", tables.GTA, split_file="split.mat"),
            Layout("images/{split}/*.png", "labels/{split}/*.png", tables.GTA),
        ),
        splits={"train": "train", "val": "val", "test": "test", "all": ""},
        counts={"train": (12403,), "val": (6382,), "test": (6181,), "all": (24966,)},
        sizes_differ=True,
        missing="the downloaded images and labels are split all; for train, val and test put "
        "split.mat, which comes in read_mapping.zip with the dataset, beside images and labels",
    ),
    "synthia": DatasetInfo(
        layouts=(
            Layout("RGB/*.png", "GT/LABELS/*.png", tables.SYNTHIA),
            _cityscapes_like("gtFine_labelIds.png", tables.SYNTHIA),
        ),
        splits={"all": "", **TRAIN_VAL},
        counts={"all": (9400,)},
        missing="the downloaded RGB and GT are split all",
        wrong_id="the label is the first channel of a 16-bit file, was the file converted?",
    ),
    "wilddash": _wilddash(tables.WILDDASH),
    "wilddash-unified": _wilddash(tables.WILDDASH_UNIFIED),
    "cityscapes": DatasetInfo(
        layouts=(
            _cityscapes_like("gtFine_labelIds.png", tables.CITYSCAPES),
            _cityscapes_like("gtFine_labelTrainIds.png", tables.TRAIN_IDS),
            _cityscapes_like("gtFine_polygons.json", tables.CITYSCAPES),
        ),
        splits=TRAIN_VAL,
        withheld=("test",),
        counts={"train": (2975,), "val": (500,)},
    ),
    "bdd": DatasetInfo(
        layouts=(
            Layout(
                "images/10k/{split}/*.jpg", "labels/sem_seg/masks/{split}/*.png", tables.TRAIN_IDS
            ),
            Layout("images/{split}/*.jpg", "labels/{split}/*_train_id.png", tables.TRAIN_IDS),
            Layout(
                "seg/images/{split}/*.jpg", "seg/labels/{split}/*_train_id.png", tables.TRAIN_IDS
            ),
        ),
        splits=TRAIN_VAL,
        withheld=("test",),
        counts={"train": (7000,), "val": (1000,)},
        wrong_id="the labels of BDD are train ids, 0 to 18 and 255; are these its sem_seg masks?",
    ),
    "idd": DatasetInfo(
        layouts=(
            _cityscapes_like("gtFine_labelcsTrainIds.png", tables.TRAIN_IDS),
            _cityscapes_like("gtFine_labelids.png", tables.IDD),
            _cityscapes_like("gtFine_labellevel3Ids.png", tables.IDD_LEVEL3),
            _cityscapes_like("gtFine_polygons.json", tables.IDD),
        ),
        splits=TRAIN_VAL,
        withheld=("test",),
        counts={"train": (6993, 14027), "val": (981, 2036)},  # part I, parts I and II
    ),
    "mapillary": DatasetInfo(
        layouts=(
            Layout("{split}/images/*.jpg", "{split}/v1.2/labels/*.png", tables.MAPILLARY),
            Layout("{split}/images/*.jpg", "{split}/labels/*.png", tables.MAPILLARY),
            Layout("{split}/images/*.jpg", "{split}/v2.0/labels/*.png", tables.MAPILLARY_2),
        ),
        splits={"train": "training", "val": "validation"},
        withheld=("test",),
        counts={"train": (18000,), "val": (2000,)},
        wrong_id="the labels of versions 1.2 and 2.0 have other ids; are they in folders v1.2 and "
        "v2.0, as in the download?",
    ),
    "acdc": _acdc("*", 1600, 406),
    "acdc-fog": _acdc("fog", 400, 100),
    "acdc-night": _acdc("night", 400, 106),
    "acdc-rain": _acdc("rain", 400, 100),
    "acdc-snow": _acdc("snow", 400, 100),
    "folder": DatasetInfo(
        layouts=(
            Layout(f"images/**/*.{SUFFIXES}", "labels/**/*.{png}", NO_TABLE),
            Layout(f"images/{{split}}/**/*.{SUFFIXES}", "labels/{split}/**/*.{png}", NO_TABLE),
        ),
        splits={"all": ""},  # and every folder in images
        missing="images lie in images, their labels in labels under the same name; a split is a "
        "folder in both, and split all takes everything",
        wrong_id="a label has the index of the class in the list of classes, or 255",
    ),
    "streets": DatasetInfo(),  # rendered, not read: each look is a split
}
