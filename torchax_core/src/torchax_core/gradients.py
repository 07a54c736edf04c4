"""The `.grad`s that a compiled program sets.

A backward makes a new tensor each time it finds `.grad` None, and so does, to all appearances, a compiled program. To make
none where nobody could tell, it keeps the tensors it has set and puts new values into them, as long as no one else holds one.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from typing import Any

import torch

from torchax_core.tensor import Aval, Storage, Tensor, make_tensor, write_all
from torchax_core.trace import get_grad, set_grad

__all__ = ["Gradients"]


class Gradients:
    """What a program sets `.grad` of which tensors to: to None, or to one of its outputs."""

    def __init__(self) -> None:
        self.cleared: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []
        self.places: list[int] = []
        self._grads: list[Tensor] = []
        self._stores: list[Storage] = []
        self._counts: list[int] = []

    def add(self, tensor: torch.Tensor, grad: Tensor, place: int) -> None:
        """`tensor.grad` is to be output number `place`, in `grad` if that can be."""
        self.tensors.append(tensor)
        self.places.append(place)
        self._grads.append(grad)
        self._stores.append(grad._store)

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
