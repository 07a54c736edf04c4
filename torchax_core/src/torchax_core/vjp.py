"""JAX functions under torch autograd: forward and backward come from jax.vjp, compiled once per function and signature.

Source: https://docs.jax.dev/en/latest/_autosummary/jax.vjp.html
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad

from torchax_core.entrances import entrance
from torchax_core.placement import laid_out_like, several_devices
from torchax_core.tensor import Tensor, active, wrap_array

__all__ = [
    "DifferentiableProgram",
    "Residuals",
    "conjugate",
    "differentiable_call",
    "forward_ad_level",
    "has_tangent",
    "x64_of",
]


def forward_ad_level() -> int:
    """The level of torch.autograd.forward_ad that is entered; -1 outside."""
    return forward_ad._current_level


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a dual tensor of the level entered."""
    return forward_ad.unpack_dual(tensor).tangent is not None


def conjugate(array: Any) -> Any:
    """torch's gradients are the conjugates of JAX's; also for real arrays, which stay as they are.

    Source: https://docs.pytorch.org/docs/stable/notes/autograd.html#autograd-for-complex-numbers
    """
    return jnp.conj(array) if jnp.issubdtype(array.dtype, jnp.complexfloating) else array


def x64_of(program: DifferentiableProgram) -> Any:
    """64-bit types on for lowerings; for a user's own function, JAX as it was set up when the function was called."""
    return jax.enable_x64(True) if program.x64 else contextlib.nullcontext()


def _noted(tensors: Any) -> Any:
    """`tensors`, made known to the trace under way, if there is one: they came about beside its kernels."""
    if active.trace is not None:
        active.trace.note(tensors)
    return tensors


@functools.cache
def _inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _is_inexact(array: Any) -> bool:
    return _inexact(array.dtype)


class Residuals:
    """What a forward leaves for its backward: a function of cotangents (jax.vjp's), but for arrays that are its inputs.

    jax.jit gives an input that it returns as a copy, and the caller has the inputs anyway.
    """

    def __init__(self, kept: Sequence[Any], layout: tuple[Any, tuple[int | None, ...]]) -> None:
        self.kept = kept
        self.layout = layout  # the function's structure as a pytree; for each leaf the input that it is

    @classmethod
    def of(cls, pullback: Any, inputs: Sequence[Any]) -> Residuals:
        """From the function, while the forward is traced with these inputs."""
        leaves, structure = jax.tree.flatten(pullback)
        positions = {id(array): i for i, array in enumerate(inputs)}
        places = tuple(positions.get(id(leaf)) for leaf in leaves)
        return cls([leaf for leaf, at in zip(leaves, places, strict=True) if at is None], (structure, places))

    def pullback(self, inputs: Sequence[Any]) -> Any:
        """The function, with the inputs of that call of the forward."""
        structure, places = self.layout
        kept = iter(self.kept)
        return structure.unflatten([next(kept) if at is None else inputs[at] for at in places])


jax.tree_util.register_pytree_node(
    Residuals, lambda r: (r.kept, r.layout), lambda layout, kept: Residuals(kept, layout)
)


