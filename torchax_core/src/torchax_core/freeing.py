"""A tensor's memory given back and taken again, by `tensor.untyped_storage().resize_(0)` and `.resize_(nbytes)`.

torch.distributed's fully_shard does so to gathered weights, between their uses. Of a storage of bare bytes there is nothing
else on device "jax".
Source: https://docs.pytorch.org/docs/stable/storage.html#torch.UntypedStorage.resize_
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from torchax_core.addresses import address_of
from torchax_core.convert import is_traced, zeros_array
from torchax_core.tensor import Storage, Tensor, _tick, active

__all__ = ["Freed", "let_storages_be_freed"]

_untyped_storage = torch.Tensor.untyped_storage


class Freed:
    """Stands for an array whose memory was given back. An op on it fails."""

    nbytes = 0

    def __init__(self, array: Any) -> None:
        self.shape, self.dtype, self.ndim, self.size = array.shape, array.dtype, array.ndim, array.size

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"a tensor of shape {self.shape} was used after its memory was given back, by `untyped_storage().resize_(0)`. "
            "`resize_` it to its size again, and write to it, first."
        )

    __array__ = _refuse
    __jax_array__ = property(_refuse)  # jax asks whether there is one
    is_fully_addressable = property(_refuse)  # asked before values are read


def let_storages_be_freed() -> None:
    """Let the storages of tensors on the device answer `resize_`, `size`, `nbytes` and `data_ptr`."""
    Tensor.untyped_storage = untyped_storage  # type: ignore[method-assign]


def untyped_storage(tensor: Tensor) -> torch.UntypedStorage:
    """torch.Tensor.untyped_storage, of the whole array under a view."""
    storage = _untyped_storage(tensor)
    store = tensor._store
    storage.resize_ = functools.partial(_resize, storage, store)  # type: ignore[method-assign]
    storage.size = storage.nbytes = lambda: int(store.array.nbytes)  # type: ignore[method-assign]
    storage._store = store  # type: ignore[attr-defined]  # for copies of its bytes (storages.py)
    storage.data_ptr = functools.partial(address_of, store)  # type: ignore[method-assign]
    return storage


def _resize(storage: torch.UntypedStorage, store: Storage, nbytes: int) -> torch.UntypedStorage:
    array: Any = store.array
    whole = array.size * np.dtype(array.dtype).itemsize
    if nbytes not in (0, whole):
        raise RuntimeError(
            f"untyped_storage().resize_: memory on device 'jax' is an array of {whole} bytes, which can be given back (0) and "
            f"taken again ({whole}), but not be {nbytes} bytes long. Use `tensor.resize_`."
        )
    if (nbytes == whole) != isinstance(array, Freed):
        return storage
    trace = active.trace
    if is_traced(array) if trace is None else not trace.may_resize(store):
        return storage  # a program decides by itself when it frees what it has from outside
    store.array = zeros_array(array.shape, array.dtype) if nbytes else Freed(array)  # type: ignore[assignment]
    store.version = next(_tick)
    return storage
