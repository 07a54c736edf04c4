"""Ops on arrays whose shapes hold JAX's symbolic dimensions: the definition's body, called without a Tensor around it.

A torch tensor has numbers for sizes, so nothing here goes through torch: dtypes are worked out on meta tensors with a
stand-in length for every symbolic dimension, shapes by the bodies themselves.
Source: https://docs.jax.dev/en/latest/export/shape_poly.html
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import export as jax_export

from torchax_core.convert import scalar_array
from torchax_core.dtypes import jax_dtype, torch_dtype
from torchax_core.errors import OperatorNotFound
from torchax_core.kernel import DataDependentKernel, LoweringKernel, ViewKernel
from torchax_core.overrides import DecliningKernel
from torchax_core.templates import GENERATOR, SCALAR, STATIC, TENSORS, Slot, hashable, jax_value
from torchax_core.tensor import active
from torchax_core.variants import op_name

__all__ = ["is_symbolic", "run_symbolic", "runs_symbolic"]

_LENGTH = 3  # of the meta tensors that dtypes are worked out on, wherever a dimension is symbolic


def is_symbolic(value: Any) -> bool:
    """Whether this is a symbolic dimension, or an array or list with one."""
    if isinstance(value, (list, tuple)):
        return any(is_symbolic(v) for v in value)
    if isinstance(value, (jax.Array, jax.core.Tracer)):
        return any(jax_export.is_symbolic_dim(n) for n in value.shape)
    return bool(jax_export.is_symbolic_dim(value))


def runs_symbolic(kernel: Any) -> bool:
    """Whether a kernel's definition can be called on arrays alone."""
    if isinstance(kernel, DecliningKernel):
        return runs_symbolic(kernel.kernel) and runs_symbolic(kernel.following)
    if isinstance(kernel, ViewKernel) or op_name(kernel.func) in _SPECIAL:
        return True
    return (
        isinstance(kernel, LoweringKernel)
        and not isinstance(kernel, DataDependentKernel)
        and kernel.definition.kind != "decomposition"
        and not kernel.func._schema.is_mutable
    )


