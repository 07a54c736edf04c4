"""Sorting, selection and search. NaN is the largest number. Ops whose result length depends on the data (`unique`) run
on the host.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax_core.opset import OpSet
from torchax_core.promotion import SAME

ops = OpSet("torchax_ops_aten.sorting")


def _index_dtype(n: int) -> Any:
    """int32 where it is enough: sorting and searching move half the bytes, and the kernel widens the result."""
    return np.int32 if n < 2**31 else np.int64


def sort_with_indices(x: jax.Array, axis: int, *, descending: bool = False) -> tuple[jax.Array, jax.Array]:
    """`x` stably sorted along `axis`, and where each element was."""
    indices = lax.broadcasted_iota(_index_dtype(x.shape[axis]), x.shape, axis)
    if not descending:
        return lax.sort((x, indices), dimension=axis, is_stable=True, num_keys=1)
    # Reversed before and after, so that equal elements keep their order.
    flipped = (lax.rev(x, (axis,)), lax.rev(indices, (axis,)))
    values, indices = lax.sort(flipped, dimension=axis, is_stable=True, num_keys=1)
    return lax.rev(values, (axis,)), lax.rev(indices, (axis,))


@ops.lowering("aten::sort", "aten::sort.stable")
def sort(self, dim=-1, descending=False, *, stable=None):
    """`self` sorted along `dim`, always stably, and the indices that sort it. returns: (values, indices)"""
    if self.ndim == 0:
        return self, jnp.zeros((), np.int64)
    return sort_with_indices(self, dim % self.ndim, descending=descending)


def _ranks(x: jax.Array, largest: bool) -> jax.Array:
    """Keys of which lax.top_k takes first what torch would: it goes by IEEE's total order, -NaN < -inf < ... < NaN."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.where(jnp.isnan(x), np.nan, x) if largest else jnp.where(jnp.isnan(x), -np.nan, -x)
    if x.dtype == np.bool_:
        x = x.astype(np.int8)
    return x if largest else ~x


@ops.lowering("aten::topk")
def topk(self, k, dim=-1, largest=True, sorted=True):
    """The `k` largest (or smallest) elements along `dim` in order, and their indices; equal ones by index.

    returns: (values, indices), `dim` of length `k`
    """
    if self.ndim == 0:
        return self, jnp.zeros((), np.int64)
    x = jnp.moveaxis(self, dim, -1)
    _, indices = lax.top_k(_ranks(x, largest), k)
    return jnp.moveaxis(jnp.take_along_axis(x, indices, axis=-1), -1, dim), jnp.moveaxis(indices, -1, dim)


# -- search --------------------------------------------------------------------------------------


def _binary_search(rows: jax.Array, values: jax.Array, right: bool) -> jax.Array:
    """Where each of `values`, (b, m), belongs in the sorted `rows`, (b, n), as C++'s lower_bound or upper_bound.

    A NaN belongs after everything, even other NaNs, as in torch (jnp.searchsorted puts it before them).
    """
    n = rows.shape[-1]

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        found = jnp.take_along_axis(rows, middle, axis=-1, mode="clip")
        after = ~((found > values) if right else (found >= values)) & (low < high)
        return jnp.where(after, middle + 1, low), jnp.where(after | (low >= high), high, middle)

    start = jnp.zeros(values.shape, _index_dtype(n)), jnp.full(values.shape, n, _index_dtype(n))
    return lax.fori_loop(0, n.bit_length(), halve, start)[0] if n else start[0]


@ops.lowering("aten::searchsorted.Tensor", "aten::searchsorted.Scalar", promote=SAME.of("sorted_sequence", "self"))
def searchsorted(sorted_sequence, self, *, out_int32=False, right=False, side=None, sorter=None):
    """The index at which each element of `self` would have to stand for `sorted_sequence` to stay sorted.

    sorted_sequence: (n,), or (*batch, n); with `sorter`, the indices that sort it, need not be sorted itself.
    self:            any shape for (n,), else (*batch, m).
    returns:         the shape of `self`, 0 ... n; before equal elements, or after them if `right` or side="right".
    """
    if sorter is not None:
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, axis=-1)
    values = jnp.asarray(self)
    n = sorted_sequence.shape[-1]
    batch = sorted_sequence.size // n if n else int(np.prod(sorted_sequence.shape[:-1]))
    if values.size == 0:
        return jnp.zeros(values.shape, np.int64)
    found = _binary_search(sorted_sequence.reshape(batch, n), values.reshape(batch, -1), right or side == "right")
    return found.reshape(values.shape)


