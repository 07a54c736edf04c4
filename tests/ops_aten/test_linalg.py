"""linalg.py against CPU torch. Where a factorization is free in sign or phase, what it must fulfil is compared."""

import functools

import jax
import jax.numpy as jnp
import pytest
import torch

import torchax_core
from torchax_core.testing import assert_matches_torch, assert_same_error, sample

REAL_AND_COMPLEX = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])


def matrix(*shape, dtype=torch.float64, seed=0):
    return sample(shape, dtype, seed=seed)


def well_conditioned(*shape, dtype=torch.float64, seed=0):
    return matrix(*shape, dtype=dtype, seed=seed) + 5 * torch.eye(shape[-1], dtype=dtype)


def positive(*shape, dtype=torch.float64, seed=0):
    a = matrix(*shape, dtype=dtype, seed=seed)
    return a @ a.mH + torch.eye(shape[-1], dtype=dtype)


def hermitian(*shape, dtype=torch.float64, seed=0):
    a = matrix(*shape, dtype=dtype, seed=seed)
    return a + a.mH


def views_of(a):
    """The same matrices with other strides: as they are, and if they are real, transposed in memory, expanded from one.

    Each compiles anew. What torch's formulas ask strides for, they ask of real matrices only.
    """
    return [a] if a.is_complex() else [a, a.mT.contiguous().mT, a[:1].expand(3, *a.shape[1:])]


# -- eigenvalues and singular values -----------------------------------------------------------------------------------


@REAL_AND_COMPLEX
@pytest.mark.parametrize("shape", [(4, 2), (2, 2, 4), (0, 3, 3), (2, 0, 2)])
def test_svd(shape, dtype):
    a = matrix(*shape, dtype=dtype)

    def products(a):
        u, s, vh = torch.linalg.svd(a, full_matrices=False)
        return s, (u * s[..., None, :]) @ vh, u.mH @ u

    assert_matches_torch(products, a, atol=1e-10, rtol=1e-10)
    assert_matches_torch(lambda a: [x.abs() for x in torch.linalg.svd(a)][1], a)
    assert_matches_torch(torch.linalg.svdvals, a)


def test_values_alone_are_computed_alone():
    """As in jax's programs, which ask LAPACK for no vectors; for gradients they are needed."""

    def calls(text):
        return [line.split("loc(")[0].strip() for line in text.splitlines() if "custom_call" in line]

    a = matrix(4, 4).float().to("jax")
    of_jax = {
        torch.linalg.svdvals: functools.partial(jnp.linalg.svd, compute_uv=False),
        torch.linalg.cond: jnp.linalg.cond,
        torch.linalg.eigvals: jnp.linalg.eigvals,
    }
    for ours, theirs in of_jax.items():
        alone = calls(torchax_core.jit(ours).lower(a).as_text())
        assert alone == calls(jax.jit(theirs).lower(a.jax()).as_text())
        assert alone != calls(torchax_core.jit(ours).lower(a.detach().requires_grad_()).as_text())


@REAL_AND_COMPLEX
def test_svd_gradients(dtype):
    assert_matches_torch(torch.linalg.svdvals, matrix(2, 4, 3, dtype=dtype), grad=True)

    def low_rank(a):
        u, s, vh = torch.linalg.svd(a, full_matrices=False)
        return (u[..., :2] * s[..., None, :2]) @ vh[..., :2, :]

    assert_matches_torch(low_rank, matrix(4, 3, dtype=dtype), grad=True)


@REAL_AND_COMPLEX
@pytest.mark.parametrize("UPLO", ["L", "U"])
def test_eigh_reads_one_triangle(UPLO, dtype):
    a = matrix(2, 3, 3, dtype=dtype)  # not Hermitian

    def parts(a):
        values, vectors = torch.linalg.eigh(a, UPLO=UPLO)
        return values, (vectors * values[..., None, :]) @ vectors.mH

    assert_matches_torch(parts, a)
    assert_matches_torch(torch.linalg.eigvalsh, hermitian(2, 3, 3, dtype=dtype), UPLO=UPLO, grad=True)


