"""Tensors made of tensors of ours: torch.distributed's DTensor, and any other class that says its parts by `__tensor_flatten__`.

To a program the parts are what there is: inputs and outputs. The tensor around them is made anew of new parts, or, where it was
there before, stays the object that it is.
Source: https://docs.pytorch.org/docs/stable/notes/extending.html#subclassing-torch-tensor
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchax_core.tensor import Tensor, active

__all__ = ["Form", "guard", "is_wrapper", "like", "parts"]


def is_wrapper(value: Any) -> bool:
    """Whether it is a tensor of another class, whose parts are all tensors of ours."""
    if not isinstance(value, torch.Tensor) or isinstance(value, Tensor) or not is_traceable_wrapper_subclass(value):
        return False
    inner = [part for _, part in _tensors(value)]
    return bool(inner) and all(isinstance(part, Tensor) or is_wrapper(part) for part in inner)


def parts(tensor: torch.Tensor) -> list[Tensor]:
    """The tensors of ours that a wrapper is made of; of a tensor of ours itself; of any other none."""
    if isinstance(tensor, Tensor):
        return [tensor]
    return (
        []
        if not is_traceable_wrapper_subclass(tensor)
        else [part for _, inner in _tensors(tensor) for part in parts(inner)]
    )


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """What is looked at here is not for the function being traced, if one is."""
    trace, active.trace = active.trace, None
    try:
        yield
    finally:
        active.trace = trace


def _tensors(wrapper: Any) -> list[tuple[str, torch.Tensor]]:
    with _unseen():
        names, _ = wrapper.__tensor_flatten__()
        found = [(name, getattr(wrapper, name)) for name in names]
    return [(name, part) for name, part in found if isinstance(part, torch.Tensor)]  # DTensor names its mesh, too


class Form:
    """What a wrapper is besides its parts' values: class, context, size and strides.

    Hashable; two are equal if the wrappers differ in nothing but their parts.
    """

    __slots__ = ("inner", "leaf", "names", "requires_grad", "rest", "_key")

    def __init__(self, wrapper: Any) -> None:
        inner = dict(_tensors(wrapper))
        self.names = tuple(inner)
        self.inner = tuple(None if isinstance(part, Tensor) else Form(part) for part in inner.values())
        with _unseen():
            names, context = wrapper.__tensor_flatten__()
            others = {name: getattr(wrapper, name) for name in names if name not in inner}
            self.requires_grad = wrapper.requires_grad
        self.leaf = self.requires_grad and wrapper.is_leaf
        parameter = isinstance(wrapper, torch.nn.Parameter)
        self.rest = (type(wrapper), others, context, wrapper.size(), wrapper.stride(), parameter)
        kind, _, _, size, stride, _ = self.rest
        self._key = (kind, *others.items(), context, size, stride, parameter, self.requires_grad, self.leaf)
        self._key += (self.names, self.inner)

    @property
    def count(self) -> int:
        """How many tensors of ours it is made of."""
        return sum(1 if inner is None else inner.count for inner in self.inner)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and self._key == other._key

    def __hash__(self) -> int:
        return hash((self.rest[0], *self.rest[3:], self.names))  # a context need not be hashable

    def make(self, values: Sequence[Any], *, as_given: bool = False) -> torch.Tensor:
        """A wrapper of these parts. It wants gradients if that was a leaf that did; or, `as_given`, if that did at all."""
        given = iter(values)
        return self._made(given, as_given)

    def _made(self, values: Iterator[Any], as_given: bool) -> torch.Tensor:
        kind, others, context, size, stride, parameter = self.rest
        found = {
            n: next(values) if i is None else i._made(values, as_given)
            for n, i in zip(self.names, self.inner, strict=True)
        }
        with torch.no_grad():
            made: torch.Tensor = kind.__tensor_unflatten__({**others, **found}, context, size, stride)
        wants = self.requires_grad if as_given else self.leaf
        if parameter:
            return torch.nn.Parameter(made.detach() if made.requires_grad else made, requires_grad=wants)
        return made if made.requires_grad is wants else made.detach().requires_grad_(wants)


def like(tensor: Any) -> Any:
    """What another tensor must be equal in to take this one's place, as state of a program; None if it is none of ours."""
    if isinstance(tensor, Tensor):
        return (tensor.__class__, tensor._aval, tensor.requires_grad)
    if is_wrapper(tensor):
        return (Form(tensor), *map(like, parts(tensor)))
    return None


def guard(wrappers: Sequence[torch.Tensor], gradients_matter: bool) -> Callable[[], Any]:
    """What reads how wrappers that are state stand: which parts they have, and whether they want gradients, if that matters."""
    found = [(weakref.ref(w), name) for w in wrappers for name, _ in _tensors(w)]
    references = [weakref.ref(w) for w in wrappers]

    def read() -> Any:
        flags = [getattr(r(), "requires_grad", None) for r in references] if gradients_matter else []
        return _Standing((*flags, *(id(getattr(r(), name, None)) for r, name in found)))

    return read


class _Standing(tuple[Any, ...]):
    def __repr__(self) -> str:
        return f"{sum(flag is True for flag in self)} that want gradients, made of {hash(self) & 0xFFFF:x}"
