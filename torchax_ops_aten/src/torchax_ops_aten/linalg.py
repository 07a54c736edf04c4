"""Matrix factorizations, solvers and what is made of them, and distances between rows (cdist, pdist).

All take batches: "(..., n, n)" is any number of n by n matrices. Where a factorization is not unique (the signs of
singular vectors, of R's diagonal) the results agree with CPU torch's up to that freedom. An `info` result is int32, one
per matrix: 0, or the 1-based index of the step that failed; `_linalg_check_errors` turns it into a LinAlgError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torchax_core.opset import OpSet
from torchax_core.promotion import SAME, opmath
from torchax_ops_aten import _reflectors
from torchax_ops_aten._derivatives import derivatives
from torchax_ops_aten._derivatives import hermitian as hermitian_of
from torchax_ops_aten._matrix_exp import matrix_exp

ops = OpSet("torchax_ops_aten.linalg")


def _adjoint(x: jax.Array) -> jax.Array:
    """The conjugate transpose of each matrix."""
    return jnp.conj(x.mT)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a @ b` in the full precision of their dtype, which accelerators otherwise lower for float32."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _eye(n: int, like: jax.Array) -> jax.Array:
    return jnp.eye(n, dtype=like.dtype)


def _batched(*matrices: jax.Array) -> list[jax.Array]:
    """`matrices`, (..., m, n) each with its own m and n, with their batch dimensions broadcast together."""
    batch = np.broadcast_shapes(*(x.shape[:-2] for x in matrices))
    return [jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in matrices]


def _none(like: jax.Array) -> jax.Array:
    """What torch returns for a factor that was not asked for: an empty vector."""
    return jnp.zeros((0,), like.dtype)


@ops.decomposition("aten::_linalg_check_errors", whole=False)
def linalg_check_errors(info, api_name, *, is_matrix):
    """Raises torch.linalg.LinAlgError, in torch's words for `api_name`, if any `info` is not 0.

    This waits for the result. Inside a jitted function it does nothing: what failed is NaN or infinite there.
    """
    if not isinstance(info.jax(), jax.core.Tracer):
        torch._linalg_check_errors(info.cpu(), api_name, is_matrix=is_matrix)


def _also_checked(op: str, body: Callable[..., Any], api_name: str) -> None:
    """Let the lowering `body` of `op`, called with `check_errors=True`, look at its last result, `info`."""

    @ops.data_dependent_case(
        op,
        when=lambda *args, check_errors=False, **kwargs: check_errors,
        instead="leave out `check_errors` and look at the `info` returned",
    )
    @functools.wraps(body)
    def checked(*args: Any, **kwargs: Any) -> Any:
        results = body(*args, **kwargs)
        info = torch.from_numpy(np.array(results[-1], np.int32))
        torch._linalg_check_errors(info, api_name, is_matrix=info.dim() == 0)
        return results


# -- eigenvalues and singular values -----------------------------------------------------------------------------------


@ops.lowering("aten::_linalg_svd")
def linalg_svd(A, full_matrices=False, compute_uv=True, *, driver=None):
    """Singular value decomposition, `A = U @ diag(S) @ Vh`.

    A:       (..., m, n); k = min(m, n).
    returns: U (..., m, k), S (..., k) falling and real, Vh (..., k, n); U and Vh square if `full_matrices`, and empty
             without `compute_uv`. `driver` names cusolver's algorithms and has no meaning here.
    """
    if not compute_uv:
        return _none(A), lax.linalg.svd(A, compute_uv=False), _none(A)
    return lax.linalg.svd(A, full_matrices=full_matrices)


# torch makes the next two of the whole decompositions for any subclass, as if gradients were wanted


@ops.lowering("aten::linalg_svdvals", composite_grad="decompose")
def linalg_svdvals(A, *, driver=None):
    """The singular values alone: (..., m, n) to (..., min(m, n)), falling and real."""
    return lax.linalg.svd(A, compute_uv=False)


@ops.lowering("aten::_linalg_eigvals")
@ops.lowering("aten::linalg_eigvals", composite_grad="decompose")
def linalg_eigvals(self):
    """The eigenvalues alone: (..., n, n) to complex (..., n)."""
    return lax.linalg.eig(self, compute_left_eigenvectors=False, compute_right_eigenvectors=False)[0]


@ops.lowering("aten::_linalg_eigh")
def linalg_eigh(A, UPLO="L", compute_v=True):
    """Eigenvalues and eigenvectors of a Hermitian matrix of which only one triangle is read.

    A:       (..., n, n); `UPLO` "L" or "U" names the triangle.
    returns: eigenvalues (..., n), rising and real; eigenvectors (..., n, n) in columns, or empty without `compute_v`.
    """
    vectors, values = lax.linalg.eigh(hermitian_of(A, UPLO.upper() == "L"), symmetrize_input=False)
    return values, vectors if compute_v else _none(A)


@ops.lowering("aten::linalg_eig")
def linalg_eig(self):
    """Eigenvalues (..., n) and eigenvectors (..., n, n) in columns, of norm 1, of a general matrix; both complex."""
    # JAX's derivative is right for what does not depend on the vectors' phases, which torch's refuses to be asked for
    values, vectors = lax.linalg.eig(self, compute_left_eigenvectors=False, enable_eigvec_derivs=True)
    return values, vectors


@ops.lowering("aten::linalg_polar")
def linalg_polar(A):
    """`A = U @ H`, U (..., m, n) with orthonormal columns and H (..., n, n) positive semidefinite; m >= n."""
    u, s, vh = lax.linalg.svd(A, full_matrices=False)
    return _product(u, vh), _product(_adjoint(vh) * s[..., None, :].astype(A.dtype), vh)


@ops.lowering("aten::linalg_matrix_sqrth")
def linalg_matrix_sqrth(self):
    """The positive-definite X with `X @ X = self`, for a Hermitian (..., n, n) of which the lower triangle is read.

    Negative eigenvalues count as 0, as in torch.
    """
    vectors, values = lax.linalg.eigh(hermitian_of(self), symmetrize_input=False)
    roots = jnp.sqrt(jnp.maximum(values, 0))
    return _product(vectors * roots[..., None, :].astype(self.dtype), _adjoint(vectors))


# -- QR and Householder reflectors -------------------------------------------------------------------------------------


@ops.lowering("aten::linalg_qr")
def linalg_qr(A, mode="reduced"):
    """`A = Q @ R`, Q with orthonormal columns and R upper triangular.

    A:       (..., m, n); k = min(m, n).
    returns: Q (..., m, k), R (..., k, n); Q (..., m, m), R (..., m, n) for "complete"; an empty Q for mode "r".
    """
    if mode == "r":
        return _none(A), jnp.linalg.qr(A, mode="r")
    return tuple(jnp.linalg.qr(A, mode=mode))


@ops.lowering("aten::geqrf")
def geqrf(self):
    """LAPACK's compact QR: R over the reflectors, (..., m, n), and their factors tau (..., min(m, n))."""
    reflectors, tau = jnp.linalg.qr(self, mode="raw")
    return reflectors.mT, tau


