"""Attention over the tiles of a BlockMask that are not empty: for a block of queries, a loop over its blocks of keys.

The loop is as long as the block's count says, which is a value: what is masked whole costs nothing. Its softmax is made of
running highest scores and sums; the backward computes a tile's scores anew and needs the logarithm of the sum alone.

Source: Dao et al., "FlashAttention", https://arxiv.org/abs/2205.14135
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from torchax_ops_jtorch.precision import einsum

__all__ = ["Code", "Grid", "attend", "gradients", "grid_of", "listed", "working_type"]

_LN2 = math.log(2)

_FEWEST = 1 << 14
"""Attention weights in a tile, of which fewer lose more in the loop than empty tiles save."""

_FEWEST_ALTOGETHER = 1 << 20
"""And in all of it: less is computed at once as quickly."""

Code = Callable[..., jax.Array]
"""Of scores (b, h, q, k), if it is a score_mod, of the numbers of each axis, and of captured tensors."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """Sizes of attention and of a BlockMask over it, whose tiles are `tile` queries by keys. A row of tiles is what one block
    of queries of one of the BlockMask's batches and heads looks at: (mask_batch * mask_heads * blocks) in number, each for
    all batches and heads that share the mask."""

    batch: int
    heads: int
    kv_heads: int
    lengths: tuple[int, int]
    tile: tuple[int, int]
    mask_batch: int
    mask_heads: int

    @property
    def blocks(self) -> tuple[int, int]:
        """How many blocks of queries there are, and of keys."""
        return -(-self.lengths[0] // self.tile[0]), -(-self.lengths[1] // self.tile[1])

    @property
    def shared(self) -> tuple[int, int, int]:
        """Batches that share a mask; heads of keys that do; heads of queries to each of these."""
        heads = (self.kv_heads, self.heads // self.kv_heads) if self.mask_heads == 1 else (1, 1)
        return self.batch // self.mask_batch, *heads

    @property
    def weights(self) -> int:
        """Attention weights in a row's tile."""
        return math.prod(self.shared) * math.prod(self.tile)


def grid_of(query: Any, key: Any, tile: tuple[int, int], counts: Any, indices: Any) -> Grid | None:
    """The grid, if the sizes make one that pays: decided by shapes alone."""
    sizes = (*query.shape, *key.shape, *counts.shape, *indices.shape, *tile)
    if not all(isinstance(n, int) and n > 0 for n in sizes) or counts.ndim != 3 or indices.ndim != 4:
        return None
    (batch, heads, length, _), (kv_batch, kv_heads, source, _) = query.shape, key.shape
    mask_batch, mask_heads = counts.shape[:2]
    grid = Grid(
        batch, heads, kv_heads, (length, source), (min(tile[0], length), min(tile[1], source)), mask_batch, mask_heads
    )
    fits = mask_batch in (1, batch) and mask_heads in (1, heads) and (kv_batch == batch or mask_batch == batch)
    return grid if fits and counts.shape[2] == grid.blocks[0] and _pays(grid) else None


def _pays(grid: Grid) -> bool:
    altogether = grid.batch * grid.heads * math.prod(grid.lengths)
    enough = grid.weights >= _FEWEST and altogether >= _FEWEST_ALTOGETHER
    # an accelerator would ask its host, at each tile, whether there is another
    return enough and math.prod(grid.blocks) > 1 and jax.default_backend() == "cpu"


