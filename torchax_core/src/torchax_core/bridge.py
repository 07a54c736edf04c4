"""The four words of the bridge: jax_view and torch_view turn values over, call_jax and call_torch call across it.

A value is any pytree, of torch's or of jax's containers. Arrays and Tensors turn into each other without a copy, dtypes
into each other's, and a callable into one that takes and returns values of the other side.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax_core import trees
from torchax_core.convert import array_from_torch, is_traced, torch_from_array
from torchax_core.dtypes import jax_dtype, torch_dtype
from torchax_core.errors import ConversionError, ShapeError
from torchax_core.placement import constrain
from torchax_core.purity import in_jax, pure
from torchax_core.tensor import Storage, Tensor, wrap_array
from torchax_core.vjp import DifferentiableProgram, differentiable_call

__all__ = ["call_jax", "call_torch", "jax_view", "jax_view_elem", "lay_out", "tensor", "torch_view", "torch_view_elem"]

_ARRAY = (jax.Array, jax.core.Tracer)


def tensor(array: Any) -> Tensor:
    """A torch tensor on device "jax" over a jax array: same shape and dtype, no copy.

    Writes to the tensor do not reach the array (jax arrays do not change). Raises ConversionError for what is no array.
    """
    if not isinstance(array, _ARRAY):
        raise ConversionError(
            f"torchax_core.tensor takes a jax array, but got {type(array).__name__}. For numpy or lists use "
            "`torch.tensor(value, device='jax')`, for a torch tensor `.to('jax')`."
        )
    return wrap_array(array)


class TorchCode:
    """Torch code as a function of arrays. `met`: what it met that was not an argument, when jax last ran it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.met: list[tuple[Storage, Any]] = []
        self.tensors: list[weakref.ref[Tensor]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call_torch(self.function, *args, _caller=self, **kwargs)

    def is_current(self) -> bool:
        """Whether all that was met still holds what it held: then a program jax made of this code may run again."""
        return all(store.array is array for store, array in self.met)

    def wants_gradients(self) -> bool:
        """Whether any tensor that was met wants gradients: it must then be an input of what is differentiated."""
        return any(t is not None and t.requires_grad for t in (reference() for reference in self.tensors))

    def __repr__(self) -> str:
        return f"jax_view({self.function!r})"


class JaxCode:
    """A jax function as a function of Tensors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call_jax(self.function, *args, **kwargs)

    def __repr__(self) -> str:
        return f"torch_view({self.function!r})"


# Callable, and yet data: jax's meshes are decorators, and classes name types.
_NO_CODE = (type, contextlib.ContextDecorator, torch.Tensor, TorchCode, JaxCode)


def _is_array(value: Any) -> bool:
    """Whether torch has tensors of the kind: all arrays but those of random keys."""
    return isinstance(value, _ARRAY) and not jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)


def jax_view_elem(leaf: Any) -> Any:
    """jax_view of a value that is no container."""
    if isinstance(leaf, Tensor):
        return leaf.jax()
    if isinstance(leaf, torch.Tensor):
        raise ConversionError(
            f"jax_view: a tensor of shape {tuple(leaf.shape)} is on device {leaf.device}, and only tensors on device 'jax' have "
            "a jax array. Move it, with `.to('jax')`."
        )
    if isinstance(leaf, torch.dtype):
        return jax_dtype(leaf)
    if isinstance(leaf, JaxCode):
        return leaf.function
    if callable(leaf) and not isinstance(leaf, _NO_CODE):
        return TorchCode(leaf)
    return leaf


def torch_view_elem(leaf: Any) -> Any:
    """torch_view of a value that is no container."""
    if _is_array(leaf):
        return wrap_array(leaf)
    if isinstance(leaf, np.dtype):
        return torch_dtype(leaf)
    if isinstance(leaf, TorchCode):
        return leaf.function
    if callable(leaf) and not isinstance(leaf, (*_NO_CODE, torch.nn.Module)):
        return JaxCode(leaf)
    return leaf


def jax_view(tree: Any) -> Any:
    """`tree` as jax sees it, no copy: Tensors as arrays, torch dtypes as jax's, torch code (modules too) as functions of arrays.

    Raises ConversionError for tensors on other devices.
    """
    return trees.map_leaves(jax_view_elem, tree)


def torch_view(tree: Any) -> Any:
    """`tree` as torch sees it, no copy: jax arrays as Tensors, jax dtypes as torch's, jax functions as functions of Tensors.

    So `torch_view(optax.adam(1e-3))` is an optimizer over torch parameters, and `torch_view(jax.lax.scan)` takes torch code.
    """
    return trees.map_leaves(torch_view_elem, tree)


def t2j_iso(tree: Any) -> Any:
    """`tree` with its Tensors as their jax arrays, no copy. Raises ConversionError for tensors on other devices."""
    return trees.map_leaves(lambda x: jax_view_elem(x) if isinstance(x, torch.Tensor) else x, tree)


def j2t_iso(tree: Any) -> Any:
    """`tree` with its jax arrays as Tensors on device "jax", no copy."""
    return trees.map_leaves(lambda x: wrap_array(x) if _is_array(x) else x, tree)


def t2j_copy(tree: Any) -> Any:
    """`tree` with its torch tensors, on any device, as new jax arrays: same shapes and dtypes, bit for bit."""

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return jnp.copy(leaf.detach().jax())
        return array_from_torch(leaf.cpu()) if isinstance(leaf, torch.Tensor) else leaf

    return trees.map_leaves(copy, tree)


def j2t_copy(tree: Any) -> Any:
    """`tree` with its jax arrays as new torch tensors on the CPU: same shapes and dtypes, bit for bit."""
    return trees.map_leaves(lambda x: torch_from_array(x) if _is_array(x) else x, tree)


def to_xla(tree: Any) -> Any:
    """`tree` with its torch tensors and modules moved to device "jax"; modules in place."""
    movable = (torch.Tensor, torch.nn.Module)
    return trees.map_leaves(lambda x: x.to("jax") if isinstance(x, movable) else x, tree)


def call_torch(function: Callable[..., Any], *args: Any, _caller: TorchCode | None = None, **kwargs: Any) -> Any:
    """Call torch code with jax arrays in its arguments' pytrees; Tensors in its result come back as arrays.

    function: any torch code; under jax.jit, jax.grad, jax.vmap, jax.hessian and jax.lax loops it becomes part of their program.
    Raises SideEffectError if, inside a jax transformation, it writes to tensors that are not among its arguments.
    """
    leaves, spec = trees.flatten((args, kwargs))
    if not (any(map(is_traced, leaves)) or in_jax() or _closure.tensors is not None):
        inner_args, inner_kwargs = trees.unflatten([torch_view_elem(leaf) for leaf in leaves], spec)
        with torch.autograd.set_multithreading_enabled(False):
            return jax_view(function(*inner_args, **inner_kwargs))
    with pure() as trace:
        inner = [torch_view_elem(leaf) for leaf in leaves]
        for leaf in inner:
            trace.note(leaf)
        inner_args, inner_kwargs = trees.unflatten(inner, spec)
        result = jax_view(function(*inner_args, **inner_kwargs))
        if _caller is not None:
            _caller.met = [(store, array) for store, array, _ in trace.met.values()]
            _caller.tensors = [weakref.ref(t) for t, _ in trace.tensors.values()]
        if _closure.tensors is not None:
            for found in trace.captured():
                _closure.tensors.setdefault(id(found), found)
    return result


class _Closure(threading.local):
    """Tensors that torch code, called by a jax function, met without having been given them, and that want gradients."""

    tensors: dict[int, torch.Tensor] | None = None


_closure = _Closure()


def call_jax(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a jax function with Tensors in its arguments' pytrees; arrays in its result come back as Tensors.

    Callables among the arguments are torch code: `call_jax(jax.lax.scan, torch_body, carry, xs)`. Tensors on the CPU are
    moved. torch autograd flows through, of any order (the backward is jax.vjp's): to the arguments, and to what torch code
    among them meets in its closures and modules.
    """
    return call_and_capture(function, args, kwargs, [])


def call_and_capture(function: Callable[..., Any], args: Any, kwargs: Any, captured: list[Tensor]) -> Any:
    """call_jax that adds to `captured` what torch code met and wants gradients; to start from the last call's saves a run."""
    plain = not kwargs and all(isinstance(arg, trees.PLAIN) for arg in args)
    leaves, spec = (list(args), None) if plain else trees.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    operands: list[Any] = [leaves[i] if isinstance(leaves[i], Tensor) else leaves[i].to("jax") for i in places]
    leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    given = {id(operand) for operand in operands}
    captured[:] = [t for t in captured if id(t) not in given and t.requires_grad]
    given.update(map(id, captured))
    made: list[Any] = []

    def fn(*arrays: Any) -> Any:
        # torch code among the arguments is made anew each time: jax remembers what it traced by the function's identity
        full = [jax_view_elem(leaf) for leaf in leaves]
        for i, array in zip(places, arrays, strict=False):
            full[i] = array
        inner_args, inner_kwargs = (full, {}) if spec is None else trees.unflatten(full, spec)
        with _standing_in(captured, arrays[len(places) :]):
            flat, out_spec = trees.flatten(function(*inner_args, **inner_kwargs))
        made[:] = [out_spec, [_RESULT if _is_array(x) else x for x in flat]]
        return tuple(x for x in flat if _is_array(x))

    before = _closure.tensors
    try:
        while True:
            _closure.tensors = {} if torch.is_grad_enabled() else None
            results = differentiable_call(DifferentiableProgram(fn, jit=False), [*operands, *captured])
            missed = [t for key, t in (_closure.tensors or {}).items() if key not in given]
            if not missed:
                break
            captured += missed  # type: ignore[arg-type]
            given.update(map(id, missed))
    finally:
        _closure.tensors = before
    out_spec, flat = made
    rest = iter(results)
    return trees.unflatten([next(rest) if leaf is _RESULT else torch_view_elem(leaf) for leaf in flat], out_spec)


def lay_out(tensor: torch.Tensor, sharding: Any) -> Tensor:
    """The tensor laid out by a jax sharding, with gradients; in a program, as a constraint on it. CPU tensors are moved."""
    program = DifferentiableProgram(lambda array: (constrain(array, sharding),), jit=False)
    program.x64 = True
    (result,) = differentiable_call(program, [tensor if isinstance(tensor, Tensor) else tensor.to("jax")])
    return result  # type: ignore[no-any-return]


def write_jax(tensor: Tensor, function: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
    """Put `function(array, ...)` in the place of the tensor's values, as torch's in-place ops do it: gradients included."""
    recorded = torch.is_grad_enabled() and tensor.requires_grad
    # the backward needs the values from before
    result = call_jax(function, tensor.clone() if recorded else tensor, *args, **kwargs)
    if not isinstance(result, Tensor) or result.shape != tensor.shape or result.dtype != tensor.dtype:
        found = (
            f"{result.dtype} of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        )
        raise ShapeError(
            f"apply_jax_ keeps shape and dtype, {tensor.dtype} of shape {tuple(tensor.shape)}, but the function returned "
            f"{found}. Take its result as a new tensor, with `x = x.apply_jax(f)`."
        )
    if recorded or result.requires_grad:
        return tensor.copy_(result)
    if tensor.__class__ is Tensor:
        tensor._store.array = result._array()  # wherever the function laid it out
    tensor._write(result._array())
    torch.autograd.graph.increment_version(tensor)
    return tensor


_RESULT = object()


@contextlib.contextmanager
def _standing_in(tensors: list[Tensor], arrays: Any) -> Iterator[None]:
    """Let these Tensors hold these arrays; others that share their storages keep what they hold."""
    held = [(tensor, tensor.__class__, tensor._store) for tensor in tensors]
    try:
        for tensor, array in zip(tensors, arrays, strict=True):
            tensor.__class__ = Tensor
            tensor._store = Storage(array, tensor._aval.stride)
        yield
    finally:
        for tensor, cls, store in held:
            tensor.__class__, tensor._store = cls, store
