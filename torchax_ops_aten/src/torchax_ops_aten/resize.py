"""Resizing and resampling: upsample_* in all modes, antialiased or not, grid_sampler, with their backwards; pixel_shuffle.

Resizing is separable: each spatial dim is a gather of a few taps, weighted and summed. Taps and weights depend on sizes
alone and are computed by NumPy when an op is traced. Its gradients are the transposes of the forwards.
`pixel_unshuffle` and `affine_grid_generator` are left to torch's decompositions.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from torchax_core.opset import OpSet
from torchax_core.promotion import opmath

ops = OpSet("torchax_ops_aten.resize")

_SCALES = ("scales_d", "scales_h", "scales_w", "scales")

Taps = tuple[np.ndarray, np.ndarray | None]
"""Positions (out, taps) and weights (out, taps), or None for one tap of weight 1."""

TapsOf = Callable[[int, int, float | None, np.dtype], Taps]
"""The taps of one dim: of a size, an output size, a scale factor or None, and the dtype to find them in."""


def _scales_of(scales: Mapping[str, float | None], ndim: int) -> tuple[float | None, ...]:
    """The scale factor the caller gave for each spatial dim, or None: `scales` in one dim, `scales_d/h/w` in more."""
    names = ("scales",) if ndim == 1 else ("scales_d", "scales_h", "scales_w")[-ndim:]
    return tuple(scales.get(name) for name in names)


def _source_scale(size: int, out: int, scale: float | None, align_corners: bool, dtype: np.dtype) -> np.floating:
    """How far apart in the input two neighbours in the output are.

    source: area_pixel_compute_scale in aten/src/ATen/native/UpSample.h. A scale factor, where given, goes before the
            quotient of the sizes, which it need not equal.
    """
    if align_corners:
        return dtype.type(size - 1) / dtype.type(out - 1) if out > 1 else dtype.type(0)
    return dtype.type(1 / scale) if scale is not None and scale > 0 else dtype.type(size) / dtype.type(out)


# -- taps of each mode -------------------------------------------------------------------------------


def _nearest_taps(size: int, out: int, scale: float | None, dtype: np.dtype, *, exact: bool) -> Taps:
    """The element under each output's left edge, or, `exact`, under its centre; found in float32 for every dtype."""
    step = _source_scale(size, out, scale, False, np.dtype(np.float32))
    position = np.arange(out, dtype=np.float32) + np.float32(0.5 if exact else 0)
    return np.minimum(np.floor(position * step).astype(np.int64), size - 1)[:, None], None


def _linear_taps(size: int, out: int, scale: float | None, dtype: np.dtype, *, align_corners: bool) -> Taps:
    """The two neighbours of each output's centre, by how near they are."""
    step = _source_scale(size, out, scale, align_corners, dtype)
    position = np.arange(out, dtype=dtype)
    half = dtype.type(0.5)
    source = position * step if align_corners else np.maximum((position + half) * step - half, 0)
    low = np.minimum(source.astype(np.int64), size - 1)
    high = np.minimum(low + 1, size - 1)
    weight = np.clip(source - low, 0, 1).astype(dtype)
    return np.stack([low, high], 1), np.stack([1 - weight, weight], 1)


def _cubic(distance, a: float):
    """Keys' cubic convolution kernel; 0 from a distance of 2, NaN of NaN. Array library by its argument."""
    xp = np if isinstance(distance, np.ndarray) else jnp
    x = xp.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return xp.where(x <= 1, near, xp.where(x >= 2, 0, far))


