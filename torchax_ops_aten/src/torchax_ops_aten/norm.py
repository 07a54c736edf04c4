"""Normalization: batch, layer, group and RMS norm, weight norm and renorm, with their backwards.

Statistics are computed in two passes (mean, then the mean squared deviation), as stable as torch's Welford sums, and in
float32 for half types. Saved values carry torch's meaning: `save_invstd` and `rstd` are 1 / sqrt(variance + eps).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from torchax_core.opset import OpSet
from torchax_core.promotion import opmath
from torchax_ops_aten._strides import in_format_of
from torchax_ops_aten.reductions import linalg_vector_norm

ops = OpSet("torchax_ops_aten.norm")

aten = torch.ops.aten


def _optional(x: jax.Array | None, shape: Sequence[int]) -> jax.Array | None:
    """`x` in its compute type and in `shape`, or None."""
    return None if x is None else opmath(x).reshape(shape)


def _affine(x: jax.Array, weight: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    """`x * weight + bias`, either of which may be missing."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _centered(x: jax.Array, axes: Sequence[int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean, `x` less its mean, and the biased variance over `axes`, which are kept with size 1."""
    mean = x.mean(axes, keepdims=True)
    centered = x - mean
    return mean, centered, (centered * centered).mean(axes, keepdims=True)


# -- batch norm --------------------------------------------------------------------------------------


def _batch_axes(x: jax.Array) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """All axes but the channels', and the shape in which a per-channel vector broadcasts against `x`."""
    return (0, *range(2, x.ndim)), (1, -1, *(1,) * (x.ndim - 2))


def native_batch_norm_stats(input, weight, bias, running_mean, running_var, training, momentum, eps):
    """Batch norm and what it does to the running statistics, as values.

    input:   (n, c, ...); the others (c,) or None.
    returns: out like `input`; save_mean, save_invstd: (c,), of what it normalized by, as on cuda (on CPU torch gives
             empty ones when not training); the new running_mean and running_var: (c,), or None where there was none.
    """
    axes, per_channel = _batch_axes(input)
    x = opmath(input)
    new_mean, new_var = running_mean, running_var
    if training:
        mean, centered, variance = _centered(x, axes)
        invstd = jax.lax.rsqrt(variance + eps)
        out = _affine(centered * invstd, _optional(weight, per_channel), _optional(bias, per_channel))
        save_mean, save_invstd = mean.reshape(-1), invstd.reshape(-1)
        count = x.size // max(x.shape[1], 1)
        if running_mean is not None:
            new_mean = momentum * save_mean + (1 - momentum) * opmath(running_mean)
        if running_var is not None:
            # The running variance is the unbiased one, unlike the variance that normalizes.
            unbiased = variance.reshape(-1) * count / (count - 1)
            new_var = momentum * unbiased + (1 - momentum) * opmath(running_var)
    else:
        save_mean, save_invstd = opmath(running_mean), jax.lax.rsqrt(opmath(running_var) + eps)
        # as on CPU: one scale and one shift of each channel
        scale = save_invstd if weight is None else save_invstd * opmath(weight)
        shift = -save_mean * scale if bias is None else opmath(bias) - save_mean * scale
        out = x * scale.reshape(per_channel) + shift.reshape(per_channel)
    return out, save_mean, save_invstd, new_mean, new_var


@ops.decomposition("aten::native_batch_norm", whole=False)
def native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps):
    """What `F.batch_norm` arrives as. It writes the running statistics though its schema does not say so, hence torch
    code: the op called here says so, and the core derives the write."""
    torch._check_value(
        (running_mean is None) == (running_var is None),
        lambda: "running_mean and running_var must either both be None or neither be None",
    )
    if not training:
        return aten._native_batch_norm_legit_no_training(input, weight, bias, running_mean, running_var, momentum, eps)
    if running_mean is None and running_var is None:
        return aten._native_batch_norm_legit.no_stats(input, weight, bias, True, momentum, eps)
    return aten._native_batch_norm_legit(input, weight, bias, running_mean, running_var, True, momentum, eps)


@ops.lowering("aten::_native_batch_norm_legit_functional")
def _native_batch_norm_legit_functional(input, weight, bias, running_mean, running_var, training, momentum, eps):
    """Batch norm returning the new running statistics; see `native_batch_norm_stats`."""
    return native_batch_norm_stats(input, weight, bias, running_mean, running_var, training, momentum, eps)


@ops.lowering("aten::_native_batch_norm_legit.no_stats")
def _native_batch_norm_legit_no_stats(input, weight, bias, training, momentum, eps):
    """Batch norm by the batch's own statistics, whatever `training`: there are no others."""
    return native_batch_norm_stats(input, weight, bias, None, None, True, momentum, eps)[:3]


