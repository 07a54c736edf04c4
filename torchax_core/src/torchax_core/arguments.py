"""The arguments and results of a jitted function as leaves and a structure.

torch's pytree says what a container is; of the builtin ones, which are nearly all, the structure is made here: a dict of 200
weights costs microseconds. Hugging Face's key-value caches, objects that torch's pytree does not know, are opened too:
their attributes are parts of them. An object that the function made as a result is opened like them, so that each call can
return a new one.
"""

from __future__ import annotations

import functools
import gc
import inspect
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree as pytree

from torchax_core.tensor import DEVICE_TYPE, Tensor
from torchax_core.view import View
from torchax_core.wrapped import Form, is_wrapper, parts

__all__ = ["Call", "StaticArguments", "flatten", "made_inside", "opened", "same", "unflatten", "update"]

_LEAVES = frozenset(
    {Tensor, View, torch.Tensor, torch.nn.Parameter, *jax.Array.__subclasses__(), int, float, bool, str}
)
_LEAVES |= {type(None), complex, bytes, torch.dtype, torch.device}
_STORE, _ARRAY, _AVAL = map(operator.attrgetter, ("_store", "array", "_aval"))


class Call:
    """The arguments of one call: as they were given, their leaves and structure, and the caches and DTensors that were opened."""

    __slots__ = ("leaves", "objects", "structure", "tree")

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.leaves: list[Any] = []
        self.objects: list[Any] = []
        self.structure = flatten(tree, self.leaves, self.objects)

    def signature(self, name: str) -> tuple[Any, ...] | None:
        """What of the leaves a program is found by; None if one is traced already. Tensors on the CPU are moved.

        What requires gradients is left to the program's guards, as many programs do not depend on it.

        Raises TypeError for a leaf that is neither a tensor nor hashable.
        """
        leaves = self.leaves
        if not _TENSORS.issuperset(map(type, leaves)):
            others: list[Any] = []
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    if not isinstance(leaf, Tensor):
                        leaves[i] = leaf.to(DEVICE_TYPE)
                    others.append(None)
                elif isinstance(leaf, jax.core.Tracer):
                    return None
                else:
                    others.append(jax.typeof(leaf) if isinstance(leaf, jax.Array) else _static(leaf, name))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        else:
            others, tensors = [], leaves
        stores = [*map(_STORE, tensors)]
        for kind in {*map(type, map(_ARRAY, stores))}:
            if issubclass(kind, jax.core.Tracer):
                return None
        key = (*others, *map(_AVAL, tensors))
        ids = [*map(id, stores)]
        if len(set(ids)) != len(ids):  # several arguments over one storage
            key = (*key, *map(ids.index, ids))
        return key


_TENSORS = frozenset({Tensor, View})


def _static(leaf: Any, name: str) -> Any:
    """What of an argument that is no tensor is part of the key: 1, 1.0 and True are three."""
    if leaf.__class__ is _Static:
        return leaf
    if leaf.__class__ is functools.partial:
        return (functools.partial, leaf.func, *(_static(part, name) for part in (*leaf.args, *leaf.keywords.items())))
    try:
        hash(leaf)
    except TypeError:
        if isinstance(leaf, np.ndarray):
            raise TypeError(
                f"jit({name}): a numpy array among the arguments; give a tensor (`torch.from_numpy(a).to('jax')`), which is "
                "traced, or close over it, which fixes it."
            ) from None
        raise TypeError(
            f"jit({name}): an argument of type {type(leaf).__name__} is neither a tensor nor hashable, so its changes could not "
            "be noticed. Pass tensors, numbers, strings, or tuples, lists and dicts of them."
        ) from None
    return (leaf.__class__, leaf)


