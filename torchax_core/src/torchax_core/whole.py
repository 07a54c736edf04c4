"""Composite ops and torch functions that stay one node in the graphs of torch.compile.

AOTAutograd would take `scaled_dot_product_attention` apart; where a pack or an override defines it, the graph holds
`torchax::whole` instead, which runs the definition, and `torchax::whole_backward`, which is the transpose of its vjp. What
stands behind a node (the compiled body, the structure of its residuals) is a `Call`, found by number.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from torchax_core import functions
from torchax_core.builtins import BUILTINS
from torchax_core.composite import capturing
from torchax_core.dtypes import torch_dtype
from torchax_core.errors import ConversionError
from torchax_core.kernel import DirectKernel, LoweringKernel
from torchax_core.opset import Definition
from torchax_core.overrides import Declined, DecliningKernel
from torchax_core.tensor import DEVICE_TYPE, Aval, Tensor, active, make_tensor, wrap_array
from torchax_core.vjp import conjugate

__all__ = ["keeping_whole"]

_calls: dict[int, Call] = {}
_numbers = itertools.count()
_library = torch.library.Library("torchax", "DEF")  # noqa: TOR901 - kept alive for as long as the process
_SCHEMA = "(int call, Tensor[] tensors) -> Tensor[]"


class Call:
    """One call in a graph: the program behind it.

    body:      arrays -> tuple of arrays; with `draws`, two more inputs, a random key and a count.
    arrays:    the inputs, with None where a tensor of the graph goes.
    wanted:    places of the inputs that gradients are with respect to; empty for a call without a backward.
    results:   avals of the results.
    residuals: avals of what the forward hands its backward.
    """

    def __init__(self, body: Callable[..., Any], arrays: list[Any], tensors: list[Any], *, draws: bool) -> None:
        self.body = body
        self.arrays = arrays
        self.draws = draws
        self.places = [i for i, a in enumerate(arrays) if a is None]
        self.shapes = [jax.ShapeDtypeStruct(tuple(t.shape), t._aval.jax_dtype) for t in tensors]
        self.wanted: tuple[int, ...] = ()
        self.results: list[Any] = []
        self.residuals: list[Any] = []
        self.tree: Any = None
        self.number = next(_numbers)
        _calls[self.number] = self

    def forward(self, tensors: Sequence[Any], random: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        """Results and residuals, of the tensors' arrays."""
        full = list(self.arrays)
        for place, array in zip(self.places, tensors, strict=True):
            full[place] = array
        with jax.enable_x64(True):
            if not self.wanted:
                return list(self.body(*full, *random)), []

            def of_wanted(*chosen: Any) -> Any:
                inner = list(full)
                for place, array in zip(self.wanted, chosen, strict=True):
                    inner[place] = array
                return tuple(self.body(*inner, *random))

            results, vjp = jax.vjp(of_wanted, *[full[i] for i in self.wanted])
        residuals, self.tree = jax.tree.flatten(vjp)
        return list(results), residuals

    def backward(self, arrays: Sequence[Any]) -> list[Any]:
        """Gradients of the wanted inputs, of residuals and the cotangents of the inexact results."""
        residuals, given = arrays[: len(self.residuals)], iter(arrays[len(self.residuals) :])
        vjp = jax.tree.unflatten(self.tree, residuals)
        with jax.enable_x64(True):  # or `astype` would not give 64 bits
            cotangents = tuple(
                conjugate(next(given).astype(r.dtype)) if _is_inexact(r) else np.zeros(r.shape, jax.dtypes.float0)
                for r in self.results
            )
            return [*map(conjugate, vjp(cotangents))]

    def look(self, wanted: tuple[int, ...]) -> None:
        """Learn the shapes of results and residuals. Raises Declined if the definition declines these arguments, and
        ConversionError for residuals (random keys) that no tensor can hold."""
        self.wanted = wanted
        random = [jax.random.key(0), np.uint32(0)] if self.draws else []
        with jax.enable_x64(True):  # or the shapes would not be of 64 bits
            self.results, self.residuals = jax.eval_shape(self.forward, self.shapes, random)
        for aval in self.residuals:
            torch_dtype(aval.dtype)


