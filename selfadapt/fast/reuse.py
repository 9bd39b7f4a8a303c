"""What is frozen is computed once: a module whose inputs have not changed returns what it returned.

Steps of adaptation run the same image through the same network again and again, and only the upper
layers change. No architecture is known here. The input and the frozen weights are constant; what a
module without tuned weights, or a function, makes of constants is constant too, and is kept.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from selfadapt.norm import Drift

IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "and", "or", "pow")}
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Reuse(TorchFunctionMode):
    """Runs a network, again and again on the same input, with some of its weights tuned.

    Args:
        model: The network.
        tuned: Names of the parameters that change.
        constants: The input, and the weights that do not change.
        drift: How running statistics follow the image, if they do: those of a layer that is not
            run again follow all the same.
        precision: Sets the kind of numbers that constants are computed with.
    """

    def __init__(
        self,
        model: nn.Module,
        tuned: Collection[str],
        constants: Iterable[Tensor],
        drift: Drift | None = None,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__()
        self._modules = list(frozen_modules(model, tuned))
        self._drift = drift or Drift(0.0)
        self._precision = precision
        self._known: dict[int, tuple[Tensor, int]] = {}  # with the version it must have
        self._calls: dict[Any, tuple[Any, list[Tensor], list[Any]]] = {}
        self._inside = False
        self.usable = True
        """Whether there may be something to reuse: not where a network changes its constants."""
        self._learn(constants)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Reuse what can be reused in a ``with`` block that runs the network."""
        if not self.usable:
            yield
            return
        before = [(module, module.__dict__.get("forward")) for module in self._modules]
        try:
            for module in self._modules:
                module.__dict__["forward"] = partial(self._call, module.forward, module)
            with self:
                yield
        finally:
            for module, forward in before:
                module.__dict__.pop("forward", None)
                if forward is not None:
                    module.__dict__["forward"] = forward

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of the network's own code, unless it has been run on these constants."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._inside or name == "__get__":
            return func(*args, **kwargs)
        changes = name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        if (changes or name == "__setitem__" or "out" in kwargs) and args:
            self._check_change(args, kwargs)
        return self._call(func, func, *args, **kwargs)

    def _call(self, run: Callable[..., Any], what: Any, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else None
        if self._inside or (isinstance(first, Tensor) and id(first) not in self._known):
            return run(*args, **kwargs)
        leaves, form = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = self._key(what, leaves, form) if tensors and self.usable else None
        if key is None or not self._constant(tensors):
            return run(*args, **kwargs)
        if key in self._calls:
            result, results, followed = self._calls[key]
            if self._constant(results):
                self._drift.repeat(followed)
                return result
        start = len(self._drift.followed)
        self._inside = True
        try:
            with self._precision():
                result = run(*args, **kwargs)
        finally:
            self._inside = False
        made = [leaf for leaf in tree_flatten(result)[0] if not _plain(leaf)]
        results = [leaf for leaf in made if isinstance(leaf, Tensor)]
        if len(results) == len(made) and results and not any(map(_requires_grad, results)):
            self._learn([*tensors, *results])  # an input may have been changed in place
            self._calls[key] = result, results, self._drift.followed[start:]
        return result

    def _key(self, what: Any, leaves: list[Any], form: Any) -> Any:
        parts = [id(leaf) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves]
        key = (what, tuple(parts), form)
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def _constant(self, tensors: Iterable[Tensor]) -> bool:
        return all(
            (found := self._known.get(id(tensor))) is not None and _version(tensor) == found[1]
            for tensor in tensors
        )

    def _learn(self, tensors: Iterable[Tensor]) -> None:
        self._known |= {id(tensor): (tensor, _version(tensor)) for tensor in tensors}

    def _check_change(self, args: Any, kwargs: Any) -> None:
        """Give up where a constant is about to be changed by something that is none."""
        changed = kwargs.get("out", args[0])
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if id(changed) in self._known and not self._constant(tensors):
            self.usable = False
            self._calls.clear()


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
    return leaf is None or isinstance(leaf, bool | int | float | str)


def _requires_grad(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.requires_grad


def _version(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return -1 if tensor.is_inference() else tensor._version
