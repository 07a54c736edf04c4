"""Reading and writing by position: index, index_put, gather, scatter, index_*, masked_*, *_scatter, their backwards.

Negative indices count from the end, as in torch. An index out of range, which CPU torch refuses with an IndexError,
cannot be refused by compiled code: it is where the call is new (see the value checks), but else a read takes the
nearest element and a write is dropped, as XLA does.

Masks are indices of unknown number. Writing through them keeps its static shape here: a value that broadcasts becomes
`where`, and one with an element per True is read at each True's rank, so that a program compiles once and not once per
count of True. Reading through them cannot: see :func:`index_with_mask`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torchax_core.errors import ShapeError
from torchax_core.opset import OpSet
from torchax_core.promotion import AS_GIVEN, opmath
from torchax_ops_aten._strides import column_major, row_major
from torchax_ops_aten._values import outside

ops = OpSet("torchax_ops_aten.indexing")

# Indices are wrapped by `_wrap`, and XLA's own treatment of those out of range (clamped reads, dropped writes) is what
# this module promises: no mode of jax.numpy's has anything to add.
_AS_IS: dict[str, Any] = {"mode": "promise_in_bounds", "wrap_negative_indices": False}


# -- helpers --------------------------------------------------------------------------------------


def _wrap(index: jax.Array, size: int) -> jax.Array:
    """`index` with negative positions counted from the end; 32-bit where that is enough, which is cheaper on TPU."""
    if size < 2**31:
        index = index.astype(jnp.int32)
    return jnp.where(index < 0, index + size, index)


def _along(dim: int, index: Any) -> tuple[Any, ...]:
    """An index for `.at[]` that takes `index` along one dimension and everything along those before it."""
    return (slice(None),) * dim + (index,)


def _at_least_1d(self: jax.Array, dim: int) -> tuple[jax.Array, int]:
    """`self` and `dim` for ops along a dimension, which take a 0-d tensor as one of a single element."""
    if self.ndim == 0:
        return self.reshape(1), 0
    return self, dim % self.ndim


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (jnp.bool_, jnp.uint8)


def _add(self: jax.Array, at: tuple[Any, ...], values: jax.Array, **mode: Any) -> jax.Array:
    """`self` with `values` added at positions; half types add up in float32, and bools are or-ed."""
    if self.dtype == jnp.bool_:
        return self.at[at].max(values.astype(bool), **(mode or _AS_IS))
    return opmath(self).at[at].add(opmath(values), **(mode or _AS_IS))


def _converted(value: Any, dtype: Any) -> jax.Array:
    """A Scalar, or a 0-d tensor, in the dtype of the tensor it is written to."""
    value = jnp.asarray(value)
    if jnp.issubdtype(value.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        # torch lets one without imaginary part pass, which compiled code cannot tell.
        raise RuntimeError(f"value cannot be converted to type {jnp.dtype(dtype)} without overflow: it is complex.")
    return value.astype(dtype)


def _identity(reduce: str, dtype: Any) -> Any:
    """What a reduction starts from."""
    if reduce in ("amax", "amin"):
        if dtype == jnp.bool_:
            return reduce == "amin"
        if jnp.issubdtype(dtype, jnp.integer):
            return jnp.iinfo(dtype).min if reduce == "amax" else jnp.iinfo(dtype).max
        return -jnp.inf if reduce == "amax" else jnp.inf
    return 1 if reduce == "prod" else 0


def _reduce(
    self: jax.Array, at: tuple[Any, ...], values: jax.Array, reduce: str, include_self: bool, flat: bool
) -> jax.Array:
    """`self` with `values` reduced into positions: "sum", "prod", "mean", "amax" or "amin".

    include_self: whether the elements that were at written positions take part. Others stay as they are anyway.
    flat:         `at` holds for `self.reshape(-1)`.
    """
    dtype, shape = self.dtype, self.shape
    self, values = opmath(self), opmath(values)
    if flat:
        self = self.reshape(-1)
    if not include_self:
        self = self.at[at].set(jnp.asarray(_identity(reduce, dtype), self.dtype), **_AS_IS)
    if reduce in ("sum", "mean"):
        out = _add(self, at, values)
    else:
        method = {"prod": "multiply", "amax": "max", "amin": "min"}[reduce]
        if dtype == jnp.bool_ and reduce == "prod":
            method = "min"
        out = getattr(self.at[at], method)(values, **_AS_IS)
    if reduce == "mean":
        # In int32, since float32 stops counting at 2**24.
        count = jnp.full(self.shape, int(include_self), jnp.int32).at[at].add(1, **_AS_IS)
        count = jnp.maximum(count, 1)
        integer = jnp.issubdtype(dtype, jnp.integer)
        out = out // count.astype(dtype) if integer else out / count.astype(out.real.dtype)
    return out.reshape(shape)


# -- index and index_put ----------------------------------------------------------------------------


def _index_tuple(self: jax.Array, indices: Sequence[Any]) -> tuple[Any, ...]:
    """`indices` (integer tensors, or None for a whole dimension) as an index for `.at[]`, negatives wrapped."""
    return tuple(
        slice(None) if index is None else _wrap(index, size) for index, size in zip(indices, self.shape, strict=False)
    )


@ops.lowering("aten::index.Tensor", "aten::_unsafe_index.Tensor")
def index_tensor(self, indices):
    """`self[indices]` for integer indices. Calls with masks go to :func:`index_with_mask`.

    indices: an integer tensor per dimension, or None to take all of it; the tensors broadcast together.
    returns: their broadcast shape in place of the indexed dimensions, or first if those are not neighbours.
    """
    return self.at[_index_tuple(self, indices)].get(**_AS_IS)


def _has_mask(self: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> bool:
    """Whether a call of aten::index reads through a mask."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


