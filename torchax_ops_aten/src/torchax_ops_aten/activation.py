"""Activations and their gradients: relu gelu silu elu softplus glu prelu ... and softmax in its variants.

The gradients are ops of their own (`*_backward`), called by torch's autograd. Where a formula has a kink, the kink
belongs to the piece that torch's CPU kernels give it to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax_core.opset import OpSet
from torchax_core.promotion import INT_TO_FLOAT, SAME, opmath
from torchax_ops_aten._derivatives import derivatives
from torchax_ops_aten.random import uniform

ops = OpSet("torchax_ops_aten.activation")


def _like(value: Any, x: jax.Array) -> jax.Array:
    return jnp.asarray(value).astype(x.dtype)


def _of_floats(body: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Decorator: refuse integers, as torch does. The formulas would take them, and the result be cut to an integer."""

    @functools.wraps(body)
    def checked(self: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        if not jnp.issubdtype(self.dtype, jnp.inexact):
            raise NotImplementedError(f"\"{body.__name__}\" not implemented for '{self.dtype}'")
        return body(self, *args, **kwargs)

    return checked


# -- relu and what is linear in pieces ------------------------------------------------------------


@ops.lowering("aten::relu", promote=SAME)
@derivatives(self=lambda tangent, self: threshold_backward(tangent, self, 0))  # type: ignore[has-type]
def relu(self):
    """`max(self, 0)`; NaN stays NaN."""
    return jnp.maximum(self, 0)


@ops.lowering("aten::threshold", promote=SAME.of("self"))
def threshold(self, threshold, value):
    """`self` where above `threshold`, `value` elsewhere; the two are cast to the dtype of `self`, integers too."""
    return jnp.where(self <= _like(threshold, self), _like(value, self), self)


@ops.lowering("aten::threshold_backward", promote=SAME.of("grad_output", "self"))
def threshold_backward(grad_output, self, threshold):
    """The gradient of relu too (`threshold` 0): none at the kink."""
    return jnp.where(self <= _like(threshold, self), 0, grad_output)


@ops.lowering("aten::leaky_relu", promote=SAME)
@_of_floats
def leaky_relu(self, negative_slope=0.01):
    """`self` where positive, `negative_slope * self` elsewhere."""
    return jnp.where(self > 0, self, negative_slope * self)


@ops.lowering("aten::leaky_relu_backward", promote=SAME)
def leaky_relu_backward(grad_output, self, negative_slope, self_is_result):
    """`self` may be the result as well: it has the same sign."""
    return jnp.where(self > 0, grad_output, negative_slope * grad_output)


@ops.lowering("aten::_prelu_kernel", promote=SAME)
@_of_floats
def _prelu_kernel(self, weight):
    """`self` where positive, `weight * self` elsewhere; `weight` comes in a shape that broadcasts."""
    return jnp.where(self > 0, self, weight * self)


@ops.lowering("aten::_prelu_kernel_backward", promote=SAME)
def _prelu_kernel_backward(grad_output, self, weight):
    """The gradients of `self` and of `weight`, the latter in the shape of `self`: autograd sums it up."""
    positive = self > 0
    return jnp.where(positive, grad_output, weight * grad_output), jnp.where(positive, 0, self * grad_output)


@ops.lowering("aten::hardtanh", promote=SAME.of("self"))
@derivatives(self=lambda tangent, self, min_val, max_val: hardtanh_backward(tangent, self, min_val, max_val))  # type: ignore[has-type]
def hardtanh(self, min_val=-1, max_val=1):
    """`self` raised to `min_val` and lowered to `max_val`, which are cast to its dtype first (relu6 has 0 and 6)."""
    return jnp.minimum(jnp.maximum(self, _like(min_val, self)), _like(max_val, self))


@ops.lowering("aten::hardtanh_backward", promote=SAME)
def hardtanh_backward(grad_output, self, min_val, max_val):
    """None at the kinks or beyond."""
    return jnp.where((self <= min_val) | (self >= max_val), 0, grad_output)


@ops.lowering("aten::hardsigmoid", promote=SAME)
@_of_floats
@derivatives(self=lambda tangent, self: hardsigmoid_backward(tangent, self))  # type: ignore[has-type]
def hardsigmoid(self):
    """`clamp(self + 3, 0, 6) / 6`."""
    return jnp.clip(self + 3, 0, 6) / 6


@ops.lowering("aten::hardsigmoid_backward", promote=SAME)
def hardsigmoid_backward(grad_output, self):
    """None at the kinks or beyond."""
    return jnp.where((self > -3) & (self < 3), grad_output / 6, 0)


@ops.lowering("aten::hardswish", promote=SAME)
@_of_floats
@derivatives(self=lambda tangent, self: hardswish_backward(tangent, self))  # type: ignore[has-type]
def hardswish(self):
    """`self * hardsigmoid(self)`."""
    return self * jnp.clip(self + 3, 0, 6) / 6


@ops.lowering("aten::hardswish_backward", promote=SAME)
def hardswish_backward(grad_output, self):
    """A straight line between the kinks, which are part of the flat pieces."""
    inside = grad_output * (self / 3 + 0.5)
    return jnp.where(self <= -3, 0, jnp.where(self < 3, inside, grad_output))


@ops.lowering("aten::hardshrink", promote=SAME)
@_of_floats
def hardshrink(self, lambd=0.5):
    """0 in [-lambd, lambd], `self` elsewhere."""
    return jnp.where((self >= -lambd) & (self <= lambd), 0, self)


@ops.lowering("aten::softshrink", promote=SAME, static=("lambd",))
@_of_floats
def softshrink(self, lambd=0.5):
    """`self` moved toward 0 by `lambd`, not beyond it; NaN stays NaN."""
    if not lambd >= 0:
        raise RuntimeError(f"lambda must be in range [0, inf) for input dtype {self.dtype}, but found {lambd}")
    # not where(self > lambd, ...): the product keeps NaN
    return jnp.where(self > lambd, self - lambd, jnp.where(self < -lambd, self + lambd, self * 0))


@ops.lowering("aten::hardshrink_backward", promote=SAME)
def hardshrink_backward(grad_out, self, lambd):
    """None in [-lambd, lambd]."""
    return jnp.where((self >= -lambd) & (self <= lambd), 0, grad_out)


@ops.lowering("aten::softshrink_backward", promote=SAME)
def softshrink_backward(grad_output, self, lambd):
    """None in [-lambd, lambd]."""
    return jnp.where((self >= -lambd) & (self <= lambd), 0, grad_output)


@ops.lowering("aten::rrelu_with_noise_functional", promote=SAME)
def rrelu_with_noise_functional(self, noise, lower=0.125, upper=1 / 3, training=False, *, key):
    """leaky_relu with slopes drawn from [lower, upper), when training; with their mean otherwise.

    returns: the result, and the new `noise`: the slopes used, 1 where `self` is positive.
    """
    if not training:
        return leaky_relu(self, (lower + upper) / 2), noise
    slopes = uniform(self, key=key) * (upper - lower) + lower
    noise = jnp.where(self <= 0, slopes, 1)
    return self * noise, noise


# -- exponential units ---------------------------------------------------------------------------


@ops.lowering("aten::elu", promote=SAME)
@_of_floats
@derivatives(
    self=lambda tangent, self, alpha, scale, input_scale: elu_backward(tangent, alpha, scale, input_scale, False, self)  # type: ignore[has-type]
)
def elu(self, alpha=1, scale=1, input_scale=1):
    """`scale * self` where positive, `scale * alpha * (exp(input_scale * self) - 1)` elsewhere (selu: one case)."""
    return jnp.where(self > 0, scale * self, scale * alpha * jnp.expm1(self * input_scale))


@ops.lowering("aten::elu_backward", promote=SAME)
def elu_backward(grad_output, alpha, scale, input_scale, is_result, self_or_result):
    """From `self`, or from the result, which tells the exponential as well."""
    slope = self_or_result + alpha * scale if is_result else scale * alpha * jnp.exp(self_or_result * input_scale)
    return grad_output * jnp.where(self_or_result <= 0, input_scale * slope, scale)


@ops.lowering("aten::celu", promote=SAME, static=("alpha",))
@_of_floats
@derivatives(self=lambda tangent, self, alpha: elu_backward(tangent, alpha, 1, 1 / alpha, False, self))
def celu(self, alpha=1.0):
    """`self` where positive, `alpha * (exp(self / alpha) - 1)` elsewhere."""
    if alpha == 0:
        raise RuntimeError("ZeroDivisionError: alpha cannot be 0 for CELU")
    return jnp.where(self > 0, self, alpha * jnp.expm1(self / alpha))


@ops.lowering("aten::softplus", promote=SAME)
@_of_floats
@derivatives(self=lambda tangent, self, beta, threshold: softplus_backward(tangent, self, beta, threshold))  # type: ignore[has-type]
def softplus(self, beta=1, threshold=20):
    """`log(1 + exp(beta * self)) / beta`, taken as `self` where `beta * self` is above `threshold`."""
    scaled = self * beta
    return jnp.where(scaled > threshold, self, jnp.log1p(jnp.exp(scaled)) / beta)


@ops.lowering("aten::softplus_backward", promote=SAME)
def softplus_backward(grad_output, self, beta, threshold):
    """The sigmoid, taken as 1 above `threshold`."""
    scaled = self * beta
    return jnp.where(scaled > threshold, grad_output, grad_output * lax.logistic(scaled))


@ops.lowering("aten::mish", promote=SAME)
@_of_floats
def mish(self):
    """`self * tanh(log(1 + exp(self)))`."""
    return self * jnp.tanh(jax.nn.softplus(self))


@ops.lowering("aten::mish_backward", promote=SAME)
def mish_backward(grad_output, self):
    """The derivative by the product rule; that of softplus is the sigmoid."""
    squashed = jnp.tanh(jax.nn.softplus(self))
    return grad_output * (squashed + self * lax.logistic(self) * (1 - squashed * squashed))


# -- sigmoid and tanh ----------------------------------------------------------------------------

ops.table(INT_TO_FLOAT, {"aten::sigmoid": lax.logistic})


@ops.lowering("aten::sigmoid_backward", promote=SAME)
def sigmoid_backward(grad_output, output):
    """From the result: `output * (1 - output)`."""
    return grad_output * jnp.conj(output * (1 - output))


@ops.lowering("aten::tanh_backward", promote=SAME)
def tanh_backward(grad_output, output):
    """From the result: `1 - output**2`."""
    return grad_output * jnp.conj(1 - output * output)


@ops.lowering("aten::silu", promote=SAME)
@_of_floats
def silu(self):
    """`self * sigmoid(self)`."""
    return self * lax.logistic(self)


@ops.lowering("aten::silu_backward", promote=SAME)
def silu_backward(grad_output, self):
    """The derivative by the product rule."""
    sigmoid = lax.logistic(self)
    return grad_output * jnp.conj(sigmoid * (1 + self * (1 - sigmoid)))


@ops.lowering("aten::log_sigmoid_forward", promote=SAME)
@_of_floats
def log_sigmoid_forward(self):
    """`log(sigmoid(self))`, and `exp(-abs(self))` for the backward, which as on CPU has the shape of `self`."""
    small = jnp.exp(-jnp.abs(self))
    return _log_sigmoid(self), small


@derivatives(x=lambda tangent, x: tangent * lax.logistic(-x))
def _log_sigmoid(x: jax.Array) -> jax.Array:
    return jnp.minimum(x, 0) - jnp.log1p(jnp.exp(-jnp.abs(x)))


@ops.lowering("aten::log_sigmoid_backward", promote=SAME)
def log_sigmoid_backward(grad_output, self, buffer):
    """`sigmoid(-self)`, computed anew: `buffer` may have been rounded to a half type."""
    return grad_output * lax.logistic(-self)


# -- gelu ----------------------------------------------------------------------------------------

_GELU_CUBIC = 0.044715


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return jnp.tanh(math.sqrt(2 / math.pi) * (x + _GELU_CUBIC * x * x * x))


@ops.lowering("aten::gelu", promote=SAME)
@_of_floats
def gelu(self, *, approximate="none"):
    """`self` times the normal distribution function at it, or an approximation to that by "tanh"."""
    if approximate not in ("none", "tanh"):
        raise RuntimeError("approximate argument must be either none or tanh.")
    if approximate == "tanh":
        return 0.5 * self * (1 + _gelu_tanh(self))
    return 0.5 * self * (1 + lax.erf(self * math.sqrt(0.5)))


@ops.lowering("aten::gelu_backward", promote=SAME)
def gelu_backward(grad_output, self, *, approximate="none"):
    """The derivative by the product rule."""
    if approximate == "tanh":
        squashed = _gelu_tanh(self)
        inner = math.sqrt(2 / math.pi) * (1 + 3 * _GELU_CUBIC * self * self)
        return grad_output * 0.5 * (1 + squashed + self * (1 - squashed * squashed) * inner)
    density = jnp.exp(-0.5 * self * self) * (1 / math.sqrt(2 * math.pi))
    return grad_output * (0.5 * (1 + lax.erf(self * math.sqrt(0.5))) + self * density)


# -- glu -----------------------------------------------------------------------------------------


@ops.lowering("aten::glu", promote=SAME)
@_of_floats
def glu(self, dim=-1):
    """The first half along `dim` times the sigmoid of the second.

    self:    (..., 2 n, ...)
    returns: (..., n, ...)
    """
    value, gate = jnp.split(self, 2, axis=dim)
    return value * lax.logistic(gate)


@ops.lowering("aten::glu_backward", promote=SAME)
def glu_backward(grad_output, self, dim):
    """The gradients of both halves, joined as `self` is.

    grad_output: (..., n, ...)
    self:        (..., 2 n, ...), as the result
    """
    value, gate = jnp.split(self, 2, axis=dim)
    sigmoid = lax.logistic(gate)
    passed = grad_output * sigmoid
    return jnp.concatenate([passed, passed * (1 - sigmoid) * value], axis=dim)


@ops.lowering("aten::glu_jvp", promote=SAME)
def glu_jvp(glu, x, dx, dim):
    """How the result `glu` of `x` moves when `x` moves by `dx`. glu, returns: (..., n, ...); x, dx: (..., 2 n, ...)."""
    sigmoid = lax.logistic(jnp.split(x, 2, axis=dim)[1])
    d_value, d_gate = jnp.split(dx, 2, axis=dim)
    return d_value * sigmoid + glu * (1 - sigmoid) * d_gate


@ops.lowering("aten::glu_backward_jvp", promote=SAME)
def glu_backward_jvp(grad_x, grad_glu, x, dgrad_glu, dx, dim):
    """How the gradient `grad_x` of `x` moves when `x` moves by `dx` and the result's gradient by `dgrad_glu`."""
    _, tangent = jax.jvp(lambda g, x: glu_backward(g, x, dim), (grad_glu, x), (dgrad_glu, dx))
    return tangent


# -- softmax -------------------------------------------------------------------------------------


def _along(x: jax.Array, dim: int) -> tuple[jax.Array, int]:
    """`x` with at least one dimension to take `dim` of: torch lets a 0-d tensor pass as one of length 1."""
    return (x.reshape(1), 0) if x.ndim == 0 else (x, dim)


def _exponentials(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    """`x` less its maximum along `dim`, which leaves softmax as it is, and the sum of the exponentials of that."""
    shifted = x - jnp.max(x, axis=dim, keepdims=True, initial=-np.inf)
    return shifted, jnp.sum(jnp.exp(shifted), axis=dim, keepdims=True)


@ops.lowering("aten::_softmax", promote=SAME)
@_of_floats
@derivatives(
    self=lambda tangent, self, dim, half_to_float: _softmax_backward_data(  # type: ignore[has-type]
        tangent,
        _softmax(self, dim, half_to_float),  # type: ignore[has-type]
        dim,
        None,
    )
)
def _softmax(self, dim, half_to_float):
    """`exp(self)` divided by its sum along `dim`; NaN where all of that is -inf."""
    x, dim = _along(self, dim)
    shifted, total = _exponentials(x, dim)
    return (jnp.exp(shifted) / total).reshape(self.shape)


@ops.lowering("aten::_log_softmax", promote=SAME)
@_of_floats
@derivatives(
    self=lambda tangent, self, dim, half_to_float: _log_softmax_tangent(
        tangent,
        _log_softmax(self, dim, half_to_float),  # type: ignore[has-type]
        dim,
    )
)
def _log_softmax(self, dim, half_to_float):
    """The logarithm of softmax, without the underflow that taking it afterwards would suffer."""
    x, dim = _along(self, dim)
    shifted, total = _exponentials(x, dim)
    return (shifted - jnp.log(total)).reshape(self.shape)


def _log_softmax_tangent(tangent: jax.Array, output: jax.Array, dim: int) -> jax.Array:
    y, axis = _along(output, dim)
    tangent = tangent.reshape(y.shape)
    return (tangent - jnp.sum(jnp.exp(y) * tangent, axis=axis, keepdims=True)).reshape(output.shape)


@ops.lowering("aten::_safe_softmax")
@derivatives(
    self=lambda tangent, self, dim, dtype: _softmax_backward_data(tangent, _safe_softmax(self, dim, dtype), dim, None)  # type: ignore[has-type]
)
def _safe_softmax(self, dim, dtype=None):
    """softmax in `dtype`, 0 where all along `dim` is -inf: an attention row with everything masked."""
    x, dim = _along(opmath(self if dtype is None else self.astype(dtype)), dim)
    result = jnp.where(jnp.all(x == -jnp.inf, axis=dim, keepdims=True), 0, _softmax(x, dim, False))
    return result.reshape(self.shape)


@ops.lowering("aten::_softmax_backward_data", promote=SAME)
def _softmax_backward_data(grad_output, output, dim, input_dtype):
    """From the result: `output * (grad_output - sum(output * grad_output))`."""
    y, axis = _along(output, dim)
    passed = y * grad_output.reshape(y.shape)
    return (passed - y * jnp.sum(passed, axis=axis, keepdims=True)).reshape(output.shape)


@ops.lowering("aten::_log_softmax_backward_data", promote=SAME)
def _log_softmax_backward_data(grad_output, output, dim, input_dtype):
    """From the result: `grad_output - exp(output) * sum(grad_output)`."""
    y, axis = _along(output, dim)
    grad = grad_output.reshape(y.shape)
    return (grad - jnp.exp(y) * jnp.sum(grad, axis=axis, keepdims=True)).reshape(output.shape)


def _spread_mask(mask: jax.Array, shape: tuple[int, ...], mask_type: int | None) -> jax.Array:
    """A mask for (batch, heads, queries, keys) from one of (queries, keys), `mask_type` 0, or (batch, keys), 1."""
    if mask_type == 1 and mask.ndim == 2:
        mask = mask[:, None, None, :]
    return jnp.broadcast_to(mask.astype(bool), shape)


@ops.lowering("aten::_masked_softmax", promote=SAME.of("self"))
def _masked_softmax(self, mask, dim=None, mask_type=None):
    """softmax over what `mask` leaves: where it is True the result is 0. NaN if nothing is left."""
    dim = -1 if dim is None else dim
    mask = _spread_mask(mask, self.shape, mask_type)
    return _softmax(jnp.where(mask, -jnp.inf, self), dim, False)


@ops.lowering("aten::_masked_softmax_backward", promote=SAME.of("grad_output", "output"))
def _masked_softmax_backward(grad_output, output, mask, dim=None):
    """That of softmax; nothing flows where `mask` is True."""
    dim = -1 if dim is None else dim
    mask = mask.astype(bool)
    return _softmax_backward_data(jnp.where(mask, 0, grad_output), jnp.where(mask, 0, output), dim, None)
