"""Calls that torch refuses for what is in their tensors: an index out of range, weights that are not probabilities.

A compiled program cannot raise. But a call that is new takes its time anyway: its values are looked at before it is
compiled, and where they look wrong, CPU torch is asked, whose error is raised. Calls that come after it with the same
signature are not looked at: they would have to wait for the device. Nor are calls in a trace, which have no values.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree as pytree

from torchax_core.convert import array_from_torch, is_traced
from torchax_core.dtypes import jax_dtype
from torchax_core.meta import call_of
from torchax_core.opset import ValueCheck
from torchax_core.tensor import Tensor
from torchax_core.view import View

__all__ = ["check_values"]


def check_values(func: Any, check: ValueCheck, bound: Iterable[tuple[Any, str, Any]]) -> None:
    """Raise what CPU torch raises for this call, if its values look as if it would.

    bound: schema argument, kind and value of each that the call gives.
    """
    given = {argument.name: value for argument, _, value in bound}
    seen = {}
    for name in filter(check.wants, given):
        seen[name] = pytree.tree_map(_values if name in check.values else _aval, given[name])
        if any(leaf is _UNKNOWN for leaf in pytree.tree_leaves(seen[name])):
            return
    if not check.refused(**seen):
        return
    positional, keywords = call_of(func._schema.arguments, pytree.tree_map(_on_cpu, given), "cpu")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            func(*positional, **keywords)
        except NotImplementedError:
            return  # no CPU kernel for this dtype: nothing to go by


_UNKNOWN = object()


def _values(x: Any) -> Any:
    """A tensor's elements; `_UNKNOWN` in a trace, or where other processes hold a part of them."""
    if not isinstance(x, torch.Tensor):
        return x
    array = _array(x) if isinstance(x, Tensor) else array_from_torch(x)
    stand_in = is_traced(array) or isinstance(array, jax.ShapeDtypeStruct)  # of shapes alone (whole.py)
    return _UNKNOWN if stand_in or not array.is_fully_addressable else np.asarray(array)


def _array(x: Tensor) -> Any:
    # a view is not to remember what is read here: it would make the next such call one of another signature
    if x.__class__ is View and not x._is_read():
        return x._path.read(x._store.array, x._offsets)
    return x._array()


def _aval(x: Any) -> Any:
    return jax.ShapeDtypeStruct(tuple(x.shape), jax_dtype(x.dtype)) if isinstance(x, torch.Tensor) else x


def _on_cpu(x: Any) -> Any:
    return x.detach().cpu() if isinstance(x, torch.Tensor) else x
