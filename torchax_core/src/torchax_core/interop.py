"""Between torch tensors and jax arrays, and between torch code and jax functions.

tensor(array)      a Tensor over a jax array              t.jax()              the array of a Tensor
torch_view(tree)   arrays in a pytree as Tensors          jax_view(tree)       Tensors in a pytree as arrays
call_jax(f, ...)   a jax function on Tensors, with        call_torch(f, ...)   torch code on arrays
                   gradients by jax.vjp
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch
from torch.utils import _pytree as pytree

from torchax_core.errors import ConversionError
from torchax_core.tensor import Tensor, wrap_array
from torchax_core.vjp import DifferentiableProgram, differentiable_call

__all__ = ["call_jax", "call_torch", "jax_view", "tensor", "torch_view"]


def tensor(array: Any) -> Tensor:
    """A torch tensor on device "jax" over a jax array: same shape and dtype, no copy.

    Writes to the tensor do not reach the array (jax arrays do not change). Raises ConversionError for what is no array.
    """
    if not isinstance(array, (jax.Array, jax.core.Tracer)):
        raise ConversionError(
            f"torchax_core.tensor takes a jax array, but got {type(array).__name__}. For numpy or lists use "
            "`torch.tensor(value, device='jax')`, for a torch tensor `.to('jax')`."
        )
    return wrap_array(array)


def jax_view(tree: Any) -> Any:
    """`tree` with every Tensor as its jax array, no copy; a callable as a function of arrays (see call_torch)."""
    if callable(tree) and not isinstance(tree, (torch.Tensor, type)):
        return lambda *args, **kwargs: call_torch(tree, *args, **kwargs)
    return pytree.tree_map(lambda leaf: leaf.jax() if isinstance(leaf, Tensor) else leaf, tree)


def torch_view(tree: Any) -> Any:
    """`tree` with every jax array as a Tensor, no copy; a callable as a function of Tensors (see call_jax)."""
    if callable(tree) and not isinstance(tree, (torch.Tensor, type)):
        return lambda *args, **kwargs: call_jax(tree, *args, **kwargs)
    is_array = (jax.Array, jax.core.Tracer)
    leaves, spec = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, torch.Tensor))
    return jax.tree.unflatten(spec, [wrap_array(leaf) if isinstance(leaf, is_array) else leaf for leaf in leaves])


def call_torch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call torch code with jax arrays in its arguments' pytrees; Tensors in its result come back as arrays."""
    args, kwargs = torch_view((args, kwargs))
    with torch.autograd.set_multithreading_enabled(False):
        return jax_view(function(*args, **kwargs))


def call_jax(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a jax function with Tensors in its arguments' pytrees; arrays in its result come back as Tensors.

    torch autograd flows through: the backward is jax.vjp's, of any order.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    operands = [leaves[i] if isinstance(leaves[i], Tensor) else leaves[i].to("jax") for i in places]
    made: list[Any] = []
    others: list[Any] = []

    def fn(*arrays: Any) -> Any:
        full = list(leaves)
        for i, array in zip(places, arrays, strict=True):
            full[i] = array
        inner_args, inner_kwargs = pytree.tree_unflatten(full, spec)
        flat, out_spec = jax.tree.flatten(function(*inner_args, **inner_kwargs))
        made[:] = [out_spec]
        others[:] = [None if isinstance(x, (jax.Array, jax.core.Tracer)) else x for x in flat]
        return tuple(x for x in flat if isinstance(x, (jax.Array, jax.core.Tracer)))

    results = iter(differentiable_call(DifferentiableProgram(fn, jit=False), operands))
    flat = [next(results) if other is None else other for other in others]
    return jax.tree.unflatten(made[0], flat)
