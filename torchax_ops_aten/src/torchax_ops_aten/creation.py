"""Factories: tensors made from sizes and numbers. `dtype=None` means torch's own rule, which the kernel applies by
casting to the dtype of torch's meta kernel, so bodies only choose a dtype wide enough to lose nothing before the cast.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax_core.opset import OpSet
from torchax_core.promotion import AS_GIVEN
from torchax_ops_aten._torch_versions import int64_arange_truncates_first
from torchax_ops_aten.copying import cast

ops = OpSet("torchax_ops_aten.creation")

Number = int | float | bool


def _iota(n: int, dtype: Any) -> jax.Array:
    """0, 1, ..., n - 1. Never a constant in the program, however long."""
    return lax.iota(np.dtype(dtype), n)


def _in_dtype(x: jax.Array, dtype: np.dtype | None) -> jax.Array:
    return x if dtype is None else cast(x, dtype)


# -- constant fills ------------------------------------------------------------------------------


@ops.lowering("aten::zeros", "aten::_efficientzerotensor")
def zeros(size, *, dtype=None):
    """Zeros. Uninitialised memory (`empty`) is zeros too: XLA has no other, and zeros are the reproducible choice."""
    return jnp.zeros(size, dtype or np.float32)


@ops.lowering("aten::empty_permuted")
def empty_permuted(size, physical_layout, *, dtype=None):
    """Zeros; `physical_layout` only matters to the metadata, which the core keeps."""
    return jnp.zeros(size, dtype or np.float32)


@ops.lowering("aten::ones")
def ones(size, *, dtype=None):
    return jnp.ones(size, dtype or np.float32)


@ops.lowering("aten::full", promote=AS_GIVEN)
def full(size, fill_value, *, dtype=None):
    """`fill_value` everywhere. Without `dtype` in that of the value: bool, int64, the default float or complex."""
    return jnp.broadcast_to(_in_dtype(jnp.asarray(fill_value), dtype), size)


@ops.lowering("aten::scalar_tensor", promote=AS_GIVEN)
def scalar_tensor(s, *, dtype=None):
    """A number as a 0-d tensor."""
    return _in_dtype(jnp.asarray(s), dtype)


@ops.lowering("aten::zeros_like", "aten::empty_like")
def zeros_like(self, *, dtype=None):
    return jnp.zeros(self.shape, dtype or self.dtype)


@ops.lowering("aten::ones_like")
def ones_like(self, *, dtype=None):
    return jnp.ones(self.shape, dtype or self.dtype)


@ops.lowering("aten::full_like", promote=AS_GIVEN)
def full_like(self, fill_value, *, dtype=None):
    return jnp.broadcast_to(cast(jnp.asarray(fill_value), dtype or self.dtype), self.shape)


@ops.lowering("aten::new_zeros", "aten::new_empty")
def new_zeros(self, size, *, dtype=None):
    return jnp.zeros(size, dtype or self.dtype)


@ops.lowering("aten::new_empty_strided")
def new_empty_strided(self, size, stride, *, dtype=None):
    """Zeros; `stride` only matters to the metadata, which the core keeps."""
    return jnp.zeros(size, dtype or self.dtype)


@ops.lowering("aten::new_ones")
def new_ones(self, size, *, dtype=None):
    return jnp.ones(size, dtype or self.dtype)


@ops.lowering("aten::new_full", promote=AS_GIVEN)
def new_full(self, size, fill_value, *, dtype=None):
    return jnp.broadcast_to(cast(jnp.asarray(fill_value), dtype or self.dtype), size)


@ops.lowering("aten::_make_dep_token")
def make_dep_token(*, dtype=None):
    """The token that `_functional_assert_*` ops are chained by: a 0-d tensor of no meaning."""
    return jnp.zeros((), dtype or np.float32)


# -- sequences -----------------------------------------------------------------------------------


def _progression(start: Number, step: Number, n: int, dtype: np.dtype | None) -> jax.Array:
    """start + step * i for i < n; int64 or float64 inside, as torch's CPU kernels accumulate, then `dtype`."""
    if dtype is not None and not _is_float(dtype):
        # An integer result truncates the arguments first, then counts in whole steps.
        start, step = math.trunc(start), math.trunc(step)
    whole = isinstance(start, int) and isinstance(step, int)
    return _in_dtype(_iota(n, np.int64 if whole else np.float64) * step + start, dtype)


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.complexfloating))


