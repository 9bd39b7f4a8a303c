"""The tables against what the datasets' own descriptions say, written out once more by hand."""

import pytest

from selfadapt.data import DATASETS, tables
from selfadapt.labels import CITYSCAPES_19, LabelTable, class_space

IDS_19 = {
    7: 0, 8: 1, 11: 2, 12: 3, 13: 4, 17: 5, 19: 6, 20: 7, 21: 8, 22: 9, 23: 10, 24: 11, 25: 12,
    26: 13, 27: 14, 28: 15, 31: 16, 32: 17, 33: 18,
}  # fmt: skip
WILDDASH_FINAL = {
    **dict.fromkeys((41, 43, 61, 64, 70, 74, 75, 76, 79), 0),
    **dict.fromkeys((52, 65, 77, 80), 1),
    56: 3, 45: 5, 46: 5, 78: 9, 47: 12, 48: 12, 49: 12, 58: 17,
}  # fmt: skip
TO_19 = {
    "CITYSCAPES": IDS_19,
    "GTA": IDS_19,
    "TRAIN_IDS": {train_id: train_id for train_id in range(19)},
    "SYNTHIA": {
        1: 10, 2: 2, 3: 0, 4: 1, 5: 4, 6: 8, 7: 5, 8: 13, 9: 7, 10: 11, 11: 18, 12: 17, 15: 6,
        16: 9, 17: 12, 18: 14, 19: 15, 20: 16, 21: 3,
    },
    "MAPILLARY": {
        13: 0, 24: 0, 41: 0, 2: 1, 15: 1, 17: 2, 6: 3, 3: 4, 45: 5, 47: 5, 48: 6, 50: 7, 30: 8,
        29: 9, 27: 10, 19: 11, 20: 12, 21: 12, 22: 12, 55: 13, 61: 14, 54: 15, 58: 16, 57: 17,
        52: 18,
    },
    "MAPILLARY_2": {
        21: 0, **dict.fromkeys((*range(35, 45), *range(46, 56), 57, 58, 74), 0),
        4: 1, 24: 1, 27: 2, 28: 2, 12: 3, 5: 4, 85: 5, 86: 5, 88: 5,
        **dict.fromkeys(range(90, 96), 6), 99: 7, 100: 7, 101: 7, 103: 7, 64: 8, 63: 9, 61: 10,
        30: 11, 31: 11, 32: 12, 33: 12, 34: 12, 108: 13, 114: 14, 107: 15, 111: 16, 110: 17,
        105: 18,
    },
    "IDD": {
        0: 0, 3: 1, 5: 9, 6: 11, 8: 12, 9: 17, 10: 18, 12: 13, 13: 14, 14: 15, 17: 16, 20: 3,
        21: 4, 24: 7, 25: 6, 26: 5, 29: 2, 32: 8, 33: 10,
    },
    "IDD_LEVEL3": {
        0: 0, 2: 1, 3: 9, 4: 11, 5: 12, 6: 17, 7: 18, 9: 13, 10: 14, 11: 15, 14: 3, 15: 4, 18: 7,
        19: 6, 20: 5, 22: 2, 24: 8, 25: 10,
    },
    "WILDDASH": {**IDS_19, **WILDDASH_FINAL, 34: 13, 35: 13, 38: 0},
    "WILDDASH_UNIFIED": {**IDS_19, **WILDDASH_FINAL, 34: 14, 35: 13, 38: 0},
}  # fmt: skip
EVERY_ID = {
    "CITYSCAPES": {*range(34), 255},
    "GTA": {*range(35)},
    "TRAIN_IDS": {*range(19), 255},
    "SYNTHIA": {*range(23)},
    "MAPILLARY": {*range(66)},
    "MAPILLARY_2": {*range(124)},
    "IDD": {*range(40)},
    "IDD_LEVEL3": {*range(26), 255},
    "WILDDASH": {*range(81)},
    "WILDDASH_UNIFIED": {*range(81)},
}
FROM_19_TO_16 = {
    0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7, 8: 8, 10: 9, 11: 10, 12: 11, 13: 12, 15: 13,
    17: 14, 18: 15,
}  # fmt: skip
SYNTHIA_TO_16 = {
    3: 0, 4: 1, 2: 2, 21: 3, 5: 4, 7: 5, 15: 6, 9: 7, 6: 8, 1: 9, 10: 10, 17: 11, 8: 12, 19: 13,
    12: 14, 11: 15,
}  # fmt: skip


