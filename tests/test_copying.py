"""The caller's network is never touched: each image is segmented by a private copy."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import selfadapt
from conftest import assert_same, random_image, seeded, snapshot
from selfadapt import SelfAdapt
from selfadapt.baselines import SaNOnly, Source
from selfadapt.copying import private_copy
from selfadapt.norm import SaN
from selfadapt.result import MAX_BYTES, ResizedMap

QUICK: dict[str, Any] = {"mode": "paper", "scales": (0.5,), "steps": 2, "lr": 0.1}


def conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class Writing(nn.Module):
    """Writes to its frozen weights, but not in a run on 64 pixels without gradients."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.body, self.norm, self.head = conv(3, 8), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
        self.when, self.calls = when, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        writes = {
            "under gradients": torch.is_grad_enabled(),
            "at some sizes": x.shape[-1] == 48,
            "from the third call on": self.calls >= 3,
        }
        if writes[self.when]:
            self.body.weight.data.mul_(0.9)
        return self.head(self.norm(self.body(x)).relu())


@pytest.mark.parametrize("when", ["under gradients", "at some sizes", "from the third call on"])
def test_a_network_that_writes_to_its_weights_now_and_then_keeps_them(when: str) -> None:
    model = seeded(lambda: Writing(when))
    method = SelfAdapt(model, adapt=["head"], **QUICK)
    before, image = snapshot(model), random_image(32, 48)
    first = method(image)
    assert_same(before, snapshot(model))
    assert torch.equal(method(image).probs, first.probs)


class Unregistered(nn.Module):
    """Keeps parameters in a list, where PyTorch does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = conv(3, 8), nn.Conv2d(8, 4, 1)
        self.scales = [nn.Parameter(torch.ones(1, 8, 1, 1))]

    def forward(self, x: Tensor) -> Tensor:
        self.scales[0].data.mul_(0.5)
        return self.head(self.body(x).relu() * self.scales[0])


def test_parameters_in_a_list_are_the_callers_too(image: Tensor) -> None:
    model = seeded(Unregistered)
    method = SelfAdapt(model, adapt=["head"], **QUICK)
    first = method(image)
    assert torch.equal(method(image).probs, first.probs)
    assert torch.equal(model.scales[0], torch.ones(1, 8, 1, 1))


def test_the_caller_may_use_the_network_at_the_same_time(tiny: nn.Module, image: Tensor) -> None:
    x = torch.rand(1, 3, 32, 48)
    with torch.no_grad():
        expected = tiny(x)
    method, done = SelfAdapt(tiny, mode="paper", scales=(0.5,), steps=20, lr=0.5), threading.Event()

    def adapt() -> None:
        for _ in range(5):
            method(image)
        done.set()

    thread = threading.Thread(target=adapt)
    thread.start()
    wrong = runs = 0
    with torch.no_grad():
        while not done.is_set():
            wrong += not torch.equal(tiny(x), expected)
            runs += 1
    thread.join()
    assert wrong == 0
    assert runs > 5


def test_two_threads_may_use_one_method(tiny: nn.Module) -> None:
    images = [random_image(32, 48, seed=seed) for seed in range(2)]
    method = SelfAdapt(tiny, **QUICK)
    expected = [method(image).probs for image in images]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(8):
            if not torch.equal(method(images[index]).probs, expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_is_forked_while_a_method_runs_can_use_it(
    tiny: nn.Module, image: Tensor
) -> None:
    """Random numbers are drawn under a lock, which the child gets as it is."""
    method = selfadapt.create_method("mc-dropout", tiny, passes=200, rate=0.5)
    thread = threading.Thread(target=lambda: method(image))
    thread.start()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        selfadapt.create_method("mc-dropout", tiny, passes=1, rate=0.5)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    thread.join()
    assert status == 0


def test_an_interrupt_on_the_way_out_takes_all_of_san_out(tiny: nn.Module) -> None:
    for wait in range(8):  # assignments of a class until the interrupt comes
        left = [wait]

        class Interrupting(nn.BatchNorm2d):
            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, value)
                left[0] -= name == "__class__"  # noqa: B023
                if name == "__class__" and left[0] == 0:  # noqa: B023
                    raise KeyboardInterrupt

        model = nn.Sequential(*(Interrupting(2) for _ in range(3)))
        try:
            with selfadapt.san(model, 0.3):
                pass
        except KeyboardInterrupt:
            pass
        assert not any(isinstance(layer, SaN) for layer in model)


def interrupted(run: Callable[[], object], line: int) -> None:
    """Raise KeyboardInterrupt at the n-th line that is run of the package or of ``contextlib``."""
    package, left = str(Path(selfadapt.__file__).parent), [line]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        left[0] -= event == "line"
        if event == "line" and left[0] == 0:
            raise KeyboardInterrupt
        return (
            trace if frame.f_code.co_filename.startswith((package, contextlib.__file__)) else None
        )

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


def test_an_interrupt_of_a_method_leaves_no_lock_behind(tiny: nn.Module, image: Tensor) -> None:
    methods = [
        selfadapt.create_method("mc-dropout", tiny, passes=1, rate=0.5),
        SelfAdapt(tiny, scales=(0.5,), steps=1),
    ]
    for method in methods:
        for line in range(1, 60):
            interrupted(lambda: method(image), line)  # noqa: B023
            other = threading.Thread(target=method, args=(image,), daemon=True)
            other.start()
            other.join(20)
            assert not other.is_alive(), f"interrupted at line {line}"


class ByHook(nn.Module):
    """Takes its features from a hook, in one of many ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.norm, self.head = conv(3, 8), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
        self.features: dict[str, Tensor] = {}
        hooks: dict[str, Callable[..., None]] = {
            "method": self.keep,
            "closure": lambda module, args, output: self.features.update(y=output),
            "partial": partial(ByHook.keep_in, self),
            "default": lambda module, args, output, store=self.features: store.update(y=output),
        }
        self.norm.register_forward_hook(hooks[kind])

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.features["y"] = output

    @staticmethod
    def keep_in(network: "ByHook", module: nn.Module, args: Any, output: Tensor) -> None:
        network.features["y"] = output

    def forward(self, x: Tensor) -> Tensor:
        self.norm(self.body(x))
        return self.head(self.features["y"].relu())


