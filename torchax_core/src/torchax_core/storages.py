"""torch's storages of bare bytes, of which device "jax" has none: an array has its shape and dtype from the start. What stands
for one, `tensor.untyped_storage()`, can be copied to the CPU.

Source: https://docs.pytorch.org/docs/stable/storage.html
"""

from __future__ import annotations

from typing import Any

import torch

from torchax_core.convert import torch_from_array
from torchax_core.errors import ConversionError
from torchax_core.tensor import DEVICE_TYPE

__all__ = ["let_bytes_be_copied", "refuse_storages"]


def refuse_storages() -> None:
    """Let making a storage on the device raise ConversionError: C++, which has no allocator for it, ends the process. All of
    torch's ways to one (typed storages, `.to(device=)`, `.clone()`) come by here. Once per process."""
    make = torch.UntypedStorage.__new__

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == DEVICE_TYPE:
            raise ConversionError(
                f"{cls.__name__}: device {DEVICE_TYPE!r} has no storages of bare bytes. Make a tensor, "
                "`torch.empty(n, dtype=torch.uint8, device='jax')`, and look at it as another dtype with `.view(dtype)`; copy a "
                "tensor with `.clone()`, or bring it to the CPU with `.cpu()` and take its storage there."
            )
        return make(cls, *args, **kwargs)

    torch.UntypedStorage.__new__ = staticmethod(new)  # type: ignore[method-assign,assignment]


def let_bytes_be_copied() -> None:
    """Let `cpu_storage.copy_(storage)`, and with it `storage.cpu()`, take the bytes of a tensor on the device, in the order of
    its strides; of a view, those of its base. Once per process."""
    copy = torch.UntypedStorage.copy_

    def copy_(self: Any, source: Any, non_blocking: Any = None) -> Any:
        store = getattr(source, "_store", None)
        if store is None:
            return copy(self, source, non_blocking)
        values = torch_from_array(store.array)
        if values.stride() != store.stride:
            values = torch.empty_strided(values.shape, store.stride, dtype=values.dtype).copy_(values)
        return copy(self, values.untyped_storage(), non_blocking)

    torch.UntypedStorage.copy_ = copy_  # type: ignore[method-assign]
