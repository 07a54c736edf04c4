"""A function of arrays whose gradients are a program of their own, and whose every other derivative is a plain form's.

jax.custom_vjp takes forward mode from a function, and a loop whose length is a value has no reverse mode: neither has second
derivatives. Here a function has both modes and every order, and the one derivative that is common, the gradient, is written
by hand. The function's tangents are a primitive, which computes them by the plain form and whose transpose is the pull back;
the pull back's own derivatives are those of the plain form's. 64-bit types stay what they are, whatever JAX is set to when
a derivative is taken.

Source: https://docs.jax.dev/en/latest/notebooks/How_JAX_primitives_work.html
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

__all__ = ["with_pullback"]

Arrays = tuple[jax.Array, ...]


def with_pullback(
    function: Callable[..., Arrays],
    plain: Callable[..., Arrays],
    pull: Callable[[tuple[int, ...], Arrays, Arrays, Arrays], Arrays],
) -> tuple[Callable[..., Arrays], Callable[..., Arrays]]:
    """`function`, with derivatives; and its pull back, (wanted, arguments, results, cotangents) -> gradients, with its own.

    function: arrays -> arrays of floating types.
    plain:    the same in mathematics, made of what jax can differentiate.
    pull:     (positions of the arguments whose gradients are wanted, arguments, results, cotangents of all results) ->
              gradients of those arguments.
    """

    def plain_pull(wanted: tuple[int, ...], arguments: Arrays, results: Arrays, cotangents: Arrays) -> Arrays:
        with jax.enable_x64(True):
            _, pulled = jax.vjp(_of(plain, wanted, arguments), *(arguments[i] for i in wanted))
            return tuple(pulled(tuple(cotangents)))

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def differentiable_pull(wanted: tuple[int, ...], arguments: Arrays, results: Arrays, cotangents: Arrays) -> Arrays:
        return pull(wanted, arguments, results, cotangents)

    @differentiable_pull.defjvp
    def push_of_pull(wanted: tuple[int, ...], primals: Any, tangents: Any) -> Any:
        # the results' part in the derivative is in the arguments': the plain form makes them of these
        moving = _floating(primals)
        pulled = _of_leaves(functools.partial(plain_pull, wanted), primals, moving)
        leaves, given = jax.tree.leaves(primals), jax.tree.leaves(tangents)
        with jax.enable_x64(True):
            _, pushed = jax.jvp(pulled, tuple(leaves[i] for i in moving), tuple(given[i] for i in moving))
        return differentiable_pull(wanted, *primals), pushed

    @jax.custom_jvp
    def differentiable(*arguments: jax.Array) -> Arrays:
        return function(*arguments)

    @differentiable.defjvp
    def push(primals: Any, tangents: Any) -> Any:
        results = differentiable(*primals)
        moving, count = _floating(primals), len(primals)

        def tangents_of(*values: Any) -> Arrays:
            arguments, given = values[:count], values[count + len(results) :]
            with jax.enable_x64(True):
                return tuple(jax.jvp(_of(plain, moving, arguments), tuple(arguments[i] for i in moving), given)[1])

        def pulled(places: tuple[int, ...], *values: Any) -> Arrays:
            arguments, made, cotangents = values[:count], values[count : count + len(results)], values[-len(results) :]
            return tuple(differentiable_pull(tuple(moving[i] for i in places), arguments, made, cotangents))

        given = [tangents[i] for i in moving]
        made = _linear_p.bind(*primals, *results, *given, push=tangents_of, pull=pulled, kept=count + len(results))
        return results, tuple(made)

    return differentiable, differentiable_pull


def _floating(tree: Any) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(jax.tree.leaves(tree)) if jnp.issubdtype(x.dtype, jnp.inexact))


def _of(function: Callable[..., Any], moving: Sequence[int], arguments: Sequence[Any]) -> Callable[..., Any]:
    """`function` as one of the arguments at `moving`."""

    def of_moving(*chosen: Any) -> Any:
        full = list(arguments)
        for i, x in zip(moving, chosen, strict=True):
            full[i] = x
        return function(*full)

    return of_moving


def _of_leaves(function: Callable[..., Any], arguments: Any, moving: Sequence[int]) -> Callable[..., Any]:
    """`function` of pytrees as one of their leaves at `moving`."""
    leaves, structure = jax.tree.flatten(arguments)
    return _of(lambda *full: function(*structure.unflatten(full)), moving, leaves)


_linear_p = jec.Primitive("torchax_tangents")
"""Arrays of two kinds, the first `kept` of them what was kept, the rest tangents, to `push` of all; linear in the tangents,
with the transpose (places among the tangents, kept..., cotangents...) -> cotangents of those tangents, `pull`."""

_linear_p.multiple_results = True


def _run(*values: Any, push: Any, **_: Any) -> list[Any]:
    return list(push(*values))


def _shapes(*avals: Any, push: Any, **_: Any) -> list[Any]:
    return list(jax.make_jaxpr(push)(*avals).out_avals)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, push: Any, **_: Any) -> Any:
    moving = _floating(list(primals))
    given = tuple(ad.instantiate_zeros(tangents[i]) for i in moving)
    results, pushed = jax.jvp(_of(push, moving, primals), tuple(primals[i] for i in moving), given)
    return list(results), list(pushed)


def _transpose(cotangents: Sequence[Any], *values: Any, pull: Any, kept: int, **_: Any) -> list[Any]:
    places = tuple(i for i, x in enumerate(values[kept:]) if ad.is_undefined_primal(x))
    found = iter(pull(places, *values[:kept], *map(ad.instantiate_zeros, cotangents)))
    return [None] * kept + [next(found) if ad.is_undefined_primal(x) else None for x in values[kept:]]


def _batched(values: Sequence[Any], dims: Sequence[Any], *, push: Any, pull: Any, kept: int) -> Any:
    size = next(x.shape[d] for x, d in zip(values, dims, strict=True) if d is not None)
    # each tangent has the axis, so that each has a cotangent with it
    given = [batching.bdim_at_front(x, d, size) for x, d in zip(values[kept:], dims[kept:], strict=True)]
    axes = tuple(dims[:kept])

    def pushed(*full: Any) -> Any:
        return jax.vmap(push, in_axes=(*axes, *[0] * len(given)))(*full)

    def pulled(places: tuple[int, ...], *full: Any) -> Any:
        return jax.vmap(functools.partial(pull, places), in_axes=(*axes, *[0] * (len(full) - kept)))(*full)

    results = _linear_p.bind(*values[:kept], *given, push=pushed, pull=pulled, kept=kept)
    return results, [0] * len(results)


_linear_p.def_impl(_run)
_linear_p.def_abstract_eval(_shapes)
ad.primitive_jvps[_linear_p] = _jvp
ad.primitive_transposes[_linear_p] = _transpose
batching.primitive_batchers[_linear_p] = _batched
mlir.register_lowering(_linear_p, mlir.lower_fun(_run, multiple_results=True))
