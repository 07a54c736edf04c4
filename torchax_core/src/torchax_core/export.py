"""torch.export programs as JAX functions, as StableHLO, and as files that JAX alone can run. See docs/export.md.

program = torch.export.export(model, (x,), dynamic_shapes=({0: Dim("batch")},))
weights, forward = exported_program_to_jax(program)             # forward(weights, (x,)), a JAX function
weights, exported = exported_program_to_stablehlo(program)      # a jax.export.Exported
save("model.zip", program)                                      # both in one file
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import operator
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from jax import export as jax_export
from torch._export.utils import _get_decomp_for_cia
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from torchax_core.convert import array_from_torch
from torchax_core.dtypes import jax_dtype
from torchax_core.environment import current_env
from torchax_core.errors import ConversionError, OperatorNotFound
from torchax_core.hlo_composite import composite
from torchax_core.kernel import DirectKernel
from torchax_core.overrides import DecliningKernel
from torchax_core.purity import PureTrace
from torchax_core.registry import is_composite
from torchax_core.shape_poly import is_symbolic, run_symbolic, runs_symbolic
from torchax_core.tensor import DEVICE, Tensor, active, wrap_array

__all__ = ["exported_program_to_jax", "exported_program_to_stablehlo", "input_avals", "load", "save"]

_LONGEST = 2**31 - 1  # what a dynamic dimension may be, unless its range says less
_ROUNDS = 10  # of decompositions into decompositions


def exported_program_to_jax(
    program: ExportedProgram, *, composites: bool = False
) -> tuple[dict[str, jax.Array], Callable[..., Any]]:
    """A torch.export program as its weights and a pure JAX function.

    composites: make a `stablehlo.composite`, which a compiler may know by name, of each op that torch kept whole (linear,
        attention). Compiling a program of dynamic dimensions that is exported with them is other compilers' business.
    Returns (weights, function). weights: arrays by name: parameters, buffers and constants.
    function(weights, args, kwargs={}, *, key=None): args and kwargs as the program was exported with, arrays for tensors;
        `key`, a jax random key, for programs that draw random numbers. Returns what the module returns, with arrays for
        tensors; if the program writes to buffers or inputs, (that, {name: new value}).
    Raises ConversionError for programs with custom objects; OperatorNotFound for ops that nothing defines.
    Source: https://docs.pytorch.org/docs/stable/export.html
    """
    runner = _Runner(program, composites)
    return runner.weights, runner


def exported_program_to_stablehlo(
    program: ExportedProgram, *, composites: bool = True, platforms: Sequence[str] | None = None
) -> tuple[dict[str, jax.Array], jax_export.Exported]:
    """A torch.export program as its weights and a `jax.export.Exported`, which holds StableHLO and runs without torch.

    Dimensions that are dynamic in the program are symbolic in it, with the constraints of the program's ranges.
    platforms: "cpu", "cuda", "tpu"; default: the present one.
    composites: keep ops that torch kept whole as `stablehlo.composite`. XLA cannot run composites of dynamic shapes: with dynamic
        dimensions the program itself has none, and `exported.composites` is the one that other compilers read.
    Returns (weights, exported): `exported.call(weights, args, kwargs)`, `exported.mlir_module()`, `exported.serialize()`.
    """
    args, kwargs = input_avals(program)

    def exported(runner: _Runner) -> jax_export.Exported:
        with jax.enable_x64(True):
            weights = {name: jax.typeof(array) for name, array in runner.weights.items()}
            shapes = {name: jax.ShapeDtypeStruct(aval.shape, aval.dtype) for name, aval in weights.items()}
            return jax_export.export(jax.jit(runner), platforms=platforms)(shapes, args, kwargs)

    runner = _Runner(program, composites)
    named = exported(runner)
    if "stablehlo.composite" not in named.mlir_module() or not program.range_constraints:
        return runner.weights, named
    plain = exported(_Runner(program, False))
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    return runner.weights, ExportedWithComposites(**fields, composites=named)


@dataclasses.dataclass(frozen=True)
class ExportedWithComposites(jax_export.Exported):
    """A program of dynamic shapes that runs without composites, and the same with them, for compilers that know them."""

    composites: jax_export.Exported


def save(path: str | Path, program: ExportedProgram, **options: Any) -> jax_export.Exported:
    """Write a program to one file, which `load`, or a few lines of numpy and JAX (docs/export.md), reads without torch.

    options: those of exported_program_to_stablehlo. Returns the program written. A file that was there stays whole until
    the new one is. Raises ImportError without flatbuffers, which JAX writes programs with.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise ImportError("JAX writes programs with flatbuffers, which is missing: `pip install torchax-core[export]`.")
    path = Path(path)
    weights, exported = exported_program_to_stablehlo(program, **options)
    names = {name: f"weights/{i}" for i, name in enumerate(weights)}
    entries = {
        name: {"file": names[name], "dtype": str(array.dtype), "shape": list(array.shape)}
        for name, array in weights.items()
    }
    unfinished = path.with_name(path.name + ".part")
    with zipfile.ZipFile(unfinished, "w") as file:
        file.writestr("weights.json", json.dumps(entries, indent=1))
        file.writestr("program", bytes(exported.serialize()))
        if isinstance(exported, ExportedWithComposites):
            file.writestr("composites", exported.composites.mlir_module_serialized)
        for name, array in weights.items():
            file.writestr(names[name], np.asarray(array).tobytes())
    unfinished.replace(path)
    return exported


