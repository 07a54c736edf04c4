"""jax's transformations of torch functions, by google/torchax's names: torch code in, torch code out.

Each takes a function of Tensors and the keyword arguments for jax's transformation, and returns a function of Tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jec
import torch
from torch.utils import _pytree as pytree

from torchax_core import trees
from torchax_core.arguments import Call
from torchax_core.bridge import TorchCode, call_and_capture, call_jax, lay_out, torch_view, torch_view_elem
from torchax_core.jit import JittedFunction
from torchax_core.placement import Placed, automatic_mesh
from torchax_core.rebinding import Changes
from torchax_core.tensor import Tensor

__all__ = [
    "fori_loop",
    "gradient_checkpoint",
    "j2t_autograd",
    "jax_jit",
    "jax_shard_map",
    "jax_value_and_grad",
    "wrap_jax_jit",
]


class _Transformed:
    """A jax transformation of torch code, as torch code.

    jax remembers what it traced by the function's identity, and tensors in the code's closure are constants to it. So the
    code is handed to jax as a new function whenever one of them holds something else, or wants gradients.
    """

    def __init__(
        self, function: Callable[..., Any], transform: Callable[..., Any], options: dict[str, Any] | None
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.transform = transform
        self.options = options or {}
        self._captured: list[Tensor] = []
        self._code: TorchCode | None = None
        self._made: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call_and_capture(self._run, args, kwargs, self._captured)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        code = self._code
        wants_gradients = self._captured or (code is not None and torch.is_grad_enabled() and code.wants_gradients())
        if code is None or self._made is None or wants_gradients or not code.is_current():
            code = self._code = TorchCode(self.function)
            self._made = self.transform(code, **self.options)
        return self._made(*args, **kwargs)


def wrap_jax_jit(
    torch_function: Callable[..., Any],
    jax_jit_func: Callable[..., Any] = jax.jit,
    kwargs_for_jax: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Any transformation of jax's (`jax_jit_func(f, **kwargs_for_jax)`) applied to torch code.

    What Python decides while jax traces the code (module.training, random draws) is fixed in the program jax makes.
    Gradients flow to arguments and to the tensors that the code meets. Raises SideEffectError if it writes to those.
    """
    return _Transformed(torch_function, jax_jit_func, kwargs_for_jax)


def gradient_checkpoint(torch_function: Callable[..., Any], kwargs: dict[str, Any] | None = None) -> Callable[..., Any]:
    """`torch_function` that saves no activations for its backward, but computes them again there: jax.checkpoint.

    kwargs: jax.checkpoint's: `policy`, `prevent_cse`, `static_argnums`.
    Source: https://docs.jax.dev/en/latest/gradient-checkpointing.html
    """
    return _Transformed(torch_function, jax.checkpoint, kwargs)


