"""Putting tensors together and taking elements apart: cat, padding, repeat, roll, flip, triangles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from torchax_core.opset import OpSet
from torchax_core.promotion import AS_GIVEN, SAME, opmath
from torchax_ops_aten._strides import in_format_of
from torchax_ops_aten.copying import cast

ops = OpSet("torchax_ops_aten.joining")


@ops.lowering("aten::cat", promote=SAME)
def cat(tensors, dim=0):
    """The tensors one after the other along `dim`, in their common dtype. Tensors of shape (0,) are skipped."""
    kept = [x for x in tensors if x.shape != (0,)] or tensors[:1]
    return jnp.concatenate(kept, axis=dim)


@ops.lowering("aten::stack", "aten::_stack", promote=SAME)
def stack(tensors, dim=0):
    """Equally shaped tensors side by side in a new dimension `dim`."""
    return jnp.stack(tensors, axis=dim)


@ops.lowering("aten::block_diag", promote=SAME)
def block_diag(tensors):
    """A matrix with the tensors (0-, 1- or 2-d) as blocks down its diagonal, and 0 elsewhere."""
    blocks = [jnp.atleast_2d(x) for x in tensors]
    width = sum(block.shape[1] for block in blocks)
    rows, left = [], 0
    for block in blocks:
        rows.append(jnp.pad(block, ((0, 0), (left, width - left - block.shape[1]))))
        left += block.shape[1]
    return jnp.concatenate(rows)


# -- padding -------------------------------------------------------------------------------------


def _pad_pairs(pad: Sequence[int], ndim: int) -> list[tuple[int, int]]:
    """torch's flat list (last dimension first) as one (before, after) for each dimension, first dimension first."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (ndim - len(pairs)) + pairs[::-1]


@ops.lowering("aten::constant_pad_nd", promote=AS_GIVEN)
def constant_pad_nd(self, pad, value=0):
    """`self` with `value` around it; negative amounts cut off.

    pad: (before, after) of the last dimension, then of the one before it, ...
    """
    value = cast(jnp.asarray(value), self.dtype)
    return lax.pad(self, value, [(before, after, 0) for before, after in _pad_pairs(pad, self.ndim)])


Border = Callable[[jax.Array, int, int, int], tuple[jax.Array, jax.Array]]


def _mirrored(x: jax.Array, axis: int, before: int, after: int) -> tuple[jax.Array, jax.Array]:
    """What stands before and after `x` if its ends are mirrors; the end elements themselves are not repeated."""
    n = x.shape[axis]
    left = lax.slice_in_dim(x, 1, before + 1, axis=axis) if before else lax.slice_in_dim(x, 0, 0, axis=axis)
    right = lax.slice_in_dim(x, n - 1 - after, n - 1, axis=axis) if after else lax.slice_in_dim(x, 0, 0, axis=axis)
    return lax.rev(left, (axis,)), lax.rev(right, (axis,))


def _continued(x: jax.Array, axis: int, before: int, after: int) -> tuple[jax.Array, jax.Array]:
    """What stands before and after `x` if its end elements go on for ever."""
    n = x.shape[axis]

    def repeated(start: int, count: int) -> jax.Array:
        edge = lax.slice_in_dim(x, start, start + 1, axis=axis)
        return jnp.broadcast_to(edge, [count if i == axis else size for i, size in enumerate(x.shape)])

    return repeated(0, before), repeated(n - 1, after)


def _wrapped(x: jax.Array, axis: int, before: int, after: int) -> tuple[jax.Array, jax.Array]:
    """What stands before and after `x` if it goes round in a circle."""
    n = x.shape[axis]
    return lax.slice_in_dim(x, n - before, n, axis=axis), lax.slice_in_dim(x, 0, after, axis=axis)


def _pad_borders(x: jax.Array, padding: Sequence[int], border: Border) -> jax.Array:
    """`x` padded along its last dimensions with what `border` says stands there; negative amounts cut off."""
    for axis, (before, after) in enumerate(_pad_pairs(padding, x.ndim)):
        if before > 0 or after > 0:
            left, right = border(x, axis, max(before, 0), max(after, 0))
            x = jnp.concatenate([left, x, right], axis=axis)
        if before < 0 or after < 0:
            x = lax.slice_in_dim(x, max(-before, 0), x.shape[axis] - max(-after, 0), axis=axis)
    return x


def _pad_borders_backward(grad: jax.Array, x: jax.Array, padding: Sequence[int], border: Border) -> jax.Array:
    """The gradient of `_pad_borders`: padding is linear, so it is the transposed function."""
    grad = opmath(grad)
    transposed = jax.linear_transpose(
        lambda y: _pad_borders(y, padding, border), jax.ShapeDtypeStruct(x.shape, grad.dtype)
    )
    return transposed(grad)[0]


