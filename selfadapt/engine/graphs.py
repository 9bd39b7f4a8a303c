"""All that an image takes, recorded on the GPU once and replayed for the next of the same size.

Python starts some ten thousand kernels for one image, which takes longer than the kernels do. A
CUDA graph starts them all at once. It reads the network's weights where they lie, so that it is
good for as long as they lie there. Other weights, modules or hooks are noticed; a module's changed
attribute, such as another dilation, is not: that takes a new method.
"""

import gc
import logging
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from selfadapt.computed import Computed
from selfadapt.copying import HOOKS
from selfadapt.views import Size

LOG = logging.getLogger(__name__)
Compute = Callable[[Tensor], Computed]

RECORD_AT = 2
"""The image of a size, counted from 1, that is recorded. One that comes once is not worth it."""
MOST_SIZES, MOST_BYTES = 16, 4 * 2**30
"""Recordings that are kept: so many, and with so much memory of their own."""


@dataclass
class Recording:
    """A graph, and the memory it reads from and writes to."""

    graph: torch.cuda.CUDAGraph
    image: Tensor
    computed: Computed

    @property
    def num_bytes(self) -> int:
        """Memory that no other recording uses."""
        return self.image.nbytes + self.computed.num_bytes

    def replay(self, image: Tensor, size: Size) -> Computed:
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
        self._facts: Any = None
        self._lock = Lock()
        self.trouble = ""
        """Why nothing is recorded, if so."""

    def __call__(
        self, compute: Compute, image: Tensor, size: Size, variant: Hashable = None
    ) -> Computed:
        """Return what ``compute`` gives for an image, for a result of the given size.

        Args:
            compute: The computation. It waits for nothing on the device.
            image: The image.
            size: Height and width of the result.
            variant: What the computation depends on beside the image.
        """
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        key = (image.shape, image.dtype, image.device, autocast, variant)
        with self._lock:
            self._forget_if_outdated()
            if key in self._recordings:
                self._recordings.move_to_end(key)
                return self._recordings[key].replay(image, size)
            self._seen[key] += 1
            if self._seen[key] >= max(RECORD_AT, self._needed[key]) and not self.trouble:
                return self._record(key, compute, image, size)
        return compute(image).finish(size, copy=False)

    def _record(self, key: Any, compute: Compute, image: Tensor, size: Size) -> Computed:
        height, width = image.shape[-2:]
        LOG.info("preparing for images of %dx%d pixels", width, height)
        self._needed[key] = 2 * self._seen[key]  # where sizes come and go, ever fewer are recorded
        self._pool = self._pool or torch.cuda.graph_pool_handle()  # one after the other uses it
        still, graph = image.clone(), torch.cuda.CUDAGraph()
        try:
            recording = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
            with _undisturbed(image.device), recording:
                computed = compute(still)
        except torch.OutOfMemoryError:  # a recording needs memory beside what the image takes
            self._recordings.clear()
            self._needed[key] = sys.maxsize
            torch.cuda.empty_cache()
            return compute(image).finish(size, copy=False)
        except RuntimeError as error:  # this network does what cannot be recorded
            self.trouble = str(error).partition("\n")[0]
            LOG.info("not recorded, images are computed one by one: %s", self.trouble)
            torch.cuda.synchronize(image.device)
            return compute(image).finish(size, copy=False)
        self._facts = facts(self._model)
        self._recordings[key] = Recording(graph, still, computed)
        while len(self._recordings) > MOST_SIZES or self._num_bytes() > MOST_BYTES:
            if len(self._recordings) == 1:
                break
            self._recordings.popitem(last=False)
        return self._recordings[key].replay(image, size)

    def _num_bytes(self) -> int:
        return sum(recording.num_bytes for recording in self._recordings.values())

    def _forget_if_outdated(self) -> None:
        if self._recordings and facts(self._model) != self._facts:
            for kept in (self._recordings, self._seen, self._needed):
                kept.clear()


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Keep the garbage collector from giving back memory in the middle of a recording."""
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


def facts(model: nn.Module) -> list[Any]:
    """Return what a graph relies on: the modules, and where their tensors lie."""
    relied_on: list[Any] = []
    for module in model.modules():
        relied_on.append(id(module))
        for tensors in (module._parameters, module._buffers):
            relied_on += [
                None if t is None else (t.data_ptr(), t.dtype, t.shape, t.stride())
                for t in tensors.values()
            ]
    return relied_on


def has_hooks(model: nn.Module) -> bool:
    """Return True if somebody watches the modules run, which a replay would not show."""
    return any(getattr(module, kind) for module in model.modules() for kind in HOOKS[:4])
