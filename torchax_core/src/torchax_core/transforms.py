"""Overrides of composite ops under torch.func: vmap, grad, jvp, and what is made of them.

torch.func decomposes a composite op before any device is asked, and would pass an override by. So for as long as there is
one, the op has a kernel on the key that torch.func's transformations begin with. Torch code is called there as it is; a
JAX function becomes an autograd function whose derivatives and batches are jax.vjp's, jax.jvp's and jax.vmap's.

Source: https://docs.pytorch.org/docs/stable/notes/extending.func.html
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils import _pytree as pytree

from torchax_core.entrances import entrance
from torchax_core.overrides import Declined
from torchax_core.tensor import DEVICE_TYPE, wrap_array
from torchax_core.vjp import DifferentiableProgram, differentiable_call

__all__ = ["pass_by", "watch"]

Arrays = Callable[..., tuple[Any, ...]]

_KEY = "FuncTorchDynamicLayerFrontMode"
_libraries: dict[Any, torch.library.Library] = {}
_counts: collections.Counter[Any] = collections.Counter()
_lock = threading.Lock()


class _Running(threading.local):
    overrides: frozenset[Any] = frozenset()


_running = _Running()


def watch(func: Any, chain: Callable[[Any], list[tuple[Any, Any]]]) -> None:
    """One more override of a composite op is in force. `chain(func)` gives those of this thread's environment, each with
    the kernel of a JAX function or None, the first to be asked first."""
    with _lock:
        _counts[func] += 1
        if _counts[func] == 1:
            namespace, _, name = func.name().partition("::")
            library = _libraries[func] = torch.library.Library(namespace, "IMPL")  # noqa: TOR901 - destroyed below
            library.impl(name, _kernel(func, chain), _KEY)


def pass_by(func: Any) -> None:
    """One override less; with the last of them, torch.func goes its own way again."""
    with _lock:
        _counts[func] -= 1
        if not _counts[func]:
            _libraries.pop(func)._destroy()


def _kernel(func: Any, chain: Callable[[Any], list[tuple[Any, Any]]]) -> Callable[..., Any]:
    @entrance
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, torch.Tensor) and leaf.device.type == DEVICE_TYPE for leaf in leaves):
            before = _running.overrides
            for override, kernel in chain(func):
                if override in before:  # what an override itself calls is for the next one
                    continue
                _running.overrides = before | {override}
                try:
                    if kernel is None:
                        result = override.definition.body(*args, **kwargs)
                    else:
                        result = _transformable(kernel, args, kwargs)
                except Declined:
                    result = NotImplemented
                finally:
                    _running.overrides = before
                if result is not NotImplemented:
                    return result
        return func.decompose(*args, **kwargs)

    return run


def _transformable(kernel: Any, args: Any, kwargs: Any) -> Any:
    """Call a kernel on tensors that torch.func has wrapped."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    shape: list[Any] = []

    def of_arrays(*arrays: Any) -> tuple[Any, ...]:
        full = list(leaves)
        for at, array in zip(places, arrays, strict=True):
            full[at] = wrap_array(array)
        inner_args, inner_kwargs = pytree.tree_unflatten(full, spec)
        results, result_spec = pytree.tree_flatten(kernel(inner_args, inner_kwargs))
        shape[:] = [result_spec]
        return tuple(result._array() for result in results)

    results = _Call.apply(of_arrays, *[leaves[i] for i in places])
    return pytree.tree_unflatten(list(results), shape[0])


def _inexact(values: Sequence[Any]) -> list[int]:
    return [i for i, value in enumerate(values) if jnp.issubdtype(value.dtype, jnp.inexact)]


def _of_inexact(fn: Arrays, values: Sequence[Any]) -> tuple[Arrays, list[Any]]:
    """`fn` from its inexact arguments to its inexact results, the others held fast; and those arguments."""
    wanted = _inexact(values)

    def run(*chosen: Any) -> tuple[Any, ...]:
        full = list(values)
        for at, value in zip(wanted, chosen, strict=True):
            full[at] = value
        results = fn(*full)
        return tuple(results[i] for i in _inexact(results))

    return run, [values[i] for i in wanted]


class _Call(torch.autograd.Function):
    """A function of arrays to a tuple of arrays, as a function of tensors that torch.func can transform."""

    @staticmethod
    def forward(fn: Arrays, *tensors: torch.Tensor) -> Any:
        with jax.enable_x64(True):  # as everything that runs for an op
            return differentiable_call(DifferentiableProgram(fn, jit=False), tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.fn, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.inputs = [i for i, tensor in enumerate(tensors) if _differentiable(tensor)]
        ctx.outputs = [i for i, tensor in enumerate(output) if _differentiable(tensor)]
        ctx.mark_non_differentiable(*[tensor for tensor in output if not _differentiable(tensor)])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        tensors = ctx.saved_tensors

        def pull_back(*values: Any) -> tuple[Any, ...]:
            fn, chosen = _of_inexact(ctx.fn, values[: len(tensors)])
            return jax.vjp(fn, *chosen)[1](tuple(values[len(tensors) :]))

        gradients: list[Any] = [None] * len(tensors)
        found = _Call.apply(pull_back, *tensors, *[cotangents[i] for i in ctx.outputs])
        for at, gradient in zip(ctx.inputs, found, strict=True):
            gradients[at] = gradient
        return (None, *gradients)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        tensors = ctx.saved_tensors

        def push_forward(*values: Any) -> tuple[Any, ...]:
            fn, chosen = _of_inexact(ctx.fn, values[: len(tensors)])
            return jax.jvp(fn, tuple(chosen), tuple(values[len(tensors) :]))[1]

        found = iter(_Call.apply(push_forward, *tensors, *[tangents[i] for i in ctx.inputs]))
        return tuple(next(found) if i in ctx.outputs else None for i in range(max(ctx.outputs, default=-1) + 1))

    @staticmethod
    def vmap(info: Any, in_dims: Any, fn: Arrays, *tensors: torch.Tensor) -> Any:
        batched = jax.vmap(fn, in_axes=tuple(in_dims[1:]), axis_size=info.batch_size)
        results = _Call.apply(batched, *tensors)
        return results, (0,) * len(results)


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
