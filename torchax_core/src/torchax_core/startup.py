"""Start-up: what is imported and registered stays, so Python need not look through it for garbage while it comes."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator

import torch

__all__ = ["import_what_torch_will", "without_collections"]


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Put Python's collections of cyclic garbage off until the block ends.

    Importing torch's and JAX's modules makes some hundred thousand objects that all stay; the collections that their number
    sets off take a fifth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def import_what_torch_will() -> None:
    """Import torch's DTensor, and sympy with it, if this torch does so at the first op of any subclass of its Tensor: its C++
    asks there whether the subclass is DTensor. Imported here it takes less time, as collections are put off."""
    if torch.distributed.is_available() and hasattr(torch._C, "_DTensor_OpSchema_post_init"):
        importlib.import_module("torch.distributed.tensor")
