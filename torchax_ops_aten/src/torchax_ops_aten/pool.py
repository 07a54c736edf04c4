"""Pooling over one to three spatial dims: maximum, average, adaptive and fractional, with their backwards.

Every op takes (n, c, *spatial) or (c, *spatial). Maxima come with the flat position in the spatial dims of the element
they are: the first of equals, and a NaN over everything (the last of several), as torch's kernels have it.
One-dimensional pooling is composite and arrives here as two-dimensional.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from torchax_core.opset import OpSet
from torchax_core.promotion import opmath
from torchax_ops_aten.conv import per_dim

ops = OpSet("torchax_ops_aten.pool")


@dataclasses.dataclass(frozen=True)
class Windows:
    """Equal windows over the spatial dims: what `lax.reduce_window` wants to know, and how many windows there are."""

    spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    count: tuple[int, ...]

    @classmethod
    def over(
        cls,
        x: jax.Array,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int] = (1,),
        *,
        ndim: int,
        ceil_mode: bool,
    ) -> Windows:
        """The windows of a pooling op over the last `ndim` dims of `x`; an empty `stride` means the kernel's size.

        source: pooling_output_shape in aten/src/ATen/native/Pool.h; `ceil_mode` keeps a partial last window, unless it
                would start in the padding on the right.
        """
        spatial = x.shape[-ndim:]
        kernel, padding, dilation = (per_dim(v, ndim) for v in (kernel, padding, dilation))
        stride = per_dim(stride, ndim) if isinstance(stride, int) or stride else kernel
        count = []
        for size, k, s, p, d in zip(spatial, kernel, stride, padding, dilation, strict=True):
            n = (size + 2 * p - d * (k - 1) - 1 + (s - 1 if ceil_mode else 0)) // s + 1
            count.append(n - 1 if ceil_mode and (n - 1) * s >= size + p else n)
        return cls(spatial, kernel, stride, padding, dilation, tuple(count))

    def reduce(self, x, init, computation):
        """`lax.reduce_window` over the last dims of `x`, an array or a tuple of them."""
        lead = jax.tree.leaves(x)[0].ndim - len(self.spatial)
        ones = (1,) * lead
        per_dim = zip(self.spatial, self.kernel, self.stride, self.padding, self.dilation, self.count, strict=True)
        pads = [(p, max((n - 1) * s + d * (k - 1) + 1 - size - p, 0)) for size, k, s, p, d, n in per_dim]
        return jax.lax.reduce_window(
            x,
            init,
            computation,
            window_dimensions=ones + self.kernel,
            window_strides=ones + self.stride,
            padding=[(0, 0)] * lead + pads,
            window_dilation=ones + self.dilation,
        )

    def divisor(self, count_include_pad: bool) -> np.ndarray:
        """The number of elements an average divides by, per window: (*count). Padding counts if asked for; what
        `ceil_mode` reaches beyond it never does."""
        total: np.ndarray = np.ones((), np.int64)
        for size, k, s, p, n in zip(self.spatial, self.kernel, self.stride, self.padding, self.count, strict=True):
            starts: np.ndarray = np.arange(n) * s - p
            stops = np.minimum(starts + k, size + p)
            if not count_include_pad:
                starts, stops = np.maximum(starts, 0), np.minimum(stops, size)
            total = total[..., None] * (stops - starts)
        return total


# -- maxima ------------------------------------------------------------------------------------------


def _lowest(dtype: jnp.dtype) -> jax.Array:
    """The value that every other of `dtype` beats or equals."""
    return jnp.array(-jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min, dtype)


def _flat_positions(spatial: Sequence[int]) -> jax.Array:
    """The position of each element in its flattened spatial dims: (*spatial), int32."""
    return jnp.arange(math.prod(spatial), dtype=jnp.int32).reshape(spatial)


_NOWHERE = np.int32(np.iinfo(np.int32).max)
"""The position of what pads: behind every real one."""


def _greater(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Of two (value, position) pairs, torch's maximum: NaN over all and the last of them; else the first of equals."""
    (x, i), (y, j) = a, b
    x_nan, y_nan = x != x, y != y
    take_y = jnp.where(y_nan, ~x_nan | (j > i), ~x_nan & ((y > x) | ((y == x) & (j < i))))
    return jnp.where(take_y, y, x), jnp.where(take_y, j, i)


def _max_pool(x: jax.Array, windows: Windows) -> jax.Array:
    """The maxima only; `lax.max` lets NaN win, as torch does."""
    x = opmath(x)
    return windows.reduce(x, _lowest(x.dtype), jax.lax.max)


