"""torch.autograd.Functions inside a trace: jax, which will differentiate the program, is given their own backward.

The forward runs as it is. Its results then pass through a function that is the identity to jax, and whose vjp is the
Function's backward, run on what its context had saved. So reverse-mode derivatives of any order are torch's; forward-mode
ones (jax.jvp, and jax.hessian, which is forward over reverse) raise jax's TypeError: there is no rule for them.
A Function that defines `jvp` has such a rule, and is jax.custom_jvp's: forward-mode is its jvp, reverse-mode the transpose of
that (its backward, where torch records the call: one of its tensors requires gradients).
Source: https://docs.jax.dev/en/latest/_autosummary/jax.custom_vjp.html
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.autograd.function import _SingleLevelFunction
from torch.utils.checkpoint import CheckpointFunction

from torchax_core import trees
from torchax_core.tensor import Tensor, active, wrap_array

__all__ = ["tracing_functions"]

_lock = threading.RLock()
_depth = 0


@contextlib.contextmanager
def tracing_functions() -> Iterator[None]:
    """Watch `Function.apply` while any thread traces; calls of other threads go straight on."""
    global _depth
    with _lock:
        if _depth == 0:
            _install()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                torch.autograd.Function.apply = _original  # type: ignore[method-assign]


_original: Any = torch.autograd.Function.__dict__["apply"]


def _install() -> None:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        trace = active.trace
        if trace is None or cls.__module__.startswith("torchax_") or under_torch_func(args):
            return _original.__get__(None, cls)(*args, **kwargs)
        return _apply(cls, _original.__get__(None, cls), args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]


def under_torch_func(args: tuple[Any, ...]) -> bool:
    """Whether torch.func differentiates or batches a call, which is then its own affair: it calls again, inside, or refuses."""
    if not torch._C._are_functorch_transforms_active():
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return any(isinstance(leaf, torch.Tensor) and wrapped(leaf) for leaf in trees.flatten(args)[0])


class _Context:
    """What a Function's forward is given as `ctx`, and its backward again."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.saved_for_forward: tuple[Any, ...] = ()
        self.materialize = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        self.saved_for_forward = tensors

    def mark_dirty(self, *tensors: Any) -> None:
        """Nothing to do: what is written is seen."""

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Nothing to do: no cotangent comes from where nothing is differentiated."""

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize = value


def _apply(cls: Any, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if (
        cls is CheckpointFunction
    ):  # torch.utils.checkpoint(use_reentrant=True): the same values and gradients, unsaved or not
        run, _, *inner = args
        return run(*inner)
    before = [(i, a, a._array()) for i, a in enumerate(args) if isinstance(a, Tensor) and _is_inexact(a)]
    for _, tensor, _ in before:
        active.trace.lift(tensor)
    before = [(i, a, a._array()) for i, a, _ in before]
    recorded = torch.is_grad_enabled() and any(a.requires_grad for _, a, _ in before)
    if not recorded and cls.jvp is not torch.autograd.Function.jvp:
        return _with_jvp(cls, args, kwargs, before)
    result = original(*args, **kwargs) if recorded else None
    if recorded:
        outputs = [o for o in _tuple(result) if isinstance(o, Tensor)]
        context = next((o.grad_fn for o in outputs if o.grad_fn is not None), None)
        if context is None:
            return result
        saved, attributes = context.saved_tensors, dict(context.__dict__)  # type: ignore[attr-defined]
        needs = tuple(context.needs_input_grad)  # type: ignore[attr-defined]
        materialize = True
    else:
        made = _Context(tuple(isinstance(a, Tensor) and _is_inexact(a) for a in args))
        with torch.no_grad():
            result = _run_forward(cls, made, args, kwargs)
        saved, needs, materialize = made.saved_tensors, made.needs_input_grad, made.materialize
        attributes = {n: v for n, v in made.__dict__.items() if n not in _OF_CONTEXT}
    leaves, spec = trees.flatten((tuple(saved), attributes))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    residuals = [leaves[i]._array() for i in places]
    outputs = [o for o in _tuple(result) if isinstance(o, Tensor)]
    where = [i for i, o in enumerate(_tuple(result)) if isinstance(o, Tensor)]

    def backward(arrays: Any, cotangents: Any) -> Any:
        full = list(leaves)
        for i, array in zip(places, arrays, strict=True):
            full[i] = wrap_array(array)
        context = _Context(needs)
        context.saved_tensors, values = trees.unflatten(full, spec)
        context.__dict__.update(values)
        given: list[Any] = [None] * len(_tuple(result))
        for i, cotangent in zip(where, cotangents, strict=True):
            if cotangent.dtype != jax.dtypes.float0:
                given[i] = wrap_array(cotangent)
            elif materialize:
                given[i] = torch.zeros(cotangent.shape, device="jax")
        with torch.enable_grad():
            gradients = _tuple(cls.backward(context, *given))
        found = []
        for i, _, array in before:
            gradient = gradients[i] if i < len(gradients) else None
            if gradient is None:
                with jax.enable_x64(True):
                    found.append(jnp.zeros(array.shape, array.dtype))
            else:
                found.append(gradient._array().astype(array.dtype))
        return found

    # a result that was saved is, to derivatives of derivatives, one that this backward belongs to
    results = {id(o._array()): i for i, o in enumerate(outputs)}
    attached = _attached(backward, [results.get(id(r)) for r in residuals])(
        [jax.lax.stop_gradient(o._array()) for o in outputs], [a for _, _, a in before], residuals
    )
    for output, array in zip(outputs, attached, strict=True):
        output._write(array)
    return result


def _with_jvp(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], before: list[Any]) -> Any:
    """The Function's results, with derivatives by its jvp in either mode."""
    context = _Context(tuple(isinstance(a, Tensor) and _is_inexact(a) for a in args))
    with torch.no_grad():
        result = _run_forward(cls, context, args, kwargs)
    attributes = {n: v for n, v in context.__dict__.items() if n not in _OF_CONTEXT}
    leaves, spec = trees.flatten((tuple(context.saved_for_forward or context.saved_tensors), attributes))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    outputs = [o for o in _tuple(result) if isinstance(o, Tensor)]

    def tangents(arrays: Any, given: Any) -> Any:
        from torchax_core.purity import pure

        full = list(leaves)
        for i, array in zip(places, arrays, strict=True):
            full[i] = wrap_array(array)
        again = _Context(context.needs_input_grad)
        again.saved_tensors, values = trees.unflatten(full, spec)
        again.__dict__.update(values)
        tensors: list[Any] = [None] * len(args)
        for (i, _, _), tangent in zip(before, given, strict=True):
            tensors[i] = wrap_array(tangent)
        with pure():
            found = _tuple(cls.jvp(again, *tensors))
            found = tuple(found[i] for i, o in enumerate(_tuple(result)) if isinstance(o, Tensor))
            return [_zero(o._array()) if t is None else t._array() for o, t in zip(outputs, found, strict=True)]

    @jax.custom_jvp
    def attach(outputs: Any, inputs: Any, residuals: Any) -> Any:
        return outputs

    @attach.defjvp
    def _(primals: Any, given: Any) -> Any:
        outputs, inputs, residuals = primals
        outputs = attach(outputs, inputs, residuals)
        residuals = [r if n is None else outputs[n] for r, n in zip(residuals, saved_results, strict=True)]
        return outputs, tangents(residuals, given[1])

    # a result that was saved is, to derivatives of derivatives, one with this derivative
    results = {id(o._array()): i for i, o in enumerate(outputs)}
    saved_results = [results.get(id(leaves[i]._array())) for i in places]
    arrays = attach(
        [jax.lax.stop_gradient(o._array()) for o in outputs],
        [a for _, _, a in before],
        [leaves[i]._array() for i in places],
    )
    for output, array in zip(outputs, arrays, strict=True):
        output._write(array)
    return result