@ops.lowering("aten::_native_batch_norm_legit_no_training")
def _native_batch_norm_legit_no_training(input, weight, bias, running_mean, running_var, momentum, eps):
    """Batch norm by the running statistics."""
    return native_batch_norm_stats(input, weight, bias, running_mean, running_var, False, momentum, eps)[:3]


@ops.lowering("aten::_batch_norm_with_update_functional")
def _batch_norm_with_update_functional(input, weight, bias, running_mean, running_var, momentum, eps):
    """Batch norm in training, with an empty uint8 `reserve` (cuDNN's workspace) before the new running statistics."""
    *saved, new_mean, new_var = native_batch_norm_stats(
        input, weight, bias, running_mean, running_var, True, momentum, eps
    )
    return *saved, jnp.zeros((0,), jnp.uint8), new_mean, new_var


@ops.lowering("aten::_batch_norm_no_update")
def _batch_norm_no_update(input, weight, bias, running_mean, running_var, momentum, eps):
    """Batch norm by the running statistics, with an empty uint8 `reserve`."""
    saved = native_batch_norm_stats(input, weight, bias, running_mean, running_var, False, momentum, eps)[:3]
    return *saved, jnp.zeros((0,), jnp.uint8)


@ops.lowering("aten::native_batch_norm_backward")
def native_batch_norm_backward(
    grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
):
    """Gradients of batch norm for `input`, `weight` and `bias`; None where `output_mask` says it is not needed.

    In training the mean and variance depend on `input`:
    grad_input = weight * invstd * (grad - mean(grad) - x_hat * mean(grad * x_hat)).
    """
    axes, per_channel = _batch_axes(input)
    x, grad = opmath(input), opmath(grad_out)
    if train:
        mean, invstd = _optional(save_mean, per_channel), _optional(save_invstd, per_channel)
    else:
        mean = _optional(running_mean, per_channel)
        invstd = jax.lax.rsqrt(opmath(running_var) + eps).reshape(per_channel)
    normalized = (x - mean) * invstd
    grad_bias = grad.sum(axes, keepdims=True)
    grad_weight = (grad * normalized).sum(axes, keepdims=True)
    grad_input = grad
    if train:
        count = x.size // max(x.shape[1], 1)
        grad_input = grad - (grad_bias + normalized * grad_weight) / count
    grad_input = grad_input * _affine(invstd, _optional(weight, per_channel), None)
    grads = grad_input, grad_weight.reshape(-1), grad_bias.reshape(-1)
    return tuple(g if wanted else None for g, wanted in zip(grads, output_mask, strict=True))


@ops.lowering("aten::batch_norm_backward")
def batch_norm_backward(
    grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask, reserve
):
    """Gradients of `_batch_norm_with_update` (`update`) and `_batch_norm_no_update`."""
    return native_batch_norm_backward(
        grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask
    )


# -- the parts of batch norm, as nn.SyncBatchNorm calls them between processes -----------------------


@ops.lowering("aten::batch_norm_stats")
def batch_norm_stats(input, eps):
    """This process's mean and 1 / sqrt(variance + eps) per channel: (c,) each."""
    mean, _, variance = _centered(opmath(input), _batch_axes(input)[0])
    return mean.reshape(-1), jax.lax.rsqrt(variance + eps).reshape(-1)