def _cubic_taps(size: int, out: int, scale: float | None, dtype: np.dtype, *, align_corners: bool) -> Taps:
    """The four neighbours of each output's centre; those outside repeat the edge."""
    step = _source_scale(size, out, scale, align_corners, dtype)
    position = np.arange(out, dtype=dtype)
    half = dtype.type(0.5)
    source = position * step if align_corners else (position + half) * step - half
    low = np.floor(source)
    offsets = np.arange(-1, 3)
    weights = _cubic((source - low)[:, None] - offsets.astype(dtype), -0.75)
    return np.clip(low.astype(np.int64)[:, None] + offsets, 0, size - 1), weights.astype(dtype)


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _lanczos3(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


def _antialiased_taps(
    size: int,
    out: int,
    scale: float | None,
    dtype: np.dtype,
    *,
    align_corners: bool,
    kernel: Callable[[np.ndarray], np.ndarray],
    reach: int,
) -> Taps:
    """As many neighbours as the kernel spans once widened to the output's step, weights brought to a sum of 1.

    `reach` is half the kernel's width.

    source: HelperInterpBase::_compute_index_ranges_weights, aten/src/ATen/native/cpu/UpSampleKernel.cpp, after Pillow.
    """
    step = float(_source_scale(size, out, scale, align_corners, dtype))
    widening = max(step, 1.0)
    support = reach * widening
    center = step * (np.arange(out) + 0.5)
    start = np.maximum((center - support + 0.5).astype(np.int64), 0)
    stop = np.minimum((center + support + 0.5).astype(np.int64), size)
    positions = start[:, None] + np.arange(math.ceil(support) * 2 + 1)
    weights = kernel((positions - center[:, None] + 0.5) / widening)
    weights = np.where(positions < stop[:, None], weights, 0)
    total = weights.sum(1, keepdims=True)
    weights = np.divide(weights, total, out=weights, where=total != 0)
    used = weights.any(0)
    return np.minimum(positions, size - 1)[:, used], weights[:, used].astype(dtype)


# -- resampling by taps ------------------------------------------------------------------------------


_FEW = 64
"""So many taps are gathered one by one, each in the loop that adds it up: XLA on CPU is ten times slower with them all."""

_AGAIN = 8
"""A sum of so many taps is put into the loop of the next dim's by XLA on CPU, where it is computed anew for each of those."""


def _weighed(x: jax.Array, positions: np.ndarray, weights: np.ndarray, axis: int, once: bool = False) -> jax.Array:
    """`x` resampled along `axis`: the sum of its taps (out, taps), each times its weight. `once`: as an array of its own."""
    beside = (1,) * (x.ndim - axis - 1)
    weights = weights.reshape(*weights.shape, *beside)
    # A weight of 0 takes nothing: an inf or NaN beside a window stays outside.
    whole = bool(weights.all())

    def tap(at: np.ndarray | jax.Array, weight: np.ndarray | jax.Array) -> jax.Array:
        taken = x.at[(slice(None),) * axis + (at,)].get(mode="promise_in_bounds") * weight
        return taken if whole else jnp.where(weight != 0, taken, 0)

    count = positions.shape[1]
    once = once and 1 < count <= _AGAIN and jax.default_backend() == "cpu"
    if count <= _FEW and not once:
        taps = zip(positions.T, weights.swapaxes(0, 1), strict=True)
        return functools.reduce(jnp.add, (tap(at, weight) for at, weight in taps))
    first = tap(positions[:, 0], weights[:, 0])
    rest = jnp.asarray(positions[:, 1:].T), jnp.asarray(weights[:, 1:].swapaxes(0, 1))
    return jax.lax.scan(lambda total, next_: (total + tap(*next_), None), first, rest)[0]


def _resampled(x: jax.Array, taps: Sequence[Taps]) -> jax.Array:
    """`x` (n, c, *spatial) resampled by the taps of each spatial dim.

    Dims that shrink go first, so that less is left for the others. The gathers of the last dim take longest: it comes
    after the others that shrink, and before those that grow.
    """
    axes = range(2, x.ndim)
    shrinking = [axis for axis in axes if len(taps[axis - 2][0]) < x.shape[axis]]
    order = [*shrinking, *(axis for axis in reversed(axes) if axis not in shrinking)]
    for axis, following in itertools.zip_longest(order, order[1:]):
        positions, weights = taps[axis - 2]
        if weights is None:
            x = jnp.take(x, positions[:, 0], axis=axis)
        else:
            again = following is not None and taps[following - 2][0].size > x.shape[following]
            x = _weighed(x, positions, weights, axis, once=again)
    return x


def _transposed(
    positions: np.ndarray, weights: np.ndarray | None, size: int, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """The taps of the way back, (size, taps): which outputs each input is a tap of, and by what weight; 0 fills up."""
    out = len(positions)
    outputs, taps = np.nonzero(np.ones(positions.shape) if weights is None else weights)
    pairs, same = np.unique(positions[outputs, taps] * out + outputs, return_inverse=True)
    values = np.bincount(same, None if weights is None else weights[outputs, taps], minlength=len(pairs))
    inputs, outputs = np.divmod(pairs, max(out, 1))
    count = np.bincount(inputs, minlength=size)
    rank = np.arange(len(inputs)) - (np.cumsum(count) - count)[inputs]
    found = np.zeros((2, size, count.max(initial=1)))
    found[:, inputs, rank] = outputs, values
    return found[0].astype(np.int64), found[1].astype(dtype)


def _merged(positions: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """`weights` with those of one position, where an edge is repeated, in the first tap that has it."""
    same = positions[:, :, None] == positions[:, None, :]
    first = same.argmax(2) == np.arange(positions.shape[1])
    return np.where(first, (same * weights[:, None, :]).sum(2), 0)


def _weighed_integers(x: jax.Array, positions: np.ndarray, weights: np.ndarray, axis: int) -> jax.Array:
    """`_weighed` for uint8 images to the bit, in the fixed point arithmetic of torch's kernels (and Pillow's).

    Weights are 16 bits with as many of them after the point as the largest allows.
    """
    largest = weights.max(initial=0)
    point = next(p for p in range(22) if p == 21 or int(0.5 + largest * 2 ** (p + 1)) >= 2**15)
    fixed = np.trunc(weights * 2**point + np.copysign(0.5, weights)).astype(np.int32)
    total = _weighed(x, positions, fixed, axis)
    return jnp.clip((total + 2 ** (point - 1)) >> point, 0, 255)


def _resize(self: jax.Array, output_size: Sequence[int], scales: Sequence[float | None], taps: TapsOf) -> jax.Array:
    """`self` (n, c, *spatial) resampled to (n, c, *output_size).

    Raises RuntimeError, in CPU torch's words, if a size is 0: torch's meta kernels do not for all of these.
    """
    if 0 in (*self.shape[2:], *output_size):
        given, wanted = (
            ", ".join(f"{name}: {n}" for name, n in zip("DHW"[3 - len(sizes) :], sizes, strict=True))
            for sizes in (self.shape[2:], tuple(output_size))
        )
        between = " and " if len(output_size) == 1 else " "
        raise RuntimeError(
            f"Input and output sizes should be greater than 0, but got input ({given}){between}output ({wanted})"
        )
    places = range(len(output_size))
    if not jnp.issubdtype(self.dtype, jnp.integer):
        x = opmath(self)
        return _resampled(x, [taps(x.shape[2 + p], output_size[p], scales[p], np.dtype(x.dtype)) for p in places])
    x = self.astype(jnp.int32)
    for place in reversed(places):  # as torch does, which rounds in between
        axis = 2 + place
        positions, weights = taps(x.shape[axis], output_size[place], scales[place], np.dtype(np.float64))
        if weights is None:
            x = jnp.take(x, positions[:, 0], axis=axis)
        elif x.shape[axis] != output_size[place]:  # whatever the scale, as torch has it
            x = _weighed_integers(x, positions, _merged(positions, weights), axis)
    return x


def _resize_backward(
    grad_output: jax.Array, input_size: Sequence[int], scales: Sequence[float | None], taps: TapsOf
) -> jax.Array:
    """The transpose of `_resize`, which is another resampling: XLA on CPU adds up taps in a gather's loop, but one by one
    in a scatter."""
    grad = opmath(grad_output)
    dtype = np.dtype(grad.dtype)
    dims = list(zip(input_size[2:], grad.shape[2:], scales, strict=True))
    return _resampled(grad, [_transposed(*taps(*dim, dtype), dim[0], dtype) for dim in dims])


def _nearest(exact: bool) -> TapsOf:
    return functools.partial(_nearest_taps, exact=exact)


def _linear(align_corners: bool) -> TapsOf:
    return functools.partial(_linear_taps, align_corners=align_corners)


def _bicubic(align_corners: bool) -> TapsOf:
    return functools.partial(_cubic_taps, align_corners=align_corners)


def _antialiased(kernel: Callable[[np.ndarray], np.ndarray], reach: int, align_corners: bool) -> TapsOf:
    return functools.partial(_antialiased_taps, align_corners=align_corners, kernel=kernel, reach=reach)


def _cubic_aa(x: np.ndarray) -> np.ndarray:
    """The cubic kernel with the parameter that Pillow has, and torch only when it antialiases."""
    return _cubic(x, -0.5)


@ops.lowering("aten::upsample_nearest1d", "aten::upsample_nearest2d", "aten::upsample_nearest3d", static=_SCALES)
def upsample_nearest(self, output_size, **scales):
    """(n, c, *spatial) -> (n, c, *output_size): the element under each output's left edge."""
    return _resize(self, output_size, _scales_of(scales, len(output_size)), _nearest(exact=False))


@ops.lowering(
    "aten::upsample_nearest1d_backward",
    "aten::upsample_nearest2d_backward",
    "aten::upsample_nearest3d_backward",
    static=_SCALES,
)
def upsample_nearest_backward(grad_output, output_size, input_size, **scales):
    """The gradient of `upsample_nearest`, (n, c, *spatial) = `input_size`."""
    return _resize_backward(grad_output, input_size, _scales_of(scales, len(output_size)), _nearest(exact=False))


@ops.lowering(
    "aten::_upsample_nearest_exact1d",
    "aten::_upsample_nearest_exact2d",
    "aten::_upsample_nearest_exact3d",
    static=_SCALES,
)
def _upsample_nearest_exact(self, output_size, **scales):
    """(n, c, *spatial) -> (n, c, *output_size): the element under each output's centre."""
    return _resize(self, output_size, _scales_of(scales, len(output_size)), _nearest(exact=True))


@ops.lowering(
    "aten::_upsample_nearest_exact1d_backward",
    "aten::_upsample_nearest_exact2d_backward",
    "aten::_upsample_nearest_exact3d_backward",
    static=_SCALES,
)
def _upsample_nearest_exact_backward(grad_output, output_size, input_size, **scales):
    """The gradient of `_upsample_nearest_exact`, (n, c, *spatial) = `input_size`."""
    return _resize_backward(grad_output, input_size, _scales_of(scales, len(output_size)), _nearest(exact=True))


@ops.lowering("aten::upsample_linear1d", "aten::upsample_bilinear2d", "aten::upsample_trilinear3d", static=_SCALES)
def upsample_linear(self, output_size, align_corners, **scales):
    """(n, c, *spatial) -> (n, c, *output_size), linear between the two neighbours in each dim."""
    return _resize(self, output_size, _scales_of(scales, len(output_size)), _linear(align_corners))


@ops.lowering(
    "aten::upsample_linear1d_backward",
    "aten::upsample_bilinear2d_backward",
    "aten::upsample_trilinear3d_backward",
    static=_SCALES,
)
def upsample_linear_backward(grad_output, output_size, input_size, align_corners, **scales):
    """The gradient of `upsample_linear`, (n, c, *spatial) = `input_size`."""
    return _resize_backward(grad_output, input_size, _scales_of(scales, len(output_size)), _linear(align_corners))


@ops.lowering("aten::upsample_bicubic2d", static=_SCALES)
def upsample_bicubic2d(self, output_size, align_corners, **scales):
    """(n, c, h, w) -> (n, c, *output_size), by cubic convolution of the four neighbours in each dim."""
    return _resize(self, output_size, _scales_of(scales, 2), _bicubic(align_corners))


@ops.lowering("aten::upsample_bicubic2d_backward", static=_SCALES)
def upsample_bicubic2d_backward(grad_output, output_size, input_size, align_corners, **scales):
    """The gradient of `upsample_bicubic2d`, (n, c, h, w) = `input_size`."""
    return _resize_backward(grad_output, input_size, _scales_of(scales, 2), _bicubic(align_corners))


@ops.lowering("aten::_upsample_bilinear2d_aa", static=_SCALES)
def _upsample_bilinear2d_aa(self, output_size, align_corners, **scales):
    """(n, c, h, w) -> (n, c, *output_size): a triangle kernel as wide as each output, so that shrinking averages."""
    return _resize(self, output_size, _scales_of(scales, 2), _antialiased(_triangle, 1, align_corners))


@ops.lowering("aten::_upsample_bilinear2d_aa_backward", static=_SCALES)
def _upsample_bilinear2d_aa_backward(grad_output, output_size, input_size, align_corners, **scales):
    """The gradient of `_upsample_bilinear2d_aa`, (n, c, h, w) = `input_size`."""
    taps = _antialiased(_triangle, 1, align_corners)
    return _resize_backward(grad_output, input_size, _scales_of(scales, 2), taps)


@ops.lowering("aten::_upsample_bicubic2d_aa", static=_SCALES)
def _upsample_bicubic2d_aa(self, output_size, align_corners, **scales):
    """(n, c, h, w) -> (n, c, *output_size): a cubic kernel as wide as each output, so that shrinking averages."""
    return _resize(self, output_size, _scales_of(scales, 2), _antialiased(_cubic_aa, 2, align_corners))


@ops.lowering("aten::_upsample_bicubic2d_aa_backward", static=_SCALES)
def _upsample_bicubic2d_aa_backward(grad_output, output_size, input_size, align_corners, **scales):
    """The gradient of `_upsample_bicubic2d_aa`, (n, c, h, w) = `input_size`."""
    taps = _antialiased(_cubic_aa, 2, align_corners)
    return _resize_backward(grad_output, input_size, _scales_of(scales, 2), taps)


@ops.lowering("aten::_upsample_lanczos2d_aa", static=_SCALES)
def _upsample_lanczos2d_aa(self, output_size, align_corners, **scales):
    """(n, c, h, w) -> (n, c, *output_size): Lanczos' kernel of three lobes, as wide as each output."""
    return _resize(self, output_size, _scales_of(scales, 2), _antialiased(_lanczos3, 3, align_corners))


@ops.lowering("aten::_upsample_lanczos2d_aa_backward", static=_SCALES)
def _upsample_lanczos2d_aa_backward(grad_output, output_size, input_size, align_corners, **scales):
    """The gradient of `_upsample_lanczos2d_aa`, (n, c, h, w) = `input_size`."""
    taps = _antialiased(_lanczos3, 3, align_corners)
    return _resize_backward(grad_output, input_size, _scales_of(scales, 2), taps)


# -- grid_sampler ------------------------------------------------------------------------------------

_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


def _unnormalized(position: jax.Array, size: int, align_corners: bool) -> jax.Array:
    """From [-1, 1] to elements: -1 and 1 are the centres of the first and last, or, not aligned, their outer edges."""
    if align_corners:
        return (position + 1) / 2 * (size - 1)
    return ((position + 1) * size - 1) / 2


def _reflected(position: jax.Array, low: float, high: float) -> jax.Array:
    """`position` folded into [low, high], back and forth."""
    span = high - low
    if span == 0:
        return jnp.zeros_like(position)
    distance = position - low
    distance = jnp.where(distance < 0, -distance, distance)
    folds = jnp.floor(jax.lax.stop_gradient(distance) / span)
    beyond = distance - folds * span
    return jnp.where(folds % 2 == 0, beyond + low, high - beyond)


def _clipped(position: jax.Array, size: int) -> jax.Array:
    """`position` brought into [0, size - 1], NaN to 0. Its gradient is 0 where that changed it, and at the very edges."""
    clipped = jax.lax.stop_gradient(jnp.where(jnp.isnan(position), 0, jnp.clip(position, 0, size - 1)))
    return jnp.where((position > 0) & (position < size - 1), position, clipped)


def _padded(position: jax.Array, size: int, padding_mode: int, align_corners: bool) -> jax.Array:
    """`position` in elements, brought inside as `padding_mode` says; zeros leaves it outside, and NaN as it is."""
    if padding_mode == _ZEROS:
        return position
    if padding_mode == _REFLECTION:
        low, high = (0, size - 1) if align_corners else (-0.5, size - 0.5)
        position = _reflected(position, low, high)
    return _clipped(position, size)


def _sampled(image: jax.Array, places: Sequence[jax.Array]) -> jax.Array:
    """The elements of `image` (n, c, *spatial) at whole `places` (n, *out) per dim, 0 outside: (n, c, *out)."""
    spatial = image.shape[2:]
    inside = jnp.ones(places[0].shape, bool)
    for place, size in zip(places, spatial, strict=True):
        inside &= (place >= 0) & (place <= size - 1)
    indices = [jnp.where(inside, place, 0).astype(jnp.int32) for place in places]
    taken = jax.vmap(lambda plane, *at: plane[(slice(None), *at)])(image, *indices)
    return jnp.where(inside[:, None], taken, jnp.zeros((), image.dtype))


def _grid_sample(
    input: jax.Array, grid: jax.Array, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> jax.Array:
    """`input` (n, c, *spatial) sampled at `grid` (n, *out, ndim), whose last axis is x, y(, z) in [-1, 1]."""
    image, grid = opmath(input), opmath(grid)
    spatial = image.shape[2:]
    positions = [_unnormalized(grid[..., -1 - place], size, align_corners) for place, size in enumerate(spatial)]
    if interpolation_mode != _BICUBIC:
        # The bicubic mode pads each of its taps instead.
        positions = [_padded(p, size, padding_mode, align_corners) for p, size in zip(positions, spatial, strict=True)]
    if interpolation_mode == _NEAREST:
        return _sampled(image, [jnp.round(p) for p in positions])

    # Tap after tap, each gathered in the loop that adds it up: XLA on CPU is ten times slower with all of them at once.
    bicubic = interpolation_mode == _BICUBIC
    lows = [jnp.floor(jax.lax.stop_gradient(position)) for position in positions]
    total = jnp.zeros((), image.dtype)
    for offsets in itertools.product(range(-1, 3) if bicubic else range(2), repeat=len(spatial)):
        places, weight = [], jnp.ones((), image.dtype)
        for offset, low, position, size in zip(offsets, lows, positions, spatial, strict=True):
            place, distance = low + offset, position - low - offset
            if bicubic:
                weight = weight * _cubic(distance, -0.75)
                place = jnp.round(_padded(place, size, padding_mode, align_corners))
            else:
                weight = weight * (1 - distance if offset == 0 else 1 + distance)
            places.append(place)
        total = total + _sampled(image, places) * weight[:, None]
    return total


def _grid_sample_backward(
    grad_output: jax.Array,
    input: jax.Array,
    grid: jax.Array,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, jax.Array | None]:
    """Gradients of `_grid_sample` for `input` and `grid`; None where `output_mask` says it is not needed."""
    image, grid = opmath(input), opmath(grid)
    _, vjp = jax.vjp(lambda x, g: _grid_sample(x, g, interpolation_mode, padding_mode, align_corners), image, grid)
    for_input, for_grid = vjp(opmath(grad_output))
    return for_input if output_mask[0] else None, for_grid if output_mask[1] else None


@ops.lowering("aten::grid_sampler_2d", "aten::grid_sampler_3d")
def grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners):
    """`input` sampled at `grid`; 0 outside, or the edge, or the reflection (`padding_mode` 0, 1, 2).

    input:   (n, c, h, w) or (n, c, d, h, w).
    grid:    (n, *out, 2) of x, y, or (n, *out, 3) of x, y, z, from -1 to 1.
    returns: (n, c, *out); `interpolation_mode` 0 is linear, 1 nearest, 2 cubic (two dims only).
    """
    return _grid_sample(input, grid, interpolation_mode, padding_mode, align_corners)


@ops.lowering("aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward")
def grid_sampler_backward(grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask):
    """Gradients of `grid_sampler` for `input`, None if `output_mask[0]` says it is not needed, and `grid`, always, as torch's."""
    mask = output_mask[0], True
    return _grid_sample_backward(grad_output, input, grid, interpolation_mode, padding_mode, align_corners, mask)


# -- between channels and space --------------------------------------------------------------------------------------
# torch's decompositions of these give contiguous results where its kernels keep the memory format.


@ops.lowering("aten::pixel_shuffle", format_of=("self",))
def pixel_shuffle(self, upscale_factor):
    """Each r * r channels laid out as a square of pixels: (..., c * r * r, h, w) -> (..., c, h * r, w * r)."""
    *batch, channels, h, w = self.shape
    r, n = upscale_factor, len(batch)
    squares = self.reshape(*batch, channels // (r * r), r, r, h, w)
    pixels = squares.transpose(*range(n + 1), n + 3, n + 1, n + 4, n + 2)
    return pixels.reshape(*batch, channels // (r * r), h * r, w * r)


@ops.lowering("aten::channel_shuffle", "aten::native_channel_shuffle", format_of=("self",))
def channel_shuffle(self, groups):
    """Channels (n, c, *) dealt out: the first of each group, then the second of each."""
    n, channels, *space = self.shape
    return self.reshape(n, groups, channels // groups, *space).swapaxes(1, 2).reshape(self.shape)
