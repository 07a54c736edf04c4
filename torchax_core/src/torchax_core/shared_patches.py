"""What stands in for torch's own functions while any thread traces: once for all threads, and taken back with the last."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["SharedPatches", "patch"]

_MISSING = object()


class SharedPatches:
    """A context manager that any number of threads may be in at once.

    install: puts everything in its place, and on the stack it is given how to take that back.
    """

    def __init__(self, install: Callable[[contextlib.ExitStack], None]) -> None:
        self.__doc__ = install.__doc__
        self._install = install
        self._lock = threading.RLock()
        self._depth = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._depth == 0:
                with contextlib.ExitStack() as stack:
                    self._install(stack)
                    self._stack = stack.pop_all()
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._stack.close()


def patch(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Let `owner.name` be `value` until the stack is closed: then what it was, or not there where it was inherited."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    stack.callback(lambda: delattr(owner, name) if before is _MISSING else setattr(owner, name, before))
