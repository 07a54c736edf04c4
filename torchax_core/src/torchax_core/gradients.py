"""The `.grad`s that a compiled program reads and sets.

Those it reads are found anew at every call: a backward outside the program puts other tensors there.

Those it sets: a backward makes a new tensor where it finds `.grad` None, and so does, to all appearances, a compiled program.
To make none where nobody could tell, it keeps the tensors it has set and puts new values into them, as long as no one else
holds one.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchax_core.convert import is_traced
from torchax_core.tensor import Aval, Storage, Tensor, make_tensor, write_all
from torchax_core.trace import get_grad, set_grad
from torchax_core.wrapped import Form, like, parts

__all__ = ["Gradients"]


class Gradients:
    """What a program sets `.grad` of which tensors to: to None, or to one of its outputs."""

    def __init__(self) -> None:
        self.read: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensors, and their gradients that are inputs
        self.wrapped: list[
            tuple[torch.Tensor, Form, list[tuple[int, Aval]]]
        ] = []  # DTensors, whose gradients are made anew
        self.cleared: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []
        self.places: list[int] = []
        self._grads: list[Tensor] = []
        self._stores: list[Storage] = []
        self._counts: list[int] = []

    def follow(self, replace: Callable[[list[tuple[Tensor, Tensor]]], bool], held: Callable[[], set[int]]) -> str:
        """Take up the gradients that are there now, in the place of those that the program has read; in words, what makes
        that impossible.

        replace: lets tensors be inputs in the place of others, if that is all it takes.
        held:    the identities of the tensors that the program has met elsewhere too.
        """
        if all(get_grad(tensor) is grad for tensor, grad in self.read):
            return ""
        now = [get_grad(tensor) for tensor, _ in self.read]
        others = [
            (old, new) for (_, old), new in zip(self.read, now, strict=True) if new is not old and new is not None
        ]
        if not others:
            return ""
        for old, new in others:
            if like(new) != like(old) or any(is_traced(part._store.array) for part in parts(new)):
                return f"a .grad was {_short(old)}, and is {_short(new)} now"
        pairs = [pair for old, new in others for pair in zip(parts(old), parts(new), strict=True)]
        if not held().isdisjoint(id(old) for old, _ in others) or not replace(pairs):
            return "a .grad is another tensor now, and the one before is state of the function in some other way, too"
        self.read = [(tensor, old if new is None else new) for (tensor, old), new in zip(self.read, now, strict=True)]
        return ""

    def add(self, tensor: torch.Tensor, grad: Tensor, place: int) -> None:
        """`tensor.grad` is to be output number `place`, in `grad` if that can be."""
        self.tensors.append(tensor)
        self.places.append(place)
        self._grads.append(grad)
        self._stores.append(grad._store)

    def add_wrapped(self, tensor: torch.Tensor, form: Form, places: list[tuple[int, Aval]]) -> None:
        """`tensor.grad` is to be a wrapper of that form, of these outputs."""
        self.wrapped.append((tensor, form, places))

    def store_ids(self) -> set[int]:
        """The identities of the gradients' storages."""
        return set(map(id, self._stores))

    def outputs(self) -> Iterator[tuple[Any, int]]:
        """The tensors that get a gradient, each with the number of the output that it is."""
        return zip(self.tensors, self.places, strict=True)

    def put(self, outputs: Any) -> None:
        """Set all `.grad`s."""
        for tensor in self.cleared:
            if get_grad(tensor) is not None:
                set_grad(tensor, None)
        for tensor, form, places in self.wrapped:
            set_grad(tensor, form.make([make_tensor(outputs[at], aval) for at, aval in places]))
        if not self.tensors:
            return
        are_set = all(map(operator.is_, map(get_grad, self.tensors), self._grads))
        as_left = are_set and self._references() == self._counts
        if not as_left:
            self._renew(outputs)
        write_all(self._stores, map(outputs.__getitem__, self.places))
        if not as_left:
            for i, tensor in enumerate(self.tensors):
                if get_grad(tensor) is not self._grads[i]:
                    set_grad(tensor, self._grads[i])
            self._counts = self._references()

    def _references(self) -> list[int]:
        return [*map(sys.getrefcount, self._grads), *map(sys.getrefcount, self._stores)]

    def _renew(self, outputs: Any) -> None:
        """Make new gradients in the place of those that someone else holds too, themselves or a view of them."""
        alone, alone_store, in_grad = _references_when_alone(outputs[self.places[0]], self._grads[0]._aval)
        count = len(self._grads)
        references = self._references()
        are_set = [*map(operator.is_, map(get_grad, self.tensors), self._grads)]
        for i in range(count):
            if references[i] > alone + in_grad * are_set[i] or references[count + i] > alone_store:
                grad = make_tensor(outputs[self.places[i]], self._grads[i]._aval)
                self._grads[i], self._stores[i] = grad, grad._store


def _short(grad: torch.Tensor) -> str:
    return ", ".join(str(part._aval) for part in parts(grad)) or type(grad).__name__


def _references_when_alone(array: Any, aval: Aval) -> tuple[int, int, int]:
    """The references that a gradient has, and its storage, that nobody but a `Gradients` holds; and how many more if it is set.

    Counted, not known: torch has changed what its C++ holds.
    """
    if not _when_alone:
        probe = Gradients()
        tensor = make_tensor(array, aval)
        probe.add(tensor, make_tensor(array, aval), 0)
        alone, alone_store = probe._references()
        set_grad(tensor, probe._grads[0])
        _when_alone.extend([alone, alone_store, probe._references()[0] - alone])
    return _when_alone[0], _when_alone[1], _when_alone[2]


_when_alone: list[int] = []