def jax_shard_map(
    torch_function: Callable[..., Any], kwargs_for_jax_shard_map: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """`torch_function` as what each device does with its shard of the arguments: jax.shard_map.

    kwargs_for_jax_shard_map: `mesh`, `in_specs`, `out_specs`, `check_vma`.
    What the function meets in its closure, a module's weights, is whole on every device, and gets gradients.
    Source: https://docs.jax.dev/en/latest/_autosummary/jax.shard_map.html
    """
    options = dict(kwargs_for_jax_shard_map or {})
    if isinstance(options.get("mesh"), jax.sharding.Mesh):
        options["mesh"] = automatic_mesh(options["mesh"])
    return _Transformed(torch_function, jax.shard_map, options)


def jax_value_and_grad(
    torch_function: Callable[..., Any], kwargs_for_value_and_grad: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """A function that returns `torch_function`'s value, a scalar, and its gradients: jax.value_and_grad.

    kwargs_for_value_and_grad: `argnums` (default 0: the first argument, any pytree), `has_aux`, `allow_int`.
    The results carry no torch gradients; for derivatives of gradients, nest jax's transformations in `torch_function`.
    Source: https://docs.jax.dev/en/latest/_autosummary/jax.value_and_grad.html
    """
    transformed = _Transformed(torch_function, jax.value_and_grad, kwargs_for_value_and_grad)

    @functools.wraps(torch_function)
    def value_and_grad(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return transformed(*args, **kwargs)

    return value_and_grad


def j2t_autograd(fn: Callable[..., Any], call_jax: Callable[..., Any] = call_jax) -> Callable[..., Any]:
    """A jax function as a torch function with gradients: torch_view(fn), by the name it has in google/torchax."""

    @functools.wraps(fn)
    def torch_function(*args: Any, **kwargs: Any) -> Any:
        return call_jax(fn, *args, **kwargs)

    return torch_function


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[Any, Any], Any], init_val: Any, **kwargs: Any) -> Any:
    """`for i in range(lower, upper): init_val = body_fun(i, init_val)` as one loop on the device: jax.lax.fori_loop.

    body_fun: torch code; `i` arrives as a 0-d Tensor, and what it returns has the shapes and dtypes of `init_val`.
    Gradients flow if `lower` and `upper` are Python ints.
    Source: https://docs.jax.dev/en/latest/_autosummary/jax.lax.fori_loop.html
    """
    return call_jax(jax.lax.fori_loop, lower, upper, body_fun, init_val, **kwargs)


# -- jax_jit ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Structure:
    """How the tensors of a call are arranged, what else it was given, and which of them it gives up."""

    spec: Any
    static: tuple[Any, ...] = ()
    donated: tuple[int, ...] = ()


pytree.register_pytree_node(_Structure, lambda s: ([], s), lambda leaves, s: s)


class _DonatingFunction(JittedFunction):
    """torchax_core.jit of a function of a _Structure and Tensors, whose donated ones give their memory to the results."""

    def _compile(self, signature: Any, call: Call, failed: str, changes: Changes) -> Any:
        program = super()._compile(signature, call, failed, changes)
        (structure, *_), _ = call.tree
        given = [2 + i for i, place in enumerate(program.argument_places) if place in structure.donated]
        if given and program.differentiable is None:
            first = 2 + len(program.argument_places)
            given += [first + i for i, donated in enumerate(program.donated) if donated]
            program.compiled = Placed(jec.jaxpr_as_fun(program.jaxpr), tuple(given))
        return program


class _JaxJit:
    """What `jax_jit` returns."""

    _OPTIONS = frozenset({"donate_argnames", "donate_argnums", "in_shardings", "out_shardings"})
    _OPTIONS |= {"static_argnames", "static_argnums", "inline", "keep_unused"}

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        unknown = sorted(set(options) - self._OPTIONS)
        if unknown:
            raise TypeError(
                f"jax_jit takes jax.jit's options {', '.join(sorted(self._OPTIONS))}, but got {', '.join(unknown)}. For others, "
                "`wrap_jax_jit(f, jax.jit, options)` hands them to jax.jit as they are."
            )
        self.function = function
        self.options = options
        names = _positional_names(function)
        self.static = _places(options, "static", names)
        self.donated = _places(options, "donate", names)
        self.jitted = _DonatingFunction(self._run, name=getattr(function, "__name__", type(function).__name__))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        structure, leaves = self._flat(args, kwargs)
        found, *results = self.jitted(structure, *leaves)
        return trees.unflatten(results, found.spec)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The program for these arguments as jax's Lowered: `.as_text()`, `.compile()`. Runs nothing."""
        structure, leaves = self._flat(args, kwargs)
        return self.jitted.lower(structure, *leaves)

    def explain(self) -> str:
        """Why each compile happened, one line each."""
        return self.jitted.explain()

    def clear_cache(self) -> None:
        """Forget every compiled program."""
        self.jitted.clear_cache()

    def _flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Structure, list[Any]]:
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        static = {key: named.pop(key) for key in self.static(len(args)) if key in named}
        donated_keys = self.donated(len(args))
        shardings = self._in_shardings(named, len(args))
        leaves: list[Any] = []
        specs: list[tuple[Any, Any]] = []
        donated: list[int] = []
        for key, value in named.items():
            parts, spec = trees.flatten(value)
            parts = [part if part.__class__ is Tensor else _traced_number(torch_view_elem(part)) for part in parts]
            if shardings is not None:
                parts = _put(parts, spec, shardings[key])
            if key in donated_keys:
                donated += range(len(leaves), len(leaves) + len(parts))
            leaves += parts
            specs.append((key, spec))
        return _Structure(tuple(specs), tuple((k, _hashable(v, k)) for k, v in static.items()), tuple(donated)), leaves

    def _in_shardings(self, named: dict[Any, Any], count: int) -> dict[Any, Any] | None:
        given = self.options.get("in_shardings")
        if given is None:
            return None
        if not isinstance(given, (tuple, list)):
            return dict.fromkeys(named, given)
        if any(isinstance(key, str) for key in named) or len(given) != count - (count - len(named)):
            raise TypeError(
                f"jax_jit: in_shardings has {len(given)} entries, one for each positional argument that is not static, but the "
                f"call has {len(named)} arguments: {', '.join(map(str, named))} (keyword arguments cannot be placed)."
            )
        return dict(zip(named, given, strict=True))

    def _run(self, structure: _Structure, *leaves: Any) -> Any:
        rest = list(leaves)
        named: dict[Any, Any] = {key: value.value for key, value in structure.static}
        for key, spec in structure.spec:
            named[key] = trees.unflatten([rest.pop(0) for _ in range(_size(spec))], spec)
        args = [named.pop(i) for i in sorted(key for key in named if isinstance(key, int))]
        parts, spec = trees.flatten(torch_view(self.function(*args, **named)))
        shardings = self.options.get("out_shardings")
        if shardings is not None:
            parts = _put(parts, spec, shardings)
        return (_Structure(spec), *parts)


