"""Embeddings: embedding, embedding_bag, renormalization by norm, and their backwards.

The gradient of a table is dense: a sum of rows into zeros (`sparse=True` is refused where it would make a sparse
tensor). A `padding_idx` takes part in no gradient: it is moved out of range, where writes are dropped.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from torchax_core.opset import OpSet
from torchax_core.promotion import opmath
from torchax_ops_aten._derivatives import derivatives
from torchax_ops_aten._values import outside

ops = OpSet("torchax_ops_aten.embedding")

_SUM, _MEAN, _MAX = 0, 1, 2  # the modes of embedding_bag


def _rows(weight: jax.Array, indices: jax.Array) -> jax.Array:
    """`weight[indices]`. 32-bit indices are cheaper on TPU, and no table has more rows than they count."""
    return weight.at[indices.astype(jnp.int32)].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _sum_rows(rows: jax.Array, indices: jax.Array, count: int, padding_idx: int) -> jax.Array:
    """`rows` (k, d) added up by `indices` (k,) into (count, d), less those of `padding_idx`."""
    indices = jnp.where(indices == padding_idx, count, indices).astype(jnp.int32)
    return (
        jnp.zeros((count, *rows.shape[1:]), rows.dtype).at[indices].add(rows, mode="drop", wrap_negative_indices=False)
    )


def _frequencies(indices: jax.Array, count: int, dtype: Any) -> jax.Array:
    """How often the row that each of `indices` (k,) names is named in all of them."""
    return _rows(jnp.bincount(indices, length=count), indices).astype(dtype)


@ops.lowering("aten::embedding")
def embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    """Rows of a table. weight: (n, d); indices: (...). returns: (..., d). The flags matter to the gradient only."""
    rows = _rows(weight, indices)
    if scale_grad_by_freq:
        times = _frequencies(indices.reshape(-1), weight.shape[0], rows.dtype).reshape(*indices.shape, 1)
        rows = _sharing(rows, times)
    return (
        jnp.where((indices == padding_idx)[..., None], jax.lax.stop_gradient(rows), rows) if padding_idx >= 0 else rows
    )


@derivatives(rows=lambda tangent, rows, times: tangent / times)
def _sharing(rows: jax.Array, times: jax.Array) -> jax.Array:
    """`rows`, of whose gradients each counts for one of so many."""
    return rows


@ops.lowering("aten::embedding_dense_backward")
def embedding_dense_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq):
    """The gradient of the table.

    grad_output: (..., d); indices: (...). returns: (num_weights, d); each row is divided by the times it was read, if
    `scale_grad_by_freq`.
    """
    indices = indices.reshape(-1)
    grad = opmath(grad_output).reshape(indices.size, grad_output.shape[-1])
    if scale_grad_by_freq:
        grad = grad / _frequencies(indices, num_weights, grad.dtype)[:, None]
    return _sum_rows(grad, indices, num_weights, padding_idx)


@ops.lowering("aten::embedding_renorm", static=("norm_type",))
def embedding_renorm(self, indices, max_norm, norm_type):
    """`self` with the rows that `indices` name scaled down to a `norm_type`-norm of `max_norm`, if theirs is larger."""
    indices = indices.reshape(-1).astype(jnp.int32)
    rows = opmath(_rows(self, indices))
    norm = jnp.linalg.norm(rows, ord=norm_type, axis=-1, keepdims=True)
    scale = jnp.where(norm > max_norm, max_norm / (norm + 1e-7), 1)  # torch's epsilon
    return self.at[indices].set((rows * scale).astype(self.dtype), mode="promise_in_bounds")


@ops.value_check("aten::embedding", values=("indices",))
def _embedding_refused(weight, indices):
    return outside(indices, weight.shape[0])


# -- embedding_bag --------------------------------------------------------------------------------


@ops.lowering("aten::_embedding_bag", "aten::_embedding_bag_forward_only")
def _embedding_bag(
    weight,
    indices,
    offsets,
    scale_grad_by_freq=False,
    mode=0,
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=-1,
):
    """Rows of a table, reduced in bags.

    weight:             (n, d).
    indices:            (k,), the rows of all bags one after the other; those equal to `padding_idx` are left out.
    offsets:            (bags,), where each bag starts; with `include_last_offset` one more, where the last ends.
    mode:               0 sum, 1 mean, 2 maximum.
    per_sample_weights: None or (k,), what each row is multiplied with.
    returns:            (bags, d); the bag of each index (k,); the number of indices in each bag, in the shape of
                        `offsets`; for a maximum, the row that each came from (bags, d), and (0,) otherwise. Empty bags
                        are 0. The shapes of the last three are those of torch's CUDA kernels.
    """
    count = indices.size
    bags = offsets.size - 1 if include_last_offset else offsets.size
    # Empty bags start where the next one does, and the last of equal starts is the one that holds the index.
    bag = jnp.searchsorted(offsets[:bags], jnp.arange(count), side="right").astype(jnp.int32) - 1
    kept = indices != padding_idx
    segments = jnp.where(kept, bag, bags)  # out of range: dropped
    sizes = jnp.zeros(offsets.shape, indices.dtype).at[segments].add(kept.astype(indices.dtype), mode="drop")
    rows = opmath(_rows(weight, indices))
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    maximum_indices = jnp.zeros(0, indices.dtype)
    size = sizes[:bags, None]
    if mode == _MAX:
        out = jax.ops.segment_max(rows, segments, bags)
        # The first index of each bag whose row holds the maximum.
        found = (rows == out[bag]) | (jnp.isnan(rows) & jnp.isnan(out[bag]))
        position = jnp.where(found, jnp.arange(count)[:, None], count)
        first = jnp.minimum(jax.ops.segment_min(position, segments, bags), max(count - 1, 0))
        maximum_indices = jnp.where(size > 0, indices[first] if count else first, -1)
        out = jnp.where(size > 0, out, 0)
    else:
        out = jax.ops.segment_sum(rows, segments, bags)
        if mode == _MEAN:
            out = out / jnp.maximum(size, 1)
    return out, bag, sizes, maximum_indices


@ops.value_check("aten::_embedding_bag", "aten::_embedding_bag_forward_only", values=("indices", "offsets"))
def _embedding_bag_refused(weight, indices, offsets):
    """Whether an index is out of range, or the bags do not start at 0 or start behind the last index."""
    return outside(indices, weight.shape[0]) or (
        offsets.size > 0 and (int(offsets[0]) != 0 or int(offsets[-1]) > indices.size)
    )


@ops.lowering("aten::_embedding_bag_dense_backward")
def _embedding_bag_dense_backward(
    grad,
    indices,
    offset2bag,
    bag_size,
    maximum_indices,
    num_weights,
    scale_grad_by_freq,
    mode,
    per_sample_weights,
    padding_idx=-1,
):
    """The gradient of the table of :func:`_embedding_bag`. grad: (bags, d). returns: (num_weights, d)."""
    grad = opmath(grad)
    if mode == _MAX:
        row = jnp.where(maximum_indices < 0, num_weights, maximum_indices)
        column = jnp.arange(grad.shape[1])
        return jnp.zeros((num_weights, grad.shape[1]), grad.dtype).at[row, column].add(grad, mode="drop")
    rows = _rows(grad, offset2bag)
    if mode == _MEAN:
        rows = rows / jnp.maximum(_rows(bag_size, offset2bag), 1)[:, None]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    if scale_grad_by_freq:
        rows = rows / _frequencies(indices, num_weights, rows.dtype)[:, None]
    return _sum_rows(rows, indices, num_weights, padding_idx)


@ops.lowering("aten::_embedding_bag_backward")
def _embedding_bag_backward(
    grad,
    indices,
    offsets,
    offset2bag,
    bag_size,
    maximum_indices,
    num_weights,
    scale_grad_by_freq,
    mode,
    sparse,
    per_sample_weights,
    padding_idx=-1,
):
    """:func:`_embedding_bag_dense_backward`; torch's own would divide into a dense and a sparse one here."""
    if sparse:
        raise NotImplementedError(
            'aten::_embedding_bag_backward: `sparse=True` makes a sparse gradient, which device "jax" has none of. '
            "Use torch.nn.EmbeddingBag(..., sparse=False)."
        )
    return _embedding_bag_dense_backward(
        grad,
        indices,
        offset2bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


@ops.lowering("aten::_embedding_bag_per_sample_weights_backward")
def _embedding_bag_per_sample_weights_backward(grad, weight, indices, offsets, offset2bag, mode, padding_idx=-1):
    """The gradient of the weights of a sum: the gradient of each index' bag times its row. returns: (k,)."""
    product = (opmath(_rows(grad, offset2bag)) * opmath(_rows(weight, indices))).sum(axis=-1)
    return jnp.where(indices == padding_idx, 0, product)
