"""Tiny trees of every dataset: what is listed, what labels become, and what is said of faults."""

import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import trees
from selfadapt.data import DATASETS, DataConfig, Dataset, open_dataset, open_datasets
from selfadapt.data.layouts import find_files
from selfadapt.data.reading import read_image_size, read_label, read_picture
from selfadapt.images import load_image
from selfadapt.labels import ClassSpace
from selfadapt.streets import LOOKS, render


def names(dataset: Dataset) -> list[str]:
    return [pair.name for pair in dataset.pairs]


def first_row(dataset: Dataset, index: int = 0) -> list[int]:
    return dataset[index].label[0].tolist()


# what is listed, in which order, and what the labels become


def test_cityscapes_is_listed_by_name_without_hidden_files(tmp_path: Path) -> None:
    dataset = open_dataset("cityscapes", trees.cityscapes(tmp_path), split="val")
    assert dataset.name == "cityscapes/val"
    assert names(dataset) == [
        "bonn/bonn_000001",
        "lindau/lindau_000009",
        "lindau/lindau_000010",
    ]
    assert first_row(dataset) == [255, 0, 2, 18, 18, 18]
    assert dataset.notes == ()


def test_a_sample_is_a_picture_with_a_label_of_its_size(tmp_path: Path) -> None:
    sample = open_dataset("cityscapes", trees.cityscapes(tmp_path))[0]
    assert sample.name == "ulm/ulm_000001"
    assert (sample.image.mode, sample.image.size) == ("RGB", (6, 4))
    assert sample.image.getpixel((0, 0)) == (10, 200, 30)
    assert (sample.label.dtype, sample.label.shape) == (np.uint8, (4, 6))


def test_cityscapes_train_ids_are_taken_where_there_are_no_others(tmp_path: Path) -> None:
    trees.cityscapes_pair(tmp_path, "val", "a/a_1", (0, 18, 255), "labelTrainIds")
    assert first_row(open_dataset("cityscapes", tmp_path, split="val")) == [0, 18, *[255] * 4]


def test_cityscapes_polygons_leave_license_plates_out(tmp_path: Path) -> None:
    trees.write_image(tmp_path / "leftImg8bit/val/a/a_1_leftImg8bit.png")
    objects = [trees.shape("car", 0, 5), trees.shape("license plate", 1, 1)]
    objects += [trees.shape("persongroup", 3, 3), trees.shape("out of roi", 5, 5)]
    trees.write_polygons(tmp_path / "gtFine/val/a/a_1_gtFine_polygons.json", objects)
    dataset = open_dataset("cityscapes", tmp_path, split="val")
    assert first_row(dataset) == [13, 13, 13, 11, 13, 255]


def test_gta_leaves_out_pairs_of_two_sizes_and_says_which(tmp_path: Path) -> None:
    dataset = open_dataset("gta", trees.gta(tmp_path), split="all")
    assert names(dataset) == ["00001", "00002", "00003", "00010"]
    (note,) = dataset.notes
    assert note == "left out: 1 images differ in size from their labels: 00004"
    assert first_row(dataset, 0) == [0, *[255] * 5]
    assert first_row(dataset, 1) == [255, 1, 2, 2, 2, 2]  # places in a palette of 4 bits


@pytest.mark.parametrize(
    ("split", "expected"), [("train", ["00001", "00002"]), ("val", ["00003"]), ("test", ["00010"])]
)
def test_gta_has_the_splits_of_its_split_file(
    tmp_path: Path, split: str, expected: list[str]
) -> None:
    trees.gta_split_file(trees.gta(tmp_path))
    assert names(open_dataset("gta", tmp_path, split=split)) == expected


def test_gta_in_the_tree_of_the_released_code(tmp_path: Path) -> None:
    trees.gta_released(tmp_path)
    assert names(open_dataset("gta", tmp_path)) == ["00001", "00002"]
    assert names(open_dataset("gta", tmp_path, split="val")) == ["00003"]


def test_gta_without_its_split_file_says_where_that_is(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no split 'train' of gta.*there is all; .*split\.mat"
    ):
        open_dataset("gta", trees.gta(tmp_path))