class DifferentiableProgram:
    """A function of arrays to a tuple of arrays, with its forward and backward made for a set of inputs.

    fn:   arrays -> tuple of arrays.
    jit:  compile; False runs `fn` as plain Python each time (a user's function with effects of its own).
    wrap: makes the Tensor of each result.
    compile: instead of jax.jit, for a function that runs in no other way.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        jit: bool = True,
        wrap: Callable[[int, Any], Any] | None = None,
        compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        self.fn = fn
        self.jit = jit
        self.compile = compile
        self.alone = fn if compile is None else compile(fn)  # with no gradients
        self.x64 = jit or bool(jax.config.jax_enable_x64)
        self.wrap = wrap or (lambda index, array: wrap_array(array))
        self._made: dict[tuple[int, ...], tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._seconds: dict[tuple[int, ...], DifferentiableProgram] = {}
        self._pushed: dict[tuple[int, ...], DifferentiableProgram] = {}

    def made_for(self, wanted: tuple[int, ...]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """(forward, backward) differentiating with respect to the inputs at these positions.

        forward(*arrays) -> (results, Residuals); backward(pullback, cotangents) -> gradients of the wanted inputs.
        """
        pair = self._made.get(wanted)
        if pair is None:
            fn = self.fn

            def forward(*arrays: Any) -> Any:
                with x64_of(self):
                    results, pullback = jax.vjp(_of_wanted(fn, wanted, arrays), *[arrays[i] for i in wanted])
                    return results, Residuals.of(pullback, arrays)

            def backward(pullback: Any, cotangents: Sequence[Any]) -> Any:
                with x64_of(self):
                    return tuple(map(conjugate, pullback(tuple(map(conjugate, cotangents)))))

            pair = self._made[wanted] = self.compiled(forward), self.compiled(backward)
        return pair

    def compiled(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The forward or backward `fn`, run as this program is."""
        if self.compile is not None:
            return self.compile(fn)
        return jax.jit(fn, inline=True) if self.jit else fn

    def second(self, wanted: tuple[int, ...], count: int) -> DifferentiableProgram:
        """The backward as a function of (inputs..., cotangents of inexact results...), for create_graph."""
        program = self._seconds.get(wanted)
        if program is None:
            fn = self.fn

            def backward_of(*values: Any) -> Any:
                arrays, given = values[:count], values[count:]

                results, vjp = jax.vjp(_of_wanted(fn, wanted, arrays), *[arrays[i] for i in wanted])
                return tuple(map(conjugate, vjp(_full_cotangents(results, tuple(map(conjugate, given))))))

            program = self._seconds[wanted] = self._derived(backward_of)
        return program

    def pushed(self, wanted: tuple[int, ...], count: int) -> DifferentiableProgram:
        """Forward-mode: (inputs..., tangents of the wanted inputs...) -> tangents of the inexact results."""
        program = self._pushed.get(wanted)
        if program is None:
            fn = self.fn

            def tangents_of(*values: Any) -> Any:
                arrays, given = values[:count], values[count:]

                results, tangents = jax.jvp(_of_wanted(fn, wanted, arrays), tuple(arrays[i] for i in wanted), given)
                return tuple(t for r, t in zip(results, tangents, strict=True) if _is_inexact(r))

            program = self._pushed[wanted] = self._derived(tangents_of)
        return program

    def _derived(self, fn: Callable[..., Any]) -> DifferentiableProgram:
        """A program made of this one, which runs as this one does."""
        program = DifferentiableProgram(fn, jit=self.jit, compile=self.compile)
        program.x64 = self.x64
        return program


def _of_wanted(fn: Callable[..., Any], wanted: Sequence[int], arrays: Sequence[Any]) -> Callable[..., Any]:
    """`fn` as a function of the inputs at the positions `wanted`, the rest being `arrays`."""

    def of_wanted(*chosen: Any) -> Any:
        full = list(arrays)
        for at, value in zip(wanted, chosen, strict=True):
            full[at] = value
        return tuple(fn(*full))

    return of_wanted


def _full_cotangents(results: Sequence[Any], given: Sequence[Any]) -> tuple[Any, ...]:
    """Cotangents for all results: the given ones for the inexact, float0 zeros for the rest."""
    left = iter(given)
    return tuple(next(left) if _is_inexact(r) else np.zeros(r.shape, jax.dtypes.float0) for r in results)