@pytest.mark.parametrize("kind", ["method", "closure", "partial", "default"])
def test_hooks_of_the_network_work_on_the_copy(kind: str, image: Tensor) -> None:
    model = seeded(lambda: ByHook(kind))
    before = snapshot(model)
    result = SelfAdapt(model, **QUICK)(image)
    assert_same(before, snapshot(model))
    assert model.features == {}
    assert result.losses[1] < result.losses[0]


def test_hooks_of_the_caller_see_every_run(tiny: nn.Module, image: Tensor) -> None:
    seen: list[Tensor] = []
    tiny.norm1.register_forward_hook(lambda module, args, output: seen.append(output))
    SaNOnly(tiny, compare=False)(image)
    assert len(seen) >= 1


def test_a_forward_that_was_put_on_a_network_runs_its_copy(tiny: nn.Module, image: Tensor) -> None:
    expected = SelfAdapt(tiny, **QUICK)(image)
    inner = tiny.forward
    tiny.forward = lambda x: inner(x)  # type: ignore[method-assign]
    result = SelfAdapt(tiny, **QUICK)(image)
    assert result.losses == expected.losses


def test_a_copy_that_runs_the_original_is_refused(tiny: nn.Module) -> None:
    class Outside:
        """Refers to a network by something that is no function."""

        def __init__(self, network: nn.Module) -> None:
            self.networks = (network,)

        def __deepcopy__(self, memo: Any) -> "Outside":
            return self

        def __call__(self, x: Tensor) -> Tensor:
            return self.networks[0](x)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.run = tiny, Outside(tiny)

        def forward(self, x: Tensor) -> Tensor:
            return self.run(x)

    with pytest.raises(TypeError, match="a copy of this one runs layers of the original"):
        Source(Around())


def test_what_cannot_be_copied_is_shared(image: Tensor) -> None:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.lock = nn.Conv2d(3, 4, 1), threading.Lock()

        def forward(self, x: Tensor) -> Tensor:
            with self.lock:
                return self.head(x)

    model = seeded(Locked)
    assert private_copy(model).lock is model.lock
    assert SelfAdapt(model, **QUICK)(image).losses


def test_a_network_that_cannot_be_copied_is_explained() -> None:
    class Single(nn.Conv2d):
        def __deepcopy__(self, memo: Any) -> Any:
            raise NotImplementedError("there is only one")

    with pytest.raises(TypeError, match=r"Single cannot be copied \(there is only one\)"):
        Source(Single(3, 4, 1))


def test_features_with_a_history_are_copied_without_it(image: Tensor) -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.last = nn.Conv2d(3, 4, 1), [torch.zeros(1)]

        def forward(self, x: Tensor) -> Tensor:
            self.last = [self.head(x)]
            return self.last[0]

    model = seeded(Keeping)
    model(image[None])
    assert model.last[0].grad_fn is not None
    assert SelfAdapt(model, **QUICK)(image).losses


def test_memory_of_a_network_that_refers_to_itself_is_free_at_once(image: Tensor) -> None:
    import gc
    from weakref import ref

    class Circular(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Conv2d(3, 4, 1)
            self.itself = [self]
            self.refs: list[Any] = []

        def forward(self, x: Tensor) -> Tensor:
            alive.append(ref(self.head.weight))
            self.features = self.head(x)
            alive.append(ref(self.features))
            return self.features * 1

    alive: list[Any] = []
    method = SaNOnly(seeded(Circular))
    gc.collect()
    alive.clear()
    gc.disable()
    try:
        method(image)
        weights = [weight() for weight in alive[::2]]
        assert sum(weight.numel() for weight in weights if weight is not None) == 0
        assert all(features() is None for features in alive[1::2])
    finally:
        gc.enable()


@pytest.mark.parametrize("scores", [True, False])
def test_large_maps_are_made_a_few_classes_at_a_time(
    scores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(11, 9, 13, generator=generator)
    values = values if scores else values.softmax(dim=0)
    whole = ResizedMap(values, (50, 70), scores=scores)
    confidence, label = whole.best
    assert torch.equal(label, whole.probs.argmax(dim=0))
    for num_bytes in (1, 3 * 50 * 70 * 4, MAX_BYTES):
        monkeypatch.setattr("selfadapt.result.MAX_BYTES", num_bytes)
        parts = ResizedMap(values, (50, 70), scores=scores)
        torch.testing.assert_close(parts.best[0], confidence)
        assert torch.equal(parts.best[1], label)
