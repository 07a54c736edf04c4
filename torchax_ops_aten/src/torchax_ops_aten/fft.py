"""Fourier transforms. torch makes all of `torch.fft` and stft of three ops: complex to complex, real to complex (half a
spectrum), and back. `normalization` is 0 for no factor, 1 for 1/sqrt(n), 2 for 1/n, with n the product of the lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from torchax_core.opset import OpSet

ops = OpSet("torchax_ops_aten.fft")

_MOST_AXES = 3  # of one XLA transform


def _scaled(x: jax.Array, lengths: Sequence[int], normalization: int) -> jax.Array:
    n = math.prod(lengths)
    if normalization == 0 or n == 0:
        return x
    return x * jnp.asarray(1 / n if normalization == 2 else 1 / math.sqrt(n), x.real.dtype)


def _over_last(f: Callable[[jax.Array], jax.Array], x: jax.Array, dims: Sequence[int]) -> jax.Array:
    """`f`, which transforms the last axes, at the axes `dims`."""
    last = range(-len(dims), 0)
    return jnp.moveaxis(f(jnp.moveaxis(x, dims, last)), last, dims)


def _complex_transform(x: jax.Array, dims: Sequence[int], forward: bool) -> jax.Array:
    """Unscaled transform over `dims`, forward or backward, a few axes at a time."""
    kind = lax.FftType.FFT if forward else lax.FftType.IFFT
    for start in range(0, len(dims), _MOST_AXES):
        axes = dims[start : start + _MOST_AXES]
        lengths = [x.shape[axis] for axis in axes]
        if x.size == 0:
            continue
        x = _over_last(lambda a, lengths=lengths: lax.fft(a, kind, lengths), x, axes)
        if not forward:  # XLA's inverse divides by n
            x = x * math.prod(lengths)
    return x


@ops.lowering("aten::_fft_c2c")
def fft_c2c(self, dim, normalization, forward):
    """The transform of complex `self` over the dimensions `dim`: the same shape."""
    return _scaled(_complex_transform(self, dim, forward), [self.shape[d] for d in dim], normalization)


@ops.lowering("aten::_fft_r2c")
def fft_r2c(self, dim, normalization, onesided):
    """The forward transform of real `self` over `dim`.

    self:    (..., n, ...), n the length of the last of `dim`.
    returns: complex; (..., n // 2 + 1, ...) if `onesided`, which leaves out the half that follows by symmetry.
    """
    lengths = [self.shape[d] for d in dim]
    if not onesided:
        spectrum = _complex_transform(lax.complex(self, jnp.zeros_like(self)), dim, forward=True)
        return _scaled(spectrum, lengths, normalization)
    *others, last = dim
    n = self.shape[last]
    half = _over_last(lambda a: lax.fft(a, lax.FftType.RFFT, (n,)), self, [last])
    return _scaled(_complex_transform(half, others, forward=True), lengths, normalization)


@ops.lowering("aten::_fft_c2r")
def fft_c2r(self, dim, normalization, last_dim_size):
    """The backward transform of the half spectrum `self` over `dim`, to a real result.

    self:    (..., last_dim_size // 2 + 1, ...) at the last of `dim`; the imaginary parts that symmetry forbids are ignored.
    returns: (..., last_dim_size, ...).
    """
    *others, last = dim
    lengths = [self.shape[d] for d in others] + [last_dim_size]
    half = _complex_transform(self, others, forward=False)
    whole = _over_last(lambda a: lax.fft(a, lax.FftType.IRFFT, (last_dim_size,)), half, [last])
    return _scaled(whole * last_dim_size, lengths, normalization)