@REAL_AND_COMPLEX
def test_eig(dtype):
    a = matrix(2, 4, 4, dtype=dtype)

    def residual(a):
        values, vectors = torch.linalg.eig(a)
        return a.to(values.dtype) @ vectors - vectors * values[..., None, :], vectors.abs().square().sum(-2)

    assert_matches_torch(residual, a, atol=1e-9, rtol=1e-9)

    def power_sums(a):  # whatever the order of the eigenvalues
        values = torch.linalg.eigvals(a)
        return torch.stack([values.pow(k).sum(-1) for k in range(1, 5)])

    assert_matches_torch(power_sums, a, grad=True)


@pytest.mark.skipif(not hasattr(torch.linalg, "polar"), reason="torch before 2.14 has neither")
@REAL_AND_COMPLEX
def test_polar_and_square_root(dtype):
    assert_matches_torch(torch.linalg.polar, matrix(2, 4, 3, dtype=dtype), atol=1e-8, rtol=1e-8, grad=True)
    assert_matches_torch(torch.linalg.matrix_sqrth, positive(2, 3, 3, dtype=dtype), grad=True)
    assert_matches_torch(torch.linalg.matrix_sqrth, hermitian(2, 3, 3, dtype=dtype))  # with negative eigenvalues


# -- QR ----------------------------------------------------------------------------------------------------------------


@REAL_AND_COMPLEX
@pytest.mark.parametrize("size", [(4, 2), (2, 4), (0, 2)])
@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
def test_qr(mode, size, dtype):
    a = matrix(2, *size, dtype=dtype)
    assert_matches_torch(torch.linalg.qr, a, mode)
    if mode == "reduced":
        assert_matches_torch(torch.linalg.qr, a, grad=True)


@REAL_AND_COMPLEX
@pytest.mark.parametrize("size", [(4, 4), (4, 2)])
def test_householder(size, dtype):
    a = matrix(2, *size, dtype=dtype)
    assert_matches_torch(torch.geqrf, a)
    reflectors, tau = torch.geqrf(a)
    assert_matches_torch(torch.linalg.householder_product, reflectors, tau, grad=size == (4, 2))
    sides = [(True, True), (False, False)] if dtype.is_complex else [(True, False), (False, True)]
    for left, transpose in sides if size == (4, 2) else []:
        other = matrix(2, *((4, 3) if left else (3, 4)), dtype=dtype, seed=1)
        assert_matches_torch(torch.ormqr, reflectors, tau, other, left=left, transpose=transpose, grad=left)


# -- Cholesky ----------------------------------------------------------------------------------------------------------


@REAL_AND_COMPLEX
@pytest.mark.parametrize("upper", [False, True])
def test_cholesky(upper, dtype):
    for batch in [(0,), (2, 1)]:
        assert_matches_torch(torch.linalg.cholesky, positive(*batch, 3, 3, dtype=dtype), upper=upper)
    assert_matches_torch(torch.linalg.cholesky, positive(2, 3, 3, dtype=dtype), upper=upper, grad=True)
    assert_matches_torch(torch.linalg.cholesky, torch.zeros(2, 0, 0, dtype=dtype), upper=upper)
    one_triangle = positive(3, 3, dtype=dtype).triu() if upper else positive(3, 3, dtype=dtype).tril()
    assert_matches_torch(torch.linalg.cholesky, one_triangle, upper=upper)


@pytest.mark.skipif(torch.__version__ >= (2, 14), reason="torch 2.14 has removed it")
@pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated")
@pytest.mark.parametrize("upper", [False, True])
def test_cholesky_by_its_older_name(upper):
    assert_matches_torch(torch.cholesky, positive(2, 3, 3), upper=upper, grad=True, forms=["functional", "out"])
    assert_same_error(torch.cholesky, -positive(2, 3, 3), upper=upper, wording=True)


