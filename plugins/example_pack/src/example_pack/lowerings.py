"""The op for JAX: a pure function of arrays, compiled by jax.jit once per shape."""

from __future__ import annotations

import jax.numpy as jnp

from torchax_core import SAME, OpSet

__all__ = ["ops"]

ops = OpSet("example_pack.lowerings")


# The parameters carry the schema's names. SAME computes half types in float32; `threshold` arrives as a 0-d array, so
# that another value does not compile anew (`static=["threshold"]` would make it a Python float).
@ops.lowering("example_pack::soft_threshold", promote=SAME)
def soft_threshold(x, threshold):
    """`x` moved towards 0 by `threshold`, and 0 where it is no larger. Any shape."""
    return jnp.sign(x) * jnp.maximum(jnp.abs(x) - threshold, 0)
