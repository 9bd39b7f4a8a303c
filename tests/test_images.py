import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from conftest import random_image
from selfadapt.images import colored, load_image, overlay, rescale, to_pil
from selfadapt.modes import within_budget


@pytest.fixture
def levels() -> np.ndarray:
    return (random_image(6, 9).permute(1, 2, 0) * 255).round().byte().numpy()


def test_every_form_of_an_image_is_the_same_image(levels: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    PILImage.fromarray(levels).save(path)
    expected = torch.from_numpy(levels).permute(2, 0, 1) / 255
    forms = {
        "path": path,
        "string": str(path),
        "PIL": PILImage.fromarray(levels),
        "uint8 array": levels,
        "float array": levels / 255,
        "uint16 array": levels.astype(np.uint16) * 257,
        "uint8 tensor": torch.from_numpy(levels).permute(2, 0, 1),
        "float tensor": expected,
        "batch of one": expected[None],
        "half tensor": expected.half(),
    }
    for name, form in forms.items():
        loaded = load_image(form)
        assert loaded.dtype == torch.float32
        atol = 1e-3 if name == "half tensor" else 1e-6
        torch.testing.assert_close(loaded, expected, atol=atol, rtol=0, msg=name)


def test_gray_files_serve_colour_networks(tmp_path: Path) -> None:
    gray = np.arange(54, dtype=np.uint8).reshape(6, 9) * 4
    expected = torch.from_numpy(gray / 255).float().expand(3, -1, -1)
    for name, picture in {
        "L": PILImage.fromarray(gray),
        "LA": PILImage.merge("LA", [PILImage.fromarray(gray), PILImage.new("L", (9, 6), 255)]),
        "I;16": PILImage.fromarray(gray.astype(np.uint16) * 257),
        "I": PILImage.fromarray(gray.astype(np.int32) * 257),
        "F": PILImage.fromarray((gray / 255).astype(np.float32)),
        "1": PILImage.fromarray(np.where(gray > 100, 255, 0).astype(np.uint8)).convert("1"),
    }.items():
        loaded = load_image(picture)
        assert tuple(loaded.shape) == (3, 6, 9)
        if name != "1":
            torch.testing.assert_close(loaded, expected, atol=1e-4, rtol=0, msg=name)
    PILImage.fromarray(gray.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    torch.testing.assert_close(load_image(tmp_path / "deep.png"), expected, atol=1e-4, rtol=0)


def test_palettes_are_resolved(levels: np.ndarray, tmp_path: Path) -> None:
    PILImage.fromarray(levels).quantize(256).save(tmp_path / "palette.png")
    expected = torch.from_numpy(levels).permute(2, 0, 1) / 255
    loaded = load_image(tmp_path / "palette.png")
    torch.testing.assert_close(loaded, expected, atol=0.05, rtol=0)


def test_transparency_is_laid_on_white(levels: np.ndarray) -> None:
    opaque = np.dstack([levels, np.full((6, 9), 255, np.uint8)])
    assert torch.equal(load_image(PILImage.fromarray(opaque)), load_image(levels))
    torch.testing.assert_close(load_image(opaque), load_image(levels))
    clear = np.dstack([levels, np.zeros((6, 9), np.uint8)])
    assert (load_image(PILImage.fromarray(clear)) == 1).all()
    assert (load_image(clear) == 1).all()


def test_exif_rotation_is_applied(levels: np.ndarray, tmp_path: Path) -> None:
    picture = PILImage.fromarray(levels)
    exif = PILImage.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    picture.save(tmp_path / "turned.png", exif=exif)
    loaded = load_image(tmp_path / "turned.png")
    assert torch.equal(loaded, load_image(picture.rotate(-90, expand=True)))


def test_other_modes_become_colour(levels: np.ndarray) -> None:
    expected = load_image(levels)
    for mode in ("CMYK", "YCbCr", "HSV"):
        loaded = load_image(PILImage.fromarray(levels).convert(mode))
        torch.testing.assert_close(loaded, expected, atol=0.06, rtol=0, msg=mode)


def test_one_channel_networks_get_gray(levels: np.ndarray) -> None:
    loaded = load_image(PILImage.fromarray(levels), channels=1)
    assert tuple(loaded.shape) == (1, 6, 9)

    torch.testing.assert_close(load_image(levels, channels=1), loaded, atol=1 / 255, rtol=0)


def test_numbers_of_other_makes(levels: np.ndarray) -> None:
    expected = load_image(levels)
    deep = levels.astype(np.uint16) * 257
    torch.testing.assert_close(load_image(deep.astype(">u2")), expected)
    torch.testing.assert_close(load_image(torch.from_numpy(deep).permute(2, 0, 1)), expected)
    levels.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(load_image(levels), expected)


def test_many_channels_come_as_tensors_and_arrays() -> None:
    image = torch.rand(5, 6, 9)
    assert torch.equal(load_image(image, channels=5), image)
    torch.testing.assert_close(load_image(image.permute(1, 2, 0).numpy(), channels=5), image)


def test_normalised_tensors_may_hold_any_number() -> None:
    image = torch.randn(3, 6, 9) * 3
    assert torch.equal(load_image(image, normalized=True), image)


def test_normalised_tensors_are_not_mixed() -> None:
    for channels in (1, 4):
        with pytest.raises(ValueError, match=f"takes 3 channels, got an image with {channels}"):
            load_image(torch.randn(channels, 6, 9), normalized=True)


def test_an_inference_tensor_becomes_an_ordinary_one() -> None:
    with torch.inference_mode():
        image = torch.rand(3, 4, 5)
    assert not load_image(image).is_inference()


def test_masks_are_painted() -> None:
    label = torch.tensor([[0, 1], [255, 1]])
    painted = np.asarray(colored(label, [(10, 20, 30), (40, 50, 60)]))
    assert painted.tolist() == [[[10, 20, 30], [40, 50, 60]], [[0, 0, 0], [40, 50, 60]]]
    blended = overlay(torch.ones(3, 2, 2), colored(label, [(0, 0, 0), (255, 255, 255)]))
    assert np.asarray(blended)[0, 0].tolist() == [127, 127, 127]
    assert np.asarray(to_pil(torch.full((2, 2), 0.2)))[0, 0].tolist() == [51, 51, 51]


def test_files_that_another_program_would_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "page.tif"
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")
    with pytest.raises(ValueError, match="is not an image file that can be read"):
        load_image(path)


def test_a_file_that_may_not_be_read_is_said_so(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "a.png"
    path.touch()
    monkeypatch.setattr(PILImage, "open", refuse)
    with pytest.raises(ValueError, match=r"a.png may not be read: Permission denied"):
        load_image(path)


def test_a_dark_file_of_16_bits_stays_dark(tmp_path: Path) -> None:
    dark = np.full((4, 5), 200, np.uint16)
    PILImage.fromarray(dark).save(tmp_path / "dark.png")
    (tmp_path / "dark.pgm").write_bytes(b"P5 5 4 65535\n" + dark.astype(">u2").tobytes())
    for name in ("dark.png", "dark.pgm"):
        assert float(load_image(tmp_path / name).max()) == pytest.approx(200 / 65535), name
    of_8_bits = PILImage.fromarray(dark.astype(np.int32))
    assert float(load_image(of_8_bits).max()) == pytest.approx(200 / 255)


def test_a_matrix_is_an_array() -> None:
    gray = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert torch.equal(load_image(np.asmatrix(gray)), load_image(gray))


def test_a_pixel_stays_one_however_it_is_shrunk() -> None:
    assert rescale(PILImage.new("RGB", (1, 7)), 0.3).size == (1, 2)


@pytest.mark.parametrize("size", [(1, 100000), (100000, 1), (3, 4000), (500, 7), (200, 300)])
def test_no_image_has_more_pixels_than_allowed(size: tuple[int, int]) -> None:
    height, width = within_budget(torch.zeros(3, *size), "paper", 1000).shape[1:]
    assert 700 < height * width <= 1000
    assert (height < width) == (size[0] < size[1])
