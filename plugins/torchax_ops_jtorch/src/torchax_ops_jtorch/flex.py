"""`flex_attention`: attention whose scores, and what may be looked at, torch code decides, in blocks of queries (blocks.py).

The user's `score_mod` and `mask_mod` are torch functions of single scores and places. They are traced with those, under
jax.vmap over batch, heads, queries and keys, and become part of the program; the scores of a block are all that is made of
them. Of a BlockMask, where it pays, only the tiles are computed that are not empty (tiles.py).

Source: https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import torch
from torch._dynamo._trace_wrapped_higher_order_op import ModIndex, TransformGetItemToIndex

from torchax_core import current_env, customs
from torchax_core.interop import call_jax, jax_view
from torchax_ops_jtorch import tiles
from torchax_ops_jtorch.blocks import block_length, over_queries
from torchax_ops_jtorch.precision import einsum
from torchax_ops_jtorch.pullback import with_pullback
from torchax_ops_jtorch.tiles import Grid, grid_of, listed, working_type

__all__ = ["attend", "attend_backward"]

_LN2 = math.log(2)

_NO_MASK = 1 << 30
"""Length of the tile of which torch makes a BlockMask where none is given."""

_TILES_TO_CAPTURE = 4
"""A captured tensor of more elements than so many tiles have weights costs more to add to, tile by tile, than tiles save."""

Arrays = tuple[Any, ...]
Results = tuple[jax.Array, jax.Array, jax.Array]


def _index(x: torch.Tensor, indices: list[torch.Tensor]) -> torch.Tensor:
    """`x[i]` in torch code. torch's Function has a backward that jax.vmap, over all places, would run once a place, with
    zeros of x's size for each; jax's own is one scatter."""
    return torch.ops.aten.index(x, indices) if indices else x


customs.put(ModIndex, _index)


class _Code:
    """Torch code of single values, traced: a function of arrays over all places, and of `operands`, the arrays it uses."""

    def __init__(self, code: Any, leading: tuple[Any, ...], others: Sequence[Any], tensors: Sequence[Any]) -> None:
        """leading: what the code is given before a batch, a head, a query and a key: one score, or nothing.
        others:  what it is given after them, None in the places of `tensors`."""
        single = (*leading, *[jax.ShapeDtypeStruct((), jnp.int32)] * 4)

        def with_indices(*values: Any) -> torch.Tensor:
            with TransformGetItemToIndex():  # x[i] of a tensor i is a gather, not a Python index
                result: torch.Tensor = code(*values)
                return result

        run = jax_view(with_indices)

        def of_arrays(*values: Any) -> jax.Array:
            return jnp.asarray(run(*values[: len(single)], *_filled(others, values[len(single) :])))

        traced = jax.make_jaxpr(of_arrays)(*single, *tensors)
        # what it meets in closures is an operand as well: it may have gradients
        self.operands = (*tensors, *traced.consts)
        self._leading, self._tensors, self._jaxpr = len(leading), len(tensors), traced.jaxpr

    def __call__(self, *values: Any) -> jax.Array:
        """Of (scores (b, h, q, k), if the code takes one,) numbers of batches, heads, queries, keys, and the operands."""
        count = self._leading + 4
        operands = values[count:]

        def of_places(*values: Any) -> jax.Array:
            consts = operands[self._tensors :]
            (result,) = jec.jaxpr_as_fun(jec.ClosedJaxpr(self._jaxpr, consts))(*values, *operands[: self._tensors])
            return jnp.asarray(result)

        for place in (3, 2, 1, 0):
            axes: list[int | None] = [None] * 4
            axes[place] = 0
            of_places = jax.vmap(of_places, in_axes=(*[0] * self._leading, *axes))
        return of_places(*values[:count])


def _filled(others: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    left = iter(tensors)
    return [next(left) if o is None else o for o in others]


class _Program:
    """Flex attention with given torch code and scale, as a function of arrays: query, key, value, then what tensors the
    code is given besides, then the lists of a BlockMask if `tile` says how large its tiles are. `score_others` and
    `mask_others` are the code's other arguments, None in the places of tensors.
    """

    def __init__(
        self,
        score_mod: Any,
        mask_mod: Any,
        scale: float,
        tile: tuple[int, int] | None,
        score_others: Sequence[Any],
        mask_others: Sequence[Any],
    ) -> None:
        self.score_mod, self.mask_mod, self.scale, self.tile = score_mod, mask_mod, scale, tile
        self.score_others, self.mask_others = score_others, mask_others

    def __call__(self, *arrays: Any) -> Results:
        """query (b, h, l, e), key (1 or b, h_kv, s, e), value (1 or b, h_kv, s, v), h a multiple of h_kv, and the rest
        -> result (b, h, l, v), and the logarithm to base 2 of what the softmax divides by, and its highest score: (b, h, l)."""
        with jax.enable_x64(True):
            attention, operands = self._attention(arrays)
            return attention.differentiable()(*operands)

    def pull_back(
        self, wanted: tuple[int, ...], arrays: Arrays, out: Any, total: Any, gradients: Sequence[Any]
    ) -> Arrays:
        """Gradients of the arrays at the places `wanted`, of query, key, value and score_mod's tensors, by those of the first
        two results; None is zeros."""
        with jax.enable_x64(True):
            given = [
                jnp.zeros_like(x) if g is None else g.astype(x.dtype)
                for g, x in zip(gradients, (out, total), strict=True)
            ]
            attention, operands = self._attention(arrays)
            return attention.pull_back(wanted, operands, (out, total, total), (*given, jnp.zeros_like(total)))

    def _attention(self, arrays: Arrays) -> tuple[_Attention, Arrays]:
        """With the code traced; and its operands: query, key, value, those of score_mod and of mask_mod, lists."""
        (query, key, value), rest = arrays[:3], arrays[3:]
        by_score = sum(o is None for o in self.score_others)
        tensors = by_score + sum(o is None for o in self.mask_others)
        lists = rest[tensors:]
        score = jax.ShapeDtypeStruct((), working_type(query))
        score_mod = _Code(self.score_mod, (score,), self.score_others, rest[:by_score])
        mask_mod = _Code(self.mask_mod, (), self.mask_others, rest[by_score:tensors])
        operands = (query, key, value, *score_mod.operands, *mask_mod.operands, *lists)
        whole = self.tile is None or any(map(_differs_by_device, operands))
        grid = None if whole or self.tile is None else grid_of(query, key, self.tile, *lists[:2])
        return _Attention(score_mod, mask_mod, self.scale, self.tile, grid), operands


def _differs_by_device(array: Any) -> bool:
    """Whether the type says so, in a shard_map that checks types: there a loop wants it said of all that it carries."""
    kind = jax.typeof(array)
    kinds = getattr(kind, "mat", kind)  # the name is of jax 0.10.2; before, the type had it itself
    return bool(getattr(kinds, "varying", None) or getattr(kinds, "vma", None))


class _Attention:
    """Attention as a function of its operands: query, key, value, those of the code, and a BlockMask's lists."""

    def __init__(
        self, score_mod: _Code, mask_mod: _Code, scale: float, tile: tuple[int, int] | None, grid: Grid | None
    ) -> None:
        """tile: how large a BlockMask's tiles are, if there is one. grid: the tiles to go over, where that pays."""
        self.score_mod, self.mask_mod, self.scale, self.tile, self.grid = score_mod, mask_mod, scale, tile, grid

    def differentiable(self) -> Callable[..., Results]:
        return self._whole if self.grid is None else with_pullback(self._by_tiles, self._whole, self._pull)[0]

    def pull_back(self, wanted: tuple[int, ...], operands: Arrays, results: Arrays, gradients: Arrays) -> Arrays:
        if self.grid is None:
            return self._pull_whole(wanted, operands, gradients)
        return with_pullback(self._by_tiles, self._whole, self._pull)[1](wanted, operands, results, gradients)

    def _parts(self, operands: Arrays) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        """(query, key, value), operands of score_mod, of mask_mod, lists."""
        score = 3 + len(self.score_mod.operands)
        mask = score + len(self.mask_mod.operands)
        return operands[:3], operands[3:score], operands[score:mask], operands[mask:]

    def _whole(self, *operands: Any) -> Results:
        """All scores, in blocks of queries (blocks.py)."""
        (query, key, value), for_score, for_mask, lists = self._parts(operands)
        batch, heads, length, _ = query.shape
        kv_heads, source = key.shape[1:3]
        working = working_type(query)
        batches, all_heads = jnp.arange(batch, dtype=jnp.int32), jnp.arange(heads, dtype=jnp.int32)
        # Gradients of keys and values are summed over the blocks in the types that these have here.
        wide_key, wide_value = (x[:, :, None].astype(jnp.promote_types(x.dtype, working)) for x in (key, value))

        def block(first: Any, keys: int, rows: jax.Array) -> Results:
            count = rows.shape[-2]
            scores = einsum("...le,...se->...ls", rows.astype(working), wide_key.astype(working)) * self.scale
            by_group = scores.shape
            scores = scores.reshape(batch, heads, count, keys)
            queries = jnp.asarray(first, jnp.int32) + jnp.arange(count, dtype=jnp.int32)
            places = batches, all_heads, queries, jnp.arange(keys, dtype=jnp.int32)
            allowed = self.mask_mod(*places, *for_mask)
            if self.tile is not None and isinstance(length, int) and isinstance(source, int):  # no symbols
                allowed = _in_lists(allowed, self.tile, lists, queries, keys)
            scores = jnp.where(allowed, self.score_mod(scores, *places, *for_score).astype(working), -jnp.inf)
            highest = jax.lax.stop_gradient(scores.max(-1, keepdims=True, initial=-jnp.inf))
            weights = jnp.exp(scores - jnp.where(highest == -jnp.inf, 0, highest))
            total = weights.sum(-1, keepdims=True)
            total = jnp.where(total == 0, 1, total)
            weights = (weights / total).reshape(by_group).astype(query.dtype)
            out = einsum("...ls,...sv->...lv", weights, wide_value.astype(query.dtype))
            return out, (highest + jnp.log(total)).reshape(*by_group[:-1], 1), highest.reshape(*by_group[:-1], 1)

        grouped = query.reshape(batch, kv_heads, -1, length, query.shape[-1])
        size = block_length(length, batch * heads * source)
        out, total, highest = over_queries(block, grouped, length, source, size, causal=False)
        out = out.reshape(batch, heads, length, -1).astype(query.dtype)
        total, highest = (x.reshape(batch, heads, length) / _LN2 for x in (total, highest))
        return out, total, jax.lax.stop_gradient(highest)

    def _pull_whole(self, wanted: tuple[int, ...], operands: Arrays, gradients: Arrays) -> Arrays:
        def of_wanted(*chosen: Any) -> Results:
            full = list(operands)
            for i, array in zip(wanted, chosen, strict=True):
                full[i] = array
            return self._whole(*full)

        return tuple(jax.vjp(of_wanted, *[operands[i] for i in wanted])[1](tuple(gradients)))

    def _by_tiles(self, *operands: Any) -> Results:
        """The tiles that are not empty (tiles.py)."""
        assert self.grid is not None
        (query, key, value), for_score, for_mask, lists = self._parts(operands)

        def score_mod(*scores_and_places: Any) -> jax.Array:
            return self.score_mod(*scores_and_places, *for_score)

        def mask_mod(*places: Any) -> jax.Array:
            return self.mask_mod(*places, *for_mask)

        with jax.enable_x64(True):
            return tiles.attend(self.grid, query, key, value, lists, score_mod, mask_mod, self.scale)

    def _pull(self, wanted: tuple[int, ...], operands: Arrays, results: Arrays, gradients: Arrays) -> Arrays:
        """Gradients by tiles; of what mask_mod uses, they are zeros."""
        assert self.grid is not None
        (query, key, value), for_score, for_mask, lists = self._parts(operands)
        chosen = [i for i in wanted if 3 <= i < 3 + len(for_score)]

        def score_mod(scores: Any, b: Any, h: Any, q: Any, k: Any, *captured: Any) -> jax.Array:
            used = list(for_score)
            for i, x in zip(chosen, captured, strict=True):
                used[i - 3] = x
            return self.score_mod(scores, b, h, q, k, *used)

        def mask_mod(*places: Any) -> jax.Array:
            return self.mask_mod(*places, *for_mask)

        with jax.enable_x64(True):
            # each tile adds to the whole of these gradients
            if any(operands[i].size > _TILES_TO_CAPTURE * self.grid.weights for i in chosen):
                return self._pull_whole(wanted, operands, gradients)
            captured = [operands[i] for i in chosen]
            *found, by_captured = tiles.gradients(
                self.grid,
                query,
                key,
                value,
                lists,
                score_mod,
                mask_mod,
                self.scale,
                captured,
                *results[:2],
                *gradients[:2],
            )
            by_place = dict(enumerate(found)) | dict(zip(chosen, by_captured, strict=True))
            return tuple(by_place[i] if i in by_place else jnp.zeros_like(operands[i]) for i in wanted)


