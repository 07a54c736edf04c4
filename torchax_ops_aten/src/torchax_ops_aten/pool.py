"""Pooling over one to three spatial dims: maximum, average, adaptive and fractional, with their backwards.

Every op takes (n, c, *spatial) or (c, *spatial). Maxima come with the flat position in the spatial dims of the element
they are: the first of equals, and a NaN over everything (the last of several), as torch's kernels have it.
One-dimensional pooling is composite and arrives here as two-dimensional.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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

    def elements(self, x: jax.Array, init: jax.Array | np.generic) -> Iterator[jax.Array]:
        """The first element of every window over the last dims of `x`, then the second, ...: (..., *count) each.

        Outside of `x` is `init`.
        """
        ndim = len(self.spatial)
        spans = [(n - 1) * s + 1 for n, s in zip(self.count, self.stride, strict=True)]
        reaches = [n + d * (k - 1) for n, d, k in zip(spans, self.dilation, self.kernel, strict=True)]
        pads = [
            (p, max(reach - size - p, 0), 0) for p, reach, size in zip(self.padding, reaches, self.spatial, strict=True)
        ]
        x = jax.lax.pad(x, init, [(0, 0, 0)] * (x.ndim - ndim) + pads)
        for offsets in np.ndindex(*self.kernel):
            starts = [o * d for o, d in zip(offsets, self.dilation, strict=True)]
            at = [slice(o, o + span, s) for o, span, s in zip(starts, spans, self.stride, strict=True)]
            yield x[..., *at]

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


def _lowest(dtype: jnp.dtype) -> np.ndarray:
    """The value that every other of `dtype` beats or equals; of NumPy, so that jax knows what it reduces, and its gradient."""
    return np.array(-np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min, dtype)


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


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _max_pool(x: jax.Array, windows: Windows) -> jax.Array:
    """The maxima only; `lax.max` lets NaN win, as torch does."""
    x = opmath(x)
    return windows.reduce(x, _lowest(x.dtype), jax.lax.max)


@_max_pool.defjvp
def _(windows: Windows, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # jax has none for dilated windows, and forward-mode of no others
    ((x,), (tangent,)) = primals, tangents
    values, indices = _max_pool(x, windows), _positions_of_maxima(opmath(x), windows)
    lead = x.shape[: x.ndim - len(windows.spatial)]
    at = indices.reshape(*lead, math.prod(windows.count))
    flat = opmath(tangent).reshape(*lead, math.prod(windows.spatial))
    return values, jnp.take_along_axis(flat, at, -1).reshape(values.shape)


_FEW = 32
"""Windows of no more elements are compared element by element, which XLA fuses into one loop over the windows."""


def _max_pool_with_indices(self: jax.Array, windows: Windows) -> tuple[jax.Array, jax.Array]:
    """Maxima and their positions. Apart, so that a compiled program that drops the positions does not compute them."""
    x = opmath(self)
    return _max_pool(x, windows), _positions_of_maxima(x, windows)


def _positions_of_maxima(x: jax.Array, windows: Windows) -> jax.Array:
    """Where in the flattened spatial dims the maximum of each window is."""
    x = jax.lax.stop_gradient(x)
    positions = _flat_positions(windows.spatial)
    if math.prod(windows.kernel) <= _FEW:
        pairs = zip(windows.elements(x, _lowest(x.dtype)), windows.elements(positions, _NOWHERE), strict=True)
        _, indices = functools.reduce(_greater, ((value, jnp.broadcast_to(at, value.shape)) for value, at in pairs))
    else:
        operands = x, jnp.broadcast_to(positions, x.shape)
        _, indices = windows.reduce(operands, (_lowest(x.dtype), _NOWHERE), _greater)
    return indices


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _max_over(x: jax.Array, positions: jax.Array, axes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """The maximum over `axes`, and its position by the rule of `_greater`.

    Two reductions of one array each, which XLA vectorizes where it does not one of two. A NaN's position is turned into
    a negative number, of which the last is the least.
    """
    values = jax.lax.reduce(x, _lowest(x.dtype), jax.lax.max, axes)
    found = jnp.where(x == jnp.expand_dims(values, axes), positions, _NOWHERE)
    first = jax.lax.reduce(jnp.where(x != x, -1 - positions, found), _NOWHERE, jax.lax.min, axes)
    return values, jnp.where(first < 0, -1 - first, first)


@_max_over.defjvp
def _(axes: Sequence[int], primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, Any]) -> Any:
    # jax would share a gradient out among equals
    _, positions = primals
    values, indices = _max_over(*primals, axes)
    chosen = jnp.where(positions == jnp.expand_dims(indices, axes), tangents[0], 0).sum(axes)
    return (values, indices), (chosen, np.zeros(indices.shape, jax.dtypes.float0))


def _to_positions(values: jax.Array, indices: jax.Array, spatial: Sequence[int], *, add: bool) -> jax.Array:
    """Zeros (..., *spatial) with `values` at flat positions `indices`; where some meet, their sum or one of them."""
    lead = values.shape[: values.ndim - len(spatial)]
    planes, size, count = math.prod(lead), math.prod(spatial), math.prod(values.shape[len(lead) :])
    at = jnp.arange(planes)[:, None], indices.reshape(planes, count)
    place = jnp.zeros((planes, size), values.dtype).at[at]
    flat = values.reshape(planes, count)
    return (place.add(flat) if add else place.set(flat)).reshape(*lead, *spatial)


def _max_pool_backward(grad_output: jax.Array, self: jax.Array, indices: jax.Array, ndim: int) -> jax.Array:
    """The gradient of any pooling by maximum: what comes in goes to where the maxima were."""
    return _to_positions(opmath(grad_output), indices, self.shape[-ndim:], add=True).astype(self.dtype)


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
    if isinstance(divisor, np.ndarray) and divisor.size and (divisor == divisor.flat[0]).all():
        divisor = divisor.flat[0]  # one number rather than an array of them to read
    return jax.lax.div(x, jnp.broadcast_to(jnp.asarray(divisor).astype(x.dtype), x.shape))


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


def _adaptive_bounds(size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Where `count` windows that together cover `size` elements start, and where they stop: (count,) both."""
    starts: np.ndarray = np.arange(count) * size // max(count, 1)
    return starts, -(-(np.arange(count) + 1) * size // max(count, 1))


def _adaptive_windows(x: jax.Array, axis: int, count: int) -> tuple[jax.Array, np.ndarray, np.ndarray]:
    """`count` windows that together cover an axis: (..., size, ...) -> (..., count, longest, ...).

    returns: the windows, the positions of their elements, and which of these are meant: (count, longest) both.
    """
    size = x.shape[axis]
    starts, stops = _adaptive_bounds(size, count)
    longest = int((stops - starts).max(initial=1))
    if size == count * longest:
        windows = x.reshape(*x.shape[:axis], count, longest, *x.shape[axis + 1 :])
        positions = np.arange(size).reshape(count, longest)
    else:
        begins = np.minimum(starts, size - longest)  # the last windows may be shorter
        windows = jax.vmap(lambda at: jax.lax.dynamic_slice_in_dim(x, at, longest, axis), out_axes=axis)(begins)
        positions = begins[:, None] + np.arange(longest)
    return windows, positions, (positions >= starts[:, None]) & (positions < stops[:, None])


def _beside(x: np.ndarray, place: int, ndim: int) -> np.ndarray:
    """A (count, longest) array of dim `place` of `ndim`, to go with windows (..., count1, longest1, count2, longest2)."""
    return x.reshape(*x.shape, *(1, 1) * (ndim - place - 1))


def _adaptive_sum(x: jax.Array, axis: int, count: int) -> jax.Array:
    """The sum of each of `count` windows of an axis."""
    starts, stops = _adaptive_bounds(x.shape[axis], count)
    if 1 < count <= _FEW and x.shape[axis] % count:  # a copy of windows of unlike lengths takes longer than their sums
        sums = (jax.lax.slice_in_dim(x, *ends, axis=axis).sum(axis) for ends in zip(starts, stops, strict=True))
        return jnp.stack(list(sums), axis)
    windows, _, meant = _adaptive_windows(x, axis, count)
    if not meant.all():
        windows = jnp.where(meant.reshape(*meant.shape, *(1,) * (x.ndim - axis - 1)), windows, jnp.zeros((), x.dtype))
    return windows.sum(axis + 1)


def _adaptive_avg_pool(self: jax.Array, output_size: Sequence[int]) -> jax.Array:
    """The mean of each adaptive window, over the last dims. Linear in `self`."""
    x = opmath(self)
    lead = x.ndim - len(output_size)
    divisor: np.ndarray = np.ones((), np.int64)
    for axis, count in enumerate(output_size, lead):
        starts, stops = _adaptive_bounds(x.shape[axis], count)
        divisor = divisor[..., None] * (stops - starts)
        if count != x.shape[axis]:
            x = _adaptive_sum(x, axis, count)
    return _divided(x, divisor)


@ops.lowering("aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d")
def adaptive_avg_pool(self, output_size):
    """The mean of each of `output_size` windows that cover the last dims: (..., *spatial) -> (..., *output_size)."""
    return _adaptive_avg_pool(self, output_size)


def _adaptive_avg_pool_backward(grad_output: jax.Array, self: jax.Array, ndim: int) -> jax.Array:
    """The transpose of `_adaptive_avg_pool`."""
    return _transposed(functools.partial(_adaptive_avg_pool, output_size=grad_output.shape[-ndim:]), self, grad_output)


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
    """The maximum of each of `output_size` windows that cover the last dims, and its position."""
    x, ndim = opmath(self), len(output_size)
    lead = x.ndim - ndim
    flat = jnp.zeros((), jnp.int32)
    all_meant: np.ndarray = np.ones((), np.bool_)
    for place, (size, count) in enumerate(zip(self.shape[lead:], output_size, strict=True)):
        x, positions, meant = _adaptive_windows(x, lead + 2 * place, count)
        flat = flat * size + _beside(positions.astype(np.int32), place, ndim)
        all_meant = all_meant & _beside(meant, place, ndim)
    if not all_meant.all():
        x, flat = jnp.where(all_meant, x, _lowest(x.dtype)), jnp.where(all_meant, flat, _NOWHERE)
    return _max_over(x, flat, tuple(range(lead + 1, x.ndim, 2)))


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
    return _max_over(values, flat.astype(jnp.int32), axes)


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
