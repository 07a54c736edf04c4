"""Comparisons and logic, element by element: eq lt isnan logical_* bitwise_* maximum fmax ...; and `equal`."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from torchax_core.opset import OpSet
from torchax_core.promotion import ALWAYS_BOOL, KEEP, SAME

ops = OpSet("torchax_ops_aten.comparison")


# -- comparisons ---------------------------------------------------------------------------------

Binary = Callable[[jax.Array, jax.Array], jax.Array]


def _ordered(name: str, function: Binary, error: type[RuntimeError] = NotImplementedError) -> Binary:
    """`function`, refusing complex numbers with torch's `error`: JAX orders them by their parts, torch not at all."""

    def checked(x: jax.Array, y: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise error(f"{name} not implemented for complex tensors.")
        return function(x, y)

    return checked


_COMPARISONS: dict[str, Binary] = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": _ordered("lt", jnp.less),
    "le": _ordered("le", jnp.less_equal),
    "gt": _ordered("gt", jnp.greater),
    "ge": _ordered("ge", jnp.greater_equal),
}
ops.table(
    ALWAYS_BOOL,
    {f"aten::{name}.{other}": body for name, body in _COMPARISONS.items() for other in ("Tensor", "Scalar")},
)

# NaN in either gives NaN for maximum and minimum, the other one for fmax and fmin.
ops.table(
    SAME,
    {
        "aten::maximum": _ordered("maximum", jnp.maximum, RuntimeError),
        "aten::minimum": _ordered("minimum", jnp.minimum, RuntimeError),
        "aten::fmax": _ordered("fmax", jnp.fmax, RuntimeError),
        "aten::fmin": _ordered("fmin", jnp.fmin, RuntimeError),
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
        raise RuntimeError(f"{self.dtype} did not match {other.dtype}")
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


def _of_whole(name: str, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def checked(*operands: jax.Array) -> jax.Array:
        if jnp.issubdtype(operands[0].dtype, jnp.inexact):
            raise NotImplementedError(f"\"{name}\" not implemented for '{operands[0].dtype}': it takes integers")
        return function(*operands)

    return checked


_BITWISE: dict[str, Binary] = {
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
}
ops.table(SAME, {"aten::bitwise_not": _of_whole("bitwise_not", jnp.bitwise_not)})
ops.table(
    SAME,
    {
        f"aten::{name}.{operands}": _of_whole(name, body)
        for name, body in _BITWISE.items()
        for operands in ("Tensor", "Scalar", "Scalar_Tensor")
    },
)
