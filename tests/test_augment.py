"""Random changes to training images, each against a reference that is written out."""

import colorsys
from math import ceil, exp
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from selfadapt.train import AugmentConfig
from selfadapt.train.augment import (
    Augmentation,
    ColorChange,
    change_colors,
    crop_pair,
    draw_augmentation,
)

SIZE = (96, 64)  # width and height
NOTHING = ColorChange(0.0, None, False)
GRAY = np.array([0.299, 0.587, 0.114])  # BT.601


def photo(height: int = 20, width: int = 24, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, height, width), generator=generator, dtype=torch.uint8)


def draws(num: int = 3000, **settings: Any) -> list[Augmentation]:
    config = AugmentConfig(**settings)
    return [draw_augmentation(np.random.default_rng([7, n]), config, SIZE) for n in range(num)]


def changed(image: Tensor, **kind: Any) -> np.ndarray:
    """Recolour one image; return it as ``(H, W, 3)``."""
    color = NOTHING._replace(**kind)
    return change_colors(image[None], [color])[0].permute(1, 2, 0).double().numpy()


def raw(image: Tensor) -> np.ndarray:
    return image.permute(1, 2, 0).double().numpy() / 255


def test_the_defaults_are_the_papers() -> None:
    config = AugmentConfig()
    assert config.crop == (512, 512)
    assert config.scale == (0.08, 1.0)
    assert config.ratio == (3 / 4, 4 / 3)
    assert config.flip == 0.5
    assert config.jitter == 0.5
    assert config.brightness == config.contrast == config.saturation == (0.7, 1.3)
    assert config.hue == (0.9, 1.1)
    assert config.blur == (0.1, 2.0)
    assert config.gray == 0.1


def test_crops_lie_in_the_image_and_have_the_area_and_ratio_asked_for() -> None:
    boxes = np.array([change.box for change in draws()])
    left, top, right, bottom = boxes.T
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (right <= SIZE[0] + 1e-6).all()
    assert (bottom <= SIZE[1] + 1e-6).all()
    width, height = right - left, bottom - top
    share = width * height / (SIZE[0] * SIZE[1])
    assert 0.08 <= share.min() < 0.1
    assert 0.86 < share.max() <= 8 / 9 + 1e-6  # no more fits, with this ratio
    ratio = width / height
    assert 3 / 4 - 1e-6 <= ratio.min() < 0.78
    assert 1.29 < ratio.max() <= 4 / 3 + 1e-6
    # As likely wider as higher, whatever is left of the image beside: places are uniform.
    small = share < 0.3
    assert abs(np.log(ratio[small]).mean()) < 0.02
    assert abs((left / (SIZE[0] - width))[small].mean() - 0.5) < 0.03
    assert abs((top / (SIZE[1] - height))[small].mean() - 0.5) < 0.03


def test_how_often_and_how_far_colours_change_is_as_asked_for() -> None:
    changes = draws()
    assert abs(np.mean([change.flip for change in changes]) - 0.5) < 0.03
    colors = [change.colors for change in changes]
    assert abs(np.mean([color.gray for color in colors]) - 0.1) < 0.02
    assert abs(np.mean([color.jitter is not None for color in colors]) - 0.5) < 0.03
    blur = np.array([color.blur for color in colors])
    assert 0.1 <= blur.min() < 0.12
    assert 1.98 < blur.max() <= 2.0
    jitter = np.array([color.jitter for color in colors if color.jitter is not None])
    for column in jitter.T[:3]:
        assert 0.7 <= column.min() < 0.71
        assert 1.29 < column.max() <= 1.3
    assert -0.1 <= jitter[:, 3].min() < -0.098
    assert 0.098 < jitter[:, 3].max() <= 0.1
    correlation = np.corrcoef(np.c_[jitter, blur[[c.jitter is not None for c in colors]]].T)
    assert np.abs(correlation - np.eye(5)).max() < 0.1  # one draw for each


def test_a_hue_over_1_turns_forward() -> None:
    for change in draws(50, jitter=1, hue=(1.07, 1.07), contrast=(0.8, 0.8)):
        assert change.colors.jitter is not None
        _, contrast, _, turn = change.colors.jitter
        assert (contrast, turn) == (0.8, pytest.approx(0.07))


def test_what_is_turned_off_does_not_happen() -> None:
    for change in draws(200, flip=0, jitter=0, gray=0, blur=None, scale=(1, 1), ratio=(1.5, 1.5)):
        assert change.colors == NOTHING
        assert not change.flip
        assert change.box == pytest.approx((0, 0, 96, 64))


def test_a_crop_that_cannot_fit_is_the_largest_in_the_middle() -> None:
    wide = AugmentConfig(scale=(1, 1), ratio=(4, 4))
    change = draw_augmentation(np.random.default_rng(0), wide, SIZE)
    assert change.box == pytest.approx((0, 20, 96, 44))
    high = AugmentConfig(scale=(1, 1), ratio=(0.5, 0.5))
    change = draw_augmentation(np.random.default_rng(0), high, SIZE)
    assert change.box == pytest.approx((32, 0, 64, 64))


