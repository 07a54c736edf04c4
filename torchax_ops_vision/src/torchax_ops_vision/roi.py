"""Pooling over regions of interest: roi_align, roi_pool and their position-sensitive forms, with backwards.

All of them visit a few pixels per output element. The image is laid out as rows of channels, one row per pixel, and
one loop step visits the same pixel offset of every bin of every region: a gather of rows on the way forward, a scatter
of rows on the way back. Memory stays at the size of the result however many pixels a bin covers, and the loop may run
as often as the largest region demands, which a shape could not.

The gradient is the loop with gather and scatter swapped, written out because jax.vjp cannot run a loop of unknown
length backwards.

Source: the operators are those of https://docs.pytorch.org/vision/stable/ops.html; the arithmetic, quirks included,
is that of torchvision's CPU kernels. float16 and bfloat16 compute in float32, also where those kernels do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from torchax_core import OpSet, opmath

__all__ = ["ops"]

ops = OpSet("torchax_ops_vision.roi")
# Features come in half types there, regions in float32: torchvision's ops want one dtype, and this one.
ops.autocast("fp32", [f"torchvision::{_op}" for _op in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool")])


class _Visits(NamedTuple):
    """Which rows of the image each bin visits.

    steps: how many visits the busiest bin makes; an array if the regions decide.
    at:    `at(i)` gives pairs (row, weight), both (K, pooled_height, pooled_width): the rows of visit `i` and what they
           count for; the weight is 0 in bins that are done by then.
    """

    steps: int | jax.Array
    at: Callable[[jax.Array], list[tuple[jax.Array, jax.Array]]]


def _gather(image_rows: jax.Array, visits: _Visits, bins: tuple[int, ...]) -> jax.Array:
    """The weighted sum of the rows each bin visits: (rows, C) -> (*bins, C)."""

    def visit(i, total):
        for row, weight in visits.at(i):
            total = total + weight[..., None] * jnp.take(image_rows, row, axis=0, mode="clip")
        return total

    return jax.lax.fori_loop(0, visits.steps, visit, jnp.zeros((*bins, image_rows.shape[1]), image_rows.dtype))


def _scatter(grad_bins: jax.Array, visits: _Visits, rows: int) -> jax.Array:
    """The transpose of `_gather`: (*bins, C) -> (rows, C)."""

    def visit(i, total):
        for row, weight in visits.at(i):
            total = total.at[row].add(weight[..., None] * grad_bins)
        return total

    return jax.lax.fori_loop(0, visits.steps, visit, jnp.zeros((rows, grad_bins.shape[-1]), grad_bins.dtype))


def _divide(x: jax.Array, n: int) -> jax.Array:
    """`x / n`, rounded once.

    XLA makes a division by a constant a product with its reciprocal, which is off by one ulp for every third integer;
    the floor or ceil that follows here would be off by one pixel. With `0 * x` the divisor is no constant.
    """
    return x / (n + 0 * x)


def _rounded(x: jax.Array) -> jax.Array:
    """C's `round`: halves away from zero."""
    return jax.lax.round(x, jax.lax.RoundingMethod.AWAY_FROM_ZERO).astype(jnp.int32)


# -- the image as rows ---------------------------------------------------------------------------------------------


def _to_rows(image: jax.Array) -> jax.Array:
    """(N, C, H, W) -> (N*H*W, C)."""
    return jnp.moveaxis(image, 1, -1).reshape(-1, image.shape[1])