def _max_pool_with_indices(self: jax.Array, windows: Windows) -> tuple[jax.Array, jax.Array]:
    """Maxima and their positions. Apart, so that a compiled program that drops the positions does not compute them."""
    x = opmath(self)
    positions = jnp.broadcast_to(_flat_positions(windows.spatial), x.shape)
    _, indices = windows.reduce((x, positions), (_lowest(x.dtype), _NOWHERE), _greater)
    return _max_pool(x, windows), indices


def _to_positions(values: jax.Array, indices: jax.Array, spatial: Sequence[int], *, add: bool) -> jax.Array:
    """Zeros (..., *spatial) with `values` at flat positions `indices`; where some meet, their sum or one of them."""
    lead = values.shape[: values.ndim - len(spatial)]
    planes, size = math.prod(lead), math.prod(spatial)
    at = jnp.arange(planes)[:, None], indices.reshape(planes, -1)
    place = jnp.zeros((planes, size), values.dtype).at[at]
    flat = values.reshape(planes, -1)
    return (place.add(flat) if add else place.set(flat)).reshape(*lead, *spatial)


def _max_pool_backward(grad_output: jax.Array, self: jax.Array, indices: jax.Array, ndim: int) -> jax.Array:
    """The gradient of any pooling by maximum: what comes in goes to where the maxima were."""
    return _to_positions(opmath(grad_output), indices, self.shape[-ndim:], add=True)


@ops.lowering("aten::max_pool1d", composite_grad="decompose")
def max_pool1d(self, kernel_size, stride=(), padding=(0,), dilation=(1,), ceil_mode=False):
    """The maximum of each window, without positions; kept whole where no gradient wants them."""
    return _max_pool(self, Windows.over(self, kernel_size, stride, padding, dilation, ndim=1, ceil_mode=ceil_mode))