def listed(tile: tuple[int, int], counts: jax.Array, indices: jax.Array, places: jax.Array, keys: int) -> jax.Array:
    """Whether a BlockMask lists the tile of each query in `places` and each key: (batch or 1, heads or 1, queries, keys)."""
    columns = -(-keys // tile[1])
    valid = jnp.arange(indices.shape[-1]) < counts[..., None]
    # the numbers beyond a count mean nothing, and go to a column of their own
    found = jnp.zeros((*counts.shape, columns + 1), bool)
    found = jnp.put_along_axis(found, jnp.where(valid, indices, columns), True, axis=-1, inplace=False, mode="clip")
    rows = jnp.take(found[..., :columns], places // tile[0], axis=-2, mode="clip")
    return jnp.repeat(rows, min(tile[1], keys), axis=-1)[..., :keys]


class _Rows:
    """What a row of tiles reads, by its number."""

    def __init__(self, grid: Grid, score_mod: Code, mask_mod: Code, scale: float, key: Any, value: Any) -> None:
        self.grid, self.score_mod, self.mask_mod, self.scale = grid, score_mod, mask_mod, scale
        self.key, self.value = (self._whole_tiles(x) for x in (key, value))

    def _whole_tiles(self, x: jax.Array) -> jax.Array:
        """(b, h, s, n) with keys up to a whole tile: the last one again, so that torch code sees what occurs."""
        return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % self.grid.tile[1]), (0, 0)), mode="edge")

    def split(self, x: jax.Array, mode: str = "edge") -> jax.Array:
        """(b, h, l, n) -> (rows, b that share a mask, kv h that do, heads to each * queries, n); the last query again, or
        ("constant") zeros, up to a whole block."""
        grid = self.grid
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % grid.tile[0]), (0, 0)), mode=mode)
        batch, kv_heads, group = grid.shared
        x = x.reshape(grid.mask_batch, batch, grid.mask_heads, kv_heads * group, grid.blocks[0], grid.tile[0], -1)
        x = x.transpose(0, 2, 4, 1, 3, 5, 6)
        return x.reshape(-1, batch, kv_heads, group * grid.tile[0], x.shape[-1])

    def joined(self, x: jax.Array) -> jax.Array:
        """`split` undone."""
        grid = self.grid
        batch, kv_heads, group = grid.shared
        x = x.reshape(grid.mask_batch, grid.mask_heads, grid.blocks[0], batch, kv_heads * group, grid.tile[0], -1)
        x = x.transpose(0, 3, 1, 4, 2, 5, 6)
        return x.reshape(grid.batch, grid.heads, -1, x.shape[-1])[:, :, : grid.lengths[0]]

    def place(self, row: Any) -> tuple[Any, Any, Any]:
        """The BlockMask's batch and head, and the block of queries, of a row."""
        blocks, heads = self.grid.blocks[0], self.grid.mask_heads
        return row // (heads * blocks), row // blocks % heads, row % blocks

    def corner(self, x: jax.Array, row: Any, column: Any) -> tuple[Any, ...]:
        """Where the row's part of keys or values begins: x is (b, kv h, s, n)."""
        batch, head, _ = self.place(row)
        grid = self.grid
        zero = jnp.zeros((), jnp.int32)
        first_batch = batch if x.shape[0] > 1 and grid.mask_batch > 1 else zero
        first_head = head // (grid.heads // grid.kv_heads) if grid.mask_heads > 1 else zero
        return first_batch, first_head, column * grid.tile[1], zero

    def part(self, x: jax.Array, row: Any, column: Any) -> jax.Array:
        """(b that share a mask, kv h that do, keys of a tile, n) of keys or values."""
        batch, kv_heads, _ = self.grid.shared
        sizes = (batch, kv_heads, self.grid.tile[1], x.shape[3])
        return jax.lax.dynamic_slice(x, self.corner(x, row, column), sizes)

    def scores(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Of a row's queries, in the type to compute in, before torch code sees them."""
        return einsum("bnqe,bnke->bnqk", query, key.astype(query.dtype)) * self.scale

    def decided(self, row: Any, column: Any, full: bool) -> Callable[..., jax.Array]:
        """Torch code's scores of a tile, of (raw ones, captured tensors); -inf where nothing may be looked at."""
        grid = self.grid
        batch, head, block = self.place(row)
        shared, kv_heads, group = grid.shared
        keys = column * grid.tile[1] + jnp.arange(grid.tile[1], dtype=jnp.int32)
        places = (
            batch * shared + jnp.arange(shared, dtype=jnp.int32),
            head * kv_heads * group + jnp.arange(kv_heads * group, dtype=jnp.int32),
            jnp.minimum(block * grid.tile[0] + jnp.arange(grid.tile[0], dtype=jnp.int32), grid.lengths[0] - 1),
            jnp.minimum(keys, grid.lengths[1] - 1),
        )
        allowed = None if full else self.mask_mod(*places)
        if grid.lengths[1] % grid.tile[1]:
            inside = keys < grid.lengths[1]
            allowed = inside if allowed is None else allowed & inside

        def of_scores(raw: jax.Array, *captured: jax.Array) -> jax.Array:
            scores = raw.reshape(shared, kv_heads * group, *grid.tile)
            scores = self.score_mod(scores, *places, *captured).astype(raw.dtype)
            scores = scores if allowed is None else jnp.where(allowed, scores, -jnp.inf)
            return scores.reshape(raw.shape)

        return of_scores

    def over(self, step: Callable[[Any, bool, Any], Any], row: Any, lists: Sequence[Any], carry: Any) -> Any:
        """`carry` after the tiles of a row: those that mask_mod decides, then full ones. step: (column, full, carry) -> carry."""
        for full, (counts, indices) in enumerate(zip(lists[::2], lists[1::2], strict=True)):
            of_row = indices.reshape(-1, indices.shape[-1])[row].astype(jnp.int32)

            def body(i: Any, carry: Any, full: bool = bool(full), of_row: Any = of_row) -> Any:
                return step(of_row[i], full, carry)

            carry = jax.lax.fori_loop(0, counts.reshape(-1)[row].astype(jnp.int32), body, carry)
        return carry


def attend(
    grid: Grid,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lists: Sequence[jax.Array],
    score_mod: Code,
    mask_mod: Code,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention, and the logarithm to base 2 of what its softmax divides by, and its highest score.

    lists: counts (b, h, rows) and numbers (b, h, rows, n) of tiles that mask_mod decides, and of full tiles, if those are.
    """
    rows = _Rows(grid, score_mod, mask_mod, scale, key, value)
    working = working_type(query)

    def row(at: tuple[Any, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        number, queries = at[0], at[1].astype(working)

        def step(column: Any, full: bool, carry: Any) -> Any:
            out, highest, total = carry
            scores = rows.scores(queries, rows.part(rows.key, number, column))
            scores = rows.decided(number, column, full)(scores)
            above = jnp.maximum(highest, scores.max(-1, keepdims=True))
            base = jnp.where(above == -jnp.inf, 0, above)
            kept, weights = jnp.exp(highest - base), jnp.exp(scores - base)
            values = rows.part(rows.value, number, column).astype(query.dtype)
            added = einsum("bnqk,bnkv->bnqv", weights.astype(query.dtype), values)
            return out * kept + added, above, total * kept + weights.sum(-1, keepdims=True)

        empty = jnp.zeros((*queries.shape[:-1], value.shape[-1]), working), *_nothing_seen(queries)
        out, highest, total = rows.over(step, number, lists, empty)
        total = jnp.where(total == 0, 1, total)
        return (out / total).astype(query.dtype), (highest + jnp.log(total)) / _LN2, highest / _LN2

    split = rows.split(query)
    results = jax.lax.map(row, (jnp.arange(split.shape[0], dtype=jnp.int32), split))
    out, total, highest = map(rows.joined, results)
    return out, total[..., 0], highest[..., 0]


def _nothing_seen(queries: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (*queries.shape[:-1], 1)
    return jnp.full(shape, -jnp.inf, queries.dtype), jnp.zeros(shape, queries.dtype)


def working_type(x: jax.Array) -> Any:
    """In which scores are computed, and softmax."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def gradients(
    grid: Grid,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lists: Sequence[jax.Array],
    score_mod: Code,
    mask_mod: Code,
    scale: float,
    captured: Sequence[jax.Array],
    out: jax.Array,
    total: jax.Array,
    out_gradient: jax.Array,
    total_gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """Gradients of `attend`'s query, key, value and captured tensors, by those of its first two results."""
    rows = _Rows(grid, score_mod, mask_mod, scale, key, value)
    working = working_type(query)
    out_gradient = out_gradient.astype(query.dtype)
    # what a softmax takes off its weights' gradients, and what the logarithm adds: one number for a query
    taken = (out.astype(working) * out_gradient.astype(working)).sum(-1) - total_gradient.astype(working) / _LN2
    divided = jnp.where(total == -jnp.inf, 0, total.astype(working) * _LN2)

    def row(carry: Any, at: Any) -> Any:
        number, queries, gradient, minus, log = at
        queries, wide_gradient = queries.astype(working), gradient.astype(working)

        def step(column: Any, full: bool, carry: Any) -> Any:
            for_query, for_key, for_value, for_captured = carry
            keys = rows.part(rows.key, number, column).astype(working)
            values = rows.part(rows.value, number, column).astype(working)
            scores, pull = jax.vjp(rows.decided(number, column, full), rows.scores(queries, keys), *captured)
            weights = jnp.exp(scores - log)
            by_weight = einsum("bnqv,bnkv->bnqk", wide_gradient, values) - minus
            by_score, *by_captured = pull(weights * by_weight)
            by_score = by_score * scale
            added = einsum("bnqk,bnqv->bnkv", weights.astype(query.dtype), gradient)
            return (
                for_query + einsum("bnqk,bnke->bnqe", by_score, keys),
                _added(rows, for_key, number, column, einsum("bnqk,bnqe->bnke", by_score, queries)),
                _added(rows, for_value, number, column, added),
                tuple(x + y.astype(x.dtype) for x, y in zip(for_captured, by_captured, strict=True)),
            )

        for_query, *carry = rows.over(step, number, lists, (jnp.zeros_like(queries), *carry))
        return tuple(carry), for_query

    split = rows.split(query)
    # queries that are not there have no gradients
    parts = [rows.split(x, "constant") for x in (out_gradient, taken[..., None])]
    begin = (
        jnp.zeros(rows.key.shape, working),
        jnp.zeros(rows.value.shape, working),
        tuple(jnp.zeros(x.shape, jnp.promote_types(x.dtype, working)) for x in captured),
    )
    xs = (jnp.arange(split.shape[0], dtype=jnp.int32), split, *parts, rows.split(divided[..., None]))
    (for_key, for_value, for_captured), for_query = jax.lax.scan(row, begin, xs)
    source = grid.lengths[1]
    return (
        rows.joined(for_query).astype(query.dtype),
        for_key[:, :, :source].astype(key.dtype),
        for_value[:, :, :source].astype(value.dtype),
        tuple(x.astype(y.dtype) for x, y in zip(for_captured, captured, strict=True)),
    )


def _added(rows: _Rows, x: jax.Array, row: Any, column: Any, part: jax.Array) -> jax.Array:
    """x, which has the keys' shape, with a row's part added."""
    sums = rows.part(x, row, column) + part.astype(x.dtype)
    return jax.lax.dynamic_update_slice(x, sums, rows.corner(x, row, column))
