"""check-data against trees with known faults: what is counted, what is a problem, what is shown."""

import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import trees
from selfadapt.data import open_dataset
from selfadapt.data.check import check_data, print_report, run_check
from selfadapt.data.sheet import contact_sheet


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """Two pairs of your own, without a fault."""
    for name, ids in (("b", (0, 0, 0, 1, 1, 255)), ("a", (0, 0, 0, 0, 0, 0))):
        trees.write_image(tmp_path / f"images/{name}.jpg")
        trees.write_label(tmp_path / f"labels/{name}.png", ids)
    return tmp_path


def printed(report: object) -> str:
    console = Console(file=StringIO(), width=100)
    print_report(report, console)
    return console.file.getvalue()


def test_all_is_well(good: Path) -> None:
    report = check_data("folder", good, classes=["road", "sky", "car"])
    assert report.problems == []
    (split,) = report.splits
    assert split.dataset.name == "folder/all"
    assert split.pixels == {0: 36, 1: 8, 255: 4}
    assert report.frequencies == pytest.approx(
        {"road": 36 / 48, "sky": 8 / 48, "car": 0, "ignored": 4 / 48}
    )


def test_the_number_of_pairs_is_compared(tmp_path: Path) -> None:
    problems = check_data("cityscapes", trees.cityscapes(tmp_path)).problems
    assert problems == [
        "cityscapes/train: 1 pairs, but there should be 2975",
        "cityscapes/val: 3 pairs, but there should be 500",
    ]


def test_editions_have_different_numbers(tmp_path: Path) -> None:
    trees.idd_polygons(trees.idd_images(tmp_path))
    (problem,) = check_data("idd", tmp_path, split="val").problems
    assert problem == "idd/val: 2 pairs, but there should be 981 or 2036"


def test_missing_partners_are_problems_on_both_sides(tmp_path: Path) -> None:
    root = trees.bdd(tmp_path)
    _, images, labels = check_data("bdd", root, split="val").problems
    assert images == (
        f"bdd/val: 1 images have no label\n  {root}/images/10k/val/80a9e37d-e4548ac1.jpg"
    )
    assert labels == (
        f"bdd/val: 1 labels have no image\n  {root}/labels/sem_seg/masks/val/ff55861e-a06b953c.png"
    )


def test_sizes_that_differ_are_known_of_gta(tmp_path: Path) -> None:
    report = check_data("gta", trees.gta(tmp_path))
    assert report.problems == ["gta/all: 5 pairs, but there should be 24966"]
    (split,) = report.splits
    assert len(split.sizes) == 1
    assert (
        "gta/all: 1 pairs differ in size, as is known of this dataset, and are left out"
        in printed(report)
    )


def test_sizes_that_differ_are_a_problem_elsewhere(good: Path) -> None:
    trees.write_label(good / "labels/a.png", (0,), (4, 6))
    (problem,) = check_data("folder", good, classes=["road", "sky"]).problems
    assert problem.startswith("folder/all: 1 pairs differ in size\n")
    assert problem.endswith(f"{good}/images/a.jpg and {good}/labels/a.png: 6x4 and 4x6")


def test_ids_outside_the_table_are_counted_by_file(tmp_path: Path) -> None:
    trees.wilddash(tmp_path, (7, 90, 81))
    trees.write_label(tmp_path / "labels/ar0001_100000.png", (7, 81))
    report = check_data("wilddash", tmp_path)
    _, some, one = report.problems
    assert some.startswith(
        "wilddash/all: 2 labels hold id 81, which is not in the table; WildDash 1"
    )
    assert re.search(r"ar0001_100000\.png\n.*zm0002_100000\.png$", some)
    assert one.startswith("wilddash/all: 1 labels hold id 90")
    assert report.frequencies["road"] == pytest.approx(2 / 12)
    assert report.frequencies["ignored"] == 0
    assert report.frequencies["not in the table"] == pytest.approx(10 / 12)


