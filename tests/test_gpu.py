from typing import Any

import pytest
import torch

from conftest import TinyNet, assert_same, random_image, seeded, snapshot
from selfadapt import SelfAdapt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("mode", ["paper", "official"])
def test_the_gpu_gives_what_the_cpu_gives(mode: Any) -> None:
    image = random_image(97, 203)
    model = seeded(TinyNet)
    expected = SelfAdapt(model, mode=mode, steps=5)(image)
    model.cuda()
    before = snapshot(model)
    result = SelfAdapt(model, mode=mode, steps=5)(image)
    assert_same(before, snapshot(model))
    assert result.probs.is_cuda
    torch.testing.assert_close(result.probs.cpu(), expected.probs, rtol=0, atol=1e-3)
    assert result.losses == pytest.approx(expected.losses, rel=1e-3)


def test_running_out_of_memory_leaves_no_trace() -> None:
    model = seeded(lambda: TinyNet(150)).cuda()
    method = SelfAdapt(model, steps=1, scales=(0.1,), max_pixels=10**9, compare=False)
    before = snapshot(model)
    used = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2e9 / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            method(torch.rand(3, 4000, 4000))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_same(before, snapshot(model))
    assert torch.cuda.memory_allocated() == used
    method(random_image())
