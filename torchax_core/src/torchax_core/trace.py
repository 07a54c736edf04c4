"""One tracing of imperative torch code into a jaxpr: which storages it met, which it wrote, what it made and left alive.

A storage met for the first time is *lifted*: a placeholder primitive is bound in its place, at the level of the trace
itself however deep inside a scan or vjp the code is, and the finished jaxpr has those placeholders turned into inputs. So
no weight is ever a constant of the program, and two tensors over one storage stay one.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as jec
import numpy as np
import torch

from torchax_core.convert import is_traced
from torchax_core.cuts import cut, cut_unwanted, in_no_grad, run_kernel
from torchax_core.forms import MISS
from torchax_core.freeing import Freed
from torchax_core.known import KnownValues
from torchax_core.random import RandomState
from torchax_core.reads import Reads
from torchax_core.shared_patches import SharedPatches, patch
from torchax_core.tensor import Storage, Tensor, active, tensors_among
from torchax_core.view import View, ViewReads, read_views
from torchax_core.wrapped import is_wrapper, parts

__all__ = ["Again", "Lifted", "Trace", "get_grad", "promote_placeholders", "set_grad", "watching_grads"]

_placeholder_p = jec.Primitive("torchax_state")


@_placeholder_p.def_abstract_eval
def _placeholder_aval(*, index: int, aval: Any) -> Any:
    return aval


get_grad: Callable[[torch.Tensor], torch.Tensor | None] = torch.Tensor.grad.__get__  # type: ignore[attr-defined]
set_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = torch.Tensor.grad.__set__  # type: ignore[attr-defined]


class _WatchedGrad:
    """`Tensor.grad` while a trace is under way anywhere: torch's own, and the thread's trace is told."""

    def __get__(self, tensor: Tensor | None, owner: type) -> Any:
        if tensor is None:
            return self
        if active.trace is not None:
            active.trace.grad_met(tensor)
        return get_grad(tensor)

    def __set__(self, tensor: Tensor, grad: torch.Tensor | None) -> None:
        if active.trace is not None:
            active.trace.grad_met(tensor)
        set_grad(tensor, grad)

    def __delete__(self, tensor: Tensor) -> None:
        self.__set__(tensor, None)


_get_requires_grad: Callable[[torch.Tensor], bool] = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class _WatchedRequiresGrad:
    """`Tensor.requires_grad` while a trace is under way anywhere: torch's own, and the thread's trace is told of reads."""

    def __get__(self, tensor: Tensor | None, owner: type) -> Any:
        if tensor is None:
            return self
        if active.trace is not None:
            active.trace.gradients_matter = True
        return _get_requires_grad(tensor)

    def __set__(self, tensor: Tensor, value: bool) -> None:
        torch.Tensor.requires_grad.__set__(tensor, value)  # type: ignore[attr-defined]


class _WatchedPart:
    """A slot of a wrapper's class that holds a part, while a trace is under way anywhere: the thread's trace is told of reads,
    which come before every op, C++'s too."""

    def __init__(self, slot: Any) -> None:
        self.slot = slot

    def __get__(self, wrapper: Any, owner: type) -> Any:
        if wrapper is None:
            return self
        part = self.slot.__get__(wrapper, owner)
        if active.trace is not None:
            active.trace.wrapper_met(wrapper, part)
        return part

    def __set__(self, wrapper: Any, part: Any) -> None:
        self.slot.__set__(wrapper, part)


def _backward(tensor: Any, *args: Any, **kwargs: Any) -> None:
    """torch.Tensor.backward of a DTensor; a trace is told."""
    if active.trace is not None:
        active.trace.backward_ran = True
    torch.Tensor.backward(tensor, *args, **kwargs)


@SharedPatches
def watching_grads(stack: contextlib.ExitStack) -> None:
    """Tell traces of reads and writes of `.grad`, and reads of `.requires_grad`, from Python; and of DTensors."""
    kinds: list[Any] = [Tensor]
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor

        kinds.append(DTensor)
        patch(stack, DTensor, "_local_tensor", _WatchedPart(vars(DTensor)["_local_tensor"]))
        patch(stack, DTensor, "backward", _backward)
    for kind in kinds:
        patch(stack, kind, "grad", _WatchedGrad())
        patch(stack, kind, "requires_grad", _WatchedRequiresGrad())


