"""Copies: the same elements in a new tensor, perhaps in another dtype. Devices are the core's business."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torchax_core.opset import OpSet
from torchax_core.promotion import AS_GIVEN

ops = OpSet("torchax_ops_aten.copying")


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` in `dtype`, by torch's rules where XLA's differ.

    Complex to real drops the imaginary part (to bool it asks whether either part is non-zero). Float to a narrow
    integer wraps, as torch's conversion through a wider integer does, where XLA's own conversion saturates.
    """
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        if dtype == np.bool_:
            return x != 0
        x = x.real
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize < 4:
        x = x.astype(np.int64 if dtype == np.uint8 else np.int32)
    return x.astype(dtype)


@ops.lowering("aten::clone", "aten::_lazy_clone", "aten::detach_copy", "aten::lift_fresh_copy")
def clone(self):
    """`self`; arrays never change, so a second tensor over the same array is a copy."""
    return self


@ops.lowering("aten::_to_copy")
def to_copy(self, *, dtype=None):
    """`self` in `dtype`."""
    return self if dtype is None else cast(self, dtype)


@ops.lowering("aten::copy")
def copy(self, src):
    """`src` with the shape and dtype of `self`: what `self.copy_(src)` writes."""
    return jnp.broadcast_to(cast(src, self.dtype), self.shape)


@ops.lowering("aten::fill.Scalar", "aten::fill.Tensor", promote=AS_GIVEN)
def fill(self, value):
    """`value`, a number or a 0-d tensor, with the shape and dtype of `self`."""
    return jnp.broadcast_to(cast(jnp.asarray(value), self.dtype), self.shape)


@ops.lowering("aten::zero")
def zero(self):
    return jnp.zeros_like(self)


@ops.lowering("aten::_unsafe_view", "aten::_reshape_copy")
def unsafe_view(self, size):
    """`self` reshaped, one length of `size` perhaps -1; the result is not a view of it."""
    return jnp.reshape(self, size)