@ops.lowering("aten::linalg_householder_product", differentiable=True)
def linalg_householder_product(input, tau):
    """The first n columns of the product of k reflectors: (..., m, n) and (..., k) to (..., m, n); m >= n >= k."""
    return _reflectors.householder_product(input, tau)


@ops.lowering("aten::ormqr", differentiable=True)
def ormqr(self, input2, input3, left=True, transpose=False):
    """`Q @ input3`, or `input3 @ Q` unless `left`, with the square Q of k reflectors; with its adjoint if `transpose`.

    self, input2: (..., m, k) reflectors and (..., k) factors, as of `geqrf`; Q is (..., m, m).
    """
    batch = np.broadcast_shapes(self.shape[:-2], input3.shape[:-2])
    reflectors = jnp.broadcast_to(self, (*batch, *self.shape[-2:]))
    tau = jnp.broadcast_to(input2, (*batch, input2.shape[-1]))
    other = jnp.broadcast_to(input3, (*batch, *input3.shape[-2:]))
    return _reflectors.ormqr(reflectors, tau, other, left, transpose)


# -- Cholesky ----------------------------------------------------------------------------------------------------------


@ops.lowering("aten::linalg_cholesky_ex")
def linalg_cholesky_ex(self, *, upper=False, check_errors=False):
    """`self = L @ L.mH`, or `U.mH @ U` if `upper`, of a Hermitian positive-definite matrix; one triangle is read.

    self:    (..., n, n).
    returns: L (or U), NaN where it does not exist; info (...), the order of the first leading minor not positive.
    """
    if self.size == 0:
        return self, jnp.zeros(self.shape[:-2], jnp.int32)
    lower = lax.linalg.cholesky(hermitian_of(_adjoint(self) if upper else self), symmetrize_input=False)
    failed = jnp.isnan(jnp.diagonal(lower, axis1=-2, axis2=-1)).any(-1)
    info = lax.cond(
        failed.any(),
        lambda: jnp.where(failed, _first_bad_minor(_adjoint(self) if upper else self), 0),
        lambda: jnp.zeros(failed.shape, jnp.int32),
    )
    return _adjoint(lower) if upper else lower, info


_also_checked("aten::linalg_cholesky_ex", linalg_cholesky_ex, "linalg.cholesky_ex")


@ops.decomposition("aten::cholesky", whole=False)  # an op of torch before 2.14, which has removed it
def cholesky(self, upper=False):
    """`torch.linalg.cholesky` under its older name, by which its errors call it."""
    factor, info = torch.linalg.cholesky_ex(self, upper=upper)
    torch._linalg_check_errors(info, "cholesky", is_matrix=self.dim() == 2)
    return factor


