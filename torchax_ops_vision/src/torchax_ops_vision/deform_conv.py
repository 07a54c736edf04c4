"""Deformable convolution: each weight of the kernel reads its input at a learnt offset from its regular place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from torchax_core import OpSet, opmath
from torchax_core.errors import ShapeError

__all__ = ["ops"]

ops = OpSet("torchax_ops_vision.deform_conv", depends_on=torch.get_float32_matmul_precision)
ops.autocast("fp32", ["torchvision::deform_conv2d"])

_PRECISION = {
    "highest": jax.lax.Precision.HIGHEST,
    "high": jax.lax.Precision.HIGH,
    "medium": jax.lax.Precision.DEFAULT,
}


def _precision() -> jax.lax.Precision:
    """How exactly products are computed: what the user chose for float32, which accelerators otherwise lower."""
    return _PRECISION[torch.get_float32_matmul_precision()]


def _corner(image: jax.Array, y: jax.Array, x: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Pixels at whole positions, 0 outside: image (H*W, C), y and x (P,) int32 -> (P, C)."""
    inside = (y >= 0) & (y < size[0]) & (x >= 0) & (x < size[1])
    return jnp.where(inside[:, None], jnp.take(image, y * size[1] + x, axis=0, mode="clip"), 0)


def _bilinear(image: jax.Array, y: jax.Array, x: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Bilinear samples of an image with zeros around it: image (H*W, C), y and x (P,) -> (P, C).

    The gradient for y and x is that of the cell to the lower right of the sample, as in torchvision.
    """
    top, left = jnp.floor(y), jnp.floor(x)
    down, right = (y - top)[:, None], (x - left)[:, None]
    top, left = top.astype(jnp.int32), left.astype(jnp.int32)
    upper = (1 - right) * _corner(image, top, left, size) + right * _corner(image, top, left + 1, size)
    lower = (1 - right) * _corner(image, top + 1, left, size) + right * _corner(image, top + 1, left + 1, size)
    return (1 - down) * upper + down * lower


def _forward(input, weight, offset, mask, bias, stride, padding, dilation, groups, offset_groups, size) -> jax.Array:
    """`mask` is None without one; `size` is that of the input, (H, W)."""
    batch, channels = input.shape[:2]
    outputs, _, kernel_h, kernel_w = weight.shape
    out_h, out_w = offset.shape[-2:]
    taps, places = kernel_h * kernel_w, out_h * out_w

    # Images by offset group, channels last, so that one sample is one row.
    image = input.reshape(batch, offset_groups, channels // offset_groups, size[0] * size[1]).swapaxes(2, 3)
    shift = jnp.moveaxis(offset.reshape(batch, offset_groups, taps, 2, places), 2, 0)
    scale = None if mask is None else jnp.moveaxis(mask.reshape(batch, offset_groups, taps, places), 2, 0)
    kernel = jnp.moveaxis(weight.reshape(groups, outputs // groups, channels // groups, taps), -1, 0)
    grid_y = (jnp.arange(out_h, dtype=input.dtype) * stride[0] - padding[0])[:, None]
    grid_x = (jnp.arange(out_w, dtype=input.dtype) * stride[1] - padding[1])[None, :]
    place_y = jnp.broadcast_to(grid_y, (out_h, out_w)).reshape(places)
    place_x = jnp.broadcast_to(grid_x, (out_h, out_w)).reshape(places)
    sample = jax.vmap(jax.vmap(_bilinear, (0, 0, 0, None)), (0, 0, 0, None))

    # One tap of the kernel at a time: the samples of all taps together would be `taps` times the size of the input.
    # They are computed again in the backward rather than kept, for the same reason.
    @jax.checkpoint
    def tap(total, at):
        index, shift, scale, kernel = at
        y = place_y + (index // kernel_w * dilation[0]).astype(input.dtype) + shift[:, :, 0]
        x = place_x + (index % kernel_w * dilation[1]).astype(input.dtype) + shift[:, :, 1]
        column = sample(image, y, x, size)  # (batch, offset_groups, places, channels // offset_groups)
        if scale is not None:
            column = column * scale[..., None]
        column = jnp.swapaxes(column, 1, 2).reshape(batch, places, groups, channels // groups)
        return total + jnp.einsum("bpgc,goc->bgop", column, kernel, precision=_precision()), None

    start = jnp.zeros((batch, groups, outputs // groups, places), input.dtype)
    total, _ = jax.lax.scan(tap, start, (jnp.arange(taps, dtype=jnp.int32), shift, scale, kernel))
    return total.reshape(batch, outputs, out_h, out_w) + bias[:, None, None]


def _check(input, weight, offset, mask, bias, stride, padding, dilation, groups, offset_groups, use_mask) -> None:
    """What torchvision's kernels check and its meta kernel does not."""

    def require(condition: bool, requirement: str, got: str) -> None:
        if not condition:
            raise ShapeError(f"torchvision::deform_conv2d: {requirement}, but {got}.")

    for name, array in {"input": input, "weight": weight, "offset": offset}.items():
        require(array.ndim == 4, f"`{name}` must have 4 dimensions", f"{name}.shape={array.shape}")
    kernel = weight.shape[2:]
    require(min(kernel) > 0, "the kernel must not be empty", f"weight.shape={weight.shape}")
    require(min(stride) > 0, "`stride` must be positive", f"it is {stride}")
    require(min(padding) >= 0, "`padding` must not be negative", f"it is {padding}")
    require(min(dilation) > 0, "`dilation` must be positive", f"it is {dilation}")
    require(
        weight.shape[1] * groups == input.shape[1] and weight.shape[0] % groups == 0,
        f"`weight` must be (a multiple of {groups}, input.shape[1] / {groups}, ...) for {groups} group(s)",
        f"weight.shape={weight.shape} and input.shape={input.shape}",
    )
    require(
        input.shape[1] % offset_groups == 0,
        f"the input's channels must divide into {offset_groups} offset group(s)",
        f"input.shape={input.shape}",
    )
    out = tuple(
        (n + 2 * p - (d * (k - 1) + 1)) // s + 1
        for n, p, d, k, s in zip(input.shape[2:], padding, dilation, kernel, stride, strict=True)
    )
    require(min(out) > 0, "the kernel must fit into the padded input", f"the output's size would be {out}")
    taps = offset_groups * kernel[0] * kernel[1]
    wanted = (input.shape[0], 2 * taps, *out)
    require(offset.shape == wanted, f"`offset` must have the shape {wanted}", f"it has {offset.shape}")
    if use_mask:
        wanted = (input.shape[0], taps, *out)
        require(mask.shape == wanted, f"`mask` must have the shape {wanted}", f"it has {mask.shape}")
    require(bias.size == weight.shape[0], f"`bias` must have {weight.shape[0]} elements", f"bias.shape={bias.shape}")


@ops.lowering("torchvision::deform_conv2d")
def deform_conv2d(
    input,
    weight,
    offset,
    mask,
    bias,
    stride_h,
    stride_w,
    pad_h,
    pad_w,
    dilation_h,
    dilation_w,
    groups,
    offset_groups,
    use_mask,
):
    """Convolution whose kernel weights read the input at `offset` from their places, scaled by `mask`.

    input:   (N, C, H, W), floating.
    weight:  (O, C / groups, KH, KW).
    offset:  (N, offset_groups * KH * KW * 2, OH, OW): y, x of each kernel weight, in pixels, at each output place.
    mask:    (N, offset_groups * KH * KW, OH, OW); not read unless `use_mask`.
    bias:    (O,).
    returns: (N, O, OH, OW).
    raises:  ShapeError if the shapes do not fit together.
    source:  https://arxiv.org/abs/1811.11168 (version 1, without the mask: https://arxiv.org/abs/1703.06211).
    """
    geometry = (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w), groups, offset_groups
    _check(input, weight, offset, mask, bias, *geometry, use_mask)
    arrays = (opmath(x) for x in (input, weight, offset, mask, bias))
    input, weight, offset, mask, bias = arrays
    return _forward(input, weight, offset, mask if use_mask else None, bias, *geometry, input.shape[2:])


@ops.lowering("torchvision::_deform_conv2d_backward")
def _deform_conv2d_backward(
    grad,
    input,
    weight,
    offset,
    mask,
    bias,
    stride_h,
    stride_w,
    pad_h,
    pad_w,
    dilation_h,
    dilation_w,
    groups,
    offset_groups,
    use_mask,
):
    """The gradients of `deform_conv2d` for input, weight, offset, mask and bias, in their shapes, by jax.vjp.

    grad: (N, O, OH, OW). The mask's is 0 unless `use_mask`.
    """
    geometry = (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w), groups, offset_groups

    def forward(input, weight, offset, mask, bias):
        return _forward(input, weight, offset, mask if use_mask else None, bias, *geometry, input.shape[2:])

    _, vjp = jax.vjp(forward, *(opmath(x) for x in (input, weight, offset, mask, bias)))
    return vjp(opmath(grad))
