"""CPU tensors as arguments of compiled programs, again and again: moved once, and never stale.

Where JAX computes on the CPU, an array over the tensor's own memory is made, which changes with it; a program that takes one
must have ended before torch code runs again. Elsewhere the array of the last call is used if the tensor's bytes are still
those that were moved; versions alone would miss writes through `.data` or numpy.
"""

from __future__ import annotations

import weakref
from typing import Any

import jax
import torch

from torchax_core.convert import array_from_torch
from torchax_core.dtypes import BIT_CAST

__all__ = ["CpuArgument", "shares_memory"]


class CpuArgument:
    """One argument of a program, as it is from call to call."""

    def __init__(self) -> None:
        self._tensor: Any = lambda: None
        self._address = 0
        self._moved: torch.Tensor | None = None
        self._array: Any = None

    def array(self, tensor: torch.Tensor) -> jax.Array:
        """A jax array of a CPU tensor's present values: same shape and dtype."""
        known = self._tensor() is tensor and self._address == tensor.data_ptr()
        if shares_memory():
            if known:
                return self._array  # type: ignore[no-any-return]
            array = _over_memory(tensor)
            if array is None:
                return array_from_torch(tensor)
            self._keep(tensor, array)
            return array
        if not known:
            self._keep(tensor, None)  # seen once: most arguments are never seen again
            return array_from_torch(tensor)
        if self._array is None or not _same_bits(tensor, self._moved):
            self._moved = tensor.detach().clone()
            self._array = array_from_torch(self._moved)
        return self._array  # type: ignore[no-any-return]

    def _keep(self, tensor: torch.Tensor, array: Any) -> None:
        self._tensor = weakref.ref(tensor)
        self._address = tensor.data_ptr()
        self._moved = None
        self._array = array


def shares_memory() -> bool:
    """Whether JAX computes in the memory that CPU tensors lie in."""
    return jax.default_backend() == "cpu"


def _over_memory(tensor: torch.Tensor) -> jax.Array | None:
    """An array over the tensor's memory; None where JAX cannot take it as it is (strides, alignment, narrow types)."""
    if (
        not tensor.is_contiguous()
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.dtype in BIT_CAST
        or not tensor.numel()
    ):
        return None
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        array = jax.dlpack.from_dlpack(tensor.detach())
    return array if array.unsafe_buffer_pointer() == tensor.data_ptr() else None


def _same_bits(tensor: torch.Tensor, moved: torch.Tensor | None) -> bool:
    """Whether two tensors of one shape and dtype agree bit for bit: NaN is itself, and -0.0 is not 0.0."""
    if moved is None:
        return False
    a, b = tensor.detach(), moved
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if a.is_floating_point():
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        a, b = a.view(bits), b.view(bits)
    return torch.equal(a, b)
