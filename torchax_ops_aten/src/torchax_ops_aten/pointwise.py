"""Arithmetic and elementary functions, element by element: add mul div pow exp sin clamp where lerp round gcd ...

Comparisons and logic are in comparison.py, activations in activation.py, the rarer functions of analysis in special.py.
All broadcast their tensors; the rule given as `promote` says in which dtype they compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND

from torchax_core.opset import OpSet
from torchax_core.promotion import COMPLEX_TO_FLOAT, INT_TO_FLOAT, SAME, Promotion, opmath
from torchax_ops_aten._derivatives import absolute

ops = OpSet("torchax_ops_aten.pointwise")

# The bits of the result depend on the dtype, so half types must not be widened: nextafter.
EXACT = Promotion("EXACT", ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH)


def _is_whole(x: jax.Array) -> bool:
    """Whether `x` holds integers or bools."""
    return not jnp.issubdtype(x.dtype, jnp.inexact)


def _is_complex(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def _default_float() -> Any:
    """The dtype integers become where torch computes in floats."""
    return jnp.float64 if torch.get_default_dtype() is torch.float64 else jnp.float32


def _require_whole(op: str, x: jax.Array) -> None:
    if not _is_whole(x):
        raise NotImplementedError(f"\"{op}\" not implemented for '{x.dtype}': it takes integers")


def _require_same_dtype(x: jax.Array, y: jax.Array) -> None:
    if x.dtype != y.dtype:
        names = {"float16": "Half", "float32": "Float", "float64": "Double"}
        x_name, y_name = (names.get(str(a.dtype), str(a.dtype)) for a in (x, y))
        raise RuntimeError(f"Expected object of scalar type {x_name} but got scalar type {y_name} for second argument")


def _times(factor: Any, x: jax.Array) -> jax.Array:
    """`factor * x`. A factor left at its default 1 is dropped: times a complex infinity it would make NaN."""
    return x if isinstance(factor, (int, float)) and factor == 1 else factor * x


# -- arithmetic ----------------------------------------------------------------------------------


@ops.lowering("aten::add.Tensor", "aten::add.Scalar", promote=SAME)
def add(self, other, *, alpha=1):
    """`self + alpha * other`; of bools, their "or"."""
    return self + _times(alpha, other)


@ops.lowering("aten::sub.Tensor", "aten::sub.Scalar", promote=SAME)
def sub(self, other, *, alpha=1):
    """`self - alpha * other`; not of bools."""
    if self.dtype == bool:
        raise NotImplementedError(
            "Subtraction, the `-` operator, with two bool tensors is not supported. "
            "Use the `^` or `logical_xor()` operator instead."
        )
    return self - _times(alpha, other)


@ops.lowering("aten::rsub.Tensor", "aten::rsub.Scalar", promote=SAME)
def rsub(self, other, *, alpha=1):
    """`other - alpha * self`; not of bools."""
    return sub(other, self, alpha=alpha)


@ops.lowering("aten::_add_relu.Tensor", "aten::_add_relu.Scalar", promote=SAME)
def _add_relu(self, other, *, alpha=1):
    """`max(self + alpha * other, 0)`."""
    return jnp.maximum(self + _times(alpha, other), 0)


@ops.lowering("aten::neg", promote=SAME)
def neg(self):
    """`-self`; not of bools."""
    if self.dtype == bool:
        raise NotImplementedError(
            "Negation, the `-` operator, on a bool tensor is not supported. "
            "If you are trying to invert a mask, use the `~` or `logical_not()` operator instead."
        )
    return -self


ops.table(SAME, {"aten::mul.Tensor": jnp.multiply, "aten::mul.Scalar": jnp.multiply})


@ops.lowering("aten::kron", promote=SAME, composite_grad="decompose")
def kron(self, other):
    """The Kronecker product: `self` with each element times `other` in its place; ranks are made equal by leading 1s.

    Whole, as torch's own writes an `out=` through `_unsafe_view`, which is no view here.
    """
    rank = max(self.ndim, other.ndim)
    self, other = (x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (self, other))
    product = jnp.expand_dims(self, range(1, 2 * rank, 2)) * jnp.expand_dims(other, range(0, 2 * rank, 2))
    return product.reshape([n * m for n, m in zip(self.shape, other.shape, strict=True)])


ops.table(INT_TO_FLOAT, {"aten::div.Tensor": jnp.true_divide, "aten::div.Scalar": jnp.true_divide})


def _floor_of_quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """The greatest whole number not above the exact `a / b`; `a / b` itself where `b` is 0.

    The quotient is taken of what `b` divides without remainder, as rounding `a / b` could step over a whole number.
    """
    if _is_whole(a):
        quotient = lax.div(a, b)
        below = (jnp.sign(a) * jnp.sign(b) < 0) & (quotient * b != a)
        return quotient - below.astype(a.dtype)
    remainder = lax.rem(a, b)
    quotient = (a - remainder) / b - ((remainder != 0) & ((b < 0) != (remainder < 0)))
    floored = jnp.floor(quotient)
    floored = floored + (quotient - floored > 0.5)
    floored = jnp.where(quotient != 0, floored, jnp.copysign(0.0, a / b))
    return jnp.where(b == 0, a / b, floored)


def _truncated_quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """The whole number of `a / b` rounded toward 0."""
    if _is_whole(a):
        return lax.div(a, b)
    # by a number for all elements XLA multiplies with its inverse, of which 14 / 7 is less than 2: it must not see one
    return jnp.trunc(a / jnp.where(jnp.isnan(a), a, b))


@ops.lowering("aten::div.Tensor_mode", "aten::div.Scalar_mode", promote=SAME)
def div_mode(self, other, *, rounding_mode=None):
    """`self / other`, true (`rounding_mode` None), or rounded to a whole number ("trunc": toward 0, "floor": down)."""
    if rounding_mode not in (None, "trunc", "floor"):
        raise RuntimeError(
            f"div expected rounding_mode to be one of None, 'trunc', or 'floor' but found {rounding_mode!r}"
        )
    self, other = jnp.broadcast_arrays(self, other)
    if rounding_mode is None:
        if _is_whole(self):
            self, other = self.astype(_default_float()), other.astype(_default_float())
        return self / other
    return _truncated_quotient(self, other) if rounding_mode == "trunc" else _floor_of_quotient(self, other)


@ops.lowering("aten::floor_divide", "aten::floor_divide.Scalar", promote=SAME)
def floor_divide(self, other):
    """`self / other`, rounded down to a whole number. An integer over 0 is no error here, but has no meaning."""
    return _floor_of_quotient(*jnp.broadcast_arrays(self, other))


@ops.lowering("aten::fmod.Tensor", "aten::fmod.Scalar", promote=SAME)
def fmod(self, other):
    """What is left of `self` after whole `other`s are taken away; has the sign of `self`."""
    return lax.rem(*jnp.broadcast_arrays(self, other))


@ops.lowering("aten::remainder.Tensor", "aten::remainder.Scalar", "aten::remainder.Scalar_Tensor", promote=SAME)
def remainder(self, other):
    """What is left of `self` after whole `other`s are taken away; has the sign of `other`, as Python's `%`."""
    self, other = jnp.broadcast_arrays(self, other)
    left = lax.rem(self, other)
    return jnp.where((left != 0) & ((left < 0) != (other < 0)), left + other, left)


