"""How exactly products are computed: what the user chose for float32, which accelerators otherwise lower."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

__all__ = ["einsum", "precision"]

_PRECISION = {
    "highest": jax.lax.Precision.HIGHEST,
    "high": jax.lax.Precision.HIGH,
    "medium": jax.lax.Precision.DEFAULT,
}


def precision(dtype: Any = jnp.float32) -> jax.lax.Precision:
    """The precision of products of `dtype`: by `torch.set_float32_matmul_precision` for float32, else the type's own
    arithmetic. Sets whose bodies ask for it say so with `depends_on`."""
    return _PRECISION[torch.get_float32_matmul_precision()] if dtype in _CHOSEN else jax.lax.Precision.DEFAULT


_CHOSEN = (jnp.float32, jnp.complex64)


def einsum(spec: str, *operands: jax.Array, **options: Any) -> jax.Array:
    """`jnp.einsum` in that precision; half types are summed in float32, which is what comes back."""
    dtype = jnp.result_type(*operands)
    wide = jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype
    return jnp.einsum(spec, *operands, precision=precision(dtype), preferred_element_type=wide, **options)
