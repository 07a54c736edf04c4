"""The values that are no tensors and that a function reaches: through attributes, closures, globals, lists, dicts, objects.

Of an object, what the code that ran has a name for (reads.py) is looked at, and what it could have a name for and has not
got (an attribute that would shadow its class's); of the rest, numbers, bools and strings, for code that finds names in some
other way. Containers of more than 256 items, and arrays of numpy's of more than 4 KB, are taken to stay as they are.
"""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import operator
import sys
import types
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from torchax_core.places import ABSENT, is_users, may_open, slots_of
from torchax_core.reads import Names, code_of, is_library
from torchax_core.tensor import Tensor
from torchax_core.wrapped import is_wrapper

__all__ = ["CLASS", "DICT", "GETTER", "PLAIN", "Reached", "Row", "look"]

_MOST = 20_000  # objects looked at
_MOST_ITEMS = 256
_MOST_BYTES = 4096

PLAIN: tuple[Any, ...] = (int, float, bool, str)
_VALUES = frozenset({*PLAIN, type(None), complex, bytes, slice, range, frozenset, torch.dtype, torch.device})
_VALUES |= {torch.Size, torch.layout, torch.memory_format, type(ABSENT), type(Ellipsis)}
_INSIDE = frozenset(vars(torch.nn.Module()))  # attributes of every module, guarded elsewhere or torch's own

DICT, CLASS, GETTER = "dict", "class", "getter"


class Row(NamedTuple):
    """One place, and what is there. getter: `key(container)`."""

    name: tuple[Any, ...]
    kind: str
    container: Any
    key: Any
    value: Any