@ops.data_dependent_case(
    "aten::index.Tensor",
    when=_has_mask,
    instead="keep the shape with `torch.where(mask, x, fill)`, or bound it with "
    "`x[torch.nonzero_static(mask, size=n)[:, 0]]`",
)
def index_with_mask(self, indices):
    """`self[indices]` where some indices are bool (or uint8) masks, whose True elements are taken, in order.

    The positions are found on the host. A number of them not seen before must not cost a compilation each time, so on
    CPU, where the host has the elements too, numpy takes them; elsewhere they are taken at a rounded number of
    positions and cut to size.
    """
    positions: list[Any] = []
    for index in indices:
        if _is_mask(index):
            at = len(positions)
            if self.shape[at : at + index.ndim] != index.shape:
                raise IndexError(
                    f"The shape of the mask {list(index.shape)} at index {at} does not match the shape of the indexed "
                    f"tensor {list(self.shape)} at index {at}"
                )
            positions.extend(np.nonzero(np.asarray(index)))
        else:
            positions.append(index)
    if _on_host(self):
        places = tuple(slice(None) if index is None else np.asarray(index) for index in positions)
        return _beside(np.asarray(self)[places], self)
    if len(indices) != 1:
        return index_tensor(self, [index if index is None else jnp.asarray(index) for index in positions])
    count = len(positions[0])
    padded = 1 << (count - 1).bit_length() if count else 0
    return index_tensor(self, [jnp.asarray(np.resize(index, padded)) for index in positions])[:count]


def _on_host(x: Any) -> bool:
    """Whether the elements of `x` are one array in the memory of the CPU."""
    return len(x.sharding.device_set) == 1 and next(iter(x.sharding.device_set)).platform == "cpu"


def _beside(found: np.ndarray, x: Any) -> jax.Array:
    """The array on the device of `x`, if that is a single one. (`device_put` takes twice the time of `asarray`.)"""
    made = jnp.asarray(found)
    devices = x.sharding.device_set
    return made if len(devices) > 1 or made.sharding.device_set == devices else jax.device_put(made, x.sharding)


@ops.lowering("aten::index_put", "aten::_unsafe_index_put")
def index_put(self, indices, values, accumulate=False):
    """`self` with `values` written (or added, if `accumulate`) at `indices`, which may be masks.

    indices: as in :func:`index_tensor`, and bool masks, each of which stands for as many dimensions as it has.
    values:  broadcasts to the shape of `self[indices]`; with masks, its length where they differ from 1 is believed
             to be their number of True (CPU torch raises if it is not, compiled code cannot: see the check below).
    """
    values = values.astype(self.dtype)
    if not any(_is_mask(index) for index in indices):
        return _put(self, _index_tuple(self, indices), values, accumulate)
    if sum(index is not None for index in indices) == 1:
        return _masked_put(self, indices, values, accumulate)
    return _put(self, _mask_positions(self, indices, values), values, accumulate, mode="drop")