@ops.lowering("aten::addcmul", promote=SAME)
def addcmul(self, tensor1, tensor2, *, value=1):
    """`self + value * tensor1 * tensor2`."""
    return self + _times(value, tensor1) * tensor2


@ops.lowering("aten::addcdiv", promote=SAME)
def addcdiv(self, tensor1, tensor2, *, value=1):
    """`self + value * tensor1 / tensor2`."""
    return self + _times(value, tensor1) / tensor2


@ops.lowering("aten::lerp.Tensor", "aten::lerp.Scalar", promote=SAME)
def lerp(self, end, weight):
    """From `self` (at weight 0) to `end` (at weight 1) in a straight line.

    Both ends are met exactly: past the middle the formula counts back from `end`.
    """
    distance = end - self
    return jnp.where(jnp.abs(weight) < 0.5, self + weight * distance, end - distance * (1 - weight))


# -- powers --------------------------------------------------------------------------------------


def _whole_power(base: jax.Array, exponent: jax.Array) -> jax.Array:
    """Integers to integer powers by repeated squaring, modulo 2**bits.

    A negative exponent gives 0, except of 1 and -1, as in torch.
    """
    base, exponent = jnp.broadcast_arrays(base, exponent)

    def step(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        power, square, left = state
        odd = (left & 1).astype(bool)
        return jnp.where(odd, power * square, power), square * square, left >> 1

    start = (jnp.ones_like(base), base, jnp.maximum(exponent, 0))
    power, _, _ = lax.while_loop(lambda state: jnp.any(state[2] > 0), step, start)
    if jnp.issubdtype(exponent.dtype, jnp.unsignedinteger):
        return power
    inverse = jnp.where(base == 1, 1, jnp.where(base == -1, 1 - 2 * (exponent & 1), 0))
    return jnp.where(exponent < 0, inverse, power)


def _power(base: jax.Array, exponent: jax.Array) -> jax.Array:
    """`base ** exponent` of inexact numbers. A complex power of 0 is 0, or infinite, by the real part of the exponent."""
    power = jnp.power(base, exponent)
    if not _is_complex(power):
        return power
    at_zero = jnp.where(exponent.real > 0, 0, jnp.where(exponent.real < 0, complex(math.inf, math.nan), power))
    return jnp.where(base == 0, at_zero, power)


@ops.lowering("aten::pow.Tensor_Tensor", "aten::pow.Scalar", promote=SAME)
def pow_tensor(self, exponent):
    """`self ** exponent`; of integers, an integer (see `_whole_power`)."""
    return _whole_power(self, exponent) if _is_whole(self) else _power(self, exponent)


@ops.lowering("aten::pow.Tensor_Scalar", promote=SAME, static=("exponent",))
def pow_scalar(self, exponent):
    """`self ** exponent`. The exponent is part of the program: the common ones are products and roots."""
    if _is_whole(self):
        if exponent < 0:
            raise RuntimeError("Integers to negative integer powers are not allowed.")
        return lax.integer_pow(self, int(exponent))
    if exponent == 0.5:
        return lax.sqrt(self)
    if exponent == -0.5:
        return lax.rsqrt(self)
    if exponent in (-2, -1, 0, 1, 2, 3):
        return lax.integer_pow(self, int(exponent.real))
    return _power(self, jnp.asarray(exponent, self.dtype))


# -- elementary functions ------------------------------------------------------------------------


def _exact_logarithm(base: int) -> Callable[[jax.Array], jax.Array]:
    """The logarithm to `base`, exact at its powers. The quotient of two logarithms is not: log10(1e9) < 9."""

    def log(x: jax.Array) -> jax.Array:
        quotient = lax.log(x) * (1 / math.log(base))
        if _is_complex(x):
            return quotient
        nearest = jnp.round(quotient)
        return jnp.where(lax.pow(jnp.full_like(x, base), nearest) == x, nearest, quotient)

    return log


def _exp2(x: jax.Array) -> jax.Array:
    # not lax.exp2: that is exp(x * log(2)), which misses the powers of 2 themselves
    return lax.pow(jnp.full_like(x, 2), x)


def _logaddexp(x: jax.Array, y: jax.Array) -> jax.Array:
    """`log(exp(x) + exp(y))`. Of complex numbers the imaginary part is not wrapped, as jnp.logaddexp would."""
    if not _is_complex(x):
        return jnp.logaddexp(x, y)
    first = x.real >= y.real
    larger, smaller = jnp.where(first, x, y), jnp.where(first, y, x)
    same_infinity = jnp.isinf(larger.real) & (larger.real == smaller.real)
    value = larger + jnp.log1p(jnp.exp(smaller - larger))
    return jnp.where(same_infinity, jnp.where(smaller.real < 0, smaller, jnp.log(jnp.exp(x) + jnp.exp(y))), value)


def _sinc(x: jax.Array) -> jax.Array:
    scaled = math.pi * jnp.where(x == 0, 1, x)
    return jnp.where(x == 0, 1, lax.sin(scaled) / scaled)


ops.table(
    INT_TO_FLOAT,
    {
        "aten::acos": jnp.arccos,
        "aten::acosh": jnp.arccosh,
        "aten::asin": jnp.arcsin,
        "aten::asinh": jnp.arcsinh,
        "aten::atan": jnp.arctan,
        "aten::atanh": jnp.arctanh,
        "aten::atan2": jnp.arctan2,
        "aten::cos": lax.cos,
        "aten::cosh": lax.cosh,
        "aten::deg2rad": jnp.deg2rad,
        "aten::exp": lax.exp,
        "aten::exp2": _exp2,
        "aten::expm1": lax.expm1,
        "aten::log": lax.log,
        "aten::log10": _exact_logarithm(10),
        "aten::log1p": lax.log1p,
        "aten::log2": _exact_logarithm(2),
        "aten::logaddexp": _logaddexp,
        "aten::logaddexp2": jnp.logaddexp2,
        "aten::rad2deg": jnp.rad2deg,
        "aten::reciprocal": lambda x: 1 / x,
        "aten::rsqrt": lax.rsqrt,
        "aten::sin": lax.sin,
        "aten::sinc": _sinc,
        "aten::sinh": lax.sinh,
        "aten::sqrt": lax.sqrt,
        "aten::tan": lax.tan,
        "aten::tanh": lax.tanh,
    },
)
ops.table(SAME, {"aten::hypot": jnp.hypot})


# -- signs and parts -----------------------------------------------------------------------------

ops.table(COMPLEX_TO_FLOAT, {"aten::abs": absolute})
ops.table(SAME, {"aten::_conj_physical": jnp.conj})


@ops.decomposition("aten::conj_physical", whole=False)
def conj_physical(self: torch.Tensor) -> torch.Tensor:
    """The complex conjugate, written out; a real tensor itself. Here for its in-place and out= forms, which torch does not
    decompose."""
    return torch.ops.aten._conj_physical(self) if self.is_complex() else self


@ops.lowering("aten::angle")
def angle(self):
    """The argument of a complex number, in [-pi, pi]; of a real one, 0 or pi. NaN gives NaN."""
    if _is_complex(self):
        return jnp.angle(self)
    self = self.astype(_default_float()) if _is_whole(self) else opmath(self)
    return jnp.where(jnp.isnan(self), self, jnp.where(self < 0, math.pi, 0))


@ops.lowering("aten::sign", "aten::sgn", promote=SAME)
def sign(self):
    """-1, 0 or 1; of a complex number, the one of length 1 in its direction. The sign of a NaN is 0, as in torch."""
    if self.dtype == bool:
        return self
    if _is_complex(self):
        length = jnp.abs(self)
        return jnp.where(length == 0, 0, self / jnp.where(length == 0, 1, length))
    return jnp.where(self > 0, 1, jnp.where(self < 0, -1, 0))


@ops.lowering("aten::copysign.Tensor", "aten::copysign.Scalar", promote=INT_TO_FLOAT)
def copysign(self, other):
    """The size of `self` with the sign of `other`, be that 0 or NaN."""
    return jnp.copysign(self, other)


@ops.lowering("aten::nextafter", promote=EXACT)
def nextafter(self, other):
    """The next number after `self` in its dtype, in the direction of `other`."""
    return lax.nextafter(*jnp.broadcast_arrays(self, other))


@ops.lowering("aten::frexp.Tensor")
def frexp(self):
    """`mantissa`, in [0.5, 1) by size, and int32 `exponent`, so that `self == mantissa * 2**exponent`."""
    self = opmath(self)
    # subnormals have no exponent of their own: lift them among the normal numbers first
    small = jnp.abs(self) < jnp.finfo(self.dtype).tiny
    lift = jnp.finfo(self.dtype).nmant + 1
    mantissa, exponent = jnp.frexp(jnp.where(small, self * 2.0**lift, self))
    exponent = jnp.where(small & (self != 0), exponent - lift, exponent)
    return mantissa, exponent


@ops.lowering("aten::complex")
def complex_(real, imag):
    """`real + i imag`, of two real tensors."""
    _require_same_dtype(real, imag)
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@ops.lowering("aten::polar")
def polar(abs, angle):
    """The complex number of length `abs` and argument `angle`."""
    _require_same_dtype(abs, angle)
    return lax.complex(*jnp.broadcast_arrays(abs * jnp.cos(angle), abs * jnp.sin(angle)))


# -- rounding ------------------------------------------------------------------------------------


def _if_inexact(round_: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """`round_`, where there is something to round: integers are returned as they are."""
    return lambda x: x if _is_whole(x) else round_(x)


ops.table(
    SAME,
    {
        "aten::ceil": _if_inexact(lax.ceil),
        "aten::floor": _if_inexact(lax.floor),
        "aten::frac": lambda x: x - jnp.trunc(x),
        "aten::round": _if_inexact(lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)),
        "aten::trunc": _if_inexact(jnp.trunc),
    },
)


@ops.lowering("aten::round.decimals", promote=SAME)
def round_decimals(self, *, decimals):
    """`self` rounded to `decimals` digits after the point (before it if negative); ties to even."""
    if _is_whole(self):
        return self
    scale = 10.0 ** abs(decimals)
    nearest = lax.RoundingMethod.TO_NEAREST_EVEN
    if decimals < 0:
        return lax.round(self / scale, nearest) * scale
    return lax.round(self * scale, nearest) / scale


# -- choosing and bounding -----------------------------------------------------------------------


@ops.lowering("aten::where.self", promote=SAME.of("self", "other"))
def where(condition, self, other):
    """`self` where `condition`, `other` elsewhere; NaN in the one not chosen does no harm."""
    return jnp.where(condition.astype(bool), self, other)


@ops.lowering("aten::clamp", "aten::clamp.Tensor", promote=SAME)
def clamp(self, min=None, max=None):
    """`self` raised to `min` and then lowered to `max`; so where `min > max`, `max`. NaN stays NaN."""
    if min is None and max is None:
        raise RuntimeError("torch.clamp: At least one of 'min' or 'max' must not be None")
    if _is_complex(self):
        raise NotImplementedError("clamp is not supported for complex types")
    if min is not None:
        self = jnp.maximum(self, min)
    return self if max is None else jnp.minimum(self, max)


ops.table(
    SAME,
    {
        "aten::clamp_min": jnp.maximum,
        "aten::clamp_min.Tensor": jnp.maximum,
        "aten::clamp_max": jnp.minimum,
        "aten::clamp_max.Tensor": jnp.minimum,
    },
)


@ops.lowering("aten::nan_to_num")
def nan_to_num(self, nan=None, posinf=None, neginf=None):
    """`self` with NaN, inf and -inf replaced: by 0, the greatest and the least number of its dtype unless given."""
    if _is_whole(self):
        return self
    if _is_complex(self):
        return lax.complex(nan_to_num(self.real, nan, posinf, neginf), nan_to_num(self.imag, nan, posinf, neginf))
    limits = jnp.finfo(self.dtype)
    replaced = jnp.where(jnp.isnan(self), 0 if nan is None else nan.astype(self.dtype), self)
    replaced = jnp.where(self == jnp.inf, limits.max if posinf is None else posinf.astype(self.dtype), replaced)
    return jnp.where(self == -jnp.inf, limits.min if neginf is None else neginf.astype(self.dtype), replaced)


@ops.lowering("aten::heaviside")
def heaviside(self, values):
    """0 where `self < 0`, 1 where `self > 0`, `values` where it is 0; 0 for NaN."""
    if self.dtype != values.dtype:
        raise RuntimeError("heaviside is not yet implemented for tensors with different dtypes.")
    return jnp.where(self == 0, values, (self > 0).astype(self.dtype))


# -- whole numbers -------------------------------------------------------------------------------


@ops.lowering("aten::gcd", promote=SAME)
def gcd(self, other):
    """The greatest common divisor, not negative; of 0 and n it is n.

    Not `jnp.gcd`: that never returns for the most negative integer, whose absolute value is negative.
    """
    _require_whole("gcd", self)

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        a, b = state
        done = b == 0
        return jnp.where(done, a, b), jnp.where(done, 0, lax.rem(a, jnp.where(done, 1, b)))

    divisor, _ = lax.while_loop(lambda state: jnp.any(state[1] != 0), step, tuple(jnp.broadcast_arrays(self, other)))
    return jnp.abs(divisor)


@ops.lowering("aten::lcm", promote=SAME)
def lcm(self, other):
    """The least common multiple, not negative; 0 if one of them is."""
    divisor = gcd(self, other)
    return jnp.abs(lax.div(jnp.broadcast_to(self, divisor.shape), jnp.where(divisor == 0, 1, divisor)) * other)


@ops.lowering(
    "aten::bitwise_left_shift.Tensor",
    "aten::bitwise_left_shift.Tensor_Scalar",
    "aten::bitwise_left_shift.Scalar_Tensor",
    "aten::__lshift__.Tensor",
    "aten::__lshift__.Scalar",
    promote=SAME,
)
def bitwise_left_shift(self, other):
    """`self * 2**other` modulo 2**bits; 0 for a shift by `bits` or more, or by a negative number."""
    _require_whole("lshift", self)
    return lax.shift_left(*jnp.broadcast_arrays(self, other))


@ops.lowering(
    "aten::bitwise_right_shift.Tensor",
    "aten::bitwise_right_shift.Tensor_Scalar",
    "aten::bitwise_right_shift.Scalar_Tensor",
    "aten::__rshift__.Tensor",
    "aten::__rshift__.Scalar",
    promote=SAME,
)
def bitwise_right_shift(self, other):
    """`self / 2**other` rounded down; 0 or -1 for a shift by `bits` or more, or by a negative number."""
    _require_whole("rshift", self)
    self, other = jnp.broadcast_arrays(self, other)
    if jnp.issubdtype(self.dtype, jnp.unsignedinteger):
        return lax.shift_right_logical(self, other)
    return lax.shift_right_arithmetic(self, other)