class Reached:
    """What was found.

    rows:   places to look at again.
    values: by name, what is there (its class, if it has been looked into), and whether code that ran has a name for it.
    open:   attributes of objects, which may get more.
    dicts, lists: whose keys, and lengths, count; sets and arrays, with copies.
    tensors: of other devices, and their versions.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.values: dict[tuple[Any, ...], tuple[Any, bool]] = {}
        self.dicts: list[dict[Any, Any]] = []
        self.open: list[dict[Any, Any]] = []
        self.lists: list[Any] = []
        self.tensors: list[tuple[torch.Tensor, int]] = []
        self.sets: list[tuple[set[Any], frozenset[Any]]] = []
        self.arrays: list[tuple[np.ndarray[Any, Any], bytes]] = []


def look(
    roots: Iterable[tuple[str, Any]], names: Names, ran: Iterable[torch.nn.Module], rebound: set[Any], changed: set[int]
) -> Reached:
    """What is reachable from named roots, and from the modules that ran and the globals that were read.

    rebound: names of places (identity of the container, key) into which the function itself puts things.
    changed: identities of the containers that it changes.
    """
    walk = _Walk(names, ran, rebound, changed)
    known = -1
    while known != names.size():  # methods are known by the classes of objects, and name more
        known = names.size()
        found = walk.look(roots)
    return found


class _Walk:
    def __init__(self, names: Names, ran: Iterable[torch.nn.Module], rebound: set[Any], changed: set[int]) -> None:
        self.names = names
        self.ran = {id(module): module for module in ran}
        self.rebound = rebound
        self.changed = changed

    def look(self, roots: Iterable[tuple[str, Any]]) -> Reached:
        self.found = Reached()
        self._seen: dict[int, Any] = {}
        self._queue: list[tuple[Any, tuple[Any, ...], bool]] = []
        for found, loaded in list(self.names.globals.values()):
            path = (found.get("__name__"),)
            for name in sorted(loaded & found.keys()):
                self._place(DICT, found, name, path, found[name], True)
        self._queue += [(module, ("module", i), True) for i, module in enumerate(self.ran.values())]
        self._queue += [(root, (name,), True) for name, root in roots]
        while self._queue and len(self._seen) < _MOST:
            value, path, read = self._queue.pop()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._visit(value, path, read)
        return self.found

    def _place(self, kind: str, container: Any, key: Any, path: tuple[Any, ...], value: Any, read: bool) -> None:
        """A place and what it holds; the row of items of tuples is that of the tuple."""
        if isinstance(value, (Tensor, jax.core.Tracer)) or (id(container), key) in self.rebound:
            return
        name = (*path, _plain_key(key))
        if isinstance(value, torch.Tensor):
            if not read or is_wrapper(value):
                return
            self._elsewhere(value, name)
        plain = value.__class__ in PLAIN
        if read or (plain and kind == DICT and key.__class__ is str and key[:1] != "_"):
            if isinstance(value, types.ModuleType) and is_library(value.__name__):
                return
            self.found.values[name] = (_token(value), read)
            if kind != "item" and not (kind == DICT and value is ABSENT):  # which would make it one more
                self.found.rows.append(Row(name, kind, container, key, value))
        if not plain and value.__class__ not in _VALUES and not isinstance(value, torch.Tensor):
            self._queue.append((value, name, read))

    def _elsewhere(self, tensor: torch.Tensor, name: tuple[Any, ...]) -> None:
        """A tensor of another device, of which the program has a copy."""
        if not tensor.is_inference():
            self.found.tensors.append((tensor, tensor._version))
            self.found.values[*name, "its version"] = (tensor._version, True)

    def _get(self, getter: Any, container: Any, path: tuple[Any, ...], key: Any, read: bool = True) -> None:
        try:
            value = getter(container)
        except (AttributeError, ValueError):  # an empty slot or cell
            return
        name = (*path, key)
        rows = self.found.rows
        before = len(rows)
        self._place(GETTER, container, key, path, value, read)
        if len(rows) > before:
            rows[before] = Row(name, GETTER, container, getter, value)

    def _visit(self, value: Any, path: tuple[Any, ...], read: bool) -> None:
        if isinstance(value, dict):
            self._dict(value, path, read)
        elif isinstance(value, (list, collections.deque)):
            self._list(value, path, read)
        elif isinstance(value, tuple):
            for i, item in enumerate(value if len(value) <= _MOST_ITEMS else ()):
                self._place("item", value, i, path, item, read)
        elif isinstance(value, set):
            if read and len(value) <= _MOST_ITEMS and not any(isinstance(item, torch.Tensor) for item in value):
                copy = frozenset(value)
                self.found.sets.append((value, copy))
                self.found.values[*path, "its items"] = (copy, True)
        elif isinstance(value, np.ndarray):
            if read and value.nbytes <= _MOST_BYTES and not value.dtype.hasobject:
                content = value.tobytes()
                self.found.arrays.append((value, content))
                self.found.values[*path, "its numbers"] = (content, True)
        elif isinstance(value, types.FunctionType):
            self._function(value, path)
        elif isinstance(value, type):
            self._class(value, path)
        elif isinstance(value, types.MethodType):
            self._queue += [(value.__self__, (*path, "self"), read), (value.__func__, (*path, "function"), read)]
        elif isinstance(value, functools.partial):
            parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
            for name, part in parts.items():
                self._place("item", value, name, path, part, read)
        elif isinstance(value, torch.nn.Module):
            self._module(value, path)
        elif isinstance(value, torch.optim.Optimizer):
            if "param_groups" in self.names.loads:
                for i, group in enumerate(value.param_groups):
                    for key in group:
                        if key != "params":
                            self._place(DICT, group, key, (*path, i), group[key], True)
        elif isinstance(value, types.ModuleType):
            attributes = vars(value)
            for name in sorted((self.names.loads | self.names.calls) & attributes.keys()):
                self._place(DICT, attributes, name, path, attributes[name], True)
        elif isinstance(value, contextvars.ContextVar):
            self._get(_VALUE, value, path, "its value")
        elif _opens(value.__class__):
            self._object(value, path)
        elif hasattr(value, "__wrapped__"):  # a jitted function, one that is cached
            self._queue.append((value.__wrapped__, (*path, "wrapped"), read))

    def _dict(self, value: dict[Any, Any], path: tuple[Any, ...], read: bool) -> None:
        if len(value) > _MOST_ITEMS:
            return
        for key, item in list(value.items()):  # other threads may change it
            self._place(DICT, value, key, path, item, read)
        own = id(value) in self.changed or any(isinstance(item, torch.Tensor) for item in value.values())
        if read and not own:  # else rebinding.py has it
            # objects for keys are counted only: it may take long to compare them, or be an op
            (self.found.dicts if _VALUES.issuperset(map(type, value)) else self.found.lists).append(value)
            self.found.values[*path, "its keys"] = (tuple(map(_plain_key, value)), True)

    def _list(self, value: Any, path: tuple[Any, ...], read: bool) -> None:
        if len(value) > _MOST_ITEMS:
            return
        for i, item in enumerate(value):
            if read and id(value) not in self.changed:
                self._get(operator.itemgetter(i), value, path, i)
            elif item.__class__ not in _VALUES:
                self._queue.append((item, (*path, i), read))
        own = id(value) in self.changed or any(isinstance(item, torch.Tensor) for item in value)
        if read and not own:
            self.found.lists.append(value)
            self.found.values[*path, "its length"] = (len(value), True)

    def _function(self, value: types.FunctionType, path: tuple[Any, ...]) -> None:
        """Its closure, defaults and attributes; of its globals those that were read. Of libraries' functions nothing."""
        code = code_of(value)
        if code is None:
            return
        self.names.add(*code)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if (id(cell), None) not in self.rebound:
                self._get(_CELL, cell, path, name)
        self._get(_DEFAULTS, value, path, "__defaults__")
        self._get(_KEYWORD_DEFAULTS, value, path, "__kwdefaults__")
        for name, item in vars(value).items():
            self._place(DICT, vars(value), name, path, item, self.names.reads(name) or name == "__wrapped__")

    def _module(self, module: torch.nn.Module, path: tuple[Any, ...]) -> None:
        attributes = vars(module)
        kind: Any = type(module)
        ran, users = id(module) in self.ran, not kind.__module__.startswith("torch.")
        for name, item in list(attributes.items()):
            read = self.names.reads(name, item)
            if name in _INSIDE:  # a module that ran has a guard for that (guards.py)
                if name == "training" and read and not ran:
                    self._place(DICT, attributes, name, path, item, True)
            elif users:
                self._place(DICT, attributes, name, path, item, read)
            elif item.__class__ in _VALUES or isinstance(item, tuple):  # settings of torch's layers
                if read or (ran and item.__class__ in (float, bool)):
                    self._place(DICT, attributes, name, path, item, read)
        members = attributes["_modules"]
        if not ran:
            self._dict(members, (*path, "_modules"), True)
        else:  # guards.py has them
            self._queue += [(child, (*path, name), True) for name, child in members.items() if child is not None]
        if ran:
            self._place(DICT, attributes, "forward", path, attributes.get("forward", ABSENT), True)
            self.found.open.append(attributes)
            for what in ("_parameters", "_buffers"):
                for name, tensor in attributes[what].items():
                    if tensor is not None and not isinstance(tensor, Tensor) and not is_wrapper(tensor):
                        self._elsewhere(tensor, (*path, name))
            for what in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
                self._queue += [(hook, (*path, what, i), True) for i, hook in enumerate(attributes[what].values())]
            if not users and id(kind) not in self._seen:
                self._seen[id(kind)] = kind
                self._place(CLASS, vars(kind), "forward", (kind.__qualname__,), vars(kind).get("forward", ABSENT), True)
        if users:
            forward = code_of(getattr(kind, "forward", None))
            if forward is not None:
                self.names.add(*forward)
            self._instance(module, attributes, path)

    def _object(self, value: Any, path: tuple[Any, ...]) -> None:
        kind: Any = type(value)
        if hasattr(value, "__dict__"):
            attributes = vars(value)
            self._seen[id(attributes)] = attributes
            for name, item in list(attributes.items()):
                self._place(DICT, attributes, name, path, item, self.names.reads(name, item))
            if is_users(kind):
                self._instance(value, attributes, path)
        elif is_users(kind):
            self._queue.append((kind, (kind.__qualname__,), True))
        for name in slots_of(kind):
            if isinstance(vars(kind).get(name), types.MemberDescriptorType) or hasattr(value, name):
                self._get(operator.attrgetter(name), value, path, name, self.names.reads(name))

    def _instance(self, value: Any, attributes: dict[str, Any], path: tuple[Any, ...]) -> None:
        """What a user's object has from its class, or asks for and has not got."""
        names = self.names
        kind: Any = type(value)
        self._queue.append((kind, (kind.__module__, kind.__qualname__), True))
        absent = names.asked - attributes.keys()
        absent = {name for name in absent if name.isidentifier() and not hasattr(kind, name)}
        absent |= _shadowable(kind).intersection(names.loads | names.calls) - attributes.keys()
        self.found.open.append(attributes)
        for name in sorted(absent):
            if not isinstance(value, torch.nn.Module) or not _is_member(value, name):
                self._place(DICT, attributes, name, path, ABSENT, True)

    def _class(self, kind: Any, path: tuple[Any, ...]) -> None:
        """Its attributes, and those of its bases that are users'; methods too, which may be replaced."""
        if not _is_followed(kind):
            return
        wanted = self.names.loads | self.names.calls
        bases = [base for base in kind.__mro__ if _is_followed(base)]
        inherited = {name for base in bases for name in wanted & vars(base).keys()}
        for base in bases:
            own, where = vars(base), (base.__module__, base.__qualname__)
            for name in sorted(inherited):  # ABSENT where one could be put before the one that is found now
                item = own.get(name, ABSENT)
                if isinstance(item, (types.MemberDescriptorType, types.GetSetDescriptorType)):
                    continue
                self._place(CLASS, own, name, where, item, True)
                code = code_of(item)
                if code is not None:
                    self.names.add(*code)
            inherited -= own.keys()
            for name, item in own.items():  # what Python calls of itself
                if name[:2] == "__" == name[-2:] and name not in _UNINTERESTING:
                    code = code_of(item)
                    if code is not None:
                        self.names.add(*code)