class _Call(torch.autograd.Function):
    @staticmethod
    @entrance
    def forward(ctx: Any, program: Any, arrays: Any, wanted: Any, *tensors: torch.Tensor) -> Any:
        forward, _ = program.made_for(wanted)
        with x64_of(program):
            results, ctx.residuals = forward(*arrays)
        ctx.program, ctx.arrays, ctx.wanted = program, arrays, wanted
        ctx.avals = [r.aval for r in results]
        ctx.save_for_backward(*tensors)
        if forward_ad_level() >= 0:
            ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)
        if active.trace is not None:
            ctx.path = getattr(getattr(active.trace, "scopes", None), "path", "")  # of the module (scopes.py)
        wrapped = _noted(tuple(program.wrap(i, r) for i, r in enumerate(results)))
        exact = [w for w, a in zip(wrapped, ctx.avals, strict=True) if not _inexact(a.dtype)]
        if exact:
            ctx.mark_non_differentiable(*exact)
        return wrapped

    @staticmethod
    @entrance
    def backward(ctx: Any, *cotangents: Any) -> Any:
        tensors = ctx.saved_tensors  # raises torch's own error if one was written to meanwhile
        inexact = [i for i, a in enumerate(ctx.avals) if _inexact(a.dtype)]
        if torch.is_grad_enabled():  # create_graph
            return (None, None, None, *_second_order(ctx, tensors, cotangents, inexact))
        _, backward = ctx.program.made_for(ctx.wanted)
        given = []
        for i, aval in enumerate(ctx.avals):
            if i not in inexact:
                given.append(np.zeros(aval.shape, jax.dtypes.float0))
            elif cotangents[i] is None:
                with jax.enable_x64(True):
                    given.append(jnp.zeros(aval.shape, aval.dtype))
            else:
                cotangent = cotangents[i]._array()
                if cotangent.aval.dtype != aval.dtype:
                    with jax.enable_x64(True):
                        cotangent = cotangent.astype(aval.dtype)
                given.append(cotangent)
        path: str = getattr(ctx, "path", "") if active.trace is not None else ""
        if path:
            backward = jax.named_scope(f"backward/{path}")(backward)
        with x64_of(ctx.program):
            gradients = backward(ctx.residuals.pullback(ctx.arrays), given)
        if several_devices():  # XLA would have the whole gradient of a sharded weight on every device
            gradients = tuple(
                None if g is None else laid_out_like(g, ctx.arrays[at])
                for g, at in zip(gradients, ctx.wanted, strict=True)
            )
        return (None, None, None, *_noted([None if g is None else wrap_array(g) for g in gradients]))

    @staticmethod
    def jvp(ctx: Any, *given: Any) -> Any:
        operands: list[Any] = list(ctx.arrays)
        for at, tensor in zip(ctx.wanted, ctx.saved_tensors, strict=True):
            operands[at] = tensor
        for tensor, tangent in zip(ctx.saved_tensors, given[3:], strict=True):
            operands.append(torch.zeros_like(tensor) if tangent is None else tangent)
        program = ctx.program.pushed(ctx.wanted, len(ctx.arrays))
        tangents = iter(differentiable_call(program, operands))
        return tuple(next(tangents) if _inexact(a.dtype) else None for a in ctx.avals)


def _second_order(ctx: Any, tensors: Any, cotangents: Any, inexact: list[int]) -> list[Any]:
    operands: list[Any] = list(ctx.arrays)
    for at, tensor in zip(ctx.wanted, tensors, strict=True):
        operands[at] = tensor
    for i in inexact:
        if cotangents[i] is None:
            with jax.enable_x64(True):
                operands.append(jnp.zeros(ctx.avals[i].shape, ctx.avals[i].dtype))
        else:
            operands.append(cotangents[i])
    program = ctx.program.second(ctx.wanted, len(ctx.arrays))
    return list(differentiable_call(program, operands))


def differentiable_call(program: DifferentiableProgram, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Run `program` on Tensors and arrays; the results carry gradients to every Tensor that requires them."""
    trace = active.trace
    if trace is not None:
        trace.lift_all(operands)
    arrays = [o._array() if isinstance(o, Tensor) else o for o in operands]
    backward, forward = torch.is_grad_enabled(), forward_ad_level() >= 0
    # these have floating or complex values all, or torch would have refused
    wanted = tuple(
        i
        for i, o in enumerate(operands)
        if isinstance(o, Tensor) and (backward and o.requires_grad or forward and has_tangent(o))
    )
    if not wanted:
        with x64_of(program):
            results = program.alone(*arrays)
        return _noted(tuple(program.wrap(i, r) for i, r in enumerate(results)))
    return _Call.apply(program, arrays, wanted, *[operands[i] for i in wanted])  # type: ignore[no-any-return]
