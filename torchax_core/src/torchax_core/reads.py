"""What of Python a traced function may have read: the code that ran while it was traced, and the names in that code.

Python does not tell who reads an attribute. But the functions on the stack whenever an op runs are known, and so are, from
their bytecode, the names that they load, the functions that they name, and the strings that they have for keys.
"""

from __future__ import annotations

import functools
import opcode
import os
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torchax_core.places import LIBRARIES

__all__ = ["Names", "Reads", "code_of", "is_library"]

_MOST_CODES = 5_000


class Reads:
    """The functions that ran under a frame, by what is on the stack whenever an op runs."""

    def __init__(self, top: types.FrameType) -> None:
        self._top: types.FrameType | None = top
        self._codes: dict[int, tuple[types.CodeType, dict[str, Any]]] = {}

    def note(self) -> None:
        """An op runs."""
        frame: Any = sys._getframe(2)
        codes, top = self._codes, self._top
        while frame is not None and frame is not top:
            code = frame.f_code
            if id(code) not in codes:
                codes[id(code)] = (code, frame.f_globals)
            frame = frame.f_back

    def codes(self) -> list[tuple[types.CodeType, dict[str, Any]]]:
        """Each function's code, and its globals."""
        self._top = None  # it holds what is to be freed
        return list(self._codes.values())


class Names:
    """What the code of users' functions loads by name, as far as it can have run: that which did, and what it names in turn.

    loads:   attributes and globals.
    calls:   methods that are called.
    strings: constants, which may be keys of dicts or names of attributes.
    asked:   those of them in code that calls `getattr` or `hasattr`.
    globals: dicts of globals, and the names that are loaded from each.
    """

    def __init__(self, ran: Iterable[tuple[types.CodeType, dict[str, Any]]]) -> None:
        self.loads: set[str] = set()
        self.calls: set[str] = set()
        self.strings: set[str] = set()
        self.asked: set[str] = set()
        self.globals: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._seen: dict[int, types.CodeType] = {}
        for code, found in ran:
            self._add(code, found)

    def add(self, code: types.CodeType, found: dict[str, Any]) -> None:
        """Take up the code of a function that may have run, and of those it names. Of installed packages those that ran do."""
        if not _is_installed(code.co_filename):
            self._add(code, found)

    def _add(self, code: types.CodeType, found: dict[str, Any]) -> None:
        queue = [(code, found)]
        while queue and len(self._seen) <= _MOST_CODES:
            code, found = queue.pop()
            if id(code) in self._seen:
                continue
            self._seen[id(code)] = code
            home = found.get("__name__") or ""
            if is_library(home):
                if home.startswith("torch.nn.modules."):  # their forwards read what is set on them
                    self.loads |= loaded(code).attributes
                continue
            names = loaded(code)
            self.loads |= names.attributes
            self.calls |= names.methods
            self.strings |= names.strings
            if not names.globals.isdisjoint(("getattr", "hasattr")):
                self.asked |= names.strings
            self.globals.setdefault(id(found), (found, set()))[1].update(names.globals)
            queue += self._named(names, found)

    @staticmethod
    def _named(names: Loaded, found: dict[str, Any]) -> Iterator[tuple[types.CodeType, dict[str, Any]]]:
        """The functions that code names: globals, and those of modules that are globals."""
        for name in names.globals:
            value = found.get(name)
            code = code_of(value)
            if code is not None:
                if not _is_installed(code[0].co_filename):
                    yield code
            elif isinstance(value, types.ModuleType) and not is_library(value.__name__):
                inside = vars(value)
                for attribute in (names.attributes | names.methods) & inside.keys():
                    code = code_of(inside[attribute])
                    if code is not None and not _is_installed(code[0].co_filename):
                        yield code

    def size(self) -> int:
        """How many functions have been taken up."""
        return len(self._seen)

    def reads(self, key: Any, value: Any = None) -> bool:
        """Whether code that ran may have looked up an attribute or entry of this name, which is this value."""
        return (
            key.__class__ is not str
            or key in self.loads
            or key in self.strings
            or (key in self.calls and callable(value))
        )


class Loaded(NamedTuple):
    """The names in a function's bytecode, those of functions inside it included."""

    globals: set[str]
    attributes: set[str]
    methods: set[str]
    strings: set[str]


_loaded: dict[int, tuple[types.CodeType, Loaded]] = {}


def loaded(code: types.CodeType) -> Loaded:
    """What a function loads by name."""
    known = _loaded.get(id(code))  # code is compared, and hashed, by all its content
    if known is None:
        known = _loaded[id(code)] = (code, _parsed(code))
    return known[1]


_ATTRIBUTE_SHIFT = 1 if sys.version_info >= (3, 12) else 0
_SHIFTS_BY_NAME = {"LOAD_GLOBAL": 1, "LOAD_ATTR": _ATTRIBUTE_SHIFT, "LOAD_METHOD": 0, "LOAD_SUPER_ATTR": 2}
_SHIFTS = {opcode.opmap[name]: shift for name, shift in _SHIFTS_BY_NAME.items() if name in opcode.opmap}
_LOAD_GLOBAL, _LOAD_ATTR, _LOAD_METHOD = (opcode.opmap.get(n) for n in ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD"))


def _parsed(code: types.CodeType) -> Loaded:
    found = Loaded(set(), set(), set(), set())
    raw, names, high = code.co_code, code.co_names, 0
    for at in range(0, len(raw), 2):
        op, argument = raw[at], raw[at + 1] | high
        high = argument << 8 if op == opcode.EXTENDED_ARG else 0
        if op not in _SHIFTS:
            continue
        name = names[argument >> _SHIFTS[op]]
        if op == _LOAD_GLOBAL:
            found.globals.add(name)
        elif op == _LOAD_METHOD or (op == _LOAD_ATTR and _LOAD_METHOD is None and argument & 1):
            found.methods.add(name)
        else:
            found.attributes.add(name)
    for constant in code.co_consts:
        if isinstance(constant, str):
            found.strings.add(constant)
        elif isinstance(constant, tuple):
            found.strings.update(item for item in constant if isinstance(item, str))
        elif isinstance(constant, types.CodeType):
            for mine, theirs in zip(found, loaded(constant), strict=True):
                mine |= theirs
    return found


def code_of(value: Any) -> tuple[types.CodeType, dict[str, Any]] | None:
    """The code and globals of a function, method or property of the user's; None for anything else."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    if hasattr(value, "__wrapped__") and not isinstance(value, type):
        value = value.__wrapped__
    if isinstance(value, types.FunctionType) and not is_library(value.__module__ or ""):
        return value.__code__, value.__globals__
    return None


@functools.cache
def _is_installed(file: str) -> bool:
    return f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file


@functools.cache
def is_library(module: str) -> bool:
    """Whether a module is torch's, jax's, numpy's, the core's or Python's own."""
    first = module.partition(".")[0]
    return first in LIBRARIES or (first in sys.stdlib_module_names and first != "__main__")
