"""Hooks of modules and tensors, which a traced function has run: whether any has been added, removed or replaced since.

torch numbers hooks as they are added: one look at the number tells that none has been.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

__all__ = ["Hooks"]

_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_ALL = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")


class Hooks:
    """The hooks of modules that ran, of state tensors that want gradients, and those for all modules, as they are now."""

    def __init__(self, ran: Iterable[torch.nn.Module], tensors: Iterable[Any]) -> None:
        self._modules = list(ran)
        self._tensors = list(tensors)  # weak references, or calls that return one
        self._number = RemovableHandle.next_id
        self._hooks = self._all()
        self._some = [hooks for hooks in self._dicts() if hooks]
        self._counts = [*map(len, self._some)]

    def _dicts(self) -> list[dict[int, Any]]:
        tensors = [tensor for tensor in (refer() for refer in self._tensors) if tensor is not None]
        found = [getattr(modules, name) for name in _OF_ALL]
        found += [getattr(module, name) for name in _OF_MODULES for module in self._modules]
        return [*found, *(getattr(tensor, name) or {} for name in _OF_TENSORS for tensor in tensors)]

    def _all(self) -> list[list[int]]:
        """The numbers of the hooks, less those by which other threads watch what they trace."""
        return [
            [
                number
                for number, hook in [*hooks.items()]
                if not (getattr(hook, "__module__", None) or "").startswith("torchax_core.")
            ]
            for hooks in self._dicts()
        ]

    def hold(self) -> bool:
        """Whether they are still the same."""
        if self._number == RemovableHandle.next_id and [*map(len, self._some)] == self._counts:
            return True
        number = RemovableHandle.next_id
        if self._all() != self._hooks:
            return False
        self._number = number
        return True
