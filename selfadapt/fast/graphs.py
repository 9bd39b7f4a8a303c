"""All that an image takes, recorded on the GPU once and replayed for the next of the same size.

Python starts some ten thousand kernels for one image, which takes longer than the kernels do. A
CUDA graph starts them all at once. It reads the network's weights where they lie, so that it is
good for as long as they lie there; what a network is given or loses meanwhile is noticed.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Maps = dict[str, Tensor]
"""What a computation gives, by name."""
Compute = Callable[[Tensor], Maps]

FIRST = 2
"""Images of a size that are computed one by one, before one is recorded."""
MOST = 4
"""Sizes that are kept."""


@dataclass
class Recording:
    """A graph, and the memory it reads from and writes to."""

    graph: torch.cuda.CUDAGraph
    image: Tensor
    maps: Maps

    def replay(self, image: Tensor) -> Maps:
        """Compute the same for another image; what was returned before is written over."""
        self.image.copy_(image)
        self.graph.replay()
        return self.maps


class Graphs:
    """Runs a computation on a network's images, one after the other.

    Args:
        model: The network.
        lent: Lends it out for a computation that is not replayed.
    """

    def __init__(self, model: nn.Module, lent: Callable[[], AbstractContextManager[Any]]) -> None:
        self._model, self._lent = model, lent
        self._seen: Counter[Any] = Counter()
        self._recordings: OrderedDict[Any, Recording] = OrderedDict()
        self._facts: Any = None
        self.trouble: str | None = None
        """Why nothing is recorded, if so."""

    def __call__(self, compute: Compute, image: Tensor) -> Maps:
        """Return what ``compute`` gives for an image. The maps are good until the next call."""
        self._forget_what_is_outdated()
        key = (image.shape, image.dtype, image.device, torch.is_autocast_enabled("cuda"))
        if key in self._recordings:
            self._recordings.move_to_end(key)
            return self._recordings[key].replay(image)
        self._seen[key] += 1
        if self._seen[key] > FIRST and self.trouble is None and not has_hooks(self._model):
            return self._record(key, compute, image)
        with self._lent():
            return compute(image)

    def _record(self, key: Any, compute: Compute, image: Tensor) -> Maps:
        while len(self._recordings) >= MOST:
            self._recordings.popitem(last=False)
        image = image.clone()
        with self._lent():
            maps = self._warm_up(compute, image)
            try:
                self._recordings[key] = _recorded(compute, image)
            except (RuntimeError, torch.AcceleratorError) as error:  # this network cannot be
                self.trouble = str(error).partition("\n")[0]
                torch.cuda.synchronize(image.device)
        self._facts = facts(self._model)
        return maps

    def _warm_up(self, compute: Compute, image: Tensor) -> Maps:
        """Compute once more, and let the fastest convolutions be found."""
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            return compute(image)
        finally:
            torch.backends.cudnn.benchmark = before

    def _forget_what_is_outdated(self) -> None:
        if self._recordings and (facts(self._model) != self._facts or has_hooks(self._model)):
            self._recordings.clear()
            self._seen.clear()


def _recorded(compute: Compute, image: Tensor) -> Recording:
    torch.cuda.synchronize(image.device)
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True  # what was found is looked up
    try:
        with torch.cuda.graph(graph):
            maps = compute(image)
    finally:
        torch.backends.cudnn.benchmark = before
    graph.replay()
    return Recording(graph, image, maps)


def facts(model: nn.Module) -> list[Any]:
    """Return what a graph relies on: the modules, and where their tensors lie."""
    found: list[Any] = []
    for module in model.modules():
        found.append(id(module))
        for tensors in (module._parameters, module._buffers):
            found += [None if t is None else (t.data_ptr(), t.dtype) for t in tensors.values()]
    return found


def has_hooks(model: nn.Module) -> bool:
    """Say whether somebody looks at what the modules do, which a replay would not show."""
    return any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        for module in model.modules()
    )
