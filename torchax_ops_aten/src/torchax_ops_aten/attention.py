"""Scaled dot product attention, kept whole, and the fused inference ops of `nn.MultiheadAttention` and its encoder.

The composite op is one program here: logits and softmax in float32 for half types, gradients by jax.vjp. A flash
attention replaces it with `env.override_op_definition("aten::scaled_dot_product_attention", ...)`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch

from torchax_core.opset import OpSet
from torchax_core.promotion import opmath
from torchax_ops_aten.matmul import linear, precision_for
from torchax_ops_aten.norm import native_layer_norm
from torchax_ops_aten.random import native_dropout

ops = OpSet("torchax_ops_aten.attention", depends_on=torch.get_float32_matmul_precision)


def _safe_softmax(logits: jax.Array) -> jax.Array:
    """Softmax over the last axis in which a row of nothing but -inf gives zeros, where the formula gives NaN."""
    lowest = jnp.finfo(logits.dtype).min  # not -inf, which taken from itself is NaN
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True, initial=lowest)))
    # a sum is at least 1, the largest one's, unless all are 0
    return weights / jnp.maximum(weights.sum(-1, keepdims=True), 0.5)


def _causal(length: int, source: int) -> jax.Array:
    """Which of `source` positions each of `length` may look at: those up to its own, counted from the start."""
    return jnp.arange(length)[:, None] >= jnp.arange(source)[None, :]


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum of two arrays that accumulates half types in float32, and returns that."""
    return jnp.einsum(spec, a, b, precision=precision_for(a.dtype), preferred_element_type=opmath(a).dtype)


