"""Running an op on meta tensors: torch's own checks, errors, and the shapes, strides and dtypes of the results.

Source: https://docs.pytorch.org/docs/stable/meta.html
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchax_core.recurrence import shortened
from torchax_core.tensor import Aval, Tensor

__all__ = ["NO_META", "aval_of_meta", "avals_of", "call_of", "check_out_dtypes", "meta_of", "run_on_meta"]


NO_META = object()
"""What run_on_meta returns for an op that has no meta kernel; None is what an op returns that returns nothing."""


def run_on_meta(func: Any, arguments: Sequence[Any], metas: dict[str, Any]) -> Any:
    """Call `func` on meta tensors: raises what torch raises for a bad call; NO_META without a meta kernel."""
    positional, keywords = call_of(arguments, metas)
    _spare_dynamo()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*meta.*|An output with one or more elements was resized")
        short = shortened(func, metas)
        if short is not None:
            with contextlib.suppress(Exception):  # the whole call raises it in its own words
                short_positional, short_keywords = call_of(arguments, short.metas)
                return short.results(func(*short_positional, **short_keywords))
        try:
            return func(*positional, **keywords)
        except NotImplementedError:
            return NO_META
        except Exception as error:
            return _run_on_cpu(func, positional, keywords, error)


def call_of(arguments: Sequence[Any], metas: dict[str, Any], device: str = "meta") -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of a call on meta tensors, or on tensors of another device."""
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for argument in arguments:
        if argument.name in metas:
            if argument.kwarg_only or keywords:
                keywords[argument.name] = metas[argument.name]
            else:
                positional.append(metas[argument.name])
        elif not argument.kwarg_only:
            # from here on by name
            keywords.setdefault("", None)
            keywords.pop("")
    names = [a.name for a in arguments if not a.kwarg_only]
    present = [n for n in names if n in metas]
    if present != names[: len(present)]:
        positional = []
        keywords = dict(metas)
    if any(a.name == "device" for a in arguments):
        keywords["device"] = torch.device(device)
    if "pin_memory" in keywords:
        keywords.pop("pin_memory")
    if "generator" in keywords:
        keywords["generator"] = None
    return positional, keywords


def check_out_dtypes(
    func: Any, arguments: Sequence[Any], metas: dict[str, Any], dtypes: dict[str, torch.dtype]
) -> None:
    """Raise what CPU torch raises for an `out=` of another dtype than its result: each op has rules of its own, which
    its meta kernel may not know.

    dtypes: of the results, by the names of the out= arguments.
    """
    given = {n: metas[n] for n in dtypes}
    if all(given[n].dtype is dtype for n, dtype in dtypes.items()):
        return
    fitting = metas | {
        n: torch.empty_strided(x.shape, x.stride(), dtype=dtypes[n], device="meta") for n, x in given.items()
    }
    for fill in (0, 1):  # what takes no zeros (a multinomial) may take ones
        try:
            _run_on_cpu(func, *call_of(arguments, metas), _TooLarge(), fill)
        except _TooLarge:
            return
        except Exception as error:
            try:
                _run_on_cpu(func, *call_of(arguments, fitting), _TooLarge(), fill)
            except Exception:  # it does not take these numbers, or not on the CPU: that says nothing about dtypes
                continue
            raise error from None
        return


class _TooLarge(Exception):
    """A call that is not tried on the CPU, or that has no kernel there."""


_CPU_ELEMENTS = 1 << 24