def load(path: str | Path) -> tuple[dict[str, jax.Array], jax_export.Exported]:
    """What `save` wrote: weights and program, as exported_program_to_stablehlo returns them.

    Raises ConversionError if the file is not one of `save`'s, or not whole.
    """
    try:
        with zipfile.ZipFile(path) as file, jax.enable_x64(True):
            exported = jax_export.deserialize(bytearray(file.read("program")))
            entries = json.loads(file.read("weights.json"))
            weights = {
                name: jax.numpy.asarray(
                    np.frombuffer(file.read(entry["file"]), np.dtype(entry["dtype"])).reshape(entry["shape"])
                )
                for name, entry in entries.items()
            }
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ConversionError(
            f"{path} is no whole file of torchax_core.export.save ({type(error).__name__}: {error}). Write it again, with "
            "`torchax export` or `save(path, program)`."
        ) from error
    return weights, exported


def input_avals(program: ExportedProgram) -> tuple[Any, Any]:
    """The shapes and dtypes of a program's args and kwargs, as `jax.ShapeDtypeStruct`s; dynamic dimensions are symbolic,
    and carry the program's range constraints."""
    scope = jax_export.SymbolicScope(_constraints(program))
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    leaves: list[Any] = []
    with jax.enable_x64(True):
        for spec in program.graph_signature.input_specs:
            if spec.kind is not InputKind.USER_INPUT:
                continue
            fake = nodes[spec.arg.name].meta.get("val") if hasattr(spec.arg, "name") else None
            if not isinstance(fake, torch.Tensor):
                leaves.append(getattr(spec.arg, "value", fake))
                continue
            text = ", ".join(str(n) if isinstance(n, int) else _expression(n.node.expr) for n in fake.shape)
            shape = jax_export.symbolic_shape(text, scope=scope) if text else ()
            leaves.append(jax.ShapeDtypeStruct(tuple(shape), jax_dtype(fake.dtype)))
    args, kwargs = pytree.tree_unflatten(leaves, program.call_spec.in_spec)
    return args, kwargs


def _constraints(program: ExportedProgram) -> list[str]:
    """The program's ranges as JAX writes constraints. JAX's dimensions are at least 1 as they are."""
    found = []
    for symbol, values in program.range_constraints.items():
        if not getattr(symbol, "is_Symbol", False):
            continue
        lower, upper = str(values.lower), str(values.upper)
        if lower.isdigit() and int(lower) > 1:
            found.append(f"{symbol} >= {lower}")
        # lowerings ask whether positions fit into int32
        found.append(f"{symbol} <= {min(int(upper), _LONGEST) if upper.isdigit() else _LONGEST}")
    return found


def _expression(expression: Any) -> str:
    """A size of torch's in JAX's syntax; they differ for floor divisions."""
    return str(expression).replace("FloorDiv", "floordiv").replace("Mod(", "mod(")


# -- running the graph ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Input:
    """A placeholder: the weight of that name, or the next of the user's inputs."""

    weight: str | None


