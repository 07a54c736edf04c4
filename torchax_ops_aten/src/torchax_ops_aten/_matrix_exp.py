"""exp of matrices, with a derivative that costs three of it: by scaling, a Padé approximant, and squaring.

torch's formulas ask for the derivative L of exp at A in the direction E as exp([[A, E], [0, A]]) = [[exp(A), L], [0, exp(A)]],
eight times the work of exp(A). `matrix_exp` sees such a matrix when it runs, and computes its two blocks.

Sources: Higham, "The scaling and squaring method for the matrix exponential revisited", 2005, table 2.3; Al-Mohy and Higham,
"Computing the Fréchet derivative of the matrix exponential, with an application to condition number estimation", 2009.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

# By the precision they reach: the largest 1-norm they are exact for, coefficients.
_PADE = {
    4: (3.925724783138660, (17297280.0, 8648640.0, 1995840.0, 277200.0, 25200.0, 1512.0, 56.0, 1.0)),
    8: (
        5.371920351148152,
        (
            64764752532480000.0,
            32382376266240000.0,
            7771770303897600.0,
            1187353796428800.0,
            129060195264000.0,
            10559470521600.0,
            670442572800.0,
            33522128640.0,
            1323241920.0,
            40840800.0,
            960960.0,
            16380.0,
            182.0,
            1.0,
        ),
    ),
}

_SHARE = 0.75
"""The share of that norm up to which the derivative of an approximant is exact, too."""

_MOST_SQUARINGS = 64
"""In a derivative of JAX's, which keeps all squares; a matrix that takes more (a norm of 1e19) has NaN for a derivative."""


def matrix_exp(a: jax.Array) -> jax.Array:
    """exp of each matrix (..., n, n), in its floating or complex dtype; n > 0. Differentiable, in both modes."""
    return _exp(a)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _squarings(a: jax.Array, share: float) -> jax.Array:
    """How often to halve each matrix, and then square: (..., 1, 1), int32."""
    reach = share * _PADE[a.real.dtype.itemsize][0]
    norm = jnp.abs(a).sum(-2, keepdims=True).max(-1, keepdims=True)
    count = jnp.ceil(jnp.log2(jnp.maximum(norm / reach, 1)))
    return jnp.where(jnp.isfinite(count), count, 0).astype(jnp.int32)


def _halved(x: jax.Array, times: jax.Array) -> jax.Array:
    return x * jnp.exp2(-times.astype(x.real.dtype)).astype(x.dtype)


def _pade(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Denominator and numerator of the approximant."""
    square = _product(a, a)
    fourth = _product(square, square)
    powers = (jnp.eye(a.shape[-1], dtype=a.dtype), square, fourth, _product(fourth, square))
    coefficients = _PADE[a.real.dtype.itemsize][1]

    def combined(first: int, powers: tuple[jax.Array, ...]) -> jax.Array:
        terms = [c * x for c, x in zip(coefficients[first::2], powers, strict=False)]
        return sum(terms[1:], terms[0])

    even, odd = combined(0, powers), combined(1, powers)
    if len(coefficients) > 8:
        even, odd = (x + _product(powers[3], combined(8 + i, powers[1:])) for i, x in enumerate((even, odd)))
    odd = _product(a, odd)
    return even - odd, even + odd


def _divider(divisor: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """x -> inverse(divisor) @ x, by one factorization, of which no derivative is taken."""
    lu, _, permutation = lax.linalg.lu(lax.stop_gradient(divisor))

    def solve(b: jax.Array) -> jax.Array:
        y = jnp.take_along_axis(b, permutation[..., None], -2)
        y = lax.linalg.triangular_solve(lu, y, left_side=True, lower=True, unit_diagonal=True)
        return lax.linalg.triangular_solve(lu, y, left_side=True, lower=False)

    def solve_transposed(b: jax.Array) -> jax.Array:
        y = lax.linalg.triangular_solve(lu, b, left_side=True, lower=False, transpose_a=True)
        y = lax.linalg.triangular_solve(lu, y, left_side=True, lower=True, transpose_a=True, unit_diagonal=True)
        return jnp.take_along_axis(y, jnp.argsort(permutation, -1)[..., None], -2)

    return lambda b: lax.custom_linear_solve(
        lambda x: _product(divisor, x),
        b,
        solve=lambda _, b: solve(b),
        transpose_solve=lambda _, b: solve_transposed(b),
    )


def _squared(pair: tuple[jax.Array, jax.Array], due: jax.Array) -> tuple[jax.Array, jax.Array]:
    """exp(2 A) and its derivative from exp(A) and its, where a squaring is due."""
    x, derivative = pair
    return jnp.where(due, _product(x, x), x), jnp.where(
        due, _product(x, derivative) + _product(derivative, x), derivative
    )


def _started(a: jax.Array, direction: jax.Array, times: jax.Array) -> tuple[jax.Array, jax.Array]:
    """exp, and its derivative in a direction, of matrices halved so many times."""
    (divisor, dividend), (by_divisor, by_dividend) = jax.jvp(_pade, (_halved(a, times),), (_halved(direction, times),))
    divide = _divider(divisor)
    x = divide(dividend)
    return x, divide(by_dividend - _product(by_divisor, x))


def _exp_alone(a: jax.Array) -> jax.Array:
    times = _squarings(a, 1)
    divisor, dividend = _pade(_halved(a, times))
    x = _divider(divisor)(dividend)
    return lax.fori_loop(0, times.max(), lambda i, x: jnp.where(i < times, _product(x, x), x), x)


def _quarters(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    half = a.shape[-1] // 2
    return a[..., :half, :half], a[..., :half, half:], a[..., half:, :half], a[..., half:, half:]


def _exp_of_quarters(a: jax.Array) -> jax.Array:
    """exp of [[A, E], [0, A]]."""
    first, direction, zero, _ = _quarters(a)
    times = _squarings(first, _SHARE)
    start = _started(first, direction, times)
    x, derivative = lax.fori_loop(0, times.max(), lambda i, pair: _squared(pair, i < times), start)
    return jnp.concatenate([jnp.concatenate([x, derivative], -1), jnp.concatenate([zero, x], -1)], -2)


@jax.custom_jvp
def _exp(a: jax.Array) -> jax.Array:
    if a.shape[-1] % 2:
        return _exp_alone(a)
    first, _, zero, second = _quarters(a)
    return lax.cond(jnp.all(zero == 0) & jnp.all(first == second), _exp_of_quarters, _exp_alone, a)


@_exp.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # JAX goes back through loops of a known length alone
    (a,), (direction,) = primals, tangents
    times = _squarings(a, _SHARE)

    def step(pair: tuple[jax.Array, jax.Array], i: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        return lax.cond(i < times.max(), lambda pair: _squared(pair, i < times), lambda pair: pair, pair), None

    (x, derivative), _ = lax.scan(step, _started(a, direction, times), jnp.arange(_MOST_SQUARINGS, dtype=jnp.int32))
    return x, derivative * jnp.where(times > _MOST_SQUARINGS, jnp.nan, 1).astype(a.dtype)
