"""jit: an imperative torch function as one XLA program.

    @torchax_core.jit
    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

The function is traced once per signature (see docs/jit.md): tensors it meets (parameters, buffers, optimizer state) become
inputs, storages it writes become outputs and take their new values after each call, and what is both is donated.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import operator
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

from torchax_core import collector, log
from torchax_core.convert import is_traced
from torchax_core.environment import current_env
from torchax_core.optimizers import tracing_optimizers
from torchax_core.placement import Placed, several_devices, sharding_of, spread
from torchax_core.tensor import DEVICE_TYPE, Aval, Storage, Tensor, active, make_tensor, share_tensor
from torchax_core.trace import Trace, get_grad, promote_placeholders, set_grad, watching_grads
from torchax_core.vjp import DifferentiableProgram, differentiable_call

__all__ = ["JittedFunction", "compile", "jit"]


@dataclasses.dataclass
class Compilation:
    """One compile of a jitted function, for `explain()`."""

    number: int
    reason: str
    seconds: float
    inputs: int
    written: int

    def __str__(self) -> str:
        return (
            f"#{self.number}: {self.reason} ({self.seconds:.2f} s, {self.inputs} state inputs, {self.written} written)"
        )


class JittedFunction:
    """What `torchax_core.jit` returns: callable like the function, plus `explain()` and `clear_cache()`."""

    def __init__(self, fn: Callable[..., Any], *, donate: bool | None = None, name: str | None = None) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.fn = fn
        self.donate = donate
        self.name: str = name or getattr(fn, "__qualname__", None) or type(fn).__name__
        self.compilations: list[Compilation] = []
        self._programs: dict[Any, list[_Program]] = {}
        self._last_key: Any = None

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if active.trace is not None:
            return self.fn(*args, **kwargs)
        watch = current_env()._watch  # of a debug check, or TORCHAX_LOG=ops
        if watch is not None and watch.eager:
            return watch.run_eagerly(self.fn, args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        program = self._program(leaves, spec)
        if program is None:
            return self.fn(*args, **kwargs)  # inside somebody's jax transformation: part of their program
        if watch is not None:
            return watch.jitted(self, program, leaves, lambda: program.run(leaves), args, kwargs)
        if program.has_run:
            return program.run(leaves)
        with collector.paused():  # XLA compiles now
            results = program.run(leaves)
        program.has_run = True
        return results

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The program for these arguments as jax's Lowered: `.as_text()`, `.compile().cost_analysis()`. Runs nothing.

        Tensors that the function makes and keeps have values once it has been called, not before.
        Raises RuntimeError if an argument is traced already.
        Source: https://docs.jax.dev/en/latest/aot.html
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        program = self._program(leaves, spec)
        if program is None:
            raise RuntimeError(
                f"jit({self.name}).lower: an argument is traced by a jax transformation. Lower that transformed function "
                "instead: `jax.jit(f).lower(...)`."
            )
        return program.lower(leaves)

    def _program(self, leaves: list[Any], spec: Any) -> _Program | None:
        """The program for these arguments, traced if there is none yet; None if an argument is traced already."""
        environment = current_env()._root
        key: list[Any] = [spec, environment, environment.version, *_torch_state()]
        stores: dict[int, int] = {}
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                if not isinstance(leaf, Tensor):
                    leaf = leaves[i] = leaf.to(DEVICE_TYPE)
                if is_traced(leaf._store.array):
                    return None
                key.append(leaf._aval)
                key.append(leaf.requires_grad)
                first = stores.setdefault(id(leaf._store), i)
                if first != i:
                    key.append(first)  # two arguments over one storage
            elif isinstance(leaf, jax.core.Tracer):
                return None
            elif isinstance(leaf, jax.Array):
                key.append(jax.typeof(leaf))
            else:
                key.append(_static(leaf, self.name))
        signature = tuple(key)
        programs = self._programs.setdefault(signature, [])
        failed = ""
        for program in programs:
            failed = program.failed_guard(leaves)
            if not failed:
                return program
        program = self._compile(signature, leaves, spec, environment, failed)
        programs.insert(0, program)
        return program

    def explain(self) -> str:
        """Why each compile happened, one line each."""
        return "\n".join(map(str, self.compilations)) or "not compiled yet"

    def clear_cache(self) -> None:
        """Forget every compiled program, and the tensors they refer to."""
        self._programs.clear()

    def _compile(self, signature: Any, leaves: list[Any], spec: Any, environment: Any, failed: str) -> _Program:
        reason = failed or _difference(self._last_key, signature)
        self._last_key = signature
        start = time.perf_counter()
        with collector.paused():
            program = _traced(self, leaves, spec, environment)
        known = [p for found in self._programs.values() for p in found]
        program.finish(known)
        seconds = time.perf_counter() - start
        done = Compilation(len(self.compilations) + 1, reason, seconds, len(program.captured), len(program.writes))
        self.compilations.append(done)
        if log.recompiles:
            log.logger.info("jit %s: traced %s", self.name, done)
        return program


def jit(fn: Callable[..., Any] | None = None, *, donate: bool | None = None, name: str | None = None) -> Any:
    """Compile an imperative torch function, training steps included, into one XLA program.

    fn:      any callable; a method or an nn.Module too. Also usable as `@jit(donate=False)`.
    donate:  let the program reuse the memory of state it replaces; default: the environment's `Config.donate`.
    name:    for logs and profiles.

    Python side effects happen while tracing only. Raises DataDependentError where the function needs a tensor's value.
    """
    if fn is None:
        return lambda f: jit(f, donate=donate, name=name)
    return JittedFunction(fn, donate=donate, name=name)


def compile(module: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """The module with its forward jitted, in place; returns it, so that `model = compile(model)` reads as in torch."""
    module.forward = jit(module.forward, **options)
    return module


def _as_written() -> Any:
    """What torch.compile has compiled runs as it is written, in the midst of a trace: it is part of that program."""
    loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()


# -- one program ---------------------------------------------------------------------------------


def _traced(owner: JittedFunction, leaves: list[Any], spec: Any, environment: Any) -> _Program:
    """A traced program. Arguments that turn out to be state as well, or views that share a storage with another argument,
    have no input of their own: they are found, and it is traced again with them as state."""
    tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    shares = collections.Counter(id(t._store) for t in tensors.values())
    views = {id(t._store) for t in tensors.values() if t.__class__ is not Tensor}
    fixed = {i: t._store for i, t in tensors.items() if shares[id(t._store)] > 1 and id(t._store) in views}
    while True:
        program = _Program(owner, leaves, spec, environment, fixed)
        found = program.also_state(leaves)
        if not found:
            return program
        fixed = {**fixed, **found}


class _Result:
    """In the structure of results: the place of an output of the program."""

    __slots__ = ("aval", "index")

    def __init__(self, index: int, aval: Aval | None) -> None:
        self.index = index
        self.aval = aval


_ARRAY, _STORE, _REQUIRES_GRAD, _TRAINING = map(operator.attrgetter, ("array", "_store", "requires_grad", "training"))
_SHARDING = operator.attrgetter("sharding")


class _State:
    """What a program's guards look at, column by column."""

    def __init__(self, tensors: list[Any], modules: list[Any], grad_none: list[Any]) -> None:
        self.tensors = [tensor for tensor, _, _ in tensors]
        self.stores = [store for _, store, _ in tensors]
        self.requires_grad = [flag for _, _, flag in tensors]
        self.modules = [module for module, *_ in modules]
        self.training = [training for _, training, *_ in modules]
        self.members = [d.values() for _, _, parameters, _, buffers, _ in modules for d in (parameters, buffers)]
        self.member_ids = [i for _, _, _, parameters, _, buffers in modules for i in (*parameters, *buffers)]
        self.without_grad = [tensor for tensor, none in grad_none if none]
        self.with_grad = [tensor for tensor, none in grad_none if not none]


