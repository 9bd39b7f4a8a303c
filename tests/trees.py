"""Tiny datasets in the layouts of the real ones, with the faults that the real ones have."""

import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 6, 4


def write_image(path: Path, size: tuple[int, int] = (WIDTH, HEIGHT)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (10, 200, 30)).save(path)
    return path


def write_label(path: Path, ids: Sequence[int] = (7,), size: tuple[int, int] | None = None) -> Path:
    """Write an 8-bit gray label: the ids, one for each column, the last one for the rest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(columns(ids, size).astype(np.uint8)).save(path)
    return path


def columns(ids: Sequence[int], size: tuple[int, int] | None = None) -> np.ndarray:
    width, height = size or (WIDTH, HEIGHT)
    row = [*ids, *[ids[-1]] * width][:width]
    return np.array([row] * height, np.uint16)


def write_png(path: Path, samples: np.ndarray, depth: int, kind: int) -> Path:
    """Write a PNG byte by byte, from samples (H, W, channels), of any depth and colour type."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = b"".join(b"\0" + _packed(row.reshape(-1), depth) for row in samples)
    height, width = samples.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    palette = (
        _chunk(b"PLTE", bytes(value * 7 % 256 for value in range(3 * 2**depth)))
        if kind == 3
        else b""
    )
    data = _chunk(b"IHDR", header) + palette + _chunk(b"IDAT", zlib.compress(rows))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + data + _chunk(b"IEND", b""))
    return path


def _packed(row: np.ndarray, depth: int) -> bytes:
    if depth == 16:
        return row.astype(">u2").tobytes()
    bits = "".join(f"{value:0{depth}b}" for value in row)
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[start : start + 8], 2) for start in range(0, len(bits), 8))


def _chunk(kind: bytes, data: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + check


def write_synthia_label(path: Path, ids: Sequence[int], instance: int = 976) -> Path:
    """Write 16-bit RGB: the id of the class, the number of the thing, nothing."""
    first = columns(ids)
    samples = np.stack([first, np.full_like(first, instance), np.zeros_like(first)], -1)
    return write_png(path, samples, 16, 2)


def write_polygons(path: Path, objects: Sequence[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"imgWidth": WIDTH, "imgHeight": HEIGHT, "objects": list(objects)}))
    return path


def shape(label: str, left: int, right: int, **more: object) -> dict:
    """Return a polygon over whole columns, both ends included."""
    corners = [[left, 0], [right, 0], [right, HEIGHT], [left, HEIGHT]]
    return {"label": label, "polygon": corners, **more}


def cut_off(path: Path, length: int = 60) -> None:
    path.write_bytes(path.read_bytes()[:length])


def hidden(path: Path) -> None:
    """Put the file beside ``path`` that macOS leaves in archives."""
    path.with_name(f"._{path.name}").write_bytes(b"\0\5\x16\7")


def cityscapes_pair(
    root: Path, split: str, name: str, ids: Sequence[int] = (7,), kind: str = "labelIds"
) -> None:
    """Write name, such as bonn/bonn_000001, in the way of Cityscapes."""
    hidden(write_image(root / f"leftImg8bit/{split}/{name}_leftImg8bit.png"))
    hidden(write_label(root / f"gtFine/{split}/{name}_gtFine_{kind}.png", ids))


def cityscapes(root: Path) -> Path:
    """Two cities, written in disorder; beside labelIds lie files that are not labels."""
    for name in ("lindau/lindau_000010", "lindau/lindau_000009", "bonn/bonn_000001"):
        cityscapes_pair(root, "val", name, (0, 7, 11, 33))
        write_label(root / f"gtFine/val/{name}_gtFine_instanceIds.png", (26,))
        write_image(root / f"gtFine/val/{name}_gtFine_color.png")
    cityscapes_pair(root, "train", "ulm/ulm_000001", (8,))
    cityscapes_pair(root, "test", "berlin/berlin_000001", (3,))
    return root


def gta(root: Path) -> Path:
    """The download: flat folders, one pair of two sizes, a label in a palette."""
    for number in (3, 1, 10, 2, 4):
        write_image(root / f"images/{number:05}.png")
        write_label(root / f"labels/{number:05}.png", (7, 34))
    write_label(root / "labels/00004.png", (7,), (HEIGHT, WIDTH))
    write_png(root / "labels/00002.png", columns((5, 8, 11))[..., None], 4, 3)
    return root


def gta_split_file(root: Path) -> Path:
    from scipy.io import savemat

    lists = {"trainIds": [[1], [2], [4]], "valIds": [[3]], "testIds": [[10]]}
    savemat(root / "split.mat", lists)
    return root


