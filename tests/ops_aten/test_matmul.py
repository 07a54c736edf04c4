"""matmul.py against CPU torch."""

import pytest
import torch
import torch.nn.functional as F

import torchax_core
from torchax_core.testing import assert_matches_torch, assert_same_error, sample

HALF = {torch.float16: 2e-3, torch.bfloat16: 2e-2}


def close(fn, *args, dtype, **kwargs):
    """CPU torch rounds half types at other moments than we do: once, at the end."""
    tolerance = HALF.get(dtype)
    assert_matches_torch(fn, *args, rtol=tolerance, atol=tolerance, **kwargs)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.uint8]
)
def test_products(dtype):
    a, b, v = sample((3, 4), dtype), sample((4, 5), dtype, seed=1), sample((4,), dtype, seed=2)
    close(torch.mm, a, b, dtype=dtype, forms=("functional", "out"))
    close(torch.mm, a.t().contiguous().t(), b[:, ::2], dtype=dtype)
    close(torch.bmm, sample((2, 3, 4), dtype), sample((2, 4, 5), dtype, seed=1), dtype=dtype)
    close(torch.mv, a, v, dtype=dtype)
    close(torch.dot, v, sample((4,), dtype, seed=3), dtype=dtype)
    close(torch.vdot, v, sample((4,), dtype, seed=3), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.int32])
def test_products_added(dtype):
    factors = {"beta": 2, "alpha": 3}
    if dtype.is_complex:
        factors = {"beta": 2 - 1j, "alpha": 0.5j}
    elif dtype.is_floating_point:
        factors = {"beta": 0.5, "alpha": 2.5}
    a, b = sample((3, 4), dtype, seed=1), sample((4, 5), dtype, seed=2)
    for kwargs in ({}, factors):
        close(torch.addmm, sample((3, 5), dtype), a, b, dtype=dtype, forms=("functional", "inplace", "out"), **kwargs)
        close(torch.addmm, sample((5,), dtype), a, b, dtype=dtype, **kwargs)
        close(torch.addmv, sample((3,), dtype), a, sample((4,), dtype, seed=3), dtype=dtype, **kwargs)
        close(torch.addr, sample((3, 5), dtype), sample((3,), dtype), sample((5,), dtype), dtype=dtype, **kwargs)
        c, d = sample((2, 3, 4), dtype, seed=1), sample((2, 4, 5), dtype, seed=2)
        close(torch.baddbmm, sample((2, 3, 5), dtype), c, d, dtype=dtype, forms=("functional", "inplace"), **kwargs)
        # torch adds bfloat16 batches up in bfloat16; we round once
        close(torch.addbmm, sample((3, 5), dtype), c, d, dtype=torch.bfloat16, **kwargs)


def test_integers_are_exact():
    big = torch.tensor([[2**40 + 1, -3]])
    assert_matches_torch(torch.mm, big, big.t())
    assert_matches_torch(torch.addmm, big.t(), big.t(), torch.tensor([[1]]), beta=2**31 + 1, alpha=2**32 + 5)
    int8 = sample((17, 16), torch.int8, low=-128, high=128)
    assert_matches_torch(torch._int_mm, int8, sample((16, 8), torch.int8, low=-128, high=128, seed=1))


def test_beta_zero_reads_nothing():
    nan = torch.full((2, 2), float("nan"))
    assert_matches_torch(torch.addmm, nan, torch.ones(2, 3), torch.ones(3, 2), beta=0)
    assert_matches_torch(torch.baddbmm, nan.expand(2, 2, 2), torch.ones(2, 2, 3), torch.ones(2, 3, 2), beta=0.0)


def test_empty():
    assert_matches_torch(torch.mm, torch.empty(0, 3), torch.empty(3, 2))
    assert_matches_torch(torch.mm, torch.empty(2, 0), torch.empty(0, 3))
    assert_matches_torch(torch.addmm, torch.ones(2, 3), torch.empty(2, 0), torch.empty(0, 3), beta=2)
    assert_matches_torch(torch.bmm, torch.empty(0, 2, 3), torch.empty(0, 3, 4))
    assert_matches_torch(torch.dot, torch.empty(0), torch.empty(0))


def test_gradients():
    a, b, c = (sample(s, torch.float64, seed=i) for i, s in enumerate([(3, 4), (4, 5), (3, 5)]))
    assert_matches_torch(torch.addmm, c, a, b, beta=0.5, alpha=2.0, grad=True)
    assert_matches_torch(torch.mv, a, b[:, 0], grad=True)
    assert_matches_torch(torch.addr, c, c[:, 0], c[0], grad=True)
    assert_matches_torch(torch.addr, c[0], c[:, 0], c[0], beta=0, alpha=2.0, grad=True)
    assert_matches_torch(torch.addmv, c[:1, 0], a, b[:, 0], beta=0.5, alpha=2.0, grad=True)
    assert_matches_torch(torch.vdot, *(sample((3,), torch.complex128, seed=i) for i in range(2)), grad=True)
    assert_matches_torch(torch.baddbmm, c[None], a[None], b[None], grad=True)


