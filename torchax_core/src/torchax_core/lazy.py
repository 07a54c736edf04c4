"""Parameters and buffers of lazy modules on the device: their shape is known after the first forward.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.modules.lazy.LazyModuleMixin.html
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from torchax_core.tensor import DEVICE, DEVICE_TYPE, Tensor

__all__ = ["LazyBuffer", "LazyParameter", "make_lazy_here"]


class LazyParameter(UninitializedParameter, Tensor):  # type: ignore[misc]
    """An uninitialized parameter on device "jax"."""

    _allowed_methods = (*UninitializedParameter._allowed_methods, torch.Tensor.requires_grad_)

    def __new__(cls, requires_grad: bool = True, device: Any = None, dtype: torch.dtype | None = None) -> Any:
        made: Any = torch.empty(0, device=DEVICE, dtype=dtype).requires_grad_(requires_grad)
        made._is_param = True
        made.__class__ = cls
        return made

    def detach(self) -> LazyParameter:  # type: ignore[override]
        """Another one; `torch.nn.Parameter(lazy)` asks for it, in a move that changes nothing."""
        return LazyParameter(False, None, self._aval.dtype)

    def materialize(self, shape: Any, device: Any = None, dtype: torch.dtype | None = None) -> None:
        _materialize(self, shape, device, dtype)


class LazyBuffer(UninitializedBuffer, Tensor):  # type: ignore[misc]
    """An uninitialized buffer on device "jax"."""

    def __new__(
        cls, requires_grad: bool = False, device: Any = None, dtype: torch.dtype | None = None, persistent: bool = True
    ) -> Any:
        made: Any = torch.empty(0, device=DEVICE, dtype=dtype).requires_grad_(requires_grad)
        made.persistent = persistent
        made._is_buffer = True
        made.__class__ = cls
        return made

    def materialize(self, shape: Any, device: Any = None, dtype: torch.dtype | None = None) -> None:
        _materialize(self, shape, device, dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in cls._allowed_methods and func.__class__.__name__ != "method-wrapper":
            return super().__torch_function__(func, types, args, kwargs)  # which refuses
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if is_lazy(result) or not isinstance(result, torch.Tensor):
            return result
        if not isinstance(result, Tensor):
            return result.as_subclass(UninitializedBuffer)
        if func.__class__.__name__ != "method-wrapper":  # all but `.data`, which is to be asked for its device
            result.__class__ = LazyBuffer
        return result


def _materialize(lazy: Any, shape: Any, device: Any, dtype: torch.dtype | None) -> None:
    data = torch.empty(shape, device=device or DEVICE, dtype=dtype or lazy._aval.dtype)
    lazy.__class__ = Tensor
    lazy.data = data


def make_lazy_here() -> None:
    """Let lazy modules be made on the device, `LazyLinear(4, device="jax")`. Once per process."""
    for kind, ours in ((UninitializedParameter, LazyParameter), (UninitializedBuffer, LazyBuffer)):
        kind.__new__ = staticmethod(_choosing(kind.__new__, ours))  # type: ignore[method-assign]


def _choosing(new: Any, ours: Any) -> Any:
    def choose(
        cls: Any, requires_grad: bool = ours is LazyParameter, device: Any = None, dtype: Any = None, **kwargs: Any
    ) -> Any:
        chosen = torch.get_default_device() if device is None else torch.device(device)
        if chosen.type == DEVICE_TYPE:
            return ours(requires_grad, device, dtype, **kwargs)
        return new(cls, requires_grad, device, dtype, **kwargs)

    return choose
