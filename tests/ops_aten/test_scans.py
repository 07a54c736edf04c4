"""scans.py against CPU torch."""

import math

import pytest
import torch
from torch.autograd import forward_ad

from torchax_core.testing import assert_matches_torch, sample


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float32, torch.complex64])
@pytest.mark.parametrize("fn", [torch.cumsum, torch.cumprod])
def test_sums_and_products(fn, dtype):
    for shape in [(), (0,), (7,)]:
        assert_matches_torch(fn, sample(shape, dtype), 0)
    assert_matches_torch(fn, sample((2, 3, 4), dtype), 1)
    assert_matches_torch(fn, sample((2, 3, 4), dtype).transpose(0, 2), -1)


def test_given_dtype_inplace_and_out():
    x = sample((3, 4), torch.float32)
    assert_matches_torch(torch.cumsum, x, 1, dtype=torch.float64)
    assert_matches_torch(torch.cumsum, sample((3,), torch.int64), 0, dtype=torch.float32)
    assert_matches_torch(torch.cumsum, x, 0, forms=("functional", "inplace", "out"))
    assert_matches_torch(torch.cumprod, x, 0, forms=("functional", "inplace", "out"))


@pytest.mark.parametrize("fn", [torch.cumsum, torch.cumprod, torch.logcumsumexp])
def test_gradients(fn):
    assert_matches_torch(fn, sample((3, 4), torch.float64), 1, grad=True)
    with_zeros = torch.tensor([[1.0, 0.0, 2.0, 0.0], [3.0, 2.0, 1.0, 0.0]], dtype=torch.float64)
    assert_matches_torch(fn, with_zeros, 1, grad=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fn", [torch.cummax, torch.cummin])
def test_extremes_give_the_last_index(fn, dtype):
    assert_matches_torch(fn, sample((4, 9), dtype), 1)
    assert_matches_torch(fn, sample((4, 9), dtype), 0)
    assert_matches_torch(fn, sample((), dtype), 0)
    assert_matches_torch(fn, sample((0, 3), dtype), 0)


@pytest.mark.parametrize("fn", [torch.cummax, torch.cummin])
def test_extremes_with_nan(fn):
    x = torch.tensor([1.0, 1.0, math.nan, 5.0, math.nan, -math.inf])
    assert_matches_torch(fn, x, 0)
    assert_matches_torch(lambda t: fn(t, 1).values, sample((3, 4), torch.float64), grad=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_logcumsumexp(dtype):
    assert_matches_torch(torch.logcumsumexp, sample((3, 5), dtype), 1)
    assert_matches_torch(torch.logcumsumexp, sample((), dtype), 0)


def test_logcumsumexp_does_not_overflow():
    x = torch.tensor([-math.inf, -math.inf, 1000.0, 1000.0, math.inf, 0.0])
    assert_matches_torch(torch.logcumsumexp, x, 0)


def test_logcumsumexp_derivatives_far_out():
    """As those of logsumexps of ever more elements: torch's own lose all digits beside 1000, and have NaN beside -inf."""

    def one_by_one(x):
        return torch.stack([x[: i + 1].logsumexp(0) for i in range(len(x))])

    for values in ([1000.0, -1000.0, 0.0], [1e30, 0.0, -1e30], [0.0, -math.inf, 1.0]):
        x = torch.tensor(values)
        tangent = torch.tensor([1.0, -2.0, 3.0])
        given = torch.zeros(3, requires_grad=True)
        (expected,) = torch.autograd.grad(one_by_one(x + given), given, tangent)
        leaf = x.to("jax").requires_grad_()
        (gradient,) = torch.autograd.grad(torch.logcumsumexp(leaf, 0), leaf, tangent.to("jax"))
        torch.testing.assert_close(gradient.cpu(), expected)
        with forward_ad.dual_level():
            along, expected = (
                forward_ad.unpack_dual(fn(forward_ad.make_dual(x.to(device), tangent.to(device)))).tangent.cpu()
                for fn, device in ((lambda x: torch.logcumsumexp(x, 0), "jax"), (one_by_one, "cpu"))
            )
        torch.testing.assert_close(along, expected)
    infinite = torch.tensor([0.0, math.inf, 1.0]).to("jax").requires_grad_()
    (gradient,) = torch.autograd.grad(torch.logcumsumexp(infinite, 0).sum(), infinite)
    assert gradient.tolist() == [1, 2, 0]
