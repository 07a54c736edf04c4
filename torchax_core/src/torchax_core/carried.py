"""Objects that torch keeps for each thread, and that its autograd engine carries into the threads that run a backward."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import torch

__all__ = ["carried", "carry"]


def carry(key: str, value: Any) -> None:
    """Keep `value` under `key` for this thread, and for backwards called from it; None for nothing."""
    if _takes_references():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


def carried(key: str) -> Any:
    """What `carry` kept for this thread, or for the one that called the backward it runs; None if nothing."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


@functools.cache
def _takes_references() -> bool:
    """Whether torch gives back a reference, when the next object takes the place of one, that it has never taken: torch 2.11
    does, and frees objects that are in use."""
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("torchax_probe", probe)
    takes = sys.getrefcount(probe) == before
    if takes:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))  # what the end of this thread gives back
    return takes
