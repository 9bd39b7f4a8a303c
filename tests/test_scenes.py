"""Scenes: adapted to once, segmented in tiles, read and written with their georeference."""

import csv
import math
import os
import shutil
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage
from torch import Tensor, nn

import selfadapt
from conftest import TinyNet, needs_data, random_image, seeded
from networks import NETWORKS
from runs import run_cli, start_cli
from selfadapt.images import to_pil
from selfadapt.predict import LargeImages, segment_scene
from selfadapt.scenes import (
    PictureReader,
    RasterReader,
    TileCanvas,
    TileGrid,
    Window,
    sample,
    segment_tiles,
)
from selfadapt.streets import render

rasterio = pytest.importorskip("rasterio")
NET = ("--model", "streets", "--device", "cpu")
SAN = (*NET, "--method", "san", "--max-pixels", 20_000, "--large", "tiles")


def label_of(path: Path) -> np.ndarray:
    with PILImage.open(path) as picture:
        return np.asarray(picture)


def street(rows: int = 2, columns: int = 2, look: str = "haze") -> Tensor:
    """Return rendered streets side by side, lit from dark on the left to bright on the right."""
    parts = [
        [render(look, seed=10 * y + x, height=128, width=256)[0] for x in range(columns)]
        for y in range(rows)
    ]
    image = np.concatenate([np.concatenate(line, axis=1) for line in parts])
    light = np.linspace(0.5, 1, image.shape[1])[:, None]
    return torch.from_numpy((image * light).astype(np.uint8)).permute(2, 0, 1)


def write_raster(path: Path, image: Any, **options: Any) -> Path:
    image = np.asarray(image)
    options = {
        "driver": "GTiff", "crs": "EPSG:32632", "dtype": image.dtype, "count": len(image),
        "transform": rasterio.transform.from_origin(5e5, 5.2e6, 0.5, 0.5),
        "height": image.shape[1], "width": image.shape[2], **options,
    }  # fmt: skip
    with rasterio.open(path, "w", **options) as dataset:
        dataset.write(image)
    return path


# tiles


