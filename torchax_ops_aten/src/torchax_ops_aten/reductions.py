"""Reductions: sums, products, extremes, moments, norms, order statistics and histograms over some or all dimensions.

Half types accumulate in float32, integers in int64; the kernel rounds to torch's result dtype at the end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax_core.opset import OpSet
from torchax_core.promotion import INT_TO_FLOAT, SAME, opmath
from torchax_ops_aten._derivatives import absolute, root
from torchax_ops_aten.copying import cast
from torchax_ops_aten.sorting import sort_with_indices

ops = OpSet("torchax_ops_aten.reductions")

Dims = int | Sequence[int] | None


def axes_of(x: jax.Array, dim: Dims) -> tuple[int, ...]:
    """The axes that `dim` names. None and the empty list name all, and a 0-d tensor has none, whatever `dim` says."""
    if x.ndim == 0:
        return ()
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return tuple(range(x.ndim))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(d % x.ndim for d in dims)


def _count(x: jax.Array, axes: tuple[int, ...]) -> int:
    return math.prod(x.shape[axis] for axis in axes)


def _is_integer(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.integer)) or x.dtype == np.bool_


def _is_complex(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.complexfloating))


def _accumulator(x: jax.Array, dtype: np.dtype | None) -> jax.Array:
    """`x` in the type it is summed in: `dtype` if given (widened if half), int64 for integers and bools."""
    if dtype is not None:
        x = cast(x, dtype)
    return x.astype(np.int64) if _is_integer(x) else opmath(x)


# -- sums and products ---------------------------------------------------------------------------


@ops.lowering("aten::sum", "aten::sum.dim_IntList")
def sum_(self, dim=None, keepdim=False, *, dtype=None):
    """The sum over `dim`, or over all. Integers and bools give int64."""
    if self.dtype == np.bool_ and dtype is None and self.size < 2**31:  # 64 bits take three times as long on CPU
        return jnp.sum(self, axis=axes_of(self, dim), keepdims=keepdim, dtype=np.int32).astype(np.int64)
    return jnp.sum(_accumulator(self, dtype), axis=axes_of(self, dim), keepdims=keepdim)


@ops.lowering("aten::nansum")
def nansum(self, dim=None, keepdim=False, *, dtype=None):
    """As `sum`, with NaN counted as 0."""
    return sum_(jnp.where(jnp.isnan(self), jnp.zeros((), self.dtype), self), dim, keepdim, dtype=dtype)


@ops.lowering("aten::mean", "aten::mean.dim")
def mean(self, dim=None, keepdim=False, *, dtype=None):
    """The mean over `dim`, or over all; NaN if there is nothing to average."""
    axes = axes_of(self, dim)
    return jnp.sum(_accumulator(self, dtype), axis=axes, keepdims=keepdim) / _count(self, axes)


@ops.lowering("aten::prod", "aten::prod.dim_int")
def prod(self, dim=None, keepdim=False, *, dtype=None):
    """The product over `dim`, or over all. Integers and bools give int64."""
    return jnp.prod(_accumulator(self, dtype), axis=axes_of(self, dim), keepdims=keepdim)


@ops.lowering("aten::count_nonzero", "aten::count_nonzero.dim_IntList")
def count_nonzero(self, dim=None):
    """How many elements over `dim`, or over all, are not 0. returns: int64."""
    return jnp.sum(self != 0, axis=axes_of(self, dim), dtype=np.int64)


@ops.lowering("aten::hash_tensor")
def hash_tensor(self, dim=(), *, keepdim=False, mode=0):
    """All bits exclusively or-ed over `dim`, or over all: of integers as 64-bit ones, of floats as float64. uint64."""
    if jnp.issubdtype(self.dtype, jnp.floating):
        bits = lax.bitcast_convert_type(self.astype(np.float64), np.uint64)
    else:
        bits = self.astype(np.int64 if self.dtype != np.uint64 else np.uint64).astype(np.uint64)
    axes = axes_of(self, dim)
    reduced = lax.reduce(bits, np.uint64(0), lax.bitwise_xor, axes)
    return jnp.expand_dims(reduced, axes) if keepdim else reduced


@ops.lowering("aten::trace")
def trace(self):
    """The sum of the main diagonal of a matrix. self: (n, m). returns: ()"""
    return jnp.trace(_accumulator(self, None))


@ops.lowering("aten::logsumexp", promote=INT_TO_FLOAT.of("self"))
def logsumexp(self, dim, keepdim=False):
    """log(sum(exp(self))), shifted by the maximum so that it neither overflows nor underflows."""
    axes = axes_of(self, dim)
    if _count(self, axes) == 0:
        return jnp.log(jnp.sum(jnp.exp(self), axis=axes, keepdims=keepdim))
    return jax.nn.logsumexp(self, axis=axes, keepdims=keepdim)


# -- truth ---------------------------------------------------------------------------------------


@ops.lowering("aten::any", "aten::any.dim", "aten::_is_any_true")
def any_(self, dim=None, keepdim=False):
    """Whether any element over `dim`, or over all, is true (not 0; NaN is true)."""
    return jnp.any(self != 0, axis=axes_of(self, dim), keepdims=keepdim)


@ops.lowering("aten::all", "aten::all.dim", "aten::_is_all_true")
def all_(self, dim=None, keepdim=False):
    """Whether every element over `dim`, or over all, is true (not 0; NaN is true)."""
    return jnp.all(self != 0, axis=axes_of(self, dim), keepdims=keepdim)


@ops.lowering("aten::any.dims")
def any_dims(self, dim=None, keepdim=False):
    """As `any`, over several dimensions; an empty list, unlike None, reduces none."""
    return self != 0 if dim == () else any_(self, dim, keepdim)


@ops.lowering("aten::all.dims")
def all_dims(self, dim=None, keepdim=False):
    """As `all`, over several dimensions; an empty list, unlike None, reduces none."""
    return self != 0 if dim == () else all_(self, dim, keepdim)


# -- extremes ------------------------------------------------------------------------------------


@ops.lowering("aten::amax")
def amax(self, dim=(), keepdim=False):
    """The maximum over `dim`, or over all; NaN if there is one."""
    return jnp.max(self, axis=axes_of(self, dim), keepdims=keepdim)


@ops.lowering("aten::amin")
def amin(self, dim=(), keepdim=False):
    """The minimum over `dim`, or over all; NaN if there is one."""
    return jnp.min(self, axis=axes_of(self, dim), keepdims=keepdim)


def refuse_empty(op: str, x: jax.Array) -> None:
    """torch's own error; the meta kernels of `max` and `min` do not raise it."""
    if x.size == 0:
        raise RuntimeError(
            f"{op}(): Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim with "
            "the 'dim' argument."
        )