def test_a_split_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (trees.gta(tmp_path) / "split.mat").write_bytes(b"nothing of the kind" * 20)
    with pytest.raises(ValueError, match=r"split\.mat does not hold the lists trainIds"):
        open_dataset("gta", tmp_path)


def test_a_split_file_needs_scipy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees.gta_split_file(trees.gta(tmp_path))
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ModuleNotFoundError, match=r"scipy.*selfadapt\[data\]"):
        open_dataset("gta", tmp_path)


def test_synthia_ids_are_the_first_of_16_bit_channels(tmp_path: Path) -> None:
    dataset = open_dataset("synthia", trees.synthia(tmp_path), split="all", space="synthia-16")
    assert names(dataset) == ["0000001", "0000002"]
    assert first_row(dataset, 0) == [9, 2, 10, 10, 10, 10]
    assert first_row(dataset, 1) == [0, *[255] * 5]


def test_synthia_in_the_tree_of_the_released_code_keeps_its_own_ids(tmp_path: Path) -> None:
    trees.cityscapes_pair(tmp_path, "train", "0/0001", (3, 1))
    assert first_row(open_dataset("synthia", tmp_path)) == [0, *[10] * 5]


def test_synthia_has_no_split_for_training(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="but there is all; the downloaded RGB and GT"):
        open_dataset("synthia", trees.synthia(tmp_path))


@pytest.mark.parametrize(
    ("dataset", "ids", "expected"),
    [
        ("wilddash", (7, 34, 35, 36, 37, 38), [0, 13, 13, 255, 255, 0]),
        ("wilddash-unified", (7, 34, 35, 36, 37, 38), [0, 14, 13, 255, 255, 0]),
        ("wilddash", (34, 47, 52, 58, 60, 80), [13, 12, 1, 17, 255, 1]),
        ("wilddash-unified", (34, 47, 52, 58, 60, 80), [14, 12, 1, 17, 255, 1]),
    ],
)
@pytest.mark.parametrize("split", ["all", "val"])
def test_both_versions_of_wilddash_by_both_policies(
    tmp_path: Path, dataset: str, ids: Sequence[int], expected: list[int], split: str
) -> None:
    opened = open_dataset(dataset, trees.wilddash(tmp_path, ids), split=split)
    assert names(opened) == ["ar0001_100000", "zm0002_100000"]
    assert first_row(opened) == expected


def test_bdd_leaves_out_what_has_no_partner(tmp_path: Path) -> None:
    dataset = open_dataset("bdd", trees.bdd(tmp_path), split="val")
    assert names(dataset) == ["a2", "b1"]
    assert first_row(dataset) == [0, 18, *[255] * 4]
    images, labels = dataset.notes
    assert images.startswith("left out: 1 images have no label: ")
    assert images.endswith("val/80a9e37d-e4548ac1.jpg")
    assert labels.startswith("left out: 1 labels have no image: ")
    assert labels.endswith("val/ff55861e-a06b953c.png")


@pytest.mark.parametrize("wrapper", ["", "bdd100k", "seg", "bdd100k/seg"])
def test_bdd_may_lie_in_the_folders_of_its_archives(tmp_path: Path, wrapper: str) -> None:
    trees.bdd_released(tmp_path / wrapper)
    dataset = open_dataset("bdd", tmp_path, split="val")
    assert names(dataset) == ["a2", "b1"]
    assert first_row(dataset) == [0, 18, *[255] * 4]


@pytest.mark.parametrize(
    ("kind", "ids", "expected"),
    [
        ("csTrainIds", (0, 9, 18, 255), [0, 9, 18, 255, 255, 255]),
        ("ids", (0, 5, 12, 11, 39), [0, 9, 13, 255, 255, 255]),
        ("level3Ids", (0, 3, 9, 8, 255), [0, 9, 13, 255, 255, 255]),
    ],
)
def test_idd_in_each_form_of_its_ids(
    tmp_path: Path, kind: str, ids: Sequence[int], expected: list[int]
) -> None:
    dataset = open_dataset(
        "idd", trees.idd_labels(trees.idd_images(tmp_path), kind, ids), split="val"
    )
    assert names(dataset) == ["9/0003438", "10/frame0029"]
    assert dataset.pairs[0].image.suffix == ".jpg"
    assert first_row(dataset) == expected