def mapped(table: LabelTable, space: str) -> dict[int, int]:
    train_ids = table.lookup(class_space(space)).tolist()
    return {raw_id: train_id for raw_id, train_id in enumerate(train_ids) if train_id != 255}


@pytest.mark.parametrize("name", TO_19)
def test_raw_ids_have_the_train_ids_of_the_paper(name: str) -> None:
    assert mapped(getattr(tables, name), "cityscapes-19") == TO_19[name]


@pytest.mark.parametrize("name", TO_19)
def test_sixteen_classes_are_those_of_nineteen_counted_anew(name: str) -> None:
    expected = {raw: FROM_19_TO_16[old] for raw, old in TO_19[name].items() if old in FROM_19_TO_16}
    assert mapped(getattr(tables, name), "synthia-16") == expected


def test_synthia_has_the_sixteen_classes_of_the_released_code() -> None:
    assert mapped(tables.SYNTHIA, "synthia-16") == SYNTHIA_TO_16


@pytest.mark.parametrize("name", EVERY_ID)
def test_every_id_of_the_origin_is_there_with_its_name(name: str) -> None:
    table = getattr(tables, name)
    assert set(table.ids) == EVERY_ID[name]
    assert all(name for name, _ in table.ids.values())
    assert table.origin


def test_every_table_is_tested() -> None:
    found = {name for name, thing in vars(tables).items() if isinstance(thing, LabelTable)}
    assert found == set(TO_19) == set(EVERY_ID)


def test_every_class_is_one_of_the_nineteen() -> None:
    counted = {name for known in TO_19 for _, name in getattr(tables, known).ids.values()}
    assert counted - {None} == set(CITYSCAPES_19)


@pytest.mark.parametrize(
    ("table", "raw_id", "name"),
    [
        ("CITYSCAPES", 18, "polegroup"),
        ("CITYSCAPES", 30, "trailer"),
        ("GTA", 34, "license plate"),
        ("SYNTHIA", 14, "road-work"),
        ("MAPILLARY", 36, "Catch Basin"),
        ("MAPILLARY", 46, "Traffic Sign Frame"),
        ("MAPILLARY", 59, "Other Vehicle"),
        ("MAPILLARY", 65, "Unlabeled"),
        ("MAPILLARY_2", 45, "Lane Marking - Crosswalk"),
        ("MAPILLARY_2", 89, "Traffic Cone"),
        ("MAPILLARY_2", 123, "Unlabeled"),
        ("IDD", 11, "autorickshaw"),
        ("IDD", 39, "license plate"),
        ("IDD_LEVEL3", 12, "caravan, trailer, train, vehicle fallback"),
        ("WILDDASH", 31, "onrails"),
        ("WILDDASH", 58, "autorickshaw"),
        ("WILDDASH", 80, "curbcut"),
    ],
)
def test_ids_have_the_names_of_the_origin(table: str, raw_id: int, name: str) -> None:
    assert getattr(tables, table).ids[raw_id][0] == name


def test_level_3_of_idd_merges_its_ids() -> None:
    names = [name for name, _ in tables.IDD_LEVEL3.ids.values()]
    members = [member for name in names for member in name.split(", ")]
    void = {"ego vehicle", "rectification border", "out of roi", "license plate"}
    assert sorted(members) == sorted({name for name, _ in tables.IDD.ids.values()} - void)


def test_datasets_have_the_tables_that_they_should_have() -> None:
    used = {name: [la.table for la in about.layouts] for name, about in DATASETS.items()}
    assert used["gta"] == [tables.GTA] * 2
    assert used["bdd"] == [tables.TRAIN_IDS] * 3
    assert used["wilddash"] == [tables.WILDDASH]
    assert used["wilddash-unified"] == [tables.WILDDASH_UNIFIED]
    assert used["idd"] == [tables.TRAIN_IDS, tables.IDD, tables.IDD_LEVEL3, tables.IDD]
