"""torch's higher-order ops on device "jax": torch.cond, while_loop, scan and map, as JAX's.

Where the predicate or the loop is concrete, the code simply runs; inside a trace, it becomes `lax.cond`, `lax.while_loop` or
`lax.scan`. torch's own autograd rules for these ops apply, so gradients come as torch defines them.
Source: https://docs.pytorch.org/docs/stable/cond.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.map import map_impl
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op

from torchax_core.convert import array_from_torch, is_traced
from torchax_core.dtypes import torch_dtype
from torchax_core.errors import DataDependentError
from torchax_core.tensor import Aval, Tensor, active, make_tensor
from torchax_core.view import View

__all__ = ["SUPPORTED"]

SUPPORTED = (cond_op, while_loop_op, scan_op, map_impl)
"""The higher-order ops that run on device "jax"."""


def _arrays(values: Sequence[Any]) -> list[Any]:
    """The arrays of tensors; numbers as they are."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            if active.trace is not None:
                active.trace.lift(value)
            found.append(value._array())
        else:
            found.append(array_from_torch(value) if isinstance(value, torch.Tensor) else value)
    return found


def _tensors(arrays: Sequence[Any]) -> list[Any]:
    """Tensors around arrays, known to the trace under way."""
    made = [
        make_tensor(a, Aval.contiguous(a.shape, torch_dtype(a.dtype))) if hasattr(a, "dtype") else a for a in arrays
    ]
    if active.trace is not None:
        active.trace.note(made)
    return made


def _flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _on_arrays(function: Callable[..., Any], *, draws: str = "") -> Callable[..., tuple[Any, ...]]:
    """A function of tensors as one of arrays. With `draws`, the name of a loop: random numbers in it are refused, since
    every turn would draw the same."""

    def run(*arrays: Any) -> tuple[Any, ...]:
        before = getattr(active.trace, "draws", 0)
        with torch.no_grad():
            results = tuple(_arrays(_flat(function(*_tensors(arrays)))))
        if draws and getattr(active.trace, "draws", 0) != before:
            raise DataDependentError(
                f"{draws}: its body draws random numbers, which would be the same at every turn. Draw them before, and pass them "
                "in as a tensor."
            )
        return results

    return run


def _cond(pred: Any, true_fn: Any, false_fn: Any, operands: Sequence[Any]) -> Any:
    (choice,) = _arrays([pred])
    if not is_traced(choice):
        return tuple(_flat((true_fn if bool(choice) else false_fn)(*operands)))
    with jax.enable_x64(True):
        results = jax.lax.cond(choice.reshape(()), _on_arrays(true_fn), _on_arrays(false_fn), *_arrays(operands))
    return tuple(_tensors(results))


def _while_loop(
    cond_fn: Any, body_fn: Any, carried: Sequence[Any], additional: Sequence[Any], *_: Any, **__: Any
) -> Any:
    state, rest = _arrays(carried), _arrays(additional)
    if not any(is_traced(a) for a in (*state, *rest)):
        values = tuple(carried)
        while bool(cond_fn(*values, *additional)):
            values = tuple(_flat(body_fn(*values, *additional)))
        return values
    going, body = _on_arrays(cond_fn, draws="while_loop"), _on_arrays(body_fn, draws="while_loop")
    with jax.enable_x64(True):
        results = jax.lax.while_loop(
            lambda values: going(*values, *rest)[0].reshape(()), lambda values: body(*values, *rest), tuple(state)
        )
    return tuple(_tensors(results))


def _scan(
    combine_fn: Any, init: Sequence[Any], xs: Sequence[Any], additional: Sequence[Any], *_: Any, **__: Any
) -> Any:
    rest = _arrays(additional)
    count = len(init)
    body = _on_arrays(combine_fn, draws="scan")

    def step(carry: Any, slices: Any) -> Any:
        results = body(*carry, *slices, *rest)
        return results[:count], results[count:]

    with jax.enable_x64(True):
        carry, stacked = jax.lax.scan(step, tuple(_arrays(init)), tuple(_arrays(xs)))
    return _tensors([*carry, *stacked])


def _map(f: Any, xs: Sequence[Any], pos_args: Sequence[Any], *_: Any, **__: Any) -> Any:
    rest = _arrays(pos_args)
    body = _on_arrays(f, draws="map")
    with jax.enable_x64(True):
        stacked = jax.lax.map(lambda slices: body(*slices, *rest), tuple(_arrays(xs)))
    return _tensors(stacked)


for _op, _implementation in zip(SUPPORTED, (_cond, _while_loop, _scan, _map), strict=True):
    for _class in (Tensor, View):
        _op.py_impl(_class)(_implementation)