def test_idd_train_ids_are_preferred(tmp_path: Path) -> None:
    trees.idd_polygons(trees.idd_images(tmp_path))
    trees.idd_labels(tmp_path, "level3Ids", (22,))
    trees.idd_labels(tmp_path, "csTrainIds", (2,))
    dataset = open_dataset("idd", tmp_path, split="val")
    assert dataset.pairs[0].label.name == "0003438_gtFine_labelcsTrainIds.png"


def test_idd_as_downloaded_has_polygons_only(tmp_path: Path) -> None:
    dataset = open_dataset("idd", trees.idd_polygons(trees.idd_images(tmp_path)), split="val")
    assert names(dataset) == ["9/0003438", "10/frame0029"]
    assert first_row(dataset) == [0, 9, 13, 255, 10, 10]


def test_mapillary_1_2(tmp_path: Path) -> None:
    trees.mapillary(tmp_path, "labels", (13, 52, 65))
    dataset = open_dataset("mapillary", tmp_path, split="val")
    assert names(dataset) == ["a_-1", "b_-2"]
    assert first_row(dataset) == [0, 18, *[255] * 4]


def test_mapillary_2_0_has_both_labels_and_the_old_ones_are_taken(tmp_path: Path) -> None:
    trees.mapillary(tmp_path, "v2.0/labels", (21, 105, 123))
    new = open_dataset("mapillary", tmp_path, split="val")
    assert first_row(new) == [0, 18, *[255] * 4]
    trees.mapillary(tmp_path, "v1.2/labels", (13, 52, 65))
    old = open_dataset("mapillary", tmp_path, split="val")
    assert first_row(old) == [0, 18, *[255] * 4]
    assert old.pairs[0].label.parts[-3] == "v1.2"


@pytest.mark.parametrize(
    ("kind", "ids"), [("labelIds", (0, 7, 33)), ("labelTrainIds", (255, 0, 18))]
)
def test_acdc_as_a_whole_and_by_condition(tmp_path: Path, kind: str, ids: Sequence[int]) -> None:
    trees.acdc(tmp_path, kind, ids)
    dataset = open_dataset("acdc", tmp_path, split="val")
    assert names(dataset) == ["fog/GOPR1/GOPR1_frame_000041", "night/GP010/GP010_frame_000041"]
    assert first_row(dataset) == [255, 0, 18, 18, 18, 18]
    night = open_dataset("acdc-night", tmp_path, split="val")
    assert names(night) == ["GP010/GP010_frame_000041"]
    assert len(open_dataset("acdc-fog", tmp_path)) == 1


# images of your own


def test_a_folder_is_listed_by_name_with_numbers_by_value(tmp_path: Path) -> None:
    root = trees.folder(tmp_path)
    train = open_dataset("folder", root, space=("sky", "road"))
    assert names(train) == ["img9", "img10"]
    assert first_row(train) == [1, 255, 0, 255, 255, 255]
    everything = open_dataset("folder", root, split="all", space=("sky", "road"))
    assert names(everything) == ["train/img9", "train/img10", "val/day/a"]


@pytest.mark.parametrize(
    ("classes", "expected"),
    [("cityscapes-19", [0, 1, 2, 255]), (["sky", "road", "sky"], [10, 0, 10, 255])],
)
def test_classes_of_a_folder_are_given_by_name_or_one_by_one(
    tmp_path: Path, classes: str | list[str], expected: list[int]
) -> None:
    dataset = open_dataset("folder", trees.folder(tmp_path), classes=classes)
    assert first_row(dataset)[:4] == expected


