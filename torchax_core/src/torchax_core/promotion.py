"""How the dtypes of an op's arguments become the one dtype it computes in.

A lowering states its rule once (``promote=SAME``) and its body only ever sees arguments of one dtype. The rules are
torch's own, evaluated by :func:`torch._prims_common.elementwise_dtypes` on the call's avals, once per signature.

Half types compute in float32 (torch's "opmath" type) and are rounded once, at the end: that is what torch's CPU and
CUDA kernels do, and on XLA the conversions fuse away.

Source: https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as _Kind

__all__ = [
    "ALWAYS_BOOL",
    "AS_GIVEN",
    "BOOL_TO_LONG",
    "COMPLEX_TO_FLOAT",
    "INT_TO_FLOAT",
    "KEEP",
    "SAME",
    "Promotion",
    "opmath",
]


@dataclasses.dataclass(frozen=True)
class Promotion:
    """A promotion rule: a kind, and the arguments it holds for (empty: every Tensor and Scalar argument).

    ``SAME.of("self", "other")`` leaves all other arguments (a condition, an index) as they came.
    """

    name: str
    kind: _Kind | None
    arguments: tuple[str, ...] = ()

    def of(self, *arguments: str) -> Promotion:
        """The same rule, for these arguments only, by their schema names."""
        return dataclasses.replace(self, arguments=arguments)


SAME = Promotion("SAME", _Kind.DEFAULT)
"""All arguments in their common dtype: add, mul, where."""
INT_TO_FLOAT = Promotion("INT_TO_FLOAT", _Kind.INT_TO_FLOAT)
"""As SAME, and integers become the default float type: exp, true division, mean."""
ALWAYS_BOOL = Promotion("ALWAYS_BOOL", _Kind.ALWAYS_BOOL)
"""Arguments in their common dtype, the result is bool: eq, lt, logical_and."""
COMPLEX_TO_FLOAT = Promotion("COMPLEX_TO_FLOAT", _Kind.COMPLEX_TO_FLOAT)
"""As SAME, and a complex argument gives a real result: abs, angle."""
BOOL_TO_LONG = Promotion("BOOL_TO_LONG", _Kind.BOOL_TO_LONG)
"""As SAME, and bools become int64: pow, prod."""
KEEP = Promotion("KEEP", None)
"""No promotion: the body sees every tensor in the dtype it came in, and numbers in the dtype the tensors compute in. The
default."""
AS_GIVEN = Promotion("AS_GIVEN", _Kind.DEFAULT, ("",))  # a rule for the argument of no name
"""No promotion of numbers either: they come as wide as Python's (int64, float64, complex128, bool). For a fill value, which
must lose nothing before its cast, and a step size whose 1 - beta must keep its digits."""


def opmath(x: jax.Array) -> jax.Array:
    """`x`, with float16, bfloat16 and float8 widened to float32: the type torch accumulates and computes in."""
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
        return x.astype(jnp.float32)
    return x
