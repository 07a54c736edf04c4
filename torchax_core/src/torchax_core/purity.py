"""Torch code as part of a jax transformation: `jax.grad`, `jax.jit`, `jax.lax.scan` over a function that runs torch ops.

jax sees arrays; three things of torch's would be lost on the way, and are kept here:

- `x.detach()`, `with torch.no_grad():` cut gradients, so their results pass through `jax.lax.stop_gradient`;
- a write to a tensor that was not an argument would leave a tracer in it: it is undone, and a SideEffectError says so;
- random numbers drawn under `jax.jit` or in a `jax.lax` loop would be the same at every run: there is a warning.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import jax.extend.core as jec
import numpy as np
import torch

from torchax_core.convert import is_traced
from torchax_core.customs import tracing_functions
from torchax_core.cuts import cut, in_no_grad, run_kernel
from torchax_core.errors import SideEffectError
from torchax_core.forms import MISS
from torchax_core.known import KnownValues
from torchax_core.tensor import Storage, Tensor, active, resolve_active, tensors_among
from torchax_core.view import ViewReads

__all__ = ["PureTrace", "in_jax", "pure"]


def in_jax() -> bool:
    """True inside any jax transformation of this thread: jit, grad, vmap, scan."""
    with jec.take_current_trace() as trace:
        return type(trace).__name__ != "EvalTrace"


class _PureKernels:
    """The look-up from op to kernel in torch code that jax transforms."""

    def __init__(self, trace: PureTrace, environment: Any) -> None:
        self.trace = trace
        self.environment = environment

    def get(self, func: Any) -> Any:
        kernel = self.environment._kernels.get(func) or self.environment._kernel(func)
        trace = self.trace

        def call(args: Any, kwargs: Any) -> Any:
            trace.lift_all(args)
            if kwargs:
                trace.lift_all(kwargs.values())
            result = trace.known.result(func, kernel, args, kwargs)
            if result is MISS:
                result = run_kernel(func, kernel, args, kwargs, watched=True)
            trace.note(result)
            return result

        return call


class PureTrace:
    """What torch code met while jax transforms it. `active.trace` for as long; nested in the trace of a torchax jit."""

    def __init__(self, parent: Any) -> None:
        self.parent = parent
        self.met: dict[int, tuple[Storage, Any, int]] = {}
        self.tensors: dict[int, tuple[Tensor, Any]] = {}
        self.fresh: weakref.WeakSet[Storage] = weakref.WeakSet()
        self.made: dict[int, weakref.ref[Tensor]] = {}
        self.backward_ran = False
        self.view_reads = ViewReads()
        self.known = KnownValues(lambda store: store in self.fresh)
        self.outermost: Any = parent and (parent.outermost if isinstance(parent, PureTrace) else parent._outer)

    def __getattr__(self, name: str) -> Any:
        # a torchax jit around us keeps its book (guards, cleanups, optimizers' state) as if we were not here
        if name.startswith("__") or self.parent is None:
            raise AttributeError(name)
        return getattr(self.parent, name)

    def kernels(self, environment: Any) -> _PureKernels:
        """The look-up that replaces the environment's."""
        return _PureKernels(self, environment)

    def cut_unwanted(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """As they are: what gradients are wanted of, jax knows."""
        return args, kwargs

    def lift_all(self, values: Any) -> None:
        """Remember every Tensor in nested lists of arguments."""
        for tensor in tensors_among(values):
            self.lift(tensor)

    def lift(self, tensor: Tensor) -> None:
        """Remember a tensor that is neither an argument nor made inside, with what it held."""
        store = tensor._store
        if store in self.fresh:
            return
        if self.parent is not None:
            self.parent.lift(tensor)
        if id(store) not in self.met:
            self.met[id(store)] = (store, store.array, store.version)
        made = self.made.get(id(tensor))
        if id(tensor) not in self.tensors and (made is None or made() is not tensor):
            self.tensors[id(tensor)] = (tensor, torch.Tensor.grad.__get__(tensor) if tensor.is_leaf else None)  # type: ignore[attr-defined]

    def note(self, result: Any) -> None:
        """Know what was made inside; made under no_grad, it ends gradients."""
        if isinstance(result, Tensor):
            self.made[id(result)] = weakref.ref(result)
            if result._store not in self.fresh and id(result._store) not in self.met:
                self.fresh.add(result._store)
                if in_no_grad():
                    cut(result._store)
        elif result.__class__ is list or result.__class__ is tuple:
            for item in result:
                self.note(item)

    def host_input(self, read: Any) -> Any:
        """A value from the host (a generator's draw): an input of the program around us, else fixed."""
        self._warn_of_randomness()
        return read() if self.parent is None else self.parent.host_input(read)

    def random_arguments(self, state: Any) -> tuple[Any, Any]:
        """Key and count for one draw."""
        if state.initial is not None:  # a seed's; a key put in its place is somebody's choice, and may be traced
            self._warn_of_randomness()
            if self.parent is not None:
                return self.parent.random_arguments(state)
        count = state.count
        state.count = count + 1
        return state.key, count if is_traced(count) else np.uint32(count & 0xFFFF_FFFF)

    def _warn_of_randomness(self) -> None:
        with jec.take_current_trace() as trace:
            repeats = type(trace).__name__ == "DynamicJaxprTrace" and trace is not self.outermost
        if repeats:
            warnings.warn(
                "torch code draws random numbers inside a jax program (jax.jit, or a loop of jax.lax), where they are drawn once "
                "and are the same at every run. Give it a key: JittableModule.functional_call(..., rng, ...), "
                "extract_jax's `rng=`, or `with env.override_property(prng=key):`; or compile with torchax_core.jit.",
                stacklevel=2,
            )

    def captured(self) -> list[Tensor]:
        """Tensors from outside that want gradients."""
        return [t for t, _ in self.tensors.values() if t.requires_grad and (t.is_floating_point() or t.is_complex())]

    def undo_writes(self) -> str:
        """Put back what was there before in every tensor and gradient from outside; names the first that was written."""
        written = ""
        for store, array, version in self.met.values():
            if store.array is not array:
                written = written or f"a tensor of shape {tuple(array.shape)}"
                store.array, store.version = array, version
        for tensor, grad in self.tensors.values():
            if tensor.is_leaf and torch.Tensor.grad.__get__(tensor) is not grad:  # type: ignore[attr-defined]
                written = written or f"the gradient of a tensor of shape {tuple(tensor.shape)}"
                torch.Tensor.grad.__set__(tensor, grad)  # type: ignore[attr-defined]
        return written


@contextlib.contextmanager
def pure() -> Iterator[PureTrace]:
    """Run torch code inside a jax transformation. Raises SideEffectError if it wrote to a tensor from outside."""
    if active.kernels is None:
        resolve_active()
    before = (active.trace, active.kernels)
    trace = PureTrace(active.trace)
    active.trace = trace  # type: ignore[assignment]
    active.kernels = trace.kernels(active.environment)
    try:
        with torch.autograd.set_multithreading_enabled(False), torch.enable_grad(), tracing_functions:
            yield trace
    finally:
        active.trace, active.kernels = before
        written = trace.undo_writes()
        if trace.backward_ran and trace.parent is not None:
            trace.parent.backward_ran = True
    if written:
        raise SideEffectError(
            f"torch code inside a jax transformation wrote to {written} that is not among its arguments; jax would lose the "
            "write, so it was undone. Give the tensor as an argument and return its new value (extract_jax and "
            "JittableModule.functional_call do it for buffers), or compile with torchax_core.jit, which keeps writes."
        )
