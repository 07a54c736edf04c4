"""A graph of aten ops, forward or backward, as one XLA program: what dynamo.py gives AOTAutograd for a compiled graph.

What a forward computes for its backward alone is handed over as arrays, in one `Residuals` tensor that stands for all of
them: a tensor around each would take longer to make, save, and free than a small program takes to run.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from torchax_core import log
from torchax_core.builtins import from_cpu
from torchax_core.convert import torch_from_array
from torchax_core.cpu_arrays import CpuArgument, shares_memory
from torchax_core.dtypes import torch_dtype
from torchax_core.environment import current_env
from torchax_core.errors import DataDependentError, OperatorNotFound
from torchax_core.graph_run import run_named
from torchax_core.spanning import axis_env, span_of
from torchax_core.tensor import DEVICE, Aval, Tensor, active, make_tensor, share_tensor
from torchax_core.trace import Trace, promote_placeholders
from torchax_core.view import View, make_view

__all__ = ["GraphProgram"]


class GraphProgram:
    """A graph of aten ops, as AOTAutograd makes them, as an XLA program."""

    _boxed_call = True  # called with one list, which it empties

    def __init__(self, graph: torch.fx.GraphModule, name: str, returned: int | None = None) -> None:
        self.graph = graph
        self.name = name
        self.returned = returned  # the results after these stay on the device, wherever the graph has them
        self.made: dict[Any, _Program] = {}
        _onto_device(graph)

    def __call__(self, args: list[Any]) -> list[Any]:
        environment = current_env()
        watch = environment._watch
        if watch is None or not watch.logs:
            return self._run(args, environment)
        count, before = sum(isinstance(a, torch.Tensor) for a in args), log.begun()
        results = self._run(args, environment)
        made = sum(isinstance(r, torch.Tensor) for r in results)
        log.line(f"torch.compile({self.name})", f"{count} tensors", before, results, f"{made} tensors")
        return results

    def _run(self, args: list[Any], environment: Any) -> list[Any]:
        inputs = list(args)
        args.clear()
        key = (environment, environment.version, torch.get_float32_matmul_precision())
        program = self.made.get(key)
        if program is None:
            self.made.clear()
            program = self.made[key] = _Program(self, inputs, environment)
        return program.run(inputs)


def _onto_device(graph: torch.fx.GraphModule) -> None:
    """Let the graph compute on device "jax" whatever it says: results are put where they belong when it has run."""
    for module in graph.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            func = node.target
            if func in _AS_STRIDED and node.args[0].op == "placeholder" and not _is_dense(node.args[0].meta["val"]):
                raise RuntimeError(
                    "torch.compile: as_strided of an argument that is a view with gaps or repeats; a compiled program has the "
                    "view's elements only. Take the view inside the function, or `.clone()` it first."
                )
            if isinstance(func, torch._ops.HigherOrderOperator) and Tensor not in func.python_key_table:
                raise OperatorNotFound(
                    f"torch.compile: the function uses {func}, which does not run on device 'jax'; of its kind, cond, "
                    "while_loop, scan and map do. Write it with one of these, or leave it out of the compiled function."
                )
            node.args = torch.fx.node.map_aggregate(node.args, _device_of_constant)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, _device_of_constant)
        module.recompile()


_AS_STRIDED = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie side by side, in whatever order of dimensions."""
    step = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != step:
            return False
        step *= max(length, 1)
    return True


def _device_of_constant(value: Any) -> Any:
    return DEVICE if isinstance(value, torch.device) else value


