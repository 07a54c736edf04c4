"""Convolutions over one to three spatial dims, their gradients, and the sliding windows of unfold and fold.

All `conv*d` functions are composite and arrive as `aten::convolution`; its gradients come from transposing the very
function that computes it, so forward and backward cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import torch

from torchax_core.opset import OpSet
from torchax_core.promotion import opmath
from torchax_ops_aten.matmul import precision_for

ops = OpSet("torchax_ops_aten.conv", depends_on=torch.get_float32_matmul_precision)

_SPATIAL = {1: "W", 2: "HW", 3: "DHW"}


def per_dim(value: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """`value` for each of `ndim` spatial dims; torch lets one number stand for all."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * ndim if len(values) == 1 else values


def _conv(
    input: jax.Array,
    weight: jax.Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    """The convolution of a batched `input` (n, c, *spatial), without bias."""
    ndim = weight.ndim - 2
    stride, padding = per_dim(stride, ndim), per_dim(padding, ndim)
    dilation, output_padding = per_dim(dilation, ndim), per_dim(output_padding, ndim)
    lhs_dilation: Sequence[int] = (1,) * ndim
    if transposed:
        # The gradient of a convolution, as a convolution: the input spread by `stride`, the kernel turned round, with
        # its in and out channels exchanged within each group.
        per_group = (groups, weight.shape[0] // groups, *weight.shape[1:])
        weight = jnp.flip(weight, range(2, 2 + ndim)).reshape(per_group).swapaxes(1, 2)
        weight = weight.reshape(-1, *weight.shape[2:])
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        pads = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)]
        lhs_dilation, stride = stride, (1,) * ndim
    else:
        pads = [(p, p) for p in padding]
    spatial = _SPATIAL[ndim]
    return jax.lax.conv_general_dilated(
        input,
        weight,
        window_strides=stride,
        padding=pads,
        lhs_dilation=lhs_dilation,
        rhs_dilation=dilation,
        dimension_numbers=("NC" + spatial, "OI" + spatial, "NC" + spatial),
        feature_group_count=groups,
        precision=precision_for(input.dtype),
    )


def _check(
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], output_padding: Sequence[int]
) -> None:
    """torch's checks of its parameters, in its words; its meta kernel makes them for some numbers of dims only."""
    torch._check(min(padding, default=0) >= 0, lambda: "negative padding is not supported")
    torch._check(min(output_padding, default=0) >= 0, lambda: "negative output_padding is not supported")
    torch._check(min(stride, default=1) > 0, lambda: "non-positive stride is not supported")
    torch._check(min(dilation, default=1) > 0, lambda: "dilation should be greater than zero")


@ops.lowering("aten::convolution", format_of=("input", "weight"))
def convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """Cross-correlation of `input` with `weight`, or, `transposed`, the gradient of one.

    input:   (n, c_in, *spatial) or (c_in, *spatial), one to three spatial dims.
    weight:  (c_out, c_in // groups, *kernel); transposed: (c_in, c_out // groups, *kernel).
    bias:    (c_out,) or None.
    returns: (n, c_out, *spatial_out).
    """
    _check(stride, padding, dilation, output_padding)
    batched = input if input.ndim == weight.ndim else input[None]
    out = _conv(batched, weight, stride, padding, dilation, transposed, output_padding, groups)
    if bias is not None:
        out = opmath(out) + opmath(bias).reshape(-1, *(1,) * (weight.ndim - 2))
    return out if input.ndim == weight.ndim else out[0]