@ops.decomposition("aten::batch_norm_gather_stats_with_counts", whole=False)
def batch_norm_gather_stats_with_counts(input, mean, invstd, running_mean, running_var, momentum, eps, counts):
    """The statistics of all processes from each one's (processes, c) and its number of elements (processes,).

    Writes the running statistics, though its schema does not say so.
    """
    counts = counts.to(mean.dtype).reshape(-1, 1)
    total = counts.sum()
    overall = (mean * counts).sum(0) / total
    deviations = invstd.pow(-2) - eps + (mean - overall).square()
    variance = (deviations * counts).sum(0) / total
    if running_mean is not None:
        running_mean.lerp_(overall.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((variance * total / (total - 1)).to(running_var.dtype), momentum)
    return overall, (variance + eps).rsqrt()


@ops.lowering("aten::batch_norm_elemt")
def batch_norm_elemt(input, weight, bias, mean, invstd, eps):
    """`input` normalized by given statistics (c,), then scaled and shifted."""
    _, per_channel = _batch_axes(input)
    normalized = (opmath(input) - _optional(mean, per_channel)) * _optional(invstd, per_channel)
    result = _affine(normalized, _optional(weight, per_channel), _optional(bias, per_channel))
    return result.astype(input.dtype)


@ops.lowering("aten::batch_norm_backward_reduce")
def batch_norm_backward_reduce(grad_out, input, mean, invstd, weight, input_g, weight_g, bias_g):
    """This process's sums of the gradient, and of it times `input - mean`, with the gradients of `weight` and `bias`.

    returns: four of (c,), the last two in the weight's dtype; None for those not wanted (`input_g`: the first two).
    """
    axes, per_channel = _batch_axes(input)
    grad = opmath(grad_out)
    stored = grad.dtype if weight is None else weight.dtype
    total = grad.sum(axes)
    along = (grad * (opmath(input) - _optional(mean, per_channel))).sum(axes)
    return (
        total if input_g else None,
        along if input_g else None,
        (along * opmath(invstd)).astype(stored) if weight_g else None,
        total.astype(stored) if bias_g else None,
    )


@ops.lowering("aten::batch_norm_backward_elemt")
def batch_norm_backward_elemt(grad_out, input, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    """The gradient for `input` from the sums over all processes, whose numbers of elements are `count`."""
    _, per_channel = _batch_axes(input)
    invstd = _optional(invstd, per_channel)
    centered = opmath(input) - _optional(mean, per_channel)
    shift, scale = (_optional(x, per_channel) / count.sum() for x in (sum_dy, sum_dy_xmu))
    grad = (opmath(grad_out) - shift - centered * invstd * invstd * scale) * invstd
    return _affine(grad, _optional(weight, per_channel), None).astype(input.dtype)


# -- layer, group and RMS norm -----------------------------------------------------------------------


def _normalized_backward(grad: jax.Array, normalized: jax.Array, rstd: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The gradient through `(x - mean) * rstd` over `axes`, given the gradient of its result."""
    shift = grad.mean(axes, keepdims=True)
    scale = (grad * normalized).mean(axes, keepdims=True)
    return rstd * (grad - shift - normalized * scale)


@ops.lowering("aten::native_layer_norm")
def native_layer_norm(input, normalized_shape, weight, bias, eps):
    """`input` brought to mean 0 and variance 1 over its last dims, then scaled and shifted.

    input:   (..., *normalized_shape); weight, bias: `normalized_shape` or None.
    returns: out like `input`; mean, rstd: (..., 1, ..., 1).
    """
    axes = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    mean, centered, variance = _centered(opmath(input), axes)
    rstd = jax.lax.rsqrt(variance + eps)
    out = _affine(centered * rstd, _optional(weight, normalized_shape), _optional(bias, normalized_shape))
    return out, mean, rstd


@ops.lowering("aten::native_layer_norm_backward")
def native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask):
    """Gradients of layer norm for `input`, `weight` and `bias`; None where `output_mask` says it is not needed."""
    outer = input.ndim - len(normalized_shape)
    inner_axes, outer_axes = tuple(range(outer, input.ndim)), tuple(range(outer))
    grad, rstd = opmath(grad_out), opmath(rstd)
    normalized = (opmath(input) - opmath(mean)) * rstd
    grad_normalized = _affine(grad, _optional(weight, normalized_shape), None)
    need_input, need_weight, need_bias = output_mask
    return (
        _normalized_backward(grad_normalized, normalized, rstd, inner_axes) if need_input else None,
        (grad * normalized).sum(outer_axes) if need_weight and weight is not None else None,
        grad.sum(outer_axes) if need_bias and bias is not None else None,
    )


@ops.lowering("aten::native_group_norm", strides=in_format_of("input"))
def native_group_norm(input, weight, bias, N, C, HxW, group, eps):
    """`input` normalized over each of `group` groups of channels, then scaled and shifted per channel.

    input:   (N, C, *) with HxW elements in *; weight, bias: (C,) or None.
    returns: out like `input`; mean, rstd: (N, group).
    """
    mean, centered, variance = _centered(opmath(input).reshape(N, group, C // group * HxW), (2,))
    rstd = jax.lax.rsqrt(variance + eps)
    out = (centered * rstd).reshape(N, C, HxW)
    out = _affine(out, _optional(weight, (C, 1)), _optional(bias, (C, 1)))
    return out.reshape(input.shape), mean.reshape(N, group), rstd.reshape(N, group)


@ops.lowering("aten::native_group_norm_backward")
def native_group_norm_backward(grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask):
    """Gradients of group norm for `input`, `weight` and `bias`; None where `output_mask` says it is not needed."""
    grouped = (N, group, C // group * HxW)
    rstd = opmath(rstd).reshape(N, group, 1)
    normalized = (opmath(input).reshape(grouped) - opmath(mean).reshape(N, group, 1)) * rstd
    grad = opmath(grad_out).reshape(N, C, HxW)
    grad_normalized = _affine(grad, _optional(weight, (C, 1)), None).reshape(grouped)
    need_input, need_weight, need_bias = output_mask
    return (
        _normalized_backward(grad_normalized, normalized, rstd, (2,)).reshape(input.shape) if need_input else None,
        (grad * normalized.reshape(N, C, HxW)).sum((0, 2)) if need_weight else None,
        grad.sum((0, 2)) if need_bias else None,
    )


def _rms(input: jax.Array, normalized_shape: Sequence[int], eps: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """`input` over its root mean square, and the reciprocal of that; `eps` defaults to the compute type's epsilon."""
    x = opmath(input)
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    eps = jnp.finfo(x.dtype).eps if eps is None else eps
    rstd = jax.lax.rsqrt((x * x).mean(axes, keepdims=True) + eps)
    return x * rstd, rstd


@ops.lowering("aten::rms_norm")
def rms_norm(input, normalized_shape, weight=None, eps=None):
    """`input` over its root mean square in its last dims, times `weight`. Composite, kept whole: one op for seven.

    input: (..., *normalized_shape); weight: `normalized_shape` or None.
    """
    return _affine(_rms(input, normalized_shape, eps)[0], _optional(weight, normalized_shape), None)


@ops.lowering("aten::_fused_rms_norm")
def _fused_rms_norm(input, normalized_shape, weight, eps):
    """`rms_norm`, and the reciprocal root mean square (..., 1, ..., 1) that its backward wants."""
    out, rstd = _rms(input, normalized_shape, eps)
    return _affine(out, _optional(weight, normalized_shape), None), rstd


@ops.lowering("aten::_fused_rms_norm_backward")
def _fused_rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask):
    """Gradients of `_fused_rms_norm` for `input` and `weight`; None where `output_mask` says it is not needed."""
    outer = input.ndim - len(normalized_shape)
    inner_axes, outer_axes = tuple(range(outer, input.ndim)), tuple(range(outer))
    grad, rstd = opmath(grad_out), opmath(rstd)
    normalized = opmath(input) * rstd
    grad_normalized = _affine(grad, _optional(weight, normalized_shape), None)
    scale = (grad_normalized * normalized).mean(inner_axes, keepdims=True)
    need_input, need_weight = output_mask
    return (
        rstd * (grad_normalized - normalized * scale) if need_input else None,
        (grad * normalized).sum(outer_axes) if need_weight and weight is not None else None,
    )


# -- norms of slices ---------------------------------------------------------------------------------


def _all_but(ndim: int, dim: int) -> tuple[int, ...]:
    """Every axis of `ndim` but `dim`."""
    return tuple(axis for axis in range(ndim) if axis != dim % ndim)


@ops.lowering("aten::_weight_norm_interface")
def _weight_norm_interface(v, g, dim=0):
    """`v * (g / norm(v))`, the norm over all dims but `dim`, and the norms.

    v: (..., n, ...), n its length in `dim`; g and the norms: (1, ..., n, ..., 1).
    """
    x = opmath(v)
    norms = jnp.sqrt((x * x).sum(_all_but(v.ndim, dim), keepdims=True))
    return x * (opmath(g) / norms), norms


@ops.lowering("aten::_weight_norm_interface_backward")
def _weight_norm_interface_backward(grad_w, saved_v, saved_g, saved_norms, dim):
    """Gradients of `_weight_norm_interface` for `v` and `g`."""
    grad, v, g, norms = (opmath(x) for x in (grad_w, saved_v, saved_g, saved_norms))
    along = (grad * v).sum(_all_but(v.ndim, dim), keepdims=True)
    return g / norms * (grad - v * along / (norms * norms)), along / norms


# torch's gradient takes the norms anew in float64, which takes two to three times as long, and accelerators lack
@ops.lowering("aten::renorm", static=("p",), differentiable=True)
def renorm(self, p, dim, maxnorm):
    """`self` with each slice along `dim` whose `p`-norm exceeds `maxnorm` scaled down to it.

    source: the 1e-7 that keeps the quotient below `maxnorm` is torch's (aten/src/ATen/native/Normalization.cpp).
    """
    x = opmath(self)
    if x.size == 0:
        empty = [place for place in _all_but(x.ndim, dim) if x.shape[place] == 0]
        if p == jnp.inf and empty:  # torch's own error, in its words
            raise RuntimeError(
                f"linalg.vector_norm cannot compute the inf norm on the dimension {empty[0]}because this dimension is empty "
                "and the operation does not have an identity"
            )
        return x
    norms = linalg_vector_norm(x, p, _all_but(x.ndim, dim), keepdim=True)
    return x * jnp.where(norms > maxnorm, maxnorm / (norms + 1e-7), 1).astype(x.dtype)