@given(
    length=st.integers(1, 700), tile=st.integers(128, 300), overlap=st.integers(8, 100),
    alignment=st.sampled_from([1, 8, 32]),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_weights_of_tiles_sum_up_to_one(
    length: int, tile: int, overlap: int, alignment: int
) -> None:
    grid = TileGrid((length, 1), (tile, 1 + tile), overlap, alignment)
    overlap = min(overlap, 3 * tile // 8)
    total = torch.zeros(length)
    for span in grid.rows:
        assert span.start % alignment == 0
        assert span.start <= span.first < span.last <= min(span.stop, length)
        total[span.first : span.last] += span.weights()
    torch.testing.assert_close(total, torch.ones(length))
    if len(grid.rows) > 1:
        inner = [span.stop - span.last for span in grid.rows[:-1]]
        assert min(inner) >= overlap // 4  # what the network knows least is unused


def test_tiles_are_blended_as_their_weighted_mean(tmp_path: Path) -> None:
    """The canvas holds strips of tiles; the reference holds all of the scene."""
    grid = TileGrid((150, 210), (64, 96), overlap=32, alignment=8)
    expected = torch.zeros(3, 150, 210)
    canvas = TileCanvas(tmp_path, grid, 3)
    for index in range(len(grid)):
        probs = random_image(64, 96, seed=index).softmax(dim=0)
        (rows, columns), window = grid.spans(index), grid.window(index)
        weights = rows.weights()[:, None] * columns.weights()
        y, x = slice(rows.first, rows.last), slice(columns.first, columns.last)
        inner = probs[:, rows.first - window.top :, columns.first - window.left :]
        expected[:, y, x] += inner[:, : len(weights), : len(weights[0])] * weights
        canvas = TileCanvas(tmp_path, grid, 3) if index % 2 == 0 else canvas  # as after a kill
        canvas.add(probs)
    confidence, label = expected.max(dim=0)
    assert np.array_equal(canvas.label, label)
    assert np.abs(canvas.confidence - (confidence * 255).numpy()).max() <= 0.51


class MeanNet(nn.Module):
    """Says how bright the surroundings of each pixel are."""

    interface = selfadapt.Interface(mean=(0.0,) * 3, std=(1.0,) * 3, divisor=1)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 9, padding=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


def test_tiles_equal_the_whole_image_where_the_network_sees_as_much(tmp_path: Path) -> None:
    method = selfadapt.create_method("source", seeded(MeanNet))
    image = random_image(300, 410)
    maps = segment_tiles(method, PictureReader(image), tmp_path / "work", tile=128)
    assert np.array_equal(maps.label, method(image).label)
    assert maps.notes[-1] == "segmented in 24 tiles of 128x128 pixels"


# adapted to once


@pytest.mark.parametrize("mode", ["paper", "official", "auto"])
def test_tiles_agree_with_the_whole_image(mode: Any, tmp_path: Path) -> None:
    """The image fits whole: the network adapts to all of it, and is then used on tiles."""
    image = street(rows=3)
    model = selfadapt.open_model("streets")
    method = selfadapt.SelfAdapt(model, mode=mode, steps=2, compare=False)
    maps = segment_tiles(method, PictureReader(image), tmp_path / "work", tile=320, overlap=160)
    assert maps.notes[-1] == "adapted to once, and segmented in 4 tiles of 320x320 pixels"
    whole = (method.adapt(image) if mode == "auto" else method)(image)
    assert np.mean(maps.label == whole.label.numpy()) >= 0.99


def steps_at_borders(confidence: np.ndarray, grid: TileGrid) -> float:
    """Return how much confidences change where tiles meet, relative to elsewhere."""
    changes = np.abs(np.diff(confidence.astype(int))).mean(axis=0)
    middles = [(left.last + right.first) // 2 - 1 for left, right in pairwise(grid.columns)]
    return float(changes[middles].mean() / changes.mean())


def test_no_seams_unlike_tiles_that_adapt_by_themselves(tmp_path: Path) -> None:
    image = random_image(256, 1024) * torch.linspace(0.1, 1, 1024)
    method = selfadapt.create_method("p-bn", seeded(lambda: TinyNet(4)))
    maps = segment_tiles(method, PictureReader(image), tmp_path / "work", tile=288, overlap=96)
    grid = TileGrid((256, 1024), (288, 288), overlap=96)
    alone = []
    for index, columns in enumerate(grid.columns):
        confidence = method(image[:, *grid.window(index).slices]).confidence
        first = columns.first if columns.is_first else columns.first + grid.blend // 2
        last = columns.last if columns.is_last else columns.last - (grid.blend + 1) // 2
        alone.append((confidence * 255).byte()[:, first - columns.start : last - columns.start])
    assert steps_at_borders(maps.confidence, grid) < 1.3
    assert steps_at_borders(np.concatenate(alone, axis=1), grid) > 2


@pytest.mark.parametrize(
    "network", ["smp Unet", "smp Unet binary", "hf SegFormer", "toy four channels", "toy"]
)
def test_any_network_segments_tiles(network: str, tmp_path: Path) -> None:
    case = NETWORKS[network]
    method = selfadapt.SelfAdapt(seeded(case.build), steps=1, max_pixels=20_000)
    image = random_image(150, 170, case.channels)
    maps = segment_tiles(method, PictureReader(image, case.channels), tmp_path / "work")
    assert maps.label.shape == (150, 170)
    assert maps.num_classes == case.classes
    assert maps.label.max() < case.classes


def test_a_network_of_one_size_gets_tiles_of_that_size(tmp_path: Path) -> None:
    model = seeded(lambda: TinyNet(4))
    interface = selfadapt.Interface(size=(64, 96), mean=(0.5,) * 3, std=(0.5,) * 3)
    method = selfadapt.create_method("san", model, interface=interface)
    maps = segment_tiles(method, PictureReader(random_image(150, 200)), tmp_path / "work")
    assert maps.notes[-1].endswith("tiles of 96x64 pixels")


def test_the_sample_has_windows_of_the_whole_scene() -> None:
    image = torch.zeros(3, 1200, 2400)
    image[0] = torch.linspace(0, 1, 2400)
    image[1] = torch.linspace(0, 1, 1200)[:, None]
    windows = sample(PictureReader(image), max_pixels=4 * 512 * 512)
    assert windows.shape == (3, 512, 2048)
    assert [round(float(x), 1) for x in windows[0].reshape(512, 4, 512).mean(dim=(0, 2))] == [
        0.1, 0.4, 0.6, 0.9,
    ]  # fmt: skip
    assert float(windows[1].mean()) == pytest.approx(0.5, abs=0.01)
    assert torch.equal(sample(PictureReader(image), max_pixels=1200 * 2400), image)


def test_the_sample_leaves_out_what_has_no_data() -> None:
    class Half(PictureReader):
        def valid(self, window: Window, size: Any = None) -> Tensor:
            size = size or window[2:]
            x = (torch.arange(size[1]) / size[1] * window.width + window.left) >= 1200
            return x.expand(size)

    image = torch.zeros(3, 1200, 2400)
    image[:, :, 1200:] = 1
    assert float(sample(Half(image), max_pixels=4 * 512 * 512).mean()) == 1


def test_methods_of_several_predictions(tmp_path: Path) -> None:
    model = seeded(lambda: TinyNet(4))
    image = to_pil(random_image(60, 80))
    tta = selfadapt.create_method("tta", model, max_pixels=1000)
    with pytest.raises(ValueError, match="averages several predictions"):
        segment_scene(tta, image, tmp_path, large="tiles")
    result = segment_scene(tta, image, tmp_path, large="shrink")
    assert "segmented at 36x27, the image is 80x60" in result.notes
    dropout = selfadapt.create_method("mc-dropout", model, max_pixels=20_000, passes=2)
    large = to_pil(random_image(150, 170))
    assert segment_scene(dropout, large, tmp_path / "other").notes[0].startswith("segmented in")
    few = selfadapt.create_method("san", model, max_pixels=1000)
    with pytest.raises(ValueError, match="tiles need max_pixels of 16384 or more"):
        segment_scene(few, image, tmp_path / "few")


# files


def test_a_large_picture_through_predict(tmp_path: Path, capsys: Any) -> None:
    photo = tmp_path / "a.png"
    to_pil(street() / 255).save(photo)
    small = tmp_path / "b.png"
    to_pil(random_image(32, 48)).save(small)
    out = tmp_path / "out"
    assert run_cli("predict", photo, small, *SAN, "-o", out) == 0
    assert "adapted to once, and segmented in" in capsys.readouterr().err
    with (out / "predictions.csv").open() as file:
        rows = {Path(row["file"]).name: row for row in csv.DictReader(file)}
    assert rows["a.png"]["width"] == "512"
    assert "tiles" in rows["a.png"]["notes"]
    assert rows["b.png"]["notes"] == ""
    assert label_of(out / "a_label.png").shape == (256, 512)
    assert label_of(out / "a_overlay.png").shape == (256, 512, 3)
    assert not (out / ".predict/tiles/a").exists()
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.png")}
    assert run_cli("predict", photo, small, *SAN, "-o", out) == 0
    assert before == {path: path.stat().st_mtime_ns for path in out.glob("*.png")}

    shrunk = tmp_path / "shrunk"
    assert run_cli("predict", photo, *SAN, "--large", "shrink", "-o", shrunk) == 0
    assert "segmented at 200x100, the image is 512x256" in capsys.readouterr().err
    assert run_cli("predict", photo, *SAN, "--large", "shrink", "-o", out) == 2
    assert "large" in capsys.readouterr().err


def test_official_mode_scales_down_as_the_released_code_does(tmp_path: Path, capsys: Any) -> None:
    photo = tmp_path / "a.png"
    PILImage.fromarray(np.zeros((2100, 4200, 3), np.uint8)).save(photo)
    words = (*NET, "--method", "source", "--mode", "official", "--outputs", "label")
    assert run_cli("predict", photo, *words, "-o", tmp_path / "out") == 0
    assert "segmented at 2048x1024" in capsys.readouterr().err


def test_killed_in_the_middle_it_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    photo = tmp_path / "scene.png"
    to_pil(street(rows=3, columns=4) / 255).save(photo)
    words = (
        "predict", photo, *NET, "--mode", "paper", "--steps", 2, "--max-pixels", 20_000,
        "--large", "tiles",
    )  # fmt: skip
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start_cli(*words, "-o", killed)
    done = killed / ".predict/tiles/scene/done"
    until = time.monotonic() + 120
    while not (done.is_file() and int(done.read_text() or 0) >= 4):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    tiles = int(done.read_text())
    assert not (killed / "scene_label.png").exists()
    adapted = (killed / ".predict/tiles/scene/adapted.safetensors").stat().st_mtime_ns
    again = start_cli(*words, "-o", killed)
    while again.poll() is None and done.is_file():
        state = killed / ".predict/tiles/scene/adapted.safetensors"
        with_state = state.stat().st_mtime_ns if state.is_file() else adapted
        assert with_state == adapted
        time.sleep(0.05)
    assert again.wait() == 0
    again.communicate()
    process = start_cli(*words, "-o", whole)
    process.communicate()
    assert tiles < 30
    for name in ("scene_label.png", "scene_confidence.png", "scene_color.png"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


def test_a_scene_that_changed_is_done_again(tmp_path: Path) -> None:
    method = selfadapt.create_method("san", selfadapt.open_model("streets"), max_pixels=20_000)
    work = tmp_path / "work"
    first = segment_tiles(method, PictureReader(random_image(160, 200)), work, stamp="1")
    first_label = np.array(first.label)
    again = segment_tiles(method, PictureReader(random_image(160, 200, seed=1)), work, stamp="1")
    assert np.array_equal(again.label, first_label)  # as it was done
    other = segment_tiles(method, PictureReader(random_image(160, 200, seed=1)), work, stamp="2")
    assert not np.array_equal(other.label, first_label)


# georeferenced


def test_geotiff_in_geotiff_out(tmp_path: Path) -> None:
    image = street().numpy()
    levels = np.concatenate(
        [image.astype(np.uint16) * 20 + 300, np.full((1, 256, 512), 7, np.uint16)]
    )
    levels[:, :40, :60] = 0
    path = write_raster(tmp_path / "scene.tif", levels, nodata=0)
    out = tmp_path / "out"
    words = (*SAN, "--bands", 1, 2, 3, "--outputs", "label", "confidence", "color")
    assert run_cli("predict", path, *words, "-o", out) == 0
    with rasterio.open(path) as scene, rasterio.open(out / "scene_label.tif") as label:
        assert (label.crs, label.transform, label.shape) == (
            scene.crs,
            scene.transform,
            scene.shape,
        )
        assert label.nodata == 255
        assert label.compression.name == "deflate"
        assert label.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG"
        assert label.colormap(1)[0][:3] == (128, 64, 128)
        values = label.read(1)
    assert (values[:40, :60] == 255).all()
    assert (values[40:] < 9).all()
    names = selfadapt.open_model("streets").spec.classes
    text = (out / "scene_label.tif.aux.xml").read_text()
    assert all(f"<Category>{name}</Category>" in text for name in names)
    if shutil.which("gdalinfo"):
        info = subprocess.run(
            ["gdalinfo", str(out / "scene_label.tif")], capture_output=True, text=True, check=True
        ).stdout
        assert "0: road" in info
        assert "LAYOUT=COG" in info
        assert "UTM zone 32N" in info
    with rasterio.open(out / "scene_confidence.tif") as confidence:
        assert confidence.nodata == 0
        assert (confidence.read(1)[:40, :60] == 0).all()
    with (out / "predictions.csv").open() as file:
        (row,) = csv.DictReader(file)
    shares = [float(value) for name, value in row.items() if name.startswith("share_")]
    assert sum(shares) == pytest.approx(1, abs=1e-4)
    assert "percentiles" in row["notes"]
    assert run_cli("predict", path, *words, "--overwrite", "-o", out) == 0
    assert (out / "scene_label.tif.aux.xml").exists()


def test_a_geotiff_that_fits_is_segmented_like_a_picture(tmp_path: Path) -> None:
    image = street(rows=1, columns=1).numpy()
    path = write_raster(tmp_path / "small.tif", image)
    method = selfadapt.create_method("san", selfadapt.open_model("streets"))
    result = segment_scene(method, path, tmp_path / "out", outputs=("label", "probs", "overlay"))
    expected = method(torch.from_numpy(image)).label
    with rasterio.open(result.paths["label"]) as label:
        assert np.array_equal(label.read(1), expected)
    assert np.load(result.paths["probs"])["probs"].shape == (9, 128, 256)
    assert result.notes == ()


def test_tiles_of_a_geotiff_are_those_of_a_picture(tmp_path: Path) -> None:
    image = street()
    path = write_raster(tmp_path / "scene.tif", image.numpy())
    method = selfadapt.create_method("san", selfadapt.open_model("streets"), max_pixels=20_000)
    first = segment_tiles(method, RasterReader(path), tmp_path / "a")
    second = segment_tiles(method, PictureReader(image), tmp_path / "b")
    assert np.mean(first.label == second.label) > 0.999


def test_bands(tmp_path: Path) -> None:
    levels = np.stack([np.full((8, 8), 10 * band, np.uint8) for band in range(1, 6)])
    path = write_raster(tmp_path / "five.tif", levels)
    whole = Window(0, 0, 8, 8)
    assert (RasterReader(path, bands=(4, 3, 2)).read(whole)[:, 0, 0] * 255).round().tolist() == [
        40,
        30,
        20,
    ]
    scene = RasterReader(path)
    assert (scene.read(whole)[:, 0, 0] * 255).round().tolist() == [10, 20, 30]
    assert "5 bands, and 1, 2, 3 are taken" in scene.notes[0]
    assert RasterReader(path, channels=5).read(whole).shape == (5, 8, 8)
    for bands, error in (((1, 2), "must name 3 bands"), ((1, 2, 6), "must be from 1 to 5")):
        with pytest.raises(ValueError, match=error):
            RasterReader(path, bands=bands)
    with pytest.raises(ValueError, match="has 5 bands, and the network takes 6"):
        RasterReader(path, channels=6)
    bgr = write_raster(tmp_path / "bgr.tif", levels[:3], photometric="MINISBLACK")
    with rasterio.open(bgr, "r+") as dataset:
        kinds = rasterio.enums.ColorInterp
        dataset.colorinterp = (kinds.blue, kinds.green, kinds.red)
    assert RasterReader(bgr).bands == (3, 2, 1)
    gray = write_raster(tmp_path / "gray.tif", levels[:1])
    assert RasterReader(gray).read(whole).shape == (3, 8, 8)


@pytest.mark.parametrize("dtype", ["uint16", "int16", "float32", "float64"])
def test_values_are_scaled_by_percentiles_of_the_scene(dtype: str, tmp_path: Path) -> None:
    levels = np.random.default_rng(0).uniform(-500 if dtype != "uint16" else 0, 4000, (3, 64, 64))
    levels[0] *= 2
    if "float" in dtype:
        levels[:, 0, 0] = np.nan
    path = write_raster(tmp_path / "scene.tif", levels.astype(dtype))
    image = RasterReader(path).read(Window(0, 0, 64, 64))
    assert image.isfinite().all()
    assert image.min() == 0
    assert image.max() == 1
    for channel in image:
        assert 0.01 < float((channel == 0).float().mean()) < 0.03
        assert 0.01 < float((channel == 1).float().mean()) < 0.03


def test_rasters_that_cannot_be_read(tmp_path: Path, capsys: Any) -> None:
    good = write_raster(tmp_path / "good.tif", street().numpy())
    cut = tmp_path / "cut.tif"
    cut.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    empty = write_raster(tmp_path / "empty.tif", np.zeros((3, 64, 64), np.uint16), nodata=0)
    bands = write_raster(tmp_path / "bands.tif", np.zeros((2, 64, 64), np.uint16))
    words = (*SAN, "-o", tmp_path / "out", "--json")
    assert run_cli("predict", cut, empty, bands, good, *words) == 1
    captured = capsys.readouterr()
    assert "cut.tif cannot be read" in captured.err
    assert '"done": 3' in captured.out
    with rasterio.open(tmp_path / "out/empty_label.tif") as label:
        assert (label.read(1) == 255).all()
    assert run_cli("predict", good, *SAN, "--bands", 1, 2, "-o", tmp_path / "other") == 2
    assert "--bands must name 3 bands" in capsys.readouterr().err
    assert run_cli("predict", good, *SAN, "--bands", 1, 2, 9, "-o", tmp_path / "other") == 1
    assert "--bands must be from 1 to 3" in capsys.readouterr().err
    assert run_cli("predict", good, *SAN, "--large", "never", "-o", tmp_path / "other2") == 2


def test_other_formats_of_gdal_are_not_opened(tmp_path: Path) -> None:
    """A virtual raster names other files, which would be read."""
    secret = write_raster(tmp_path / "secret.tif", street().numpy())
    virtual = tmp_path / "scene.tif"
    virtual.write_text(
        f'<VRTDataset rasterXSize="512" rasterYSize="256"><VRTRasterBand dataType="Byte" band="1">'
        f"<SimpleSource><SourceFilename>{secret}</SourceFilename><SourceBand>1</SourceBand>"
        f"</SimpleSource></VRTRasterBand></VRTDataset>"
    )
    with pytest.raises(ValueError, match="cannot be read"):
        RasterReader(virtual)


def test_without_rasterio_a_geotiff_is_a_picture(tmp_path: Path, monkeypatch: Any) -> None:
    path = write_raster(tmp_path / "scene.tif", street(1, 1).numpy())
    monkeypatch.setattr("selfadapt.scenes.reading.find_spec", lambda name: None)
    assert run_cli("predict", path, *SAN, "-o", tmp_path / "out") == 0
    assert label_of(tmp_path / "out/scene_label.png").shape == (128, 256)


@pytest.mark.slow
def test_photographs_in_tiles_lose_nothing(tmp_path: Path) -> None:
    """DeepLabv1 of CARLA on CamVid images at twice their size, in tiles and whole."""
    weights = needs_data("street", "weights", "deeplabv1_resnet50_carla.safetensors")
    photo = sorted(needs_data("street", "camvid", "images").iterdir())[0]
    options = {"style": "caffe", "dilation": "released"}
    model = selfadapt.create_model(
        "deeplabv1_resnet50", classes="cityscapes-19", weights=weights, **options
    )
    with PILImage.open(photo) as picture:
        image = picture.convert("RGB").resize((640, 480))
    method = selfadapt.create_method("san", model, compare=False)
    maps = segment_tiles(method, PictureReader(image), tmp_path / "work", tile=512)
    assert np.mean(maps.label == method(image).label.numpy()) >= 0.99


def test_a_call_goes_on_only_with_the_same_image_and_settings(
    tmp_path: Path, monkeypatch: Any
) -> None:
    photos = [tmp_path / "a.png", tmp_path / "b.png"]
    for seed, path in enumerate(photos):
        to_pil(random_image(200, 300, seed=seed)).save(path)
    model = selfadapt.open_model("streets")
    added: list[int] = []
    real = TileCanvas.add

    def add(canvas: TileCanvas, probs: Tensor) -> None:
        if len(added) == 3:
            raise KeyboardInterrupt
        real(canvas, probs)
        added.append(1)

    def tiles(image: Any, alpha: float, stop: bool = False) -> int:
        """Return the number of tiles that were segmented by a call."""
        added[:] = [] if stop else [1] * 10
        method = selfadapt.create_method("san", model, max_pixels=20_000, alpha=alpha)
        try:
            segment_scene(method, image, tmp_path / "out", name="x", overwrite=True)
        except KeyboardInterrupt:
            return len(added)
        return len(added) - 10

    monkeypatch.setattr(TileCanvas, "add", add)
    total = tiles(photos[0], 0.1)
    for image in (photos[0], random_image(200, 300)):
        assert tiles(image, 0.1, stop=True) == 3
        is_file = isinstance(image, Path)
        assert tiles(image, 0.1) == (total - 3 if is_file else total)
    for other, alpha in ((photos[0], 0.2), (photos[1], 0.1)):
        assert tiles(photos[0], 0.1, stop=True) == 3
        assert tiles(other, alpha) == total


def test_few_pixels_asked_for_speed_do_not_mean_tiles() -> None:
    model = selfadapt.open_model("streets")
    few = selfadapt.create_method("san", model, max_pixels=20_000)
    many = selfadapt.create_method("san", model, max_pixels=4_000_000)
    ensemble = selfadapt.create_method("ensemble", [model, model])
    assert LargeImages(few).max_pixels() == 4 * 1024 * 2048
    assert LargeImages(few, "tiles").max_pixels() == 20_000
    assert LargeImages(few, "shrink").max_pixels() == math.inf
    assert LargeImages(many).max_pixels() == 16_000_000
    assert LargeImages(ensemble).max_pixels() == math.inf
    with pytest.raises(ValueError, match="needs a method whose prediction is that of one network"):
        LargeImages(ensemble, "tiles")


def test_an_ensemble_keeps_the_georeference(tmp_path: Path) -> None:
    path = write_raster(tmp_path / "scene.tif", street(1, 1).numpy())
    words = ("--model", "streets", *NET, "--method", "ensemble", "--outputs", "label")
    assert run_cli("predict", path, *words, "-o", tmp_path / "out") == 0
    with rasterio.open(tmp_path / "out/scene_label.tif") as label:
        assert label.crs.to_epsg() == 32632


def test_what_counts_as_no_data(tmp_path: Path) -> None:
    """A pixel with data in one band counts; one that is not finite does not."""
    levels = street(1, 1).numpy()
    levels[0, :30, :30], levels[:, 60:90, :30] = 0, 0
    valid = RasterReader(write_raster(tmp_path / "byte.tif", levels, nodata=0)).valid(
        Window(0, 0, 128, 256)
    )
    assert valid is not None
    assert valid[:30, :30].any()
    assert not valid[60:90, :30].any()
    values = levels.astype(np.float32)
    values[0, :30, :30] = np.nan
    valid = RasterReader(write_raster(tmp_path / "float.tif", values)).valid(Window(0, 0, 40, 40))
    assert valid is not None
    assert not valid[:30, :30].any()
    assert valid[30:].all()


def test_a_palette_is_refused(tmp_path: Path) -> None:
    path = write_raster(tmp_path / "palette.tif", np.zeros((1, 8, 8), np.uint8))
    with rasterio.open(path, "r+") as dataset:
        dataset.write_colormap(1, {0: (9, 8, 7, 255)})
    with pytest.raises(ValueError, match="the indices of a palette"):
        RasterReader(path)


def test_a_shrunken_scene_has_maps_of_its_size(tmp_path: Path) -> None:
    path = write_raster(tmp_path / "scene.tif", street(1, 1).numpy())
    method = selfadapt.create_method("san", selfadapt.open_model("streets"), max_pixels=9000)
    outputs = ("label", "probs", "panel")
    result = segment_scene(method, path, tmp_path / "out", outputs=outputs, large="shrink")
    assert np.load(result.paths["probs"])["probs"].shape == (9, 128, 256)
    with PILImage.open(result.paths["panel"]) as panel:
        shown = np.asarray(panel.convert("RGB"))[40:120, 256:512]
    assert shown.max() > 0, "as trained"


def test_nothing_of_the_user_is_replaced(tmp_path: Path, capsys: Any) -> None:
    path = write_raster(tmp_path / "scene.tif", street(1, 1).numpy())
    out = tmp_path / "out"
    out.mkdir()
    method = selfadapt.create_method("san", selfadapt.open_model("streets"))
    for name in ("scene_label.tif.aux.xml", "classes.json"):
        (out / name).write_text("mine")
        with pytest.raises(FileExistsError, match="would be replaced"):
            segment_scene(method, path, out, outputs="label")
        assert run_cli("predict", path, *NET, "--method", "san", "-o", out) == 2
        assert "would be replaced" in capsys.readouterr().err
        assert (out / name).read_text() == "mine"
        (out / name).unlink()
    for wrong in ({"name": "../other"}, {"large": "never"}, {"outputs": "mask"}):
        with pytest.raises(ValueError, match="must be|unknown output"):  # noqa: RUF043
            segment_scene(method, path, out, **wrong)


def test_a_full_disk_stops_a_run(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    path = write_raster(tmp_path / "scene.tif", street(1, 1).numpy())

    def fail(*_: Any, **__: Any) -> None:
        raise rasterio.errors.RasterioIOError("no space left")

    monkeypatch.setattr("rasterio.shutil.copy", fail)
    words = ("predict", path, *NET, "--method", "san", "--outputs", "label")
    assert run_cli(*words, "-o", tmp_path / "out") == 2
    assert "scene_label.tif could not be written (no space left)" in capsys.readouterr().err
    monkeypatch.undo()
    assert run_cli(*words, "-o", tmp_path / "out") == 0  # it goes on