def encoded(label: np.ndarray) -> Image.Image:
    """Return an image whose channels all are ten times the label."""
    return Image.fromarray(np.repeat(label[..., None] * 10, 3, axis=2).astype(np.uint8))


@pytest.mark.parametrize("flip", [False, True])
def test_image_and_label_stay_aligned(flip: bool) -> None:
    """Far from edges the colour tells the class; edges lie half way between both."""
    label = np.kron(np.arange(24).reshape(4, 6), np.ones((16, 16))).astype(np.uint8)
    rng = np.random.default_rng(3)
    config = AugmentConfig(crop=(40, 56))
    for _ in range(20):
        change = draw_augmentation(rng, config, (96, 64))._replace(flip=flip)
        pixels, classes = crop_pair(encoded(label), label, change, config.crop)
        assert pixels.shape == (3, 40, 56)
        assert classes.shape == (40, 56)
        assert pixels.dtype == classes.dtype == torch.uint8
        even = torch.ones_like(classes, dtype=torch.bool)
        for down in range(-2, 3):
            for right in range(-2, 3):
                even &= classes.roll((down, right), (0, 1)) == classes
        even[:2] = even[-2:] = even[:, :2] = even[:, -2:] = False
        assert even.float().mean() > 0.1
        assert (pixels[0][even].int() == 10 * classes[even].int()).all()
    assert set(classes.unique().tolist()) <= set(range(24))


def test_a_crop_takes_the_pixels_under_its_centres() -> None:
    """The reference asks for each pixel of the crop where its centre lies in the image."""
    label = np.random.default_rng(0).integers(0, 19, (64, 96)).astype(np.uint8)
    ramp = np.stack(np.meshgrid(np.arange(96) * 2, np.arange(64) * 3), -1)
    image = Image.fromarray(np.dstack([ramp, ramp[..., 0]]).astype(np.uint8))
    left, top, right, bottom = box = (10.3, 7.9, 70.6, 40.2)
    for flip in (False, True):
        change = Augmentation(box, flip, NOTHING)
        pixels, classes = crop_pair(image, label, change, (32, 48))
        for row in range(32):
            for column in range(48):
                x = left + (column + 0.5) * (right - left) / 48
                y = top + (row + 0.5) * (bottom - top) / 32
                place = 47 - column if flip else column
                assert classes[row, place] == label[int(y), int(x)]
                if 12 < x < 69 and 9 < y < 39:  # on a ramp any bilinear filter gives its value
                    assert abs(int(pixels[0, row, place]) - 2 * (x - 0.5)) <= 1
                    assert abs(int(pixels[1, row, place]) - 3 * (y - 0.5)) <= 1