def _run_on_cpu(func: Any, positional: list[Any], keywords: dict[str, Any], error: Exception, fill: int = 0) -> Any:
    """A call that meta kernels refused, on CPU tensors full of `fill`: their wording is the one users know, and their
    verdict counts. Calls of more than 16M elements are not tried."""
    total = sum(x.numel() for x in pytree.tree_leaves((positional, keywords)) if isinstance(x, torch.Tensor))
    if total > _CPU_ELEMENTS:
        raise error

    def to_cpu(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu").fill_(fill)
        return torch.device("cpu") if isinstance(x, torch.device) else x

    positional, keywords = pytree.tree_map(to_cpu, (positional, keywords))
    # a call that turns out well must not move the user's generator
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return func(*positional, **keywords)
        except NotImplementedError as cpu_error:
            if "not implemented for" in str(cpu_error):  # a kernel, but not for this dtype
                raise cpu_error from None
            # no kernel there: the meta kernel's verdict stands, unless it only stumbled
            if isinstance(error, (AttributeError, NameError)):
                return NO_META
            raise error from None
        except Exception as cpu_error:
            raise cpu_error from None


def avals_of(outs: Any, count: int) -> list[Any]:
    """Avals of what an op returned on meta tensors: one per result, a list for a Tensor[]."""
    if count == 0:
        return []
    if count == 1:
        return [aval_of_meta(outs)]
    return [aval_of_meta(o) for o in outs]


def aval_of_meta(out: Any) -> Any:
    if isinstance(out, (list, tuple)):
        return [aval_of_meta(o) for o in out]
    if isinstance(out, torch.Tensor):
        return Aval.of(tuple(out.shape), tuple(out.stride()), out.dtype)
    return None


def meta_of(a: Any) -> Any:
    """An argument with every tensor as a meta tensor of its size, stride and dtype, and symbols as plain numbers."""
    if isinstance(a, Tensor):
        return a._aval.meta()
    if isinstance(a, torch.Tensor):
        return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta")
    if isinstance(a, (list, tuple)):
        return [meta_of(x) for x in a]
    if isinstance(a, (torch.SymFloat, torch.SymInt, torch.SymBool)):
        return 1.0 if isinstance(a, torch.SymFloat) else 1
    return a


@functools.cache
def _spare_dynamo() -> None:
    """Let torch's Python meta kernels run without importing torch._dynamo (a second or two) just to tell it to look away.

    They are wrapped so that dynamo, once loaded, does not trace into them; the wrapper asks dynamo on its first call. Until
    somebody else loads dynamo there is nothing to ask, and the wrapped function is called as it is.
    """
    import torch._meta_registrations  # with all the decompositions and refs that it builds on

    wrapper = torch._disable_dynamo(lambda: None).__code__
    found: list[Any] = [f for table in torch._decomp.global_decomposition_table.values() for f in table.values()]
    for name, module in list(sys.modules.items()):
        if name.startswith(
            ("torch._refs", "torch._prims", "torch._decomp", "torch._meta_registrations", "torch.optim")
        ):
            found += vars(module).values()
    for cls in {f for f in found if isinstance(f, type) and f.__module__.startswith("torch.optim")}:
        found += vars(cls).values()
    # some ten thousand functions are looked at in a process's first call: only closures can be wrappers
    todo = [f for f in found if f.__class__ is types.FunctionType and f.__closure__]
    seen = set(map(id, todo))
    while todo:
        function = todo.pop()
        cells = _cells(function)
        if function.__code__ is wrapper:
            fn = cells[function.__code__.co_freevars.index("fn")]
            if not hasattr(fn, "__dynamo_disable"):
                fn.__dynamo_disable = _until_dynamo(fn)
        for inner in cells:  # decorators of decorators
            if inner.__class__ is types.FunctionType and inner.__closure__ and id(inner) not in seen:
                seen.add(id(inner))
                todo.append(inner)


def _cells(function: types.FunctionType) -> list[Any]:
    """What a function closes over, in the order of its free variables; None for a cell that is empty."""
    found: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(None)
    return found


def _until_dynamo(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is None or not hasattr(dynamo, "disable"):
            return fn(*args, **kwargs)
        disabled = dynamo.disable(fn, True, wrapping=False)
        fn.__dynamo_disable = disabled  # type: ignore[attr-defined]
        return disabled(*args, **kwargs)

    return call
