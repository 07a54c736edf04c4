"""`torchax.tensor`: Tensor, View and Environment."""

from __future__ import annotations

from typing import Any

from torchax_core.bridge import tensor
from torchax_core.environment import Environment
from torchax_core.errors import OperatorNotFound
from torchax_core.tensor import Tensor as _Tensor
from torchax_core.view import View

__all__ = ["Environment", "OperatorNotFound", "Tensor", "View"]


class _TensorName(type):
    """google/torchax makes tensors by their class, `Tensor(array, env)`; ours are made by a function."""

    def __call__(cls, elem: Any, env: Any = None, requires_grad: bool = False) -> _Tensor:
        made = tensor(elem)
        floating = made.is_floating_point() or made.is_complex()
        return made.requires_grad_(requires_grad and floating)  # type: ignore[return-value]

    def __getattr__(cls, name: str) -> Any:
        return getattr(_Tensor, name)  # as in `map(Tensor.jax, tensors)`

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Tensor)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Tensor)


class Tensor(metaclass=_TensorName):
    """torchax_core.Tensor for isinstance; called with a jax array, a Tensor over it. Any environment will do."""
