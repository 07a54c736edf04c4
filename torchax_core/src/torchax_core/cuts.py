"""What cuts gradients in torch cuts those of jax: `detach`, and results made under `torch.no_grad()`.

While torch code is traced, for torchax_core.jit or inside a jax transformation, it is jax that will differentiate it. torch's
cuts are then written into the program, as `jax.lax.stop_gradient`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils import _pytree as pytree

from torchax_core.opset import ViewRules
from torchax_core.tensor import Storage, Tensor, become
from torchax_core.view import ROOT, View, make_view

__all__ = ["cut", "cut_unwanted", "detach_in_place", "in_no_grad", "run_kernel"]

_detach = torch.ops.aten.detach.default

_CUT = ViewRules(lambda base: jax.lax.stop_gradient(base))


@_CUT.write_back
@jax.custom_jvp
def _write_unseen(base: jax.Array, new: jax.Array) -> jax.Array:
    """`new`, written where autograd does not look: to it, these are `base`'s values still."""
    return new


@_write_unseen.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[1], tangents[0]


def in_no_grad() -> bool:
    """Whether the code being run is under torch.no_grad or inference_mode. torch runs the forward of an autograd.Function
    without gradients too, and there, unlike under no_grad, without forward-mode ones."""
    if torch.is_grad_enabled():
        return False
    return torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled()


def run_kernel(func: Any, kernel: Any, args: Any, kwargs: Any, *, watched: bool) -> Any:
    """The kernel's result; a detached tensor as one whose gradients end there.

    watched: whether gradients may be asked for of what is traced; then a write under no_grad leaves them as they were.
    The autograd engine's own calls of detach, on gradients on their way, are not the user's.
    """
    if func is _detach and torch._C._current_autograd_node() is None and not _makes_parameter():
        return _detached(args[0]) if _has_gradients(args[0]) else kernel(args, kwargs)
    if not watched or not func._schema.is_mutable or not in_no_grad():
        return kernel(args, kwargs)
    stores = {
        id(a._store): (a._store, a._store.array) for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)
    }
    result = kernel(args, kwargs)
    for store, array in stores.values():
        same = store.array.shape == array.shape and store.array.dtype == array.dtype
        if store.array is not array and same and jnp.issubdtype(array.dtype, jnp.inexact):
            store.array = _write_unseen(array, store.array)
    return result


def _makes_parameter() -> bool:
    """Whether the detach is the one in `nn.Parameter(x)`, which must return a tensor of the type of `x`, no view."""
    frame = sys._getframe(2)
    for _ in range(6):
        if frame is None:
            return False
        if frame.f_code.co_filename == torch.nn.parameter.__file__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def cut(store: Storage) -> None:
    """End the gradients of a value just made."""
    if jnp.issubdtype(store.array.dtype, jnp.inexact):
        store.array = jax.lax.stop_gradient(store.array)


def cut_unwanted(values: Any, captured: Callable[[Storage], bool]) -> Any:
    """Arguments, with those that the function has from outside and that want no gradients as ones whose gradients end.

    A tensor may share its storage, the program's input, with one that does want them: `w.detach()` beside `w`.
    """
    if isinstance(values, dict):
        return {name: cut_unwanted(value, captured) for name, value in values.items()}
    if values.__class__ in (list, tuple):
        return type(values)(cut_unwanted(value, captured) for value in values)
    if isinstance(values, Tensor) and not values.requires_grad and captured(values._store):
        return _detached(values) if _has_gradients(values) else values
    return values


def _has_gradients(tensor: Tensor) -> bool:
    """Whether there are gradients of such a tensor at all, to jax: of what its storage holds."""
    return bool(jnp.issubdtype(tensor._store.array.dtype, jnp.inexact))


def detach_in_place(tensor: Tensor) -> None:
    """End the gradients of a tensor, as torch has ended those it knows of: `detach_` comes to no kernel."""
    become(tensor, _detached(tensor))


def _detached(tensor: Tensor) -> Tensor:
    """The tensor without its gradients: a view, so that what is written to either is seen in both."""
    path, offsets = (tensor._path, tensor._offsets) if isinstance(tensor, View) else (ROOT, ())
    return make_view(tensor._store, tensor._aval, tensor.storage_offset(), path.child(_CUT, (), 0), offsets)
