"""Copies between torch's CPU memory and jax arrays, both ways, every dtype, bit for bit.

torch memory can be written to and jax arrays cannot, so a crossing copies once; narrow float types cross by bit-cast.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import torch

from torchax_core.dtypes import BIT_CAST, SCALAR_DTYPES, jax_dtype, torch_dtype
from torchax_core.errors import ConversionError, DataDependentError

__all__ = ["array_from_numpy", "array_from_torch", "is_traced", "scalar_array", "torch_from_array", "zeros_array"]

_scalars: dict[tuple[type, Any], jax.Array] = {}
_SCALARS_KEPT = 4096
_NUMPY_DIMS = 64  # more than these cross as one


def is_traced(array: Any) -> bool:
    """True for the stand-in that an array is while a function is traced."""
    return isinstance(array, jax.core.Tracer)


def array_from_numpy(value: np.ndarray, sharding: Any = None) -> jax.Array:
    """A jax array holding `value`, dtype kept (64-bit too), laid out by a sharding: each device is sent its part only.

    `value` must not be written to afterwards.
    """
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        return jax.device_put(value, sharding)


def zeros_array(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Zeros, made without compiling anything."""
    if len(shape) > _NUMPY_DIMS:
        return _reshaped(zeros_array((math.prod(shape),), dtype), shape)
    return array_from_numpy(np.zeros(shape, dtype))


def _reshaped(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        return jax.lax.reshape(array, shape)


def array_from_torch(tensor: torch.Tensor, sharding: Any = None) -> jax.Array:
    """A jax array with a copy of a CPU tensor's values, same shape and dtype, laid out by a sharding if one is given.

    Raises ConversionError for layouts and dtypes that JAX has none of (sparse, quantized).
    """
    dtype = jax_dtype(tensor.dtype)
    if tensor.layout is not torch.strided:
        raise ConversionError(
            f"a tensor of layout {tensor.layout} cannot be put on device 'jax', which holds dense tensors only. "
            "Make it dense first, with `.to_dense()`."
        )
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dim() > _NUMPY_DIMS:
        array = _reshaped(array_from_torch(tensor.reshape(-1)), tuple(tensor.shape))
        return array if sharding is None else jax.device_put(array, sharding)
    cast = BIT_CAST.get(tensor.dtype)
    if cast is not None:
        value = tensor.contiguous().view(cast[0]).numpy().view(dtype)
    else:
        value = tensor.numpy()
    return array_from_numpy(np.array(value, copy=True, order="C"), sharding)


def torch_from_array(array: jax.Array) -> torch.Tensor:
    """A CPU tensor with a copy of a jax array's values, same shape and dtype, contiguous.

    Raises DataDependentError while `array` is traced: its values are not known yet.
    """
    if is_traced(array):
        raise DataDependentError(
            f"the values of a traced tensor ({array.aval}) are needed on the CPU, but inside a jitted function they are "
            "known only when the program runs. Move the copy (`.cpu()`, `.item()`, `.numpy()`, `print`) out of the "
            "function, or return the tensor."
        )
    if not (array.is_fully_addressable or array.is_fully_replicated):
        raise ConversionError(
            f"an array of shape {array.shape} lies on devices of several processes, of which this one sees its own. To have all "
            "of it on the CPU, let every process call `torchax_core.distributed.full_tensor(tensor).cpu()`; this process's parts "
            "are `torchax_core.distributed.local_shards(tensor)`."
        )
    if array.ndim > _NUMPY_DIMS:
        return torch_from_array(_reshaped(array, (array.size,))).reshape(array.shape)
    dtype = torch_dtype(array.dtype)
    value = np.array(array, copy=True, order="C")
    cast = BIT_CAST.get(dtype)
    if cast is not None:
        return torch.from_numpy(value.view(cast[1])).view(dtype)
    return torch.from_numpy(value)


def scalar_array(value: bool | int | float | complex) -> jax.Array:
    """A 0-d array of a Python number, as wide as the number (int64, float64, complex128), kept for the next call."""
    # -0.0 == 0.0 and NaN != NaN as keys, so those go by their spelling, and complex numbers too, which have two parts
    plain = value and value == value and value.__class__ is not complex
    key = (value.__class__, value if plain else repr(value))
    array = _scalars.get(key)
    if array is None:
        dtype = SCALAR_DTYPES.get(value.__class__)
        if dtype is None:
            raise ConversionError(f"expected a bool, int, float or complex, but got {value!r} of {type(value)}.")
        try:
            array = array_from_numpy(np.asarray(value, dtype))
        except OverflowError:
            raise ConversionError(f"the number {value} does not fit into 64 bits.") from None
        if is_traced(array):  # in a shard_map without jit, where all that is made is part of it
            return array
        if len(_scalars) >= _SCALARS_KEPT:
            _scalars.clear()
        _scalars[key] = array
    return array
