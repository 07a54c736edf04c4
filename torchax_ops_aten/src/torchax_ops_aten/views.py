"""View ops: how each reads its base, and, where the index map would be dearer or cannot serve, how it writes.

`split_arguments` keeps apart what does not change the program (an index, a start), so that `x[i]` compiles once for all i.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax_core import OpSet

ops = OpSet("torchax_ops_aten.views")


def _dim(dim: int, ndim: int) -> int:
    return dim % ndim if ndim else 0


# -- the same elements in another shape ----------------------------------------------------------


def _reshape_write(base: jax.Array, new: jax.Array, *args: Any) -> jax.Array:
    return new.reshape(base.shape)


def _sizes(shape: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, ...]:
    known = math.prod(n for n in size if n != -1)
    return tuple(math.prod(shape) // known if n == -1 else n for n in size)


@ops.view("aten::view", "aten::_reshape_alias")
def view(self: jax.Array, size: tuple[int, ...], *stride: Any) -> jax.Array:
    """The elements in row-major order, in another shape. torch has checked that strides allow it."""
    return self.reshape(size)


@view.split_arguments
def _(shape: tuple[int, ...], size: tuple[int, ...], *stride: Any) -> Any:
    return (_sizes(shape, tuple(size)),), ()


view.write_back(_reshape_write)


@ops.view("aten::unsqueeze")
def unsqueeze(self: jax.Array, dim: int) -> jax.Array:
    """A dimension of length 1 before `dim`."""
    return jnp.expand_dims(self, dim)


unsqueeze.write_back(_reshape_write)


@ops.view("aten::squeeze", "aten::squeeze.dim", "aten::squeeze.dims")
def squeeze(self: jax.Array, dim: int | tuple[int, ...] | None = None) -> jax.Array:
    """Without the dimensions of length 1, or those of `dim` that are."""
    dims = range(self.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    gone = {_dim(d, self.ndim) for d in dims}
    return self.reshape(tuple(n for i, n in enumerate(self.shape) if i not in gone or n != 1))


squeeze.write_back(_reshape_write)


# -- the dimensions in another order -------------------------------------------------------------


@ops.view("aten::permute")
def permute(self: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    """Dimension i of the result is dimension dims[i] of `self`."""
    return jnp.transpose(self, [_dim(d, self.ndim) for d in dims])


@permute.write_back
def _(base: jax.Array, new: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    order = [_dim(d, base.ndim) for d in dims]
    return jnp.transpose(new, sorted(range(base.ndim), key=order.__getitem__))


@ops.view("aten::transpose.int")
def transpose(self: jax.Array, dim0: int, dim1: int) -> jax.Array:
    """Two dimensions exchanged; a 0-d tensor stays as it is."""
    return jnp.swapaxes(self, dim0, dim1) if self.ndim else self


@transpose.write_back
def _(base: jax.Array, new: jax.Array, dim0: int, dim1: int) -> jax.Array:
    return jnp.swapaxes(new, dim0, dim1) if new.ndim else new


@ops.view("aten::t")
def t(self: jax.Array) -> jax.Array:
    """A matrix transposed; 0-d and 1-d tensors stay as they are."""
    return self.T if self.ndim == 2 else self


@t.write_back
def _(base: jax.Array, new: jax.Array) -> jax.Array:
    return new.T if new.ndim == 2 else new


# -- some of the elements ------------------------------------------------------------------------


@ops.view("aten::select.int")
def select(self: jax.Array, dim: int, index: Any) -> jax.Array:
    """The slice at one index of a dimension, without that dimension."""
    if isinstance(index, int):  # inside a program, where it costs no compilation
        return lax.index_in_dim(self, index, dim, keepdims=False)
    return lax.dynamic_index_in_dim(self, index, dim, keepdims=False, allow_negative_indices=False)


@select.split_arguments
def _(shape: tuple[int, ...], dim: int, index: int) -> Any:
    dim = _dim(dim, len(shape))
    return (dim,), (index % shape[dim],)


@select.write_back
def _(base: jax.Array, new: jax.Array, dim: int, index: Any) -> jax.Array:
    return lax.dynamic_update_index_in_dim(base, new.astype(base.dtype), index, dim, allow_negative_indices=False)


@ops.view("aten::slice.Tensor")
def slice_(self: jax.Array, dim: int, length: int, step: int, start: Any) -> jax.Array:
    """`length` elements of a dimension from `start` on, every `step`-th. `start` is an int or traced, the rest static."""
    span = (length - 1) * step + 1 if length else 0
    if isinstance(start, int):
        return lax.slice_in_dim(self, start, start + span, step, dim)
    window = lax.dynamic_slice_in_dim(self, start, span, dim, allow_negative_indices=False)
    return window if step == 1 else lax.slice_in_dim(window, 0, span, step, dim)


@slice_.split_arguments
def _(shape: tuple[int, ...], dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    dim = _dim(dim, len(shape))
    first, last, _ = slice(start, end, step).indices(shape[dim])
    length = len(range(first, last, step))
    return (dim, length, step), (first if length else 0,)


@slice_.write_back
def _(base: jax.Array, new: jax.Array, dim: int, length: int, step: int, start: Any) -> jax.Array:
    if length == 0:
        return base
    new = new.astype(base.dtype)
    if step == 1:
        return lax.dynamic_update_slice_in_dim(base, new, start, dim, allow_negative_indices=False)
    at = (slice(None),) * dim + (start + jnp.arange(length) * step,)
    return base.at[at].set(new)


@ops.view("aten::diagonal")
def diagonal(self: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    """The diagonal of the planes of two dimensions, as a last dimension."""
    return jnp.diagonal(self, offset, dim1, dim2)


@ops.view("aten::unfold")
def unfold(self: jax.Array, dimension: int, size: int, step: int) -> jax.Array:
    """Overlapping windows of a dimension, in a new last one.

    self:    (..., n, ...); returns (..., (n - size) // step + 1, ..., size).
    source:  https://docs.pytorch.org/docs/stable/generated/torch.Tensor.unfold.html
    """
    if self.ndim == 0:
        return self.reshape((1,))[:size]
    dim = _dim(dimension, self.ndim)
    count = (self.shape[dim] - size) // step + 1
    at = jnp.arange(count)[:, None] * step + jnp.arange(size)
    windows = jnp.take(self, at, axis=dim)
    return jnp.moveaxis(windows, dim + 1, -1)


# -- the same elements several times -------------------------------------------------------------


@ops.view("aten::expand")
def expand(self: jax.Array, size: tuple[int, ...], *, implicit: bool = False) -> jax.Array:
    """Dimensions of length 1 repeated to `size` (-1: as they are), new ones in front."""
    return jnp.broadcast_to(self, size)


@expand.split_arguments
def _(shape: tuple[int, ...], size: tuple[int, ...], implicit: bool = False) -> Any:
    own = (1,) * (len(size) - len(shape)) + tuple(shape)
    return (tuple(m if n == -1 else n for n, m in zip(size, own, strict=True)),), ()


@expand.write_back
def _(base: jax.Array, new: jax.Array, size: tuple[int, ...]) -> jax.Array:
    # torch refuses writes where elements repeat; what is left has one place for each
    first = tuple(slice(0, 1) if n != m else slice(None) for n, m in zip(new.shape[new.ndim - base.ndim :], base.shape))
    return new[(0,) * (new.ndim - base.ndim) + first].reshape(base.shape) if new.size else base


# -- several pieces ------------------------------------------------------------------------------


@ops.view("aten::split.Tensor", "aten::unsafe_split.Tensor")
def split(self: jax.Array, split_size: int, dim: int = 0) -> list[jax.Array]:
    """Pieces of `split_size` along a dimension, the last one maybe shorter."""
    n = self.shape[dim]
    if split_size == 0:
        return [self]
    return [lax.slice_in_dim(self, i, min(i + split_size, n), axis=dim) for i in range(0, max(n, 1), split_size)]


@ops.view("aten::split_with_sizes", "aten::unsafe_split_with_sizes")
def split_with_sizes(self: jax.Array, split_sizes: tuple[int, ...], dim: int = 0) -> list[jax.Array]:
    """Pieces of the given lengths along a dimension."""
    ends = np.cumsum(split_sizes).tolist()
    return [lax.slice_in_dim(self, end - n, end, axis=dim) for n, end in zip(split_sizes, ends, strict=True)]


@ops.view("aten::unbind.int")
def unbind(self: jax.Array, dim: int = 0) -> list[jax.Array]:
    """The slices along a dimension, without it."""
    return [lax.index_in_dim(self, i, dim, keepdims=False) for i in range(self.shape[dim])]


# -- elements seen otherwise ---------------------------------------------------------------------


@ops.view("aten::view_as_real")
def view_as_real(self: jax.Array) -> jax.Array:
    """Complex numbers as pairs: (...) -> (..., 2)."""
    return jnp.stack([self.real, self.imag], axis=-1)


@view_as_real.write_back
def _(base: jax.Array, new: jax.Array) -> jax.Array:
    return lax.complex(new[..., 0], new[..., 1])


@ops.view("aten::view_as_complex")
def view_as_complex(self: jax.Array) -> jax.Array:
    """Pairs as complex numbers: (..., 2) -> (...)."""
    return lax.complex(self[..., 0], self[..., 1])


@view_as_complex.write_back
def _(base: jax.Array, new: jax.Array) -> jax.Array:
    return jnp.stack([new.real, new.imag], axis=-1)


@ops.view("aten::_conj")
def conj(self: jax.Array) -> jax.Array:
    """Complex conjugate, as a view."""
    return jnp.conj(self)


@conj.write_back
def _(base: jax.Array, new: jax.Array) -> jax.Array:
    return jnp.conj(new)


@ops.view("aten::_neg_view")
def neg_view(self: jax.Array) -> jax.Array:
    """The negative, as a view."""
    return -self


@neg_view.write_back
def _(base: jax.Array, new: jax.Array) -> jax.Array:
    return -new


conj.bit = neg_view.bit = True


@ops.view("aten::view.dtype")
def view_dtype(self: jax.Array, dtype: np.dtype) -> jax.Array:
    """The bits read as another dtype; of another width, the last dimension grows or shrinks by the ratio."""
    return _reinterpret(self, dtype)


@view_dtype.write_back
def _(base: jax.Array, new: jax.Array, dtype: np.dtype) -> jax.Array:
    return _reinterpret(new, base.dtype).reshape(base.shape)


def _reinterpret(array: jax.Array, dtype: np.dtype) -> jax.Array:
    """lax.bitcast_convert_type with torch's shape rule; bool and complex by way of their bytes and parts."""
    dtype = np.dtype(dtype)
    if array.dtype == dtype:
        return array
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = view_as_real(array).reshape((*array.shape[:-1], -1) if array.ndim else (2,))
        return _reinterpret(array, dtype) if array.dtype != dtype else array
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = _reinterpret(array, np.dtype(np.float32 if dtype == np.complex64 else np.float64))
        return view_as_complex(parts.reshape((*parts.shape[:-1], -1, 2)))
    if array.dtype == bool:
        array = array.astype(jnp.uint8)
    if dtype == np.bool_:
        return _reinterpret(array, np.dtype(np.uint8)) != 0
    if array.dtype == dtype:
        return array
    old, new = array.dtype.itemsize, dtype.itemsize
    if old == new:
        return lax.bitcast_convert_type(array, dtype)
    if old > new:
        wide = lax.bitcast_convert_type(array, dtype)
        return wide.reshape((*array.shape[:-1], -1)) if array.ndim else wide
    narrow = array.reshape((*array.shape[:-1], array.shape[-1] * old // new, new // old))
    return lax.bitcast_convert_type(narrow, dtype)
