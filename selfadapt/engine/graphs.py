"""CUDA graphs: the work for an image, recorded once and replayed for images of the same size.

Python launches some ten thousand kernels for one image, which takes longer than the kernels
themselves. A CUDA graph launches them all at once. It reads the network's weights at their
addresses, so it is valid as long as these stay. Other weights, modules or hooks are noticed; a
changed attribute of a module, such as another dilation, is not: that takes a new method.
"""

import gc
import logging
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from selfadapt.computed import Computed, ComputedBatch
from selfadapt.copying import HOOKS
from selfadapt.views import Size

LOG = logging.getLogger(__name__)
Values = TypeVar("Values", Computed, ComputedBatch)
Compute = Callable[[Tensor], Values]
"""Computes an image ``(C, H, W)``, or several ``(B, C, H, W)``."""

RECORD_AT = 2
"""Which image of a size, counted from 1, is recorded: sizes that occur once are not worth it."""
MAX_RECORDINGS, MAX_BYTES = 16, 4 * 2**30
"""Limits for the recordings that are kept: their number, and their own memory."""


@dataclass
class Recording:
    """A graph, and the memory it reads from and writes to."""

    graph: torch.cuda.CUDAGraph
    image: Tensor
    computed: Any
    """A ``Computed``, or a ``ComputedBatch``."""

    @property
    def num_bytes(self) -> int:
        """Memory that no other recording uses."""
        return int(self.image.nbytes + self.computed.num_bytes)

    def replay(self, image: Tensor, size: Size) -> Any:
        """Compute the same for another image, for a result of the given size."""
        self.image.copy_(image)
        self.graph.replay()
        computed = self.computed.finish(size, copy=True)  # the next replay writes over this one's
        torch.cuda.synchronize(image.device)  # it may come from another thread's stream
        return computed


class Graphs:
    """Runs a computation on a network's images, one after the other.

    Args:
        model: The network.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: Counter[Any] = Counter()
        self._needed: Counter[Any] = Counter()
        self._pool: Any = None
        self._recordings: OrderedDict[Any, Recording] = OrderedDict()
        self._addresses: Any = None
        self._lock = Lock()
        self.trouble = ""
        """Why nothing is recorded; empty if it is."""

    def __call__(
        self, compute: Compute[Values], image: Tensor, size: Size, variant: Hashable = None
    ) -> Values:
        """Return what ``compute`` gives for an image, for a result of the given size.

        Args:
            compute: The computation. It waits for nothing on the device.
            image: The image, or several images of one size.
            size: Height and width of the result.
            variant: What the computation depends on beside the image.
        """
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        key = (image.shape, image.dtype, image.device, autocast, variant)
        with self._lock:
            self._clear_if_outdated()
            if key in self._recordings:
                self._recordings.move_to_end(key)
                return self._recordings[key].replay(image, size)
            self._seen[key] += 1
            if self._seen[key] >= max(RECORD_AT, self._needed[key]) and not self.trouble:
                return self._record(key, compute, image, size)
        return compute(image).finish(size, copy=False)

    def _record(self, key: Any, compute: Compute[Values], image: Tensor, size: Size) -> Values:
        height, width = image.shape[-2:]
        LOG.info("preparing for images of %dx%d pixels", width, height)
        self._needed[key] = 2 * self._seen[key]  # record ever less often if sizes keep changing
        self._pool = self._pool or torch.cuda.graph_pool_handle()  # recordings share it
        static_image, graph = image.clone(), torch.cuda.CUDAGraph()
        try:
            recording = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
            with _garbage_collection_off(image.device), recording:
                computed = compute(static_image)
        except torch.OutOfMemoryError:  # a recording needs memory beside what the image takes
            self._recordings.clear()
            self._needed[key] = sys.maxsize
            torch.cuda.empty_cache()
            return compute(image).finish(size, copy=False)
        except RuntimeError as error:  # this network cannot be recorded
            self.trouble = str(error).partition("\n")[0]
            LOG.info("not recorded, every image is computed without a graph: %s", self.trouble)
            torch.cuda.synchronize(image.device)
            return compute(image).finish(size, copy=False)
        self._addresses = addresses(self._model)
        self._recordings[key] = Recording(graph, static_image, computed)
        while len(self._recordings) > 1 and (
            len(self._recordings) > MAX_RECORDINGS
            or sum(kept.num_bytes for kept in self._recordings.values()) > MAX_BYTES
        ):
            self._recordings.popitem(last=False)
        return self._recordings[key].replay(image, size)

    def _clear_if_outdated(self) -> None:
        if self._recordings and addresses(self._model) != self._addresses:
            for kept in (self._recordings, self._seen, self._needed):
                kept.clear()


@contextmanager
def _garbage_collection_off(device: torch.device) -> Iterator[None]:
    """Keep the garbage collector from freeing memory during a recording."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Return all modules, once each: ``model.modules()``, which takes longer than a small image."""
    modules, remaining = {model: None}, [model]
    while remaining:
        for module in remaining.pop()._modules.values():
            if module is not None and module not in modules:
                modules[module] = None
                remaining.append(module)
    return list(modules)


def addresses(model: nn.Module) -> list[Any]:
    """Return what a graph relies on: the modules, and the addresses of their tensors."""
    result: list[Any] = []
    for module in all_modules(model):
        result.append(id(module))
        for tensors in (module._parameters, module._buffers):
            result += [
                None if t is None else (t.data_ptr(), t.dtype, t.shape, t.stride())
                for t in tensors.values()
            ]
    return result


def has_hooks(model: nn.Module) -> bool:
    """Return True if modules have hooks, which a replay would not call."""
    return any(getattr(module, kind) for module in all_modules(model) for kind in HOOKS[:4])