def test_unreadable_files_are_named_with_the_reason(good: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(good / "images/a.jpg", quality=95)
    trees.cut_off(good / "images/a.jpg", 2000)
    trees.cut_off(good / "labels/b.png", 20)
    (problem,) = check_data("folder", good, classes=["road", "sky"]).problems
    first, a, b = problem.split("\n")
    assert first == "folder/all: 2 pairs cannot be read"
    assert a.startswith(f"  {good}/images/a.jpg cannot be read, it may be cut off or damaged: ")
    assert b == f"  a label must be a PNG file, but {good}/labels/b.png is not, or is cut off"


def test_many_of_a_kind_are_shortened(good: Path) -> None:
    for number in range(13):
        trees.write_image(good / f"images/c{number}.png")
    (problem,) = check_data("folder", good, classes=["road", "sky"]).problems
    lines = problem.split("\n")
    assert lines[0] == "folder/all: 13 images have no label"
    assert lines[1] == f"  {good}/images/c0.png"
    assert lines[10] == f"  {good}/images/c9.png"
    assert lines[11:] == ["  and 3 more"]


def test_every_split_is_checked_unless_one_is_asked_for(tmp_path: Path) -> None:
    trees.acdc(tmp_path)
    report = check_data("acdc", tmp_path)
    assert [split.dataset.name for split in report.splits] == ["acdc/train", "acdc/val"]
    (split,) = check_data("acdc", tmp_path, split="train").splits
    assert len(split.listing.pairs) == 1


def test_all_stands_for_every_split(tmp_path: Path) -> None:
    report = check_data("folder", trees.folder(tmp_path))
    assert [split.dataset.name for split in report.splits] == ["folder/all"]
    assert report.splits[0].pixels[1] == 3 * 4


def test_splits_may_have_labels_of_two_kinds(tmp_path: Path) -> None:
    trees.cityscapes_pair(tmp_path, "train", "a/a_1", (7,))
    trees.cityscapes_pair(tmp_path, "val", "a/a_1", (0,), "labelTrainIds")
    assert check_data("cityscapes", tmp_path).frequencies["road"] == 1


def test_progress_counts_pairs_of_every_split(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    check_data(
        "cityscapes",
        trees.cityscapes(tmp_path),
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(done, 4) for done in range(5)]


def test_a_dataset_that_is_not_there_is_explained(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no images with labels of cityscapes/train under"):
        check_data("cityscapes", tmp_path)


@pytest.mark.parametrize("split", [None, "day"])
def test_streets_have_no_files(split: str | None) -> None:
    with pytest.raises(ValueError, match="streets is rendered, so there are no files"):
        check_data("streets", None, split=split)


def test_classes_are_given_for_a_folder_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="classes are given for 'folder' only, not for 'gta'"):
        check_data("gta", trees.gta(tmp_path), classes=["road"])


def test_images_and_labels_that_never_meet_are_a_problem(tmp_path: Path) -> None:
    trees.write_image(tmp_path / "images/a.png")
    trees.write_label(tmp_path / "labels/b.png")
    sheet = tmp_path / "sheet.png"
    assert run_check("folder", tmp_path, classes=["road [1]"], output=sheet) == 1
    assert not sheet.exists()
    report = check_data("folder", tmp_path, classes=["road [1]"])
    assert len(report.problems) == 2
    assert "road [1]" in printed(report)


def test_problems_are_printed_first_and_classes_as_bars(good: Path) -> None:
    trees.write_image(good / "images/lonely.png")
    lines = printed(check_data("folder", good, classes=["road", "sky"])).splitlines()
    assert lines[0] == "problem: folder/all: 1 images have no label"
    assert lines[2] == f"folder/all: 2 pairs in {good}, labels labels/**/*.{{png}}"
    road, sky, ignored = (line.split() for line in lines[3:6])
    assert road == ["road", "75.00%", "█" * 40]
    assert (sky[0], sky[1], ignored[0]) == ("sky", "16.67%", "ignored")
    assert len(sky[2]) == 9
    assert lines[-1] == "problems found"


def test_a_dataset_without_one_readable_pair_is_printed(good: Path) -> None:
    for path in good.glob("labels/*"):
        trees.cut_off(path, 10)
    report = check_data("folder", good, classes=["road"])
    assert report.frequencies == {"road": 0, "ignored": 0}
    assert "2 pairs cannot be read" in printed(report)


def test_a_verb_returns_its_exit_code_and_writes_a_sheet(
    good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet = good / "sheet.png"
    assert run_check("folder", good, classes=["road", "sky"], output=sheet) == 0
    assert "no problems" in capsys.readouterr().out
    with Image.open(sheet) as picture:
        assert picture.size == (2 * (2 * 256 + 4), 160 + 16)
    trees.write_image(good / "images/lonely.png")
    assert run_check("folder", good, classes=["road", "sky"]) == 1


def test_a_sheet_needs_a_folder_before_anything_is_read(good: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere to write sheet\.png to"):
        run_check("folder", good, classes=["road"], output=good / "nowhere/sheet.png")


def test_a_sheet_shows_pairs_evenly_and_marks_the_broken(good: Path) -> None:
    for number in range(30):
        trees.write_image(good / f"images/{number}.png", (64, 32))
        trees.write_label(good / f"labels/{number}.png", (1,), (64, 32))
    trees.cut_off(good / "labels/0.png", 10)
    dataset = open_dataset("folder", good, split="all", classes=["road", "sky"], space=["sky"])
    sheet = np.array(contact_sheet([dataset]))
    assert sheet.shape == (4 * 176, 3 * 516, 3)
    assert sheet[:176, :256, 1].min() < 100 < sheet[16:176, :256, 0].min()  # the first is red
    image = sheet[16 + 64, 516 + 100]
    overlaid = sheet[16 + 64, 516 + 256 + 100]
    assert image.tolist() == [10, 200, 30]
    assert overlaid.tolist() == [46, 158, 120]  # 0.6 of sky's (70, 130, 180)
    assert contact_sheet([dataset], 2).width == 2 * 516
