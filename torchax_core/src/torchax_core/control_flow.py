"""torch's control flow operators on device "jax": `torch.cond`, `while_loop`, `scan`, `map`, as JAX's own.

torch captures the branches and bodies as graphs whose inputs are all given, and derives gradients; what is left is to run
a graph as part of a jax loop or branch. Eagerly a condition's value is known, so the branch runs as ordinary code; loops
over steps are compiled, once per graph.

Source: https://docs.pytorch.org/docs/stable/cond.html, https://docs.jax.dev/en/latest/jax.lax.html#control-flow-operators
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.map import map_dense, map_impl
from torch._higher_order_ops.scan import scan_op, scan_op_dense
from torch._higher_order_ops.while_loop import while_loop_dense, while_loop_op
from torch.utils import _pytree as pytree

from torchax_core.bridge import call_jax, jax_view
from torchax_core.convert import is_traced
from torchax_core.entrances import entrance
from torchax_core.tensor import Tensor, active, resolve_active
from torchax_core.view import View

try:  # torch 2.9
    from torch._higher_order_ops.while_loop import while_loop_stack_output_op
except ImportError:
    while_loop_stack_output_op = None  # type: ignore[assignment]

__all__ = ["register"]

Code = Callable[..., Any]


def register() -> None:
    """Give torch's control flow operators rules for our tensors."""
    for kind in (Tensor, View):
        for operator, rule in _RULES:
            operator.py_impl(kind)(rule)
        if while_loop_stack_output_op is not None:
            while_loop_stack_output_op.py_impl(kind)(_while_loop_stacked)
    for operator, rule in _RULES:
        _differentiate_in_traces(operator, rule)


def _differentiate_in_traces(operator: Any, rule: Code) -> None:
    """Inside a trace gradients come from jax.vjp: torch's, which capture a graph of the backward first, need tensors that
    have values. (A while_loop has no reverse mode in JAX.)"""
    key = torch._C.DispatchKey.Autograd
    captured = operator.py_kernels.pop(key)

    @entrance
    def differentiable(*args: Any, **kwargs: Any) -> Any:
        return (rule if active.trace is not None and _ours(args) else captured)(*args, **kwargs)

    # not py_autograd_impl, which captures graphs of the branches to see whether they write to their inputs: where dynamo has
    # not made these graphs they are functions with closures, of tensors without values
    operator.py_impl(key)(differentiable)


def _ours(args: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(args))


def _cond(pred: Any, true_fn: Code, false_fn: Code, operands: Sequence[Any]) -> Any:
    if not _traced([pred]):
        return true_fn(*operands) if pred else false_fn(*operands)

    def cond(pred: Any, *operands: Any) -> Any:
        with jax.enable_x64(True):
            return jax.lax.cond(pred, jax_view(true_fn), jax_view(false_fn), *map(jnp.asarray, operands))

    return call_jax(cond, pred, *operands)


def _while_loop(
    cond_fn: Code,
    body_fn: Code,
    carried_inputs: Sequence[Any],
    additional_inputs: Sequence[Any],
    mutated_arg_indices: str = "",
) -> Any:
    if not _traced([*carried_inputs, *additional_inputs]) and not all(isinstance(c, Tensor) for c in carried_inputs):
        return while_loop_dense(cond_fn, body_fn, carried_inputs, additional_inputs)  # counts with Python's numbers
    condition, body, count = _arrays(cond_fn), _arrays(body_fn), len(carried_inputs)

    def loop(*values: Any) -> Any:
        with jax.enable_x64(True):
            start, rest = tuple(map(jnp.asarray, values[:count])), values[count:]
            return jax.lax.while_loop(
                lambda carry: condition(*carry, *rest)[0], lambda carry: body(*carry, *rest), start
            )

    return _run(body_fn, "while_loop", loop, [*carried_inputs, *additional_inputs])


def _while_loop_stacked(
    cond_fn: Code,
    body_fn: Code,
    carried_inputs: Sequence[Any],
    additional_inputs: Sequence[Any],
    mutated_arg_indices: str = "",
) -> Any:
    """What torch's gradient of a while_loop needs: the values of all rounds. Eagerly their number is known."""
    return while_loop_dense(cond_fn, body_fn, carried_inputs, additional_inputs, stack_output=True)


def _scan(
    combine_fn: Code,
    init: Sequence[Any],
    xs: Sequence[Any],
    additional_inputs: Sequence[Any],
    mutated_arg_indices: str = "",
) -> Any:
    if not xs or not xs[0].shape[0]:
        return scan_op_dense(combine_fn, init, xs, additional_inputs)
    body, carried, scanned = _arrays(combine_fn), len(init), len(xs)

    def scan(*values: Any) -> Any:
        carry, steps, rest = values[:carried], values[carried : carried + scanned], values[carried + scanned :]

        def step(carry: Any, slices: Any) -> Any:
            results = body(*carry, *slices, *rest)
            return results[:carried], results[carried:]

        with jax.enable_x64(True):
            carry, ys = jax.lax.scan(step, carry, steps)
        return (*carry, *ys)

    return _run(combine_fn, "scan", scan, [*init, *xs, *additional_inputs])


def _map(f: Code, xs: Sequence[Any], pos_args: Sequence[Any], mutated_arg_indices: str = "") -> Any:
    if not xs or not xs[0].shape[0]:
        return map_dense(f, xs, pos_args)
    body, mapped = jax_view(f), len(xs)

    def run(*values: Any) -> Any:
        with jax.enable_x64(True):
            return jax.lax.map(lambda slices: body(*slices, *values[mapped:]), values[:mapped])

    return _run(f, "map", run, [*xs, *pos_args])


def _arrays(code: Code) -> Code:
    """Torch code as a function of arrays to a tuple of arrays: torch wants a list or a tuple, jax the same one each time."""

    def flat(*values: Any) -> Any:
        results = code(*values)
        return tuple(results) if isinstance(results, (list, tuple)) else (results,)

    return jax_view(flat)  # type: ignore[no-any-return]


def _run(code: Code, kind: str, function: Code, values: Sequence[Any]) -> Any:
    """`function` on Tensors: as it is inside a trace, else compiled, and kept with `code`, the graph it is made of."""
    if _traced(values):
        return call_jax(function, *values)
    if active.environment is None:
        resolve_active()
    environment = active.environment
    kept = code.__dict__.setdefault("_torchax_programs", {})
    numbers = tuple(i for i, value in enumerate(values) if not isinstance(value, torch.Tensor))
    key = (kind, environment, environment.version, len(values), numbers)
    if key not in kept:
        kept[key] = jax.jit(function, static_argnums=numbers)
    return call_jax(kept[key], *values)


def _traced(values: Sequence[Any]) -> bool:
    if active.trace is not None:
        return True
    return any(isinstance(value, Tensor) and is_traced(value._array()) for value in values)


_RULES = ((cond_op, _cond), (while_loop_op, _while_loop), (scan_op, _scan), (map_impl, _map))
