"""torch functions caught above aten (`Tensor.__torch_function__`), for packs and overrides that define one.

Nothing is caught, and nothing is paid, until there is such a definition: only then does Tensor get a handler.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch.overrides import get_testing_overrides, resolve_name

from torchax_core.bridge import call_jax
from torchax_core.opset import Definition
from torchax_core.overrides import Declined
from torchax_core.tensor import Tensor, active, resolve_active

__all__ = ["asks_tensors", "chain", "defined", "find_function", "followers", "function_name", "refresh"]

_off = torch._C._disabled_torch_function_impl


class _Running(threading.local):
    names: frozenset[str] = frozenset()


_running = _Running()


def find_function(name: str) -> Any:
    """The torch function, or method, of a dotted name ("torch.nn.functional.interpolate", "torch.Tensor.split"); None if there is
    none."""
    module, _, attribute = name.rpartition(".")
    if not module:
        return None
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        owner = find_function(module)
        return getattr(owner, attribute, None) if inspect.isclass(owner) else None


def function_name(function: Any) -> str:
    """A torch function's dotted name: the same one, whichever of several led to it."""
    name = f"{getattr(function, '__module__', None) or 'torch'}.{getattr(function, '__qualname__', repr(function))}"
    if find_function(name) is function:
        return name
    return resolve_name(function) or name  # one that torch makes in another function (max_pool2d)


def asks_tensors(function: Any) -> bool:
    """Whether a function asks the class of its tensors before it runs, so that it can be caught: C functions do, and Python
    ones that call `handle_torch_function`, themselves or by what they are made of."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is None or "handle_torch_function" in code.co_names or function in get_testing_overrides()


def chain(environment: Any, name: str) -> list[tuple[str, Definition]]:
    """The definitions of a torch function, best first, each with where it stands."""
    found: list[tuple[str, Definition]] = []
    for store in (environment._overrides, type(environment)._everywhere):
        found += [("override", o.definition) for o in store.of(name)]
    definition = environment._table.definition(name)
    if definition is not None:
        found.append(("pack", definition))
    return found


def refresh() -> None:
    """Give Tensor its handler if any function is defined, by an override or a pack; take it away otherwise."""
    wanted = bool(_named())
    if wanted:
        Tensor.__torch_function__ = classmethod(_torch_function)  # type: ignore[assignment]
    else:
        Tensor.__torch_function__ = _off  # type: ignore[assignment]
    _table.cache_clear()
    for follow in followers:
        follow()


followers: list[Callable[[], None]] = []
"""Called when the set of defined functions may have changed."""


def defined() -> dict[Any, str]:
    """The function objects that are defined now, and their names."""
    return _table()


def _named() -> set[str]:
    from torchax_core.environment import Environment

    names: set[str] = set()
    stores = [Environment._everywhere]
    for reference in Environment._all:
        environment = reference()
        if environment is not None:
            stores.append(environment._overrides)
            for pack in environment._table._active or ():
                names |= pack.functions
    for store in stores:
        names |= {n for n, stack in store.by_op.items() if "::" not in n and stack}
    return names


@functools.cache
def _table() -> dict[Any, str]:
    """From the function objects to be caught to their names."""
    table = {}
    for name in _named():
        function = find_function(name)
        if function is not None:
            table[function] = name
    return table


def _torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    name = _table().get(func)
    if name is not None and name not in _running.names:
        if active.kernels is None:
            resolve_active()
        watch = active.environment._watch
        if watch is None:
            result = _call(name, args, kwargs or {})
        else:
            result = watch.run(func, args, kwargs or {}, lambda: _call(name, args, kwargs or {}), name=name, whole=True)
        if result is not NotImplemented:
            return result
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def _call(name: str, args: Any, kwargs: Any) -> Any:
    before = _running.names
    for _, definition in chain(active.environment, name):
        _running.names = before | {name}
        try:
            if definition.kind == "function":
                result = _call_jax(definition, args, kwargs)
            else:
                result = definition.body(*args, **kwargs)
        finally:
            _running.names = before
        if result is not NotImplemented:
            return result
    return NotImplemented


def _call_jax(definition: Definition, args: Any, kwargs: Any) -> Any:
    """A JAX function in a torch function's place; tensors become arrays, gradients come from jax.vjp."""

    def body(*args: Any, **kwargs: Any) -> Any:
        result = definition.body(*args, **kwargs)
        if result is NotImplemented:
            raise Declined
        return result

    try:
        with jax.enable_x64(True):  # as for every lowering
            return call_jax(body, *args, **kwargs)
    except Declined:
        return NotImplemented
