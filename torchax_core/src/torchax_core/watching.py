"""Watching calls: while a debug check or TORCHAX_LOG=ops is on, an environment's ops go through a `Watch`, and checks look at
each call before and after it runs. While none is on, none of this exists, and nothing is paid.

A call inside a jax trace has no values to look at: it runs unwatched.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch
from torch.utils import _pytree as pytree

from torchax_core import log
from torchax_core.convert import is_traced
from torchax_core.device import DEVICE_TYPE
from torchax_core.purity import in_jax
from torchax_core.tensor import Tensor, active, tensors_among
from torchax_core.variants import op_name

__all__ = ["Call", "Check", "Watch", "at", "checks_of", "is_users"]

Place = tuple[str, int]
"""A file and a line number."""

_peek = torch._C._autograd._get_sequence_nr
_node = torch._C._current_autograd_node
_LINES_KEPT = 200_000


class _Whole(threading.local):
    """The op caught above autograd whose call is under way in this thread, if no other op's is inside of it."""

    name = ""


_whole = _Whole()


class Call:
    """One call being watched.

    name:     the op's full name, or a torch function's dotted one.
    func:     the op or function itself.
    line:     where in the user's code it is, or whose backward it is part of.
    place:    file and number of that line, the forward's for a backward; None if unknown.
    """

    __slots__ = ("args", "func", "kwargs", "line", "name", "place")

    def __init__(
        self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any], line: str, place: Place | None
    ) -> None:
        self.name, self.func, self.args, self.kwargs, self.line, self.place = name, func, args, kwargs, line, place

    def tensors(self) -> Iterator[Tensor]:
        """The tensors of ours among the arguments."""
        yield from tensors_among(pytree.tree_leaves((self.args, self.kwargs)))

    def described(self) -> str:
        """The call as `aten::add.Tensor(float32[2,3], 1)`."""
        return f"{self.name}({log.describe_call(self.args, self.kwargs)})"


