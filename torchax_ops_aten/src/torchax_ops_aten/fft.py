"""Fourier transforms. torch makes all of `torch.fft` and stft of three ops: complex to complex, real to complex (half a
spectrum), and back. `normalization` is 0 for no factor, 1 for 1/sqrt(n), 2 for 1/n, with n the product of the lengths.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torchax_core.opset import OpSet

ops = OpSet("torchax_ops_aten.fft")

_MOST_AXES = 3  # of one XLA transform


def _scaled(x: jax.Array, lengths: Sequence[int], normalization: int, *, forward: bool) -> jax.Array:
    """XLA's result as torch scales it. XLA divides by n on the way back, and by nothing on the way there."""
    n = math.prod(lengths)
    power = {0: 0.0, 1: -0.5, 2: -1.0}[normalization] + (0.0 if forward else 1.0)
    return x if power == 0 or n == 0 else x * jnp.asarray(float(n) ** power, x.real.dtype)


def _over_last(f: Callable[[jax.Array], jax.Array], x: jax.Array, dims: Sequence[int]) -> jax.Array:
    """`f`, which transforms the last axes, at the axes `dims`."""
    last = range(-len(dims), 0)
    return jnp.moveaxis(f(jnp.moveaxis(x, dims, last)), last, dims)


def _complex_transform(x: jax.Array, dims: Sequence[int], forward: bool) -> jax.Array:
    """XLA's transform over `dims`, a few axes at a time."""
    if x.size == 0:
        return x
    kind = lax.FftType.FFT if forward else lax.FftType.IFFT
    for start in range(0, len(dims), _MOST_AXES):
        axes = dims[start : start + _MOST_AXES]
        lengths = tuple(x.shape[axis] for axis in axes)
        x = _over_last(functools.partial(lax.fft, fft_type=kind, fft_lengths=lengths), x, axes)
    return x


@ops.lowering("aten::_fft_c2c")
def fft_c2c(self, dim, normalization, forward):
    """The transform of complex `self` over the dimensions `dim`: the same shape."""
    lengths = [self.shape[d] for d in dim]
    return _scaled(_complex_transform(self, dim, forward), lengths, normalization, forward=forward)


def _r2c_strides(shape: tuple[int, ...], call: Mapping[str, Any]) -> tuple[int, ...]:
    """As CPU torch's MKL transform leaves them: first the dimensions that stay, then the others, each in the order of
    `self`'s strides, and the last one to be transformed innermost."""
    stride, dims = call["self"].stride(), [d % len(shape) for d in call["dim"]]
    stay = [d for d in range(len(shape)) if d not in dims]
    order = [*sorted(stay, key=lambda d: -stride[d]), *sorted(dims[:-1], key=lambda d: -stride[d]), dims[-1]]
    laid_out = torch.empty([shape[d] for d in order], device="meta")
    return laid_out.permute([order.index(d) for d in range(len(shape))]).stride()


# torch's gradient is a whole complex transform; jax's is that of the half
@ops.lowering("aten::_fft_r2c", strides=_r2c_strides, differentiable=True)
def fft_r2c(self, dim, normalization, onesided):
    """The forward transform of real `self` over `dim`.

    self:    (..., n, ...), n the length of the last of `dim`.
    returns: complex; (..., n // 2 + 1, ...) if `onesided`, which leaves out the half that follows by symmetry.
    """
    lengths = [self.shape[d] for d in dim]
    if not onesided:
        spectrum = _complex_transform(lax.complex(self, jnp.zeros_like(self)), dim, forward=True)
        return _scaled(spectrum, lengths, normalization, forward=True)
    *others, last = dim
    n = self.shape[last]
    half = _over_last(lambda a: lax.fft(a, lax.FftType.RFFT, (n,)), self, [last])
    return _scaled(_complex_transform(half, others, forward=True), lengths, normalization, forward=True)


@ops.lowering("aten::_fft_c2r")
def fft_c2r(self, dim, normalization, last_dim_size):
    """The backward transform of the half spectrum `self` over `dim`, to a real result.

    self:    (..., last_dim_size // 2 + 1, ...) at the last of `dim`; imaginary parts that symmetry forbids are ignored.
    returns: (..., last_dim_size, ...).
    """
    *others, last = dim
    lengths = [self.shape[d] for d in others] + [last_dim_size]
    half = _complex_transform(self, others, forward=False)
    whole = _over_last(lambda a: lax.fft(a, lax.FftType.IRFFT, (last_dim_size,)), half, [last])
    return _scaled(whole, lengths, normalization, forward=False)


@ops.lowering("aten::fft_fftfreq")
def fft_fftfreq(n, d=1.0, *, dtype=None):
    """The frequencies of `fft`'s n results for samples `d` apart: 0, 1, ..., then the negative ones; over n * d."""
    k = jnp.arange(n)
    return jnp.where(k < (n + 1) // 2, k, k - n) / (n * d)


@ops.lowering("aten::fft_rfftfreq")
def fft_rfftfreq(n, d=1.0, *, dtype=None):
    """The frequencies of `rfft`'s n // 2 + 1 results for samples `d` apart: 0, 1, ..., over n * d."""
    return jnp.arange(n // 2 + 1) / (n * d)
