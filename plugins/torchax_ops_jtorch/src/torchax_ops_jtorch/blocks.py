"""Attention over blocks of queries, so that memory is linear in the length of the sequences, gradients included.

A block of queries looks at all keys at once: its softmax is the plain one. What it needs is computed anew in the backward
instead of being kept (jax.checkpoint), so that derivatives of every order and mode are jax's own.

Source: Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", https://arxiv.org/abs/2112.05682
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["block_length", "masked_softmax", "over_queries"]

_PARTS = 2
"""Into how many parts causal queries are cut, each of which looks no further than its own end: of n parts, (n - 1) / 2n of
the work is saved, and the program is n times as long."""

_FEWEST = 32
"""Queries in a block, however many keys there are: of fewer, matrix products lose more than memory gains."""

Rows = Any  # arrays whose last but one axis is the queries', in a pytree


def block_length(queries: int, weights_per_query: int) -> int:
    """How many queries make a block: as many as have attention weights that fit a processor's cache, or that keep an
    accelerator busy. All of them if they are few, or if their number is a symbol (an exported program's)."""
    if not (isinstance(queries, int) and isinstance(weights_per_query, int)):
        return queries
    budget = 1 << (19 if jax.default_backend() == "cpu" else 26)
    fitting = max(budget // max(weights_per_query, 1), _FEWEST)
    return queries if fitting >= queries else 1 << (fitting.bit_length() - 1)


def over_queries(
    attend: Callable[[Any, int, Rows], Rows], rows: Rows, queries: int, keys: int, block: int, *, causal: bool
) -> Rows:
    """`attend` over all queries, `block` at a time.

    attend:  (number of the first query, how many keys to look at, rows of the queries) -> rows of the results.
    rows:    arrays (..., queries, n).
    causal:  no query needs keys beyond its own number.
    returns: the results, (..., queries, m).
    """
    if block >= queries:
        return attend(0, keys, rows)
    outputs = []
    for start, stop in _parts(queries, block, causal):
        part = jax.tree.map(lambda x, start=start, stop=stop: x[..., start:stop, :], rows)
        body = jax.checkpoint(functools.partial(_at, attend, min(keys, stop) if causal else keys))
        count = (stop - start) // block
        if count > 1:
            starts = start + block * jnp.arange(count)
            stacked = jax.tree.map(functools.partial(_stacked, count=count), part)
            outputs.append(jax.tree.map(_unstacked, jax.lax.map(body, (starts, stacked))))
        else:
            outputs.append(body((start, part)))
    return jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=-2), *outputs)


def _at(attend: Callable[[Any, int, Rows], Rows], keys: int, first_and_rows: tuple[Any, Rows]) -> Rows:
    first, rows = first_and_rows
    return attend(first, keys, rows)


def _parts(queries: int, block: int, causal: bool) -> Iterator[tuple[int, int]]:
    """Ranges of queries, of whole blocks each, and what is left over."""
    whole = queries // block
    step = -(-whole // _PARTS) if causal else whole
    for start in range(0, whole, step):
        yield start * block, min(start + step, whole) * block
    if whole * block < queries:
        yield whole * block, queries


def _stacked(x: jax.Array, count: int) -> jax.Array:
    """(..., count * block, n) -> (count, ..., block, n)."""
    return jnp.moveaxis(x.reshape(*x.shape[:-2], count, -1, x.shape[-1]), -3, 0)


def _unstacked(x: jax.Array) -> jax.Array:
    """(count, ..., block, n) -> (..., count * block, n)."""
    x = jnp.moveaxis(x, 0, -3)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def masked_softmax(logits: jax.Array, *, rows_may_be_empty: bool = True) -> jax.Array:
    """Softmax over the last axis in which a row of nothing but -inf, if there may be one, gives zeros, where the formula gives
    NaN."""
    lowest = jnp.finfo(logits.dtype).min if rows_may_be_empty else None  # not -inf, which taken from itself is NaN
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True, initial=lowest)))
    total = weights.sum(-1, keepdims=True)
    # a sum is at least 1, the largest one's, unless all are 0
    return weights / (jnp.maximum(total, 0.5) if rows_may_be_empty else total)
