import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selfadapt.pseudo import fuse, ignore_label, pseudo_label


def naive_pseudo_label(probs: Tensor, psi: float, ignore: int, strict: bool) -> Tensor:
    """Eq. 2-4, one pixel at a time."""
    classes, height, width = probs.shape
    label = torch.empty(height, width, dtype=torch.int64)
    thresholds = []
    for c in range(classes):
        highest = max(float(probs[c, j, k]) for j in range(height) for k in range(width))
        thresholds.append(torch.tensor(psi * highest, dtype=probs.dtype))
    for j in range(height):
        for k in range(width):
            best = max(range(classes), key=lambda c: float(probs[c, j, k]))
            confidence = probs[best, j, k]
            kept = confidence > thresholds[best] if strict else confidence >= thresholds[best]
            label[j, k] = best if kept else ignore
    return label


@settings(deadline=None, max_examples=100)
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)),
    psi=st.sampled_from([0.0, 0.3, 0.5, 0.7, 0.9, 1.0]),
    strict=st.booleans(),
    levels=st.sampled_from([2, 5, 1000]),
    seed=st.integers(0, 10**6),
)
def test_it_agrees_with_the_equations_pixel_by_pixel(shape, psi, strict, levels, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randint(0, levels, shape, generator=generator).double() / levels
    expected = naive_pseudo_label(probs, psi, 255, strict)
    assert torch.equal(pseudo_label(probs, psi, strict=strict), expected)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), psi=st.floats(0, 1))
def test_at_least_one_pixel_is_always_kept(seed: int, psi: float) -> None:
    probs = torch.randn((4, 5, 6), generator=torch.Generator().manual_seed(seed)).softmax(dim=0)
    label = pseudo_label(probs, psi)
    assert (label != 255).any()


def test_a_higher_psi_keeps_fewer_pixels() -> None:
    probs = torch.randn(4, 20, 20).softmax(dim=0)
    kept = [int((pseudo_label(probs, psi) != 255).sum()) for psi in (0, 0.3, 0.6, 0.9, 1)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] == 400


def test_a_pixel_at_the_threshold_counts_unless_strict() -> None:
    probs = torch.tensor([[0.8, 0.8], [0.2, 0.2]]).reshape(2, 1, 2)
    assert pseudo_label(probs, 1.0).tolist() == [[0, 0]]
    assert pseudo_label(probs, 1.0, strict=True).tolist() == [[255, 255]]


@settings(deadline=None, max_examples=50)
@given(num=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_fusing_is_the_mean(num: int, seed: int) -> None:
    maps = torch.rand((num, 3, 4, 5), generator=torch.Generator().manual_seed(seed)).double()
    before = maps.clone()
    torch.testing.assert_close(fuse(iter(maps)), maps.mean(dim=0))
    assert torch.equal(maps, before)


def test_the_ignore_label_is_never_a_class() -> None:
    assert ignore_label(255) == 255
    assert ignore_label(256) == -1
    with pytest.raises(ValueError, match="ignore must not be one of the 300 classes, got 255"):
        pseudo_label(torch.rand(300, 2, 2))