def test_a_folder_without_classes_says_how_to_give_them(tmp_path: Path) -> None:
    (trees.folder(tmp_path) / "classes.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"must be given.*in the lines of .*classes\.txt"):
        open_dataset("folder", tmp_path)


def test_an_empty_line_would_shift_the_classes(tmp_path: Path) -> None:
    (trees.folder(tmp_path) / "classes.txt").write_text("road\n\nsky\n")
    with pytest.raises(ValueError, match=r"classes\.txt holds no classes: line 2 is empty"):
        open_dataset("folder", tmp_path)


@pytest.mark.parametrize("dataset", ["cityscapes", "streets"])
def test_classes_are_given_for_a_folder_only(dataset: str) -> None:
    with pytest.raises(
        ValueError, match=f"classes are given for 'folder' only, not for '{dataset}'"
    ):
        open_dataset(dataset, classes="cityscapes-19")


def test_an_image_in_two_formats_is_refused(tmp_path: Path) -> None:
    trees.write_image(trees.folder(tmp_path) / "images/train/img9.bmp")
    with pytest.raises(ValueError, match=r"img9\.\w+ and .*img9\.\w+ are both 'img9'"):
        open_dataset("folder", tmp_path)


def test_colours_are_no_ids(tmp_path: Path) -> None:
    trees.write_image(trees.folder(tmp_path) / "labels/train/img9.png")
    with pytest.raises(
        ValueError, match=r"id of a class at each pixel, but .*img9\.png holds colours"
    ):
        open_dataset("folder", tmp_path)[0]


# choosing pairs


def test_only_named_pairs_are_taken_in_their_own_order(tmp_path: Path) -> None:
    chosen = tmp_path / "chosen.txt"
    chosen.write_text("lindau/lindau_000010\nbonn/bonn_000001\n\n")
    config = DataConfig(
        dataset="cityscapes", root=str(trees.cityscapes(tmp_path)), split="val", names=str(chosen)
    )
    assert names(config.open()) == ["bonn/bonn_000001", "lindau/lindau_000010"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "bonn_000001\n",
            r"must name pairs, got bonn_000001; an example of a name is bonn/bonn_000001",
        ),
        ("\n", "must name pairs, got no name"),
        ("bonn/bonn_000001\n" * 2, "each pair must be named once.*bonn/bonn_000001 twice"),
    ],
)
def test_names_must_be_those_of_pairs(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "chosen.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        open_dataset(
            "cityscapes",
            trees.cityscapes(tmp_path),
            split="val",
            names=tmp_path / "chosen.txt",
        )


def test_a_file_of_names_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file nowhere\.txt with the names"):
        open_dataset("cityscapes", trees.cityscapes(tmp_path), names="nowhere.txt")


def test_a_limit_takes_the_first(tmp_path: Path) -> None:
    dataset = open_dataset("cityscapes", trees.cityscapes(tmp_path), split="val", limit=2)
    assert names(dataset) == ["bonn/bonn_000001", "lindau/lindau_000009"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"limit": 0}, "limit must be a whole number, 1 or more, got 0"),
        ({"scale": 0.0}, "scale must be a number, 0.05 to 20, got 0.0"),
    ],
)
def test_settings_are_checked(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(dataset="gta", **wrong)


# class spaces


def test_a_space_decides_the_train_ids(tmp_path: Path) -> None:
    root = trees.cityscapes(tmp_path)
    space = ClassSpace(("bicycle", "road"), merges={"building": "road"})
    assert first_row(open_dataset("cityscapes", root, split="val", space=space))[:4] == [
        255,
        1,
        1,
        0,
    ]


def test_a_space_without_any_of_the_classes_is_refused(tmp_path: Path) -> None:
    message = r"cityscapes/val has no class of the requested.*it has road, .*requested are cat, dog"
    with pytest.raises(ValueError, match=message):
        open_dataset("cityscapes", trees.cityscapes(tmp_path), split="val", space=["cat", "dog"])


# what is wrong with a root, a name, a split


def test_an_unknown_dataset_is_told_its_nearest_name() -> None:
    with pytest.raises(ValueError, match="unknown dataset 'cityscape'; did you mean 'cityscapes'"):
        open_dataset("cityscape", "/nowhere")


def test_a_root_is_needed() -> None:
    with pytest.raises(ValueError, match="'gta' is read from files: give its folder"):
        open_dataset("gta")


def test_a_root_must_be_there() -> None:
    with pytest.raises(FileNotFoundError, match="no folder /nowhere for the dataset 'gta'"):
        open_dataset("gta", "/nowhere")


def test_a_root_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "gta.zip").touch()
    with pytest.raises(NotADirectoryError, match=r"gta\.zip is a file"):
        open_dataset("gta", tmp_path / "gta.zip")


