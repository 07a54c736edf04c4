"""One traced and compiled function: what it captured, what it writes, the guards it runs under, and how it is run.

Tracing finds the inputs (trace.py) and the outputs: results, new values of what was written, gradients, tensors put in places
(rebinding.py). A call gathers the inputs' arrays, runs the program, and puts its outputs where they belong.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import sys
import warnings
import weakref
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import torch

from torchax_core import collector
from torchax_core.arguments import Call, flatten, made_inside, same, unflatten, update
from torchax_core.bridge import lay_out
from torchax_core.carriers import Carriers
from torchax_core.convert import is_traced
from torchax_core.customs import tracing_functions
from torchax_core.errors import CollectiveError
from torchax_core.fully_shard import tracing_fully_shard
from torchax_core.gradients import Gradients
from torchax_core.guards import Guards
from torchax_core.joint import Backward
from torchax_core.optimizers import tracing_optimizers
from torchax_core.placement import Placed, constrain, several_devices, sharding_of, spread
from torchax_core.rebinding import Output, Rebinding
from torchax_core.scaling import tracing_scalers
from torchax_core.scopes import naming_modules
from torchax_core.shardings import resolve, spread_prefix
from torchax_core.shared_counts import SharedCounts
from torchax_core.spanning import axis_env, span_of
from torchax_core.tensor import Aval, Storage, Tensor, active, make_tensor, share_tensor, write_all
from torchax_core.trace import Again, Trace, get_grad, promote_placeholders, set_grad, watching_grads
from torchax_core.vjp import DifferentiableProgram, differentiable_call
from torchax_core.wrapped import Form, guard, parts

if TYPE_CHECKING:
    from torchax_core.jit import JittedFunction

__all__ = ["Program", "traced"]


def _as_written() -> Any:
    """What torch.compile has compiled runs as it is written, in the midst of a trace: it is part of that program."""
    loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()


def traced(owner: JittedFunction, call: Call, environment: Any) -> Program:
    """A traced program. Arguments that turn out to be state as well, or views that share a storage with another argument,
    have no input of their own: they are found, and it is traced again with them as state. Likewise step counts that are one
    input (shared_counts.py), if the function makes different numbers of them."""
    leaves = call.leaves
    tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    shares = collections.Counter(id(t._store) for t in tensors.values())
    views = {id(t._store) for t in tensors.values() if t.__class__ is not Tensor}
    fixed = {i: t._store for i, t in tensors.items() if shares[id(t._store)] > 1 and id(t._store) in views}
    while True:
        try:
            program = Program(owner, call, environment, fixed)
        except Again as again:
            again.prepare()
            continue
        found = program.also_state(leaves)
        if not found and not program.counts_part:
            return program
        owner.shares_counts = owner.shares_counts and not program.counts_part
        fixed = {**fixed, **found}


class _Result:
    """In the structure of results: the place of an output of the program."""

    __slots__ = ("aval", "history", "index")

    def __init__(self, index: int, aval: Aval | None, history: bool = False) -> None:
        self.index = index
        self.aval = aval
        self.history = history


class _Given:
    """In the structure of results: an object of the caller's, that was among the arguments."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _Leaf:
    """In an argument that the function has changed: the leaf at this position of the arguments."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


_NUMBER = (
    "Python changed {} while the function was traced. Calls of the compiled program run no Python, so it will not change again. "
    "Change it outside the function, or keep it in a tensor on device 'jax'."
)
_ELSEWHERE = (
    "the function wrote to {}. A compiled program cannot do that, so the function is traced anew at every call. Move the "
    "tensor to device 'jax', or write to it outside."
)
_PLAIN = (torch.Tensor, jax.Array, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)

_ARRAY, _STORE, _SHARDING = map(operator.attrgetter, ("array", "_store", "sharding"))


class Program:
    """One traced and compiled function: its inputs, outputs and guards."""

    def __init__(self, owner: JittedFunction, call: Call, environment: Any, fixed: dict[int, Storage]) -> None:
        # Arguments that are state as well, because the function also meets their storage in some other way: the program is
        # for these storages alone, which it captures like any other.
        self.fixed = fixed
        self.owner = owner
        self.environment = environment
        self.structure = call.structure
        self.shardings = owner.leaf_shardings(call) if owner.in_shardings is not None else None
        self.out_shardings = resolve(owner.out_shardings, f"jit({owner.name}): out_shardings")
        self.captured: list[Storage] = []
        self.writes: list[tuple[Any, int]] = []
        self.gradients = Gradients()
        self.born: list[tuple[weakref.ref[Storage], int]] = []
        self.differentiable: DifferentiableProgram | None = None
        self.backward: Backward | None = None
        self.compiled: Any = None
        self.layouts: list[Any] | None = None
        self.chosen: Any = None
        self.has_run = False
        self.gradients_matter = False
        self.carriers = Carriers(owner.name)
        roots = [owner.fn, *(leaf for leaf in call.leaves if not isinstance(leaf, _PLAIN))]
        self.rebinding = Rebinding(roots, owner.habits)
        self._trace(call)

    # -- tracing ---------------------------------------------------------------------------------

    def _trace(self, call: Call) -> None:
        leaves = call.leaves
        self.argument_places = [
            i for i, leaf in enumerate(leaves) if isinstance(leaf, (Tensor, jax.Array)) and i not in self.fixed
        ]
        self.plain_arguments = all(leaves[i].__class__ is Tensor for i in self.argument_places)
        arrays = [leaves[i]._array() if isinstance(leaves[i], Tensor) else leaves[i] for i in self.argument_places]
        random = self.environment.random

        def traced(key: Any, count: Any, *tracers: Any) -> list[Any]:
            return self._run_function(call, key, count, tracers)

        jaxpr = jax.make_jaxpr(traced, axis_env=axis_env())(random.key, np.uint32(random.count & 0xFFFF_FFFF), *arrays)
        trace = self.trace
        self.jaxpr = promote_placeholders(jaxpr, len(trace.bound))
        if self.backward is not None:
            self.jaxpr = self.backward.split_from(self.jaxpr, trace.bound)
        self.span = span_of(self.owner.name, self.jaxpr, trace.groups)
        self.draws = trace.draws
        self.beginnings = trace.beginnings
        if self.wants_grad and trace.torch_only:
            raise CollectiveError(
                f"jit({self.owner.name}): its results want gradients, and it calls {', '.join(sorted(trace.torch_only))}, whose "
                "gradients torch knows and jax does not. Call `backward` inside, or the function under torch.no_grad()."
            )
        self.gradients_matter = self.gradients_matter or self.wants_grad
        if trace.wrappers:
            read = guard([wrapper for wrapper, _ in trace.wrappers.values()], self.gradients_matter)
            trace.guards.append(("what DTensors are made of", read, read()))
        self.guards = Guards(
            self._tensors,
            trace.outside - {id(leaf) for leaf in leaves},
            [*trace.modules.values()],
            self._grad_guards,
            trace.guards,
            [(i, leaf.requires_grad) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)],
            self.gradients_matter,
        )
        self.rebinding.compile(self.guards.containers, trace.modules.values(), trace.reads.codes())

    def _run_function(self, call: Call, key: Any, count: Any, tracers: Any) -> list[Any]:
        leaves = call.leaves
        trace = self.trace = Trace(self.environment, key, count)
        trace.shares_counts = self.owner.shares_counts
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
        hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: trace.module_met(module))
        objects: list[Any] = []
        succeeded = False
        try:
            with (
                watching_grads,
                tracing_functions,
                tracing_optimizers,
                tracing_scalers,
                tracing_fully_shard,
                naming_modules(trace, self.owner.fn),
                torch.autograd.set_multithreading_enabled(False),
                _as_written(),
            ):
                state = {id(leaves[i]) for i in self.fixed}
                wrappers = [(parts(o)[0], o) for o in call.objects if isinstance(o, torch.Tensor)]
                known = {id(part): wrapper for part, wrapper in wrappers if id(part) in state}
                tree = unflatten(self.structure, iter(inner), objects, known)
                args, kwargs = tree if self.owner.static is None else self.owner.static.unmark(tree)
                result = [self.owner.fn(*args, **kwargs)]
                del args, kwargs
                for ending in trace.endings.values():
                    ending()
                self.gradients_matter = trace.gradients_matter
                argument_grads = [
                    (place, inner[place].grad)
                    for place in placeholders
                    if inner[place].is_leaf and inner[place].grad is not None
                ]
                wrapper_grads = [
                    (number, made.grad)
                    for number, (made, given) in enumerate(zip(objects, call.objects, strict=True))
                    if isinstance(made, torch.Tensor) and made is not given and made.is_leaf and made.grad is not None
                ]
            outputs = self._collect(trace, result, tree, inner, objects, placeholders, (argument_grads, wrapper_grads))
            succeeded = True
            return outputs
        except Exception as error:
            # Perhaps because arguments that are state as well were two tensors each, the `.grad` of one unknown to the other.
            found = self._among(trace.lifted.keys(), leaves)
            if found and not isinstance(error, Again):
                raise Again(functools.partial(self.fixed.update, found)) from error
            raise
        finally:
            if succeeded:
                self.rebinding.restore()
            else:
                self.rebinding.abandon()
            hook.remove()
            for cleanup in trace.cleanups:
                cleanup()
            active.trace, active.kernels = before
            trace.restore()
            trace.restore_grads()

    def _collect(
        self,
        trace: Trace,
        result: list[Any],
        tree: Any,
        inner: list[Any],
        objects: list[Any],
        placeholders: dict[int, tuple[Storage, Any]],
        argument_grads: tuple[list[Any], list[Any]],
    ) -> list[Any]:
        """The program's outputs: results, new values of what was written, gradients, and what was made and kept."""
        outputs: list[Any] = []
        places: dict[Any, int] = {}
        histories: dict[int, tuple[Tensor, Any]] = {}  # of outputs that want gradients

        def out(array: Any, tensor: Tensor | None = None) -> int:
            history = None if tensor is None or not tensor.requires_grad else tensor.grad_fn or tensor
            key = (id(array), id(history))
            if key not in places:
                places[key] = len(outputs)
                outputs.append(array)
                if tensor is not None and history is not None:
                    histories[places[key]] = (tensor, history)
            return places[key]

        def wrapped(tensor: torch.Tensor) -> list[tuple[int, Aval]]:
            return [(out(p._array()), Aval.of(p.shape, _dense(p), p.dtype)) for p in parts(tensor)]

        # What was written comes first, in the order of the inputs: jax gives a donated input's memory to the first output of
        # its shape, and only where that is the same tensor's new value can XLA write it in place, without copies.
        for entry in sorted(trace.lifted.values(), key=lambda entry: trace.bound[id(entry.tracer)]):
            if entry.written:
                self.writes.append((entry.store, out(entry.store.array)))
        for place, (store, tracer) in placeholders.items():
            if store.array is not tracer:
                self.writes.append((place, out(store.array)))
        self._note_changes(trace, tree, inner, out)
        wants_grad = self._note_results(trace, result, objects, out)
        self.wants_grad = wants_grad and not trace.backward_ran
        grads: list[Any] = []
        for tensor, initial in trace.grads.values():
            grad = get_grad(tensor)
            if grad is not initial:
                self.wants_grad = False
                grads.append((tensor, grad))
        self._grad_guards = trace.grad_guards()
        for tensor, grad in grads:
            if grad is None:
                self.gradients.cleared.append(tensor)
            elif not isinstance(grad, Tensor):
                self.gradients.add_wrapped(tensor, Form(grad), wrapped(grad))
                set_grad(tensor, trace.grads[id(tensor)][1])
            elif is_traced(grad._store.array):
                self.gradients.add(tensor, grad, out(grad._array()))
        del grads
        self.argument_grads = [(place, out(grad._array()), grad._aval) for place, grad in argument_grads[0]]
        self.wrapper_grads = [(number, Form(grad), wrapped(grad)) for number, grad in argument_grads[1]]
        survivors = trace.survivors()
        held = self.gradients.store_ids()
        if any(id(s) not in held for s in survivors):
            del survivors
            collector.collect_young()
            survivors = trace.survivors()
        for store in survivors:
            if id(store) not in held:
                self.born.append((weakref.ref(store), out(store.array)))
        history = self._note_places(trace, inner, bool(survivors), out)
        self.wants_grad = self.wants_grad or (history and not trace.backward_ran)
        if self.wants_grad:
            arguments = [inner[place] for place in self.argument_places if isinstance(inner[place], Tensor)]
            with tracing_functions, _as_written(), trace.unwatched():
                self.backward = Backward.of(trace, arguments, {at: tensor for at, (tensor, _) in histories.items()})
        self.gradients.read = [(tensor, grad) for tensor, grad in trace.grads.values() if trace.is_state(grad)]
        self.captured = [entry.store for entry in trace.lifted.values()]
        self.captured_ids = frozenset(map(id, self.captured))
        self._tensors = [
            (tensor, store, tensor.requires_grad)
            for tensor, store in trace.tensors.values()
            if id(store) in trace.lifted and id(tensor) not in trace.aliases
        ]
        self.hosts = [read for read, _ in trace.host_inputs]
        holders: dict[int, list[Storage]] = {}
        for entry in trace.lifted.values():
            holders.setdefault(id(entry.tracer), []).append(entry.store)
        shared = [stores for stores in holders.values() if len(stores) > 1]
        self.counts = SharedCounts(shared)
        self.counts_part = not self.counts.in_one()
        order = sorted(
            [
                (entry.tracer, ("store", i))
                for i, entry in enumerate(trace.lifted.values())
                if holders[id(entry.tracer)][0] is entry.store
            ]
            + [(tracer, ("host", i)) for i, (_, tracer) in enumerate(trace.host_inputs)],
            key=lambda pair: trace.bound[id(pair[0])],
        )
        self.input_order = [what for _, what in order]
        if self.backward is not None:
            inputs = [inner[i]._store if isinstance(inner[i], Tensor) else None for i in self.argument_places]
            inputs += [self.captured[i] if kind == "store" else None for kind, i in self.input_order]
            outputs += self.backward.in_order({id(store): 2 + n for n, store in enumerate(inputs)})
        return outputs

    def _note_results(self, trace: Trace, result: list[Any], objects: list[Any], out: Callable[..., int]) -> bool:
        """Make outputs of the tensors in the result; whether any wants gradients."""
        given = {id(o): i for i, o in enumerate(objects)}
        # taken out of its list, so that no other frame holds the result, and nothing does after this
        tree = result.pop()
        flat: list[Any] = []
        wants_grad = False

        def opens(value: Any, parent: Any) -> bool:
            nonlocal wants_grad
            if id(value) in given or not made_inside(value, parent):
                return False
            if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
                wants_grad = True
                trace.torch_only.add(f"what makes a {type(value).__name__} that wants gradients")
            return True

        self.result_structure = flatten(tree, flat, opens=opens)
        shardings: list[Any] = [None] * len(flat)
        if self.out_shardings is not None:
            shardings = spread_prefix(self.out_shardings, tree, f"jit({self.owner.name}): out_shardings")
        del tree
        self.results: list[Any] = []
        for leaf, sharding in zip(flat, shardings, strict=True):
            if isinstance(leaf, Tensor):
                trace.lift(leaf)
                passed_on = id(leaf) in trace.tensors or id(leaf._store) in trace.arguments  # not made inside
                self.gradients_matter = self.gradients_matter or passed_on
                wants_grad = wants_grad or leaf.requires_grad
                array = leaf._array() if sharding is None else constrain(leaf._array(), sharding)
                self.results.append(
                    _Result(out(array, leaf), Aval.of(leaf.shape, _dense(leaf), leaf.dtype), leaf.requires_grad)
                )
            elif isinstance(leaf, (jax.Array, jax.core.Tracer)):
                self.results.append(_Result(out(leaf if sharding is None else constrain(leaf, sharding)), None))
            elif id(leaf) in given:
                self.results.append(_Given(given[id(leaf)]))
            else:
                self.results.append(leaf)
        return wants_grad

    def _note_changes(self, trace: Trace, tree: Any, inner: list[Any], out: Callable[..., int]) -> None:
        """If the function has changed lists, dicts or caches among its arguments, what they are to be after each call."""
        self.changes: tuple[Any, list[Any]] | None = None
        leaves: list[Any] = []
        structure = flatten(tree, leaves)
        if structure == self.structure and same(leaves, inner):
            return
        places = {id(leaf): i for i, leaf in enumerate(inner) if isinstance(leaf, Tensor)}
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                trace.lift(leaf)
                known = places.get(id(leaf))
                aval = Aval.of(leaf.shape, _dense(leaf), leaf.dtype)
                leaves[i] = Output(out(leaf._array(), leaf), leaf, aval) if known is None else _Leaf(known)
        self.changes = (structure, leaves)

    def _note_places(self, trace: Trace, inner: list[Any], survivors: bool, out: Callable[..., int]) -> bool:
        """Make outputs of tensors that the function has put elsewhere; whether any of them has gradients to hand on."""
        history = False
        arguments = {id(leaf): i for i, leaf in enumerate(inner) if isinstance(leaf, Tensor)}

        def output(tensor: Tensor) -> Output:
            nonlocal history
            history = history or (tensor.requires_grad and not tensor.is_leaf)
            return Output(out(tensor._array(), tensor), tensor, Aval.of(tensor.shape, _dense(tensor), tensor.dtype))

        def captured(tensor: torch.Tensor) -> bool:
            if not isinstance(tensor, Tensor):
                return id(tensor) in trace.wrappers
            met = id(tensor) in trace.tensors and id(tensor) not in trace.aliases
            return met and id(tensor._store) in trace.lifted

        # `inner` and the structure of the arguments hold an argument, the loop and the call here too
        kept = survivors or any(sys.getrefcount(leaf) > 4 for leaf in inner if isinstance(leaf, Tensor))
        self.rebinding.note(arguments, captured, kept, output)
        number, elsewhere = self.rebinding.changed_number(), self.rebinding.changed_elsewhere()
        if (number or elsewhere) and not self.owner._warned:
            self.owner._warned = True
            what = _NUMBER.format(number) if number else _ELSEWHERE.format(elsewhere)
            warnings.warn(f"jit({self.owner.name}): {what}", stacklevel=2)
        return history

    def captures(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is an input of the program; of a DTensor, its parts."""
        found = {id(part) for part in parts(tensor)}
        return any(id(t) in found for t, _, _ in self.guards.tensors)

    # -- compiling -------------------------------------------------------------------------------

    def finish(self, known: list[Program]) -> bool:
        """Compile, unless a program already there is the same but for its guards; whether one is."""
        self.trace.release()
        del self.trace, self._tensors, self._grad_guards
        donate = self.owner.donate if self.owner.donate is not None else self.environment.config.donate
        written = {id(store) for store, _ in self.writes if isinstance(store, Storage)}
        first = 2 + len(self.argument_places)
        self.donated = [
            what[0] == "store" and donate and id(self.captured[what[1]]) in written and not self.wants_grad
            for what in self.input_order
        ]
        self.donates = any(self.donated)
        self.ordered = [self.captured[i] for kind, i in self.input_order if kind == "store"]
        # of a state array in a call: the storages' references, the list's, getrefcount's argument
        self.references = [
            2 + (self.counts.holders(self.captured[i]) if kind == "store" else 1) for kind, i in self.input_order
        ]
        run = jec.jaxpr_as_fun(self.jaxpr)
        if self.wants_grad:
            compile = None if self.span is None else self.span.compile
            own = self.backward and self.backward.program(compile)
            self.differentiable = own or DifferentiableProgram(run, compile=compile)
            self.backward = None
        for program in known:
            if (
                program.donated == self.donated
                and program.span == self.span
                and program.jaxpr.in_avals == self.jaxpr.in_avals
                and program.text == self.text
                and _equal(program.jaxpr.consts, self.jaxpr.consts)
            ):
                self.compiled = program.compiled
                return True
        numbers = tuple(first + i for i, give in enumerate(self.donated) if give)
        run.__name__ = self.owner.module_name
        self.compiled = Placed(run, numbers) if self.span is None else self.span.compile(run, numbers, self.jaxpr)
        return False

    @functools.cached_property
    def text(self) -> str:
        """The jaxpr as text, to compare it by; long to make, and not wanted before there is another program."""
        return str(self.jaxpr)

    # -- running ---------------------------------------------------------------------------------

    def also_state(self, leaves: list[Any]) -> dict[int, Storage]:
        """Arguments whose storage the function captures too, by place."""
        return self._among(self.captured_ids, leaves)

    def _among(self, stores: AbstractSet[int], leaves: list[Any]) -> dict[int, Storage]:
        """Arguments whose storages are among these, given by identity."""
        places = [i for i in self.argument_places if isinstance(leaves[i], Tensor)] if self.argument_places else []
        given = [*map(_STORE, map(leaves.__getitem__, places))]
        if stores.isdisjoint(map(id, given)):
            return {}
        return {i: store for i, store in zip(places, given, strict=True) if id(store) in stores}

    def failed_guard(self, leaves: list[Any]) -> str:
        """Empty if the program may run on these arguments; else what changed since it was traced."""
        for begin in self.beginnings:
            begin()
        if self.rebinding.sources or self.rebinding.effects:
            failed = self.rebinding.follow(self._replace)
            if failed:
                return failed
        if self.gradients.read:
            failed = self.gradients.follow(self._replace, self.rebinding.held)
            if failed:
                return failed
        holds = not self.also_state(leaves) and self.guards.hold(leaves) and self.rebinding.holds()
        if holds and self.counts and not self.counts.unite():
            return "an optimizer's step counts, which were equal, differ now"
        return "" if holds and not self.fixed else self._what_changed(leaves)

    def _replace(self, pairs: list[tuple[Tensor, Tensor]]) -> bool:
        """Let new state tensors, each like its old one, be inputs in their places; False if that is not all it takes."""
        news = {id(old): new for old, new in pairs}
        stores = {id(old._store): new._store for old, new in pairs}
        rows = [store for tensor, store, _ in self.guards.tensors if id(tensor) in news]
        if (
            not len(pairs)
            == len(stores)
            == len(rows)
            == sum(id(store) in stores for _, store, _ in self.guards.tensors)
            or not self.captured_ids.isdisjoint(map(id, stores.values()))
            or any((old.requires_grad and old.is_leaf) or old.__class__ is not Tensor for old, _ in pairs)
        ):
            return False
        self.guards.replace(news)
        self.captured = [stores.get(id(s), s) for s in self.captured]
        self.ordered = [stores.get(id(s), s) for s in self.ordered]
        self.captured_ids = frozenset(map(id, self.captured))
        self.counts.replace(stores)
        self.writes = [(stores.get(id(target), target), at) for target, at in self.writes]
        for name in ("replaced", "_written"):
            self.__dict__.pop(name, None)
        return True

    def _what_changed(self, leaves: list[Any]) -> str:
        for place, store in self.fixed.items():
            if leaves[place]._store is not store:
                return f"argument {place} was also state of the function, and is another tensor now"
        if self.also_state(leaves):
            return f"argument(s) {', '.join(map(str, self.also_state(leaves)))} are also state of the function now"
        return self.guards.what_changed(leaves) or self.rebinding.what_moved()

    def run(self, call: Call) -> Any:
        """Run on these arguments: gather inputs, call the program, put its outputs where they belong."""
        self.has_run = True  # or has failed to; XLA compiles now, if at all
        if self.differentiable is not None:
            return self._run_differentiable(call)
        leaves = call.leaves
        compiled = self.compiled.anywhere if not several_devices() else self._laid_out(leaves)
        inputs = self._inputs(leaves)
        with jax.enable_x64(True):
            outputs = compiled(*inputs)
        del inputs  # what was donated is gone
        self.environment.random.count += self.draws
        self._put(leaves, outputs)
        results = [
            make_tensor(outputs[r.index], r.aval)
            if r.__class__ is _Result and r.aval is not None
            else outputs[r.index]
            if r.__class__ is _Result
            else r
            for r in self.results
        ]
        return self._returned(call, outputs, results)

    def _returned(self, call: Call, outputs: Any, results: list[Any]) -> Any:
        """Do to places and arguments what the function does, and give its results their structure."""
        if self.rebinding.effects:
            self.rebinding.write(outputs, call.leaves)
        if self.changes is not None:
            structure, parts = self.changes
            values = [
                part.make(outputs[part.at])
                if part.__class__ is Output
                else call.leaves[part.number]
                if part.__class__ is _Leaf
                else part
                for part in parts
            ]
            update(call.tree, unflatten(structure, iter(values)))
        for number, form, outs in self.wrapper_grads:
            given, grad = call.objects[number], form.make([_made(outputs[at], aval) for at, aval in outs])
            given.grad = grad if given.grad is None else given.grad + grad
        if call.objects:
            results = [call.objects[r.number] if r.__class__ is _Given else r for r in results]
        return unflatten(self.result_structure, iter(results))

    def lower(self, leaves: list[Any]) -> Any:
        """The program lowered for these arguments, not run."""
        compiled = self._laid_out(leaves)
        with jax.enable_x64(True):
            return compiled.lower(*self._inputs(leaves, runs=False))

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
    def _written(self) -> tuple[list[Storage], list[int]]:
        """State that takes up outputs, and the numbers of these."""
        found = [(target, at) for target, at in self.writes if target.__class__ is Storage]
        return [store for store, _ in found], [at for _, at in found]

    @functools.cached_property
    def _written_arguments(self) -> list[tuple[int, int]]:
        return [(target, at) for target, at in self.writes if target.__class__ is not Storage]

    @functools.cached_property
    def replaced(self) -> dict[int, Any]:
        """For outputs that take the place of something: its storage, or the place of the argument that has it."""
        found = {at: target for target, at in self.writes}
        found.update({at: tensor._store for tensor, at in self.gradients.outputs()})
        found.update({at: place for place, at, _ in self.argument_grads})
        return found

    def _inputs(self, leaves: list[Any], *, runs: bool = True) -> list[Any]:
        random = self.environment.random
        inputs: list[Any] = [random.key, np.uint32(random.count & 0xFFFF_FFFF)]
        if self.plain_arguments:
            inputs += map(_ARRAY, map(_STORE, map(leaves.__getitem__, self.argument_places)))
        else:
            inputs += [leaves[i]._array() if isinstance(leaves[i], Tensor) else leaves[i] for i in self.argument_places]
        if self.shardings is not None:
            for at, i in enumerate(self.argument_places):
                if self.shardings[i] is not None:
                    inputs[2 + at] = constrain(inputs[2 + at], self.shardings[i])
            for i, store in self.fixed.items():
                if self.shardings[i] is not None and leaves[i].__class__ is Tensor:
                    store.array = constrain(store.array, self.shardings[i])
        state: list[Any] = [*map(_ARRAY, self.ordered)]
        for at, (kind, i) in enumerate(self.input_order if self.hosts else ()):
            if kind == "host":  # a generator would move on
                aval = self.jaxpr.in_avals[len(inputs) + at]
                state.insert(at, self.hosts[i]() if runs else jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        if self.donates:
            found = [*map(sys.getrefcount, state)]
            if any(map(operator.gt, found, self.references)):  # needed elsewhere
                for at in [i for i, n in enumerate(found) if n > self.references[i] and self.donated[i]]:
                    state[at] = jnp.copy(state[at])
        return inputs + state

    def _put(self, leaves: list[Any], outputs: Any) -> None:
        """New values of state, arguments and gradients; values of what was made and kept."""
        stores, places = self._written
        write_all(stores, map(outputs.__getitem__, places))
        for place, at in self._written_arguments:
            leaves[place]._write(outputs[at])
        self.gradients.put(outputs)
        for place, at, aval in self.argument_grads:
            leaf = leaves[place]
            grad = make_tensor(outputs[at], aval)
            leaf.grad = grad if leaf.grad is None else leaf.grad + grad
        for reference, at in self.born:
            store = reference()
            if store is not None:
                store.write(outputs[at])

    def _run_differentiable(self, call: Call) -> Any:
        """A function whose results still want gradients: its backward, torch's own or jax.vjp's, is compiled too."""
        random, leaves = self.environment.random, call.leaves
        operands: list[Any] = [random.key, np.uint32(random.count & 0xFFFF_FFFF)]
        for place in self.argument_places:
            leaf, sharding = leaves[place], self.shardings and self.shardings[place]
            operands.append(leaf if sharding is None else lay_out(leaf, sharding))
        owner = self.carriers.of(self.guards.tensors)
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
            self._put(leaves, [o._array() for o in outputs])
        results = []
        for r in self.results:
            if r.__class__ is not _Result:
                results.append(r)
            elif r.aval is None:
                results.append(outputs[r.index].jax())
            else:
                tensor = outputs[r.index]
                results.append(tensor if r.history or not tensor.requires_grad else tensor.detach())
        return self._returned(call, outputs, results)


def _equal(some: list[Any], others: list[Any]) -> bool:
    """Whether the constants of two programs are the same, looking at the small ones and comparing the rest by identity."""
    return len(some) == len(others) and all(
        a is b or (a.shape == b.shape and a.dtype == b.dtype and a.size <= 16 and np.array_equal(a, b))
        for a, b in zip(some, others, strict=True)
    )


def _made(output: Any, aval: Aval) -> Tensor:
    return output.detach() if isinstance(output, Tensor) else make_tensor(output, aval)


def _dense(tensor: Tensor) -> tuple[int, ...]:
    return tuple(torch.empty_like(tensor._aval.meta()).stride())