@ops.lowering("aten::max_pool2d", composite_grad="decompose")
def max_pool2d(self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
    """The maximum of each window, without positions; kept whole where no gradient wants them."""
    return _max_pool(self, Windows.over(self, kernel_size, stride, padding, dilation, ndim=2, ceil_mode=ceil_mode))


@ops.lowering("aten::max_pool3d", composite_grad="decompose")
def max_pool3d(self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
    """The maximum of each window, without positions; kept whole where no gradient wants them."""
    return _max_pool(self, Windows.over(self, kernel_size, stride, padding, dilation, ndim=3, ceil_mode=ceil_mode))


@ops.lowering("aten::max_pool2d_with_indices")
def max_pool2d_with_indices(self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
    """The maximum of each window, and its position: two times (..., h_out, w_out)."""
    windows = Windows.over(self, kernel_size, stride, padding, dilation, ndim=2, ceil_mode=ceil_mode)
    return _max_pool_with_indices(self, windows)


@ops.lowering("aten::max_pool3d_with_indices")
def max_pool3d_with_indices(self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
    """The maximum of each window, and its position: two times (..., d_out, h_out, w_out)."""
    windows = Windows.over(self, kernel_size, stride, padding, dilation, ndim=3, ceil_mode=ceil_mode)
    return _max_pool_with_indices(self, windows)


@ops.lowering("aten::max_pool2d_with_indices_backward")
def max_pool2d_with_indices_backward(grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
    """The gradient of `max_pool2d_with_indices`."""
    return _max_pool_backward(grad_output, self, indices, 2)


@ops.lowering("aten::max_pool3d_with_indices_backward")
def max_pool3d_with_indices_backward(grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
    """The gradient of `max_pool3d_with_indices`."""
    return _max_pool_backward(grad_output, self, indices, 3)


@ops.lowering("aten::max_unpool2d", format_of=("self",))
def max_unpool2d(self, indices, output_size):
    """Zeros (..., *output_size) with the elements of `self` at the flat positions `indices`."""
    return _to_positions(self, indices, output_size, add=False)


@ops.lowering("aten::max_unpool3d")
def max_unpool3d(self, indices, output_size, stride, padding):
    """Zeros (..., *output_size) with the elements of `self` at the flat positions `indices`."""
    return _to_positions(self, indices, output_size, add=False)


# -- averages ----------------------------------------------------------------------------------------


def _divided(x: jax.Array, divisor: jax.Array | np.ndarray | int) -> jax.Array:
    """`x / divisor`; integers are cut off towards zero."""
    divisor = jnp.broadcast_to(jnp.asarray(divisor).astype(x.dtype), x.shape)
    return jax.lax.div(x, divisor)


def _avg_pool(
    self: jax.Array,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    *,
    ndim: int,
) -> jax.Array:
    """The mean of each window. Linear in `self`, so that its gradient is its transpose."""
    windows = Windows.over(self, kernel_size, stride, padding, ndim=ndim, ceil_mode=ceil_mode)
    x = opmath(self)
    # A NumPy zero: JAX then sees a sum, which it can transpose.
    total = windows.reduce(x, np.zeros((), x.dtype), jax.lax.add)
    return _divided(total, windows.divisor(count_include_pad) if divisor_override is None else divisor_override)


def _transposed(linear: Callable[[jax.Array], jax.Array], like: jax.Array, grad_output: jax.Array) -> jax.Array:
    """The transpose of `linear`, a function of an array like `like`, applied to `grad_output` in its compute type."""
    grad = opmath(grad_output)
    return jax.linear_transpose(linear, jax.ShapeDtypeStruct(like.shape, grad.dtype))(grad)[0]


@ops.lowering("aten::avg_pool2d")
def avg_pool2d(self, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
    """The mean of each window: (..., h, w) -> (..., h_out, w_out)."""
    return _avg_pool(self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, ndim=2)


@ops.lowering("aten::avg_pool3d")
def avg_pool3d(self, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
    """The mean of each window: (..., d, h, w) -> (..., d_out, h_out, w_out)."""
    return _avg_pool(self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, ndim=3)


@ops.lowering("aten::avg_pool2d_backward")
def avg_pool2d_backward(
    grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
):
    """The gradient of `avg_pool2d`."""
    arguments = kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    return _transposed(lambda x: _avg_pool(x, *arguments, ndim=2), self, grad_output)


@ops.lowering("aten::avg_pool3d_backward")
def avg_pool3d_backward(
    grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
):
    """The gradient of `avg_pool3d`."""
    arguments = kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    return _transposed(lambda x: _avg_pool(x, *arguments, ndim=3), self, grad_output)


# -- adaptive ----------------------------------------------------------------------------------------


def _adaptive_windows(size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` windows that together cover `size` elements: positions (count, longest), and which of them are meant.

    Window i holds the elements from floor(i * size / count) to ceil((i + 1) * size / count). Positions past its end
    repeat its last element.
    """
    starts: np.ndarray = np.arange(count) * size // max(count, 1)
    stops: np.ndarray = -(-(np.arange(count) + 1) * size // max(count, 1))
    longest = int((stops - starts).max(initial=1))
    positions = starts[:, None] + np.arange(longest)
    return np.minimum(positions, stops[:, None] - 1), positions < stops[:, None]


def _gathered(x: jax.Array, windows: Sequence[tuple[np.ndarray, np.ndarray]]) -> jax.Array:
    """The windows of the last dims of `x`: (..., d1, d2) -> (..., count1, longest1, count2, longest2).

    `windows` are pairs of positions and a mask, per dim; one dim is gathered after the other.
    """
    lead = x.ndim - len(windows)
    for place, (positions, _) in enumerate(windows):
        x = jnp.take(x, positions, axis=lead + 2 * place)
    return x


def _adaptive_avg_pool(self: jax.Array, output_size: Sequence[int]) -> jax.Array:
    """The mean of each adaptive window, over the last dims. Linear in `self`."""
    ndim = len(output_size)
    x = opmath(self)
    lead = x.ndim - ndim
    divisor: np.ndarray = np.ones((), np.int64)
    for place, count in enumerate(output_size):
        positions, meant = _adaptive_windows(x.shape[lead + place], count)
        windows = jnp.take(x, positions, axis=lead + place)
        meant_here = meant.reshape(*meant.shape, *(1,) * (ndim - place - 1))
        x = jnp.where(meant_here, windows, jnp.zeros((), x.dtype)).sum(lead + place + 1)
        divisor = divisor[..., None] * meant.sum(1)
    return _divided(x, divisor)


@ops.lowering("aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d")
def adaptive_avg_pool(self, output_size):
    """The mean of each of `output_size` windows that cover the last dims: (..., *spatial) -> (..., *output_size)."""
    return _adaptive_avg_pool(self, output_size)


def _adaptive_avg_pool_backward(grad_output: jax.Array, self: jax.Array, ndim: int) -> jax.Array:
    """The transpose of `_adaptive_avg_pool`."""
    return _transposed(partial(_adaptive_avg_pool, output_size=grad_output.shape[-ndim:]), self, grad_output)


@ops.lowering("aten::_adaptive_avg_pool2d_backward")
def _adaptive_avg_pool2d_backward(grad_output, self):
    """The gradient of `_adaptive_avg_pool2d`."""
    return _adaptive_avg_pool_backward(grad_output, self, 2)


@ops.lowering("aten::_adaptive_avg_pool3d_backward")
def _adaptive_avg_pool3d_backward(grad_output, self):
    """The gradient of `_adaptive_avg_pool3d`."""
    return _adaptive_avg_pool_backward(grad_output, self, 3)


@ops.lowering("aten::adaptive_max_pool2d", "aten::adaptive_max_pool3d")
def adaptive_max_pool(self, output_size):
    """The maximum of each of `output_size` windows that cover the last dims, and its position.

    Positions past a window's end repeat its last element, which changes neither its maximum nor where that is.
    """
    spatial = self.shape[-len(output_size) :]
    windows = [_adaptive_windows(size, count) for size, count in zip(spatial, output_size, strict=True)]
    x = opmath(self)
    values = _gathered(x, windows)
    indices = jnp.broadcast_to(_gathered(_flat_positions(spatial), windows), values.shape)
    axes = tuple(range(self.ndim - len(spatial) + 1, values.ndim, 2))
    return jax.lax.reduce((values, indices), (_lowest(x.dtype), _NOWHERE), _greater, axes)


@ops.lowering("aten::adaptive_max_pool2d_backward")
def adaptive_max_pool2d_backward(grad_output, self, indices):
    """The gradient of `adaptive_max_pool2d`."""
    return _max_pool_backward(grad_output, self, indices, 2)


@ops.lowering("aten::adaptive_max_pool3d_backward")
def adaptive_max_pool3d_backward(grad_output, self, indices):
    """The gradient of `adaptive_max_pool3d`."""
    return _max_pool_backward(grad_output, self, indices, 3)


# -- fractional --------------------------------------------------------------------------------------


def _rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`x`, computed in float32, with no more bits than `dtype` has; wider types are left alone."""
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant) if info.bits < 32 else x


def _fractional_positions(samples: jax.Array, size: int, count: int, kernel: int) -> jax.Array:
    """What `count` windows of `kernel` elements cover of `size`, spread by random samples: (*samples, count, kernel).

    source: fractional_max_pool's generate_intervals, aten/src/ATen/native/FractionalMaxPool*.cpp; the last window ends
            where the input does.
    """
    starts = jnp.full((*samples.shape, count), size - kernel)
    if count > 1:
        alpha = _rounded(jnp.asarray(size - kernel, opmath(samples).dtype) / (count - 1), samples.dtype)
        steps = _rounded(opmath(samples)[..., None] + jnp.arange(count - 1), samples.dtype)
        steps, offset = (_rounded(x * alpha, samples.dtype).astype(jnp.int64) for x in (steps, opmath(samples)))
        starts = starts.at[..., :-1].set(steps - offset[..., None])
    return starts[..., None] + jnp.arange(kernel)


def _fractional_max_pool(
    self: jax.Array, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The maximum of randomly placed windows, and its position.

    self:           (n, c, *spatial) or (c, *spatial).
    random_samples: (n, c, ndim) in [0, 1); the samples of two dims are those of w, then h; of three, t, h, w.
    """
    ndim = len(output_size)
    spatial, lead = self.shape[-ndim:], self.shape[:-ndim]
    kernel_size = per_dim(kernel_size, ndim)
    samples = random_samples.reshape(*lead, ndim)
    order = (1, 0) if ndim == 2 else (0, 1, 2)
    flat = jnp.zeros((), jnp.int64)
    for place in range(ndim):
        positions = _fractional_positions(
            samples[..., order[place]], spatial[place], output_size[place], kernel_size[place]
        )
        # (*lead, 1, 1, ..., count, kernel, ..., 1, 1): the dims of all places side by side.
        shape = lead + (1, 1) * place + positions.shape[-2:] + (1, 1) * (ndim - place - 1)
        flat = flat * spatial[place] + positions.reshape(shape)
    x = opmath(self)
    planes, at = x.reshape(*lead, math.prod(spatial)), flat.reshape(*lead, math.prod(flat.shape[len(lead) :]))
    values = jnp.take_along_axis(planes, at, axis=-1).reshape(flat.shape)
    axes = tuple(range(len(lead) + 1, flat.ndim, 2))
    return jax.lax.reduce((values, flat.astype(jnp.int32)), (_lowest(x.dtype), _NOWHERE), _greater, axes)


@ops.lowering("aten::fractional_max_pool2d")
def fractional_max_pool2d(self, kernel_size, output_size, random_samples):
    """The maximum of randomly placed windows, and its position; see `_fractional_max_pool`."""
    return _fractional_max_pool(self, kernel_size, output_size, random_samples)


@ops.lowering("aten::fractional_max_pool3d")
def fractional_max_pool3d(self, kernel_size, output_size, random_samples):
    """The maximum of randomly placed windows, and its position; see `_fractional_max_pool`."""
    return _fractional_max_pool(self, kernel_size, output_size, random_samples)


@ops.lowering("aten::fractional_max_pool2d_backward")
def fractional_max_pool2d_backward(grad_output, self, kernel_size, output_size, indices):
    """The gradient of `fractional_max_pool2d`."""
    return _max_pool_backward(grad_output, self, indices, 2)


@ops.lowering("aten::fractional_max_pool3d_backward")
def fractional_max_pool3d_backward(grad_output, self, kernel_size, output_size, indices):
    """The gradient of `fractional_max_pool3d`."""
    return _max_pool_backward(grad_output, self, indices, 3)