@ops.lowering("aten::_index_put_impl")
def _index_put_impl(self, indices, values, accumulate=False, unsafe=False):
    """:func:`index_put`; `unsafe` drops a check that compiled code cannot make."""
    return index_put(self, indices, values, accumulate)


@ops.value_check("aten::index.Tensor", values=("indices",))
def _index_refused(self, indices):
    """Whether an integer index is out of range. Masks are refused by their shape, before."""
    at = 0
    for index in indices:
        mask = _is_mask(index)
        if index is not None and not mask and outside(index, self.shape[at], -self.shape[at]):
            return True
        at += index.ndim if mask else 1
    return False


@ops.value_check("aten::index_put", "aten::_index_put_impl", values=("indices",))
def _index_put_refused(self, indices, values, unsafe=False):
    """Whether an index is out of range, or a single mask has another number of True than there are `values`."""
    if unsafe:
        return False
    given = [at for at, index in enumerate(indices) if index is not None]
    if len(given) == 1 and _is_mask(indices[given[0]]):
        first, mask = given[0], indices[given[0]]
        selected = (*self.shape[:first], np.count_nonzero(mask), *self.shape[first + mask.ndim :])
        return not _broadcasts(values.shape, selected)
    return _index_refused(self, indices)


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of `shape` can be written to one of shape `to`; leading dimensions of length 1 are dropped."""
    extra = max(len(shape) - len(to), 0)
    return all(n == 1 for n in shape[:extra]) and all(
        n in (1, m) for n, m in zip(reversed(shape[extra:]), reversed(to), strict=False)
    )


def _put(self: jax.Array, at: tuple[Any, ...], values: jax.Array, accumulate: bool, **mode: Any) -> jax.Array:
    if accumulate:
        return _add(self, at, values, **mode)
    return self.at[at].set(values, **(mode or _AS_IS))


def _masked_put(self: jax.Array, indices: Sequence[Any], values: jax.Array, accumulate: bool) -> jax.Array:
    """index_put with one mask and nothing else: no scatter, but `where` the mask is True.

    The mask covers `mask.ndim` neighbouring dimensions of `self`; in the shape that `values` broadcasts to they are a
    single one. `values` is brought to the full number of dimensions, each True reading its element there.
    """
    first = next(i for i, index in enumerate(indices) if index is not None)
    mask = indices[first] != 0
    after = self.ndim - first - mask.ndim
    ndim = first + 1 + after
    values = values.reshape((1,) * (ndim - values.ndim) + values.shape[max(values.ndim - ndim, 0) :])
    count = values.shape[first]
    if count == 0:
        return self
    if count == 1:
        spread = values.reshape(values.shape[:first] + (1,) * mask.ndim + values.shape[first + 1 :])
    else:
        rank = jnp.cumsum(mask.reshape(-1), dtype=jnp.int32).reshape(mask.shape) - 1
        spread = values.at[_along(first, jnp.maximum(rank, 0))].get(**_AS_IS)
    if accumulate:
        combined = self | spread if self.dtype == jnp.bool_ else opmath(self) + opmath(spread)
        spread = combined.astype(self.dtype)
    return jnp.where(mask.reshape(mask.shape + (1,) * after), spread, self)


def _mask_positions(self: jax.Array, indices: Sequence[Any], values: jax.Array) -> tuple[Any, ...]:
    """An index for `.at[]` where masks come with other indices: each mask becomes as many positions as it has dims.

    The number of True, K, is the length of the other indices or of `values` there; where those broadcast, it is known
    only when the program runs, and positions are padded with ones out of range to the size of the largest mask.
    """
    masks = [index != 0 for index in indices if _is_mask(index)]
    others = [index.shape for index in indices if index is not None and not _is_mask(index)]
    shape = jnp.broadcast_shapes(*others, (1,))
    known = shape[-1] if shape[-1] != 1 else _values_length(self, indices, values, len(shape))
    if known != 1:
        length, count = known, known
    else:
        length = max(mask.size for mask in masks)
        count = jnp.stack([jnp.count_nonzero(mask) for mask in masks]).max()
    outside = jnp.iinfo(jnp.int32).max
    at: list[Any] = []
    for index in indices:
        if index is None:
            at.append(slice(None))
        elif not _is_mask(index):
            at.append(_wrap(index, self.shape[len(at)]))
        else:
            single = jnp.count_nonzero(index) == 1  # broadcasts
            for position in jnp.nonzero(index != 0, size=length, fill_value=outside):
                position = jnp.where(single, position[:1], position).astype(jnp.int32)
                at.append(jnp.where(jnp.arange(length) < count, position, outside))
    return tuple(at)


def _values_length(self: jax.Array, indices: Sequence[Any], values: jax.Array, ndim: int) -> int:
    """The length of `values` in the dimension that the masks make, the last of the `ndim` that the indices make."""
    at: list[bool] = []  # whether each dimension of `self` is indexed
    for index in indices:
        at.extend([index is not None] * (index.ndim if _is_mask(index) else 1))
    at.extend([False] * (self.ndim - len(at)))
    first, last = at.index(True), len(at) - 1 - at[::-1].index(True)
    neighbours = all(at[first : last + 1])
    after = len(at) - 1 - last if neighbours else at.count(False)
    return values.shape[-(after + 1)] if values.ndim > after else 1


# -- masks ----------------------------------------------------------------------------------------


@ops.lowering("aten::masked_fill.Scalar", "aten::masked_fill.Tensor", promote=AS_GIVEN)
def masked_fill(self, mask, value):
    """`value` (a scalar or a 0-d tensor) where `mask`, else `self`; `self` and `mask` broadcast."""
    return jnp.where(mask != 0, _converted(value, self.dtype), self)


@ops.lowering("aten::masked_scatter")
def masked_scatter(self, mask, source):
    """`self` with the elements of `source`, in order, written where `mask` is True.

    self, mask: broadcast together; source: any shape, at least as many elements as `mask` has True. If it has fewer, CPU
    torch raises; here only where the call is new, else its last element stands for those that are missing: to count the
    mask, each call would have to wait for the device.
    """
    if mask.dtype != jnp.bool_:
        raise RuntimeError(f"masked_scatter_ only supports boolean masks, but got mask with dtype {mask.dtype}")
    shape = jnp.broadcast_shapes(self.shape, mask.shape)
    if source.size == 0:
        return jnp.broadcast_to(self, shape)
    mask = jnp.broadcast_to(mask, shape)
    rank = jnp.cumsum(mask.reshape(-1), dtype=jnp.int32).reshape(shape) - 1
    return jnp.where(mask, source.reshape(-1).at[jnp.maximum(rank, 0)].get(**_AS_IS), self)


@ops.value_check("aten::masked_scatter", values=("mask",))
def _masked_scatter_refused(self, mask, source):
    """Whether `source` has fewer elements than `mask`, broadcast to `self`, has True."""
    repeats = math.prod(np.broadcast_shapes(self.shape, mask.shape)) // max(mask.size, 1)
    return np.count_nonzero(mask) * repeats > source.size


@ops.lowering("aten::masked_scatter_backward")
def masked_scatter_backward(grad_output, mask, sizes):
    """The gradient of `source` in masked_scatter: `grad_output` where `mask`, in order, padded with 0 to `sizes`."""
    size = math.prod(sizes)
    out = jnp.zeros(size, grad_output.dtype)
    if size == 0:
        return out.reshape(sizes)
    mask = jnp.broadcast_to(mask != 0, grad_output.shape).reshape(-1)
    # what is not taken is added as 0 to its neighbour: positions that are out of range take four times as long on CPU
    rank = jnp.clip(jnp.cumsum(mask, dtype=jnp.int32) - 1, 0, size - 1)
    taken = jnp.where(mask, grad_output.reshape(-1), 0)
    return out.at[rank].add(taken, indices_are_sorted=True, **_AS_IS).reshape(sizes)


@ops.lowering("aten::masked_select", data_dependent="torch.where, or masked_scatter into a tensor of known size")
def masked_select(self, mask):
    """The elements of `self` where `mask`, broadcast together, as (count,)."""
    shape = jnp.broadcast_shapes(self.shape, mask.shape)
    mask = np.broadcast_to(np.asarray(mask), shape)
    return index_with_mask(jnp.broadcast_to(self, shape).reshape(-1), [mask.reshape(-1)])


@ops.lowering("aten::nonzero", data_dependent="torch.nonzero_static(self, size=...)", strides=column_major)
def nonzero(self):
    """The positions of the elements that are not 0. self: (...) of n dimensions. returns: (count, n), int64."""
    mask = np.asarray(self) != 0 if _on_host(self) else np.asarray(self != 0)
    # numpy has no nonzero of a 0-d array.
    found = np.stack(np.nonzero(mask), axis=-1) if mask.ndim else np.empty((int(mask), 0))
    return _beside(found.astype(np.int64), self)


@ops.lowering("aten::nonzero_static", strides=row_major)
def nonzero_static(self, *, size, fill_value=-1):
    """The first `size` positions of elements that are not 0, padded with `fill_value`. returns: (size, n), int64."""
    if self.size == 0 or self.ndim == 0:  # of these jnp.nonzero knows no fill value, or no positions
        return jnp.full((size, self.ndim), fill_value, jnp.int64)
    return jnp.stack(jnp.nonzero(self, size=size, fill_value=fill_value), axis=-1)


# -- gather and scatter -----------------------------------------------------------------------------


@ops.lowering("aten::gather")
def gather(self, dim, index, *, sparse_grad=False):
    """`out[i][j][k] = self[i][index[i][j][k]][k]` for dim 1 of 3.

    self:    (..., n, ...); index: as many dimensions, at most as long as `self` in all others.
    returns: the shape of `index`.
    """
    if index.size == 0:
        return jnp.zeros(index.shape, self.dtype)
    shape = index.shape
    self, dim = _at_least_1d(self, dim)
    index = _wrap(index.reshape(shape or (1,)), self.shape[dim])
    ends = tuple(n if d == dim else index.shape[d] for d, n in enumerate(self.shape))
    self = lax.slice(self, (0,) * self.ndim, ends)
    return jnp.take_along_axis(self, index, dim, mode="promise_in_bounds").reshape(shape)


def _scatter_at(shape: Sequence[int], dim: int, index: jax.Array) -> tuple[tuple[jax.Array, ...], bool]:
    """Where scatter writes: positions in each dimension, or on CPU in the flattened tensor, which is twice as fast.

    Elsewhere the dimensions are kept, so that a sharded tensor stays sharded.
    """
    grid = [lax.broadcasted_iota(jnp.int32, index.shape, d) for d in range(index.ndim)]
    grid[dim] = index
    if jax.default_backend() != "cpu" or math.prod(shape) >= 2**31:
        return tuple(grid), False
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    flat = sum(stride * position for stride, position in zip(strides, grid, strict=True))
    # An index out of range must stay out of range, not run into the next row.
    flat = jnp.where((index >= 0) & (index < shape[dim]), flat, math.prod(shape))
    return (flat,), True


def _scatter(self: jax.Array, dim: int, index: jax.Array, src: jax.Array, write: Callable[..., jax.Array]) -> jax.Array:
    """The common part of the scatter ops: shapes, and the call of `write(self, at, values, flat)`.

    self, index, src: as many dimensions; `index` is at most as long as `self`, except along `dim`, and as `src`.
    """
    if index.size == 0:
        return self
    shape = self.shape
    self, dim = _at_least_1d(self, dim)
    index = _wrap(index.reshape(index.shape or (1,)), self.shape[dim])
    if src.ndim == index.ndim and src.shape != index.shape:
        src = lax.slice(src, (0,) * src.ndim, index.shape)
    at, flat = _scatter_at(self.shape, dim, index)
    return write(self, at, jnp.broadcast_to(src, index.shape), flat).reshape(shape)


def _write_set(self: jax.Array, at: tuple[Any, ...], values: jax.Array, flat: bool) -> jax.Array:
    return (self.reshape(-1) if flat else self).at[at].set(values, **_AS_IS)


@ops.lowering("aten::scatter.src")
def scatter(self, dim, index, src):
    """`out[i][index[i][j][k]][k] = src[i][j][k]` for dim 1 of 3; `self` elsewhere."""
    return _scatter(self, dim, index, src, _write_set)


@ops.lowering("aten::scatter.value", promote=AS_GIVEN)
def scatter_value(self, dim, index, value):
    """As :func:`scatter`, with the same value everywhere."""
    return _scatter(self, dim, index, _converted(value, self.dtype), _write_set)


@ops.lowering("aten::scatter_add")
def scatter_add(self, dim, index, src):
    """`out[i][index[i][j][k]][k] += src[i][j][k]` for dim 1 of 3."""
    return scatter_reduce(self, dim, index, src, "sum")


@ops.lowering("aten::scatter.reduce")
def scatter_with_reduce(self, dim, index, src, *, reduce):
    """`reduce` is "add" or "multiply"."""
    return scatter_reduce(self, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce])


@ops.lowering("aten::scatter.value_reduce", promote=AS_GIVEN)
def scatter_value_reduce(self, dim, index, value, *, reduce):
    """`reduce` is "add" or "multiply"."""
    return scatter_with_reduce(self, dim, index, _converted(value, self.dtype), reduce=reduce)


@ops.lowering("aten::scatter_reduce.two")
def scatter_reduce(self, dim, index, src, reduce, *, include_self=True):
    """As :func:`scatter`, reducing what meets: "sum", "prod", "mean" (integers: floored), "amax" or "amin"."""

    def write(self: jax.Array, at: tuple[Any, ...], values: jax.Array, flat: bool) -> jax.Array:
        return _reduce(self, at, values, reduce, include_self, flat)

    return _scatter(self, dim, index, src, write)


@ops.value_check(
    "aten::gather",
    "aten::scatter.src",
    "aten::scatter.value",
    "aten::scatter.reduce",
    "aten::scatter.value_reduce",
    "aten::scatter_add",
    "aten::scatter_reduce.two",
    values=("index",),
)
def _along_dim_refused(self, dim, index):
    """Whether `index` is out of range along `dim`; it may be where CPU torch does not take negative positions."""
    return outside(index, self.shape[dim] if self.shape else 1)


# -- whole slices: index_select, index_add, ... -------------------------------------------------------


def _slices(
    self: jax.Array, dim: int, index: jax.Array, source: jax.Array | None
) -> tuple[jax.Array, tuple[Any, ...], jax.Array | None]:
    """The arguments of the index_* ops, 0-d ones as 1-d: `self`, an index for `.at[]`, and `source` in its shape."""
    self, dim = _at_least_1d(self, dim)
    index = _wrap(index.reshape(-1), self.shape[dim])
    if source is not None:
        shape = self.shape[:dim] + (index.size,) + self.shape[dim + 1 :]
        if math.prod(source.shape) != math.prod(shape):
            raise ShapeError(
                "source tensor shape must match self tensor shape, excluding the specified dimension. Got self.shape = "
                f"{list(self.shape)} source.shape = {list(source.shape)}; dimension {dim} must be {index.size} long, as "
                "`index` is."
            )
        source = source.reshape(shape)
    return self, _along(dim, index), source


@ops.lowering("aten::index_select")
def index_select(self, dim, index):
    """The slices of `self` along `dim` at `index`. index: () or (k,). returns: length k in `dim`."""
    if self.ndim == 0:
        return self
    self, at, _ = _slices(self, dim, index, None)
    return self.at[at].get(**_AS_IS)


@ops.lowering("aten::index_add", promote=AS_GIVEN)
def index_add(self, dim, index, source, *, alpha=1):
    """`self` with `alpha * source` added to its slices along `dim` at `index`.

    index: () or (k,); source: the shape of `self` with k in `dim` (0-d ones count as 1-d).
    """
    out, at, source = _slices(self, dim, index, source)
    if self.dtype == jnp.bool_:
        source = source & (alpha != 0)
    else:
        source = opmath(source)
        source = source * _converted(alpha, source.dtype)
    return _add(out, at, source).reshape(self.shape)


@ops.lowering("aten::index_copy")
def index_copy(self, dim, index, source):
    """`self` with its slices along `dim` at `index` replaced by those of `source`. Shapes as :func:`index_add`."""
    out, at, source = _slices(self, dim, index, source)
    return out.at[at].set(source, **_AS_IS).reshape(self.shape)


# torch's gradient of a tensor `value` counts unique indices, how many of which there are depends on data
@ops.lowering("aten::index_fill.int_Tensor", promote=AS_GIVEN, differentiable=True)
@ops.lowering("aten::index_fill.int_Scalar", promote=AS_GIVEN)
def index_fill(self, dim, index, value):
    """`self` with its slices along `dim` at `index` filled with `value`, a scalar or a 0-d tensor."""
    out, at, _ = _slices(self, dim, index, None)
    # A row of bools is scattered instead of whole slices.
    row = jnp.zeros(out.shape[dim % out.ndim], bool).at[at[-1]].set(True, **_AS_IS)
    row = row.reshape((-1,) + (1,) * (out.ndim - 1 - dim % out.ndim))
    return jnp.where(row, _converted(value, self.dtype), out).reshape(self.shape)


@ops.lowering("aten::index_reduce")
def index_reduce(self, dim, index, source, reduce, *, include_self=True):
    """As :func:`index_add`, reducing what meets: "prod", "mean" (integers: floored), "amax" or "amin"."""
    out, at, source = _slices(self, dim, index, source)
    if source.size == 0:
        return self
    return _reduce(out, at, source, reduce, include_self, flat=False).reshape(self.shape)


ops.value_check(
    "aten::index_select",
    "aten::index_add",
    "aten::index_copy",
    "aten::index_fill.int_Scalar",
    "aten::index_fill.int_Tensor",
    "aten::index_reduce",
    values=("index",),
)(_along_dim_refused)


# -- positions in the flattened tensor ----------------------------------------------------------------


@ops.lowering("aten::take")
def take(self, index):
    """The elements of `self`, flattened, at `index`. returns: the shape of `index`."""
    return self.reshape(-1).at[_wrap(index, self.size)].get(**_AS_IS)


@ops.lowering("aten::put")
def put(self, index, source, accumulate=False):
    """`self` with its elements, counted as if flattened, replaced by (or added to) `source` at `index`."""
    at = (_wrap(index.reshape(-1), self.size),)
    return _put(self.reshape(-1), at, source.reshape(-1), accumulate).reshape(self.shape)


@ops.value_check("aten::take", "aten::put", values=("index",))
def _flat_refused(self, index):
    size = math.prod(self.shape)
    return outside(index, size, -size)


# -- writing a view of a copy: *_scatter, and the backwards of views ------------------------------------


def _slice_bounds(n: int, start: int | None, end: int | None, step: int) -> tuple[int, int]:
    """The first position and the number of positions of a slice of a dimension of length `n`."""
    start, end, _ = slice(start, end).indices(n)
    return start, len(range(start, end, step))


def _spread(x: jax.Array, dim: int, n: int, start: int, step: int) -> jax.Array:
    """`x` at `start`, `start + step`, ... of a dimension of length `n`, and 0 elsewhere."""
    k = x.shape[dim]
    if k == 0:
        return jnp.zeros(x.shape[:dim] + (n,) + x.shape[dim + 1 :], x.dtype)
    config = [(0, 0, 0)] * x.ndim
    config[dim] = (start, n - start - (k - 1) * step - 1, step - 1)
    return lax.pad(x, jnp.zeros((), x.dtype), config)


@ops.lowering("aten::slice_scatter")
def slice_scatter(self, src, dim=0, start=None, end=None, step=1):
    """`self` with `self[start:end:step]` along `dim` replaced by `src`."""
    dim = dim % self.ndim
    n = self.shape[dim]
    start, count = _slice_bounds(n, start, end, step)
    src = jnp.broadcast_to(src.astype(self.dtype), self.shape[:dim] + (count,) + self.shape[dim + 1 :])
    if count == n:
        return src
    if step == 1:
        return lax.dynamic_update_slice_in_dim(self, src, start, dim)
    at = np.zeros(n, bool)
    at[start : start + count * step : step] = True
    return jnp.where(at.reshape((n,) + (1,) * (self.ndim - 1 - dim)), _spread(src, dim, n, start, step), self)


@ops.lowering("aten::slice_backward")
def slice_backward(grad_output, input_sizes, dim, start, end, step):
    """0 in the shape `input_sizes`, with `grad_output` at `[start:end:step]` along `dim`."""
    dim = dim % len(input_sizes)
    start, _ = _slice_bounds(input_sizes[dim], start, end, step)
    return _spread(grad_output, dim, input_sizes[dim], start, step)


@ops.lowering("aten::select_scatter")
def select_scatter(self, src, dim, index):
    """`self` with its slice at `index` along `dim` replaced by `src`, which has one dimension less."""
    dim = dim % self.ndim
    src = jnp.expand_dims(src.astype(self.dtype), dim)
    return lax.dynamic_update_slice_in_dim(self, src, index % self.shape[dim], dim)


@ops.lowering("aten::select_backward")
def select_backward(grad_output, input_sizes, dim, index):
    """0 in the shape `input_sizes`, with `grad_output` at `index` along `dim`."""
    dim = dim % len(input_sizes)
    return _spread(jnp.expand_dims(grad_output, dim), dim, input_sizes[dim], index % input_sizes[dim], 1)


def _on_diagonal(src: jax.Array, other: jax.Array, offset: int, dim1: int, dim2: int) -> jax.Array:
    """`other` with a diagonal of its matrices in `dim1`, `dim2` replaced by `src`, whose last axis runs along it.

    Each row holds one element of the diagonal at most: they are laid out by row, and each column of the diagonal
    picks its own.
    """
    dim1, dim2 = dim1 % other.ndim, dim2 % other.ndim
    rows, columns = other.shape[dim1], other.shape[dim2]
    first = max(0, -offset)
    by_row = _spread(src.astype(other.dtype), src.ndim - 1, rows, first, 1)
    row = lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
    column = lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
    moved = jnp.moveaxis(other, (dim1, dim2), (-2, -1))
    return jnp.moveaxis(jnp.where(column - row == offset, by_row[..., None], moved), (-2, -1), (dim1, dim2))


@ops.lowering("aten::diagonal_scatter")
def diagonal_scatter(self, src, offset=0, dim1=0, dim2=1):
    """`self` with the diagonal that `self.diagonal(offset, dim1, dim2)` views replaced by `src`."""
    return _on_diagonal(src, self, offset, dim1, dim2)


@ops.lowering("aten::diagonal_backward")
def diagonal_backward(grad_output, input_sizes, offset, dim1, dim2):
    """0 in the shape `input_sizes`, with `grad_output` on the diagonal."""
    return _on_diagonal(grad_output, jnp.zeros(input_sizes, grad_output.dtype), offset, dim1, dim2)


@ops.lowering("aten::as_strided_scatter")
def as_strided_scatter(self, src, size, stride, storage_offset=None):
    """`self` with the elements that `self.as_strided(size, stride, storage_offset)` views replaced by `src`.

    `self` is taken to be contiguous. An element viewed twice takes one of its values.
    """
    last = (storage_offset or 0) + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and last >= self.size:
        raise ShapeError(
            f"aten::as_strided_scatter: sizes {list(size)}, strides {list(stride)}, storage offset {storage_offset or 0} and "
            f"itemsize {self.dtype.itemsize} requiring a storage size of {(last + 1) * self.dtype.itemsize} are out of bounds "
            f"for storage of size {self.size * self.dtype.itemsize}: they reach element {last} of {self.size}."
        )
    position = jnp.full(size, storage_offset or 0, jnp.int64)
    for d, step in enumerate(stride):
        position += lax.broadcasted_iota(jnp.int64, size, d) * step
    return self.reshape(-1).at[position].set(src.astype(self.dtype), mode="drop").reshape(self.shape)


@ops.lowering("aten::unfold_backward")
def unfold_backward(grad_in, input_sizes, dim, size, step):
    """The gradient of `unfold`: each element of `input_sizes` gets the sum over the windows that hold it.

    grad_in: (..., k windows in `dim`, ..., size), the windows' elements in the last axis.
    """
    if not input_sizes:
        return opmath(grad_in).sum().reshape(())
    dim = dim % len(input_sizes)
    n, windows = input_sizes[dim], grad_in.shape[dim]
    grad = jnp.moveaxis(opmath(grad_in), -1, dim + 1)
    if step >= size and windows:
        # Windows do not overlap: they are laid end to end, with gaps of 0.
        grad = _spread(grad, dim + 1, step, 0, 1)
        grad = grad.reshape(grad.shape[:dim] + (windows * step,) + grad.shape[dim + 2 :])
        if windows * step > n:
            return lax.slice_in_dim(grad, 0, n, axis=dim)
        return _spread(grad, dim, n, 0, 1)
    at = jnp.arange(windows, dtype=jnp.int32)[:, None] * step + jnp.arange(size, dtype=jnp.int32)
    return jnp.zeros(input_sizes, grad.dtype).at[_along(dim, at)].add(grad, **_AS_IS)
