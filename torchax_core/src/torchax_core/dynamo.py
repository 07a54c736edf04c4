"""`torch.compile(backend="torchax")`: the graphs that dynamo finds, forward and backward, each as one XLA program.

torch finds this module through the entry-point group `torch_dynamo_backends`; nothing imports it before that. See
docs/compile.md. A graph is taken through AOTAutograd when it is first called, once per environment version and argument
shapes: definitions and overrides in force then are those of the program.
"""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.effects import with_effects
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torchax_core import entrances, functions
from torchax_core.config import Config
from torchax_core.convert import is_traced
from torchax_core.environment import current_env
from torchax_core.errors import ConversionError
from torchax_core.graph_program import GraphProgram
from torchax_core.graph_run import run_watched
from torchax_core.packs import host
from torchax_core.tensor import DEVICE_TYPE, Tensor, active
from torchax_core.view import View
from torchax_core.whole import keeping_whole

__all__ = ["backend"]

# Where dynamo runs code that it has not compiled, our own frames and JAX's are none of its business, and nothing is that runs
# beneath the functions by which torch calls us; the models of our benchmarks are.
torch._dynamo.trace_rules.SKIP_DIRS += [
    p.as_posix() for p in Path(__file__).parent.iterdir() if p.stem != "benchmarking"
]
for _name in ("jax", "jaxlib", *{pack.target.partition(".")[0] for pack in host().packs(Config())}):
    torch._dynamo.trace_rules.add(_name)
_ALONE = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
entrances.follow(lambda code: set_code_exec_strategy(code, _ALONE))