def gta_released(root: Path) -> Path:
    for split, number in (("train", 2), ("train", 1), ("val", 3)):
        write_image(root / f"images/{split}/{number:05}.png")
        write_label(root / f"labels/{split}/{number:05}.png")
    return root


def synthia(root: Path) -> Path:
    for number, ids in ((2, (3, 22)), (1, (1, 2, 10))):
        write_image(root / f"RGB/{number:07}.png")
        write_synthia_label(root / f"GT/LABELS/{number:07}.png", ids)
        write_image(root / f"GT/COLOR/{number:07}.png")
    return root


def wilddash(root: Path, ids: Sequence[int] = (7, 34, 35, 36, 37, 38)) -> Path:
    """The beta has ids to 38; the final version is the same tree with ids to 80."""
    for name in ("zm0002_100000", "ar0001_100000"):
        write_image(root / f"images/{name}.jpg")
        write_label(root / f"labels/{name}.png", ids)
        write_image(root / f"panoptic/{name}.png")
    return root


def bdd(root: Path) -> Path:
    """The first archives: an image without label, a label without image."""
    for split, name in (("val", "b1"), ("val", "a2"), ("train", "c3")):
        write_image(root / f"images/10k/{split}/{name}.jpg")
        write_label(root / f"labels/sem_seg/masks/{split}/{name}.png", (0, 18, 255))
        write_image(root / f"labels/sem_seg/colormaps/{split}/{name}.png")
    write_image(root / "images/10k/val/80a9e37d-e4548ac1.jpg")
    write_label(root / "labels/sem_seg/masks/val/ff55861e-a06b953c.png", (0,))
    return root


def bdd_released(root: Path) -> Path:
    for name in ("b1", "a2"):
        write_image(root / f"images/val/{name}.jpg")
        write_label(root / f"labels/val/{name}_train_id.png", (0, 18, 255))
    return root


def idd_images(root: Path) -> Path:
    """Part I has PNG images, part II JPEG; the folders are numbers without zeros in front."""
    write_image(root / "leftImg8bit/val/10/frame0029_leftImg8bit.png")
    write_image(root / "leftImg8bit/val/9/0003438_leftImg8bit.jpg")
    return root


def idd_labels(root: Path, kind: str, ids: Sequence[int]) -> Path:
    for name in ("10/frame0029", "9/0003438"):
        write_label(root / f"gtFine/val/{name}_gtFine_label{kind}.png", ids)
    return root


def idd_polygons(root: Path) -> Path:
    """The download: polygons only, of which one is deleted, one is empty, one is a group."""
    objects = [
        shape("sky", 0, 5),
        shape("non-drivable fallback", 0, 3),
        shape("road", 0, 0),
        shape("car", 4, 5, deleted=1),
        {"label": "pole", "polygon": [], "deleted": 0},
        shape("cargroup", 2, 2, deleted=0),
        shape("polegroup", 3, 3),
    ]
    for name in ("10/frame0029", "9/0003438"):
        write_polygons(root / f"gtFine/val/{name}_gtFine_polygons.json", objects)
    return root


def mapillary(root: Path, labels: str, ids: Sequence[int]) -> Path:
    """Labels, such as v1.2/labels, of one package; images are in their place already or not."""
    for name in ("b_-2", "a_-1"):
        write_image(root / f"validation/images/{name}.jpg")
        write_label(root / f"validation/{labels}/{name}.png", ids)
    return root


def acdc(root: Path, kind: str = "labelIds", ids: Sequence[int] = (0, 7, 33)) -> Path:
    for place in ("fog/val/GOPR1", "night/val/GP010", "fog/train/GOPR2"):
        name = f"{place}/{place.rsplit('/')[-1]}_frame_000041"
        write_image(root / f"rgb_anon/{name}_rgb_anon.png")
        write_label(root / f"gt/{name}_gt_{kind}.png", ids)
    write_image(root / "rgb_anon/fog/val_ref/GOPR1/GOPR1_frame_000041_rgb_ref_anon.png")
    write_image(root / "rgb_anon/fog/test/GOPR3/GOPR3_frame_000041_rgb_anon.png")
    return root


def folder(root: Path) -> Path:
    """Images of your own, of several kinds, one of them deeper."""
    for name in ("train/img10.jpg", "train/img9.PNG", "val/day/a.webp"):
        write_image(root / "images" / name)
        write_label((root / "labels" / name).with_suffix(".png"), (0, 1, 2, 255))
    (root / "classes.txt").write_text("road\ncow\nsky\n")
    return root