class _Runner:
    """The program as a JAX function."""

    __name__ = "exported_program"

    def __init__(self, program: ExportedProgram, composites: bool) -> None:
        self.composites = composites
        self.environment = current_env()
        with self.environment:
            functional = _decomposed(program) if program.range_constraints else program.run_decompositions({})
        self.graph = functional.graph_module
        signature = functional.graph_signature
        self.in_spec, self.out_spec = functional.call_spec.in_spec, functional.call_spec.out_spec
        self.weights: dict[str, jax.Array] = {}
        self.inputs: list[_Input] = []
        for spec in signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                self.inputs.append(_Input(None))
                continue
            held = functional.state_dict.get(spec.target, functional.constants.get(spec.target))
            if not isinstance(held, torch.Tensor):
                raise ConversionError(
                    f"the exported program has an input of kind {spec.kind.name} ({spec.target}), which has no counterpart in "
                    "JAX. Export a program of tensors and numbers."
                )
            self.inputs.append(_Input(spec.target))
            self.weights[spec.target] = held._array() if isinstance(held, Tensor) else array_from_torch(held)
        self.outputs = [(spec.kind, spec.target) for spec in signature.output_specs]

    def __call__(
        self,
        weights: Mapping[str, Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        key: Any = None,
    ) -> Any:
        given, spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
        if spec != self.in_spec:
            raise TypeError(
                f"the program was exported with arguments {self.in_spec}, but is called with {spec}. Call it as "
                "`function(weights, args, kwargs)`, args being a tuple."
            )
        missing = self.weights.keys() - weights.keys()
        if missing:
            raise TypeError(f"no weight {sorted(missing)[0]!r} among those given; it needs {len(self.weights)}.")
        left = iter(given)
        values = [weights[i.weight] if i.weight is not None else next(left) for i in self.inputs]
        flat = self._run(values, key)
        written = {
            str(target): value
            for (kind, target), value in zip(self.outputs, flat, strict=True)
            if kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)
        }
        results = [v for (kind, _), v in zip(self.outputs, flat, strict=True) if kind is OutputKind.USER_OUTPUT]
        result = _plain(pytree.tree_unflatten(results, self.out_spec))
        return (result, written) if written else result

    def _run(self, values: Sequence[Any], key: Any) -> list[Any]:
        environment = self.environment
        before = (active.trace, active.kernels)
        with environment, jax.enable_x64(True):
            draws = _Draws(jax.random.key(0) if key is None else key)
            active.trace, active.kernels = draws, environment._kernels
            try:
                with torch.no_grad():
                    results = _Interpreter(self, self.graph).run([_array(v) for v in values])
            finally:
                active.trace, active.kernels = before
            if draws.draws and key is None:
                raise TypeError(
                    "the program draws random numbers: give it `key=jax.random.key(0)`, or export the module after `.eval()`."
                )
            return [_array(r) for r in results]


def _array(value: Any) -> Any:
    return value._array() if isinstance(value, Tensor) else value


def _plain(result: Any) -> Any:
    """Results in containers that JAX knows: dicts for Hugging Face's outputs."""
    if isinstance(result, Mapping):
        return {name: _plain(value) for name, value in result.items()}
    if isinstance(result, (list, tuple)) and type(result) in (list, tuple):
        return type(result)(_plain(value) for value in result)
    return result


class _Draws(PureTrace):
    """The trace while a program runs: random numbers come from the key that was given; nothing is remembered, since all
    that the program meets are its arguments."""

    def __init__(self, key: Any) -> None:
        super().__init__(None)
        self.key = key
        self.draws = 0

    def random_arguments(self, state: Any) -> tuple[Any, Any]:
        """Key and count for one draw."""
        count = self.draws
        self.draws += 1
        return self.key, np.uint32(count)

    def lift(self, tensor: Tensor) -> None:
        """Nothing to do."""

    def note(self, result: Any) -> None:
        """Nothing to do."""


