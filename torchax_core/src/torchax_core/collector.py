"""Python's cyclic garbage collector, held back while a program is traced and compiled.

Tracing makes tens of thousands of objects that live on, so it sets off full collections, each of which walks all of torch
and jax: 0.2 s, as long as it takes to compile a small model, and for nothing. One that is due, from what importing torch
and jax has made, comes when the collector goes on; so it is held back from the first line traced to XLA's last.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

__all__ = ["collect_young", "paused"]

_pauses = 0
_was_enabled = False
_lock = threading.Lock()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No automatic collection meanwhile, in any thread; afterwards as before. May be nested."""
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()


def collect_young() -> None:
    """Collect what was made since the collector paused: all of it is in the youngest generation still."""
    gc.collect(0)
