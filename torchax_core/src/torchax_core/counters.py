"""What has been compiled in this process: counted where a program is made, so that running one costs nothing.

jax tells of each compilation through its monitoring events; the user's own JAX functions are among them.
Source: https://docs.jax.dev/en/latest/jax.monitoring.html
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import jax

__all__ = ["Compiled", "here", "jitted", "signatures", "total"]


class Compiled:
    """Programs compiled, or read from the persistent cache, with the seconds that took.

    compiled:     programs that XLA was asked for.
    seconds:      what they took, reading included.
    cache_hits:   programs read from the persistent cache instead of being compiled.
    cache_misses: programs looked for there and compiled.
    """

    def __init__(self) -> None:
        self.compiled = 0
        self.seconds = 0.0
        self.cache_hits = 0
        self.cache_misses = 0


class _Here(threading.local, Compiled):
    def __init__(self) -> None:
        Compiled.__init__(self)


total = Compiled()
"""Of the whole process."""
here = _Here()
"""Of this thread."""
signatures = 0
"""Signatures that were new to an op's kernel, each with a program of its own."""
jitted: weakref.WeakSet[Any] = weakref.WeakSet()
"""The functions made by torchax_core.jit that are alive."""

_lock = threading.Lock()


def _duration(event: str, seconds: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        with _lock:
            total.compiled += 1
            total.seconds += seconds
        here.compiled += 1
        here.seconds += seconds


def _event(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        with _lock:
            total.cache_hits += 1
        here.cache_hits += 1
    elif event == "/jax/compilation_cache/cache_misses":
        with _lock:
            total.cache_misses += 1
        here.cache_misses += 1


jax.monitoring.register_event_duration_secs_listener(_duration)
jax.monitoring.register_event_listener(_event)