@ops.lowering("aten::max")
def max_(self):
    """The maximum of all elements; NaN if there is one. returns: ()"""
    refuse_empty("max", self)
    return jnp.max(self)


@ops.lowering("aten::min")
def min_(self):
    """The minimum of all elements; NaN if there is one. returns: ()"""
    refuse_empty("min", self)
    return jnp.min(self)


@ops.lowering("aten::aminmax", "aten::_aminmax", "aten::_aminmax.dim")
def aminmax(self, *, dim=None, keepdim=False):
    """Minimum and maximum over `dim`, or over all, in one pass over the data."""
    return amin(self, dim, keepdim), amax(self, dim, keepdim)


def _extreme_with_index(
    x: jax.Array, dim: int | None, keepdim: bool, extreme: Callable[..., jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The extreme (`jnp.max` or `jnp.min`) along `dim`, or of the flattened tensor, and its first position; a NaN beats
    every number."""
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    shape = x.shape
    if dim is None:
        x, dim = x.ravel(), 0
    axis = dim % x.ndim
    value, index = _extreme_along(x, axis, extreme)
    if keepdim:
        kept = [1] * len(shape) if x.ndim != len(shape) else [1 if i == axis else n for i, n in enumerate(shape)]
        value, index = value.reshape(kept), index.reshape(kept)
    return value, index


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _extreme_along(x: jax.Array, axis: int, extreme: Callable[..., jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The extreme along an axis and its position, without that axis.

    Two reductions, of numbers each: on CPU one of (value, index) pairs, jax.lax.argmax too, takes twenty times as long.
    """
    value = extreme(x, axis=axis)
    found = x == jnp.expand_dims(value, axis)
    if jnp.issubdtype(x.dtype, jnp.floating):
        found |= x != x
    index_type = np.int32 if x.shape[axis] < 2**31 else np.int64
    positions = lax.broadcasted_iota(index_type, x.shape, axis)
    return value, jnp.min(jnp.where(found, positions, np.iinfo(index_type).max), axis=axis)


@_extreme_along.defjvp
def _(axis: int, extreme: Any, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> Any:
    # jax would share a gradient out among equals
    value, index = _extreme_along(*primals, axis, extreme)
    chosen = jnp.take_along_axis(tangents[0], jnp.expand_dims(index, axis), axis).squeeze(axis)
    return (value, index), (chosen, np.zeros(index.shape, jax.dtypes.float0))


@ops.lowering("aten::max.dim")
def max_dim(self, dim, keepdim=False):
    """The maximum along `dim`, and its first position. returns: (values, indices), without `dim` or with length 1."""
    return _extreme_with_index(self, dim, keepdim, jnp.max)


@ops.lowering("aten::min.dim")
def min_dim(self, dim, keepdim=False):
    """The minimum along `dim`, and its first position. returns: (values, indices), without `dim` or with length 1."""
    return _extreme_with_index(self, dim, keepdim, jnp.min)


@ops.lowering("aten::argmax")
def argmax(self, dim=None, keepdim=False):
    """The first position of the maximum along `dim`; without `dim` in the flattened tensor."""
    return max_dim(self, dim, keepdim)[1]


@ops.lowering("aten::argmin")
def argmin(self, dim=None, keepdim=False):
    """The first position of the minimum along `dim`; without `dim` in the flattened tensor."""
    return min_dim(self, dim, keepdim)[1]


# -- moments -------------------------------------------------------------------------------------


def _variance_and_mean(x: jax.Array, dim: Dims, correction: Any, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    """sum |x - mean|^2 / max(0, n - correction), in two passes, and the mean."""
    axes = axes_of(x, dim)
    x = opmath(x)
    average = jnp.sum(x, axis=axes, keepdims=True) / _count(x, axes)
    deviation = x - average
    squares = jnp.square(deviation.real) + jnp.square(deviation.imag) if _is_complex(x) else jnp.square(deviation)
    divisor = jnp.maximum(0, _count(x, axes) - (1 if correction is None else jnp.real(correction)))
    variance = jnp.sum(squares, axis=axes, keepdims=keepdim) / divisor.astype(squares.dtype)
    return variance, average if keepdim else jnp.squeeze(average, axes)


@ops.lowering("aten::var.correction")
def var(self, dim=None, *, correction=None, keepdim=False):
    """The variance over `dim`, or over all, divided by n - correction (1 by default); real also for complex."""
    return _variance_and_mean(self, dim, correction, keepdim)[0]


@ops.lowering("aten::std.correction")
def std(self, dim=None, *, correction=None, keepdim=False):
    """The square root of `var`."""
    return root(_variance_and_mean(self, dim, correction, keepdim)[0])


@ops.lowering("aten::var_mean.correction")
def var_mean(self, dim=None, *, correction=None, keepdim=False):
    """`var` and `mean`."""
    return _variance_and_mean(self, dim, correction, keepdim)


@ops.lowering("aten::std_mean.correction")
def std_mean(self, dim=None, *, correction=None, keepdim=False):
    """`std` and `mean`."""
    variance, average = _variance_and_mean(self, dim, correction, keepdim)
    return root(variance), average


# -- norms ---------------------------------------------------------------------------------------


@ops.lowering("aten::linalg_vector_norm", static=("ord",))
def linalg_vector_norm(self, ord=2, dim=None, keepdim=False, *, dtype=None):
    """(sum |x|^ord)^(1/ord) over `dim`, or over all.

    ord:     any number; inf and -inf give the largest and smallest |x|, 0 the count of non-zeros.
    returns: real, also for complex.
    """
    axes = axes_of(self, dim)
    # A real `dtype` beside a complex `self` is that of out=, which concerns the result only.
    keeps_parts = not _is_complex(self) or (dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating))
    x = opmath(cast(self, dtype) if dtype is not None and keeps_parts else self)
    if ord == 2:
        squares = jnp.square(x.real) + jnp.square(x.imag) if _is_complex(x) else jnp.square(x)
        return root(jnp.sum(squares, axis=axes, keepdims=keepdim))
    x = absolute(x)
    if ord == 0:
        return jnp.sum((x != 0).astype(x.dtype), axis=axes, keepdims=keepdim)
    if ord == 1:
        return jnp.sum(x, axis=axes, keepdims=keepdim)
    if ord == math.inf:
        return jnp.max(x, axis=axes, keepdims=keepdim, initial=0)
    if ord == -math.inf:
        return jnp.min(x, axis=axes, keepdims=keepdim, initial=math.inf)
    if ord < 0:
        return jnp.sum(x**ord, axis=axes, keepdims=keepdim) ** (1 / ord)
    return root(jnp.sum(root(x, ord) if ord < 1 else x**ord, axis=axes, keepdims=keepdim), 1 / ord)


@ops.lowering(
    "aten::norm.Scalar",
    "aten::norm.ScalarOpt_dtype",
    "aten::norm.ScalarOpt_dim",
    "aten::norm.ScalarOpt_dim_dtype",
    static=("p",),
)
def norm(self, p=2, dim=(), keepdim=False, *, dtype=None):
    """`linalg_vector_norm` under its older name; `p=None` is 2."""
    return linalg_vector_norm(self, 2 if p is None else p, dim, keepdim, dtype=dtype)


@ops.lowering("aten::cosine_similarity", promote=SAME)
def cosine_similarity(x1, x2, dim=1, eps=1e-8):
    """The product of two vectors of norm 1 along `dim`; x1, x2: broadcast. As in torch, `eps` bounds the norms from below,
    and is no part of the gradient.

    By reciprocals of the norms: XLA takes four times as long for torch's division of each element, and its gradient.
    """
    x1, x2 = jnp.broadcast_arrays(opmath(x1), opmath(x2))
    axis = dim if x1.ndim else None

    def scaled(x: jax.Array) -> jax.Array:
        norm = root(jnp.sum(x * x, axis=axis, keepdims=True))
        norm = jnp.where(norm < eps, norm + lax.stop_gradient(eps - norm), norm)
        return x * (1 / norm)

    return jnp.sum(scaled(x1) * scaled(x2), axis=axis)


# -- order statistics ----------------------------------------------------------------------------


def _pick(sorted_values: jax.Array, indices: jax.Array, position: Any, axis: int, keepdim: bool) -> tuple:
    """The element at `position` (keepdims shape) of each sorted row, with its index."""
    position = jnp.broadcast_to(jnp.asarray(position), [1 if i == axis else n for i, n in enumerate(indices.shape)])
    picked = [jnp.take_along_axis(array, position, axis) for array in (sorted_values, indices)]
    return tuple(array if keepdim else jnp.squeeze(array, axis) for array in picked)


@ops.lowering("aten::kthvalue")
def kthvalue(self, k, dim=-1, keepdim=False):
    """The `k`-th smallest element along `dim`, counted from 1, and its index; NaN is the largest."""
    if self.ndim == 0:
        return self, jnp.zeros((), np.int64)
    axis = dim % self.ndim
    return _pick(*sort_with_indices(self, axis), k - 1, axis, keepdim)


def _median_dim(x: jax.Array, dim: int, keepdim: bool, *, skip_nan: bool) -> tuple[jax.Array, jax.Array]:
    """The lower median along `dim` and its index; a NaN wins unless skipped."""
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    axis = dim % x.ndim
    n = x.shape[axis]
    is_nan = jnp.isnan(x) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros(x.shape, bool)
    numbers = n - jnp.sum(is_nan, axis=axis, keepdims=True, dtype=np.int32)
    # Sorted, NaNs stand last: at `numbers` and after.
    position = jnp.maximum(numbers - 1, 0) // 2 if skip_nan else jnp.where(numbers < n, numbers, (n - 1) // 2)
    return _pick(*sort_with_indices(x, axis), position, axis, keepdim)


@ops.lowering("aten::median.dim")
def median_dim(self, dim, keepdim=False):
    """The lower median along `dim`, and its index; NaN, if there is one."""
    return _median_dim(self, dim, keepdim, skip_nan=False)


@ops.lowering("aten::nanmedian.dim")
def nanmedian_dim(self, dim, keepdim=False):
    """The lower median along `dim` of what is not NaN, and its index."""
    return _median_dim(self, dim, keepdim, skip_nan=True)


def _median(x: jax.Array, *, skip_nan: bool) -> jax.Array:
    """The lower median of all elements. Of none: NaN, or the integer that C++ makes of it."""
    if x.size == 0:
        return jnp.full((), jnp.iinfo(x.dtype).min if _is_integer(x) else np.nan, x.dtype)
    return _median_dim(x.ravel(), 0, False, skip_nan=skip_nan)[0]


@ops.lowering("aten::median")
def median(self):
    """The lower median of all elements; NaN, if there is one or nothing to take it of. returns: ()"""
    return _median(self, skip_nan=False)


@ops.lowering("aten::nanmedian")
def nanmedian(self):
    """The lower median of all elements that are not NaN. returns: ()"""
    return _median(self, skip_nan=True)


@ops.lowering("aten::mode")
def mode(self, dim=-1, keepdim=False):
    """The most frequent element along `dim`, the smallest if there are several, and the last index it stands at."""
    if self.ndim == 0:
        return self, jnp.zeros((), np.int64)
    axis = dim % self.ndim
    values, indices = sort_with_indices(self, axis)
    position = lax.broadcasted_iota(np.int32, values.shape, axis)
    starts_run = values != jnp.roll(values, 1, axis)
    run_start = lax.cummax(jnp.where(starts_run, position, 0), axis=axis)
    _, longest = max_dim(position - run_start, axis, keepdim=True)
    return _pick(values, indices, longest, axis, keepdim)


# -- histograms ----------------------------------------------------------------------------------


def _data_range(x: jax.Array, low: Any, high: Any) -> tuple[jax.Array, jax.Array]:
    """`low` and `high`; those of the data where they are equal, and 1 apart to both sides if those are equal too."""
    low, high = jnp.asarray(low).astype(x.dtype), jnp.asarray(high).astype(x.dtype)
    if x.size:
        low, high = jnp.where(low == high, jnp.min(x), low), jnp.where(low == high, jnp.max(x), high)
    return jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)


def _exponent_and_mantissa_bits(dtype: np.dtype) -> tuple[int, int]:
    return jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant


@ops.lowering("aten::histc")
def histc(self, bins=100, min=0, max=0):
    """How many elements fall into each of `bins` equal intervals of [min, max]; elements outside, and NaN, in none.

    self:     floats; integers too, as on cuda, where CPU torch refuses them.
    min, max: if equal, the extremes of the data.
    returns:  (bins,), dtype of `self`; the last interval holds its right end.
    """
    if not jnp.issubdtype(self.dtype, np.inexact):
        x = self.ravel().astype(np.int64)
        low, high = _data_range(x, min, max)
        # exactly: a quotient of floats may fall short of a whole number
        position = jnp.minimum((x - low) * bins // (high - low), bins - 1)
        inside = (x >= low) & (x <= high)
        return jnp.zeros(bins, np.int64).at[jnp.where(inside, position, bins)].add(1, mode="drop")
    x = opmath(self).ravel()
    low, high = _data_range(x, min, max)

    def rounded(y: jax.Array) -> jax.Array:
        # torch bins half types in their own arithmetic, which decides where elements near the ends of intervals go
        return y if y.dtype == self.dtype else lax.reduce_precision(y, *_exponent_and_mantissa_bits(self.dtype))

    place = rounded(rounded(rounded(x - low) * bins) / rounded(high - low))
    position = jnp.minimum(place.astype(np.int32), bins - 1)
    inside = (x >= low) & (x <= high)
    return jnp.zeros(bins, np.int64).at[jnp.where(inside, position, bins)].add(1, mode="drop")


def _check_points(x: jax.Array, bins: Sequence[Any], weight: jax.Array | None) -> None:
    """torch's checks of a histogram of points `x`, (..., d); there is no meta kernel to make them."""
    if x.ndim < 2:
        raise RuntimeError("histogramdd: input tensor should have at least 2 dimensions")
    if len(bins) != x.shape[-1]:
        raise RuntimeError("histogramdd: The size of bins must be equal to the innermost dimension of the input.")
    if weight is not None and weight.shape != x.shape[:-1]:
        raise RuntimeError(
            "histogramdd: if weight tensor is provided it should have the same shape as the input tensor excluding its "
            f"innermost dimension, but got input with shape {list(x.shape)} and weight with shape {list(weight.shape)}"
        )


def _bin_positions(x: jax.Array, edges: jax.Array) -> jax.Array:
    """The bin of each element of `x`, (n,), among the intervals between `edges`; their number for those outside.

    Intervals hold their left end, the last one both.
    """
    bins = edges.shape[0] - 1
    position = jnp.searchsorted(edges, x, side="right") - 1
    position = jnp.where(x == edges[-1], bins - 1, position)
    return jnp.where((x >= edges[0]) & (x <= edges[-1]), position, bins)


def _histogram(x: jax.Array, edges: Sequence[jax.Array], weight: jax.Array | None, density: bool) -> jax.Array:
    """The histogram of the points `x`, (..., d), over the grid of `edges`, one array per coordinate."""
    _check_points(x, edges, weight)
    x = x.reshape(-1, x.shape[-1])
    shape = tuple(edge.shape[0] - 1 for edge in edges)
    positions = tuple(_bin_positions(x[:, i], edge) for i, edge in enumerate(edges))
    weights = jnp.ones(x.shape[0], x.dtype) if weight is None else weight.ravel().astype(x.dtype)
    counts = jnp.zeros(shape, x.dtype).at[positions].add(weights, mode="drop")
    if density:
        counts = counts / jnp.sum(counts)
        for axis, edge in enumerate(edges):
            counts = counts / jnp.expand_dims(jnp.diff(edge), [i for i in range(len(shape)) if i != axis])
    return counts


def _uniform_edges(x: jax.Array, bins: Sequence[int], limits: Sequence[Any] | None) -> list[jax.Array]:
    """Edges of `bins[i]` equal intervals of coordinate i of `x`, (..., d): of `limits`, or of the data."""
    _check_points(x, bins, None)
    if any(count <= 0 for count in bins):
        raise RuntimeError("histogramdd(): bins must be > 0")
    if limits is not None and len(limits) != 2 * len(bins):
        raise RuntimeError(
            f"histogramdd: for a {len(bins)}-dimensional histogram range should have {2 * len(bins)} elements"
        )
    x = x.reshape(-1, x.shape[-1])
    edges = []
    for i, count in enumerate(bins):
        column = x[:, i]
        if limits is not None:
            low, high = (jnp.asarray(limit).astype(x.dtype) for limit in limits[2 * i : 2 * i + 2])
        elif x.shape[0]:
            low, high = jnp.min(column), jnp.max(column)
        else:
            low, high = jnp.zeros((), x.dtype), jnp.ones((), x.dtype)
        low, high = jnp.where(low == high, low - 0.5, low), jnp.where(low == high, high + 0.5, high)
        edges.append(jnp.linspace(low, high, count + 1, dtype=x.dtype))
    return edges


@ops.lowering("aten::histogram.bin_ct")
def histogram(self, bins=100, *, range=None, weight=None, density=False):
    """Counts, or sums of `weight`, in `bins` equal intervals of `range` or of the data's extremes.

    returns: (hist, bin_edges), shapes (bins,) and (bins + 1,)
    """
    points = self.reshape(-1, 1)
    edges = _uniform_edges(points, (bins,), range)
    return _histogram(points, edges, weight if weight is None else weight.ravel(), density), edges[0]


@ops.lowering("aten::histogram.bins_tensor")
def histogram_bins_tensor(self, bins, *, weight=None, density=False):
    """Counts, or sums of `weight`, in the intervals between the increasing edges `bins`. returns: (hist, bins)"""
    return _histogram(self.reshape(-1, 1), [bins], weight if weight is None else weight.ravel(), density), bins


@ops.lowering("aten::_histogramdd_bin_edges")
def histogramdd_bin_edges(self, bins, *, range=None, weight=None, density=False):
    """One array of edges for each coordinate of the points `self`, (..., d)."""
    return _uniform_edges(self, bins, range)


@ops.lowering("aten::_histogramdd_from_bin_cts")
def histogramdd_from_bin_cts(self, bins, *, range=None, weight=None, density=False):
    """The d-dimensional histogram of the points `self`, (..., d). returns: (*bins,)"""
    return _histogram(self, _uniform_edges(self, bins, range), weight, density)


@ops.lowering("aten::_histogramdd_from_bin_tensors")
def histogramdd_from_bin_tensors(self, bins, *, weight=None, density=False):
    """The d-dimensional histogram of the points `self`, (..., d), between given edges."""
    return _histogram(self, bins, weight, density)


@ops.lowering("aten::bincount", data_dependent="torch.zeros(n, device='jax').index_add_(0, input, weights)")
def bincount(self, weights=None, minlength=0):
    """How often each of 0, 1, ..., max(self) occurs, or the sum of `weights` where it does.

    self:    (n,), integers >= 0.
    returns: (max(max(self) + 1, minlength),); int64, or float32 or float64 with weights.
    """
    if self.ndim != 1 or (self.size and int(jnp.min(self)) < 0):
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    length = max(int(jnp.max(self)) + 1 if self.size else 0, minlength)
    if weights is None:
        return jnp.zeros(length, np.int64).at[self].add(1)
    weights = weights if weights.dtype == np.float32 else weights.astype(np.float64)
    return jnp.zeros(length, weights.dtype).at[self].add(weights)


# -- segments ------------------------------------------------------------------------------------


def _segments(
    lengths: jax.Array | None, offsets: jax.Array | None, axis: int, n: int
) -> tuple[jax.Array, jax.Array, int]:
    """For each element along `axis` the segment it is in (the number of segments, if none); lengths; their number.

    lengths: (*batch, s); offsets: (*batch, s + 1); batch is the `axis` dimensions before. returns: (*batch, n), ...
    """
    if offsets is None:
        ends = jnp.cumsum(lengths, axis=axis)
    else:
        ends, lengths = lax.slice_in_dim(offsets, 1, None, axis=axis), jnp.diff(offsets, axis=axis)
    assert lengths is not None  # torch asks for one of the two
    count = lengths.shape[axis]
    flat_ends = ends.reshape(-1, count)
    ids = jax.vmap(lambda end: jnp.searchsorted(end, jnp.arange(n), side="right"))(flat_ends)
    return ids.reshape(*lengths.shape[:axis], n), lengths, count


_SEGMENT_REDUCERS: dict[str, Callable[..., jax.Array]] = {
    "sum": jax.ops.segment_sum,
    "mean": jax.ops.segment_sum,
    "max": jax.ops.segment_max,
    "min": jax.ops.segment_min,
    "prod": jax.ops.segment_prod,
}
_SEGMENT_INITIAL = {"sum": 0.0, "mean": 0.0, "max": -math.inf, "min": math.inf, "prod": 1.0}


def _per_segment(function: Callable[..., jax.Array], axis: int, data: jax.Array, ids: jax.Array) -> jax.Array:
    """`function(data, ids)` under `axis` leading batch dimensions."""
    for _ in range(axis):
        function = jax.vmap(function)
    return function(data, ids)


def _along(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x`, (*batch, s), with trailing dimensions of 1 up to those of `like`."""
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))


@ops.lowering("aten::segment_reduce")
def segment_reduce(data, reduce, *, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None):
    """Reduces consecutive runs of elements along `axis`.

    data:    (*batch, n, *rest), with `axis` dimensions in batch.
    lengths: (*batch, s), or offsets: (*batch, s + 1): how long the segments are, or where they start and end.
    reduce:  sum, mean, max, min or prod; `initial` is joined in (for mean: what an empty segment gives).
    returns: (*batch, s, *rest)
    """
    axis %= data.ndim
    x = opmath(data)
    ids, lengths, count = _segments(lengths, offsets, axis, data.shape[axis])
    reducer = _SEGMENT_REDUCERS[reduce]
    reduced = _per_segment(lambda d, i: reducer(d, i, num_segments=count), axis, x, ids)
    start = jnp.asarray(_SEGMENT_INITIAL[reduce] if initial is None else initial).astype(x.dtype)
    sizes = _along(lengths, reduced)
    if reduce == "max":
        return jnp.where(sizes > 0, jnp.maximum(reduced, start), start)
    if reduce == "min":
        return jnp.where(sizes > 0, jnp.minimum(reduced, start), start)
    if reduce == "prod":
        return reduced * start
    if reduce == "mean":
        empty = np.nan if initial is None else start
        return jnp.where(sizes > 0, (reduced + start) / jnp.maximum(sizes, 1).astype(x.dtype), empty)
    return reduced + start


@ops.lowering("aten::_segment_reduce_backward")
def segment_reduce_backward(grad, output, data, reduce, *, lengths=None, offsets=None, axis=0, initial=None):
    """The gradient of `segment_reduce` with respect to `data`. Ties of an extreme share it.

    grad, output: (*batch, s, *rest). returns: the shape of `data`.
    """
    axis %= data.ndim
    x, grad, output = opmath(data), opmath(grad), opmath(output)
    ids, lengths, count = _segments(lengths, offsets, axis, data.shape[axis])

    def spread(per_segment: jax.Array) -> jax.Array:
        """What belongs to each element's segment; 0 outside of all."""
        return _per_segment(
            lambda values, i: jnp.take(values, i, axis=0, mode="fill", fill_value=0), axis, per_segment, ids
        )

    def total(per_element: jax.Array) -> jax.Array:
        return _per_segment(lambda d, i: jax.ops.segment_sum(d, i, num_segments=count), axis, per_element, ids)

    if reduce == "sum":
        return spread(grad)
    if reduce == "mean":
        return spread(grad / jnp.maximum(_along(lengths, grad), 1).astype(x.dtype))
    inside = _along(ids < count, x)
    if reduce in ("max", "min"):
        hit = ((x == spread(output)) | jnp.isnan(x)) & inside
        return jnp.where(hit, spread(grad / jnp.maximum(total(hit.astype(x.dtype)), 1)), 0)
    # prod: output / x, but where the segment holds zeros, the product of all the others.
    zeros = total((x == 0).astype(x.dtype))
    start = jnp.asarray(1.0 if initial is None else initial).astype(x.dtype)
    others = (
        _per_segment(lambda d, i: jax.ops.segment_prod(d, i, num_segments=count), axis, jnp.where(x == 0, 1, x), ids)
        * start
    )
    lone_zero = jnp.where((x == 0) & (spread(zeros) == 1), spread(others), 0)
    quotient = jnp.where((x != 0) & (spread(zeros) == 0), spread(output) / jnp.where(x == 0, 1, x), lone_zero)
    return jnp.where(inside, spread(grad) * quotient, 0)