class _Program:
    """One traced and compiled function: its inputs, outputs and guards."""

    def __init__(
        self, owner: JittedFunction, leaves: list[Any], spec: Any, environment: Any, fixed: dict[int, Storage]
    ) -> None:
        # Arguments that are state as well, because the function also meets their storage in some other way: the program is
        # for these storages alone, which it captures like any other.
        self.fixed = fixed
        self.owner = owner
        self.environment = environment
        self.spec = spec
        self.captured: list[Storage] = []
        self.writes: list[tuple[Any, int]] = []
        self.tensors: list[tuple[Tensor, Storage, bool]] = []
        self.grad_sets: list[tuple[Tensor, Any, int, Aval]] = []
        self.born: list[tuple[weakref.ref[Storage], int]] = []
        self.differentiable: DifferentiableProgram | None = None
        self.compiled: Any = None
        self.layouts: list[Any] | None = None
        self.chosen: Any = None
        self.has_run = False
        self._trace(leaves)

    # -- tracing ---------------------------------------------------------------------------------

    def _trace(self, leaves: list[Any]) -> None:
        self.argument_places = [
            i for i, leaf in enumerate(leaves) if isinstance(leaf, (Tensor, jax.Array)) and i not in self.fixed
        ]
        arrays = [leaves[i]._array() if isinstance(leaves[i], Tensor) else leaves[i] for i in self.argument_places]
        random = self.environment.random

        def traced(key: Any, count: Any, *tracers: Any) -> list[Any]:
            return self._run_function(leaves, key, count, tracers)

        jaxpr = jax.make_jaxpr(traced)(random.key, np.uint32(random.count & 0xFFFF_FFFF), *arrays)
        trace = self.trace
        self.jaxpr = promote_placeholders(jaxpr, len(trace.bound))
        self.draws = trace.draws
        self.guards = trace.guards
        self._module_guards(trace)

    def _run_function(self, leaves: list[Any], key: Any, count: Any, tracers: Any) -> list[Any]:
        trace = self.trace = Trace(self.environment, key, count)
        inner = list(leaves)
        stores: dict[int, Storage] = {}
        placeholders: dict[int, tuple[Storage, Any]] = {}
        for place, tracer in zip(self.argument_places, tracers, strict=True):
            leaf = leaves[place]
            if not isinstance(leaf, Tensor):
                inner[place] = tracer
                continue
            if id(leaf._store) in stores:  # two arguments over one storage stay two names for it
                tensor = share_tensor(stores[id(leaf._store)], leaf._aval)
            else:
                tensor = make_tensor(tracer, leaf._aval)
                stores[id(leaf._store)] = tensor._store
                placeholders[place] = (tensor._store, tracer)
                trace.arguments.add(id(tensor._store))
            inner[place] = tensor.requires_grad_(leaf.requires_grad)
        before = (active.trace, active.kernels)
        active.trace = trace
        active.kernels = trace.kernels(self.environment)
        hook = torch.nn.modules.module.register_module_forward_pre_hook(
            lambda module, args: trace.modules.update({id(module): module})
        )
        try:
            with (
                watching_grads(),
                tracing_optimizers(),
                torch.autograd.set_multithreading_enabled(False),
                _as_written(),
            ):
                args, kwargs = pytree.tree_unflatten(inner, self.spec)
                result = [self.owner.fn(*args, **kwargs)]
                argument_grads = [
                    (place, inner[place].grad)
                    for place in placeholders
                    if inner[place].is_leaf and inner[place].grad is not None
                ]
            return self._collect(trace, result, placeholders, argument_grads)
        finally:
            hook.remove()
            for cleanup in trace.cleanups:
                cleanup()
            active.trace, active.kernels = before
            trace.restore()
            trace.restore_grads()

    def _collect(
        self, trace: Trace, result: list[Any], placeholders: dict[int, tuple[Storage, Any]], argument_grads: list[Any]
    ) -> list[Any]:
        """The program's outputs: results, new values of what was written, gradients, and what was made and kept."""
        outputs: list[Any] = []
        places: dict[int, int] = {}

        def out(array: Any) -> int:
            if id(array) not in places:
                places[id(array)] = len(outputs)
                outputs.append(array)
            return places[id(array)]

        # taken out of its list, so that this frame holds the only reference, and lets go of it below
        flat, self.result_spec = pytree.tree_flatten(result.pop())
        wants_grad = False
        self.results: list[Any] = []
        for leaf in flat:
            if isinstance(leaf, Tensor):
                trace.lift(leaf)
                wants_grad = wants_grad or leaf.requires_grad
                self.results.append(_Result(out(leaf._array()), Aval.of(leaf.shape, _dense(leaf), leaf.dtype)))
            elif isinstance(leaf, (jax.Array, jax.core.Tracer)):
                self.results.append(_Result(out(leaf), None))
            else:
                if not isinstance(leaf, (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
                    warnings.warn(
                        f"jit({self.owner.name}): a result of type {type(leaf).__name__} is unknown to torch's pytree, so every "
                        "call returns the object made while tracing, whose tensors hold the latest call's values. Return "
                        "its tensors, or register the type with torch.utils._pytree.register_pytree_node.",
                        stacklevel=2,
                    )
                self.results.append(leaf)
        flat = leaf = None
        self.wants_grad = wants_grad and not trace.backward_ran
        grads: list[Any] = []
        for tensor, initial in trace.grads.values():
            grad = get_grad(tensor)
            if grad is not initial:
                self.wants_grad = False
                grads.append((tensor, grad))
        for tensor, grad in grads:
            if grad is None:
                self.grad_sets.append((tensor, None, -1, None))  # type: ignore[arg-type]
            elif is_traced(grad._store.array):
                self.grad_sets.append((tensor, grad, out(grad._array()), grad._aval))
        self.argument_grads = [(place, out(grad._array()), grad._aval) for place, grad in argument_grads]
        for place, (store, tracer) in placeholders.items():
            if store.array is not tracer:
                self.writes.append((place, out(store.array)))
        for entry in trace.lifted.values():
            if entry.written:
                self.writes.append((entry.store, out(entry.store.array)))
        survivors = trace.survivors()
        held = {id(g[1]._store) for g in self.grad_sets if g[1] is not None}
        if any(id(s) not in held for s in survivors):
            del survivors
            collector.collect_young()
            survivors = trace.survivors()
        for store in survivors:
            if id(store) not in held:
                self.born.append((weakref.ref(store), out(store.array)))
        self.grad_none = trace.grad_guards()
        self.captured = [entry.store for entry in trace.lifted.values()]
        self.captured_ids = frozenset(map(id, self.captured))
        self.tensors = [
            (tensor, store, tensor.requires_grad)
            for tensor, store in trace.tensors.values()
            if id(store) in trace.lifted
        ]
        self.hosts = [read for read, _ in trace.host_inputs]
        order = sorted(
            [(entry.tracer, ("store", i)) for i, entry in enumerate(trace.lifted.values())]
            + [(tracer, ("host", i)) for i, (_, tracer) in enumerate(trace.host_inputs)],
            key=lambda pair: trace.bound[id(pair[0])],
        )
        self.input_order = [what for _, what in order]
        return outputs

    def _module_guards(self, trace: Trace) -> None:
        self.modules: list[tuple[Any, bool, Any, list[int], Any, list[int]]] = [
            (
                m,
                m.training,
                m._parameters,
                list(map(id, m._parameters.values())),
                m._buffers,
                list(map(id, m._buffers.values())),
            )
            for m in trace.modules.values()
        ]

    # -- compiling -------------------------------------------------------------------------------

    def finish(self, known: list[_Program]) -> None:
        """Compile, unless a program already there is the same but for its guards."""
        del self.trace
        donate = self.owner.donate if self.owner.donate is not None else self.environment.config.donate
        written = {id(store) for store, _ in self.writes if isinstance(store, Storage)}
        first = 2 + len(self.argument_places)
        self.donated = [
            what[0] == "store" and donate and id(self.captured[what[1]]) in written and not self.wants_grad
            for what in self.input_order
        ]
        self.donates = any(self.donated)
        self.ordered = [self.captured[i] for kind, i in self.input_order if kind == "store"]
        run = jec.jaxpr_as_fun(self.jaxpr)
        if self.wants_grad:
            self.differentiable = DifferentiableProgram(run)
        for program in known:
            if (
                program.donated == self.donated
                and program.jaxpr.in_avals == self.jaxpr.in_avals
                and program.text == self.text
                and _equal(program.jaxpr.consts, self.jaxpr.consts)
            ):
                self.compiled = program.compiled
                return
        numbers = tuple(first + i for i, give in enumerate(self.donated) if give)
        run.__name__ = self.owner.name.rpartition(".")[2].strip("<>") or "step"
        self.compiled = Placed(run, numbers)

    @functools.cached_property
    def text(self) -> str:
        """The jaxpr as text, to compare it by; long to make, and not wanted before there is another program."""
        return str(self.jaxpr)

    # -- running ---------------------------------------------------------------------------------

    def also_state(self, leaves: list[Any]) -> dict[int, Storage]:
        """Arguments whose storage the function captures too, by place."""
        return {
            place: leaves[place]._store
            for place in self.argument_places
            if isinstance(leaves[place], Tensor) and id(leaves[place]._store) in self.captured_ids
        }

    def failed_guard(self, leaves: list[Any]) -> str:
        """Empty if the program may run on these arguments; else what changed since it was traced."""
        if self.fixed or not self._as_traced(leaves):
            return self._what_changed(leaves)
        return ""

    def _as_traced(self, leaves: list[Any]) -> bool:
        """Whether state is as it was when traced: a model has hundreds of tensors, so these loops are C's."""
        state = self._state
        return (
            not self.also_state(leaves)
            and [*map(_STORE, state.tensors)] == state.stores
            and [*map(_REQUIRES_GRAD, state.tensors)] == state.requires_grad
            and [*map(_TRAINING, state.modules)] == state.training
            and [*map(id, itertools.chain.from_iterable(state.members))] == state.member_ids
            and all(map(operator.is_, map(get_grad, state.without_grad), itertools.repeat(None)))
            and all(map(operator.is_not, map(get_grad, state.with_grad), itertools.repeat(None)))
            and all(read() == value for _, read, value in self.guards)
        )

    @functools.cached_property
    def _state(self) -> _State:
        return _State(self.tensors, self.modules, self.grad_none)

    def _what_changed(self, leaves: list[Any]) -> str:
        for place, store in self.fixed.items():
            if leaves[place]._store is not store:
                return f"argument {place} was also state of the function, and is another tensor now"
        if self.also_state(leaves):
            return f"argument(s) {', '.join(map(str, self.also_state(leaves)))} are also state of the function now"
        for tensor, store, requires_grad in self.tensors:
            if tensor._store is not store:
                return f"a state tensor of shape {tuple(tensor.shape)} holds other storage than when traced"
            if tensor.requires_grad is not requires_grad:
                return f"requires_grad of a state tensor of shape {tuple(tensor.shape)} became {tensor.requires_grad}"
        for module, training, parameters, parameter_ids, buffers, buffer_ids in self.modules:
            if module.training is not training:
                return f"{type(module).__name__}.training became {module.training}"
            if [*map(id, parameters.values())] != parameter_ids:
                return f"a parameter of {type(module).__name__} was replaced"
            if [*map(id, buffers.values())] != buffer_ids:
                return f"a buffer of {type(module).__name__} was replaced"
        for tensor, was_none in self.grad_none:
            if (get_grad(tensor) is None) is not was_none:
                return f"the .grad of a state tensor of shape {tuple(tensor.shape)} {'appeared' if was_none else 'became None'}"
        for name, read, value in self.guards:
            if read() != value:
                return f"{name} changed from {value} to {read()}"
        return ""

    def run(self, leaves: list[Any]) -> Any:
        """Run on these arguments: gather inputs, call the program, put its outputs where they belong."""
        if self.differentiable is not None:
            return self._run_differentiable(leaves)
        compiled = self.compiled.anywhere if not several_devices() else self._laid_out(leaves)
        inputs = self._inputs(leaves)
        with jax.enable_x64(True):
            outputs = compiled(*inputs)
        del inputs  # what was donated is gone
        self.environment.random.count += self.draws
        for target, at in self.writes:
            if target.__class__ is Storage:
                target.write(outputs[at])
            else:
                leaves[target]._write(outputs[at])
        self._put(leaves, outputs)
        results = [
            r
            if r.__class__ is not _Result
            else outputs[r.index]
            if r.aval is None
            else make_tensor(outputs[r.index], r.aval)
            for r in self.results
        ]
        return pytree.tree_unflatten(results, self.result_spec)

    def lower(self, leaves: list[Any]) -> Any:
        """The program lowered for these arguments, not run."""
        compiled = self._laid_out(leaves)
        with jax.enable_x64(True):
            return compiled.lower(*self._inputs(leaves))

    def _laid_out(self, leaves: list[Any]) -> Any:
        """The program whose outputs lie on the devices as what they replace does now: state, arguments, gradients."""
        stores = [t if t.__class__ is Storage else leaves[t]._store for t in self.replaced.values()]
        layouts = [*map(_SHARDING, map(_ARRAY, stores))]
        if layouts != self.layouts:
            leaf_arrays = [
                leaves[i]._array() if isinstance(leaves[i], Tensor) else leaves[i] for i in self.argument_places
            ]
            spread(self.captured, leaf_arrays)
            self.layouts = [*map(_SHARDING, map(_ARRAY, stores))]
            shardings: list[Any] = [None] * len(self.jaxpr.out_avals)
            for at, store in zip(self.replaced, stores, strict=True):
                shardings[at] = sharding_of(store.array)
            self.chosen = self.compiled.laid_out(tuple(shardings))
        return self.chosen

    @functools.cached_property
    def replaced(self) -> dict[int, Any]:
        """For outputs that take the place of something: its storage, or the place of the argument that has it."""
        found = {at: target for target, at in self.writes}
        found.update({at: tensor._store for tensor, grad, at, _ in self.grad_sets if grad is not None})
        found.update({at: place for place, at, _ in self.argument_grads})
        return found

    def _inputs(self, leaves: list[Any]) -> list[Any]:
        random = self.environment.random
        inputs: list[Any] = [random.key, np.uint32(random.count & 0xFFFF_FFFF)]
        for place in self.argument_places:
            leaf = leaves[place]
            inputs.append(leaf._array() if isinstance(leaf, Tensor) else leaf)
        if self.hosts:
            state = [self.captured[i].array if kind == "store" else self.hosts[i]() for kind, i in self.input_order]
        else:
            state = [*map(_ARRAY, self.ordered)]
        if self.donates:
            # the storage's reference, the list's, getrefcount's argument; any more, and it is needed elsewhere
            for at in [i for i, n in enumerate(map(sys.getrefcount, state)) if n > 3 and self.donated[i]]:
                state[at] = jnp.copy(state[at])
        return inputs + state

    def _put(self, leaves: list[Any], outputs: Any) -> None:
        for tensor, grad, at, _aval in self.grad_sets:
            if grad is not None:
                grad._store.write(outputs[at])
            if get_grad(tensor) is not grad:
                set_grad(tensor, grad)
        for place, at, aval in self.argument_grads:
            leaf = leaves[place]
            grad = make_tensor(outputs[at], aval)
            leaf.grad = grad if leaf.grad is None else leaf.grad + grad
        for reference, at in self.born:
            store = reference()
            if store is not None:
                store.write(outputs[at])

    def _wanting_gradients(self) -> dict[int, torch.Tensor]:
        """For storages that want gradients, by identity, a tensor over the whole of each that carries them to where they go."""
        whole: dict[int, torch.Tensor] = {}
        views: dict[int, tuple[Storage, list[torch.Tensor]]] = {}
        for tensor, store, wants in self.tensors:
            # of several tensors over one storage (`w` and `w.detach()`), the one that wants gradients
            if wants and tensor.__class__ is Tensor:
                whole[id(store)] = tensor
            elif wants:
                views.setdefault(id(store), (store, []))[1].append(tensor)
        for key, (store, found) in views.items():
            if key in whole:
                continue
            base = found[0]._base
            if base is None or base.__class__ is not Tensor or not base.requires_grad:
                if len(found) > 1:
                    raise RuntimeError(
                        f"jit({self.owner.name}): {len(found)} views of one storage want gradients each of their own, and their "
                        "elements may overlap. Pass them as arguments, or let their base want the gradients."
                    )
                view = found[0]  # a leaf
                base = share_tensor(store, Aval.of(store.array.shape, store.stride, view.dtype))
                base = torch.as_strided_scatter(base, view, view.shape, view.stride(), view.storage_offset())
            whole[key] = base
        return whole

    def _run_differentiable(self, leaves: list[Any]) -> Any:
        """A function whose results still want gradients: its backward is jax.vjp's, compiled too."""
        random = self.environment.random
        operands: list[Any] = [random.key, np.uint32(random.count & 0xFFFF_FFFF)]
        operands += [leaves[place] for place in self.argument_places]
        owner = self._wanting_gradients()
        for kind, i in self.input_order:
            if kind == "store":
                store = self.captured[i]
                operands.append(owner.get(id(store), store.array))
            else:
                operands.append(self.hosts[i]())
        assert self.differentiable is not None
        outputs = differentiable_call(self.differentiable, operands)
        random.count += self.draws
        with torch.no_grad():
            for target, at in self.writes:
                array = outputs[at]._array()
                if target.__class__ is Storage:
                    target.write(array)
                else:
                    leaves[target]._write(array)
            self._put(leaves, [o._array() for o in outputs])
        results = [
            r if r.__class__ is not _Result else outputs[r.index].jax() if r.aval is None else outputs[r.index]
            for r in self.results
        ]
        return pytree.tree_unflatten(results, self.result_spec)


# -- keys ----------------------------------------------------------------------------------------


def _torch_state() -> tuple[Any, ...]:
    """What of torch's own state changes the meaning of a traced function."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(DEVICE_TYPE) and torch.get_autocast_dtype(DEVICE_TYPE),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
    )


def _static(leaf: Any, name: str) -> Any:
    try:
        hash(leaf)
    except TypeError:
        if isinstance(leaf, np.ndarray):
            raise TypeError(
                f"jit({name}): a numpy array among the arguments; give a tensor (`torch.from_numpy(a).to('jax')`), which is "
                "traced, or close over it, which fixes it."
            ) from None
        raise TypeError(
            f"jit({name}): an argument of type {type(leaf).__name__} is neither a tensor nor hashable, so its changes could not "
            "be noticed. Pass tensors, numbers, strings, or tuples, lists and dicts of them."
        ) from None
    return (leaf.__class__, leaf)


_PARTS = (
    "argument structure",
    "environment",
    "an override",
    "grad mode",
    "inference mode",
    "autocast",
    "default dtype",
    "float32 matmul precision",
)


def _difference(old: Any, new: Any) -> str:
    if old is None:
        return "first call"
    for i, (a, b) in enumerate(zip(old, new, strict=False)):
        if a != b:
            what = _PARTS[i] if i < len(_PARTS) else "an argument"
            return f"{what} changed" + (f" from {a} to {b}" if what == "an argument" else "")
    return "number of arguments changed" if len(old) != len(new) else "cache cleared"


def _equal(some: list[Any], others: list[Any]) -> bool:
    """Whether the constants of two programs are the same, looking at the small ones and comparing the rest by identity."""
    return len(some) == len(others) and all(
        a is b or (a.shape == b.shape and a.dtype == b.dtype and a.size <= 16 and np.array_equal(a, b))
        for a, b in zip(some, others, strict=True)
    )


def _dense(tensor: Tensor) -> tuple[int, ...]:
    return tuple(torch.empty_like(tensor._aval.meta()).stride())