def _logits(
    query: jax.Array,
    key: jax.Array,
    attn_mask: jax.Array | None,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[jax.Array, tuple[int, ...]]:
    """What attention takes the softmax of: (..., h, l, s), and the shape by key head: (..., h_kv, group, l, s) if the
    queries come in groups, else the same. Queries stay where they are, and keys are not repeated."""
    scale = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    length, source = query.shape[-2], key.shape[-2]
    grouped = enable_gqa and query.shape[-3] != key.shape[-3]
    if grouped:
        query, key = query.reshape(*query.shape[:-3], key.shape[-3], -1, *query.shape[-2:]), key[..., None, :, :]
    logits = _dot("...le,...se->...ls", query, key) * scale
    by_head = logits.shape
    if grouped:
        logits = logits.reshape(*by_head[:-4], -1, length, source)
    if is_causal:
        logits = jnp.where(_causal(length, source), logits, -jnp.inf)
    if attn_mask is not None:
        is_bool = attn_mask.dtype == jnp.bool_
        logits = jnp.where(attn_mask, logits, -jnp.inf) if is_bool else logits + attn_mask.astype(logits.dtype)
    return logits, by_head


@ops.lowering("aten::scaled_dot_product_attention", static=("dropout_p", "scale"))
def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False, random_key=None
):
    """`softmax(scale * query @ key.T + mask) @ value`, over the last two dims.

    query:      (..., h, l, e);  key: (..., h_kv, s, e);  value: (..., h_kv, s, v).
    attn_mask:  None; bool, True where attention is allowed; or a number to add; broadcast to (..., h, l, s).
    is_causal:  position i sees positions 0 to i.
    dropout_p:  weights are dropped with this probability, and the rest scaled up.
    scale:      1 / sqrt(e) if None.
    enable_gqa: h may be a multiple of h_kv; that many queries share a key and value head.
    returns:    (..., h, l, v); zeros where a row's mask allows nothing.
    """
    logits, by_head = _logits(query, key, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    grouped = len(by_head) > logits.ndim
    if grouped:
        value = value[..., None, :, :]
    weights = _safe_softmax(logits)
    if dropout_p > 0:
        weights, _ = native_dropout(weights, dropout_p, key=random_key)
    if grouped:
        weights = weights.reshape(*weights.shape[:-3], *by_head[-4:])
    # As the fused kernels do: half types multiply in half, and accumulate in float32.
    out = _dot("...ls,...sv->...lv", weights.astype(value.dtype), value)
    return out.reshape(*out.shape[:-4], -1, *out.shape[-2:]) if grouped else out


# Programs exported on the CPU hold this in place of the composite op.


@ops.lowering("aten::_scaled_dot_product_flash_attention_for_cpu", static=("dropout_p", "scale"))
def _scaled_dot_product_flash_attention_for_cpu(
    query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None
):
    """`scaled_dot_product_attention`, and the logarithm of what its softmax divides by: (b, l, h, e) and (b, h, l).

    torch takes it without dropout only.
    """
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    logits, _ = _logits(query, key, attn_mask, **options)
    return scaled_dot_product_attention(query, key, value, attn_mask, **options), jax.nn.logsumexp(logits, axis=-1)


@ops.lowering("aten::_scaled_dot_product_flash_attention_for_cpu_backward", static=("dropout_p", "scale"))
def _scaled_dot_product_flash_attention_for_cpu_backward(
    grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
):
    """Gradients of `_scaled_dot_product_flash_attention_for_cpu` for `query`, `key` and `value`."""
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return opmath(scaled_dot_product_attention(q, k, v, attn_mask, **options))

    return jax.vjp(attend, query, key, value)[1](opmath(grad_out))


# -- fused inference ops -----------------------------------------------------------------------------
# In eval mode without gradients nn.MultiheadAttention and nn.TransformerEncoderLayer call these instead of their parts.

_SOURCE_MASK, _PADDING_MASK = 0, 1
"""`mask_type` of a mask (l, l) or (b * h, l, l), and of one (b, l); anything else broadcasts to (b, h, l, l)."""


@ops.lowering("aten::_transform_bias_rescale_qkv")
def _transform_bias_rescale_qkv(qkv, qkv_bias, num_heads):
    """Query, key and value of all heads from one projection; the query scaled by 1 / sqrt(e / h).

    qkv: (b, l, 3 e);  qkv_bias: (3 e,);  returns three times (b, h, l, e / h).
    """
    batch, length, width = qkv.shape
    head = width // 3 // num_heads
    split = (opmath(qkv) + opmath(qkv_bias)).reshape(batch, length, 3, num_heads, head)
    query, key, value = jnp.transpose(split, (2, 0, 3, 1, 4))
    return query / math.sqrt(head), key, value


def _blocked(mask: jax.Array | None, mask_type: int | None, heads: int) -> jax.Array | None:
    """A mask as `nn.MultiheadAttention` has it, True where attention is *not* allowed, broadcasting to (b, h, l, s).

    A number counts as True unless it is 0: `nn.TransformerEncoderLayer` makes its masks 0 and -inf.
    """
    if mask is None:
        return None
    mask = mask.astype(jnp.bool_)
    if mask_type == _PADDING_MASK and mask.ndim == 2:
        return mask[:, None, None, :]
    if mask_type == _SOURCE_MASK and mask.ndim == 3:
        return mask.reshape(-1, heads, *mask.shape[1:])
    return mask


@ops.lowering("aten::_native_multi_head_attention")
def _native_multi_head_attention(
    query,
    key,
    value,
    embed_dim,
    num_head,
    qkv_weight,
    qkv_bias,
    proj_weight,
    proj_bias,
    mask=None,
    need_weights=True,
    average_attn_weights=True,
    mask_type=None,
):
    """Self attention with its projections, as in `nn.MultiheadAttention(batch_first=True)`.

    query:       (b, l, e), and `key` and `value` are the same tensor, which torch checks before it calls this.
    qkv_weight:  (3 e, e), qkv_bias: (3 e,);  proj_weight: (e, e), proj_bias: (e,).
    mask:        bool, True where attention is not allowed; see `_blocked`.
    returns:     (b, l, e), and the weights (b, l, l), or (b, h, l, l) if not averaged, or None.
    """
    batch, length, _ = query.shape
    q, k, v = _transform_bias_rescale_qkv(linear(query, qkv_weight), qkv_bias, num_head)
    q, k, v = (x.astype(query.dtype) for x in (q, k, v))
    logits = _dot("bhle,bhse->bhls", q, k)
    blocked = _blocked(mask, mask_type, num_head)
    if blocked is not None:
        logits = jnp.where(blocked, -jnp.inf, logits)
    weights = jax.nn.softmax(logits)  # NaN where a row is all masked, as torch's masked softmax
    context = _dot("bhls,bhse->blhe", weights.astype(v.dtype), v).reshape(batch, length, embed_dim)
    out = linear(context.astype(query.dtype), proj_weight, proj_bias)
    if not need_weights:
        return out, None
    return out, weights.mean(1) if average_attn_weights else weights


@ops.lowering("aten::_transformer_encoder_layer_fwd")
def _transformer_encoder_layer_fwd(
    src,
    embed_dim,
    num_heads,
    qkv_weight,
    qkv_bias,
    proj_weight,
    proj_bias,
    use_gelu,
    norm_first,
    eps,
    norm_weight_1,
    norm_bias_1,
    norm_weight_2,
    norm_bias_2,
    ffn_weight_1,
    ffn_bias_1,
    ffn_weight_2,
    ffn_bias_2,
    mask=None,
    mask_type=None,
):
    """`nn.TransformerEncoderLayer(batch_first=True)` in eval mode: (b, l, e) -> (b, l, e).

    The norms come before attention and feed-forward if `norm_first`, else after each is added to its input.
    """
    dtype = src.dtype

    def norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        return native_layer_norm(x, (embed_dim,), weight, bias, eps)[0].astype(dtype)

    def attend(x: jax.Array) -> jax.Array:
        projections = qkv_weight, qkv_bias, proj_weight, proj_bias
        out, _ = _native_multi_head_attention(
            x, x, x, embed_dim, num_heads, *projections, mask, need_weights=False, mask_type=mask_type
        )
        return out

    def feed_forward(x: jax.Array) -> jax.Array:
        hidden = linear(x, ffn_weight_1, ffn_bias_1)
        hidden = jax.nn.gelu(hidden, approximate=False) if use_gelu else jax.nn.relu(hidden)
        return linear(hidden.astype(dtype), ffn_weight_2, ffn_bias_2)

    if norm_first:
        x = (src + attend(norm(src, norm_weight_1, norm_bias_1))).astype(dtype)
        return x + feed_forward(norm(x, norm_weight_2, norm_bias_2))
    x = norm(src + attend(src), norm_weight_1, norm_bias_1)
    return norm(x + feed_forward(x), norm_weight_2, norm_bias_2)


@ops.decomposition("aten::_nested_tensor_from_mask_left_aligned", whole=False)
def _nested_tensor_from_mask_left_aligned(t, mask):
    """False: nested tensors are not for this device, and `nn.TransformerEncoder` then keeps to padded ones."""
    return False