_VALUE = operator.methodcaller("get", ABSENT)
_CELL, _DEFAULTS = operator.attrgetter("cell_contents"), operator.attrgetter("__defaults__")
_KEYWORD_DEFAULTS = operator.attrgetter("__kwdefaults__")
_UNINTERESTING = frozenset({"__init__", "__new__", "__init_subclass__", "__repr__", "__str__", "__del__", "__reduce__"})


def _is_member(module: torch.nn.Module, name: str) -> bool:
    return name in module._parameters or name in module._buffers or name in module._modules


def _plain_key(key: Any) -> Any:
    """A key of a dict, or the identity of an object that is one, which a name is not to keep alive."""
    return key if key.__class__ in _VALUES else (type(key).__name__, id(key))


@functools.cache
def _is_followed(kind: Any) -> bool:
    return isinstance(kind, type) and not is_library(kind.__module__ or "")


@functools.cache
def _shadowable(kind: Any) -> frozenset[str]:
    """Names of a user's class that an object's own attribute would take the place of."""
    found: set[str] = set()
    for base in kind.__mro__:
        if _is_followed(base):
            found.update(name for name, item in vars(base).items() if not hasattr(type(item), "__set__"))
    return frozenset(found)


@functools.cache
def _opens(kind: Any) -> bool:
    """Whether the attributes of objects of this class are looked at."""
    first = (kind.__module__ or "").partition(".")[0]
    ours = first not in sys.stdlib_module_names or first == "__main__" or kind is types.SimpleNamespace
    return ours and may_open(kind) and not issubclass(kind, enum.Enum)


def _token(value: Any) -> Any:
    """What a value is compared by: itself, its code, or the class of what is looked into."""
    if value.__class__ in _VALUES or isinstance(value, (enum.Enum, np.generic)):
        return value
    if isinstance(value, types.FunctionType):
        return value.__code__
    looked_into = (dict, list, tuple, set, collections.deque, types.MethodType, functools.partial, torch.nn.Module)
    if isinstance(value, looked_into) or (isinstance(value, np.ndarray) and value.nbytes <= _MOST_BYTES):
        return value.__class__
    if not isinstance(value, (type, torch.Tensor, jax.Array)) and (
        _opens(value.__class__) or hasattr(value, "__wrapped__")
    ):
        return value.__class__
    return referred(value)


def referred(value: Any) -> Any:
    """The value, by a weak reference if it has any."""
    try:
        return weakref.ref(value)
    except TypeError:
        return value