def _in_place_of_effect(token: torch.Tensor, op: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """An op of which AOTAutograd must not change the order (the check that linalg.inv ends with): the graph's order is
    the program's, so the token is handed on as it came."""
    result = op(*args, **kwargs)
    return (token, *result) if isinstance(result, tuple) else (token, result)


for _kind in (Tensor, View):
    with_effects.py_impl(_kind)(_in_place_of_effect)

# Torch's gradients of svd and eigh of complex matrices ask whether the loss depends on what is arbitrary about their vectors.
# A graph has no values to ask about; and an error there, in the midst of C++, would end the process.
_UNKNOWN: dict[Any, Callable[..., Any]] = {torch.ops.aten.allclose.default: lambda *args, **kwargs: True}

_left_whole: set[Any] = set()


def _leave_functions_whole() -> None:
    """Let dynamo leave defined torch functions in its graphs, rather than look into them; what it has compiled before, it
    compiles again. Functions that are no longer defined stay in graphs, and are run as they are."""
    new = set(functions.defined()) - _left_whole
    if new:
        _left_whole.update(new)
        for function in new:
            torch._dynamo.allow_in_graph(function)
        torch._dynamo.reset()


functions.followers.append(_leave_functions_whole)
_leave_functions_whole()

_KEPT = 16  # compiled variants of one graph, before the oldest is let go


def backend(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The backend: what `torch.compile(model, backend="torchax")` calls with each graph.

    graph, example_inputs: as dynamo hands them out.
    options: `mode` is taken and has no effect, XLA having one. Raises ValueError for others.
    Source: https://docs.pytorch.org/docs/stable/torch.compiler_custom_backends.html
    """
    unknown = sorted(set(options) - {"mode"})
    if unknown:
        raise ValueError(
            f'torch.compile(backend="torchax") takes no {unknown[0]!r}; XLA\'s own settings are environment variables '
            "(XLA_FLAGS) or `jax.config`. Leave it out."
        )
    return CompiledGraph(graph)


class CompiledGraph:
    """A graph of dynamo's as a callable, compiled for the environment and the shapes it is called with."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        self.graph = graph
        for module in graph.modules():
            for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                # symbols of dynamo's own for what depends on data, which AOTAutograd would look for among the new ones
                node.meta.pop("unbacked_bindings", None)
        self._last: Any = (
            None,
            None,
        )  # what the call before this one was of, if its arguments are all ours, and what ran
        self._made: collections.OrderedDict[Any, tuple[Callable[..., Any], list[int]]] = collections.OrderedDict()

    def __call__(self, *args: Any) -> Any:
        if active.trace is not None:
            return self.graph(*args)  # part of the program that is being traced
        environment = current_env()
        watch = environment._watch
        if watch is not None and watch.looks_inside:
            return run_watched(self.graph, args)
        state = (environment, environment.version, torch.is_grad_enabled())
        known, found = self._last
        try:
            form = (state, *_form(args))
        except AttributeError:  # a number, or a tensor on the CPU
            form = None
        if form is None or form != known:
            if any(isinstance(a, Tensor) and is_traced(a._store.array) for a in args):
                return self.graph(*args)  # part of the jax transformation that is being traced
            found = self._find(state, args)
            self._last = (form, found)
        run, written = found
        if written and self._shared(args, written):
            return self.graph(*args)
        return run(*args)

    def _find(self, state: tuple[Any, ...], args: Sequence[Any]) -> tuple[Callable[..., Any], list[int]]:
        """The compiled function for such arguments, made if there is none yet, and which of them it writes to."""
        key = (*state, tuple([_signature(a) for a in args]))
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._make(args)
            if len(self._made) > _KEPT:
                self._made.popitem(last=False)
        return made

    def _shared(self, args: Sequence[Any], written: Sequence[int]) -> bool:
        """Whether an argument that the graph writes to lies in the memory of another. The compiled functions know nothing of
        it, as the stand-ins that torch makes for tensors of this device have memory of their own."""
        uses = collections.Counter([id(a._store) for a in args if isinstance(a, Tensor)])
        shared = any(uses[id(args[i]._store)] > 1 for i in written if isinstance(args[i], Tensor))
        if shared:
            warnings.warn(
                "torch.compile: arguments share memory, and the function writes to one of them; it runs op by op for these "
                "arguments. Give it a clone, or the base alone and take the view inside.",
                stacklevel=3,
            )
        return shared

    def _make(self, args: Sequence[Any]) -> tuple[Callable[..., Any], list[int]]:
        """The compiled function for such arguments, and which of them it writes to."""
        strange = {a.device for a in args if isinstance(a, torch.Tensor) and a.device.type not in (DEVICE_TYPE, "cpu")}
        if strange:
            raise ConversionError(
                f'torch.compile(backend="torchax") takes tensors on devices jax and cpu, but got one on {strange.pop()}. '
                "Move it first, with `.to('jax')`."
            )
        # shapes are static; the shape environment is for numbers read from tensors (a learning rate that dynamo has put in one)
        mode = FakeTensorMode(shape_env=ShapeEnv())
        context = TracingContext(mode)
        with tracing(context), keeping_whole():
            fakes = [mode.from_tensor(a, static_shapes=True) if isinstance(a, torch.Tensor) else a for a in args]
            run = aot_module_simplified(
                self.graph,
                fakes,
                fw_compiler=lambda graph, _: GraphProgram(graph, "forward", _results_of(context)),
                bw_compiler=lambda graph, _: GraphProgram(graph, "backward"),
                inference_compiler=lambda graph, _: GraphProgram(graph, "forward"),
                decompositions=_UNKNOWN,
                partition_fn=min_cut_rematerialization_partition,
                keep_inference_input_mutations=True,
                ignore_shape_env=True,
            )
        metadata = context.fw_metadata
        assert metadata is not None
        for meta in metadata.subclass_tangent_meta:
            # memory order is nothing to a program of arrays, so that gradients need no copy into another
            meta.memory_format = MemoryFormatMeta(memory_format=torch.contiguous_format)
        parameters = len(metadata.input_info) - len(args)  # of the graph module itself, ahead of the arguments
        return run, [
            i - parameters for i, info in enumerate(metadata.input_info) if info.mutates_data and i >= parameters
        ]


def _results_of(context: TracingContext) -> int:
    """How many results of a forward graph are the function's, or tokens of effects; the rest is saved for the backward."""
    assert context.fw_metadata is not None
    return len(context.fw_metadata.tokens) + context.fw_metadata.num_forward


def _signature(a: Any) -> Any:
    if isinstance(a, Tensor):
        return (a._aval, a.requires_grad)
    if isinstance(a, torch.Tensor):
        return (a.shape, a.stride(), a.dtype, a.device, a.requires_grad)
    return a.__class__, a


def _form(args: Sequence[Any]) -> tuple[Any, ...]:
    """What tells calls with tensors of ours apart, gathered fast: the common case is the same as in the call before. Raises
    AttributeError for other arguments. Tracers have another class than arrays."""
    return (
        [a._aval for a in args],
        [a.requires_grad for a in args],
        {a._store.array.__class__ for a in args},
    )