@pytest.mark.parametrize("upper", [False, True])
def test_cholesky_info_is_the_order_of_the_bad_minor(upper):
    good, first, third = positive(3, 3), torch.diag(torch.tensor([-1.0, 1, 1])), torch.diag(torch.tensor([1.0, 2, 0]))
    inputs = torch.stack([good, first.double(), third.double(), good])
    assert_matches_torch(lambda a: torch.linalg.cholesky_ex(a, upper=upper).info, inputs)
    assert_same_error(torch.linalg.cholesky, inputs, upper=upper, wording=True)


@REAL_AND_COMPLEX
@pytest.mark.parametrize("upper", [False, True])
def test_cholesky_solve_and_inverse(upper, dtype):
    factor = torch.linalg.cholesky(positive(2, 3, 3, dtype=dtype), upper=upper)
    assert_matches_torch(torch.cholesky_solve, matrix(1, 3, 2, dtype=dtype), factor, upper=upper, grad=True)
    assert_matches_torch(torch.cholesky_inverse, factor, upper=upper, grad=True)


# -- solvers -----------------------------------------------------------------------------------------------------------


@REAL_AND_COMPLEX
@pytest.mark.parametrize(
    ("unitriangular", "upper", "left"),
    [(False, False, True), (False, True, True), (True, True, False), (True, False, False)],
)
def test_solve_triangular(unitriangular, upper, left, dtype):
    a = well_conditioned(2, 3, 3, dtype=dtype)
    b = matrix(*((1, 3, 2) if left else (1, 2, 3)), dtype=dtype, seed=1)
    arguments = {"upper": upper, "left": left, "unitriangular": unitriangular}
    triangle = a.triu() if upper else a.tril()
    assert_matches_torch(torch.linalg.solve_triangular, triangle, b, **arguments, grad=True)


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@REAL_AND_COMPLEX
@pytest.mark.parametrize("transpose", [True, False])
def test_old_triangular_solve(transpose, dtype):
    a, b = well_conditioned(1, 3, 3, dtype=dtype), matrix(2, 3, 2, dtype=dtype, seed=1)
    assert_matches_torch(torch.triangular_solve, b, a, upper=False, transpose=transpose, grad=True)


@REAL_AND_COMPLEX
@pytest.mark.parametrize("left", [True, False])
def test_solve(left, dtype):
    for a in views_of(well_conditioned(2, 3, 3, dtype=dtype))[: 3 if left else 1]:
        b = matrix(*((3, 4) if left else (4, 3)), dtype=dtype, seed=1)
        assert_matches_torch(torch.linalg.solve, a, b, left=left, grad=True)


def test_solve_for_vectors():
    dtype = torch.complex128
    assert_matches_torch(torch.linalg.solve, well_conditioned(3, 3, dtype=dtype), matrix(3, dtype=dtype, seed=1))
    assert_matches_torch(torch.linalg.solve, well_conditioned(2, 3, 3, dtype=dtype), matrix(2, 3, dtype=dtype, seed=1))


def test_check_errors():
    """The `_ex` forms raise if they are asked to."""
    singular = torch.tensor([[1.0, 2], [1, 2]]).double()
    assert_same_error(torch.linalg.inv_ex, singular, check_errors=True, wording=True)
    assert_same_error(torch.linalg.solve_ex, singular, singular, check_errors=True, wording=True)
    assert_same_error(torch.linalg.lu_factor_ex, singular, check_errors=True, wording=True)
    assert_same_error(torch.linalg.cholesky_ex, -singular, check_errors=True, wording=True)
    assert_same_error(torch.linalg.ldl_factor_ex, torch.zeros(2, 2), check_errors=True, wording=True)
    assert_matches_torch(torch.linalg.inv_ex, torch.eye(2), check_errors=True)


def test_singular_matrices():
    assert_same_error(torch.linalg.solve, torch.zeros(3, 3), torch.ones(3), wording=True)
    assert_same_error(torch.linalg.inv, torch.stack([torch.eye(2), torch.zeros(2, 2)]), wording=True)
    singular = torch.tensor([[1.0, 2], [1, 2]]).double()
    assert_matches_torch(lambda a: torch.linalg.inv_ex(a).info, singular)


def test_solve_inside_jit_checks_nothing():
    solve = torchax_core.jit(torch.linalg.solve)
    a, b = well_conditioned(3, 3), matrix(3, 2)
    torch.testing.assert_close(solve(a.to("jax"), b.to("jax")).cpu(), torch.linalg.solve(a, b))