class _Interpreter:
    """Runs a graph on arrays: op by op on Tensors around them, as in eager torch, and where a shape is symbolic on the
    arrays themselves."""

    def __init__(self, owner: _Runner, graph: torch.fx.GraphModule) -> None:
        self.owner = owner
        self.graph = graph

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Values of the graph's outputs, arrays and numbers, for those of its inputs."""
        left = iter(inputs)
        values: dict[torch.fx.Node, Any] = {}

        def read(node: torch.fx.Node) -> Any:
            return values[node]

        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(left)
            elif node.op == "get_attr":
                values[node] = _attribute(self.graph, node.target)
            elif node.op == "output":
                return list(torch.fx.node.map_arg(node.args[0], read))
            elif not _asserts(node):
                args = torch.fx.node.map_aggregate(node.args, lambda a: read(a) if isinstance(a, torch.fx.Node) else a)
                kwargs = torch.fx.node.map_aggregate(
                    node.kwargs, lambda a: read(a) if isinstance(a, torch.fx.Node) else a
                )
                values[node] = self._call(node, args, kwargs)
        raise AssertionError("a graph without an output")

    def _call(self, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        func: Any = node.target
        if not isinstance(func, torch._ops.OpOverload):
            if not isinstance(func, torch._ops.HigherOrderOperator):
                return func(*args, **kwargs)
            if Tensor not in func.python_key_table:
                raise OperatorNotFound(
                    f"the exported program holds {func}, which has no counterpart here; cond, while_loop, scan and map have. "
                    "Export a program without it."
                )
            if any(is_symbolic(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
                raise OperatorNotFound(f"{func} does not run with symbolic dimensions. Export with static shapes.")
            return self._op(func, args, kwargs)
        kwargs = {name: DEVICE if isinstance(value, torch.device) else value for name, value in kwargs.items()}
        kwargs.pop("pin_memory", None)
        if self.owner.composites and _is_composite_maths(func):
            return self._composite(func, args, kwargs)
        return self._op(func, args, kwargs)

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if any(is_symbolic(leaf) for leaf in leaves):
            kernel = self.owner.environment._kernel(func)
            result = run_symbolic(kernel, args, kwargs)
            return result
        wrapped = [wrap_array(leaf) if isinstance(leaf, (jax.Array, jax.core.Tracer)) else leaf for leaf in leaves]
        inner_args, inner_kwargs = pytree.tree_unflatten(wrapped, spec)
        return pytree.tree_map_only(torch.Tensor, _array, func(*inner_args, **inner_kwargs))

    def _composite(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The op as a `stablehlo.composite` under its name, with its plain arguments for attributes."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, jax.core.Tracer))]
        structure: list[Any] = []

        def body(*arrays: Any) -> Any:
            full = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                full[place] = array
            inner_args, inner_kwargs = pytree.tree_unflatten(full, spec)
            flat, out = pytree.tree_flatten(self._op(func, inner_args, inner_kwargs))
            structure[:] = [out]
            return tuple(flat)

        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        attributes = {name: value for name, value in given.items() if isinstance(value, (bool, int, float, str))}
        name = func._schema.name.replace("::", ".")
        flat = composite(body, name, [leaves[i] for i in places], attributes)
        return pytree.tree_unflatten(list(flat), structure[0])


def _is_composite_maths(func: Any) -> bool:
    """Whether torch kept whole an op that computes new tensors, and no view of one or a size."""
    returns = func._schema.returns
    return is_composite(func) and all("Tensor" in str(r.type) and r.alias_info is None for r in returns)


_ASSERTIONS = ("_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size")


def _asserts(node: torch.fx.Node) -> bool:
    """Whether the node is an assertion, or a comparison of sizes that only assertions use: JAX checks its own constraints."""
    func = node.target
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.name.partition("::")[2] in _ASSERTIONS
    if func in (operator.ge, operator.le, operator.gt, operator.lt, operator.eq, operator.ne):
        return all(_asserts(user) for user in node.users)
    return False


def _attribute(graph: torch.fx.GraphModule, target: Any) -> Any:
    value: Any = graph
    for part in str(target).split("."):
        value = getattr(value, part)
    if isinstance(value, torch.Tensor):
        return value._array() if isinstance(value, Tensor) else array_from_torch(value)
    return value


def _decomposed(program: ExportedProgram) -> ExportedProgram:
    """The program in ops whose definitions run on arrays of symbolic shape, as far as torch can take the others apart."""
    environment = current_env()
    table: dict[Any, Any] = {}
    for _ in range(_ROUNDS):
        program = program.run_decompositions(dict(table))
        found = {}
        for node in program.graph.nodes:
            func = node.target
            if isinstance(func, torch._ops.OpOverload) and func not in table:
                body = _torch_body(environment, func)
                if body is not None:
                    found[func] = body
        if not found:
            break
        table |= found
    return program


def _torch_body(environment: Any, func: Any) -> Callable[..., Any] | None:
    """The torch code that an op is to be taken apart by; None for ops that run as they are, or not at all."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Meta") and not is_composite(func):
        return None
    kernel = environment._kernel(func)
    if runs_symbolic(kernel):
        return None
    inner = kernel.kernel if isinstance(kernel, DecliningKernel) else kernel
    definition = getattr(inner, "definition", None)
    if definition is not None and definition.kind == "decomposition":
        return definition.body  # type: ignore[no-any-return]
    if is_composite(func):
        return _get_decomp_for_cia(func)  # type: ignore[no-any-return]
    return torch._decomp.decomposition_table.get(func) if isinstance(inner, DirectKernel) else None
