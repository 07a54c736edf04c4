"""What a compiled program hangs on besides its inputs' values: a guard each, looked at before every call."""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch

from torchax_core.hooks import Hooks
from torchax_core.tensor import Storage, Tensor, changes
from torchax_core.trace import get_grad

__all__ = ["Guards"]

_STORE, _REQUIRES_GRAD, _TRAINING = map(operator.attrgetter, ("_store", "requires_grad", "training"))


def _same(tensor: Tensor) -> Tensor:
    return tensor


class Guards:
    """State tensors, modules, `.grad`s and values on the host, as they were when the program was traced.

    tensors:   state tensors, the storage of each, and whether it required gradients.
    outside:   the identities of those that the function came by in some way that may be unknown: through a weak reference, a
               default argument, another library's object. When nobody holds such a tensor any more, the function would not
               come by it again, and the program is lost.
    modules:   the modules that ran.
    grads:     tensors whose `.grad` matters, and whether it was None.
    values:    a name, how to read it, and what was read.
    arguments: the places of the arguments that are tensors, and whether these required gradients.
    gradients_matter: whether it matters to the program what requires gradients.

    A model has hundreds of tensors: the quick check lays everything out in columns, and its loops are C's.
    """

    def __init__(
        self,
        tensors: list[tuple[Tensor, Storage, bool]],
        outside: set[int],
        modules: list[torch.nn.Module],
        grads: list[tuple[torch.Tensor, bool]],
        values: list[tuple[str, Callable[[], Any], Any]],
        arguments: list[tuple[int, bool]],
        gradients_matter: bool,
    ) -> None:
        self.lost: list[Any] = []
        self._references = [self._refer(tensor, id(tensor) in outside) for tensor, _, _ in tensors]
        self._stores = [store for _, store, _ in tensors]
        self._changes = changes()
        self.gradients_matter = gradients_matter
        self._grads = grads
        self._values = values
        self._arguments = [place for place, _ in arguments]
        self._requires_grad = [*(flag for *_, flag in tensors), *(flag for _, flag in arguments)]
        self._modules = modules
        self._training = [module.training for module in modules]
        self._parts = [
            (module, what, members, [*map(id, members.values())])
            for module in modules
            for what, members in (
                ("parameter", module._parameters),
                ("buffer", module._buffers),
                ("module", module._modules),
            )
        ]
        self._empty = [members for *_, members, ids in self._parts if not ids]
        self._members = [members.values() for *_, members, ids in self._parts if ids]
        self._member_ids = [i for *_, ids in self._parts for i in ids]
        self._hooks = Hooks(modules, [r for r, (_, _, wants) in zip(self._references, tensors, strict=True) if wants])
        self._without_grad = [tensor for tensor, none in grads if none]
        self._with_grad = [tensor for tensor, none in grads if not none]

    def _refer(self, tensor: Tensor, weakly: bool) -> Callable[[], Any]:
        return weakref.ref(tensor, self.lost.append) if weakly else functools.partial(_same, tensor)

    @property
    def tensors(self) -> list[tuple[Tensor, Storage, bool]]:
        """The state tensors, the storage of each, and whether it required gradients."""
        return [*zip(map(operator.call, self._references), self._stores, self._requires_grad, strict=False)]

    @property
    def containers(self) -> set[int]:
        """The identities of the modules' dicts, whose members are guarded here."""
        return {id(members) for _, _, members, _ in self._parts}

    def hold(self, leaves: list[Any]) -> bool:
        """Whether all is as it was, for these arguments."""
        return (
            not self.lost
            and (self._changes == changes() or self._keep_their_storages())
            and (not self.gradients_matter or self._flags(leaves) == self._requires_grad)
            and [*map(_TRAINING, self._modules)] == self._training
            and [*map(id, itertools.chain.from_iterable(self._members))] == self._member_ids
            and not any(self._empty)
            and self._hooks.hold()
            and all(map(operator.is_, map(get_grad, self._without_grad), itertools.repeat(None)))
            and all(map(operator.is_not, map(get_grad, self._with_grad), itertools.repeat(None)))
            and all(read() == value for _, read, value in self._values)
        )

    def _keep_their_storages(self) -> bool:
        now = changes()
        kept = [*map(_STORE, map(operator.call, self._references))] == self._stores
        if kept:
            self._changes = now
        return kept

    def _flags(self, leaves: list[Any]) -> list[bool]:
        given = map(leaves.__getitem__, self._arguments)
        with torch._C.DisableTorchFunctionSubclass():  # twice as fast
            return [*map(_REQUIRES_GRAD, map(operator.call, self._references)), *map(_REQUIRES_GRAD, given)]

    def what_changed(self, leaves: list[Any]) -> str:
        """In words, what is not as it was; empty if all is."""
        if self.lost:
            return f"{len(self.lost)} state tensor(s) that the function met are gone: nobody else holds them now"
        tensors = self.tensors
        for tensor, store, requires_grad in tensors:
            if tensor._store is not store:
                return f"a state tensor of shape {tuple(tensor.shape)} holds other storage than when traced"
            if self.gradients_matter and tensor.requires_grad is not requires_grad:
                return f"requires_grad of a state tensor of shape {tuple(tensor.shape)} became {tensor.requires_grad}"
        if self.gradients_matter:
            for i, flag in zip(self._arguments, self._requires_grad[len(tensors) :], strict=True):
                if leaves[i].requires_grad is not flag:
                    return f"requires_grad of an argument of shape {tuple(leaves[i].shape)} became {not flag}"
        for module, training in zip(self._modules, self._training, strict=True):
            if module.training is not training:
                return f"{type(module).__name__}.training became {module.training}"
        for module, what, members, ids in self._parts:
            if [*map(id, members.values())] != ids:
                return f"a {what} of {type(module).__name__} was replaced"
        if not self._hooks.hold():
            return "a hook of a module or a state tensor was added, removed or replaced"
        for tensor, was_none in self._grads:
            if (get_grad(tensor) is None) is not was_none:
                return f"the .grad of a state tensor of shape {tuple(tensor.shape)} {'appeared' if was_none else 'became None'}"
        for name, read, value in self._values:
            if read() != value:
                return f"{name} changed from {value} to {read()}"
        return ""

    def replace(self, news: dict[int, Tensor]) -> None:
        """Look at other state tensors from now on: `news` has them by the identities of the old ones."""
        for i, (tensor, _, _) in enumerate(self.tensors):
            if id(tensor) in news:
                new = news[id(tensor)]
                self._references[i], self._stores[i] = self._refer(new, weakly=True), new._store
        for ids in (self._member_ids, *(ids for *_, ids in self._parts)):
            ids[:] = [id(news[i]) if i in news else i for i in ids]
