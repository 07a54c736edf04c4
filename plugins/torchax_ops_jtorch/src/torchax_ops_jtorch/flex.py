"""`flex_attention`: attention whose scores, and what may be looked at, torch code decides, in blocks of queries (blocks.py).

The user's `score_mod` and `mask_mod` are torch functions of single scores and places. They are traced with those, under
jax.vmap over batch, heads, queries and keys, and become part of the program; the scores of a block are all that is made of
them. A BlockMask says no more than its `mask_mod`, and is not used to leave blocks out.

Source: https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from torchax_core import current_env
from torchax_core.interop import call_jax, jax_view
from torchax_ops_jtorch.blocks import block_length, over_queries
from torchax_ops_jtorch.precision import einsum

__all__ = ["attend", "attend_backward"]

_LN2 = math.log(2)


class _Program:
    """Flex attention with given torch code and scale, as a function of arrays: query, key, value, then what tensors the
    code is given besides. `score_others` and `mask_others` are these arguments, None in the places of tensors.
    """

    def __init__(
        self, score_mod: Any, mask_mod: Any, scale: float, score_others: Sequence[Any], mask_others: Sequence[Any]
    ) -> None:
        self.score_mod, self.mask_mod, self.scale = score_mod, mask_mod, scale
        self.score_others, self.mask_others = score_others, mask_others

    def __call__(self, query: Any, key: Any, value: Any, *tensors: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """query (b, h, l, e), key (1 or b, h_kv, s, e), value (1 or b, h_kv, s, v), h a multiple of h_kv
        -> result (b, h, l, v), and the logarithm to base 2 of what the softmax divides by, and its highest score: (b, h, l)."""
        with jax.enable_x64(True):
            return self._run(query, key, value, iter(tensors))

    def _run(self, query: Any, key: Any, value: Any, tensors: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        batch, heads, length, _ = query.shape
        kv_heads, source = key.shape[1:3]
        working = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
        score_mod = _over_places(self.score_mod, (0,), [next(tensors) if o is None else o for o in self.score_others])
        mask_mod = _over_places(self.mask_mod, (), [next(tensors) if o is None else o for o in self.mask_others])
        batches, all_heads = jnp.arange(batch, dtype=jnp.int32), jnp.arange(heads, dtype=jnp.int32)
        # Gradients of keys and values are summed over the blocks in the types that these have here.
        wide_key, wide_value = (x[:, :, None].astype(jnp.promote_types(x.dtype, working)) for x in (key, value))

        def block(first: Any, keys: int, rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            count = rows.shape[-2]
            scores = einsum("...le,...se->...ls", rows.astype(working), wide_key.astype(working)) * self.scale
            by_group = scores.shape
            scores = scores.reshape(batch, heads, count, keys)
            places = batches, all_heads, first + jnp.arange(count, dtype=jnp.int32), jnp.arange(keys, dtype=jnp.int32)
            scores = jnp.where(mask_mod(*places), score_mod(scores, *places).astype(working), -jnp.inf)
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


def _over_places(code: Any, leading: tuple[int, ...], others: Sequence[Any]) -> Callable[..., jax.Array]:
    """Torch code of (a score, if `leading`, and) a batch, a head, a query and a key, over all of each."""

    def with_indices(*values: Any) -> torch.Tensor:
        with TransformGetItemToIndex():  # x[i] of a tensor i is a gather, not a Python index
            result: torch.Tensor = code(*values)
            return result

    run = jax_view(with_indices)

    def of_arrays(*values: Any) -> jax.Array:
        return jnp.asarray(run(*values, *others))

    for place in (3, 2, 1, 0):
        axes = [None] * 4
        axes[place] = 0  # type: ignore[call-overload]
        of_arrays = jax.vmap(of_arrays, in_axes=(*leading, *axes))
    return of_arrays


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
    program, tensors = _program(score_mod, block_mask[-1], scale, score_mod_other_buffers, mask_mod_other_buffers)
    with jax.enable_x64(True):  # for the backward too, which runs as this was called
        out, total, highest = call_jax(program, query, key, value, *tensors)
    return out, total, highest


def _program(score_mod: Any, mask_mod: Any, scale: float, score_others: Any, mask_others: Any) -> tuple[Any, list[Any]]:
    """The program, and the tensors to call it with. Graphs, which torch keeps, keep theirs, compiled."""
    tensors = [x for x in (*score_others, *mask_others) if isinstance(x, torch.Tensor)]
    numbers = [tuple(None if isinstance(x, torch.Tensor) else x for x in xs) for xs in (score_others, mask_others)]
    if not (isinstance(score_mod, torch.fx.GraphModule) and isinstance(mask_mod, torch.fx.GraphModule)):
        return _Program(score_mod, mask_mod, scale, *numbers), tensors
    kept = score_mod.__dict__.setdefault("_torchax_programs", {})
    environment = current_env()  # whose overrides the code's ops run by
    setting = torch.get_float32_matmul_precision()
    key = (id(mask_mod), scale, *numbers, setting, environment, environment.version)
    if key not in kept:
        kept[key] = jax.jit(_Program(score_mod, mask_mod, scale, *numbers))
    return kept[key], tensors


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
    program, tensors = _program(fw_graph, block_mask[-1], scale, others, mask_mod_other_buffers)
    places = [i for i in _differentiated(joint_graph) if isinstance(others[i], torch.Tensor)]
    at = [3 + sum(isinstance(x, torch.Tensor) for x in others[:i]) for i in places]

    def pull_back(arrays: list[Any], grads: list[Any]) -> list[Any]:
        def of_chosen(*chosen: Any) -> tuple[jax.Array, jax.Array]:
            full = list(arrays)
            for i, array in zip([0, 1, 2, *at], chosen, strict=True):
                full[i] = array
            return program(*full)[:2]

        results, pull = jax.vjp(of_chosen, *[arrays[i] for i in [0, 1, 2, *at]])
        cotangents = (
            jnp.zeros_like(r) if g is None else g.astype(r.dtype) for r, g in zip(results, grads, strict=True)
        )
        return list(pull(tuple(cotangents)))

    with jax.enable_x64(True):
        q, k, v, *rest = call_jax(pull_back, [query, key, value, *tensors], [grad_out, grad_logsumexp])
    captured: list[Any] = [None] * len(others)
    for i, gradient in zip(places, rest, strict=True):
        captured[i] = gradient
    return q, k, v, tuple(captured)


def _differentiated(joint_graph: torch.fx.GraphModule) -> list[int]:
    """On which of what a score_mod is given besides score and place it depends so that there are gradients."""
    output = next(node for node in joint_graph.graph.nodes if node.op == "output")
    score_and_place = 5
    return [i for i, gradient in enumerate(output.args[0][score_and_place:]) if gradient is not None]
