"""Running an op on meta tensors: torch's own checks, errors, and the shapes, strides and dtypes of the results.

Source: https://docs.pytorch.org/docs/stable/meta.html
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchax_core.tensor import Aval, Tensor

__all__ = ["NO_META", "aval_of_meta", "avals_of", "meta_of", "run_on_meta"]


NO_META = object()
"""What run_on_meta returns for an op that has no meta kernel; None is what an op returns that returns nothing."""


def run_on_meta(func: Any, arguments: Sequence[Any], metas: dict[str, Any]) -> Any:
    """Call `func` on meta tensors: raises what torch raises for a bad call; NO_META without a meta kernel."""
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
        keywords["device"] = torch.device("meta")
    if "pin_memory" in keywords:
        keywords.pop("pin_memory")
    if "generator" in keywords:
        keywords["generator"] = None
    _spare_dynamo()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*meta.*")
        try:
            return func(*positional, **keywords)
        except NotImplementedError:
            return NO_META
        except Exception as error:
            return _run_on_cpu(func, positional, keywords, error)


_CPU_ELEMENTS = 1 << 24


def _run_on_cpu(func: Any, positional: list[Any], keywords: dict[str, Any], error: Exception) -> Any:
    """A call that meta kernels refused, on CPU tensors of zeros: their wording is the one users know, and their verdict
    counts. Calls of more than 16M elements are not tried."""
    total = sum(x.numel() for x in pytree.tree_leaves((positional, keywords)) if isinstance(x, torch.Tensor))
    if total > _CPU_ELEMENTS:
        raise error

    def to_cpu(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu").zero_()
        return torch.device("cpu") if isinstance(x, torch.device) else x

    positional, keywords = pytree.tree_map(to_cpu, (positional, keywords))
    with torch.random.fork_rng(devices=[]):  # a call that turns out well must not move the user's generator
        try:
            return func(*positional, **keywords)
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
    for function in gc.get_referrers(wrapper):  # the wrappers stand in closures of decorators, of no module by name
        if isinstance(function, types.FunctionType) and function.__closure__ is not None:
            inner = function.__closure__[wrapper.co_freevars.index("fn")].cell_contents
            if not hasattr(inner, "__dynamo_disable"):
                inner.__dynamo_disable = _until_dynamo(inner)


def _until_dynamo(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is None or not hasattr(dynamo, "disable"):
            return fn(*args, **kwargs)
        disabled = dynamo.disable(fn, True, wrapping=False)
        fn.__dynamo_disable = disabled  # type: ignore[attr-defined]
        return disabled(*args, **kwargs)

    return call