class Check:
    """What looks at calls. `jitted`: how it wants a jitted function run: "eager", "checked", or "" for as usual."""

    jitted = ""

    def before(self, call: Call) -> Any:
        """What to remember of the arguments, which the call may write to."""

    def after(self, call: Call, before: Any, result: Any) -> None:
        """Look at the result. May raise."""

    def in_backward(self, call: Call, before: Any, given: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Look at the gradients of a call that differentiates itself, given those of its results. May raise."""


class Watch:
    """An environment's look-up from op to kernel, with checks around every call."""

    def __init__(self, environment: Any, checks: Sequence[Check], *, logs: bool = False) -> None:
        self.environment = environment
        self.logs = logs
        self.checks: tuple[Any, ...] = (*checks, *([log.OpLines()] if logs else []))
        self._forward: dict[int, Call] = {}  # by the sequence number of a backward node: its forward, less arguments
        self._thread: int | None = threading.get_ident()

    def get(self, func: Any) -> Any:
        """As dict.get: the kernel of an op, watched."""
        environment = self.environment
        kernel = environment._kernels.get(func) or environment._kernel(func)
        return functools.partial(self._dispatched, func, kernel)

    def _dispatched(self, func: Any, kernel: Any, args: Any, kwargs: Any) -> Any:
        return self.run(func, args, kwargs or {}, lambda: kernel(args, kwargs))

    def run(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        call: Callable[[], Any],
        *,
        name: str = "",
        whole: bool = False,
    ) -> Any:
        """`call()`, which is `func(*args, **kwargs)` on device "jax", with the checks around it.

        whole: the call was caught above autograd, so it may record a backward of its own.
        """
        tensors = list(tensors_among(pytree.tree_leaves((args, kwargs))))
        name = name or op_name(func)
        if name == _whole.name and not whole:  # the op itself, on its way from above autograd
            return call()
        if active.trace is not None or any(is_traced(t._store.array) for t in tensors) or (not tensors and in_jax()):
            return call()
        node = _node()
        record = node is None and any(t.requires_grad for t in tensors)
        first = _peek()
        watched = Call(name, func, args, kwargs, *self._line(node))
        states = [(check, check.before(watched)) for check in self.checks]
        outer = _whole.name
        _whole.name = name if whole else ""
        try:
            result = call()
        finally:
            _whole.name = outer
        if result is NotImplemented:  # an override that declines
            return result
        if record:
            self._remember(watched, first)
        try:
            for check, state in reversed(states):
                check.after(watched, state, result)
        except Exception as error:
            if node is None:
                raise
            _raise_after_backward(error)
        if whole and record:
            self._watch_backward(watched, states, result)
        return result

    # -- where a call is -------------------------------------------------------------------------

    def _line(self, node: Any) -> tuple[str, Place | None]:
        if node is None:
            place = user_place()
            return line_text(place), place
        forward = self._forward.get(node._sequence_nr())
        if forward is None:
            return f"in backward ({node.name()})", None
        return f"in backward ({node.name()}, of {forward.name} {forward.line})", forward.place

    def _remember(self, call: Call, first: int) -> None:
        """Note which backward nodes the call has made: below autograd the one just before it, above it all since."""
        if self._thread != threading.get_ident():
            self._thread = None  # the numbers are each thread's own: with several, none can be told from another
            self._forward.clear()
        if self._thread is None:
            return
        if len(self._forward) > _LINES_KEPT:
            self._forward.clear()
        for number in range(first - 1, _peek()):
            self._forward.setdefault(number, Call(call.name, None, (), {}, call.line, call.place))

    def _watch_backward(self, call: Call, states: Any, result: Any) -> None:
        nodes = {id(n): n for n in (getattr(t, "grad_fn", None) for t in pytree.tree_leaves(result)) if n is not None}
        for node in nodes.values():
            if node.name() != "_CallBackward":  # torch's own: its backward is made of ops, each watched
                continue
            line = f"in its backward (forward {call.line})"
            backward = Call(call.name, call.func, call.args, call.kwargs, line, call.place)

            def hook(gradients: Any, given: Any, backward: Call = backward) -> None:
                for check, state in states:
                    try:
                        check.in_backward(backward, state, given, gradients)
                    except Exception as error:
                        _raise_after_backward(error)

            node.register_hook(hook)

    # -- jitted functions ------------------------------------------------------------------------

    @property
    def eager(self) -> bool:
        """Whether jitted functions are to run op by op."""
        return any(check.jitted == "eager" for check in self.checks)

    @property
    def looks_inside(self) -> bool:
        """Whether there is a check of ops, for which a compiled program has to be taken apart."""
        return any(check.jitted for check in self.checks)

    def run_eagerly(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a jitted function does, without jit; tensors on the CPU are moved, as jit does."""
        args, kwargs = pytree.tree_map(lambda leaf: leaf.to(DEVICE_TYPE) if _elsewhere(leaf) else leaf, (args, kwargs))
        return fn(*args, **kwargs)

    def jitted(
        self, function: Any, program: Any, leaves: Sequence[Any], run: Callable[[], Any], args: Any, kwargs: Any
    ) -> Any:
        """`run()`, a call of a jitted function's program, as the checks want it."""
        place = user_place()
        call = Call(f"jit({function.name})", function, args, kwargs, line_text(place), place)
        logs = [(check, check.before(call)) for check in self.checks if isinstance(check, log.OpLines)]
        if any(check.jitted == "checked" for check in self.checks):
            from torchax_core.nonfinite import run_checked

            result = run_checked(self, call, program, leaves, run)
        else:
            result = run()
        for check, state in logs:
            check.after(call, state, result)
        return result


def _elsewhere(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, Tensor)


def _raise_after_backward(error: Exception) -> None:
    """Raise `error` where the backward that is under way was started, once it is over: torch's C++ does not survive an
    error from Python in the midst of it, on a device made in Python."""

    def late() -> None:
        raise error

    torch.autograd.Variable._execution_engine.queue_callback(late)  # type: ignore[attr-defined]


def checks_of(config: Any) -> list[Check]:
    """The checks that a Config asks for."""
    checks: list[Check] = []
    if config.debug_accuracy:
        from torchax_core.accuracy import AccuracyCheck

        checks.append(AccuracyCheck(config.debug_accuracy))
    if config.debug_nans or config.debug_infs:
        from torchax_core.nonfinite import NonFiniteCheck

        checks.append(NonFiniteCheck(nans=config.debug_nans, infs=config.debug_infs))
    return checks


# -- the user's line -----------------------------------------------------------------------------


def _library_folders() -> tuple[str, ...]:
    import torchax_core

    folders = [os.path.dirname(m.__file__) + os.sep for m in (torchax_core, torch, jax) if m.__file__]
    return (*folders, os.path.dirname(jax.lib.__file__) + os.sep, "<form ", "<frozen ")


_STDLIB = sysconfig.get_path("stdlib") + os.sep


@functools.cache
def is_users(file: str) -> bool:
    """Whether code in this file is none of torch's, jax's, torchax_core's or Python's own."""
    if file.startswith(_library_folders()) or f"{os.sep}jaxlib{os.sep}" in file:
        return False
    rest = file.removeprefix(_STDLIB)
    return rest == file or rest.startswith(("site-packages", "dist-packages"))


class _At(threading.local):
    place: Place | None = None


_at = _At()


@contextlib.contextmanager
def at(place: Place | None) -> Iterator[None]:
    """While it lasts, this thread is at that place in the user's code, whatever its stack says."""
    before = _at.place
    _at.place = place
    try:
        yield
    finally:
        _at.place = before


def user_place() -> Place | None:
    """File and line of the innermost frame on this thread's stack outside torch, jax and torchax_core."""
    if _at.place is not None:
        return _at.place
    frame = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def line_text(place: Place | None) -> str:
    """A place as `at model.py:12: y = x / s`."""
    if place is None:
        return "in a thread without a line of the user's"
    text = linecache.getline(*place).strip()
    return f"at {place[0]}:{place[1]}" + (f": {text}" if text else "")
