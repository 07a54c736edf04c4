"""The functions by which torch's C++ enters Python code of ours.

Where dynamo runs code that it has not compiled (after a graph break, between the graphs of DDP or FSDP), it is asked of every
Python frame whether it wants to compile it. What runs beneath one of these functions is ours, JAX's and the standard
library's, and is not to be looked at: dynamo.py says so to dynamo, once this is loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar

__all__ = ["entrance", "follow"]

_F = TypeVar("_F", bound=Callable[..., Any])

_lock = threading.Lock()
_codes: dict[int, CodeType] = {}  # by identity: equal code of two functions is not the same
_followers: list[Callable[[CodeType], None]] = []


def entrance(function: _F) -> _F:
    """A decorator for a plain function, or one made by a function, that torch's dispatcher or autograd calls."""
    assert isinstance(function, FunctionType)
    code = function.__code__
    if id(code) not in _codes:  # else another closure of the same function
        with _lock:
            _codes[id(code)] = code
            for mark in _followers:
                mark(code)
    return function


def follow(mark: Callable[[CodeType], None]) -> None:
    """Call `mark` with the code of each entrance, of those to come too."""
    with _lock:
        _followers.append(mark)
        for code in _codes.values():
            mark(code)
