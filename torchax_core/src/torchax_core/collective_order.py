"""Collectives between processes, one after the other.

Each process compiles a program of its own, and XLA puts what does not depend on each other in an order of its own: two processes
could wait for each other in different collectives for ever. Inside a program each collective waits for the one before it, and
programs that have any are begun one at a time.
"""

from __future__ import annotations

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
    """The jaxpr with each collective made to wait for the one before it, and one result more, which waits for the last.

    Each process compiles its own program, and what surrounds a collective may differ: XLA must neither put collectives in an
    order of its own, nor leave out one of which this process does not use the result.
    """
    eqns: list[Any] = []
    last: Any = None
    for eqn in closed.jaxpr.eqns:
        if not any(collectives_of(eqn, ours)):
            eqns.append(eqn)
            continue
        inputs = eqn.invars
        if last is not None:
            inputs = [v if isinstance(v, jec.Literal) else _spliced(eqns, _after, last, v)[0] for v in inputs]
        results = [jec.Var(v.aval) for v in eqn.outvars]
        eqns.append(eqn.replace(invars=inputs, outvars=results))
        _spliced(eqns, lambda *given: jax.lax.optimization_barrier(given), *results, outputs=eqn.outvars)
        whole = next((v for v in eqn.outvars if v.aval.size), None)
        if whole is not None:
            (last,) = _spliced(eqns, _first, whole)
    if last is None:
        (last,) = _spliced(eqns, end)
    return jec.ClosedJaxpr(closed.jaxpr.replace(eqns=eqns, outvars=[*closed.jaxpr.outvars, last]), closed.consts)


def _after(last: Any, array: Any) -> Any:
    """`array`, that cannot be had before `last`. No square is 2 modulo 4, but XLA does not know."""
    return jnp.where((last * last) & 3 == 2, last.astype(array.dtype), array)


def _first(array: Any) -> Any:
    value = jnp.real(array.reshape(-1)[0])
    if jnp.issubdtype(value.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.int32)
    return value.astype(jnp.int32)


def _spliced(eqns: list[Any], fn: Callable[..., Any], *inputs: Any, outputs: Any = None) -> list[Any]:
    """Append the equations of `fn` of these variables; the variables of its results: `outputs`, or new ones."""
    made = jax.make_jaxpr(fn)(*[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inputs]).jaxpr
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