def test_an_unknown_split_is_told_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no split 'valid'; did you mean 'val'.* train, val"):
        open_dataset("cityscapes", tmp_path, split="valid")


@pytest.mark.parametrize("split", ["", "../x", "*", ".git"])
def test_a_split_of_a_folder_is_the_name_of_a_folder(tmp_path: Path, split: str) -> None:
    with pytest.raises(ValueError, match="folder has no split"):
        open_dataset("folder", trees.folder(tmp_path), split=split)


def test_splits_of_a_folder_that_are_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no split 'test' .*but there is all, train, val;"):
        open_dataset("folder", trees.folder(tmp_path), split="test")


@pytest.mark.parametrize("dataset", ["cityscapes", "bdd", "idd", "mapillary", "acdc", "acdc-fog"])
def test_withheld_labels_are_said_to_be(tmp_path: Path, dataset: str) -> None:
    trees.cityscapes(tmp_path)  # has dummy labels for test
    with pytest.raises(
        ValueError, match=f"labels of {dataset}/test are not public; use train, val"
    ):
        open_dataset(dataset, tmp_path, split="test")


def test_nothing_found_names_what_was_looked_for(tmp_path: Path) -> None:
    trees.write_image(tmp_path / "images/1.png")
    message = (
        rf"no images with labels of bdd/val under {tmp_path}; looked for images/10k/val/\*\.jpg "
        r"with labels/sem_seg/masks/val/\*\.png, or images/val/\*\.jpg with"
    )
    with pytest.raises(FileNotFoundError, match=message):
        open_dataset("bdd", tmp_path, split="val")


