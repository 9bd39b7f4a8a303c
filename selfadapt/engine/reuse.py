"""Frozen layers run once: a module whose inputs have not changed returns its earlier output.

Steps of adaptation run the same image through the same network repeatedly, and only the upper
layers change. Nothing is assumed about the architecture. The input and the frozen weights are
constant; the output of a module without tuned weights, or of a function, for constant inputs is
constant too, and is kept.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from selfadapt.copying import STANDARD
from selfadapt.norm import StatisticsTracker

IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "and", "or", "pow")}
DATA = Tensor.data.__get__  # type: ignore[attr-defined]
PASSED = STANDARD - {"_buffers"} | {"forward"}
"""Attributes that are not compared; buffers may be replaced."""
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Reuse(TorchFunctionMode):
    """Runs a network repeatedly on the same input while some of its weights change.

    Args:
        model: The network.
        tuned: Names of the parameters that change.
        constants: The input, and the weights that do not change.
        tracker: How running statistics follow the image, if they do: those of a layer that is not
            run again are updated all the same.
        precision: Sets the dtype that constants are computed in.
    """

    def __init__(
        self,
        model: nn.Module,
        tuned: Collection[str],
        constants: Iterable[Tensor],
        tracker: StatisticsTracker | None = None,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__()
        self._modules = list(frozen_modules(model, tuned))
        self._tracker = tracker or StatisticsTracker(0.0)
        self._precision = precision
        self._constants: dict[int, tuple[Tensor, int]] = {}  # with the version it must have
        self._used: set[int] = set()  # ids of constants that other operations have read
        self._calls: dict[Any, tuple[list[Any], Any, list[Tensor], list[Any], list[Any]]] = {}
        self._inside = False
        self.usable = True
        """False once the network has changed one of its constants."""
        self._given = [(tensor, version(tensor)) for tensor in constants]
        self._add_constants(tensor for tensor, _ in self._given)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Reuse outputs in a ``with`` block that runs the network."""
        if not self.usable:
            yield
            return
        before = [(module, module.__dict__.get("forward")) for module in self._modules]
        try:
            for module in self._modules:
                call = partial(self._call, module.forward, module)
                call.__wrapped__ = module.forward  # type: ignore[attr-defined] # its signature
                module.__dict__["forward"] = call
            with self:
                yield
        finally:
            for module, forward in before:
                module.__dict__.pop("forward", None)
                if forward is not None:
                    module.__dict__["forward"] = forward
        if any(version(tensor) != given for tensor, given in self._given):
            self._disable()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function called by the network, unless its output for these constants is kept."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._inside or not self.usable:
            return func(*args, **kwargs)
        if name in ("__get__", "__set__"):
            if (name == "__set__" or func == DATA) and id(args[0]) in self._constants:
                self._disable()  # changes through .data leave no trace
            return func(*args, **kwargs)
        changes = name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        if (changes or name == "__setitem__" or "out" in kwargs) and args:
            self._check_change(args, kwargs)
        return self._call(func, func, *args, **kwargs)

    def _call(self, run: Callable[..., Any], what: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inside or not self.usable:
            return run(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, Tensor) and id(first) not in self._constants:
            self._use(what, (*args, *kwargs.values()))
            return run(*args, **kwargs)
        leaves, form = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = self._key(what, leaves, form) if tensors else None
        if key is None or not self._are_constant(tensors):
            self._use(what, tensors)
            return run(*args, **kwargs)
        if key in self._calls:
            made, form, results, updates, attributes = self._calls[key]
            if not _all_same(attributes, _attributes(what)):
                return run(*args, **kwargs)  # the module was reconfigured meanwhile
            if self._are_constant(results):
                self._tracker.replay_updates(updates)
                return tree_unflatten(made, form)  # the caller may change lists and dicts
            self._disable()  # it was changed through a view
            return run(*args, **kwargs)
        start = len(self._tracker.updates)
        buffers = what.buffers() if isinstance(what, nn.Module) else ()
        versions = [(buffer, version(buffer)) for buffer in buffers]
        attributes = _attributes(what)
        self._inside = True
        try:
            with self._precision():
                result = run(*args, **kwargs)
        finally:
            self._inside = False
        updates = self._tracker.updates[start:]
        if self._keeps_state(versions, updates):
            return result
        if not _all_same(leaves, tree_flatten((args, kwargs))[0]):
            return result  # it has modified a list
        if not _all_same(attributes, _attributes(what)):
            return result  # it keeps state in its attributes
        made, form = tree_flatten(result)
        results = [leaf for leaf in made if isinstance(leaf, Tensor)]
        changed = [tensor for tensor in tensors if not self._are_constant([tensor])]
        if any(id(tensor) in self._used for tensor in changed):
            self._disable()  # its earlier users would see it changed the next time
            return result
        if not all(map(_plain, made)):
            returned = {id(tensor) for tensor in (*results, *changed)}
            self._use(None, (tensor for tensor in tensors if id(tensor) not in returned))
        tidy = all(isinstance(leaf, Tensor) or _plain(leaf) for leaf in made)
        if tidy and results and not any(map(_requires_grad, results)):
            self._add_constants([*tensors, *results])  # an input may have been changed in place
            self._calls[key] = made, form, results, updates, attributes
        return result

    def _key(self, what: Any, leaves: list[Any], form: Any) -> Any:
        parts = [id(leaf) if isinstance(leaf, Tensor) else _hashable(leaf) for leaf in leaves]
        key = (what, tuple(parts), form)
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def _are_constant(self, tensors: Iterable[Tensor]) -> bool:
        return all(
            (entry := self._constants.get(id(tensor))) is not None and version(tensor) == entry[1]
            for tensor in tensors
        )

    def _add_constants(self, tensors: Iterable[Tensor]) -> None:
        self._constants |= {id(tensor): (tensor, version(tensor)) for tensor in tensors}

    def _use(self, what: Any, values: Iterable[Any]) -> None:
        """Remember which constants were used; for a module, its own function calls do."""
        if not isinstance(what, nn.Module):
            self._used.update(id(value) for value in values if id(value) in self._constants)

    def _keeps_state(self, versions: Iterable[tuple[Tensor, int]], updates: Iterable[Any]) -> bool:
        """Return True if a module has changed its buffers, so that its next output may differ."""
        running = {id(tensor) for update in updates for tensor in update[:2]}
        changed = [tensor for tensor, before in versions if version(tensor) != before]
        return any(id(tensor) not in running for tensor in changed)

    def _check_change(self, args: Any, kwargs: Any) -> None:
        """Disable reuse if a constant is about to be changed by a value that is not constant."""
        changed = tree_flatten(kwargs.get("out", args[0]))[0]
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if any(id(leaf) in self._constants for leaf in changed) and not self._are_constant(tensors):
            self._disable()

    def _disable(self) -> None:
        self.usable = False
        for kept in (self._calls, self._constants, self._used, self._given):
            kept.clear()


def frozen_modules(model: nn.Module, tuned: Collection[str]) -> Iterator[nn.Module]:
    """Yield the largest modules that hold no tuned parameter, once each."""
    changing = {id(value) for name, value in model.named_parameters() if name in tuned}
    seen: set[nn.Module] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if module in seen:
            return
        seen.add(module)
        changes = any(id(parameter) in changing for parameter in module.parameters())
        if changes or isinstance(module, CONTAINERS):
            for child in module.children():
                yield from walk(child)
        elif not isinstance(module, torch.jit.ScriptModule):
            yield module

    yield from walk(model)


def _plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, bool | int | float | str | torch.Size)