@REAL_AND_COMPLEX
def test_inv(dtype):
    assert_matches_torch(torch.linalg.inv, well_conditioned(2, 3, 3, dtype=dtype), grad=True)


@REAL_AND_COMPLEX
def test_det_and_slogdet(dtype):
    for a in views_of(well_conditioned(2, 3, 3, dtype=dtype)):
        assert_matches_torch(torch.linalg.slogdet, a, grad=True)
    assert_matches_torch(torch.linalg.det, well_conditioned(2, 3, 3, dtype=dtype), grad=True)
    assert_matches_torch(torch.logdet, positive(3, 3, dtype=dtype))
    assert_matches_torch(torch.linalg.det, torch.ones(2, 2, dtype=dtype))
    assert_matches_torch(torch.linalg.slogdet, torch.ones(2, 2, dtype=dtype))


# -- LU and LDL --------------------------------------------------------------------------------------------------------


@REAL_AND_COMPLEX
@pytest.mark.parametrize("size", [(4, 2), (2, 4), (0, 2)])
def test_lu(size, dtype):
    a = matrix(2, *size, dtype=dtype)
    assert_matches_torch(torch.linalg.lu_factor_ex, a)
    assert_matches_torch(torch.linalg.lu, a, grad=min(size) > 0)
    for wanted in [(True, False), (False, True)] if size == (4, 2) else []:
        assert_matches_torch(torch.lu_unpack, *torch.linalg.lu_factor(a), *wanted)


def test_lu_without_pivoting():
    """CPU torch has none, so what it must fulfil is checked."""
    a = matrix(2, 4, 3) + 5 * torch.eye(4, 3)
    p, lower, upper = torch.linalg.lu(a.to("jax"), pivot=False)
    assert p.shape == (0,)
    torch.testing.assert_close((lower @ upper).cpu(), a)
    assert torch.equal(lower.cpu().triu(), torch.eye(4, 3, dtype=a.dtype).expand(2, 4, 3))


@pytest.mark.parametrize(
    ("adjoint", "left", "dtype"),
    [(adjoint, left, torch.complex128) for adjoint in (True, False) for left in (True, False)]
    + [(False, True, torch.float64)],
)
def test_lu_solve(adjoint, left, dtype):
    lu, pivots = torch.linalg.lu_factor(matrix(2, 3, 3, dtype=dtype))
    b = matrix(*((1, 3, 2) if left else (1, 2, 3)), dtype=dtype, seed=1)
    assert_matches_torch(torch.linalg.lu_solve, lu, pivots, b, left=left, adjoint=adjoint, grad=True)


@REAL_AND_COMPLEX
@pytest.mark.parametrize("as_hermitian", [True, False])
def test_ldl(as_hermitian, dtype):
    a = matrix(2, 6, 6, dtype=dtype)
    a = a + (a.mH if as_hermitian else a.mT)
    a[1].diagonal().zero_()  # every pivot is 2 by 2
    assert_matches_torch(torch.linalg.ldl_factor_ex, a, hermitian=as_hermitian)
    factors, pivots = torch.linalg.ldl_factor(a, hermitian=as_hermitian)
    b = matrix(2, 6, 2, dtype=dtype, seed=1)
    assert_matches_torch(torch.linalg.ldl_solve, factors, pivots, b, hermitian=as_hermitian, rtol=1e-6, atol=1e-8)


# -- least squares and pseudoinverse -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "dtype"),
    [(driver, torch.float64) for driver in (None, "gels", "gelsd", "gelss")] + [("gelsd", torch.complex128)],
)
@pytest.mark.parametrize("size", [(5, 3), (3, 5)])
def test_lstsq(size, driver, dtype):
    a, b = matrix(2, *size, dtype=dtype), matrix(2, size[0], 2, dtype=dtype, seed=1)
    assert_matches_torch(torch.linalg.lstsq, a, b, driver=driver, rtol=1e-6, atol=1e-8)


