"""Products of Householder reflectors, with derivatives of a few matrix products.

torch's formulas go reflector by reflector, so that a program is as long as they are many; JAX has none. Written as
H1 H2 ... Hk = 1 - V T V^H, with the vectors in V's columns and T upper triangular, the product is JAX's to differentiate.

Source: Schreiber and Van Loan, "A storage-efficient WY representation for products of Householder transformations", 1989.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["householder_product", "ormqr"]

_matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def _vectors_and_factor(reflectors: jax.Array, tau: jax.Array) -> tuple[jax.Array, jax.Array]:
    """V (..., m, k) and T (..., k, k)."""
    m, k = reflectors.shape[-2], tau.shape[-1]
    v = jnp.tril(reflectors[..., :k], -1) + jnp.eye(m, k, dtype=reflectors.dtype)
    rows = tau[..., None]
    system = rows * jnp.triu(_matmul(jnp.conj(v.mT), v), 1)  # less its diagonal of ones
    scaled = rows * jnp.eye(k, dtype=tau.dtype)
    return v, lax.linalg.triangular_solve(system, scaled, left_side=True, lower=False, unit_diagonal=True)


def _columns(reflectors: jax.Array, tau: jax.Array) -> jax.Array:
    m, n = reflectors.shape[-2:]
    v, t = _vectors_and_factor(reflectors, tau)
    return jnp.eye(m, n, dtype=v.dtype) - _matmul(v, _matmul(t, jnp.conj(v[..., :n, :].mT)))


def _applied(reflectors: jax.Array, tau: jax.Array, other: jax.Array, left: bool, transpose: bool) -> jax.Array:
    v, t = _vectors_and_factor(reflectors, tau)
    t = jnp.conj(t.mT) if transpose else t
    adjoint = jnp.conj(v.mT)
    if left:
        return other - _matmul(v, _matmul(t, _matmul(adjoint, other)))
    return other - _matmul(_matmul(_matmul(other, v), t), adjoint)


@jax.custom_jvp
def householder_product(reflectors: jax.Array, tau: jax.Array) -> jax.Array:
    """The first n columns of the product of k reflectors: (..., m, n) and (..., k) to (..., m, n); m >= n >= k."""
    return lax.linalg.householder_product(reflectors, tau)


@householder_product.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return householder_product(*primals), jax.jvp(_columns, primals, tangents)[1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def ormqr(reflectors: jax.Array, tau: jax.Array, other: jax.Array, left: bool, transpose: bool) -> jax.Array:
    """`Q @ other`, or `other @ Q` unless `left`, with the square Q (..., m, m) of k reflectors; its adjoint if `transpose`."""
    return lax.linalg.ormqr(reflectors, tau, other, left=left, transpose=transpose)


@ormqr.defjvp
def _(left: bool, transpose: bool, primals: Any, tangents: Any) -> Any:
    applied = functools.partial(_applied, left=left, transpose=transpose)
    return ormqr(*primals, left, transpose), jax.jvp(applied, primals, tangents)[1]
