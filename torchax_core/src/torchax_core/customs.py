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
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._functorch import autograd_function as vmapped
from torch.autograd.function import FunctionMeta, _SingleLevelFunction
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointFunction

from torchax_core import trees
from torchax_core.shared_patches import SharedPatches, patch
from torchax_core.tensor import Tensor, active, wrap_array

__all__ = ["put", "tracing_functions"]

_in_other_words: dict[Any, Callable[..., Any]] = {}


def put(cls: Any, function: Callable[..., Any]) -> None:
    """Inside a trace, let `cls.apply` of this torch.autograd.Function, which asks for values, be `function`, made of ops."""
    _in_other_words[cls] = function


_original: Any = torch.autograd.Function.__dict__["apply"]


@SharedPatches
def tracing_functions(stack: contextlib.ExitStack) -> None:
    """Watch `Function.apply` while any thread traces; calls of other threads go straight on."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        original = _original.__get__(None, cls)
        if active.trace is None or cls.__module__.startswith("torchax_") or under_torch_func(args):
            return original(*args, **kwargs)
        return (_in_other_words.get(cls) or functools.partial(_apply, cls, original))(*args, **kwargs)

    patch(stack, torch.autograd.Function, "apply", classmethod(apply))
    patch(stack, FunctionMeta, "__getattribute__", _asked)


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

    def kept(self) -> tuple[Any, dict[str, Any]]:
        """The tensors saved, and what else was put here."""
        return self.saved_tensors, {n: v for n, v in self.__dict__.items() if n not in _OF_CONTEXT}


def _apply(cls: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    if (
        cls is CheckpointFunction
    ):  # torch.utils.checkpoint(use_reentrant=True): the same values and gradients, unsaved or not
        run, _, *inner = args
        return run(*inner)
    if _wrapped(cls, args):
        _taken.known = cls
        return original(*args, **kwargs)
    before = _before(args)
    recorded = torch.is_grad_enabled() and any(a.requires_grad for _, a, _ in before)
    if not recorded and _has_jvp(cls):
        return _with_jvp(cls, args, kwargs, before)
    if recorded:
        _taken.known = cls
        result = original(*args, **kwargs)
        outputs = [o for o in _tuple(result) if isinstance(o, Tensor)]
        context = next((o.grad_fn for o in outputs if o.grad_fn is not None), None)
        if context is None:
            _wrapped(cls, _tuple(result))
            return result
        saved, attributes = context.saved_tensors, dict(context.__dict__)  # type: ignore[attr-defined]
        _attach(cls, before, result, (saved, attributes), tuple(context.needs_input_grad), True)  # type: ignore[attr-defined]
        return result
    made = _Context(tuple(isinstance(a, Tensor) and _is_inexact(a) for a in args))
    with torch.no_grad():
        result = _run_forward(cls, made, args, kwargs)
    _attach(cls, before, result, made.kept(), made.needs_input_grad, made.materialize)
    return result


def _wrapped(cls: Any, values: Sequence[Any]) -> bool:
    """Whether any is a tensor made of ours, as a DTensor is. torch differentiates those; jax cannot, and is not to be asked."""
    for value in values:
        if isinstance(value, torch.Tensor) and not isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
            active.trace.torch_only.add(f"{cls.__name__}, of a {type(value).__name__}")
            return True
    return False


def _before(args: Sequence[Any]) -> list[tuple[int, Tensor, Any]]:
    """Number, tensor and array of each argument that has derivatives."""
    tensors = [(i, a) for i, a in enumerate(args) if isinstance(a, Tensor) and _is_inexact(a)]
    for _, tensor in tensors:
        active.trace.lift(tensor)
    return [(i, tensor, tensor._array()) for i, tensor in tensors]


def _attach(
    cls: Any, before: list[Any], result: Any, kept: tuple[Any, Any], needs: tuple[bool, ...], materialize: bool
) -> None:
    """Let the derivatives of what a Function has returned be its backward's.

    before: number, tensor and array of each argument that has derivatives, as they were before the forward.
    kept:   the tensors that the forward has saved, and what else it has put into its context.
    """
    saved, attributes = kept
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


# -- an `apply` taken before the trace --------------------------------------------------------------


class _Taken(threading.local):
    """Of the C++ call of a Function that is about to begin in this thread: `known`, its class, if `_apply` makes it; `entered`,
    its class, if nobody of ours does; and what its forward has left for its setup_context."""

    known: Any = None
    entered: Any = None
    pending: Any = None


_taken = _Taken()


def _asked(cls: Any, name: str) -> Any:
    """`cls.name`, of a Function, while something traces. C++'s apply, which somebody may have taken before anything was traced
    (`straight = Straight.apply`), asks for `_backward_cls`, then for `forward`: it is given one that attaches the backward."""
    value = type.__getattribute__(cls, name)
    if name == "_backward_cls":
        entered = active.trace is not None and _taken.known is not cls and not cls.__module__.startswith("torchax_")
        _taken.entered = cls if entered and issubclass(cls, torch.autograd.Function) else None
        _taken.known = _taken.pending = None
    elif name == "forward" and _taken.entered is cls:
        _taken.entered = None
        return functools.partial(_forward_of_taken, cls, value)
    elif name == "setup_context" and _taken.pending is not None and _taken.pending[0] is cls:
        return functools.partial(_setup_of_taken, cls, value)
    return value


def _forward_of_taken(cls: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """A forward as C++ calls it: with its context, or without where there is a setup_context."""
    apart = cls.setup_context is not _SingleLevelFunction.setup_context
    inputs = args if apart else args[1:]
    if under_torch_func(inputs) or cls is CheckpointFunction:  # jax differentiates what that one runs
        return forward(*args, **kwargs)
    if _wrapped(cls, inputs):
        return forward(*args, **kwargs)
    before = _before(inputs)
    recorded = any(a.requires_grad for _, a, _ in before)
    if not recorded and _has_jvp(cls):
        return _with_jvp(cls, inputs, kwargs, before)
    if apart:
        result = forward(*args, **kwargs)
        _taken.pending = (cls, before, recorded)
        return result
    context = args[0] if recorded else _unrecorded(inputs)
    result = forward(context, *inputs, **kwargs)
    _attach_of_taken(cls, before, result, context)
    return result


def _setup_of_taken(cls: Any, setup_context: Any, context: Any, inputs: Any, output: Any) -> Any:
    _, before, recorded = _taken.pending
    _taken.pending = None
    context = context if recorded else _unrecorded(inputs)
    setup_context(context, inputs, output)
    _attach_of_taken(cls, before, output, context)


def _unrecorded(inputs: Any) -> _Context:
    return _Context(tuple(isinstance(a, Tensor) and _is_inexact(a) for a in inputs))


def _attach_of_taken(cls: Any, before: list[Any], result: Any, context: Any) -> None:
    if isinstance(context, _Context):
        _attach(cls, before, result, context.kept(), context.needs_input_grad, context.materialize)
    else:
        _attach(cls, before, result, (context.to_save or (), dict(context.__dict__)), context.needs_input_grad, True)


def _has_jvp(cls: Any) -> bool:
    """Whether a Function defines jvp. Those that torch.vmap makes out of others have one that asks the other's."""
    if cls.jvp is torch.autograd.Function.jvp:
        return False
    if cls.__module__ != vmapped.__name__:
        return True
    behind = [
        c for c in (cell.cell_contents for cell in cls.jvp.__closure__ or ()) if isinstance(c, type) and c is not cls
    ]
    return all(_has_jvp(c) for c in behind if issubclass(c, torch.autograd.Function))


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
