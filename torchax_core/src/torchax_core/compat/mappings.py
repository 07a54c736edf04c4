"""`torchax.ops.mappings`: dtypes and tensors from torch to jax and back."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch

from torchax_core.bridge import j2t_copy, t2j_copy
from torchax_core.dtypes import dtype_pairs, jax_dtype, torch_dtype

__all__ = ["JAX_DTYPE_TO_TORCH", "TORCH_DTYPE_TO_JAX", "j2t", "j2t_dtype", "t2j", "t2j_dtype"]

TORCH_DTYPE_TO_JAX: dict[Any, Any] = {**dtype_pairs(), None: None}
JAX_DTYPE_TO_TORCH: dict[Any, Any] = {ours: theirs for theirs, ours in TORCH_DTYPE_TO_JAX.items()}


def t2j(t: torch.Tensor, use_dlpack: bool = True) -> jax.Array:
    """A jax array with a copy of the tensor's values; sparse ones made dense. `use_dlpack` has no effect."""
    return t2j_copy(t.to_dense() if t.layout is not torch.strided else t)  # type: ignore[no-any-return]


def j2t(x: jax.Array, use_dlpack: bool = True) -> torch.Tensor:
    """A CPU tensor with a copy of the array's values. `use_dlpack` has no effect."""
    return j2t_copy(x)  # type: ignore[no-any-return]


def t2j_dtype(dtype: torch.dtype | None) -> Any:
    """The jax dtype of a torch dtype. Raises ConversionError for one that jax has none of."""
    return None if dtype is None else jax_dtype(dtype)


def j2t_dtype(dtype: Any) -> Any:
    """The torch dtype of a jax dtype. Raises ConversionError for one that torch has none of."""
    return None if dtype is None else torch_dtype(np.dtype(dtype))