def test_a_label_is_never_interpolated() -> None:
    label = np.where(np.indices((64, 96)).sum(0) % 2, 0, 255).astype(np.uint8)
    change = Augmentation((3.3, 2.2, 91.7, 60.1), True, NOTHING)
    for crop in ((16, 16), (37, 41), (200, 300)):
        _, classes = crop_pair(encoded(label // 20), label, change, crop)
        assert set(classes.unique().tolist()) == {0, 255}


def test_a_flip_turns_left_and_right_of_both() -> None:
    label = np.random.default_rng(0).integers(0, 19, (64, 96)).astype(np.uint8)
    plain = Augmentation((5.0, 6.0, 80.0, 50.0), False, NOTHING)
    image, classes = crop_pair(encoded(label), label, plain, (32, 40))
    turned = crop_pair(encoded(label), label, plain._replace(flip=True), (32, 40))
    assert turned[0].equal(image.flip(2))
    assert turned[1].equal(classes.flip(1))


def test_no_change_of_colours_is_the_identity() -> None:
    image = photo()
    assert change_colors(image[None], [NOTHING]).equal(image[None] / 255)
    assert np.abs(changed(image, jitter=(1, 1, 1, 0)) - raw(image)).max() < 1e-5


def test_brightness_multiplies() -> None:
    image = photo()
    for factor in (0.7, 1.3):
        expected = (raw(image) * factor).clip(0, 1)
        assert np.abs(changed(image, jitter=(factor, 1, 1, 0)) - expected).max() < 1e-5


def test_contrast_stretches_about_the_mean_gray() -> None:
    image = photo()
    mean = (raw(image) @ GRAY).mean()
    for factor in (0.7, 1.3):
        expected = (mean + (raw(image) - mean) * factor).clip(0, 1)
        assert np.abs(changed(image, jitter=(1, factor, 1, 0)) - expected).max() < 1e-3


def test_saturation_stretches_about_the_gray_of_each_pixel() -> None:
    image = photo()
    gray = (raw(image) @ GRAY)[..., None]
    for factor in (0.7, 1.3):
        expected = (gray + (raw(image) - gray) * factor).clip(0, 1)
        assert np.abs(changed(image, jitter=(1, 1, factor, 0)) - expected).max() < 1e-3


@pytest.mark.parametrize("turn", [-0.1, 0.04, 0.1])
def test_hue_turns_the_colour_circle(turn: float) -> None:
    image = photo()
    after = changed(image, jitter=(1, 1, 1, turn))
    for before, got in zip(raw(image).reshape(-1, 3), after.reshape(-1, 3), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*before)
        expected = colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)
        assert np.abs(got - expected).max() < 1e-4


def test_jitter_goes_from_brightness_to_hue() -> None:
    image = photo()
    step = raw(image) * 0.8
    mean = (step @ GRAY).mean()
    step = (mean + (step - mean) * 1.2).clip(0, 1)
    gray = (step @ GRAY)[..., None]
    step = (gray + (step - gray) * 0.75).clip(0, 1)
    expected = [
        colorsys.hsv_to_rgb((hue + 0.07) % 1, saturation, value)
        for hue, saturation, value in (colorsys.rgb_to_hsv(*pixel) for pixel in step.reshape(-1, 3))
    ]
    after = changed(image, jitter=(0.8, 1.2, 0.75, 0.07)).reshape(-1, 3)
    assert np.abs(after - expected).max() < 2e-3


@pytest.mark.parametrize("sigma", [0.1, 0.8, 2.0])
def test_blur_is_a_gaussian_mean_with_mirrored_borders(sigma: float) -> None:
    image = photo()
    radius = ceil(4 * sigma)  # further than anybody cuts it off
    taps = np.array([exp(-0.5 * (n / sigma) ** 2) for n in range(-radius, radius + 1)])
    taps /= taps.sum()
    wide = np.pad(raw(image), ((radius, radius), (radius, radius), (0, 0)), mode="reflect")
    expected = np.zeros_like(raw(image))
    height, width = expected.shape[:2]
    for down, a in enumerate(taps):
        for right, b in enumerate(taps):
            expected += a * b * wide[down : down + height, right : right + width]
    assert np.abs(changed(image, blur=sigma) - expected).max() < 6e-3
    assert (np.abs(raw(image) - expected).max() > 0.1) == (sigma > 0.5)


def test_gray_takes_out_the_colour() -> None:
    image = photo()
    after = changed(image, gray=True)
    assert np.abs(after - (raw(image) @ GRAY)[..., None]).max() < 1e-3
    assert np.ptp(after, axis=2).max() == 0


def test_each_image_of_a_batch_gets_its_own_change() -> None:
    images = torch.stack([photo(seed=n) for n in range(4)])
    colors = [
        NOTHING,
        ColorChange(1.0, None, False),
        ColorChange(0.0, (1.2, 0.8, 1.1, 0.05), False),
        ColorChange(0.5, (0.9, 1.1, 0.7, -0.1), True),
    ]
    together = change_colors(images, colors)
    assert together.dtype == torch.float32
    assert together.min() >= 0
    assert together.max() <= 1
    for index, color in enumerate(colors):
        assert together[index].equal(change_colors(images[index : index + 1], [color])[0])


BAD = {
    "a crop of no size": ({"crop": (0, 512)}, "crop must be a whole number, 16 to 16384"),
    "a crop of half pixels": ({"crop": (32.5, 32)}, "crop must be a whole number.*got 32.5"),
    "a probability over 1": ({"flip": 1.5}, "flip must be a number, .* to 1, got 1.5"),
    "a probability below 0": ({"gray": -0.1}, "gray must be a number, 0 to 1, got -0.1"),
    "a probability that is none": ({"jitter": float("nan")}, "jitter must be.*got nan"),
    "a scale over 1": ({"scale": (0.5, 2.0)}, "scale must be a number, .* to 1, got 2"),
    "a scale of 0": ({"scale": (0.0, 1.0)}, "scale must be a number.*got 0.0"),
    "a range upside down": ({"ratio": (2, 1)}, r"ratio must be the lower and the upper.*\(2, 1\)"),
    "a negative factor": ({"contrast": (-1, 1)}, "contrast must be a number, 0 to 100, got -1"),
    "a hue that is a turn": ({"hue": (-0.1, 0.1)}, "hue must be a number, 0.5 to 1.5"),
    "a blur wider than a crop": ({"blur": (0, 9)}, "blur must be a number, 0 to 5, got 9"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_setting_is_named(case: str) -> None:
    settings, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        AugmentConfig(**settings)  # type: ignore[arg-type]


def test_the_smallest_crop_takes_the_widest_blur() -> None:
    assert change_colors(photo(16, 16)[None], [ColorChange(5.0, None, False)]).isfinite().all()