@pytest.mark.parametrize("fn", [torch.mv, torch.addmv, torch.addr], ids=lambda fn: fn.__name__)
def test_gradients_beside_vectors_transpose_nothing(fn):
    matrix, vector = sample((3, 3), torch.float32).to("jax"), sample((3,), torch.float32).to("jax")
    arguments = {
        torch.mv: (matrix, vector),
        torch.addmv: (vector, matrix, vector),
        torch.addr: (matrix, vector, vector),
    }

    @torchax_core.jit
    def gradients(*arguments):
        leaves = [x.detach().requires_grad_() for x in arguments]
        return torch.autograd.grad(fn(*leaves).sin().sum(), leaves)

    assert "stablehlo.transpose" not in gradients.lower(*arguments[fn]).as_text()


@pytest.mark.parametrize(
    ("left", "right"), [((4,), (4,)), ((3, 4), (4,)), ((2, 3, 4), (4, 5)), ((2, 1, 3, 4), (5, 4, 2)), ((4,), (2, 4, 3))]
)
def test_matmul(left, right):
    assert_matches_torch(torch.matmul, sample(left, torch.float64), sample(right, torch.float64, seed=1), grad=True)


def test_einsum_and_bilinear():
    a, b = sample((2, 3, 4), torch.float64), sample((2, 4, 5), torch.float64, seed=1)
    assert_matches_torch(lambda a, b: torch.einsum("bij,bjk->kib", a, b), a, b, grad=True)
    weight, bias = sample((6, 4, 5), torch.float64, seed=2), sample((6,), torch.float64, seed=3)
    assert_matches_torch(F.bilinear, a[0], b[0, :3], weight, bias, grad=True)
    assert_matches_torch(F.bilinear, a, b[:, :3], weight, grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_linear(dtype):
    weight, bias = sample((5, 4), dtype, seed=1), sample((5,), dtype, seed=2)
    for shape in [(4,), (3, 4), (2, 3, 4), (0, 4)]:
        close(F.linear, sample(shape, dtype), weight, bias, dtype=dtype)
    close(F.linear, sample((3, 4), dtype), weight, dtype=dtype)
    close(F.linear, sample((3, 4), dtype), weight[0], dtype=dtype)
    close(F.linear, sample((2, 3, 4), dtype), weight, bias, dtype=dtype, grad=dtype is torch.float64)


def test_half_types_accumulate_in_float32():
    ones = torch.ones(1, 4096, dtype=torch.bfloat16, device="jax")
    assert (ones @ ones.t()).item() == 4096  # a bfloat16 sum of ones stops at 256


def test_grouped():
    offs = torch.tensor([2, 3, 8], dtype=torch.int32)
    x, w = sample((8, 16), torch.float32), sample((3, 16, 8), torch.float32, seed=1)
    assert_matches_torch(torch._grouped_mm, x, w, offs=offs, rtol=1e-5, atol=1e-5, grad=True)
    assert_matches_torch(torch._grouped_mm, x.bfloat16(), w.bfloat16(), offs=offs, rtol=2e-2, atol=2e-2)
    assert_matches_torch(torch._grouped_mm, x.t()[:, :], sample((8, 4), torch.float32), offs=offs, rtol=1e-5, atol=1e-5)
    columns = sample((16, 8), torch.float32, seed=2)
    assert_matches_torch(torch._grouped_mm, w.mT, columns, offs=offs, rtol=1e-5, atol=1e-5)


def test_quantized():
    x, w = sample((16, 32), torch.bfloat16), sample((48, 32), torch.int8)
    scales = sample((48,), torch.bfloat16, low=0, high=1)
    assert_matches_torch(torch._weight_int8pack_mm, x, w, scales, rtol=2e-2, atol=2e-2)
    a, b = (sample((n, 32), torch.float32, seed=n).to(torch.float8_e4m3fn) for n in (16, 48))
    one, two = torch.tensor(0.5), torch.tensor(2.0)
    assert_matches_torch(torch._scaled_mm, a, b.t(), one, two, out_dtype=torch.float32, rtol=1e-5, atol=1e-5)
    rows, columns = sample((16, 1), torch.float32, low=0), sample((1, 48), torch.float32, low=0)
    arguments = a, b.t(), rows, columns
    ours = torch._scaled_mm(*(t.to("jax") for t in arguments), out_dtype=torch.bfloat16).cpu()
    expected = (a.float() * rows) @ (b.t().float() * columns)
    torch.testing.assert_close(ours.float(), expected, rtol=1e-2, atol=1e-2)


def test_precision_is_the_users():
    x = torch.ones(7, 7, device="jax")
    before = torch.get_float32_matmul_precision()
    programs = {}
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            programs[precision] = torchax_core.jit(lambda x: x @ x).lower(x).as_text()
    finally:
        torch.set_float32_matmul_precision(before)
    assert "HIGHEST" in programs["highest"]
    assert "HIGHEST" not in programs["medium"]


def test_errors_are_torchs():
    assert_same_error(torch.mm, torch.ones(2, 3), torch.ones(2, 3))
    assert_same_error(torch.bmm, torch.ones(2, 3), torch.ones(2, 3))
    assert_same_error(torch.dot, torch.ones(2), torch.ones(3))


MATMULS = [
    ((3, 4), (4, 5)),
    ((2, 3, 4), (4, 5)),
    ((2, 3, 4), (2, 4, 5)),
    ((1, 3, 4), (6, 4, 5)),
    ((7, 1, 3, 4), (5, 4, 6)),
    ((3, 4), (2, 4, 5)),
    ((4,), (3, 4, 5)),
    ((3, 2, 4), (4,)),
    ((3, 4), (4,)),
    ((4,), (4,)),
    ((2, 3, 0), (0, 5)),
]


def derivatives(fn, *operands, wants, device):
    """The result, first gradients of the operands at `wants`, and (float64, several) gradients of the squares of these."""
    tensors = [t if t is None else t.to(device).requires_grad_(i in wants) for i, t in enumerate(operands)]
    chosen = [tensors[i] for i in wants]
    out = fn(*tensors)
    twice = out.dtype is torch.float64 and {0, 1} <= set(wants)  # of one alone, there may be nothing to differentiate
    cotangent = sample(tuple(out.shape), out.dtype, seed=9).to(device)
    first = torch.autograd.grad(out, chosen, cotangent, create_graph=twice)
    if not twice:
        return [out, *first]
    squares = sum((g**2).sum() for g in first)
    return [out, *first, *torch.autograd.grad(squares, chosen, allow_unused=True, materialize_grads=True)]


def assert_same_derivatives(fn, *operands, wants):
    half = (
        operands[0].dtype is torch.bfloat16
    )  # CPU torch rounds each product before it adds them up over broadcast dims
    tolerance = 5e-2 if half else None
    expected = derivatives(fn, *[t if t is None else t.clone() for t in operands], wants=wants, device="cpu")
    actual = derivatives(fn, *operands, wants=wants, device="jax")
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            torch.testing.assert_close(a.cpu(), e, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.bfloat16])
def test_matmul_of_any_dims_and_its_derivatives(dtype):
    for a, b in MATMULS if dtype is torch.float64 else MATMULS[1:5]:
        x, y = sample(a, dtype), sample(b, dtype, seed=1)
        close(torch.matmul, x, y, dtype=dtype)
        for wants in ([0, 1], [0], [1]):
            assert_same_derivatives(torch.matmul, x, y, wants=wants)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.bfloat16])
