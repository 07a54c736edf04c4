"""Compiled programs: kept on disk, for a new process to read instead of compiling again; and forgotten, to free memory.

Source: https://docs.jax.dev/en/latest/persistent_compilation_cache.html
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys

import jax

from torchax_core.kernel import forget_signatures

__all__ = ["clear_caches", "use_compilation_cache"]


def clear_caches() -> None:
    """Forget every compiled program, of eager ops, of torchax_core.jit and of JAX: what runs next is compiled anew.

    Every new signature of an op is a program, of about a megabyte on CPU.
    Source: https://docs.jax.dev/en/latest/_autosummary/jax.clear_caches.html
    """
    forget_signatures()
    jax.clear_caches()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # glibc keeps what was freed in small pieces, most of it here, from the system
        trim(0)


def use_compilation_cache(folder: str | os.PathLike[str]) -> None:
    """Keep compiled programs in `folder`, small and quick ones too: eager ops are many small programs."""
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
