"""Each collective as a JAX function of one member's array: what runs inside jax.shard_map, whatever the members are.

`axis` is the mesh axis whose positions are the members; None: there is one member. Arrays of bools travel as integers.

Source: https://docs.jax.dev/en/latest/jax.lax.html#parallel-operators
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

__all__ = [
    "REDUCTIONS",
    "Axis",
    "broadcast",
    "exchange",
    "exchange_all",
    "gather",
    "permute",
    "reduce",
    "reduce_all",
    "reduce_scatter",
    "scatter",
]

Axis = str | tuple[str, ...]

_DIRECT: dict[str, Callable[[jax.Array, Axis], jax.Array]] = {
    "sum": jax.lax.psum,
    "max": jax.lax.pmax,
    "min": jax.lax.pmin,
}
# What JAX has no collective for is reduced after gathering: arrays of all members, stacked along axis 0.
_STACKED: dict[str, Callable[..., jax.Array]] = {
    "sum": jnp.sum,
    "max": jnp.max,
    "min": jnp.min,
    "product": jnp.prod,
    "band": jnp.bitwise_and.reduce,
    "bor": jnp.bitwise_or.reduce,
    "bxor": jnp.bitwise_xor.reduce,
}
REDUCTIONS = ("sum", "avg", *list(_STACKED)[1:], "premul_sum")
"""torch's reductions, by the names that _c10d_functional knows them by."""


def reduce(x: jax.Array, reduction: str, axis: Axis | None, factor: float | None = None) -> jax.Array:
    """The reduction over all members, on every member. x: any shape; returns its shape and dtype.

    An "avg" of integers is truncated towards zero, and a "sum" of bools is their "or", as NCCL has them.
    """
    if reduction == "premul_sum":
        return reduce((x * factor).astype(x.dtype), "sum", axis)
    if axis is None:
        return x
    if x.dtype == jnp.bool_:
        return reduce(x.astype(jnp.int32), reduction, axis) != 0
    if reduction == "avg":
        return _divide(reduce(x, "sum", axis), int(jax.lax.axis_size(axis)))
    if reduction in _DIRECT:
        return _DIRECT[reduction](x, axis)
    return _STACKED[reduction](jax.lax.all_gather(x, axis), axis=0).astype(x.dtype)


def reduce_all(
    xs: Sequence[jax.Array], reduction: str, axis: Axis | None, factor: float | None = None
) -> list[jax.Array]:
    """`reduce` of each of several arrays."""
    return [reduce(x, reduction, axis, factor) for x in xs]


def reduce_scatter(parts: jax.Array, reduction: str, axis: Axis | None, factor: float | None = None) -> jax.Array:
    """The reduction of this member's part. parts: (members, ...), one for each; returns (...)."""
    if reduction == "premul_sum":
        return reduce_scatter((parts * factor).astype(parts.dtype), "sum", axis)
    if axis is None:
        return parts[0]
    if parts.dtype == jnp.bool_:
        return reduce_scatter(parts.astype(jnp.int32), reduction, axis) != 0
    if reduction == "avg":
        return _divide(reduce_scatter(parts, "sum", axis), parts.shape[0])
    if reduction == "sum":
        return _sum_of_parts(parts, axis)
    return _STACKED[reduction](exchange(parts, axis), axis=0).astype(parts.dtype)


def gather(x: jax.Array, axis: Axis | None) -> jax.Array:
    """Every member's array, stacked. x: (...); returns (members, ...)."""
    return x[None] if axis is None else jax.lax.all_gather(x, axis)


def exchange(parts: jax.Array, axis: Axis | None) -> jax.Array:
    """Part i goes to member i. parts: (members, ...); returns the parts received, (members, ...)."""
    return parts if axis is None else jax.lax.all_to_all(parts, axis, 0, 0, tiled=True)


def exchange_all(several: Sequence[jax.Array], axis: Axis | None) -> list[jax.Array]:
    """`exchange` of each of several arrays."""
    return [exchange(parts, axis) for parts in several]


def broadcast(x: jax.Array, source: int, axis: Axis | None) -> jax.Array:
    """The array of the member `source`, on every member."""
    if axis is None:
        return x
    return _from_one(x, source, axis, jax.lax.psum)


def scatter(parts: jax.Array, source: int, axis: Axis | None) -> jax.Array:
    """This member's part of what the member `source` has. parts: (members, ...); returns (...)."""
    if axis is None:
        return parts[0]
    return _from_one(parts, source, axis, _sum_of_parts)


def permute(x: jax.Array, pairs: tuple[tuple[int, int], ...], axis: Axis | None) -> jax.Array:
    """The array of the member that sends to this one by `pairs`, (sender, receiver); zeros if none does."""
    if axis is None:
        return x if pairs else jnp.zeros_like(x)
    return jax.lax.ppermute(x, axis, pairs)


def _sum_of_parts(parts: jax.Array, axis: Axis) -> jax.Array:
    """The sum of this member's part. Between processes on CPU, XLA's reduce-scatter is one of gloo's that waits for the others
    half a minute and no longer; in all others they wait as long as XLA says."""
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        return jnp.sum(exchange(parts, axis), axis=0, dtype=parts.dtype)
    return jax.lax.psum_scatter(parts, axis)


def _divide(total: jax.Array, members: int) -> jax.Array:
    if jnp.issubdtype(total.dtype, jnp.integer):
        return jax.lax.div(total, jnp.full_like(total, members))
    return total / members


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _from_one(x: jax.Array, source: int, axis: Axis, sum: Callable[..., jax.Array]) -> jax.Array:
    """The sum over members, of which only one counts, bit for bit: as floats, -0.0 + 0.0 would be 0.0."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        real, imag = (_from_one(part, source, axis, sum) for part in (x.real, x.imag))
        return jax.lax.complex(real, imag)
    if x.dtype == jnp.bool_:
        return _from_one(x.astype(jnp.uint8), source, axis, sum) != 0
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return sum(_only_of(x, source, axis), axis)
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return jax.lax.bitcast_convert_type(sum(_only_of(bits, source, axis), axis), x.dtype)


@_from_one.defjvp
def _(source: int, axis: Axis, sum: Callable[..., jax.Array], primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    return _from_one(x, source, axis, sum), sum(_only_of(dx, source, axis), axis)


def _only_of(x: jax.Array, source: int, axis: Axis) -> jax.Array:
    return jnp.where(jax.lax.axis_index(axis) == source, x, jnp.zeros_like(x))
