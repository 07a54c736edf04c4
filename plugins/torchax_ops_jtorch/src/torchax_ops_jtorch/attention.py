"""Scaled dot product attention, kept whole and computed in blocks of queries (blocks.py): small attention is one block.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torchax_core import OpSet, opmath
from torchax_ops_jtorch.blocks import block_length, masked_softmax, over_queries
from torchax_ops_jtorch.precision import einsum

__all__ = ["ops"]

ops = OpSet("torchax_ops_jtorch.attention", depends_on=torch.get_float32_matmul_precision)


@ops.lowering("aten::scaled_dot_product_attention", static=("dropout_p", "scale"))
def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False, random_key=None
):
    """`softmax(scale * query @ key.T + mask) @ value`, over the last two dims, half types in float32.

    query:      (..., h, l, e);  key: (..., h_kv, s, e);  value: (..., h_kv, s, v).
    attn_mask:  None; bool, True where attention is allowed; or a number to add; broadcast to (..., h, l, s).
    is_causal:  position i sees positions 0 to i.
    dropout_p:  weights are dropped with this probability, and the rest scaled up.
    scale:      1 / sqrt(e) if None.
    enable_gqa: h may be a multiple of h_kv; that many queries share a key and value head.
    returns:    (..., h, l, v); zeros where a row's mask allows nothing.
    """
    scale = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    length, source = query.shape[-2], key.shape[-2]
    grouped = enable_gqa and query.shape[-3] != key.shape[-3]
    if grouped:
        heads = key.shape[-3]
        query = _in_groups(query, heads)
        key, value = key[..., None, :, :], value[..., None, :, :]
        attn_mask = attn_mask if attn_mask is None or attn_mask.ndim < 3 else _in_groups(attn_mask, heads)
    by_row = attn_mask is not None and attn_mask.shape[-2] == length
    # Gradients of keys and values are summed over the blocks in the types that these have here.
    wide_key, wide_value = opmath(key), opmath(value)

    def attend(first: Any, keys: int, rows: Any) -> jax.Array:
        query_rows, mask = rows if by_row else (rows[0], attn_mask)
        logits = einsum("...le,...se->...ls", query_rows, wide_key[..., :keys, :].astype(key.dtype)) * scale
        if is_causal:
            place = first + jnp.arange(query_rows.shape[-2])
            logits = jnp.where(place[:, None] >= jnp.arange(keys), logits, -jnp.inf)
        if mask is not None:
            mask = mask[..., :keys]
            is_bool = mask.dtype == jnp.bool_
            logits = jnp.where(mask, logits, -jnp.inf) if is_bool else logits + mask.astype(logits.dtype)
        # without a mask a row has a key at least, its first
        weights = masked_softmax(logits, rows_may_be_empty=mask is not None or not keys)
        if dropout_p > 0:
            weights = _dropped(weights, dropout_p, jax.random.fold_in(random_key, first))
        # As the fused kernels do: half types multiply in half, and are summed in float32.
        return einsum("...ls,...sv->...lv", weights.astype(value.dtype), wide_value[..., :keys, :].astype(value.dtype))

    batch = jnp.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    block = block_length(length, math.prod(batch) * source)
    rows = (query, attn_mask) if by_row else (query,)
    out = over_queries(attend, rows, length, source, block, causal=is_causal)
    return out.reshape(*out.shape[:-4], -1, *out.shape[-2:]) if grouped else out


def _in_groups(x: jax.Array, heads: int) -> jax.Array:
    """(..., heads * group, l, n) -> (..., heads, group, l, n); one head for all -> (..., 1, 1, l, n)."""
    if x.shape[-3] == 1:
        return x[..., None, :, :]
    return x.reshape(*x.shape[:-3], heads, -1, *x.shape[-2:])


def _dropped(weights: jax.Array, p: float, key: jax.Array | None) -> jax.Array:
    """Each weight 0 with probability `p`, and the rest scaled up so that the mean stays."""
    kept = jax.random.uniform(key, weights.shape, jnp.float32) >= p
    return jnp.where(kept, weights * (1 / (1 - p) if p < 1 else 0.0), 0)