def _in_lists(allowed: Any, tile: tuple[int, int], lists: Sequence[Any], queries: Any, keys: int) -> jax.Array:
    """What mask_mod allows in the tiles that a BlockMask lists, and all of those that it lists as full."""
    partly = allowed & listed(tile, lists[0], lists[1], queries, keys)
    return partly | listed(tile, lists[2], lists[3], queries, keys) if len(lists) > 2 else partly


def attend(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """torch's higher-order operator `flex_attention` for tensors on device "jax", differentiable by jax.vjp."""
    program, rest = _program(score_mod, block_mask, scale, score_mod_other_buffers, mask_mod_other_buffers)
    with jax.enable_x64(True):  # for the backward too, which runs as this was called
        out, total, highest = call_jax(program, query, key, value, *rest)
    return out, total, highest


def _program(score_mod: Any, block_mask: tuple[Any, ...], scale: float, score_others: Any, mask_others: Any) -> Any:
    """The program, and the tensors to call it with. Graphs, which torch keeps, keep theirs, compiled."""
    mask_mod = block_mask[-1]
    tensors = [x for x in (*score_others, *mask_others) if isinstance(x, torch.Tensor)]
    numbers = [tuple(None if isinstance(x, torch.Tensor) else x for x in xs) for xs in (score_others, mask_others)]
    tile, lists = _tiles(block_mask)
    if not (isinstance(score_mod, torch.fx.GraphModule) and isinstance(mask_mod, torch.fx.GraphModule)):
        return _Program(score_mod, mask_mod, scale, tile, *numbers), [*tensors, *lists]
    kept = score_mod.__dict__.setdefault("_torchax_programs", {})
    environment = current_env()  # whose overrides the code's ops run by
    setting = torch.get_float32_matmul_precision()
    key = (id(mask_mod), scale, tile, *numbers, setting, environment, environment.version)
    if key not in kept:
        kept[key] = _Compiled(_Program(score_mod, mask_mod, scale, tile, *numbers))
    return kept[key], [*tensors, *lists]


def _tiles(block_mask: tuple[Any, ...]) -> tuple[tuple[int, int] | None, list[Any]]:
    """How large a BlockMask's tiles are, and its lists of them, by queries: counts and numbers of those that mask_mod decides,
    then of those that are full, if they are listed. Neither of the one tile that torch makes where no mask is given."""
    first_list, end = 2, 6  # after the lengths
    tile = block_mask[-3:-1]
    if min(tile) >= _NO_MASK:
        return None, []
    return tuple(tile), [x for x in block_mask[first_list:end] if x is not None]  # type: ignore[return-value]


class _Compiled:
    """A program's two functions, compiled."""

    def __init__(self, program: _Program) -> None:
        self.forward, self.pull_back = jax.jit(program), jax.jit(program.pull_back, static_argnums=0)

    def __call__(self, *arrays: Any) -> Any:
        return self.forward(*arrays)


def attend_backward(
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    grad_out: Any,
    grad_logsumexp: Any,
    fw_graph: Any,
    joint_graph: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """torch's `flex_attention_backward`, which compiled graphs hold: gradients of query, key, value and of the tensors
    that `fw_graph` is given, where it depends on them."""
    others = score_mod_other_buffers
    program, rest = _program(fw_graph, block_mask, scale, others, mask_mod_other_buffers)
    places = [i for i in _differentiated(joint_graph) if isinstance(others[i], torch.Tensor)]
    wanted = (0, 1, 2, *(3 + sum(isinstance(x, torch.Tensor) for x in others[:i]) for i in places))

    def pull_back(arrays: list[Any], *others: Any) -> Any:
        return program.pull_back(wanted, tuple(arrays), *others)

    with jax.enable_x64(True):
        q, k, v, *found = call_jax(pull_back, [query, key, value, *rest], out, logsumexp, [grad_out, grad_logsumexp])
    captured: list[Any] = [None] * len(others)
    for i, gradient in zip(places, found, strict=True):
        captured[i] = gradient
    return q, k, v, tuple(captured)


def _differentiated(joint_graph: torch.fx.GraphModule) -> list[int]:
    """On which of what a score_mod is given besides score and place it depends so that there are gradients."""
    output = next(node for node in joint_graph.graph.nodes if node.op == "output")
    score_and_place = 5
    return [i for i, gradient in enumerate(output.args[0][score_and_place:]) if gradient is not None]
