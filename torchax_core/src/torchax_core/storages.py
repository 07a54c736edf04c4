"""torch's storages of bare bytes, of which device "jax" has none: an array has its shape and dtype from the start.

Source: https://docs.pytorch.org/docs/stable/storage.html
"""

from __future__ import annotations

from typing import Any

import torch

from torchax_core.errors import ConversionError
from torchax_core.tensor import DEVICE_TYPE

__all__ = ["refuse_storages"]


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
