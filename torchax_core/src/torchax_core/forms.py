"""Call forms: for calls that an op has had before, a function written for just their arguments.

A model calls an op over and over in a form or two: `(tensor, list of ints, bool)`. What of a kernel's work depends on that
form alone (which arguments are tensors, which are static, how many there are) is done once, by writing the Python function
that is left: it checks the form, makes the key, and runs the program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from torchax_core.convert import scalar_array
from torchax_core.templates import SCALAR, STATIC, TENSOR, TENSORS
from torchax_core.tensor import Storage, Tensor, make_wrapper
from torchax_core.view import View

__all__ = ["MISS", "Form", "form_of"]

MISS: Any = object()
"""What a form returns for a call that is not its own, or whose signature it does not know."""

_STATIC = (int, bool, str, torch.dtype, torch.layout, torch.device, torch.memory_format)
_NUMBERS = (int, float, bool, complex)
_LONGEST_LIST = 16  # of tensors: every length is a form of its own

Token = Any  # "tensor", "none", ("static", int), ("list", tokens of its items), ...


def form_of(args: Sequence[Any], kwargs: dict[str, Any] | None, kinds: Sequence[str], by_name: dict[str, str]) -> Any:
    """The form of a call, hashable; None for a call that is left to the kernel."""
    tokens = [_token(a, kind) for a, kind in zip(args, kinds, strict=False)]
    named = [(name, _token(a, by_name[name])) for name, a in (kwargs or {}).items()]
    if None in tokens or any(token is None for _, token in named):
        return None
    return tuple(tokens), tuple(named)


def _token(a: Any, kind: str) -> Token:
    cls = a.__class__
    if cls is Tensor:
        return "tensor"
    if cls is View:
        return "read view" if a._is_read() else "view"
    if a is None:
        return "none"
    if kind is STATIC:
        if cls is list:
            return "ints" if all(x.__class__ is int for x in a) else None
        return ("static", cls) if cls in _STATIC else None
    if kind is TENSORS:
        if cls is not list or len(a) > _LONGEST_LIST:
            return None
        items = tuple(_token(item, TENSOR) for item in a)
        return None if None in items else ("list", items)
    return ("scalar", cls) if kind in (SCALAR, TENSOR) and cls in _NUMBERS else None


class Form:
    """One form of one op's calls, and the programs known for it.

    call(args, kwargs):          the op's result, or MISS.
    keep(args, kwargs, program): remember the program of this call, which has the form.

    What a program is, and what is done with its results, depends on `tail`:

    - "wrap":    an entry; its results are the op's.
    - "write":   an entry; its result is written into the first argument, a Tensor.
    - "through": a pair of functions, the second of which takes the base over; the result is written into the base of the
                 first argument, a View.
    """

    def __init__(self, form: Any, tail: str, depends_on: Callable[[], Any] | None) -> None:
        self._globals: dict[str, Any] = {
            "Tensor": Tensor,
            "View": View,
            "MISS": MISS,
            "make_wrapper": make_wrapper,
            "Storage": Storage,
            "scalar_array": scalar_array,
            "getrefcount": sys.getrefcount,
            "Tracer": jax.core.Tracer,
            "programs": {},
            "depends_on": depends_on,
        }
        self._tests: list[str] = []
        self._key: list[str] = []
        self._arrays: list[str] = []
        self._lines: list[str] = []
        self._tensors: list[str] = []
        self._names = 0
        positional, named = form
        names = [self._new() for _ in positional]
        for i, (name, token) in enumerate(zip(names, positional, strict=True)):
            self._argument(name, "base" if i == 0 and tail == "through" else token)
        for keyword, token in named:
            name = self._new()
            self._lines.append(f"{name} = kwargs.get({keyword!r}, MISS)")
            self._argument(name, token)
        if tail != "wrap":  # of what shares memory with what it is written to, the kernel looks closer
            self._tests += [f"{name}._store is not {names[0]}._store" for name in self._tensors if name != names[0]]
        if depends_on is not None:
            self._key.append("depends_on()")
        checks = f"len(args) == {len(names)} and " + (
            f"kwargs and len(kwargs) == {len(named)}" if named else "not kwargs"
        )
        unpack = [f"{', '.join(names)}, = args"] if names else []
        key = self._key[0] if len(self._key) == 1 else f"({', '.join(self._key)})"
        inner = [*unpack, *self._lines]
        if tail == "through":
            inner.insert(len(unpack), f"if {names[0]}.__class__ is View: {names[0]}._cache = None")
        found = [
            f"program = programs.get({key})",
            "if program is not None:",
            *("    " + line for line in self._tail(tail, names)),
        ]
        if self._tests:
            found = [f"if {' and '.join(self._tests)}:", *("    " + line for line in found)]
        source = "\n".join(
            [
                "def call(args, kwargs):",
                f"    if {checks}:",
                *("        " + line for line in inner + found),
                "    return MISS",
                "def keep(args, kwargs, program):",
                *("    " + line for line in [*unpack, *self._lines]),
                f"    programs[{key}] = program",
            ]
        )
        exec(compile(source, f"<form {form} {tail}>", "exec"), self._globals)
        self.call: Callable[[Any, Any], Any] = self._globals["call"]
        self.keep: Callable[[Any, Any, Any], None] = self._globals["keep"]

    def _new(self) -> str:
        self._names += 1
        return f"a{self._names}"

    def _argument(self, name: str, token: Token) -> None:
        test = self._tests.append
        if token in ("tensor", "read view", "view", "base"):
            self._tensors.append(name)
        if token == "tensor":
            test(f"{name}.__class__ is Tensor")
            self._key.append(f"{name}._aval")
            self._arrays.append(f"{name}._store.array")
        elif token == "read view":
            test(f"{name}.__class__ is View")
            test(f"{name}._seen == {name}._store.version and {name}._cache is not None")
            self._key.append(f"{name}._aval")
            self._arrays.append(f"{name}._cache")
        elif token in ("view", "base"):
            test(f"{name}.__class__ is View")
            if token == "view":
                test(f"({name}._cache is None or {name}._seen != {name}._store.version)")
            self._key += [f"{name}._aval", f"{name}._path"]
            self._arrays += [f"{name}._store.array", f"*{name}._offsets"]
        elif token == "none":
            test(f"{name} is None")
        elif token == "ints":
            test(f"{name}.__class__ is list")
            self._key.append(f"tuple({name})")
        elif token[0] == "static":
            test(f"{name}.__class__ is {self._class(token[1])}")
            self._key.append(name)
        elif token[0] == "scalar":
            test(f"{name}.__class__ is {self._class(token[1])}")
            self._arrays.append(f"scalar_array({name})")
        else:
            self._list(name, token[1])

    def _list(self, name: str, tokens: Sequence[Token]) -> None:
        test = f"{name}.__class__ is list and len({name}) == {len(tokens)}"
        self._tests.append(test)
        if not tokens:
            return
        # taken apart before the tests, which are one expression: a list of another length comes apart into its own items
        items = [self._new() for _ in tokens]
        self._lines.append(f"{', '.join(items)}, = {name} if {test} else (None,) * {len(tokens)}")
        for item, token in zip(items, tokens, strict=True):
            self._argument(item, token)

    def _class(self, cls: type) -> str:
        name = f"class_{cls.__name__}"
        self._globals[name] = cls
        return name

    def _tail(self, tail: str, names: list[str]) -> list[str]:
        arrays = ", ".join(self._arrays)
        if tail == "wrap":
            return [
                f"results = program.run({arrays})",
                "aval = program.single",
                "if aval is None: return program.wrap(results)",
                # make_tensor, written out
                "tensor = make_wrapper(*aval.wrapper)",
                "tensor._store = Storage(results, aval.stride)",
                "tensor._aval = aval",
                "return tensor",
            ]
        first = names[0]
        if tail == "write":
            return [f"{first}._store.write(program.run({arrays}))", f"return {first}"]
        # every array has a name here, so that one that is used twice counts twice
        plain = [a for a in self._arrays if not a.startswith("*") and a.endswith(("._store.array", "._cache"))]
        local = {a: f"x{i}" for i, a in enumerate(plain)}
        arrays = ", ".join(local.get(a, a) for a in self._arrays)
        traced = " or ".join(f"isinstance({x}, Tracer)" for x in local.values())
        return [
            *(f"{x} = {a}" for a, x in local.items()),
            # the storage, the local name, getrefcount's argument: one more, and somebody relies on the base as it is
            f"donate = getrefcount(x0) <= 3 and not ({traced})",
            f"{first}._store.write(program[donate]({arrays}))",
            f"return {first}",
        ]