@ops.lowering("aten::convolution_backward")
def convolution_backward(
    grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
):
    """Gradients of `convolution` for `input`, `weight` and `bias`; None where `output_mask` says it is not needed."""
    batched = input.ndim == weight.ndim
    if not batched:
        grad_output, input = grad_output[None], input[None]
    conv = partial(
        _conv,
        stride=stride,
        padding=padding,
        dilation=dilation,
        transposed=transposed,
        output_padding=output_padding,
        groups=groups,
    )
    need_input, need_weight, need_bias = output_mask
    grad_input = grad_weight = grad_bias = None
    if need_input:
        grad_input = _transposed(lambda x: conv(x, weight), input, grad_output)
        grad_input = grad_input if batched else grad_input[0]
    if need_weight:
        grad_weight = _transposed(lambda w: conv(input, w), weight, grad_output)
    if need_bias:
        grad_bias = opmath(grad_output).sum((0, *range(2, grad_output.ndim)))
    return grad_input, grad_weight, grad_bias


def _transposed(linear: Callable[[jax.Array], jax.Array], x: jax.Array, grad: jax.Array) -> jax.Array:
    """The transpose of a function linear in `x`, at `grad`. Complex: torch's gradients are conjugate, JAX's are not."""
    if jnp.iscomplexobj(x):
        return jnp.conj(jax.linear_transpose(linear, x)(jnp.conj(grad))[0])
    return jax.linear_transpose(linear, x)(grad)[0]


@ops.lowering("aten::conv_tbc")
def conv_tbc(self, weight, bias, pad=0):
    """One-dimensional convolution with time first: (t, b, c_in) * (k, c_in, c_out) -> (t + 2 pad - k + 1, b, c_out)."""
    out = jax.lax.conv_general_dilated(
        self,
        weight,
        window_strides=(1,),
        padding=[(pad, pad)],
        dimension_numbers=("WNC", "WIO", "WNC"),
        precision=precision_for(self.dtype),
    )
    return opmath(out) + opmath(bias)


# -- sliding windows ---------------------------------------------------------------------------------


def _window_positions(size: int, kernel: int, dilation: int, padding: int, stride: int) -> jax.Array:
    """Positions in the padded input that each window covers: (kernel, number of windows)."""
    count = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    return jnp.arange(kernel)[:, None] * dilation + jnp.arange(count)[None, :] * stride


def _im2col(x: jax.Array, kernel_size, dilation, padding, stride) -> jax.Array:
    """(n, c, h, w) -> (n, c * kh * kw, oh * ow). Rows are gathered, then columns: two cheap steps, and so reversed."""
    n, c, h, w = x.shape
    rows = _window_positions(h, kernel_size[0], dilation[0], padding[0], stride[0])
    columns = _window_positions(w, kernel_size[1], dilation[1], padding[1], stride[1])
    padded = jnp.pad(x, [(0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2])
    windows = padded[:, :, rows][..., columns]  # (n, c, kh, oh, kw, ow)
    return windows.swapaxes(3, 4).reshape(n, c * rows.shape[0] * columns.shape[0], rows.shape[1] * columns.shape[1])


@ops.lowering("aten::im2col")
def im2col(self, kernel_size, dilation, padding, stride):
    """Sliding windows as columns (`F.unfold`): (n, c, h, w) -> (n, c * kh * kw, windows), or the same without n."""
    batched = self if self.ndim == 4 else self[None]
    out = _im2col(batched, *(per_dim(v, 2) for v in (kernel_size, dilation, padding, stride)))
    return out if self.ndim == 4 else out[0]


@ops.lowering("aten::col2im")
def col2im(self, output_size, kernel_size, dilation, padding, stride):
    """Columns summed back to where they came from (`F.fold`): the transpose of `im2col`."""
    batched = opmath(self if self.ndim == 3 else self[None])
    kernel_size, dilation, padding, stride = (per_dim(v, 2) for v in (kernel_size, dilation, padding, stride))
    channels = batched.shape[1] // (kernel_size[0] * kernel_size[1])
    image = jax.ShapeDtypeStruct((batched.shape[0], channels, *output_size), batched.dtype)
    unfold = partial(_im2col, kernel_size=kernel_size, dilation=dilation, padding=padding, stride=stride)
    (out,) = jax.linear_transpose(unfold, image)(batched)
    return out if self.ndim == 3 else out[0]