class _Program:
    """One traced and compiled graph."""

    def __init__(self, owner: GraphProgram, inputs: list[Any], environment: Any) -> None:
        start = time.perf_counter()
        graph = owner.graph
        self.environment = environment
        self.places = [i for i, a in enumerate(inputs) if isinstance(a, torch.Tensor)]
        self.on_cpu = {i: CpuArgument() for i in self.places if not isinstance(inputs[i], Tensor)}
        self.donated: frozenset[int] = frozenset()
        random = environment.random
        nodes = list(graph.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        # that a result is; not what the forward has saved, which comes packed
        numbers = {
            node: i
            for i, node in enumerate(placeholders)
            if owner.name == "forward" or str(node.target).startswith("tangents")
        }
        results_of = nodes[-1].args[0]
        kept = len(results_of) if owner.returned is None else owner.returned

        def traced(key: Any, count: Any, *tracers: Any) -> list[Any]:
            trace = self.trace = Trace(environment, key, count)
            inner = list(inputs)
            given: dict[int, tuple[Tensor, Any]] = {}
            for place, tracer in zip(self.places, tracers, strict=True):
                stand_in = placeholders[place].meta.get("val", inputs[place])
                aval = Aval.of(tuple(tracer.shape), stand_in.stride(), torch_dtype(tracer.dtype))
                tensor = inner[place] = make_tensor(tracer, aval)
                given[place] = (tensor, tracer)
            before = (active.trace, active.kernels)
            active.trace = trace
            active.kernels = trace.kernels(environment)
            try:
                # at a first call, AOTAutograd watches custom ops in a mode that higher-order ops do not get through
                with torch.no_grad(), _disable_current_modes():
                    results = _run(owner, inner)
                wanted = [_Wanted(node, numbers.get(node), i < kept) for i, node in enumerate(results_of)]
                return self._collect(trace, results, wanted, given)
            finally:
                active.trace, active.kernels = before
                trace.restore()

        jaxpr = jax.make_jaxpr(traced, axis_env=axis_env())(random.key, np.uint32(0), *self._arrays(inputs))
        trace = self.trace
        del self.trace
        self.jaxpr = promote_placeholders(jaxpr, len(trace.bound))
        self.draws = trace.draws
        reads: list[tuple[int, Callable[[], Any]]] = [
            (trace.bound[id(entry.tracer)], functools.partial(getattr, entry.store, "array"))
            for entry in trace.lifted.values()
        ]
        reads += [(trace.bound[id(tracer)], read) for read, tracer in trace.host_inputs]
        self.captured = [read for _, read in sorted(reads, key=lambda pair: pair[0])]
        if environment.config.donate:
            self.donated = frozenset(place for place, _ in self.writes if place not in self.on_cpu)
        run = jec.jaxpr_as_fun(self.jaxpr)
        run.__name__ = f"compiled_{owner.name}"
        numbers_given = [2 + i for i, place in enumerate(self.places) if place in self.donated]
        span = span_of(owner.name, self.jaxpr, trace.groups)
        if span is None:
            self.compiled = jax.jit(run, donate_argnums=numbers_given)
        else:
            self.compiled = span.compile(run, tuple(numbers_given), self.jaxpr)
        if log.recompiles:
            log.logger.info("torch.compile %s: traced (%.2f s)", owner.name, time.perf_counter() - start)

    def _collect(self, trace: Trace, results: Any, wanted: list[_Wanted], given: Any) -> list[Any]:
        outputs: list[Any] = []
        places: dict[int, int] = {}
        # what lies in a CPU tensor's memory changes with it, and so is no result as it is
        borrowed = {id(tracer) for place, (_, tracer) in given.items() if place in self.on_cpu}

        def out(array: Any) -> int:
            if id(array) not in places:
                places[id(array)] = len(outputs)
                outputs.append(jnp.copy(array) if id(array) in borrowed else array)
            return places[id(array)]

        self.results: list[_Result] = []
        stores = collections.Counter(
            id(v._store) for v in {id(v): v for v in results if isinstance(v, Tensor)}.values()
        )
        for want, value in zip(wanted, results, strict=True):
            if not isinstance(value, torch.Tensor):
                self.results.append(_Constant(value))
                continue
            fake = want.node.meta.get("val")
            cpu = want.returned and isinstance(fake, torch.Tensor) and fake.device.type == "cpu"
            value = value if isinstance(value, Tensor) else from_cpu(value)  # made of constants on the CPU alone
            trace.lift(value)
            if want.place is not None:
                self.results.append(_Input(want.place))
            elif stores[id(value._store)] > 1 and not (cpu and value.dtype != torch_dtype(value._store.array.dtype)):
                self.results.append(_Shared(out(value._store.array), value, cpu))
            else:
                aval = value._aval
                if isinstance(fake, torch.Tensor):
                    aval = Aval.of(aval.shape, _dense_stride(fake), aval.dtype)
                kind = _Own if want.returned else _Saved
                self.results.append(kind(out(value._array()), aval, cpu))
        self.saved = [result.at for result in self.results if result.__class__ is _Saved]
        self.writes = [
            (place, out(t._store.array)) for place, (t, tracer) in given.items() if t._store.array is not tracer
        ]
        return outputs

    def _arrays(self, inputs: list[Any]) -> list[Any]:
        saved: Iterator[jax.Array] = next(
            (iter(inputs[place].arrays) for place in self.places if inputs[place].__class__ is Residuals), iter(())
        )
        if not self.on_cpu and not self.donated:
            return [
                a._store.array if a.__class__ is Tensor else next(saved) if a.__class__ is Residuals else a._array()
                for a in map(inputs.__getitem__, self.places)
            ]
        arrays = []
        for place in self.places:
            a = inputs[place]
            if a.__class__ is Residuals:
                arrays.append(next(saved))
                continue
            if not isinstance(a, Tensor):
                arrays.append(self.on_cpu[place].array(a))
                continue
            array = a._array()
            # 3: the storage's reference, the local one, getrefcount's argument; any more, and it is needed elsewhere
            if place in self.donated and sys.getrefcount(array) > 3:
                array = jnp.copy(array)
            arrays.append(array)
        return arrays

    def run(self, inputs: list[Any]) -> list[Any]:
        """Run on these inputs."""
        random = self.environment.random
        arrays = [random.key, np.uint32(random.count & 0xFFFF_FFFF), *self._arrays(inputs)]
        arrays += [read() for read in self.captured]
        with jax.enable_x64(True):
            outputs = self.compiled(*arrays)
        del arrays  # what was donated is gone
        random.count += self.draws
        if self.on_cpu and shares_memory():
            jax.block_until_ready(outputs)  # torch code may write to the memory that it reads
        for place, at in self.writes:
            a = inputs[place]
            if isinstance(a, Tensor):
                a._write(outputs[at])
            else:
                a.copy_(torch_from_array(outputs[at]))
        bases: dict[Any, torch.Tensor] = {}
        if not self.saved or _hooks(False) is not None:  # hooks want to see what is saved
            return [result.value(inputs, outputs, bases) for result in self.results]
        residuals = _residuals([outputs[at] for at in self.saved])
        return [
            residuals if result.__class__ is _Saved else result.value(inputs, outputs, bases) for result in self.results
        ]


_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Residuals(Tensor):
    """All that a forward saves for its backward, as one tensor that no op takes: the arrays, in order.

    AOTAutograd saves it once for each of them. Its other inputs a backward has from the forward as they are, since torch
    looks whether these have been written to.
    """

    arrays: list[jax.Array]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            f"{func}: one of its tensors is what a function of torch.compile has saved for its backward, which only that "
            "backward can take. Under `torch.autograd.graph.saved_tensors_hooks` such functions save ordinary tensors."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{len(self.arrays)} arrays saved for a compiled backward>"


def _residuals(arrays: list[jax.Array]) -> Residuals:
    tensor: Any = torch.Tensor._make_wrapper_subclass(Residuals, (0, len(arrays)), device=DEVICE)
    tensor.arrays = arrays
    tensor._plain = True  # nothing that may be traced as a wrapper
    return tensor


def _run(owner: GraphProgram, inputs: list[Any]) -> Any:
    try:
        return run_named(owner.graph, inputs, "backward" if owner.name == "backward" else "")
    except TypeError as error:
        if "non-nested SymInt" not in str(error):
            raise
        raise DataDependentError(
            'torch.compile(backend="torchax"): a shape, or another number that must be known before the program runs, is read '
            "from a tensor. Leave `torch._dynamo.config.capture_scalar_outputs` off, so that the graph ends there, or pass the "
            "number as an argument."
        ) from error


@dataclasses.dataclass
class _Wanted:
    """What is known of a result before the graph is run: its node, the argument that it is, if it is one, and whether the
    function returns it, rather than saving it for its backward."""

    node: torch.fx.Node
    place: int | None
    returned: bool


class _Constant:
    """A result that is no tensor."""

    def __init__(self, constant: Any) -> None:
        self.constant = constant

    def value(self, inputs: list[Any], outputs: list[Any], bases: dict[Any, torch.Tensor]) -> Any:
        return self.constant


class _Input:
    """A result that is one of the arguments."""

    def __init__(self, place: int) -> None:
        self.place = place

    def value(self, inputs: list[Any], outputs: list[Any], bases: dict[Any, torch.Tensor]) -> Any:
        return inputs[self.place]


class _Own:
    """A result with memory of its own."""

    def __init__(self, at: int, aval: Aval, cpu: bool) -> None:
        self.at = at
        self.aval = aval
        self.cpu = cpu

    def value(self, inputs: list[Any], outputs: list[Any], bases: dict[Any, torch.Tensor]) -> torch.Tensor:
        return torch_from_array(outputs[self.at]) if self.cpu else make_tensor(outputs[self.at], self.aval)


class _Saved(_Own):
    """One for the backward, with memory of its own."""


class _Shared:
    """A result that lies in the same memory as another."""

    def __init__(self, at: int, traced: Tensor, cpu: bool) -> None:
        self.at = at
        self.cpu = cpu
        store = traced._store
        self.base = Aval.of(tuple(store.array.shape), store.stride, torch_dtype(store.array.dtype))
        self.aval = traced._aval
        self.offset = traced.storage_offset()
        self.view = (traced._path, traced._offsets) if isinstance(traced, View) else None

    def value(self, inputs: list[Any], outputs: list[Any], bases: dict[Any, torch.Tensor]) -> torch.Tensor:
        base = bases.get((self.at, self.cpu))
        if base is None:
            if self.cpu:
                base = torch.empty_strided(self.base.shape, self.base.stride, dtype=self.base.dtype)
                base.copy_(torch_from_array(outputs[self.at]))
            else:
                base = make_tensor(outputs[self.at], self.base)
            bases[self.at, self.cpu] = base
        if self.cpu:
            return base.as_strided(self.aval.shape, self.aval.stride, self.offset)
        assert isinstance(base, Tensor)
        if self.view is None:
            return share_tensor(base._store, self.aval)
        return make_view(base._store, self.aval, self.offset, *self.view)


_Result = _Constant | _Input | _Own | _Shared


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a result of this geometry in memory of its own."""
    return tuple(torch.empty_like(tensor, device="meta").stride())