@ops.lowering("aten::bucketize.Tensor")
def bucketize(self, boundaries, *, out_int32=False, right=False):
    """The bucket between `boundaries`, (n,), that each element of `self` is in. returns: 0 ... n, shape of `self`"""
    if boundaries.ndim != 1:
        raise RuntimeError(f"boundaries tensor must be 1 dimension, but got dim({boundaries.ndim})")
    if boundaries.dtype != self.dtype:
        raise RuntimeError(
            "torch.searchsorted(): boundary tensor and input value tensor should have same dtype, but got boundary "
            f"tensor dtype {boundaries.dtype} and input value tensor dtype {self.dtype}"
        )
    return searchsorted(boundaries, self, right=right)


@ops.lowering("aten::bucketize.Scalar", promote=SAME.of("boundaries", "self"))
def bucketize_scalar(self, boundaries, *, out_int32=False, right=False):
    """As `bucketize`, of a number."""
    return bucketize(self, boundaries, right=right)


# -- unique --------------------------------------------------------------------------------------

_UNIQUE_BOUNDED = "jnp.unique(x, size=n) through torchax_core.interop.call_jax"


def _nothing() -> np.ndarray:
    return np.zeros(0, np.int64)


def _unique_result(values: np.ndarray, inverse: Any, counts: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    arrays = (values, _nothing() if inverse is None else inverse, _nothing() if counts is None else counts)
    return tuple(jnp.asarray(array) for array in arrays)


@ops.lowering("aten::_unique2", data_dependent=_UNIQUE_BOUNDED)
def unique2(self, sorted=True, return_inverse=False, return_counts=False):
    """The different elements, in order. Every NaN is one of its own.

    returns: (values, inverse, counts): (n,); for each element its place in values, shaped as `self`; how often each
             value occurs, (n,). What is not asked for is (0,).
    """
    values, inverse, counts = np.unique(np.asarray(self), return_inverse=True, return_counts=True, equal_nan=False)
    return _unique_result(
        values, inverse.reshape(self.shape) if return_inverse else None, counts if return_counts else None
    )


@ops.lowering("aten::_unique", data_dependent=_UNIQUE_BOUNDED)
def unique(self, sorted=True, return_inverse=False):
    """As `_unique2`, without counts."""
    return unique2(self, sorted, return_inverse)[:2]


@ops.lowering("aten::unique_dim", data_dependent=_UNIQUE_BOUNDED)
def unique_dim(self, dim, sorted=True, return_inverse=False, return_counts=False):
    """The different slices along `dim`, in lexicographic order.

    returns: (values, inverse, counts): `self` with `dim` of length n; (length of `dim`,); (n,). All three, asked for or
             not, as in torch.
    """
    rows = np.moveaxis(np.asarray(self), dim, 0)
    _refuse_empty_slices(rows)
    flat = rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))
    order = np.lexsort(flat.T[::-1])  # which takes the least significant key first
    starts = _run_starts(flat[order])
    inverse = np.empty(flat.shape[0], np.int64)
    inverse[order] = np.cumsum(starts) - 1
    values = np.moveaxis(rows[order][starts], 0, dim)
    return _unique_result(values, inverse, _run_lengths(starts))


def _refuse_empty_slices(rows: np.ndarray) -> None:
    """RuntimeError if `rows`, (n, ...), have no elements. The wording is torch's."""
    if 0 in rows.shape[1:]:
        if rows.shape[0] == 0:
            raise RuntimeError("Number of zero sized dimensions is more than one, so unique cannot be applied ")
        raise RuntimeError("There are 0 sized dimensions, and they aren't selected, so unique cannot be applied")


def _run_starts(rows: np.ndarray) -> np.ndarray:
    """Which of `rows`, (n, ...), differ from the one before. returns: (n,) bool"""
    starts = np.ones(rows.shape[0], bool)
    differs = rows[1:] != rows[:-1]
    starts[1:] = differs.any(axis=tuple(range(1, differs.ndim)))
    return starts


def _run_lengths(starts: np.ndarray) -> np.ndarray:
    return np.diff(np.append(np.flatnonzero(starts), starts.size))


@ops.lowering("aten::unique_consecutive", data_dependent=_UNIQUE_BOUNDED)
def unique_consecutive(self, return_inverse=False, return_counts=False, dim=None):
    """One of each run of equal elements, or of equal slices along `dim`. returns: as `_unique2`, or as `unique_dim`."""
    x = np.asarray(self)
    rows = x.ravel() if dim is None else np.moveaxis(x, dim, 0)
    _refuse_empty_slices(rows)
    starts = _run_starts(rows)
    values = rows[starts] if dim is None else np.moveaxis(rows[starts], 0, dim)
    inverse = (np.cumsum(starts) - 1).reshape(x.shape if dim is None else (-1,)) if return_inverse else None
    return _unique_result(values, inverse, _run_lengths(starts) if return_counts else None)


@ops.lowering("aten::unique_dim_consecutive", data_dependent=_UNIQUE_BOUNDED)
def unique_dim_consecutive(self, dim, return_inverse=False, return_counts=False):
    """As `unique_consecutive` along `dim`."""
    return unique_consecutive(self, return_inverse, return_counts, dim)
