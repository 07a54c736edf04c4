"""CPU twins of the tensors of one call: the same values, strides and sharing, for CPU torch to run the same op on.

Tensors that share a storage have twins that share one, so what an op writes through a view is seen in the twin's base.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import torch

from torchax_core.convert import torch_from_array
from torchax_core.device import DEVICE_TYPE
from torchax_core.tensor import Storage, Tensor
from torchax_core.view import View

__all__ = ["Twins", "values_of", "widened"]

_WIDE = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}
_WIDE |= {torch.complex64: torch.complex128}


def values_of(tensor: Tensor) -> torch.Tensor:
    """A CPU tensor of the present values. A view is read without being marked as read, which would change how it runs."""
    if isinstance(tensor, View) and not tensor._is_read():
        return torch_from_array(tensor._path.read(tensor._store.array, tensor._offsets))
    return torch_from_array(tensor._array())


@dataclasses.dataclass
class _Base:
    """A storage, the array it held, and that array's twin: in memory as torch would have it."""

    store: Storage
    array: jax.Array
    twin: torch.Tensor
    shared: bool = True  # every twin over it is a window on its memory


class Twins:
    """The twins of a call's tensors.

    pairs:  each tensor among the arguments, with its twin.
    stores: the storage each of them had; None for one that is no tensor of ours.
    bases:  the storages by identity, with their twins.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.stores: list[Storage | None] = []
        self.bases: dict[int, _Base] = {}

    def of(self, value: Any) -> Any:
        """`value` (nested lists, tuples and dicts of arguments) with twins in the place of tensors."""
        if isinstance(value, Tensor):
            found = self._twin(value)
            self.pairs.append((value, found))
            self.stores.append(value._store)
            return found
        if isinstance(value, torch.Tensor):  # a 0-d CPU tensor, CPU indices, the target of a copy off the device
            found = value.detach().clone()
            self.pairs.append((value, found))
            self.stores.append(None)
            return found
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == DEVICE_TYPE else value
        if isinstance(value, dict):
            return {k: self.of(v) for k, v in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.of, value))
        if value.__class__ in (list, tuple):
            return type(value)(map(self.of, value))
        return value

    def _twin(self, tensor: Tensor) -> torch.Tensor:
        store = tensor._store
        base = self.bases.get(id(store))
        if base is None:
            dense = torch_from_array(store.array)
            if dense.stride() != tuple(store.stride):
                dense = torch.empty_strided(dense.shape, store.stride, dtype=dense.dtype).copy_(dense)
            base = self.bases[id(store)] = _Base(store, store.array, dense)
        if isinstance(tensor, View) and any(s.rules is not None and s.rules.bit for s in tensor._path.steps):
            base.shared = False  # conj and neg bits: not what lies in memory
            return values_of(tensor)
        twin = torch.empty(0, dtype=tensor.dtype)
        memory = base.twin.untyped_storage()
        return twin.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def widened(value: Any) -> Any:
    """A copy of arguments with their tensors in double precision, for the truth of a result."""
    if isinstance(value, torch.Tensor):
        return value.to(_WIDE[value.dtype]) if value.dtype in _WIDE else value.clone()
    if isinstance(value, dict):
        return {k: widened(v) for k, v in value.items()}
    if value.__class__ in (list, tuple):
        return type(value)(map(widened, value))
    return value
