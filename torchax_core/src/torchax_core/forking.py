"""Processes forked after ops have run. JAX's threads do not survive a fork, and its next call would wait for them for ever:
an error says so instead, as torch has one for cuda.

Source: https://docs.pytorch.org/docs/stable/notes/multiprocessing.html
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

from torchax_core.errors import ForkedProcessError
from torchax_core.tensor import active

__all__ = ["in_bad_fork", "watch_forks"]

_bad = False


def in_bad_fork() -> bool:
    """Whether this process was forked from one that had already run ops on device "jax"."""
    return _bad


def watch_forks(environment_class: Any) -> None:
    """From now on children of a process that has run ops refuse to run any."""

    def refuse(self: Any) -> NoReturn:
        raise ForkedProcessError(
            "this process was forked from one that had already used device 'jax', and JAX does not survive a fork. Keep "
            "what forked processes do on the CPU (a Dataset returns CPU tensors; move the batch where it arrives), or start "
            "them afresh: multiprocessing_context='spawn' or 'forkserver' (DataLoader), multiprocessing.get_context('spawn')."
        )

    def after_fork() -> None:
        global _bad
        if any(made is not None and made._kernels for made in (reference() for reference in environment_class._all)):
            _bad = True
            active.environment = active.kernels = active.trace = None
            environment_class._lookup = refuse  # what every op of a thread begins with

    os.register_at_fork(after_in_child=after_fork)
