"""Scans: running sums, products, extremes and log-sum-exps along one dimension, in logarithmic depth."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax_core.opset import OpSet
from torchax_core.promotion import opmath
from torchax_ops_aten._derivatives import derivatives
from torchax_ops_aten.copying import cast

ops = OpSet("torchax_ops_aten.scans")


def _accumulator(x: jax.Array, dtype: np.dtype | None) -> jax.Array:
    """`x` in the type it is accumulated in: `dtype` if given (widened if half), int64 for integers and bools."""
    if dtype is not None:
        x = cast(x, dtype)
    whole = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == np.bool_
    return x.astype(np.int64) if whole else opmath(x)


@ops.lowering("aten::cumsum")
def cumsum(self, dim, *, dtype=None):
    """out[i] = self[0] + ... + self[i] along `dim`. Integers and bools give int64."""
    x = _accumulator(self, dtype)
    return x if x.ndim == 0 else lax.cumsum(x, axis=dim % x.ndim)


@ops.lowering("aten::cumprod")
def cumprod(self, dim, *, dtype=None):
    """out[i] = self[0] * ... * self[i] along `dim`. Integers and bools give int64."""
    x = _accumulator(self, dtype)
    return x if x.ndim == 0 else lax.cumprod(x, axis=dim % x.ndim)


@ops.lowering("aten::cumprod_backward")
def cumprod_backward(grad, input, dim, output):
    """The gradient of :func:`cumprod`: at k, the product before k times r[k] = grad[k] + input[k + 1] * r[k + 1].

    Nothing is divided, so that zeros are numbers like others. grad, input, output: (...), of one shape.
    """
    if input.ndim == 0 or input.size == 0:
        return grad
    axis = dim % input.ndim
    x, grad = jnp.conj(opmath(input)), opmath(grad)

    def chained(later: tuple[jax.Array, jax.Array], a: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # r -> sum + factor * r, for a stretch of positions; the later stretch is applied first
        return a[0] + a[1] * later[0], a[1] * later[1]

    next_factor = lax.slice_in_dim(x, 1, None, axis=axis)
    factors = jnp.concatenate([next_factor, jnp.zeros_like(lax.slice_in_dim(x, 0, 1, axis=axis))], axis)
    rest, _ = lax.associative_scan(chained, (grad, factors), reverse=True, axis=axis)
    before = jnp.conj(opmath(output))
    ones = jnp.ones_like(lax.slice_in_dim(before, 0, 1, axis=axis))
    return rest * jnp.concatenate([ones, lax.slice_in_dim(before, 0, -1, axis=axis)], axis)


def _share(tangent: jax.Array, of: jax.Array, total: jax.Array) -> jax.Array:
    """The tangent of `log(exp(of) + ...) = total` by `of`; where both are infinite, by one that grows alone."""
    return tangent * jnp.where(of == jnp.inf, 1, jnp.exp(of - total))


@derivatives(
    before=lambda tangent, before, new: _share(tangent, before, _log_added(before, new)),  # type: ignore[has-type]
    new=lambda tangent, before, new: _share(tangent, new, _log_added(before, new)),  # type: ignore[has-type]
)
def _log_added(before: jax.Array, new: jax.Array) -> jax.Array:
    """`log(exp(before) + exp(new))`; of complex numbers the imaginary part is not wrapped, as jnp.logaddexp would."""
    if not jnp.issubdtype(before.dtype, jnp.complexfloating):
        return jnp.logaddexp(before, new)
    new_is_smaller = new.real < before.real
    smaller, larger = jnp.where(new_is_smaller, new, before), jnp.where(new_is_smaller, before, new)
    both_zero = jnp.isneginf(larger.real)  # exp of both is 0, and has no angle
    return jnp.where(both_zero, smaller, larger + jnp.log1p(jnp.exp(smaller - larger)))


# torch's gradient takes the logarithm of what comes in, and two more scans of it, one for each sign
@ops.lowering("aten::logcumsumexp", "aten::_logcumsumexp", differentiable=True)
def logcumsumexp(self, dim):
    """out[i] = log(exp(self[0]) + ... + exp(self[i])) along `dim`, without overflow."""
    x = opmath(self)
    if x.ndim == 0:
        return x
    axis = dim % x.ndim
    if x.shape[axis] and jnp.issubdtype(x.dtype, jnp.complexfloating):
        # one step after the other: the multiple of 2 pi in the imaginary part depends on the order of summation
        steps = jnp.moveaxis(x, axis, 0)
        first = jnp.where(jnp.isneginf(steps[0].real), -jnp.inf, steps[0])
        _, rest = lax.scan(lambda before, new: (_log_added(before, new),) * 2, first, steps[1:])
        return jnp.moveaxis(jnp.concatenate([first[None], rest]), 0, axis)
    # lax.cumlogsumexp takes thirty times as long on CPU (256 rows of 4,096), and compiles in a quarter of the time
    return lax.associative_scan(_log_added, x, axis=axis)


def _running_extreme(
    x: jax.Array, dim: int, reaches: Callable[[jax.Array, jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The extreme so far and the last index that reached it; a NaN reaches any, and only a NaN reaches a NaN."""
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    axis = dim % x.ndim

    def later(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        take = reaches(b[0], a[0])
        if jnp.issubdtype(x.dtype, jnp.floating):
            take = jnp.isnan(b[0]) | (take & ~jnp.isnan(a[0]))
        return jnp.where(take, b[0], a[0]), jnp.where(take, b[1], a[1])

    index_type = np.int32 if x.shape[axis] < 2**31 else np.int64
    values, indices = lax.associative_scan(later, (x, lax.broadcasted_iota(index_type, x.shape, axis)), axis=axis)
    return values, indices.astype(np.int64)


@ops.lowering("aten::cummax")
def cummax(self, dim):
    """The running maximum along `dim`, and the last index it stood at. returns: (values, indices), shape of `self`."""
    return _running_extreme(self, dim, jnp.greater_equal)


@ops.lowering("aten::cummin")
def cummin(self, dim):
    """The running minimum along `dim`, and the last index it stood at. returns: (values, indices), shape of `self`."""
    return _running_extreme(self, dim, jnp.less_equal)