def test_a_split_that_is_not_there_is_told_the_others(tmp_path: Path) -> None:
    trees.bdd_released(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no split 'train' of bdd under .* there is val$"):
        open_dataset("bdd", tmp_path)


def test_a_root_that_is_too_deep_is_told_the_one_above(tmp_path: Path) -> None:
    trees.cityscapes(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=f"one level too deep for cityscapes; give {tmp_path}$"
    ):
        open_dataset("cityscapes", tmp_path / "leftImg8bit", split="val")


def test_several_folders_with_the_dataset_are_named(tmp_path: Path) -> None:
    for part in ("idd1", "idd2"):
        trees.idd_polygons(trees.idd_images(tmp_path / part))
    with pytest.raises(ValueError, match=r"several folders in .*: idd1, idd2; give one of them"):
        open_dataset("idd", tmp_path, split="val")


def test_images_and_labels_that_never_meet_are_an_error(tmp_path: Path) -> None:
    trees.write_image(tmp_path / "images/val/a.jpg")
    trees.write_label(tmp_path / "labels/val/b_train_id.png")
    with pytest.raises(ValueError, match=r"no image of bdd/val under .* has a label: left out: 1"):
        open_dataset("bdd", tmp_path, split="val")


# what is wrong with a pair


def test_sizes_that_differ_are_an_error_with_both(tmp_path: Path) -> None:
    trees.cityscapes_pair(tmp_path, "val", "a/a_1")
    trees.write_label(tmp_path / "gtFine/val/a/a_1_gtFine_labelIds.png", (7,), (4, 6))
    message = r"differ in size: .*a_1_leftImg8bit\.png and .*a_1_gtFine_labelIds\.png: 6x4 and 4x6"
    with pytest.raises(ValueError, match=message):
        open_dataset("cityscapes", tmp_path, split="val")[0]


@pytest.mark.parametrize(
    ("dataset", "build", "message"),
    [
        (
            "synthia",
            lambda root: trees.write_synthia_label(
                trees.synthia(root) / "GT/LABELS/0000001.png", (3, 976)
            ),
            r"0000001\.png holds id 976, but the ids of synthia/all go from 0 to 22; .*converted",
        ),
        (
            "wilddash",
            lambda root: trees.wilddash(root, (81,)),
            r"holds id 81, but the ids of wilddash/all go from 0 to 80",
        ),
        (
            "gta",
            lambda root: trees.write_label(trees.gta(root) / "labels/00001.png", (255,)),
            r"00001\.png holds id 255, but the ids of gta/all go from 0 to 34; is this the right",
        ),
    ],
)
def test_ids_outside_the_table_are_an_error(
    tmp_path: Path, dataset: str, build: Callable[[Path], Path], message: str
) -> None:
    build(tmp_path)
    with pytest.raises(ValueError, match=message):
        open_dataset(dataset, tmp_path, split="all")[0]


@pytest.mark.parametrize("side", ["leftImg8bit", "labelIds"])
@pytest.mark.parametrize("length", [0, 20, 50])
def test_files_that_are_cut_off_are_named(tmp_path: Path, side: str, length: int) -> None:
    trees.cityscapes_pair(tmp_path, "val", "a/a_1")
    (path,) = tmp_path.rglob(f"a_1*{side}.png")
    trees.cut_off(path, length)
    with pytest.raises(ValueError, match=path.name):
        open_dataset("cityscapes", tmp_path, split="val")[0]


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    trees.cityscapes_pair(tmp_path, "val", "a/a_1")
    dataset = open_dataset("cityscapes", tmp_path, split="val")
    dataset.pairs[0].image.unlink()
    with pytest.raises(FileNotFoundError, match=r"no file .*a_1_leftImg8bit\.png"):
        dataset[0]


# reading


@pytest.mark.parametrize(
    ("depth", "kind"),
    [
        *((depth, 0) for depth in (1, 2, 4, 8, 16)),
        *((depth, 3) for depth in (1, 2, 4, 8)),
        *((8, 4), (16, 4), (16, 2), (16, 6)),
    ],
)
def test_ids_are_read_as_written_at_any_depth(tmp_path: Path, depth: int, kind: int) -> None:
    ids = trees.columns([value % 2**depth for value in (1, 0, 3, 13, 200, 976)])
    num_channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[kind]
    others = [np.full_like(ids, 2**depth - 1 - channel) for channel in range(1, num_channels)]
    path = trees.write_png(tmp_path / "label.png", np.stack([ids, *others], -1), depth, kind)
    label = read_label(path)
    assert label.dtype == (np.uint16 if depth == 16 else np.uint8)
    assert np.array_equal(label, ids)
    assert read_image_size(path) == (6, 4)


@pytest.mark.parametrize("kind", [2, 6])
def test_eight_bit_colours_are_refused(tmp_path: Path, kind: int) -> None:
    samples = np.zeros((4, 6, 3 if kind == 2 else 4), np.uint16)
    with pytest.raises(ValueError, match=r"holds colours .8-bit RGB.*write a gray PNG"):
        read_label(trees.write_png(tmp_path / "label.png", samples, 8, kind))


def test_a_label_must_be_a_png_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a label must be a PNG file, but .*label\.jpg is not"):
        read_label(trees.write_image(tmp_path / "label.jpg"))


def test_a_picture_is_turned_as_in_a_viewer(tmp_path: Path) -> None:
    picture = Image.new("RGB", (6, 4))
    exif = picture.getexif()
    exif[274] = 6
    picture.save(tmp_path / "turned.jpg", exif=exif)
    assert read_picture(tmp_path / "turned.jpg").size == (4, 6)
    assert read_image_size(tmp_path / "turned.jpg") == (4, 6)


def test_a_text_is_no_picture(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no picture")
    with pytest.raises(ValueError, match=r"a\.png is not an image file"):
        read_picture(tmp_path / "a.png")


def test_the_size_needs_the_header_only(tmp_path: Path) -> None:
    path = trees.write_image(tmp_path / "a.png")
    trees.cut_off(path, 50)
    assert read_image_size(path) == (6, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ('{"imgWidth": 6}', r"is not a file of polygons, it lacks 'imgHeight'"),
        (
            '{"imgWidth": 6, "imgHeight": 4, "objects": '
            '[{"label": "cow", "polygon": [[0,0],[1,1]]}]}',
            "holds the name 'cow', which is not in AutoNUE/public-code",
        ),
    ],
)
def test_polygons_that_cannot_be_drawn_are_explained(
    tmp_path: Path, text: str, message: str
) -> None:
    trees.idd_images(tmp_path)
    path = tmp_path / "gtFine/val/10/frame0029_gtFine_polygons.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"frame0029_gtFine_polygons\.json {message}"):
        open_dataset("idd", tmp_path, split="val")[0]


def test_polygons_need_a_table(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="need a label table"):
        read_label(trees.write_polygons(tmp_path / "a.json", []))


def test_patterns_match_folders_and_kinds(tmp_path: Path) -> None:
    for name in ("a/1.png", "a/b/2.JPG", "3.gif", ".a/4.png", "a/.5.png"):
        trees.write_image(tmp_path / "x" / name)
    assert list(find_files(tmp_path, "x/**/*.{png,jpg}")) == ["a/1", "a/b/2"]
    assert list(find_files(tmp_path, "x/*/*.png")) == ["a/1"]
    assert find_files(tmp_path, "y/*.png") == {}


# the rest of the package


def test_a_dataset_goes_to_other_processes(tmp_path: Path) -> None:
    dataset = open_dataset("cityscapes", trees.cityscapes(tmp_path), split="val")
    copy = pickle.loads(pickle.dumps(dataset))
    assert names(copy) == names(dataset)
    loader: DataLoader = DataLoader(
        copy, batch_size=None, num_workers=1, collate_fn=lambda sample: sample
    )
    assert [sample.name for sample in loader] == names(dataset)


def test_a_dataset_ends(tmp_path: Path) -> None:
    dataset = open_dataset("cityscapes", trees.cityscapes(tmp_path), split="val")
    assert len(list(dataset)) == len(dataset) == 3
    with pytest.raises(IndexError):
        dataset[3]


def test_streets_are_drawn_by_look_and_number() -> None:
    config = DataConfig(dataset="streets", split="night", limit=13)
    dataset = config.open("streets-9")
    assert len(dataset) == 13
    sample = dataset[12]
    assert (dataset.name, sample.name) == ("streets/night", "night-00012")
    assert np.array_equal(sample.label, dataset[12].label)
    assert not np.array_equal(sample.label, dataset[11].label)
    _, label = render("night", 299503511 + 12)  # the CRC-32 of night
    assert np.array_equal(sample.label, label)


def test_streets_have_500_scenes_and_classes_of_any_space() -> None:
    dataset = open_dataset("streets", split="day")
    assert len(dataset) == 500
    assert set(np.unique(dataset[0].label)) <= {0, 1, 2, 5, 7, 8, 10, 11, 13}


def test_no_scene_is_in_two_looks() -> None:
    import zlib

    seeds = [(zlib.crc32(look.encode()) + i) % 2**32 for look in LOOKS for i in range(100_000)]
    assert len(set(seeds)) == len(seeds)


def test_streets_need_a_look() -> None:
    with pytest.raises(ValueError, match=r"streets has no look 'train'; .*known: day, dusk"):
        open_dataset("streets")


def test_every_dataset_can_be_asked_for() -> None:
    assert list(DATASETS) == [
        "gta", "synthia", "wilddash", "wilddash-unified", "cityscapes", "bdd", "idd", "mapillary",
        "acdc", "acdc-fog", "acdc-night", "acdc-rain", "acdc-snow", "folder", "streets",
    ]  # fmt: skip


def test_trees_write_what_they_say(tmp_path: Path) -> None:
    path = trees.write_synthia_label(tmp_path / "a.png", (1,))
    assert struct.unpack(">IIBB", path.read_bytes()[16:26]) == (6, 4, 16, 2)


def test_pictures_are_read_as_those_to_segment_are(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    Image.new("RGBA", (8, 8), (200, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.fromarray((ramp / 65535).astype(np.float32)).save(tmp_path / "float.tif")
    for name in ("deep.png", "clear.png", "float.tif"):
        expected = load_image(tmp_path / name)
        found = load_image(read_picture(tmp_path / name))
        torch.testing.assert_close(found, expected, atol=0.6 / 255, rtol=0, msg=name)


def test_all_missing_datasets_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    configs = [
        DataConfig(dataset="cityscapes", root=str(tmp_path / name), split="val") for name in "ab"
    ]
    with pytest.raises(FileNotFoundError, match=r"/a\b.*; .*/b\b"):
        open_datasets([*configs, DataConfig(dataset="streets", split="day")], "streets-9")
