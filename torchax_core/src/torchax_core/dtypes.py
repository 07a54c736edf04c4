"""The dtypes of torch and of jax, side by side. Every dtype crosses as it is; none is widened or narrowed."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

from torchax_core.errors import ConversionError

__all__ = ["BIT_CAST", "SCALAR_DTYPES", "dtype_pairs", "jax_dtype", "torch_dtype", "type_name"]

_PAIRS: list[tuple[str, Any]] = [
    ("bool", np.bool_),
    ("uint8", np.uint8),
    ("uint16", np.uint16),
    ("uint32", np.uint32),
    ("uint64", np.uint64),
    ("int8", np.int8),
    ("int16", np.int16),
    ("int32", np.int32),
    ("int64", np.int64),
    ("float16", np.float16),
    ("bfloat16", ml_dtypes.bfloat16),
    ("float32", np.float32),
    ("float64", np.float64),
    ("complex64", np.complex64),
    ("complex128", np.complex128),
    ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
    ("float8_e4m3fnuz", ml_dtypes.float8_e4m3fnuz),
    ("float8_e5m2", ml_dtypes.float8_e5m2),
    ("float8_e5m2fnuz", ml_dtypes.float8_e5m2fnuz),
    ("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu),
]

_TO_JAX: dict[torch.dtype, np.dtype] = {
    getattr(torch, name): np.dtype(scalar) for name, scalar in _PAIRS if hasattr(torch, name)
}
_TO_TORCH: dict[np.dtype, torch.dtype] = {ours: theirs for theirs, ours in _TO_JAX.items()}

BIT_CAST: dict[torch.dtype, tuple[torch.dtype, np.dtype]] = {
    theirs: ((torch.int16, np.dtype(np.int16)) if ours.itemsize == 2 else (torch.uint8, np.dtype(np.uint8)))
    for theirs, ours in _TO_JAX.items()
    if ours.isbuiltin != 1  # registered by ml_dtypes
}
"""dtypes numpy has no word for: torch dtype -> (torch, numpy) integer dtypes of the same width to view its bits as."""

SCALAR_DTYPES: dict[type, np.dtype] = {
    bool: np.dtype(np.bool_),
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    complex: np.dtype(np.complex128),
}
"""What a Python number is before an op casts it: wide enough to lose nothing."""


def dtype_pairs() -> dict[torch.dtype, np.dtype]:
    """All dtypes that both sides have, torch's to jax's."""
    return dict(_TO_JAX)


def jax_dtype(dtype: torch.dtype) -> np.dtype:
    """The numpy/jax dtype of a torch dtype. Raises ConversionError for one that JAX has none of."""
    try:
        return _TO_JAX[dtype]
    except KeyError:
        raise ConversionError(
            f"{dtype} has no JAX counterpart (quantized and 4-byte complex types have none). "
            f"JAX has: {', '.join(str(d).removeprefix('torch.') for d in _TO_JAX)}. Convert first, with `.to(dtype)`."
        ) from None


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype of a numpy/jax dtype. Raises ConversionError for one that torch has none of (int4, key arrays)."""
    try:
        return _TO_TORCH[np.dtype(dtype)]
    except (KeyError, TypeError):
        raise ConversionError(
            f"jax dtype {dtype} has no torch counterpart. torch has: {', '.join(str(d) for d in _TO_TORCH)}. "
            f"Convert first, with `array.astype(dtype)`{' (for keys: jax.random.key_data)' if 'key' in str(dtype) else ''}."
        ) from None


def type_name(dtype: torch.dtype) -> str:
    """What torch's C++ calls a dtype in its error messages."""
    names = {
        "float32": "Float",
        "float64": "Double",
        "float16": "Half",
        "int64": "Long",
        "int32": "Int",
        "int16": "Short",
    }
    names |= {"int8": "Char", "uint8": "Byte", "bool": "Bool", "bfloat16": "BFloat16"}
    names |= {"complex64": "ComplexFloat", "complex128": "ComplexDouble"}
    plain = str(dtype).removeprefix("torch.")
    return names.get(plain, plain)