def _attributes(what: Any) -> list[Any]:
    """Return all attributes of a module and its submodules, with the content of lists and dicts."""
    attributes: list[Any] = []
    for part in what.modules() if isinstance(what, nn.Module) else ():
        for name, value in part.__dict__.items():
            if name not in PASSED:
                attributes += (name, *_contents(value))
    return attributes


def _all_same(before: list[Any], now: list[Any]) -> bool:
    if len(before) != len(now):
        return False
    pairs = zip(before, now, strict=True)
    return all(a is b or (_plain(a) and type(a) is type(b) and a == b) for a, b in pairs)


def _hashable(leaf: Any) -> Any:
    if isinstance(leaf, slice):
        leaf = leaf.start, leaf.stop, leaf.step, "slice"
    return type(leaf), leaf


def _requires_grad(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.requires_grad


def version(tensor: Tensor) -> int:
    """Return a number that changes when the tensor is changed in place."""
    with torch._C.DisableTorchFunction():
        if hasattr(type(tensor), "version"):  # a DeferredTensor
            return tensor.version  # type: ignore[attr-defined]
        return -1 if tensor.is_inference() else tensor._version


def _contents(value: Any, depth: int = 3) -> list[Any]:
    """Return a value and its content: items of lists and dicts, tensors of other objects."""
    if depth == 0 or isinstance(value, Tensor | nn.Module | type) or callable(value):
        return [value]
    if isinstance(value, list | tuple | deque):
        inner = list(value)
    elif isinstance(value, dict):
        inner = [*value, *value.values()]
    else:
        inner = [v for v in getattr(value, "__dict__", {}).values() if isinstance(v, Tensor)]
    return [value, *(content for item in inner for content in _contents(item, depth - 1))]