@ops.lowering("aten::_pad_circular")
def _pad_circular(self, pad):
    """`self` with its other end at each end. self: (n, c, *spatial); pad: last dimension first. Cutting off is torch's."""
    return NotImplemented if min(pad, default=0) < 0 else _pad_borders(self, pad, _wrapped)


@ops.lowering(
    "aten::reflection_pad1d", "aten::reflection_pad2d", "aten::reflection_pad3d", strides=in_format_of("self")
)
def reflection_pad(self, padding):
    """`self` with its mirror image around it. self: (..., *spatial); padding: last dimension first."""
    return _pad_borders(self, padding, _mirrored)


@ops.lowering(
    "aten::reflection_pad1d_backward",
    "aten::reflection_pad2d_backward",
    "aten::reflection_pad3d_backward",
    strides=in_format_of("self"),
)
def reflection_pad_backward(grad_output, self, padding):
    """The gradient of `reflection_pad`: every element gathers those of its images. returns: the shape of `self`"""
    return _pad_borders_backward(grad_output, self, padding, _mirrored)


@ops.lowering(
    "aten::replication_pad1d", "aten::replication_pad2d", "aten::replication_pad3d", strides=in_format_of("self")
)
def replication_pad(self, padding):
    """`self` with its border elements repeated around it. self: (..., *spatial); padding: last dimension first."""
    return _pad_borders(self, padding, _continued)


@ops.lowering(
    "aten::replication_pad1d_backward",
    "aten::replication_pad2d_backward",
    "aten::replication_pad3d_backward",
    strides=in_format_of("self"),
)
def replication_pad_backward(grad_output, self, padding):
    """The gradient of `replication_pad`. returns: the shape of `self`"""
    return _pad_borders_backward(grad_output, self, padding, _continued)


# -- repeating and moving ------------------------------------------------------------------------


@ops.lowering("aten::repeat")
def repeat(self, repeats):
    """`self` laid side by side `repeats[i]` times along each dimension; `repeats` may add leading dimensions."""
    return jnp.tile(self, repeats)


@ops.lowering("aten::repeat_interleave.Tensor")
def repeat_interleave(repeats, *, output_size):
    """Each index i, `repeats[i]` times: [0, 0, 2] for [2, 0, 1].

    returns: (output_size,), by default (sum(repeats),), in the dtype of `repeats`
    """
    return jnp.searchsorted(jnp.cumsum(repeats), jnp.arange(output_size), side="right").astype(repeats.dtype)


@ops.data_dependent_case(
    "aten::repeat_interleave.Tensor",
    when=lambda repeats, *, output_size=None: output_size is None,
    instead="torch.repeat_interleave(..., output_size=n)",
)
def repeat_interleave_counted(repeats, *, output_size=None):
    """As `repeat_interleave`, the size being the sum of `repeats`."""
    if repeats.size and int(jnp.min(repeats)) < 0:
        raise RuntimeError("repeats can not be negative")
    return repeat_interleave(repeats, output_size=int(jnp.sum(repeats)))


@ops.lowering("aten::roll")
def roll(self, shifts, dims=()):
    """`self` moved on by `shifts`, what falls off the end put in at the start; along `dims`, or flattened."""
    if self.size == 0:
        return self
    return jnp.roll(self, shifts, dims) if dims else jnp.roll(self, shifts[0])


@ops.lowering("aten::flip")
def flip(self, dims):
    """`self` in reverse order along `dims`."""
    return lax.rev(self, [dim % self.ndim for dim in dims]) if self.ndim else self


@ops.lowering("aten::tril")
def tril(self, diagonal=0):
    """The matrices `self`, (..., n, m), with 0 above the given diagonal."""
    return jnp.tril(self, diagonal)


@ops.lowering("aten::triu")
def triu(self, diagonal=0):
    """The matrices `self`, (..., n, m), with 0 below the given diagonal."""
    return jnp.triu(self, diagonal)


@ops.lowering("aten::_chunk_cat")
def chunk_cat(tensors, dim, num_chunks):
    """Each tensor cut into `num_chunks` along `dim` (padded with 0 to fit) and flattened from `dim` on; then joined.

    tensors: (*batch, n_i, *rest_i), batch the first `dim` dimensions of all.
    returns: (*batch, num_chunks, sum_i(ceil(n_i / num_chunks) * size of rest_i))
    """
    rows = []
    for x in tensors:
        axis = dim % x.ndim
        missing = -x.shape[axis] % num_chunks
        padded = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])
        rows.append(padded.reshape(*x.shape[:axis], num_chunks, -1))
    return jnp.concatenate(rows, axis=-1)
