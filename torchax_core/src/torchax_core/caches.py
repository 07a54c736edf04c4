"""The persistent compilation cache: a new process reads compiled programs from disk instead of compiling again.

Source: https://docs.jax.dev/en/latest/persistent_compilation_cache.html
"""

from __future__ import annotations

import os

import jax

__all__ = ["use_compilation_cache"]


def use_compilation_cache(folder: str | os.PathLike[str]) -> None:
    """Keep compiled programs in `folder`, small and quick ones too: eager ops are many small programs."""
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