def _arange_length(start: Any, end: Any, step: Any) -> int:
    """How many steps fit into [start, end): exact in integers if all are whole, else by float64 as in torch."""
    if all(isinstance(value, int) for value in (start, end, step)):
        return max(0, -((start - end) // step))
    return max(0, math.ceil((float(end) - float(start)) / float(step)))


@ops.lowering("aten::arange", "aten::arange.start", "aten::arange.start_step", static=("start", "end", "step"))
def arange(end, start=0, step=1, *, dtype=None):
    """start, start + step, ... up to but without `end`; int64 if all three are whole and `dtype` is None.

    returns: (ceil((end - start) / step),)
    """
    if dtype == np.int64 and int64_arange_truncates_first():
        start, end, step = math.trunc(start), math.trunc(end), math.trunc(step)
    return _progression(start, step, _arange_length(start, end, step), dtype)


@ops.lowering("aten::range", "aten::range.step", static=("start", "end", "step"))
def range_(start, end, step=1, *, dtype=None):
    """start, start + step, ... up to and with `end`; the default float type if `dtype` is None.

    returns: (floor((end - start) / step) + 1,)
    """
    if dtype is not None and not _is_float(dtype):
        start, end, step = math.trunc(start), math.trunc(end), math.trunc(step)
    n = math.floor((float(end) - float(start)) / float(step)) + 1
    return _progression(start, step, n, dtype)


def _spaced(start: Any, end: Any, steps: int, dtype: np.dtype | None) -> jax.Array:
    """`steps` values from `start` to `end` in float64 or complex128; ends are truncated first if `dtype` is integer.

    Counted from both ends to the middle, as torch does, so that it is symmetric and ends exactly.
    """
    start, end = jnp.asarray(start), jnp.asarray(end)
    if dtype is not None and not _is_float(dtype):
        start, end = cast(start, dtype), cast(end, dtype)
    wide = jnp.result_type(start.dtype, end.dtype, np.float64)
    start, end = start.astype(wide), end.astype(wide)
    if steps == 1:
        return start[None]
    # XLA would multiply by the inverse of a constant: 50, 49, ... by steps of -0.9999999999999999 are 50, 48, ... in integers
    intervals = lax.optimization_barrier(jnp.asarray(max(steps - 1, 1), np.float64))
    step = (end - start) / intervals
    index = _iota(steps, np.int64)
    return jnp.where(index < steps // 2, start + step * index, end - step * (steps - 1 - index))


@ops.lowering(
    "aten::linspace",
    "aten::linspace.Tensor_Tensor",
    "aten::linspace.Tensor_Scalar",
    "aten::linspace.Scalar_Tensor",
    promote=AS_GIVEN,
    fills_out=True,
)
def linspace(start, end, steps, *, dtype=None):
    """`steps` evenly spaced values from `start` to `end`, both included. returns: (steps,)"""
    return _in_dtype(_spaced(start, end, steps, dtype), dtype)


@ops.lowering(
    "aten::logspace",
    "aten::logspace.Tensor_Tensor",
    "aten::logspace.Tensor_Scalar",
    "aten::logspace.Scalar_Tensor",
    promote=AS_GIVEN,
    fills_out=True,
)
def logspace(start, end, steps, base=10.0, *, dtype=None):
    """base ** linspace(start, end, steps). returns: (steps,)"""
    exponents = _spaced(start, end, steps, dtype)
    return _in_dtype(jnp.power(jnp.asarray(base).astype(exponents.dtype), exponents), dtype)


@ops.lowering("aten::eye", "aten::eye.m")
def eye(n, m=None, *, dtype=None):
    """Ones on the main diagonal. returns: (n, n) or (n, m)."""
    return jnp.eye(n, m, dtype=dtype or np.float32)


def _triangle_indices(row: int, col: int, count: int, mask: jax.Array, dtype: np.dtype | None) -> jax.Array:
    return jnp.stack(jnp.nonzero(mask, size=count)).astype(dtype or np.int64)


def _tril_count(row: int, col: int, offset: int) -> int:
    return int(np.clip(np.arange(row, dtype=np.int64) + offset + 1, 0, col).sum())


@ops.lowering("aten::tril_indices")
def tril_indices(row, col, offset=0, *, dtype=None):
    """Coordinates of the lower triangle of a (row, col) matrix in row-major order. returns: (2, n)."""
    return _triangle_indices(row, col, _tril_count(row, col, offset), jnp.tri(row, col, offset, dtype=bool), dtype)


@ops.lowering("aten::triu_indices")
def triu_indices(row, col, offset=0, *, dtype=None):
    """Coordinates of the upper triangle of a (row, col) matrix in row-major order. returns: (2, n)."""
    count = row * col - _tril_count(row, col, offset - 1)
    return _triangle_indices(row, col, count, ~jnp.tri(row, col, offset - 1, dtype=bool), dtype)


# -- windows -------------------------------------------------------------------------------------


def _window_phase(window_length: int, periodic: bool) -> jax.Array:
    """i / N for i < window_length, in float64; N is the window's period: its length, less one if symmetric."""
    return _iota(window_length, np.float64) / max(window_length - (not periodic), 1)


def _cosine_window(window_length: int, periodic: bool, *coefficients: Any, dtype: np.dtype | None) -> jax.Array:
    """sum of c_k cos(2 pi k i / N). A window of one element is 1."""
    if window_length == 1:
        return jnp.ones((1,), dtype or np.float32)
    angle = 2 * np.pi * _window_phase(window_length, periodic)
    terms = [coefficient * jnp.cos(k * angle) for k, coefficient in enumerate(coefficients)]
    window = _in_dtype(sum(terms[1:], terms[0]), dtype)
    return lax.optimization_barrier(
        window
    )  # or XLA takes the cosines anew for every frame that the window is laid over


@ops.lowering("aten::hann_window", "aten::hann_window.periodic")
def hann_window(window_length, periodic=True, *, dtype=None):
    """0.5 - 0.5 cos(2 pi i / N). returns: (window_length,)"""
    return _cosine_window(window_length, periodic, 0.5, -0.5, dtype=dtype)


@ops.lowering(
    "aten::hamming_window",
    "aten::hamming_window.periodic",
    "aten::hamming_window.periodic_alpha",
    "aten::hamming_window.periodic_alpha_beta",
)
def hamming_window(window_length, periodic=True, alpha=0.54, beta=0.46, *, dtype=None):
    """alpha - beta cos(2 pi i / N). returns: (window_length,)"""
    return _cosine_window(window_length, periodic, alpha, -beta, dtype=dtype)


@ops.lowering("aten::blackman_window", "aten::blackman_window.periodic")
def blackman_window(window_length, periodic=True, *, dtype=None):
    """0.42 - 0.5 cos(2 pi i / N) + 0.08 cos(4 pi i / N). returns: (window_length,)"""
    return _cosine_window(window_length, periodic, 0.42, -0.5, 0.08, dtype=dtype)


@ops.lowering("aten::bartlett_window", "aten::bartlett_window.periodic")
def bartlett_window(window_length, periodic=True, *, dtype=None):
    """A triangle: 1 - |2 i / N - 1|. returns: (window_length,)"""
    if window_length == 1:
        return jnp.ones((1,), dtype or np.float32)
    return _in_dtype(1 - jnp.abs(2 * _window_phase(window_length, periodic) - 1), dtype)


@ops.lowering("aten::kaiser_window", "aten::kaiser_window.periodic", "aten::kaiser_window.beta")
def kaiser_window(window_length, periodic=True, beta=12.0, *, dtype=None):
    """I0(beta sqrt(1 - (2 i / N - 1)^2)) / I0(beta). returns: (window_length,)"""
    if window_length == 1:
        return jnp.ones((1,), dtype or np.float32)
    beta = jnp.asarray(beta, np.float64)
    x = 2 * _window_phase(window_length, periodic) - 1
    # i0e is I0 scaled by exp(-|x|): the quotient stays finite for any beta.
    argument = beta * jnp.sqrt(jnp.maximum(1 - x * x, 0))
    window = jax.scipy.special.i0e(argument) / jax.scipy.special.i0e(beta) * jnp.exp(argument - jnp.abs(beta))
    return _in_dtype(window, dtype)