_OF_CONTEXT = ("saved_tensors", "saved_for_forward", "needs_input_grad", "materialize")


def _attached(backward: Any, saved_results: list[int | None]) -> Any:
    """(outputs, inputs, residuals) -> outputs, whose gradients go to `inputs`, by `backward(residuals, cotangents)`.

    saved_results: for each residual, the number of the output it is, or None.
    """
    from torchax_core.purity import pure

    @jax.custom_vjp
    def attach(outputs: Any, inputs: Any, residuals: Any) -> Any:
        return outputs

    def forward(outputs: Any, inputs: Any, residuals: Any) -> Any:
        outputs = attach(outputs, inputs, residuals)
        residuals = [r if n is None else outputs[n] for r, n in zip(residuals, saved_results, strict=True)]
        return outputs, (outputs, residuals)

    def transposed(kept: Any, cotangents: Any) -> Any:
        outputs, residuals = kept
        with pure():
            gradients = backward(residuals, cotangents)
        return [_zero(o) for o in outputs], gradients, [_zero(r) for r in residuals]

    attach.defvjp(forward, transposed)
    return attach


def _zero(array: Any) -> Any:
    """The cotangent of what gets none."""
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return np.zeros(array.shape, jax.dtypes.float0)
    with jax.enable_x64(True):
        return jnp.zeros(array.shape, array.dtype)


def _run_forward(cls: Any, context: _Context, args: Any, kwargs: Any) -> Any:
    if cls.setup_context is _SingleLevelFunction.setup_context:
        return cls.forward(context, *args, **kwargs)
    result = cls.forward(*args, **kwargs)
    cls.setup_context(context, args, result)
    return result


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
