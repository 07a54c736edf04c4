"""JAX derivatives for lowerings, by torch's formulas where what JAX makes of a body is none, NaN, or another side of a kink.

torch's autograd has formulas of its own, and calls their `*_backward` ops. JAX differentiates the lowerings themselves where the
backward of a compiled function is taken outside of it, and under `jax.grad` and the like.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["absolute", "derivatives", "hermitian", "root"]

F = TypeVar("F", bound=Callable[..., Any])


def derivatives(**formulas: Callable[..., Any]) -> Callable[[F], F]:
    """Decorator: the derivatives of a body, which has one result, by the arguments named; those by all others are 0.

    formulas: (tangent, *the body's arguments by name) -> the part of the result's tangent, linear in `tangent`.
    """

    def decorate(body: F) -> F:
        signature = inspect.signature(body)

        @functools.wraps(body)
        def derived(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            arrays = {name: x for name, x in given.items() if isinstance(x, (jax.Array, np.ndarray, np.generic))}
            static = {name: x for name, x in given.items() if name not in arrays}

            # jax would take a derivative by what is closed over for an error, so that all arrays are arguments
            @jax.custom_jvp
            def of(arrays: dict[str, Any]) -> Any:
                return body(**arrays, **static)

            @of.defjvp
            def _(primals: Any, tangents: Any) -> Any:
                ((arrays,), (by,)) = primals, tangents
                parts = [formula(by[name], **arrays, **static) for name, formula in formulas.items() if name in arrays]
                value = of(arrays)
                return value, functools.reduce(jnp.add, parts).astype(value.dtype)

            return of(arrays)

        return derived  # type: ignore[return-value]

    return decorate


@derivatives(x=lambda tangent, x: tangent * jnp.sign(x))
def _magnitude(x: jax.Array) -> jax.Array:
    return jnp.abs(x)


def absolute(x: jax.Array) -> jax.Array:
    """`jnp.abs`, whose derivative at 0 is 0."""
    return _magnitude(x) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.abs(x)


def root(x: jax.Array, power: float = 0.5) -> jax.Array:
    """`x**power`, x >= 0, whose derivative at 0 is 0."""
    zero = x == 0
    inside = jnp.where(zero, 1, x)
    return jnp.where(zero, 0, jnp.sqrt(inside) if power == 0.5 else inside**power)


@derivatives(x=lambda tangent, x, lower: (tangent + jnp.conj(tangent.mT)) / 2)
def hermitian(x: jax.Array, lower: bool = True) -> jax.Array:
    """The Hermitian matrices (..., n, n) of which x holds one triangle, with Hermitian gradients, as torch has them.

    Written out, because JAX's derivatives take the mean of both triangles where its values are those of one.
    """
    kept, strict = (jnp.tril(x), jnp.tril(x, -1)) if lower else (jnp.triu(x), jnp.triu(x, 1))
    return kept + jnp.conj(strict.mT)
