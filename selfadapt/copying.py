"""Private copies of networks, which share no state with the original.

Each image is adapted to on a copy, so that nothing has to be restored, no state is carried over to
the next image, and several threads may use the same network.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip

STANDARD = nn.Module().__dict__.keys()
"""Attributes that every module has."""
CONTAINERS = tuple(n for n, value in vars(nn.Module()).items() if isinstance(value, dict | set))
"""Those that hold its hooks, parameters, buffers and modules."""
NewTensor = Callable[[str, Tensor], Tensor]
"""Creates an empty tensor for the copy of a parameter or buffer, from its name and value."""


def private_copy(model: nn.Module, new_tensor: NewTensor | None = None) -> nn.Module:
    """Return a copy of a network that shares no state with it, in evaluation mode.

    In functions that were set on modules (hooks, a replaced ``forward``), references to the network
    are replaced by references to the copy; all other objects they refer to are shared.

    Args:
        model: The network.
        new_tensor: Creates the tensors of the copy, if they differ in dtype or layout.

    Raises:
        TypeError: The network cannot be copied.
    """
    copies: list[tuple[Tensor, Tensor]] = []
    memo: dict[int, Any] = {}
    with torch.inference_mode(False), torch.no_grad():
        for name, value in _named_tensors(model):
            new = torch.empty_like(value) if new_tensor is None else new_tensor(name, value)
            copies.append((new, value.detach()))
            memo[id(value)] = new
            if isinstance(value, nn.Parameter):
                memo[id(value)] = nn.Parameter(new, requires_grad=False)
        _copy_values(copies)
        hooks = [h for m in model.modules() for kind in HOOKS for h in getattr(m, kind).values()]
        memo |= {id(hook): hook for hook in hooks}
        for module in model.modules():  # most are empty, and deepcopy takes long for each
            for name in CONTAINERS:
                content: Any = vars(module).get(name)
                if type(content) in (dict, OrderedDict, set) and not content:
                    memo[id(content)] = type(content)()
        copied = _deep_copy(model, memo)
    functions: dict[int, Any] = {}
    for module in copied.modules():
        for kind in HOOKS:
            hooks_of_kind = getattr(module, kind)
            for key, hook in hooks_of_kind.items():
                hooks_of_kind[key] = _rebind(hook, memo, functions)
        for name, value in vars(module).items():
            if isinstance(value, FunctionType):
                module.__dict__[name] = _rebind(value, memo, functions)
        module.training = False
    return copied


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return parameters and buffers, except for scripted modules, which copy their own."""
    compiled = {
        id(tensor)
        for module in model.modules()
        if isinstance(module, torch.jit.ScriptModule)
        for tensor in (*module.parameters(), *module.buffers())
    }
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor) for name, tensor in named if id(tensor) not in compiled]


def _copy_values(copies: list[tuple[Tensor, Tensor]]) -> None:
    """Copy values, with a single foreach operation for tensors of equal dtype and layout."""
    alike = [(n, o) for n, o in copies if n.dtype == o.dtype and n.stride() == o.stride()]
    if alike:
        torch._foreach_copy_([new for new, _ in alike], [old for _, old in alike])
    filled = {id(new) for new, _ in alike}
    for new, old in copies:
        if id(new) not in filled:
            new.copy_(old)


class _DetachedCopies(TorchFunctionMode):
    """Detaches non-leaf tensors, such as stored features, which cannot be deep-copied."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Detach the argument of ``Tensor.__deepcopy__``."""
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            args = (args[0].detach(), *args[1:])
        return func(*args, **(kwargs or {}))


def _deep_copy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a network; an attribute that cannot be copied, such as a lock, is shared."""
    initial_memo = dict(memo)
    with _DetachedCopies():
        try:
            return copy.deepcopy(model, memo)
        except Exception:
            memo.clear()
            memo.update(initial_memo)
        for module in model.modules():
            for name, value in vars(module).items():
                if name not in STANDARD:
                    try:
                        copy.deepcopy(value, dict(initial_memo))
                    except Exception:
                        memo[id(value)] = value
        try:
            return copy.deepcopy(model, memo)
        except Exception as error:
            raise TypeError(
                f"{type(model).__name__} cannot be copied ({error}), and adaptation works on a "
                "copy of the network; give it a __deepcopy__, or remove what cannot be copied"
            ) from error


def _rebind(value: Any, memo: Mapping[int, Any], functions: dict[int, Any]) -> Any:
    """Return a function with references to originals replaced by references to copies.

    Args:
        value: A function, or an object that it refers to.
        memo: The copies, by the id of the original.
        functions: Functions that were already rebound, by the id of the original.
    """
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _rebind(value.__self__, memo, functions))
    if isinstance(value, partial):
        args = [_rebind(arg, memo, functions) for arg in value.args]
        keywords = {key: _rebind(arg, memo, functions) for key, arg in value.keywords.items()}
        return partial(_rebind(value.func, memo, functions), *args, **keywords)
    if not isinstance(value, FunctionType):
        return memo.get(id(value), value)
    if id(value) not in functions:
        closure = value.__closure__ or ()
        cells = tuple(CellType() for _ in closure)
        new = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        functions[id(value)] = new
        new.__defaults__ = tuple(_rebind(d, memo, functions) for d in value.__defaults__ or ())
        defaults = (value.__kwdefaults__ or {}).items()
        new.__kwdefaults__ = {key: _rebind(d, memo, functions) for key, d in defaults}
        new.__dict__.update(value.__dict__)
        for cell, old in zip(cells, closure, strict=True):
            with suppress(ValueError):  # a cell may be empty
                cell.cell_contents = _rebind(old.cell_contents, memo, functions)
    return functions[id(value)]
