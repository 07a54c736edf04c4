"""Comparisons and logic, element by element: eq lt isnan logical_* bitwise_* maximum fmax ...; and `equal`."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from torchax_core.opset import OpSet
from torchax_core.promotion import ALWAYS_BOOL, KEEP, SAME

ops = OpSet("torchax_ops_aten.comparison")


# -- comparisons ---------------------------------------------------------------------------------

ops.table(
    ALWAYS_BOOL,
    {
        "aten::eq.Tensor": jnp.equal,
        "aten::eq.Scalar": jnp.equal,
        "aten::ne.Tensor": jnp.not_equal,
        "aten::ne.Scalar": jnp.not_equal,
        "aten::lt.Tensor": jnp.less,
        "aten::lt.Scalar": jnp.less,
        "aten::le.Tensor": jnp.less_equal,
        "aten::le.Scalar": jnp.less_equal,
        "aten::gt.Tensor": jnp.greater,
        "aten::gt.Scalar": jnp.greater,
        "aten::ge.Tensor": jnp.greater_equal,
        "aten::ge.Scalar": jnp.greater_equal,
    },
)

# NaN in either gives NaN for maximum and minimum, the other one for fmax and fmin.
ops.table(
    SAME,
    {
        "aten::maximum": jnp.maximum,
        "aten::minimum": jnp.minimum,
        "aten::fmax": jnp.fmax,
        "aten::fmin": jnp.fmin,
    },
)


@ops.lowering("aten::equal", data_dependent="(a == b).all(), a tensor, if the shapes are equal")
def equal(self, other):
    """A Python bool: whether shapes and all elements are equal, once in a common dtype. NaN equals nothing."""
    return self.shape == other.shape and bool(jnp.all(self == other))


@ops.lowering("aten::allclose", data_dependent="torch.isclose(a, b, ...).all(), a tensor")
def allclose(self, other, rtol=1e-05, atol=1e-08, equal_nan=False):
    """A Python bool: whether `abs(self - other) <= atol + rtol * abs(other)` everywhere, broadcast."""
    if self.dtype != other.dtype:
        raise RuntimeError(f"aten::allclose: both must have the same dtype, but have {self.dtype} and {other.dtype}.")
    return bool(jnp.allclose(self, other, rtol=rtol, atol=atol, equal_nan=equal_nan))


# -- kinds of numbers ----------------------------------------------------------------------------


def _if_float(test: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """`test`, which no integer passes."""
    return lambda x: test(x) if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.zeros(x.shape, bool)


def _signbit(x: jax.Array) -> jax.Array:
    return jnp.signbit(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x < 0


ops.table(
    KEEP,
    {
        "aten::isinf": _if_float(jnp.isinf),
        "aten::isnan": _if_float(jnp.isnan),
        "aten::isneginf": _if_float(jnp.isneginf),
        "aten::isposinf": _if_float(jnp.isposinf),
        "aten::signbit": _signbit,
    },
)


# -- logic ---------------------------------------------------------------------------------------

# Any dtypes, unpromoted: each is asked for itself whether it is 0. NaN is not.
ops.table(
    KEEP,
    {
        "aten::logical_and": jnp.logical_and,
        "aten::logical_not": jnp.logical_not,
        "aten::logical_or": jnp.logical_or,
        "aten::logical_xor": jnp.logical_xor,
    },
)

ops.table(
    SAME,
    {
        "aten::bitwise_not": jnp.bitwise_not,
        "aten::bitwise_and.Tensor": jnp.bitwise_and,
        "aten::bitwise_and.Scalar": jnp.bitwise_and,
        "aten::bitwise_and.Scalar_Tensor": jnp.bitwise_and,
        "aten::bitwise_or.Tensor": jnp.bitwise_or,
        "aten::bitwise_or.Scalar": jnp.bitwise_or,
        "aten::bitwise_or.Scalar_Tensor": jnp.bitwise_or,
        "aten::bitwise_xor.Tensor": jnp.bitwise_xor,
        "aten::bitwise_xor.Scalar": jnp.bitwise_xor,
        "aten::bitwise_xor.Scalar_Tensor": jnp.bitwise_xor,
    },
)