@pytest.mark.parametrize("weight, bias", [((5, 4), (5,)), ((5, 4), None), ((4,), ()), ((4,), None), ((5, 4), ())])
def test_derivatives_of_linear(dtype, weight, bias):
    for x in [(4,), (3, 4), (2, 3, 4), (0, 4)]:
        if x == (0, 4) or (x == (3, 4) and weight == (4,) and bias is not None):
            continue  # torch itself fails on CPU: "mat2 must be a matrix" and, of no rows, on the second derivative
        operands = [sample(x, dtype), sample(weight, dtype, seed=1), None if bias is None else sample(bias, dtype)]
        for wants in ([0], [1], [0, 1], *([] if bias is None else [[2], [1, 2], [0, 1, 2]])):
            assert_same_derivatives(F.linear, *operands, wants=wants)


def test_linear_and_matmul_in_forward_mode_and_under_torch_func():
    weight, x = sample((5, 4), torch.float64), sample((6, 3, 4), torch.float64, seed=1)

    def loss(weight, x):
        return (F.linear(x, weight) @ weight).sin().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))
    assert_matches_torch(per_sample, weight, x, rtol=1e-7, atol=1e-7)
    assert_matches_torch(torch.func.hessian(loss), weight, x[0], rtol=1e-7, atol=1e-7)
    assert_matches_torch(
        lambda w, x: torch.func.jvp(lambda w: loss(w, x), (w,), (w.cos(),))[1], weight, x, rtol=1e-7, atol=1e-7
    )