def run_symbolic(kernel: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op on jax arrays and numbers. Raises OperatorNotFound if its definition needs torch tensors."""
    if isinstance(kernel, DecliningKernel):
        return kernel.ask(lambda asked: run_symbolic(asked, args, kwargs))
    with jax.enable_x64(True):
        special = _SPECIAL.get(op_name(kernel.func))
        if special is not None:
            return special(*args, **kwargs)
        if not runs_symbolic(kernel):
            raise OperatorNotFound(
                f"{op_name(kernel.func)} has no lowering that could run with symbolic dimensions, only torch code. Give it "
                "one (`env.override_op_definition(..., is_jax_function=True)`), or export with static shapes."
            )
        if isinstance(kernel, ViewKernel):
            return _view(kernel, args, kwargs)
        return _lowering(kernel, args, kwargs)


def _lowering(kernel: LoweringKernel, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    arrays: list[Any] = []
    bound: dict[str, Any] = {}
    metas: dict[str, Any] = {}
    for argument, kind, value in kernel._bind(args, kwargs):
        bound[argument.name] = _template(value, kind, arrays)
        metas[argument.name] = _meta(value)
    draws, call = kernel._drawing(bound, metas, arrays)
    if draws:
        arrays.extend(active.environment._random_arguments(None))
    results = call(arrays)
    if results is NotImplemented:
        return NotImplemented
    dtypes = _dtypes(kernel, metas)
    flat = results if isinstance(results, (tuple, list)) else (results,)
    cast = [r if d is None or r is None else jnp.asarray(r).astype(d) for r, d in itertools.zip_longest(flat, dtypes)]
    return cast if isinstance(results, (tuple, list)) else cast[0]


def _dtypes(kernel: LoweringKernel, metas: dict[str, Any]) -> list[Any]:
    """The dtypes torch gives the results, where its meta kernel says so."""
    avals = kernel._result_avals(metas, {})
    if avals is None:
        return []
    groups = [a if isinstance(a, list) else [a] for a in avals]
    return [None if a is None else a.jax_dtype for group in groups for a in group]


def _view(kernel: ViewKernel, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    base, rest = args[0], args[1:]
    values = list(rest) + [
        kwargs.get(argument.name, argument.default_value) for argument in kernel.schema.arguments[1 + len(rest) :]
    ]
    if kernel.rules.split is not None:
        static, traced = kernel.rules.split(base.shape, *values)
    else:
        static, traced = tuple(hashable(jax_value(v)) for v in values), ()
    return kernel.rules.read(base, *static, *[_number(t) for t in traced])


def _number(value: Any) -> Any:
    return jax.core.dimension_as_value(value) if is_symbolic(value) else value


def _template(value: Any, kind: str, arrays: list[Any]) -> Any:
    if isinstance(value, (jax.Array, jax.core.Tracer)):
        arrays.append(value)
        return Slot(len(arrays) - 1)
    if value is None:
        return None
    if isinstance(value, (list, tuple)) and kind in (TENSORS, SCALAR):
        return [_template(v, kind, arrays) for v in value]
    if kind in (STATIC, GENERATOR):
        return jax_value(value)
    if is_symbolic(value):
        arrays.append(jax.core.dimension_as_value(value).astype(np.int64))
        return Slot(len(arrays) - 1)
    if isinstance(value, (bool, int, float, complex)):
        arrays.append(scalar_array(value))
        return Slot(len(arrays) - 1)
    return jax_value(value)


def _meta(value: Any) -> Any:
    if isinstance(value, (jax.Array, jax.core.Tracer)):
        shape = [_LENGTH if is_symbolic(n) else n for n in value.shape]
        return torch.empty(shape, dtype=torch_dtype(value.dtype), device="meta")
    if isinstance(value, (list, tuple)):
        return [_meta(v) for v in value]
    return _LENGTH if is_symbolic(value) else value


# -- ops whose definitions count in Python numbers ------------------------------------------------


def _slice(self: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if isinstance(end, int) and end >= 2**31:
        end = None
    index = [slice(None)] * self.ndim
    index[dim] = slice(start or None, end, step)
    return self[tuple(index)]


def _expand(self: Any, size: Sequence[Any], *, implicit: bool = False) -> Any:
    own = (1,) * (len(size) - self.ndim) + self.shape
    kept = [isinstance(n, int) and n == -1 for n in size]
    return jnp.broadcast_to(self, [o if keep else n for n, o, keep in zip(size, own, kept, strict=True)])


def _view_as(self: Any, size: Sequence[Any]) -> Any:
    known = math.prod([n for n in size if not (isinstance(n, int) and n == -1)])
    whole = math.prod(self.shape)
    return self.reshape([whole // known if isinstance(n, int) and n == -1 else n for n in size])


def _arange(start: Any, end: Any, step: Any = 1, *, dtype: Any = None, **_: Any) -> Any:
    whole = all(not isinstance(v, float) for v in (start, end, step))
    result = dtype or (torch.int64 if whole else torch.get_default_dtype())
    return jnp.arange(start, end, step, dtype=jax_dtype(result))


def _to_copy(self: Any, *, dtype: Any = None, **_: Any) -> Any:
    return self if dtype is None else self.astype(jax_dtype(dtype))


_SPECIAL: dict[str, Callable[..., Any]] = {
    "aten::slice.Tensor": _slice,
    "aten::expand": _expand,
    "aten::view": _view_as,
    "aten::_unsafe_view": _view_as,
    "aten::reshape": _view_as,
    "aten::arange": lambda end, **kwargs: _arange(0, end, **kwargs),
    "aten::arange.start": _arange,
    "aten::arange.start_step": _arange,
    "aten::_to_copy": _to_copy,
    "aten::clone": lambda self, **_: self,
    "aten::alias": lambda self: self,
    "aten::detach": lambda self: self,
    "aten::lift_fresh_copy": lambda self: self,
    "aten::sym_size.int": lambda self, dim: self.shape[dim],
    "aten::sym_numel": lambda self: math.prod(self.shape),
}