@dataclasses.dataclass(frozen=True)
class _Static:
    """A static argument; 1, 1.0 and True are three."""

    type: type
    value: Any


def _hashable(value: Any, key: Any) -> _Static:
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"jax_jit: static argument {key!r} is a {type(value).__name__}, which has no hash, so its changes could not be "
            "noticed. Pass a tuple, a number or a string, or let it be traced."
        ) from None
    return _Static(type(value), value)


def _positional_names(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _places(options: dict[str, Any], prefix: str, names: list[str]) -> Callable[[int], set[Any]]:
    """From the number of positional arguments to the arguments (positions and names) that an option speaks of."""
    numbers, words = options.get(f"{prefix}_argnums"), options.get(f"{prefix}_argnames")
    numbers = () if numbers is None else (numbers,) if isinstance(numbers, int) else tuple(numbers)
    words = () if words is None else (words,) if isinstance(words, str) else tuple(words)

    def places(count: int) -> set[Any]:
        found: set[Any] = {n % count if n < 0 else n for n in numbers if -count <= n}
        found |= {names[n] for n in numbers if -len(names) <= n < len(names)}
        found |= set(words) | {names.index(w) for w in words if w in names}
        return found

    return places


def _size(spec: trees.Spec) -> int:
    return spec.outer.num_leaves - len(spec.inner) + sum(_size(s) for _, _, specs in spec.inner for s in specs)


def _traced_number(leaf: Any) -> Any:
    """As for jax.jit, a number is no part of the program: it becomes a 0-d tensor, which torch promotes like a number."""
    if isinstance(leaf, (bool, int, float, complex)):
        return torch.tensor(leaf, device="jax")
    return leaf


def _put(parts: list[Any], spec: trees.Spec, shardings: Any) -> list[Any]:
    """Tensors laid out by a pytree of shardings that is a prefix of theirs; None leaves them where they are."""
    tree = trees.unflatten(list(range(len(parts))), spec)
    placed = list(parts)

    def place(sharding: Any, numbers: Any) -> None:
        if sharding is not None:
            for number in jax.tree.leaves(numbers):
                if isinstance(placed[number], torch.Tensor):
                    placed[number] = lay_out(placed[number], sharding)

    jax.tree.map(place, shardings, tree, is_leaf=lambda x: x is None or isinstance(x, jax.sharding.Sharding))
    return placed


def jax_jit(
    torch_function: Callable[..., Any],
    kwargs_for_jax_jit: dict[str, Any] | None = None,
    fix_for_buffer_donation: bool = False,
) -> Any:
    """Compile torch code with jax.jit's view of arguments: numbers are traced, static ones named, donated ones given up.

    kwargs_for_jax_jit: static_argnums, static_argnames, donate_argnums, donate_argnames, in_shardings, out_shardings.
    Made by torchax_core.jit: tensors that the function meets elsewhere are inputs of the program and may be written to,
    random numbers are new at every call, and a change of what it depends on compiles anew.
    `fix_for_buffer_donation` is google/torchax's, and has nothing to fix here. A donated Tensor has no values afterwards.
    """
    return _JaxJit(torch_function, kwargs_for_jax_jit or {})