class Again(Exception):
    """The function is to be traced once more, from its beginning, after this was done."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        super().__init__("a trace was interrupted to begin again")
        self.prepare = prepare


class Lifted:
    """A storage that the traced code met: what it held before, and the tracer that stands for it."""

    __slots__ = ("array", "store", "tracer", "version")

    def __init__(self, store: Storage, tracer: Any) -> None:
        self.store = store
        self.tracer = tracer
        self.array = store.array
        self.version = store.version

    @property
    def written(self) -> bool:
        return self.store.array is not self.tracer


@functools.cache
def _only_reads(func: Any) -> bool:
    """Whether the op neither writes to an argument nor returns a view of one."""
    return all(argument.alias_info is None for argument in func._schema.arguments)


class _TracingKernels:
    """The look-up from op to kernel while tracing: every call lifts its arguments first and notes its results."""

    def __init__(self, trace: Trace, environment: Any) -> None:
        self.trace = trace
        self.environment = environment

    def get(self, func: Any) -> Any:
        environment = self.environment
        kernel = environment._kernels.get(func)
        if kernel is None:
            kernel = environment._kernel(func)
        return functools.partial(self._call, func, kernel)

    def _call(self, func: Any, kernel: Any, args: Any, kwargs: Any) -> Any:
        trace = self.trace
        trace.lift_all(args)
        if kwargs:
            trace.lift_all(kwargs.values())
        result = trace.known.result(func, kernel, args, kwargs)
        if result is not MISS:
            trace.note(result)
            return result
        if _only_reads(func):
            args, kwargs = trace.cut_unwanted(args, kwargs)
            read_views(args)
        elif func._schema.is_mutable:
            read_views(args[1:])
            if args and args[0].__class__ is View and getattr(kernel, "in_place", False):
                kernel = kernel.run  # not by a form: those write through views at offsets that are inputs
        scope = trace.scopes and trace.scopes.around()
        if scope is None:
            result = run_kernel(func, kernel, args, kwargs, watched=trace.watched)
        else:
            with scope:
                result = run_kernel(func, kernel, args, kwargs, watched=trace.watched)
        trace.note(result)
        return result


class Trace:
    """The state of one tracing; `active.trace` while it lasts."""

    def __init__(self, environment: Any, key: Any, count: Any) -> None:
        self.environment = environment
        self.lifted: dict[int, Lifted] = {}
        self.outside: set[int] = set()  # the tensors by which storages were met first, by identity
        self.tensors: dict[int, tuple[Tensor, Storage]] = {}
        self.aliases: set[int] = set()  # tensors over lifted storages that were made inside, by identity
        self.wrappers: dict[int, tuple[torch.Tensor, list[Tensor]]] = {}  # DTensors met, and their parts (wrapped.py)
        self.grads: dict[int, tuple[torch.Tensor, Any]] = {}
        self.reset_grads: set[int] = set()
        self._met_grads: set[int] = set()
        self.modules: dict[int, torch.nn.Module] = {}
        self.reads = Reads(sys._getframe(1))
        self.scopes: Any = None  # names of modules for the program (scopes.py)
        self.arguments: set[int] = set()  # storages of the function's own arguments, by identity
        self.host_inputs: list[tuple[Callable[[], Any], Any]] = []
        self.guards: list[tuple[str, Callable[[], Any], Any]] = []
        self.cleanups: list[Callable[[], None]] = []
        self.shares_counts = True  # whether step counts that are equal are to be one input (shared_counts.py)
        self.shared_counts: dict[int, Any] = {}  # by identity, arrays that several storages hold, and their tracers
        self.beginnings: list[Callable[[], None]] = []  # what is done before every call, and its guards
        self.endings: dict[Any, Callable[[], None]] = {}  # by what they are for: what the function does at its end, too
        self.groups: set[Any] = set()  # of processes that collectives were traced among (spanning.py)
        self.torch_only: set[str] = set()  # calls that torch differentiates otherwise than jax would
        self.backward_ran = False
        self.gradients_matter = False  # whether what is computed may depend on what requires gradients
        self.draws = 0
        self.bound: dict[int, int] = {}
        self._key, self._count = key, count
        self._random = environment.random
        self._grad_enabled = torch.is_grad_enabled()
        self._born: list[weakref.ref[Storage]] = []
        self._born_ids: set[int] = set()
        self._given: weakref.WeakSet[Storage] = weakref.WeakSet()
        self.view_reads = ViewReads()
        self.known = KnownValues(lambda store: id(store) in self._born_ids)
        with jec.take_current_trace() as outer:
            self._outer = outer

    def kernels(self, environment: Any) -> _TracingKernels:
        """The look-up that replaces the environment's while tracing."""
        return _TracingKernels(self, environment)

    # -- what the code meets ---------------------------------------------------------------------

    def lift_all(self, values: Any) -> None:
        """Lift every Tensor in nested lists of arguments of a call."""
        self.reads.note()
        for tensor in tensors_among(values):
            self.lift(tensor)

    def lift(self, tensor: Tensor) -> None:
        """Make the tensor's storage an input of the program, if it is not one yet and was not made inside."""
        store = tensor._store
        if not self.gradients_matter and torch.is_grad_enabled():
            self.gradients_matter = True
        if id(store) not in self.lifted:
            # made inside: out of the program's values, or out of constants
            if id(store) in self._born_ids:
                return
            if is_traced(store.array):
                self._given.add(store)  # an argument
                return
            if isinstance(store.array, Freed):
                return  # the op says so
            entry = Lifted(store, self._input_of(store.array))
            self.lifted[id(store)] = entry
            self.outside.add(id(tensor))
            store.write(entry.tracer)
        if id(tensor) not in self.tensors:
            self.tensors[id(tensor)] = (tensor, store)
            self._note_grad(tensor)

    def wrapper_met(self, wrapper: torch.Tensor, part: Any) -> None:
        """A DTensor is used, or another tensor made of ours: if it was there before the trace, it is state, as its parts are."""
        if id(wrapper) in self.wrappers or not isinstance(part, Tensor):
            return
        key = id(part._store)
        if id(part) in self.aliases or key in self._born_ids or key in self.arguments or part._store in self._given:
            return  # made inside, or an argument
        found = self.wrappers[id(wrapper)] = (wrapper, [])  # before its parts are read, which comes by here
        found[1].extend(parts(wrapper))
        for inner in found[1]:
            self.lift(inner)
        self._note_grad(wrapper)

    def module_met(self, module: torch.nn.Module) -> None:
        """A module runs."""
        self.modules[id(module)] = module
        for parameter in module._parameters.values():
            if parameter is not None and not isinstance(parameter, Tensor) and is_wrapper(parameter):
                self.wrapper_met(parameter, parts(parameter)[0])

    def cut_unwanted(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a call, as those see them that will differentiate the program (cuts.py)."""
        if not self.watched or not torch.is_grad_enabled():
            return args, kwargs

        def captured(store: Storage) -> bool:
            return id(store) in self.lifted or id(store) in self.arguments

        return cut_unwanted(args, captured), kwargs and cut_unwanted(kwargs, captured)

    def _note_grad(self, tensor: torch.Tensor, met: bool = False) -> None:
        """Keep what `.grad` was before the trace, to put it back. met: the code has looked at it."""
        if id(tensor) not in self.grads and (met or _get_requires_grad(tensor)) and tensor.is_leaf:
            grad = get_grad(tensor)
            if grad is None or not all(id(part._store) in self._born_ids for part in parts(tensor)):
                self.grads[id(tensor)] = (tensor, grad)  # else one of the trace, of a tensor of the trace

    def grad_met(self, tensor: torch.Tensor) -> None:
        """`tensor.grad` is read or set by the code: if it is the one from before the trace, the program depends on it."""
        self._note_grad(tensor, met=True)
        if not self.grad_was_used(tensor) and id(tensor) not in self.reset_grads:
            self._met_grads.add(id(tensor))

    def grad_guards(self) -> list[tuple[torch.Tensor, bool]]:
        """Tensors whose `.grad` from before the program the code has looked at or added to, and whether it was None."""
        return [
            (tensor, initial is None)
            for key, (tensor, initial) in self.grads.items()
            if key not in self.reset_grads
            and (key in self._met_grads or get_grad(tensor) is not initial or self.is_state(initial))
        ]

    def is_state(self, grad: torch.Tensor | None) -> bool:
        """Whether a gradient from before the trace is an input of the program."""
        return grad is not None and any(id(part._store) in self.lifted for part in parts(grad))

    def host_input(self, read: Callable[[], Any]) -> Any:
        """A traced array for a value read from the host (a learning rate, a generator's draw) before every call."""
        value = read()
        tracer = self.placeholder(jax.typeof(value))
        self.host_inputs.append((read, tracer))
        return tracer

    def _input_of(self, array: Any) -> Any:
        """A traced array for what a storage holds: one for all that hold the same step count."""
        if id(array) not in self.shared_counts:
            return self.placeholder(jax.typeof(array))
        tracer = self.shared_counts[id(array)]
        if tracer is None:
            tracer = self.shared_counts[id(array)] = self.placeholder(jax.typeof(array))
        return tracer

    def placeholder(self, aval: Any) -> Any:
        """A traced array that becomes an input of the program."""
        index = len(self.bound)
        with jec.set_current_trace(self._outer):
            tracer = _placeholder_p.bind(index=index, aval=aval)
        self.bound[id(tracer)] = index
        return tracer

    @property
    def watched(self) -> bool:
        """Whether the results may want gradients."""
        return self._grad_enabled and not self.backward_ran

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Trace a backward of torch's: it is run without gradients, but what it computes has derivatives."""
        before, self.backward_ran = self.backward_ran, True
        try:
            yield
        finally:
            self.backward_ran = before

    def note(self, result: Any) -> None:
        """Remember storages made inside, by weak reference: those alive at the end are results of the program. What is
        made under no_grad ends gradients; once a backward has run, the results want none (jit.py)."""
        if isinstance(result, Tensor):
            store = result._store
            key = id(store)
            if key not in self._born_ids and key not in self.lifted and store not in self._given:
                self._is_born(store)
                if self.watched and in_no_grad():
                    cut(store)
            elif key in self.lifted and id(result) not in self.tensors:
                self.aliases.add(id(result))
        elif result.__class__ is list or result.__class__ is tuple:
            for item in result:
                self.note(item)

    def _is_born(self, store: Storage) -> None:
        key = id(store)
        self._born_ids.add(key)
        self._born.append(weakref.ref(store, lambda _: self._born_ids.discard(key)))

    def may_resize(self, store: Storage) -> bool:
        """Whether a storage may be given back, or taken again, by the code: one made inside, or one from outside that was given
        back before, and is a new one now (freeing.py)."""
        if id(store) in self._born_ids:
            return True
        freed, reference = store.array, weakref.ref(store)
        new = isinstance(freed, Freed) and id(store) not in self.lifted
        if new:
            self._is_born(store)
            self.cleanups.append(functools.partial(setattr, store, "array", freed))
        # of an input, that the program could not do with: `resize_` is called again where it has been
        self.guards.append(("memory that was given back", lambda: isinstance(_array_of(reference()), Freed), new))
        return new

    def random_arguments(self, state: RandomState) -> tuple[Any, Any]:
        """Key and count for one draw: the program's inputs, and the number of draws before this one."""
        if state is not self._random:  # another environment's, or a key put in its place for a while
            count = state.count
            state.count += 1
            return state.key, np.uint32(count)
        draw = self.draws
        self.draws += 1
        return self._key, self._count + np.uint32(draw)

    def survivors(self) -> list[Storage]:
        """Storages made inside that are still alive, and have not been given back."""
        found = [reference() for reference in self._born]
        return [store for store in found if store is not None and not isinstance(store.array, Freed)]

    # -- leaving and coming back -----------------------------------------------------------------

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Run ordinary eager code in the middle of the trace, on the values from before it."""
        held = [(entry.store, entry.store.array, entry.store.version) for entry in self.lifted.values()]
        kernels = active.kernels
        for entry in self.lifted.values():
            entry.store.array, entry.store.version = entry.array, entry.version
        active.trace, active.kernels = None, self.environment._kernels
        try:
            with jec.take_current_trace():
                yield
        finally:
            active.trace, active.kernels = self, kernels
            for store, array, version in held:
                store.array, store.version = array, version

    def restore(self) -> None:
        """Put back every lifted storage as it was, and hold its array no longer: the first call may donate it, and finds this
        trace still there, in cycles of Python's."""
        for entry in self.lifted.values():
            entry.store.array = entry.array
            entry.store.version = entry.version
            entry.array = None

    def release(self) -> None:
        """Hold none of the tensors any longer: when they are gone from the program's user, they are to be gone."""
        for held in (self.lifted, self.tensors, self.wrappers, self.grads, self.modules):
            held.clear()  # type: ignore[attr-defined]
        self.view_reads, self.known = ViewReads(), KnownValues(lambda store: False)

    def grad_was_used(self, tensor: torch.Tensor) -> bool:
        """Whether a gradient was accumulated into `tensor.grad`, or it was read, before now."""
        known = self.grads.get(id(tensor))
        return known is not None and get_grad(tensor) is not known[1]

    def restore_grads(self) -> None:
        """Put back `.grad` as it was: what the program computes for it is set when the program has run."""
        for tensor, grad in self.grads.values():
            set_grad(tensor, grad)


def _array_of(store: Storage | None) -> Any:
    return None if store is None else store.array


def promote_placeholders(closed: Any, count: int) -> Any:
    """The jaxpr with its `count` placeholders turned into inputs, after its own, in the order they were bound."""
    jaxpr = closed.jaxpr
    placeholders = [e for e in jaxpr.eqns if e.primitive is _placeholder_p]
    placeholders.sort(key=lambda e: e.params["index"])
    if len(placeholders) != count:
        raise RuntimeError(f"{count} state inputs were lifted, but the jaxpr holds {len(placeholders)}.")
    new = jaxpr.replace(
        invars=[*jaxpr.invars, *[e.outvars[0] for e in placeholders]],
        eqns=[e for e in jaxpr.eqns if e.primitive is not _placeholder_p],
    )
    return jec.ClosedJaxpr(new, closed.consts)