def _is_inexact(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def _stand_ins(avals: Sequence[Any]) -> list[torch.Tensor]:
    return [torch.empty(a.shape, dtype=torch_dtype(a.dtype), device=DEVICE_TYPE) for a in avals]


def _define(name: str, fake: Callable[..., Any], run: Callable[..., Any], tags: Any = ()) -> Any:
    _library.define(name + _SCHEMA, tags=tags)
    torch.library.register_fake(f"torchax::{name}", fake, lib=_library)

    def whole(environment: Any, func: Any) -> Callable[..., Any]:
        return run

    BUILTINS[f"torchax::{name}"] = whole
    return getattr(torch.ops.torchax, name).default


def _run_forward(call: int, tensors: list[Tensor]) -> list[torch.Tensor]:
    known = _calls[call]
    random = active.environment._random_arguments(None) if known.draws else ()
    results, residuals = known.forward([t._array() for t in tensors], random)
    return _noted([wrap_array(a) for a in (*results, *residuals)])


def _run_backward(call: int, tensors: list[Tensor]) -> list[torch.Tensor]:
    return _noted([wrap_array(a) for a in _calls[call].backward([t._array() for t in tensors])])


def _noted(tensors: list[Any]) -> list[Any]:
    if active.trace is not None:
        active.trace.note(tensors)
    return tensors


def _fake_forward(call: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    known = _calls[call]
    return _stand_ins([*known.results, *known.residuals])


def _fake_backward(call: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    known = _calls[call]
    places = {place: i for i, place in enumerate(known.places)}
    return _stand_ins([known.shapes[places[place]] for place in known.wanted])


_whole = _define("whole", _fake_forward, _run_forward)
# torch recomputes parts of a forward in its backward, but nothing random
_whole_random = _define("whole_random", _fake_forward, _run_forward, (torch.Tag.nondeterministic_seeded,))
_whole_backward = _define("whole_backward", _fake_backward, _run_backward)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> Any:
        outputs = (_whole_random if call.draws else _whole)(call.number, list(tensors))
        results, residuals = outputs[: len(call.results)], outputs[len(call.results) :]
        ctx.call = call
        ctx.save_for_backward(*residuals)
        ctx.mark_non_differentiable(*[t for t, a in zip(results, call.results, strict=True) if not _is_inexact(a)])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        call = ctx.call
        given = [g for g, a in zip(gradients, call.results, strict=True) if _is_inexact(a)]
        found = iter(_whole_backward(call.number, [*ctx.saved_tensors, *given]))
        return (None, *[next(found) if place in call.wanted else None for place in call.places])


def _emit(call: Call, tensors: list[torch.Tensor]) -> list[Any]:
    """Put the call into the graph being made."""
    wanted: tuple[int, ...] = ()
    if torch.is_grad_enabled():
        wanted = tuple(
            place
            for place, t in zip(call.places, tensors, strict=True)
            if t.requires_grad and (t.is_floating_point() or t.is_complex())
        )
    with _disable_current_modes():
        call.look(wanted)
    if wanted:
        return list(_Whole.apply(call, *tensors))  # type: ignore[no-untyped-call]
    return list((_whole_random if call.draws else _whole)(call.number, tensors))


def _of_op(kernel: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A composite op, met while a graph is made: whole if a pack or an override defines it."""
    if isinstance(kernel, DecliningKernel):
        return kernel.ask(lambda asked: _of_op(asked, func, args, kwargs))
    definition = getattr(kernel, "definition", None)
    if definition is None or definition.origin.pack == "torch":
        return func.decompose(*args, **kwargs)
    if isinstance(kernel, DirectKernel):
        return kernel(args, kwargs)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    gradients = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if (gradients and definition.gradients_by(args, kwargs) != "vjp") or not isinstance(kernel, LoweringKernel):
        return func.decompose(*args, **kwargs)
    if any(t.device.type != DEVICE_TYPE for t in tensors):
        return func.decompose(*args, **kwargs)
    with _disable_current_modes():
        ours = {id(t): _empty(t) for t in tensors}
        inner = [ours[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        inner_args, inner_kwargs = pytree.tree_unflatten(inner, spec)
        random = active.environment.random
        count = random.count
        entry, arrays = kernel._enter(inner_args, inner_kwargs)
        random.count = count
    if entry.draws:
        del arrays[-2:]
    # which tensor each array is: the kernel's own order of its arguments
    places = {id(t._store.array): fake for fake, t in [(f, ours[id(f)]) for f in tensors]}
    given = [places.get(id(array)) for array in arrays]
    body = entry.body if entry.single is None else lambda *xs: (entry.body(*xs),)
    call = Call(
        body,
        [None if fake is not None else array for fake, array in zip(given, arrays, strict=True)],
        [ours[id(fake)] for fake in given if fake is not None],
        draws=entry.draws,
    )
    try:
        results = iter(_emit(call, [fake for fake in given if fake is not None]))
    except ConversionError:  # residuals of a type that torch has none of
        return func.decompose(*args, **kwargs)
    except Declined:
        if definition.origin.pack == "override":
            raise
        return func.decompose(*args, **kwargs)
    out: list[Any] = []
    for group in entry.avals:
        if isinstance(group, list):
            out.append([next(results) for _ in group])
        else:
            out.append(None if group is None else next(results))
    return entry.structure(out)


def _empty(tensor: torch.Tensor) -> Tensor:
    """A Tensor of the shape and dtype of a stand-in, without values."""
    aval = Aval.contiguous(tuple(tensor.shape), tensor.dtype)
    return make_tensor(jax.ShapeDtypeStruct(aval.shape, aval.jax_dtype), aval)  # type: ignore[arg-type]


def _of_function(definition: Definition, args: Any, kwargs: Any) -> Any:
    """A JAX function in a torch function's place, met while a graph is made. Raises Declined."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in places]
    structure: list[Any] = []

    def body(*arrays: Any) -> tuple[Any, ...]:
        full = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            full[place] = array
        inner_args, inner_kwargs = pytree.tree_unflatten(full, spec)
        result = definition.body(*inner_args, **inner_kwargs)
        if result is NotImplemented:
            raise Declined
        flat, structure[:] = _flattened(result)
        return flat

    with _disable_current_modes():
        call = Call(body, [None] * len(tensors), [_empty(t) for t in tensors], draws=False)
    results = _emit(call, tensors)
    return jax.tree.unflatten(structure[0], results)


def _flattened(result: Any) -> tuple[tuple[Any, ...], list[Any]]:
    flat, structure = jax.tree.flatten(result)
    return tuple(jnp.asarray(x) for x in flat), [structure]


class _Functions(TorchFunctionMode):
    """Catches defined torch functions, which dynamo has left in its graphs, while AOTAutograd goes through these."""

    def __init__(self) -> None:
        super().__init__()
        self.running: frozenset[str] = frozenset()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = functions.defined().get(func)
        if name is not None and name not in self.running:
            before = self.running
            for _, definition in functions.chain(active.environment, name):
                self.running = before | {name}
                try:
                    with self:  # torch code of a definition may call other defined functions
                        if definition.kind == "function":
                            result = _of_function(definition, args, kwargs or {})
                        else:
                            result = definition.body(*args, **(kwargs or {}))
                except Declined:
                    continue
                finally:
                    self.running = before
                if result is not NotImplemented:
                    return result
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def keeping_whole() -> Iterator[None]:
    """While in force in this thread, graphs being made hold defined composite ops and torch functions as one node."""
    before = capturing.call
    capturing.call = _of_op
    try:
        with _Functions() if functions.defined() else contextlib.nullcontext():
            yield
    finally:
        capturing.call = before