class _Static:
    """A static argument, hashed as a whole; so are the types of what builtin containers hold, for (1,) == (1.0,)."""

    __slots__ = ("_key", "value")

    def __init__(self, value: Any, name: str, argument: str) -> None:
        self.value = value
        leaves = pytree.tree_leaves(value)
        if any(isinstance(leaf, (torch.Tensor, jax.Array)) for leaf in leaves):
            raise TypeError(
                f"jit({name}): static argument {argument!r} holds a tensor, whose values change. Leave it out of static_argnames."
            )
        try:
            hash(value)
        except TypeError:
            raise TypeError(
                f"jit({name}): static argument {argument!r} is a {type(value).__name__}, which has no hash, so its changes could "
                "not be noticed. Give a tuple, a number, a string or a frozen dataclass, or leave it out of `static_argnames`."
            ) from None
        self._key = (type(value), value, tuple(map(type, leaves)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self.value)


class StaticArguments:
    """Which arguments of a function are static, given by position or by name."""

    def __init__(self, fn: Callable[..., Any], names: str | Iterable[str], name: str) -> None:
        self.name = name
        self.names = (names,) if isinstance(names, str) else tuple(names)
        signature = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
        parameters = list(signature.parameters.values())
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.places = {i: p.name for i, p in enumerate(parameters) if p.kind in positional and p.name in self.names}
        unknown = set(self.names) - {p.name for p in parameters}
        if unknown and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            raise TypeError(
                f"jit({name}): static_argnames has {', '.join(map(repr, sorted(unknown)))}, but the function takes "
                f"{', '.join(p.name for p in parameters) or 'no arguments'}."
            )

    def mark(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments with the static ones as single leaves."""
        places, names = self.places, self.names
        marked = tuple(_Static(a, self.name, places[i]) if i in places else a for i, a in enumerate(args))
        return marked, {n: _Static(a, self.name, n) if n in names else a for n, a in kwargs.items()}

    def unmark(self, tree: Any) -> tuple[Any, Any]:
        """The arguments as the function takes them."""
        args, kwargs = tree
        return tuple(map(_value, args)), {name: _value(value) for name, value in kwargs.items()}


def _value(argument: Any) -> Any:
    return argument.value if argument.__class__ is _Static else argument


class _Opened:
    """In a structure: an object of this class with these attributes."""

    __slots__ = ("kind", "names")

    def __init__(self, kind: type, names: tuple[str, ...]) -> None:
        self.kind = kind
        self.names = names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Opened) and self.kind is other.kind and self.names == other.names

    def __hash__(self) -> int:
        return hash((self.kind, self.names))


@functools.cache
def _is_cache(kind: type) -> bool:
    """Whether it is one of transformers' caches, or a layer of one."""
    return (
        any(base.__module__ == "transformers.cache_utils" for base in kind.__mro__) and kind.__new__ is object.__new__
    )


def opened(value: Any, parent: Any = None) -> bool:
    """Whether an object that torch's pytree does not know is opened wherever it is: a cache, a DTensor."""
    return _is_cache(value.__class__) or is_wrapper(value)


def flatten(
    tree: Any,
    leaves: list[Any],
    objects: list[Any] | None = None,
    opens: Callable[[Any, Any], bool] = opened,
    parent: Any = None,
) -> Any:
    """The structure of `tree`, hashable; its leaves are added to `leaves`, objects that were opened to `objects`.

    opens: (object, what holds it) -> whether an object that torch's pytree does not know is one to open.
    """
    kind: Any = tree.__class__
    context: Any
    values: Any
    if kind in _LEAVES:
        leaves.append(tree)
        return None
    if kind is dict:
        context, values = tuple(tree), tree.values()
    elif kind is list or kind is tuple:
        context, values = len(tree), tree
    else:
        inner, spec = pytree.tree_flatten(tree)
        if spec.is_leaf():
            inner = []  # `opens` looks at who else has the object
        if not spec.is_leaf():
            kind, context, values = pytree, spec, inner
        elif opens(tree, parent):
            if objects is not None:
                objects.append(tree)
            if isinstance(tree, torch.Tensor):
                leaves.extend(parts(tree))
                return (Form, Form(tree))
            context, values = _Opened(kind, tuple(vars(tree))), vars(tree).values()
            kind = _Opened
        else:
            leaves.append(tree)
            return None
    if _LEAVES.issuperset(map(type, values)):
        leaves.extend(values)
        return (kind, context)
    holder = vars(tree) if kind is _Opened else tree
    return (kind, context, *[flatten(value, leaves, objects, opens, holder) for value in values])


def unflatten(
    structure: Any, leaves: Iterator[Any], objects: list[Any] | None = None, known: dict[int, Any] | None = None
) -> Any:
    """The tree of that structure, with the next of `leaves`; its opened objects are new, and added to `objects`.

    known: DTensors to be taken instead of new ones, by the identities of their first parts.
    """
    if structure is None:
        return next(leaves)
    kind, context, *inner = structure
    if kind is Form:
        given = [next(leaves) for _ in range(context.count)]
        made = (known or {}).get(id(given[0]))
        if made is None:
            made = context.make(given, as_given=objects is not None)
        if objects is not None:
            objects.append(made)
        return made
    place = None
    if kind is _Opened and objects is not None:
        place = len(objects)
        objects.append(None)
    if kind is dict:
        values = _values(inner, len(context), leaves, objects, known)
        return dict(zip(context, values, strict=True))
    if kind is _Opened:
        values = _values(inner, len(context.names), leaves, objects, known)
        made = object.__new__(context.kind)
        vars(made).update(zip(context.names, values, strict=True))
        if place is not None and objects is not None:
            objects[place] = made
        return made
    if kind is pytree:
        return pytree.tree_unflatten(_values(inner, context.num_leaves, leaves, objects, known), context)
    values = _values(inner, context, leaves, objects, known)
    return values if kind is list else tuple(values)


def _values(inner: list[Any], count: int, leaves: Iterator[Any], objects: Any, known: Any) -> list[Any]:
    if inner:
        return [unflatten(part, leaves, objects, known) for part in inner]
    return [next(leaves) for _ in range(count)]


def update(target: Any, source: Any) -> Any:
    """What a container of the caller's is to be after the call: itself, its contents those of `source`."""
    if target.__class__ is not source.__class__ or target is source:
        return source
    if isinstance(target, dict):
        new = {key: update(target[key], value) if key in target else value for key, value in source.items()}
        target.clear()
        target.update(new)
        return target
    if isinstance(target, list):
        target[:] = [*map(update, target, source), *source[len(target) :]]
        return target
    if target.__class__ is tuple and len(target) == len(source):
        return tuple(map(update, target, source))
    if _is_cache(target.__class__):
        update(vars(target), vars(source))
        return target
    return source


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether these are the very same leaves."""
    return len(one) == len(other) and all(
        a is b or (a.__class__ is b.__class__ and a.__class__ in (int, float, bool, str) and a == b)
        for a, b in zip(one, other, strict=True)
    )


def made_inside(value: Any, parent: Any) -> bool:
    """Whether an object among the results is one that the function has just made: it holds tensors, and nobody else has it.
    A DTensor counts as one wherever it comes from, as a tensor does."""
    kind = value.__class__
    if is_wrapper(value):
        return True
    if kind.__new__ is not object.__new__ or not hasattr(value, "__dict__") or isinstance(value, _KNOWN):
        return False
    if _is_cache(kind):
        return True
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(dict(vars(value)))):
        return False
    return not [
        holder for holder in gc.get_referrers(value) if holder is not parent and not isinstance(holder, _FRAMES)
    ]


_KNOWN = (type, torch.nn.Module, torch.optim.Optimizer, types.FunctionType, types.MethodType, types.ModuleType)
_FRAMES = (types.FrameType,)