def test_lstsq_of_deficient_rank_and_of_vectors():
    a = matrix(5, 2) @ matrix(2, 3, seed=1)
    assert_matches_torch(torch.linalg.lstsq, a, matrix(5, 2, seed=2), rtol=1e-6, atol=1e-8)
    assert_matches_torch(torch.linalg.lstsq, matrix(5, 3), matrix(5, seed=2))
    assert_matches_torch(lambda a, b: torch.linalg.lstsq(a, b).solution, matrix(5, 3), matrix(5, 2, seed=2), grad=True)


@REAL_AND_COMPLEX
def test_pinv(dtype):
    for a in (matrix(2, 4, 3, dtype=dtype), matrix(3, 4, dtype=dtype), matrix(0, 2, dtype=dtype)):
        assert_matches_torch(torch.linalg.pinv, a, grad=a.ndim == 3)
    low_rank = matrix(5, 2, dtype=dtype) @ matrix(2, 4, dtype=dtype, seed=1)
    assert_matches_torch(torch.linalg.pinv, low_rank, rtol=1e-6, atol=1e-8)
    assert_matches_torch(lambda a: torch.linalg.pinv(a, atol=1.0), matrix(4, 3, dtype=dtype))
    assert_matches_torch(torch.linalg.pinv, hermitian(3, 3, dtype=dtype), hermitian=True)
    assert_matches_torch(torch.linalg.matrix_rank, low_rank)


# -- functions of matrices ---------------------------------------------------------------------------------------------


@REAL_AND_COMPLEX
@pytest.mark.parametrize("scale", [0, 1e-3, 1, 30])
def test_matrix_exp(scale, dtype):
    a = matrix(2, 4, 4, dtype=dtype) * scale
    assert_matches_torch(torch.linalg.matrix_exp, a, rtol=1e-9 * max(scale, 1), grad=scale == 1, atol=1e-9)


def test_matrix_exp_of_far_negative_matrices_is_zero():
    assert_matches_torch(torch.linalg.matrix_exp, -1e7 * torch.eye(2))
    assert_matches_torch(torch.linalg.matrix_exp, torch.full((1, 2, 2), float("nan")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
def test_cross(dtype):
    a, b = sample((1, 2, 3), dtype), sample((4, 1, 3), dtype, seed=1)
    assert_matches_torch(torch.linalg.cross, a, b)
    assert_matches_torch(torch.linalg.cross, a.mT, b.mT, dim=-2)
    if dtype.is_floating_point:
        assert_matches_torch(torch.cross, a.double(), b.double(), dim=-1, grad=True)


# -- distances ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 2.0, 3.0, float("inf")])
def test_cdist(p):
    x, y = sample((2, 4, 3), torch.float64), sample((1, 5, 3), torch.float64, seed=1)
    assert_matches_torch(torch.cdist, x, y, p=p, grad=True)
    y = y.repeat(2, 1, 1)
    y[:, 0] = x[:, 0]  # distance 0
    assert_matches_torch(torch.cdist, x, y, p=p, grad=True)
    assert_matches_torch(torch.cdist, x[:, :0], y, p=p)


def test_cdist_by_matmul():
    x, y = sample((2, 30, 3), torch.float64), sample((2, 28, 3), torch.float64, seed=1)
    assert_matches_torch(torch.cdist, x, y, grad=True)


@pytest.mark.parametrize("p", [0.0, 1.5, 2.0, float("inf")])
def test_pdist(p):
    assert_matches_torch(torch.pdist, sample((5, 3), torch.float64), p, grad=True)
    assert_matches_torch(torch.pdist, sample((1, 3), torch.float64), p)


@pytest.mark.parametrize("offset", [-2, 0, 1])
def test_diag_embed(offset):
    for dtype in (torch.float32, torch.int64, torch.bool):
        assert_matches_torch(torch.diag_embed, sample((2, 3), dtype), offset=offset)
    assert_matches_torch(torch.diag_embed, sample((2, 3), torch.float64), offset, dim1=0, dim2=-2, grad=True)
    assert_matches_torch(torch.diag_embed, sample((2, 0), torch.float32), offset)
