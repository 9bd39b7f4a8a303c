import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage
from PIL import ImageOps
from torch import Tensor

from conftest import random_image
from selfadapt.views import (
    OfficialView,
    View,
    every_view,
    paper_views,
    pil_resize,
    resize,
    undo_together,
    usable_views,
)

sizes = st.tuples(st.integers(1, 70), st.integers(1, 70))
scales = st.floats(0.05, 2.5)


@settings(deadline=None, max_examples=150)
@given(size=sizes, scale=scales, flip=st.booleans(), kind=st.sampled_from([View, OfficialView]))
def test_undo_restores_the_size_and_keeps_probabilities(size, scale, flip, kind) -> None:
    view = kind(scale, flip=flip)
    made = view.make(torch.rand(3, *size))
    assert tuple(made.shape) == (3, *view.size(size))
    probs = torch.rand(4, *made.shape[-2:]).softmax(dim=0)
    undone = view.undo(probs, size)
    assert tuple(undone.shape) == (4, *size)
    torch.testing.assert_close(undone.sum(dim=0), torch.ones(size))


@settings(deadline=None, max_examples=100)
@given(
    size=st.tuples(st.integers(16, 60), st.integers(16, 60)),
    scale=st.floats(0.5, 2.0),
    flip=st.booleans(),
    row=st.floats(0.2, 0.8),
    column=st.floats(0.2, 0.8),
    kind=st.sampled_from([View, OfficialView]),
)
def test_undo_restores_the_position(size, scale, flip, row, column, kind) -> None:
    height, width = size
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    center = row * (height - 1), column * (width - 1)
    blob = torch.exp(-((y - center[0]) ** 2 + (x - center[1]) ** 2) / 18.0)[None]
    view = kind(scale, flip=flip)
    undone = view.undo(view.make(blob), size)[0]
    found = [float((undone * axis).sum() / undone.sum()) for axis in (y, x)]
    expected = [float((blob[0] * axis).sum() / blob[0].sum()) for axis in (y, x)]
    # The released code undoes half-pixel scaling with aligned corners: off by up to a pixel or so.
    assert found == pytest.approx(expected, abs=0.6 if kind is View else 1.6)


@pytest.mark.parametrize("size", [(1, 1), (97, 203), (3, 500)])
@pytest.mark.parametrize("view", every_view((0.25, 1.0, 1.5)))
def test_every_size_comes_back(view: View, size: tuple[int, int]) -> None:
    assert tuple(view.undo(view.make(torch.rand(3, *size)), size).shape[-2:]) == size


def test_the_papers_set() -> None:
    assert [(v.scale, v.flip, v.gray) for v in paper_views()] == [
        (0.25, False, False),
        (0.25, True, True),
        (0.5, False, False),
        (0.5, True, True),
        (0.75, False, False),
        (0.75, True, True),
    ]
    assert len(set(every_view())) == 12


def test_a_plain_view_at_full_scale_is_the_image() -> None:
    image = random_image()
    assert torch.equal(View().make(image), image)
    assert torch.equal(OfficialView().make(image), image)
    assert torch.equal(View(flip=True).make(image), image.flip(-1))


@pytest.mark.parametrize("kind", [View, OfficialView])
def test_gray_has_three_equal_channels_of_the_luma(kind: type[View]) -> None:
    image = random_image()
    gray = kind(gray=True).make(image)
    expected = 0.299 * image[0] + 0.587 * image[1] + 0.114 * image[2]
    for channel in gray:
        torch.testing.assert_close(channel, expected, rtol=0, atol=1.1 / 255)


@pytest.mark.parametrize("scale", [0.25, 0.5, 0.75, 0.29, 1.5])
def test_official_views_are_pils_to_the_bit(scale: float) -> None:
    image = random_image(61, 100)
    levels = (image * 255).round().byte().permute(1, 2, 0).numpy()
    picture = PILImage.fromarray(levels)
    size = int(100 * scale), int(61 * scale)
    expected = ImageOps.mirror(picture.resize(size, PILImage.Resampling.BILINEAR).convert("L"))
    made = OfficialView(scale, flip=True, gray=True).make(image)
    assert made.shape[-2:] == (size[1], size[0])
    for channel in made:
        assert np.array_equal((channel * 255).round().byte().numpy(), np.asarray(expected))


def test_resizing_keeps_the_mean_where_it_shrinks() -> None:
    image = random_image(64, 64)
    for small in (resize(image, (8, 8)), pil_resize(image, (8, 8))):
        torch.testing.assert_close(small.mean(), image.mean(), atol=0.01, rtol=0)


def test_views_work_on_any_dtype() -> None:
    image: Tensor = random_image().double()
    assert View(0.5, gray=True).make(image).dtype == torch.float64
    assert OfficialView(0.5, gray=True).make(image).dtype == torch.float64


@pytest.mark.parametrize("kind", [View, OfficialView])
def test_views_of_one_size_are_undone_together(kind: type[View]) -> None:
    views = [kind(0.5), kind(0.5, True, True), kind(0.5, True)]
    probs = torch.rand(3, 5, 20, 30, generator=torch.Generator().manual_seed(0))
    (total,) = undo_together(views, probs, (41, 60))
    expected = sum(view.undo(one, (41, 60)) for view, one in zip(views, probs, strict=True))
    torch.testing.assert_close(total, expected)


def test_a_view_undone_in_its_own_way_keeps_it() -> None:
    class Squared(View):
        def undo(self, probs: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
            return super().undo(probs, size) ** 2

    probs = torch.rand(2, 5, 20, 30, generator=torch.Generator().manual_seed(0))
    for views in ([Squared(0.5)] * 2, [View(0.5), OfficialView(0.5, True)]):
        found = list(undo_together(views, probs, (40, 60)))
        assert len(found) == 2
        for view, one, undone in zip(views, probs, found, strict=True):
            assert torch.equal(undone, view.undo(one, (40, 60)))


@pytest.mark.parametrize(("kind", "number"), [(View, 4), (OfficialView, 6)])
def test_the_released_code_takes_a_scale_as_often_as_it_is_given(
    kind: type[View], number: int
) -> None:
    assert len(usable_views((0.5, 0.5, 1.0), None, kind, 3)) == number
