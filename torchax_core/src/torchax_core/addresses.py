"""`data_ptr()` of tensors on the device: numbers that tell who shares memory with whom.

An array's own address changes with every write, since writes make new arrays. Code that asks for addresses asks whether two
tensors share memory (safetensors, `save_pretrained` of transformers, tied weights), so each storage has a range of addresses of
its own, as long as it lives, and a view lies in its base's. Nothing is there: they are not for reading.
Source: https://docs.pytorch.org/docs/stable/generated/torch.Tensor.data_ptr.html
"""

from __future__ import annotations

import threading
import weakref

from torchax_core.tensor import Storage, Tensor

__all__ = ["address_of", "let_tensors_have_addresses"]

_FIRST, _ALIGNED = 1 << 44, 512  # above what processes have; as torch's allocators align

_lock = threading.Lock()
_addresses: weakref.WeakKeyDictionary[Storage, int] = weakref.WeakKeyDictionary()
_next = _FIRST


def address_of(store: Storage) -> int:
    """The first address of a storage's range; 0 where there is no memory, as of an empty tensor or one given back."""
    global _next
    nbytes = store.array.nbytes
    if not nbytes:
        return 0
    with _lock:
        found = _addresses.get(store)
        if found is None:
            found = _addresses[store] = _next
            _next += -(-nbytes // _ALIGNED) * _ALIGNED
        return found


def data_ptr(tensor: Tensor) -> int:
    """torch.Tensor.data_ptr: where the tensor's first element would lie."""
    start = address_of(tensor._store) if tensor.numel() else 0
    return start and start + tensor.storage_offset() * tensor.element_size()


def let_tensors_have_addresses() -> None:
    """Let tensors on the device answer `data_ptr`. Their storages do by `untyped_storage` (freeing.py)."""
    Tensor.data_ptr = data_ptr  # type: ignore[method-assign]
