"""Names of modules in traced programs: HLO and profiles say `jit(step)/GPT/blocks.0/attention/linear/dot_general`.

While a function is traced, each module's forward runs in a `jax.named_scope` of its path below the module that was called
first, and the ops that autograd runs are named after the forward they belong to: `backward/GPT/blocks.0/attention/...`.
Source: https://docs.jax.dev/en/latest/_autosummary/jax.named_scope.html
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

__all__ = ["Annotations", "Scopes", "naming_modules"]

_peek = torch._C._autograd._get_sequence_nr
_node = torch._C._current_autograd_node


class Scopes:
    """The modules whose forward is under way, outermost first, and which backward nodes belong to which."""

    def __init__(self, fn: Callable[..., Any] | None = None, scope: Callable[[str], Any] = jax.named_scope) -> None:
        self._scope = scope
        self.open: list[tuple[torch.nn.Module, str, Any]] = []  # module, path from the root, named_scope entered
        self.path = ""  # of all that are open
        self._names: dict[int, str] = {}
        self._forward: dict[int, str] = {}
        owner = getattr(fn, "__self__", None)
        if isinstance(owner, torch.nn.Module):  # a method is traced: the module itself is not called
            self._learn(owner)

    def _learn(self, root: torch.nn.Module) -> None:
        for name, module in root.named_modules():
            self._names.setdefault(id(module), name)

    def enter(self, module: torch.nn.Module, args: Any = None) -> None:
        """Called before each forward."""
        name = self._names.get(id(module))
        if name is None:
            if not self.open:
                self._learn(module)
            name = ""
        above = self.open[-1][1] if self.open else ""
        short = name.removeprefix(above + ".") if above and name.startswith(above + ".") else name
        scope = self._scope(short or type(module).__name__)
        scope.__enter__()
        self.open.append((module, name, scope))
        self.path = f"{self.path}/{short or type(module).__name__}" if self.path else short or type(module).__name__

    def leave(self, module: torch.nn.Module, args: Any = None, result: Any = None) -> None:
        """Called after each forward, failed ones too."""
        while self.open and any(m is module for m, _, _ in self.open):
            found, _, scope = self.open.pop()
            scope.__exit__(None, None, None)
            self.path = self.path.rpartition("/")[0]
            if found is module:
                return

    def close(self) -> None:
        """Leave all that are open, after an error."""
        while self.open:
            self.leave(self.open[-1][0])

    def around(self) -> Any:
        """The scope for the op about to run, where it has none: in a backward, that of its forward."""
        node = _node()
        if node is not None:
            path = self._forward.get(node._sequence_nr())
            return None if path is None else jax.named_scope(path)
        if self.path:
            self._forward[_peek() - 1] = f"backward/{self.path}"
        return None


@contextlib.contextmanager
def naming_modules(trace: Any, fn: Callable[..., Any]) -> Iterator[None]:
    """Name modules in what `trace` traces, which is `fn`, until the block ends."""
    scopes = trace.scopes = Scopes(fn)
    hooks = [
        register_module_forward_pre_hook(scopes.enter),
        register_module_forward_hook(scopes.leave, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        scopes.close()


class Annotations:
    """The check (watching.py) that puts eager ops on a profile's timeline by name."""

    jitted = ""

    def before(self, call: Any) -> Any:
        """Begin the op."""
        annotation = jax.profiler.TraceAnnotation(call.name)
        annotation.__enter__()
        return annotation

    def after(self, call: Any, before: Any, result: Any) -> None:
        """End it."""
        before.__exit__(None, None, None)

    def in_backward(self, call: Any, before: Any, given: Any, gradients: Any) -> None:
        """Nothing: what runs in a backward is ops, or a program that jax names."""