def _first_bad_minor(a: jax.Array) -> jax.Array:
    """The 1-based index of the first pivot of a Cholesky factorization of (..., n, n) that is not positive.

    XLA only tells that a factorization failed, so the few that do are done again, slowly.
    """
    n = a.shape[-1]
    lower = jnp.tril(a)
    rest = lower + _adjoint(jnp.tril(a, -1))
    rows = jnp.arange(n)

    def step(k: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rest, info = state
        column = lax.dynamic_index_in_dim(rest, k, -1, keepdims=False)
        pivot = lax.dynamic_index_in_dim(column, k, -1, keepdims=False).real
        info = jnp.where((info == 0) & ~(pivot > 0), (k + 1).astype(jnp.int32), info)
        column = jnp.where(rows > k, column / jnp.sqrt(pivot)[..., None].astype(a.dtype), 0)
        return rest - column[..., :, None] * jnp.conj(column)[..., None, :], info

    return lax.fori_loop(0, n, step, (rest, jnp.zeros(a.shape[:-2], jnp.int32)))[1]


@ops.lowering("aten::cholesky_solve")
def cholesky_solve(self, input2, upper=False):
    """X with `A @ X = self`, where `A = L @ L.mH`: `self` (..., n, k), and L (or U = L.mH, if `upper`) `input2`."""
    rhs, factor = _batched(self, input2)
    first = {"left_side": True, "lower": not upper, "transpose_a": upper, "conjugate_a": upper}
    then = {"left_side": True, "lower": not upper, "transpose_a": not upper, "conjugate_a": not upper}
    return lax.linalg.triangular_solve(factor, lax.linalg.triangular_solve(factor, rhs, **first), **then)


@ops.lowering("aten::_cholesky_solve_helper")
def cholesky_solve_helper(self, A, upper):
    return cholesky_solve(self, A, upper)


@ops.lowering("aten::cholesky_inverse")
def cholesky_inverse(self, upper=False):
    """The inverse of `L @ L.mH` (of `U.mH @ U`, if `upper`), from the factor `self` (..., n, n)."""
    return cholesky_solve(_eye(self.shape[-1], self), self, upper)


# -- triangular systems ------------------------------------------------------------------------------------------------


@ops.lowering("aten::linalg_solve_triangular")
def linalg_solve_triangular(self, B, *, upper, left=True, unitriangular=False):
    """X with `self @ X = B` (`X @ self = B` unless `left`): triangular (..., n, n), B (..., n, k), or (..., k, n)."""
    a, b = _batched(self, B)
    return lax.linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)


@ops.lowering("aten::triangular_solve")
def triangular_solve(self, A, upper=True, transpose=False, unitriangular=False):
    """X with `A @ X = self`, or `A.mT @ X = self` if `transpose`; and A, with the batch dimensions of X."""
    b, a = _batched(self, A)
    x = lax.linalg.triangular_solve(
        a, b, left_side=True, lower=not upper, transpose_a=transpose, unit_diagonal=unitriangular
    )
    return x, a


# -- LU ----------------------------------------------------------------------------------------------------------------


