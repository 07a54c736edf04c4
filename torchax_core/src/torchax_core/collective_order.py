"""Collectives between processes, one after the other.

Each process compiles a program of its own, and XLA puts what does not depend on each other in an order of its own: two processes
could wait for each other in different collectives for ever. Inside a program each collective waits for the one before it, and
programs that have any are begun one at a time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

__all__ = ["collectives_in", "end", "in_turn", "one_by_one"]


def collectives_in(jaxpr: Any, ours: Any) -> Iterator[tuple[str, set[str]]]:
    """What is sent and received over our axes, in order: in words, and the axes."""
    for eqn in jaxpr.eqns:
        yield from collectives_of(eqn, ours)


def collectives_of(eqn: Any, ours: Any) -> Iterator[tuple[str, set[str]]]:
    """As `collectives_in`, of one equation and of the jaxprs in it."""
    for inner in jec.jaxprs_in_params(eqn.params):
        yield from collectives_in(inner, ours)
    said = eqn.params.get("axes", eqn.params.get("axis_name"))
    axes = {axis for axis in (said if isinstance(said, (tuple, list)) else (said,)) if axis in ours}
    if axes and eqn.primitive.name != "axis_index":
        params = ", ".join(f"{k}={v}" for k, v in sorted(eqn.params.items()) if k in ("axes", "axis_name", "perm"))
        yield f"{eqn.primitive.name}({', '.join(str(v.aval) for v in eqn.invars)}; {params})", axes


def one_by_one(closed: Any, ours: Any) -> Any:
    """The jaxpr with each collective made to wait for the one before it, one more argument before its own, which the first waits
    for, and one result more, which waits for the last. Both are int32 of shape ().

    Each process compiles its own program, and what surrounds a collective may differ: XLA must neither put collectives in an
    order of its own, nor leave out one of which this process does not use the result. And it takes each process's program for
    everybody's: of a constant, which may be this process's alone, it would compute what all send without sending. So no
    collective is given what XLA knows; the argument, which each process has as a shard of one array, it knows nothing of.
    """
    start = jec.Var(jax.core.ShapedArray((), jnp.int32))
    eqns, last = _ordered(closed.jaxpr, start, ours)
    if last is start:
        (last,) = _spliced(eqns, end)
    jaxpr = closed.jaxpr
    ordered = jaxpr.replace(eqns=eqns, invars=[start, *jaxpr.invars], outvars=[*jaxpr.outvars, last])
    return jec.ClosedJaxpr(ordered, closed.consts)


def _ordered(jaxpr: Any, start: Any, ours: Any) -> tuple[list[Any], Any]:
    """The equations of a jaxpr with its collectives one after the other, the first after `start`; and what waits for the last."""
    eqns: list[Any] = []
    last = start
    for eqn in jaxpr.eqns:
        if not any(collectives_of(eqn, ours)):
            eqns.append(eqn)
            continue
        params = {name: _inside(value, ours) for name, value in eqn.params.items()}
        body = any(True for _ in jec.jaxprs_in_params(params))  # XLA may know of a loop where it begins
        may_wait = [_plain(v) and not (body and isinstance(v, jec.Literal)) for v in eqn.invars]
        inputs = [_after(eqns, last, v) if wait else v for v, wait in zip(eqn.invars, may_wait, strict=True)]
        results = [jec.Var(v.aval) for v in eqn.outvars]
        eqns.append(eqn.replace(invars=inputs, outvars=results, params=params))
        _spliced(eqns, lambda *given: jax.lax.optimization_barrier(given), *results, outputs=eqn.outvars)
        known = next(filter(_plain, eqn.outvars), None)
        if known is not None:
            (last,) = _spliced(eqns, _mixed, start, known)
    return eqns, last


def _inside(value: Any, ours: Any) -> Any:
    """A parameter of an equation, with the collectives of a jaxpr in it (a loop's body, a branch) in order, too."""
    if isinstance(value, (tuple, list)):
        return type(value)(_inside(v, ours) for v in value) if any(map(_is_jaxpr, value)) else value
    if not _is_jaxpr(value) or not any(collectives_in(value, ours)):
        return value
    if isinstance(value, jec.ClosedJaxpr):
        return jec.ClosedJaxpr(_inside(value.jaxpr, ours), value.consts)
    axis = next(axis for _, axes in collectives_in(value, ours) for axis in axes)
    given = list(filter(_plain, value.invars))  # some are known to XLA: those that a loop begins with
    first: list[Any] = []
    (start,) = _spliced(
        first,
        lambda *given: functools.reduce(_mixed, given, jax.lax.axis_index(axis)),
        *given,
        axis_env=[(axis, ours[axis])],
    )
    eqns, last = _ordered(value, start, ours)
    results = list(value.outvars)
    for i, v in enumerate(results):
        if _plain(v):  # the one that `_ordered` takes for what waits for this jaxpr
            results[i] = _after(eqns, last, v)
            break
    return value.replace(eqns=first + eqns, outvars=results)


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, (jec.Jaxpr, jec.ClosedJaxpr))


def _plain(v: Any) -> bool:
    """Whether this has numbers that may wait for others."""
    dtype = getattr(v.aval, "dtype", None)
    if dtype is None or dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    return bool(v.aval.size)


def _after(eqns: list[Any], last: Any, v: Any) -> Any:
    """`v`, that cannot be had before `last`. No square is 2 modulo 4, but XLA does not know."""

    def waiting(last: Any, array: Any) -> Any:
        return jnp.where((last * last) & 3 == 2, last.astype(array.dtype), array)

    return _spliced(eqns, waiting, last, v)[0]


def _mixed(start: Any, array: Any) -> Any:
    """A number that waits for `array`, and is not known to be the same in all processes, as that of a sum would be."""
    return start ^ _first(array)


def _first(array: Any) -> Any:
    value = jnp.real(array.reshape(-1)[0])
    if jnp.issubdtype(value.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.int32)
    return value.astype(jnp.int32)


def _spliced(
    eqns: list[Any], fn: Callable[..., Any], *inputs: Any, outputs: Any = None, axis_env: Any = None
) -> list[Any]:
    """Append the equations of `fn` of these variables; the variables of its results: `outputs`, or new ones."""
    made = jax.make_jaxpr(fn, axis_env=axis_env)(
        *[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inputs]
    ).jaxpr
    names: dict[Any, Any] = dict(zip(made.invars, inputs, strict=True))
    names |= dict(zip(made.outvars, outputs or (), strict=outputs is not None))
    for eqn in made.eqns:
        for v in eqn.outvars:
            names.setdefault(v, jec.Var(v.aval))
        known = [v if isinstance(v, jec.Literal) else names[v] for v in eqn.invars]
        eqns.append(eqn.replace(invars=known, outvars=[names[v] for v in eqn.outvars]))
    return [v if isinstance(v, jec.Literal) else names[v] for v in made.outvars]


_starting = threading.Lock()
_under_way: list[Any] = []
"""The end of the program with collectives that this process has begun last. XLA on CPU runs programs that do not need one
another's results at the same time, and each process chooses its own order: messages of two could be taken for one another's."""


def end() -> jax.Array:
    """A result by which to tell that a program has run: one that nobody else gets, who might donate it."""
    return jnp.zeros((), jnp.int32)


def in_turn(device: Any, call: Callable[[], tuple[Any, Any]]) -> Any:
    """The first of `call()`'s two results, the second of which is `end()`: it starts a program with collectives between
    processes, once the one begun before has run."""
    with _starting:
        if device.platform == "cpu":
            jax.block_until_ready(_under_way)
        results, last = call()
        _under_way[:] = [last]
    return results