def _from_rows(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """(N*H*W, C) -> (N, C, H, W), the given shape."""
    n, c, h, w = shape
    return jnp.moveaxis(rows.reshape(n, h, w, c), -1, 1)


def _to_bin_rows(image: jax.Array, pooled: tuple[int, int]) -> jax.Array:
    """(N, C*PH*PW, H, W) -> (N*H*W*PH*PW, C): position-sensitive pooling reads other channels in every bin."""
    n, channels, h, w = image.shape
    split = image.reshape(n, channels // (pooled[0] * pooled[1]), *pooled, h, w)
    return jnp.transpose(split, (0, 4, 5, 2, 3, 1)).reshape(-1, split.shape[1])


def _from_bin_rows(rows: jax.Array, shape: tuple[int, ...], pooled: tuple[int, int]) -> jax.Array:
    """(N*H*W*PH*PW, C) -> (N, C*PH*PW, H, W), the given shape."""
    n, channels, h, w = shape
    split = rows.reshape(n, h, w, *pooled, channels // (pooled[0] * pooled[1]))
    return jnp.transpose(split, (0, 5, 3, 4, 1, 2)).reshape(shape)


def _row_numbers(batch, y, x, size: tuple[int, int], pooled: tuple[int, int] | None) -> jax.Array:
    """The row of pixel (y, x): batch (K,), y (K, PH), x (K, PW) -> (K, PH, PW). `pooled` if there is a row per bin."""
    height, width = size
    pixel = (batch[:, None, None] * height + y[:, :, None]) * width + x[:, None, :]
    if pooled is None:
        return pixel
    return pixel * (pooled[0] * pooled[1]) + jnp.arange(pooled[0] * pooled[1], dtype=pixel.dtype).reshape(pooled)


# -- roi_align: bilinear samples -----------------------------------------------------------------------------------


class _Axis(NamedTuple):
    """Where the bins of every region are sampled along one axis, `length` pixels long.

    Sample `i` of bin `p` of region `k` lies at `start[k, p] + (i + 0.5) * bin_size[k] / count[k]`, for i < count[k].
    """

    length: int
    start: jax.Array  # (K, P)
    bin_size: jax.Array  # (K, 1)
    count: jax.Array  # (K, 1), int32
    steps: int | jax.Array  # the largest count


def _axis(low: jax.Array, high: jax.Array, pooled: int, length: int, sampling_ratio: int, min_extent) -> _Axis:
    extent = high - low
    if min_extent is not None:
        extent = jnp.maximum(extent, min_extent)
    bin_size = _divide(extent, pooled)[:, None]
    start = low[:, None] + jnp.arange(pooled, dtype=low.dtype) * bin_size
    if sampling_ratio > 0:
        return _Axis(length, start, bin_size, jnp.full(bin_size.shape, sampling_ratio, jnp.int32), sampling_ratio)
    # A region that is infinite, NaN or turned inside out has no samples.
    count = jnp.where(jnp.isfinite(bin_size), jnp.ceil(bin_size), -1).astype(jnp.int32)
    return _Axis(length, start, bin_size, count, jnp.max(count, initial=0))


def _sample(axis: _Axis, i: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Sample `i` of each bin: the pixels below and above it, with their bilinear weights; all (K, P)."""
    # Bins that are done repeat their last sample, with weight 0: whatever is in the pixels of others does not matter.
    sample = jnp.minimum(i, axis.count - 1).astype(axis.start.dtype)
    at = axis.start + (sample + 0.5) * axis.bin_size / axis.count.astype(axis.start.dtype)
    inside = (at >= -1) & (at <= axis.length)  # False for NaN
    at = jnp.where(inside, jnp.maximum(at, 0), 0)
    last = axis.length - 1
    low = jnp.minimum(jnp.floor(at).astype(jnp.int32), last)
    above = jnp.where(low == last, 0, at - low.astype(at.dtype))
    counts = inside & (i < axis.count)
    return [(low, jnp.where(counts, 1 - above, 0)), (jnp.minimum(low + 1, last), jnp.where(counts, above, 0))]


def _align_visits(rois, spatial_scale, pooled, size, sampling_ratio, offset, min_extent, per_bin=False):
    """The samples of roi_align, and how many each bin has: (K, 1, 1), negative or 0 for a region without."""
    scaled = rois[:, 1:] * spatial_scale.astype(rois.dtype) - offset
    x = _axis(scaled[:, 0], scaled[:, 2], pooled[1], size[1], sampling_ratio, min_extent)
    y = _axis(scaled[:, 1], scaled[:, 3], pooled[0], size[0], sampling_ratio, min_extent)
    batch = rois[:, 0].astype(jnp.int32)

    def at(i):
        return [
            (
                _row_numbers(batch, y_pixel, x_pixel, size, pooled if per_bin else None),
                y_weight[:, :, None] * x_weight[:, None, :],
            )
            for y_pixel, y_weight in _sample(y, i // x.steps)
            for x_pixel, x_weight in _sample(x, i % x.steps)
        ]

    return _Visits(y.steps * x.steps, at), (y.count * x.count)[:, :, None]


@ops.lowering("torchvision::roi_align")
def roi_align(input, rois, spatial_scale, pooled_height, pooled_width, sampling_ratio, aligned):
    """The mean of bilinear samples in each bin of each region.

    input:          (N, C, H, W), floating.
    rois:           (K, 5): the image's index in the batch, then x1, y1, x2, y2 in units of 1 / `spatial_scale` pixels.
    sampling_ratio: samples per bin and axis; if <= 0, as many as the bin has pixels, rounded up, region by region.
    aligned:        shift by half a pixel; otherwise regions are at least one pixel long (the legacy form).
    returns:        (K, C, pooled_height, pooled_width).
    """
    bins = (rois.shape[0], pooled_height, pooled_width)
    if 0 in (*bins, input.shape[1]):
        return jnp.zeros((bins[0], input.shape[1], *bins[1:]), input.dtype)
    image, rois = opmath(input), opmath(rois)
    offset, min_extent = (0.5, None) if aligned else (0.0, 1.0)
    visits, count = _align_visits(rois, spatial_scale, bins[1:], input.shape[2:], sampling_ratio, offset, min_extent)
    total = _gather(_to_rows(image), visits, bins)
    return jnp.moveaxis(total / jnp.maximum(count, 1)[..., None], -1, 1)


@ops.lowering("torchvision::_roi_align_backward")
def _roi_align_backward(
    grad, rois, spatial_scale, pooled_height, pooled_width, batch_size, channels, height, width, sampling_ratio, aligned
):
    """The gradient of `roi_align` for its input: grad (K, C, PH, PW) -> (batch_size, channels, height, width)."""
    shape = (batch_size, channels, height, width)
    if 0 in grad.shape:
        return jnp.zeros(shape, grad.dtype)
    grad, rois = opmath(grad), opmath(rois)
    offset, min_extent = (0.5, None) if aligned else (0.0, 1.0)
    visits, count = _align_visits(
        rois, spatial_scale, (pooled_height, pooled_width), shape[2:], sampling_ratio, offset, min_extent
    )
    grad_bins = jnp.moveaxis(grad, 1, -1) / jnp.maximum(count, 1)[..., None]
    return _from_rows(_scatter(grad_bins, visits, batch_size * height * width), shape)


@ops.lowering("torchvision::ps_roi_align")
def ps_roi_align(input, rois, spatial_scale, pooled_height, pooled_width, sampling_ratio):
    """Position-sensitive roi_align: bin (i, j) of output channel `c` reads input channel (c*PH + i)*PW + j.

    input:   (N, C*PH*PW, H, W), floating; PH, PW are `pooled_height`, `pooled_width`.
    rois:    (K, 5), as in `roi_align`, always shifted by half a pixel.
    returns: (K, C, PH, PW), NaN where a region has no sample as in torchvision; and the input channel of each element,
             int32, in the same shape.
    """
    pooled = (pooled_height, pooled_width)
    regions, channels = rois.shape[0], input.shape[1] // (pooled_height * pooled_width)
    mapping = _channel_mapping(regions, channels, pooled)
    if mapping.size == 0:
        return jnp.zeros(mapping.shape, input.dtype), mapping
    image, rois = opmath(input), opmath(rois)
    visits, count = _align_visits(rois, spatial_scale, pooled, input.shape[2:], sampling_ratio, 0.5, None, per_bin=True)
    total = _gather(_to_bin_rows(image, pooled), visits, (regions, *pooled))
    return jnp.moveaxis(total / count[..., None], -1, 1), mapping


@ops.lowering("torchvision::_ps_roi_align_backward")
def _ps_roi_align_backward(
    grad,
    rois,
    channel_mapping,
    spatial_scale,
    pooled_height,
    pooled_width,
    sampling_ratio,
    batch_size,
    channels,
    height,
    width,
):
    """The gradient of `ps_roi_align` for its input: grad (K, C, PH, PW) -> (batch_size, channels, height, width).

    `channel_mapping` is what the forward returned, which follows from the shapes alone: it is not read.
    """
    shape, pooled = (batch_size, channels, height, width), (pooled_height, pooled_width)
    if 0 in grad.shape:
        return jnp.zeros(shape, grad.dtype)
    grad, rois = opmath(grad), opmath(rois)
    visits, count = _align_visits(rois, spatial_scale, pooled, shape[2:], sampling_ratio, 0.5, None, per_bin=True)
    # A region without samples has no visits either: any divisor will do, if it makes no NaN.
    grad_bins = jnp.moveaxis(grad, 1, -1) / jnp.maximum(count, 1)[..., None]
    rows = _scatter(grad_bins, visits, batch_size * height * width * pooled_height * pooled_width)
    return _from_bin_rows(rows, shape, pooled)


def _channel_mapping(regions: int, channels: int, pooled: tuple[int, int]) -> jax.Array:
    per_region = jnp.arange(channels * pooled[0] * pooled[1], dtype=jnp.int32).reshape(1, channels, *pooled)
    return jnp.broadcast_to(per_region, (regions, channels, *pooled))


# -- roi_pool: whole pixels ----------------------------------------------------------------------------------------


class _Range(NamedTuple):
    """The pixels of each bin along one axis: start <= pixel < end, both (K, P), int32."""

    start: jax.Array
    end: jax.Array


def _range(low: jax.Array, extent: jax.Array, pooled: int, last: int, dtype) -> _Range:
    """The bins of regions that start at pixel `low` and are `extent` pixels long, clipped to 0..last."""
    bin_size = _divide(extent.astype(dtype), pooled)[:, None]
    bins = jnp.arange(pooled, dtype=dtype)
    start = jnp.floor(bins * bin_size).astype(jnp.int32) + low[:, None]
    end = jnp.ceil((bins + 1) * bin_size).astype(jnp.int32) + low[:, None]
    return _Range(jnp.clip(start, 0, last), jnp.clip(end, 0, last))


def _pool_ranges(rois, spatial_scale, pooled, last, inclusive: int) -> tuple[_Range, _Range]:
    """The pixel ranges of all bins, (y, x). `inclusive` is 1 where a region's end pixel belongs to it."""
    corner = _rounded(rois[:, 1:] * spatial_scale.astype(rois.dtype))
    extent = jnp.maximum(corner[:, 2:] - corner[:, :2] + inclusive, 1)
    y = _range(corner[:, 1], extent[:, 1], pooled[0], last[0], rois.dtype)
    x = _range(corner[:, 0], extent[:, 0], pooled[1], last[1], rois.dtype)
    return y, x


def _pool_visits(rois, y: _Range, x: _Range, size, per_bin: tuple[int, int] | None, dtype) -> _Visits:
    """All pixels of all bins, each with weight 1, in row-major order."""
    batch = rois[:, 0].astype(jnp.int32)
    y_steps, x_steps = jnp.max(y.end - y.start, initial=0), jnp.max(x.end - x.start, initial=0)

    def at(i):
        y_pixel, x_pixel = y.start + i // x_steps, x.start + i % x_steps
        counts = (y_pixel < y.end)[:, :, None] & (x_pixel < x.end)[:, None, :]
        # Bins that are done repeat their last pixel, so that a NaN elsewhere does not reach them (0 * NaN is NaN).
        row = _row_numbers(batch, jnp.minimum(y_pixel, y.end - 1), jnp.minimum(x_pixel, x.end - 1), size, per_bin)
        return [(row, counts.astype(dtype))]

    return _Visits(y_steps * x_steps, at)


@ops.lowering("torchvision::roi_pool")
def roi_pool(input, rois, spatial_scale, pooled_height, pooled_width):
    """The largest pixel in each bin of each region.

    input:   (N, C, H, W), floating.
    rois:    (K, 5): the image's index in the batch, then x1, y1, x2, y2, rounded to pixels after scaling.
    returns: (K, C, PH, PW), 0 in an empty bin; and where it was found, `y * W + x`, int32, the first of equals; -1 if
             nowhere.
    """
    pooled, size = (pooled_height, pooled_width), input.shape[2:]
    shape = (rois.shape[0], input.shape[1], *pooled)
    if 0 in shape:
        return jnp.zeros(shape, input.dtype), jnp.zeros(shape, jnp.int32)
    rows, rois = _to_rows(opmath(input)), opmath(rois)
    y, x = _pool_ranges(rois, spatial_scale, pooled, last=size, inclusive=1)
    visits = _pool_visits(rois, y, x, size, None, rows.dtype)

    def visit(i, best):
        value, where = best
        ((row, weight),) = visits.at(i)
        pixel = jnp.take(rows, row, axis=0, mode="clip")
        better = (weight[..., None] > 0) & (pixel > value)
        position = (row % (size[0] * size[1]))[..., None]
        return jnp.where(better, pixel, value), jnp.where(better, position, where)

    empty = ((y.end <= y.start)[:, :, None] | (x.end <= x.start)[:, None, :])[..., None]
    # torchvision starts from the lowest float32 whatever the dtype, so that is what a bin of NaN or -inf gives.
    lowest = jnp.where(empty, 0, float(jnp.finfo(jnp.float32).min)).astype(rows.dtype)
    by_bin = (shape[0], *pooled, shape[1])
    start = jnp.broadcast_to(lowest, by_bin), jnp.full(by_bin, -1, jnp.int32)
    value, where = jax.lax.fori_loop(0, visits.steps, visit, start)
    return jnp.moveaxis(value, -1, 1), jnp.moveaxis(where, -1, 1)


@ops.lowering("torchvision::_roi_pool_backward")
def _roi_pool_backward(
    grad, rois, argmax, spatial_scale, pooled_height, pooled_width, batch_size, channels, height, width
):
    """The gradient of `roi_pool` for its input: each bin's goes to the pixel it took, `argmax`."""
    shape = (batch_size, channels, height, width)
    if 0 in grad.shape:
        return jnp.zeros(shape, grad.dtype)
    image = rois[:, 0].astype(jnp.int32)[:, None] * channels + jnp.arange(channels, dtype=jnp.int32)
    position = image[:, :, None, None] * (height * width) + argmax
    grad_input = jnp.zeros(batch_size * channels * height * width, opmath(grad).dtype)
    nowhere = grad_input.size
    position = jnp.where(argmax < 0, nowhere, position)
    return grad_input.at[position].add(opmath(grad), mode="drop").reshape(shape)


@ops.lowering("torchvision::ps_roi_pool")
def ps_roi_pool(input, rois, spatial_scale, pooled_height, pooled_width):
    """Position-sensitive roi_pool: the mean of the pixels in each bin, read from the bin's own input channel.

    input:   (N, C*PH*PW, H, W), floating; bin (i, j) of output channel `c` reads channel (c*PH + i)*PW + j.
    rois:    (K, 5), as in `roi_pool`.
    returns: (K, C, PH, PW), 0 in an empty bin; and the input channel of each element, int32, in the same shape.
    """
    pooled, size = (pooled_height, pooled_width), input.shape[2:]
    regions, channels = rois.shape[0], input.shape[1] // (pooled_height * pooled_width)
    mapping = _channel_mapping(regions, channels, pooled)
    if mapping.size == 0:
        return jnp.zeros(mapping.shape, input.dtype), mapping
    image, rois = opmath(input), opmath(rois)
    # torchvision clips to size - 1 here and to size in the backward, so the last row and column are never pooled.
    y, x = _pool_ranges(rois, spatial_scale, pooled, last=(size[0] - 1, size[1] - 1), inclusive=0)
    total = _gather(
        _to_bin_rows(image, pooled), _pool_visits(rois, y, x, size, pooled, image.dtype), (regions, *pooled)
    )
    area = _bin_area(y, x)
    return jnp.moveaxis(jnp.where(area > 0, total / jnp.maximum(area, 1), 0), -1, 1), mapping


@ops.lowering("torchvision::_ps_roi_pool_backward")
def _ps_roi_pool_backward(
    grad, rois, channel_mapping, spatial_scale, pooled_height, pooled_width, batch_size, channels, height, width
):
    """The gradient of `ps_roi_pool` for its input, over bins that reach the last row and column as torchvision's do.

    `channel_mapping` is what the forward returned, which follows from the shapes alone: it is not read.
    """
    shape, pooled, size = (batch_size, channels, height, width), (pooled_height, pooled_width), (height, width)
    if 0 in grad.shape:
        return jnp.zeros(shape, grad.dtype)
    grad, rois = opmath(grad), opmath(rois)
    y, x = _pool_ranges(rois, spatial_scale, pooled, last=size, inclusive=0)
    grad_bins = jnp.moveaxis(grad, 1, -1) / jnp.maximum(_bin_area(y, x), 1)
    visits = _pool_visits(rois, y, x, size, pooled, grad.dtype)
    rows = _scatter(grad_bins, visits, batch_size * height * width * pooled_height * pooled_width)
    return _from_bin_rows(rows, shape, pooled)


def _bin_area(y: _Range, x: _Range) -> jax.Array:
    """Pixels in each bin, (K, PH, PW, 1); 0 or less if empty."""
    height, width = jnp.maximum(y.end - y.start, 0), jnp.maximum(x.end - x.start, 0)
    return (height[:, :, None] * width[:, None, :])[..., None]