def _lu(a: jax.Array, pivot: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The compact LU of (..., m, n), its 1-based pivots (..., min(m, n)), and the permutation of rows (..., m)."""
    if pivot:
        lu, pivots, permutation = lax.linalg.lu(a)
        return lu, pivots + 1, permutation
    m, n = a.shape[-2:]
    rows, columns = jnp.arange(m)[:, None], jnp.arange(n)

    def eliminate(k: jax.Array, a: jax.Array) -> jax.Array:
        row = lax.dynamic_index_in_dim(a, k, -2)
        column = lax.dynamic_index_in_dim(a, k, -1)
        factors = column / lax.dynamic_index_in_dim(row, k, -1)
        below = rows > k
        a = jnp.where(below & (columns == k), factors, a)
        return jnp.where(below & (columns > k), a - factors * row, a)

    steps = min(m, n)
    lu = lax.fori_loop(0, steps, eliminate, a)
    batch = a.shape[:-2]
    pivots = jnp.broadcast_to(jnp.arange(1, steps + 1, dtype=jnp.int32), (*batch, steps))
    return lu, pivots, jnp.broadcast_to(jnp.arange(m, dtype=jnp.int32), (*batch, m))


def _lower_and_upper(lu: jax.Array) -> tuple[jax.Array, jax.Array]:
    """L (..., m, k) with ones on its diagonal, and U (..., k, n), from the compact (..., m, n)."""
    m, n = lu.shape[-2:]
    k = min(m, n)
    return jnp.tril(lu[..., :, :k], -1) + jnp.eye(m, k, dtype=lu.dtype), jnp.triu(lu[..., :k, :])


def _permutation_matrix(permutation: jax.Array, dtype: Any) -> jax.Array:
    """P (..., m, m) with `(P.mT @ x)[i] = x[permutation[i]]`."""
    return jax.nn.one_hot(permutation, permutation.shape[-1], dtype=dtype, axis=-2)


def _first_zero_pivot(lu: jax.Array) -> jax.Array:
    """The 1-based index of the first zero on U's diagonal, or 0: LAPACK's `info`."""
    zero = jnp.diagonal(lu, axis1=-2, axis2=-1) == 0
    if zero.shape[-1] == 0:
        return jnp.zeros(lu.shape[:-2], jnp.int32)
    return jnp.where(zero.any(-1), lax.argmax(zero, zero.ndim - 1, jnp.int32) + 1, 0)


@ops.lowering("aten::linalg_lu")
def linalg_lu(A, *, pivot=True):
    """`A = P @ L @ U`: (..., m, n) to P (..., m, m), L (..., m, k), U (..., k, n); P empty unless `pivot`."""
    lu, _, permutation = _lu(A, pivot)
    return _permutation_matrix(permutation, A.dtype) if pivot else _none(A), *_lower_and_upper(lu)


@ops.lowering("aten::linalg_lu_factor_ex")
def linalg_lu_factor_ex(A, *, pivot=True, check_errors=False):
    """LAPACK's compact LU: L and U in one (..., m, n), 1-based int32 row interchanges (..., min(m, n)), info (...)."""
    lu, pivots, _ = _lu(A, pivot)
    return lu, pivots, _first_zero_pivot(lu)


_also_checked("aten::linalg_lu_factor_ex", linalg_lu_factor_ex, "torch.linalg.lu_factor_ex")


@ops.lowering("aten::lu_unpack")
def lu_unpack(LU_data, LU_pivots, unpack_data=True, unpack_pivots=True):
    """P, L and U of the compact LU; those not asked for are empty."""
    m = LU_data.shape[-2]
    none = _none(LU_data)
    lower, upper = _lower_and_upper(LU_data) if unpack_data else (none, none)
    if not unpack_pivots:
        return none, lower, upper
    permutation = lax.linalg.lu_pivots_to_permutation(LU_pivots - 1, m)
    return _permutation_matrix(permutation, LU_data.dtype), lower, upper


@ops.lowering("aten::linalg_lu_solve")
def linalg_lu_solve(LU, pivots, B, *, left=True, adjoint=False):
    """X with `A @ X = B`, or `X @ A = B` unless `left`, from A's compact LU; with A's adjoint for A if `adjoint`.

    LU, pivots: (..., n, n) and (..., n), as of `linalg_lu_factor_ex`. B: (..., n, k), or (..., k, n) unless `left`.
    """
    if not left:
        return _adjoint(linalg_lu_solve(LU, pivots, _adjoint(B), adjoint=not adjoint))
    permutation = lax.linalg.lu_pivots_to_permutation(pivots - 1, LU.shape[-1])
    lu, b, order = _batched(LU, B, permutation[..., None])
    if adjoint:
        y = lax.linalg.triangular_solve(lu, b, left_side=True, lower=False, transpose_a=True, conjugate_a=True)
        y = lax.linalg.triangular_solve(
            lu, y, left_side=True, lower=True, transpose_a=True, conjugate_a=True, unit_diagonal=True
        )
        return jnp.take_along_axis(y, jnp.argsort(order, axis=-2), axis=-2)
    y = jnp.take_along_axis(b, order, axis=-2)
    y = lax.linalg.triangular_solve(lu, y, left_side=True, lower=True, unit_diagonal=True)
    return lax.linalg.triangular_solve(lu, y, left_side=True, lower=False)


@ops.lowering("aten::linalg_inv_ex")
def linalg_inv_ex(A, *, check_errors=False):
    """The inverse of (..., n, n), and info (...): the index of the first zero pivot."""
    lu, pivots, _ = _lu(A, pivot=True)
    return linalg_lu_solve(lu, pivots, _eye(A.shape[-1], A)), _first_zero_pivot(lu)


_also_checked("aten::linalg_inv_ex", linalg_inv_ex, "linalg.inv_ex")


@ops.lowering("aten::_linalg_solve_ex")
def linalg_solve_ex(A, B, *, left=True, check_errors=False):
    """X with `A @ X = B` (`X @ A = B` unless `left`), with A's compact LU, pivots and info.

    A: (..., n, n). B: (..., n, k), or (..., k, n) unless `left`; or vectors, if its shape is A's without the last size.
    """
    lu, pivots, info = linalg_lu_factor_ex(A)
    vectors = B.ndim == 1 or (A.ndim - 1 == B.ndim and B.shape == A.shape[:-1])
    x = linalg_lu_solve(lu, pivots, B[..., None] if vectors else B, left=left)
    return x[..., 0] if vectors else x, lu, pivots, info


_also_checked("aten::_linalg_solve_ex", linalg_solve_ex, "torch.linalg.solve_ex")


# The next two are torch code because for a contiguous real A their LU is that of the transpose, as torch's C++ has it
# for the sake of LAPACK, and the backward formulas ask A's strides which one it is. A lowering does not see strides.


def _lu_as_torch_does(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The compact LU and pivots of A or of its transpose."""
    transposed = a.is_contiguous() and not a.is_complex()
    return torch.ops.aten.linalg_lu_factor_ex(a.mT if transposed else a)[:2]


def _sign_of(pivots: torch.Tensor) -> torch.Tensor:
    """-1 to the number of row interchanges: (..., n) to (...)."""
    in_place = torch.arange(1, pivots.shape[-1] + 1, device=pivots.device)
    return 1 - 2 * ((pivots != in_place).sum(-1) % 2)


@ops.decomposition("aten::_linalg_det")
def linalg_det(A):
    """The determinant of (..., n, n), with the compact LU and pivots that its backward formula uses."""
    lu, pivots = _lu_as_torch_does(A)
    return lu.diagonal(0, -2, -1).prod(-1) * _sign_of(pivots), lu, pivots


@ops.decomposition("aten::_linalg_slogdet")
def linalg_slogdet(A):
    """Sign and logarithm of the absolute value of the determinant, with the compact LU and pivots."""
    lu, pivots = _lu_as_torch_does(A)
    diagonal = lu.diagonal(0, -2, -1)
    return diagonal.sgn().prod(-1) * _sign_of(pivots), diagonal.abs().log().sum(-1), lu, pivots


# -- LDL ---------------------------------------------------------------------------------------------------------------


@ops.lowering("aten::linalg_ldl_factor_ex")
def linalg_ldl_factor_ex(self, *, hermitian=False, check_errors=False):
    """LAPACK's compact LDL of a symmetric (or Hermitian) matrix of which the lower triangle is read.

    self:    (..., n, n).
    returns: L and D in one (..., n, n), 0 above the diagonal; int32 pivots (..., n), 1-based, two equal negative ones
             for a 2 by 2 block of D; info (...), the index of the first zero on D's diagonal.
    """
    hermitian = hermitian and jnp.iscomplexobj(self)
    factor = jnp.vectorize(lambda a: _bunch_kaufman(a, hermitian), signature="(n,n)->(n,n),(n),()")
    if self.size == 0:
        return self, jnp.zeros(self.shape[:-1], jnp.int32), jnp.zeros(self.shape[:-2], jnp.int32)
    return factor(self)


_also_checked("aten::linalg_ldl_factor_ex", linalg_ldl_factor_ex, "torch.linalg.ldl_factor_ex")


def _size1(x: jax.Array) -> jax.Array:
    """LAPACK's cheap absolute value, by which it chooses pivots."""
    return jnp.abs(x.real) + jnp.abs(x.imag) if jnp.iscomplexobj(x) else jnp.abs(x)


def _bunch_kaufman(a: jax.Array, hermitian: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """LDL of one (n, n) with diagonal pivoting, one or two columns a step.

    source: Bunch and Kaufman, "Some stable methods for calculating inertia and solving symmetric linear systems", 1977.
    """
    n = a.shape[-1]
    bound = (1 + 17**0.5) / 8
    index = jnp.arange(n, dtype=jnp.int32)
    rows, columns = index[:, None], index[None, :]
    mirrored = (lambda x: jnp.conj(x)) if hermitian else (lambda x: x)
    start = jnp.tril(a) + mirrored(jnp.tril(a, -1)).T
    if hermitian:
        start = jnp.where(rows == columns, start.real, start)

    def step(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # `m` holds finished columns of L left of k, and from k on what is left to factor, both triangles of it
        k, m, pivots, info = state
        below = jnp.where(index > k, _size1(m[:, k]), -1)
        candidate = lax.argmax(below, 0, jnp.int32)
        largest = jnp.maximum(below.max(), 0)
        here = _size1(m[k, k])
        beside = jnp.where((index >= k) & (index != candidate), _size1(m[:, candidate]), 0).max()
        zero = (jnp.maximum(here, largest) == 0) | jnp.isnan(here)
        stay = zero | (here >= bound * largest) | (here >= bound * largest * (largest / beside))
        two = ~stay & (_size1(m[candidate, candidate]) < bound * beside)
        to = jnp.where(stay, k, candidate)
        at = jnp.where(two, k + 1, k)

        swapped = jnp.where(index == at, to, jnp.where(index == to, at, index))
        left = (rows >= k) & (columns >= k)
        m = jnp.where(left, m[swapped][:, swapped], m)

        next_ = jnp.minimum(k + 1, n - 1)
        c0, c1 = m[:, k], m[:, next_]
        d00, d10, d11 = m[k, k], m[next_, k], m[next_, next_]
        d01 = mirrored(d10)
        single = jnp.where(zero, 0, c0 / jnp.where(zero, 1, d00))
        determinant = d00 * d11 - d10 * d01
        w0 = jnp.where(two, (c0 * d11 - c1 * d10) / determinant, single)
        w1 = jnp.where(two, (c1 * d00 - c0 * d01) / determinant, 0)
        last = k + two
        update = w0[:, None] * mirrored(c0)[None, :] + jnp.where(two, w1[:, None] * mirrored(c1)[None, :], 0)
        m = jnp.where((rows > last) & (columns > last), m - update, m)
        m = jnp.where((rows > last) & (columns == k), w0[:, None], m)
        m = jnp.where(two & (rows > last) & (columns == last), w1[:, None], m)

        pivot = jnp.where(two, -(to + 1), to + 1)
        pivots = jnp.where((index >= k) & (index <= last), pivot, pivots)
        info = jnp.where((info == 0) & zero, k + 1, info)
        return last + 1, m, pivots, info

    none = jnp.zeros((), jnp.int32)
    first = (none, start, jnp.zeros(n, jnp.int32), none)
    _, m, pivots, info = lax.while_loop(lambda state: state[0] < n, step, first)
    return jnp.tril(m), pivots, info


@ops.lowering("aten::linalg_ldl_solve")
def linalg_ldl_solve(LD, pivots, B, *, hermitian=False):
    """X with `A @ X = B`, from A's compact LDL (..., n, n) and pivots (..., n); B (..., n, k)."""
    hermitian = hermitian and jnp.iscomplexobj(LD)
    ld, b, steps = _batched(LD, B, pivots[..., None])
    if b.size == 0:
        return b
    unfold = jnp.vectorize(_ldl_unfold, signature="(n,n),(n)->(n,n),(n),(n)")
    lower, order, starts = unfold(ld, steps[..., 0])
    options = {"left_side": True, "lower": True, "unit_diagonal": True}
    y = jnp.take_along_axis(b, order[..., None], axis=-2)
    y = lax.linalg.triangular_solve(lower, y, **options)

    d = jnp.diagonal(ld, axis1=-2, axis2=-1)
    d = d.real.astype(d.dtype) if hermitian else d
    beside = jnp.where(starts, jnp.diagonal(jnp.roll(ld, -1, -2), axis1=-2, axis2=-1), 0)
    above = jnp.conj(beside) if hermitian else beside
    ends = jnp.roll(starts, 1, -1)
    determinant = d * jnp.roll(d, -1, -1) - beside * above
    at_start = (jnp.roll(d, -1, -1)[..., None] * y - above[..., None] * jnp.roll(y, -1, -2)) / determinant[..., None]
    at_end = jnp.roll(d, 1, -1)[..., None] * y - jnp.roll(beside, 1, -1)[..., None] * jnp.roll(y, 1, -2)
    at_end = at_end / jnp.roll(determinant, 1, -1)[..., None]
    y = jnp.where(starts[..., None], at_start, jnp.where(ends[..., None], at_end, y / d[..., None]))

    y = lax.linalg.triangular_solve(lower, y, **options, transpose_a=True, conjugate_a=hermitian)
    return jnp.take_along_axis(y, jnp.argsort(order, axis=-1)[..., None], axis=-2)


def _ldl_unfold(ld: jax.Array, pivots: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of one compact LDL: L with its rows in final order, that order (n,), and where the 2 by 2 blocks of D start (n,).

    LAPACK swaps rows as it goes and leaves the columns of L already found as they were; here they follow.
    """
    n = ld.shape[-1]
    index = jnp.arange(n, dtype=jnp.int32)

    def follow(k: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        lower, order, starts = state
        starting = (pivots[k] < 0) & ~starts[jnp.maximum(k - 1, 0)]
        ending = (pivots[k] < 0) & ~starting
        at = jnp.where(starting, k + 1, k)
        to = jnp.where(ending, at, jnp.abs(pivots[k]) - 1)
        swapped = jnp.where(index == at, to, jnp.where(index == to, at, index))
        lower = jnp.where(index[None, :] < k, lower[swapped], lower)
        return lower, order[swapped], jnp.where(index == k, starting, starts)

    start = (jnp.tril(ld, -1), index, jnp.zeros(n, bool))
    lower, order, starts = lax.fori_loop(0, n, follow, start)
    inside_block = (index[:, None] == index[None, :] + 1) & starts[None, :]
    return jnp.where(inside_block, 0, lower) + _eye(n, ld), order, starts


# -- least squares and pseudoinverse -----------------------------------------------------------------------------------


@ops.lowering("aten::linalg_lstsq", static=("rcond",))
def linalg_lstsq(self, b, rcond=None, *, driver=None):
    """X that minimizes the norm of `self @ X - b`, the shortest one if there are many.

    self:    (..., m, n). b: (..., m, k), or (..., m): vectors.
    driver:  "gels" goes by QR and takes full rank for granted; the others, and the default, by singular values.
    returns: X (..., n, k); squared residuals (..., k), if m > n; ranks (...); singular values (..., min(m, n)); those
             that the driver does not compute are (0,). With "gelsd" and "gelss" residuals come at any rank: torch
             leaves them out below full rank, a shape that depends on the data.
    """
    torch._check(self.ndim >= 2, lambda: "torch.linalg.lstsq: input must have at least 2 dimensions.")
    torch._check(b.ndim >= 1, lambda: "torch.linalg.lstsq: other must have at least 1 dimension.")
    driver = driver or "gelsy"
    m, n = self.shape[-2:]
    vectors = b.ndim == 1 or (self.ndim - 1 == b.ndim and b.shape == self.shape[:-1])
    a, b = _batched(self, b[..., None] if vectors else b)
    rank = jnp.zeros((0,), jnp.int64)
    singular = jnp.zeros((0,), self.real.dtype)
    if driver == "gels":
        x = _solve_by_qr(a, b)
    else:
        u, s, vh = lax.linalg.svd(a, full_matrices=False)
        tolerance = jnp.finfo(a.dtype).eps * max(m, n) if rcond is None else rcond
        kept = s > tolerance * jnp.max(s, axis=-1, keepdims=True, initial=0)
        inverse = jnp.where(kept, 1 / jnp.where(kept, s, 1), 0)
        x = _product(_adjoint(vh), inverse[..., None].astype(a.dtype) * _product(_adjoint(u), b))
        rank = kept.sum(-1)
        singular = singular if driver == "gelsy" else s
    residuals = jnp.zeros((0,), self.real.dtype)
    if m > n and driver != "gelsy":
        residuals = jnp.sum(jnp.abs(b - _product(a, x)) ** 2, axis=-2)
        residuals = residuals[..., 0] if vectors else residuals
    return x[..., 0] if vectors else x, residuals, rank, singular


def _solve_by_qr(a: jax.Array, b: jax.Array) -> jax.Array:
    """Least squares for (..., m, n) of full rank, or the shortest solution if m < n."""
    if a.shape[-2] >= a.shape[-1]:
        q, r = lax.linalg.qr(a, full_matrices=False)
        return lax.linalg.triangular_solve(r, _product(_adjoint(q), b), left_side=True)
    q, r = lax.linalg.qr(_adjoint(a), full_matrices=False)
    return _product(q, lax.linalg.triangular_solve(r, b, left_side=True, transpose_a=True, conjugate_a=True))


def _pinv_derivative(tangent: jax.Array, a: jax.Array, inverse: jax.Array) -> jax.Array:
    """Of a pseudoinverse whose rank does not change, in the direction `tangent`; also where singular values are equal or 0.

    source: Golub and Pereyra, "The differentiation of pseudo-inverses and nonlinear least squares problems", 1973.
    """
    turned, adjoint = _adjoint(tangent), _adjoint(inverse)
    beside = turned - _product(_product(turned, a), inverse)
    above = turned - _product(inverse, _product(a, turned))
    return (
        _product(inverse, _product(adjoint, beside))
        + _product(_product(above, adjoint), inverse)
        - _product(_product(inverse, tangent), inverse)
    )


@ops.lowering("aten::linalg_pinv.atol_rtol_tensor")
@derivatives(
    self=lambda tangent, self, **options: _pinv_derivative(tangent, self, linalg_pinv(self, **options))  # type: ignore[has-type]
)
def linalg_pinv(self, *, atol=None, rtol=None, hermitian=False):
    """The pseudoinverse (..., n, m) of (..., m, n), by singular values, or eigenvalues if `hermitian`.

    atol, rtol: (...); values up to max(atol, rtol * the largest) count as 0. `rtol` is by default 0 beside a positive
                `atol`, and else eps * max(m, n).
    """
    m, n = self.shape[-2:]
    if self.size == 0:
        return jnp.zeros((*self.shape[:-2], n, m), self.dtype)
    real = self.real.dtype
    atol = jnp.zeros((), real) if atol is None else atol.astype(real)
    if rtol is None:
        rtol = jnp.where(atol > 0, 0, jnp.finfo(real).eps * max(m, n)).astype(real)
    if hermitian:
        v, s = lax.linalg.eigh(hermitian_of(self), symmetrize_input=False)
        u, vh = v, _adjoint(v)
    else:
        u, s, vh = lax.linalg.svd(self, full_matrices=False)
    size = jnp.abs(s)
    kept = size > jnp.maximum(atol[..., None], rtol.astype(real)[..., None] * size.max(-1, keepdims=True))
    inverse = jnp.where(kept, 1 / jnp.where(kept, s, 1), 0).astype(self.dtype)
    return _product(_adjoint(vh) * inverse[..., None, :], _adjoint(u))


# -- functions of a matrix ---------------------------------------------------------------------------------------------


@ops.lowering("aten::linalg_matrix_exp")
def linalg_matrix_exp(self):
    """The matrix exponential of (..., n, n)."""
    a = opmath(self)
    return matrix_exp(a) if a.size else a


@ops.lowering("aten::diag_embed")
def diag_embed(self, offset=0, dim1=-2, dim2=-1):
    """Matrices with the last dimension of `self` on a diagonal, and 0 elsewhere.

    self:    (..., n).
    returns: (..., m, m) with m = n + abs(offset), the two matrix dimensions then moved to `dim1` and `dim2`.
    """
    n, above = self.shape[-1], max(-offset, 0)
    m = n + abs(offset)
    index = jnp.arange(m)
    by_row = jnp.pad(self, [(0, 0)] * (self.ndim - 1) + [(above, m - n - above)])
    on_diagonal = index[None, :] - index[:, None] == offset
    matrices = jnp.where(on_diagonal, by_row[..., :, None], jnp.zeros((), self.dtype))
    return jnp.moveaxis(matrices, (-2, -1), (dim1, dim2))


@ops.lowering("aten::linalg_cross", promote=SAME)
def linalg_cross(self, other, *, dim=-1):
    """The cross product of 3-vectors along `dim`; all other dimensions are broadcast."""
    a, b = jnp.broadcast_arrays(self, other)
    turned = [jnp.roll(x, shift, axis=dim) for x in (a, b) for shift in (-1, -2)]
    return turned[0] * turned[3] - turned[1] * turned[2]


# -- distances ---------------------------------------------------------------------------------------------------------


@derivatives(
    difference=lambda tangent, difference, p: (
        (
            tangent * _distance_gradient(difference, _distance(difference, p), p)  # type: ignore[has-type]
        ).sum(-1)
    )
)
def _distance(difference: jax.Array, p: float) -> jax.Array:
    """The p-norm over the last axis."""
    size = jnp.abs(difference)
    if p == 0:
        return (size != 0).sum(-1).astype(difference.dtype)
    if p == 1:
        return size.sum(-1)
    if p == 2:
        return jnp.sqrt((difference * difference).sum(-1))
    if p == float("inf"):
        return size.max(-1, initial=0)
    return (size**p).sum(-1) ** (1 / p)


def _distance_gradient(difference: jax.Array, distance: jax.Array, p: float) -> jax.Array:
    """The derivative of `distance` (...) by `difference` (..., k), (..., k); 0 where torch takes it to be."""
    distance = distance[..., None]
    apart = distance != 0
    if p == 0:
        return jnp.zeros_like(difference)
    if p == 1:
        return jnp.sign(difference)
    if p == 2:
        return jnp.where(apart, difference / jnp.where(apart, distance, 1), 0)
    if p == float("inf"):
        return jnp.where(jnp.abs(difference) == distance, jnp.sign(difference), 0)
    if p < 1:
        apart &= difference != 0
    ratio = jnp.where(apart, jnp.abs(difference), 1) / jnp.where(apart, distance, 1)
    return jnp.where(apart, jnp.sign(difference) * ratio ** (p - 1), 0)


@ops.lowering("aten::_cdist_forward", static=("p",))
def cdist_forward(x1, x2, p, compute_mode):
    """The p-norm of the difference of every row of `x1` and every row of `x2`.

    x1, x2:  (..., r1, k) and (..., r2, k), batches broadcast.
    returns: (..., r1, r2). `compute_mode` has chosen between this and `_euclidean_dist` before.
    """
    return _distance(x1[..., :, None, :] - x2[..., None, :, :], p)


@ops.lowering("aten::_cdist_backward", static=("p",))
def cdist_backward(x1, x2, p, cdist, grad_output=None, grad=None):
    """The gradient of `cdist` by `x1`: (..., r1, k), with the batches of both."""
    slope = _distance_gradient(x1[..., :, None, :] - x2[..., None, :, :], cdist, p)
    return (_given(grad_output, grad)[..., None] * slope).sum(-2)


def _given(grad_output: jax.Array | None, grad: jax.Array | None) -> jax.Array:
    """The gradient that came in: the schemas of these two ops call it `grad` before torch 2.14."""
    return grad if grad_output is None else grad_output


def _pairs(n: int) -> tuple[jax.Array, jax.Array]:
    """All i < j below n in order, as two vectors of length n (n - 1) / 2. Computed, so that they are no constants."""
    rows = jnp.arange(n, dtype=jnp.int32)
    counts = n - 1 - rows
    total = n * (n - 1) // 2
    i = jnp.repeat(rows, counts, total_repeat_length=total)
    return i, jnp.arange(total, dtype=jnp.int32) - (rows * (2 * n - 1 - rows) // 2)[i] + i + 1


@ops.lowering("aten::_pdist_forward", static=("p",))
def pdist_forward(self, p=2.0):
    """The distances between the rows of (n, k), each pair once: (n (n - 1) / 2,)."""
    if self.shape[0] <= 1:
        return jnp.zeros((0,), self.dtype)
    i, j = _pairs(self.shape[0])
    return _distance(self[i] - self[j], p)


@ops.lowering("aten::_pdist_backward", static=("p",))
def pdist_backward(self, p, pdist, grad_output=None, grad=None):
    """The gradient of `pdist` by `self`: that of all pairs both ways round, as for `cdist`."""
    n = self.shape[0]
    if n <= 1:
        return jnp.zeros_like(self)
    i, j = _pairs(n)
    pairs = (_given(grad_output, grad), pdist)
    grads, distances = (jnp.zeros((n, n), x.dtype).at[i, j].set(x).at[j, i].set(x) for x in pairs)
    return cdist_backward(self, self, p, distances, grads)
