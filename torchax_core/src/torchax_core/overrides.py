"""Kernels of overridden ops: they may decline a call, and they step aside for what they themselves call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Declined", "DecliningKernel"]


class Declined(Exception):
    """An override returned NotImplemented: the next definition is to run."""


class DecliningKernel:
    """Runs an override; on NotImplemented, or when the override calls its own op, the next definition."""

    def __init__(self, kernel: Any, override: Any, following: Callable[[], Any]) -> None:
        self.kernel = kernel
        self.override = override
        self._make_following = following
        self._following: Any = None

    @property
    def definition(self) -> Any:
        return self.override.definition

    @property
    def following(self) -> Any:
        """The kernel that is asked next."""
        if self._following is None:
            self._following = self._make_following()
        return self._following

    @property
    def func(self) -> Any:
        return self.kernel.func

    def ask(self, call: Callable[[Any], Any]) -> Any:
        """`call` with the override's kernel, or with the following one where the override declines."""
        running = self.override.running  # of all its ops: exp_, by an override of exp, may call exp
        if getattr(running, "now", False):
            return call(self.following)
        running.now = True
        try:
            result = call(self.kernel)
        except Declined:
            result = NotImplemented
        finally:
            running.now = False
        return call(self.following) if result is NotImplemented else result

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        return self.ask(lambda kernel: kernel(args, kwargs))
