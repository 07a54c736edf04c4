"""Where Python keeps tensors that a function can reach: attributes, dict entries, list items, closure cells, globals.

A jitted function may put another tensor in such a place (`self.hidden = self.hidden * 0.5 + x`). A trace alone would not show
it. So the places reachable from the function are looked at before and after: what has changed is done anew at each call.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterable
from typing import Any

import jax
import torch

from torchax_core.tensor import Tensor
from torchax_core.wrapped import is_wrapper

__all__ = ["ABSENT", "LIBRARIES", "Place", "Places", "is_users", "may_open", "reachable", "set_items", "slots_of"]

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "nothing"})()
_MOST = 20_000  # containers looked at
_MOST_ITEMS = 1_000  # of a list or dict whose items are guarded

_LEAVES: tuple[Any, ...] = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    jax.Array,
)
_LEAVES = (*_LEAVES, torch.dtype, torch.device, torch.Size, torch.Generator)
LIBRARIES = frozenset({"torch", "jax", "jaxlib", "numpy", "torchax_core", "builtins"})
_OPAQUE = frozenset({"jax", "jaxlib", "numpy", "torchax_core"})


class Place:
    """One place: an entry of a dict, an item of a list or deque, a slot, a cell, or an item of a tuple in such a place."""

    __slots__ = ("container", "key", "kind")

    def __init__(self, container: Any, key: Any, kind: type) -> None:
        self.container = container
        self.key = key
        self.kind = kind

    @property
    def name(self) -> tuple[Any, ...]:
        """What tells places apart."""
        if self.kind is tuple:
            return (*self.container.name, self.key)
        return (id(self.container), self.key)

    def root(self) -> Place:
        """The place itself, or the one that the tuple is in."""
        return self.container.root() if self.kind is tuple else self

    def read(self) -> Any:
        """What is there; ABSENT if there is no such entry."""
        container, key = self.container, self.key
        if self.kind is dict:
            return container.get(key, ABSENT)
        if self.kind is list:
            return container[key] if key < len(container) else ABSENT
        if self.kind is tuple:
            whole = container.read()
            return whole[key] if isinstance(whole, tuple) and key < len(whole) else ABSENT
        if self.kind is object:
            return getattr(container, key, ABSENT)
        try:
            return container.cell_contents
        except ValueError:
            return ABSENT

    def write(self, value: Any) -> None:
        """Put `value` there, or remove what is there if it is ABSENT. Items of lists are appended and removed at the end."""
        container, key = self.container, self.key
        if self.kind is dict:
            if value is ABSENT:
                container.pop(key, None)
            else:
                container[key] = value
        elif self.kind is list:
            if value is ABSENT:
                set_items(container, list(container)[:key])
            elif key < len(container):
                container[key] = value
            else:
                container.append(value)
        elif self.kind is tuple:
            whole = container.read()
            if isinstance(whole, tuple) and key < len(whole) and value is not ABSENT:
                items = [*whole[:key], value, *whole[key + 1 :]]
                container.write(whole._make(items) if hasattr(whole, "_make") else type(whole)(items))
        elif self.kind is object:
            if value is not ABSENT:
                setattr(container, key, value)
            elif hasattr(container, key):
                delattr(container, key)
        elif value is ABSENT:
            del container.cell_contents
        else:
            container.cell_contents = value

    def __str__(self) -> str:
        if self.kind is tuple:
            return f"{self.container}[{self.key}]"
        return "a closure" if self.kind is types.CellType else f"[{self.key!r}]"


def set_items(container: Any, items: Iterable[Any]) -> None:
    """Let a list or a deque hold these items."""
    items = list(items)
    container.clear()
    container.extend(items)


class Places:
    """What was found: tensors by the name of their place; numbers; and all that the containers held."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[Any, ...], tuple[Place, torch.Tensor]] = {}
        self.numbers: list[tuple[Place, int | float]] = []
        self.lists: dict[int, tuple[Any, list[Any]]] = {}
        self.elsewhere: list[tuple[torch.Tensor, int]] = []  # tensors of other devices, and their versions
        self._dicts: dict[int, dict[Any, Any]] = {}
        self._single: dict[tuple[Any, ...], Any] = {}
        self._parents: dict[int, tuple[Any, Place | None]] = {}  # by identity: what it was found in, and where there
        self._open: set[int] = set()  # dicts of attributes
        self._seen: dict[int, Any] = {}
        self._queue: list[tuple[Any, Place | None]] = []

    def value_at(self, place: Place) -> Any:
        """What a place, that is no item of a tuple, held then; ABSENT if it was not there."""
        if place.kind is list:
            _, items = self.lists.get(id(place.container), ((), ()))
            return items[place.key] if place.key < len(items) else ABSENT
        if place.name in self._single:
            return self._single[place.name]
        return self._dicts.get(id(place.container), {}).get(place.key, ABSENT)

    def look_at(self, roots: Iterable[Any]) -> Places:
        """Find what is reachable from functions and objects, each container looked at once."""
        queue = self._queue
        queue += [(root, None) for root in roots]
        while queue and len(self._seen) < _MOST:
            value, at = queue.pop()
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if isinstance(value, dict):
                self._dicts[id(value)] = dict(value)
                self._items(value, value.items(), dict)
            elif isinstance(value, (list, collections.deque)):
                self.lists[id(value)] = (value, list(value))
                self._items(value, enumerate(value), list)
            elif isinstance(value, tuple):
                if at is None:
                    self._push(value, [item for item in value if not isinstance(item, (_LEAVES, Tensor))])
                else:
                    self._items(at, enumerate(value), tuple)
            elif isinstance(value, types.FunctionType):
                self._function(value)
            elif isinstance(value, type):
                attributes = [(key, item) for key, item in vars(value).items() if not callable(item)]
                self._single.update({(id(value), key): item for key, item in attributes})
                self._items(value, attributes, object)
            elif isinstance(value, types.MethodType):
                self._push(value, [value.__self__, value.__func__])
            elif isinstance(value, functools.partial):
                self._push(value, [value.func, value.args, value.keywords])
            elif isinstance(value, torch.nn.Module):
                registers = {key for key, item in vars(value).items() if item.__class__ is dict and key[:1] == "_"}
                entries = vars(value).items()
                self._push(value, [item for key, item in entries if key in registers and item])
                attributes = [(key, item) for key, item in entries if key not in registers]
                if type(value).__module__.startswith("torch.nn."):  # pruning puts a weight there
                    attributes = [(key, item) for key, item in attributes if isinstance(item, (torch.Tensor, dict))]
                if attributes:
                    self._attributes(value, attributes)
            elif may_open(value.__class__):
                if hasattr(value, "__dict__"):
                    self._attributes(value, vars(value).items())
                if is_users(value.__class__):
                    self._push(value, [type(value)])
                slots = [(name, getattr(value, name)) for name in slots_of(value.__class__) if hasattr(value, name)]
                self._single.update({(id(value), name): item for name, item in slots})
                self._items(value, slots, object)
            elif hasattr(value, "__wrapped__"):  # a jitted function
                self._push(value, [value.__wrapped__])
        return self

    def changed_since(self) -> tuple[set[Any], set[int]]:
        """Names of entries of dicts, and identities of lists and dicts, that have been changed by now."""
        entries: set[Any] = set()
        containers = {
            id(found)
            for found, copy in self.lists.values()
            if len(found) != len(copy) or any(a is not b for a, b in zip(found, copy, strict=False))
        }
        for number, copy in self._dicts.items():
            now = self._seen[number]
            entries.update((number, key) for key, value in copy.items() if now.get(key, ABSENT) is not value)
            if len(now) != len(copy) and number not in self._open:
                containers.add(number)
        return entries, containers

    def way_to(self, places: Iterable[Place]) -> tuple[list[tuple[Place, Any]], list[tuple[Any, int]]]:
        """Where each container was found on the way to these places, and what it was; and containers with their lengths.

        Of a list or a dict on the way, all that it holds counts: a layer put in the place of another that has no tensors.
        """
        links: dict[Any, tuple[Place, Any]] = {}
        lengths: dict[int, tuple[Any, int]] = {}
        passed: set[int] = set()
        for place in places:
            at = place.root().container
            while id(at) not in passed:
                passed.add(id(at))
                if id(at) in self._dicts and id(at) not in self._open and len(at) <= _MOST_ITEMS:
                    self._note_items(at, at.items(), dict, links, lengths)
                elif id(at) in self.lists and len(at) <= _MOST_ITEMS:
                    self._note_items(at, enumerate(at), list, links, lengths)
                if id(at) not in self._parents:
                    break
                parent, link = self._parents[id(at)]
                if link is not None:
                    links.setdefault(link.name, (link, at))
                at = parent
        return list(links.values()), list(lengths.values())

    def where_new(self, place: Place, before: Places) -> Place:
        """The place itself; or, if it is in a dict or list that was not there before, where that was put."""
        found, at = place.root(), place.root().container
        while id(at) not in before._seen and id(at) in self._parents:
            at, link = self._parents[id(at)]
            if link is None:  # an object's attributes: it is no structure that could be put there anew
                return place.root()
            found = link.root()
        return found

    def _note_items(self, container: Any, items: Any, kind: type, links: Any, lengths: Any) -> None:
        lengths[id(container)] = (container, len(container))
        for key, item in items:
            if not isinstance(item, (_LEAVES, torch.Tensor)):
                place = Place(container, key, kind)
                links.setdefault(place.name, (place, item))

    def _push(self, parent: Any, children: list[Any]) -> None:
        for child in children:
            self._parents.setdefault(id(child), (parent, None))
            self._queue.append((child, None))

    def _attributes(self, owner: Any, entries: Iterable[tuple[str, Any]]) -> None:
        attributes = vars(owner)
        self._seen[id(attributes)] = attributes
        self._open.add(id(attributes))
        self._parents.setdefault(id(attributes), (owner, None))
        self._dicts[id(attributes)] = dict(attributes)
        self._items(attributes, entries, dict)

    def _items(self, container: Any, items: Iterable[tuple[Any, Any]], kind: type) -> None:
        parent = container.root().container if kind is tuple else container
        for key, item in items:
            if isinstance(item, Tensor):
                place = Place(container, key, kind)
                self.tensors[place.name] = (place, item)
            elif item.__class__ is int or item.__class__ is float:
                if kind is dict and key.__class__ is str and key[:1] != "_":
                    self.numbers.append((Place(container, key, kind), item))
            elif isinstance(item, torch.Tensor):
                if is_wrapper(item):
                    place = Place(container, key, kind)
                    self.tensors[place.name] = (place, item)
                else:
                    self.elsewhere.append((item, item._version))
            elif not isinstance(item, _LEAVES) or (isinstance(item, type) and is_users(item)):
                place = Place(container, key, kind)
                self._parents.setdefault(id(item), (parent, place))
                self._queue.append((item, place if isinstance(item, tuple) else None))

    def _function(self, function: types.FunctionType) -> None:
        """A function's closure, the globals that it names, and its defaults; of libraries' functions nothing."""
        if (function.__module__ or "").partition(".")[0] in LIBRARIES:
            return
        for cell in function.__closure__ or ():
            place = Place(cell, None, types.CellType)
            self._single[place.name] = place.read()
            self._parents.setdefault(id(cell), (function, None))
            self._items(cell, [(None, place.read())], types.CellType)
        found = function.__globals__
        named = [(name, found[name]) for name in _names(function.__code__) if name in found]
        self._single.update({(id(found), name): value for name, value in named})
        self._items(found, named, dict)
        defaults = [(name, getattr(function, name)) for name in ("__defaults__", "__kwdefaults__")]
        self._single.update({(id(function), name): value for name, value in defaults})
        self._items(function, [(name, value) for name, value in defaults if value], object)
        if "__wrapped__" in vars(function):
            self._push(function, [vars(function)["__wrapped__"]])


def reachable(roots: Iterable[Any]) -> Places:
    """The places of tensors that are reachable from functions and objects."""
    return Places().look_at(roots)


@functools.cache
def slots_of(kind: Any) -> tuple[str, ...]:
    """The attributes of such objects that are not in their `__dict__`."""
    if (kind.__module__ or "").partition(".")[0] in LIBRARIES:
        return ()
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    return tuple(n for names in found for n in ((names,) if isinstance(names, str) else names) if n[:2] != "__")


@functools.cache
def is_users(kind: Any) -> bool:
    """Whether a class's own attributes are looked at: that of plain objects, not of libraries."""
    return type(kind) is type and (kind.__module__ or "").partition(".")[0] not in LIBRARIES


@functools.cache
def may_open(kind: Any) -> bool:
    """Whether the attributes of objects of this class are looked at. Optimizers guard their own state (optimizers.py)."""
    opaque = (kind.__module__ or "").partition(".")[0] in _OPAQUE
    return not opaque and not issubclass(kind, torch.optim.Optimizer)


@functools.cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names(constant)
    return tuple(dict.fromkeys(names))
