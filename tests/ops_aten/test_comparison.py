"""comparison.py against CPU torch: mixed dtypes, NaN, infinities and signed zeros, and the two ops that give a bool."""

import math

import pytest
import torch

import torchax_core
from torchax_core.errors import DataDependentError
from torchax_core.testing import assert_matches_torch, assert_same_error, sample

NAN, INF = math.nan, math.inf
EDGES = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 2.0])
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons(name):
    fn = getattr(torch, name)
    for dtype in DTYPES:
        low, high = (0, 3) if dtype != torch.bool else (None, None)
        x, y = sample((4, 5), dtype, low=low, high=high), sample((5,), dtype, low=low, high=high, seed=1)
        assert_matches_torch(fn, x, y)
        assert_matches_torch(fn, x, 1)
    assert_matches_torch(fn, EDGES, EDGES[:, None])
    for shape in [(), (0,)]:
        assert_matches_torch(fn, sample(shape, torch.float32), sample(shape, torch.float32, seed=1))
    x = torch.tensor([1, 2, 3])
    assert_matches_torch(fn, x, torch.tensor([1.0, 2.5, 2.0]))  # in float32
    assert_matches_torch(fn, x, 2.5)
    assert_matches_torch(fn, x, x.flip(0), forms=("functional", "inplace", "out"))


def test_integers_are_compared_exactly():
    x = torch.tensor([2**60, 2**60 + 1])
    assert_matches_torch(torch.eq, x, x.flip(0))
    assert_matches_torch(torch.lt, x, 2**60 + 1)


def test_complex_numbers_have_no_order():
    z = torch.tensor([1 + 1j, 2j])
    assert_matches_torch(torch.eq, z, torch.tensor([1 + 1j, 2.0]))
    assert_matches_torch(torch.ne, z, 2j)
    for fn in [torch.lt, torch.ge, torch.maximum, torch.fmin]:
        assert_same_error(fn, z, z)


@pytest.mark.parametrize("name", ["maximum", "minimum", "fmax", "fmin"])
def test_maximum_and_minimum(name):
    fn = getattr(torch, name)
    for dtype in DTYPES:
        assert_matches_torch(fn, sample((4, 5), dtype), sample((5,), dtype, seed=1))
    assert_matches_torch(fn, EDGES, EDGES[:, None], forms=("functional", "out"))
    assert_matches_torch(fn, torch.tensor([1, 2]), torch.tensor([1.5, 1.5]))
    a, b = sample((4, 5), torch.float64), sample((5,), torch.float64, seed=1)
    assert_matches_torch(fn, a, b, grad=True)
    assert_matches_torch(fn, a, a.clone(), grad=True)  # a tie is shared


def test_equal():
    x = torch.tensor([1.0, 2.0], device="jax")
    assert torch.equal(x, x.clone()) is True
    assert torch.equal(x, x + 1) is False
    assert torch.equal(x, x[:1]) is False
    assert torch.equal(x, torch.tensor([1, 2], device="jax")) is True
    assert torch.equal(torch.tensor([NAN], device="jax"), torch.tensor([NAN], device="jax")) is False


def test_allclose():
    x = torch.tensor([1.0, NAN], device="jax")
    assert torch.allclose(x[:1], x[:1] + 1e-7) is True
    assert torch.allclose(x[:1], x[:1] + 1e-3) is False
    assert torch.allclose(x[:1], x[:1] + 1e-3, rtol=1e-2) is True
    assert torch.allclose(x, x) is False
    assert torch.allclose(x, x, equal_nan=True) is True
    assert_same_error(torch.allclose, torch.ones(2), torch.ones(2).double())


def test_equal_under_jit_names_the_way_out():
    @torchax_core.jit
    def same(x, y):
        return x + 1 if torch.equal(x, y) else x

    x = torch.ones(2, device="jax")
    with pytest.raises(DataDependentError, match=r"\(a == b\)\.all\(\)"):
        same(x, x)


@pytest.mark.parametrize(
    "fn", [torch.isnan, torch.isinf, torch.isfinite, torch.isposinf, torch.isneginf, torch.signbit]
)
def test_kinds_of_numbers(fn):
    assert_matches_torch(fn, EDGES)
    assert_matches_torch(fn, EDGES.bfloat16())
    assert_matches_torch(fn, EDGES.double())
    assert_matches_torch(fn, torch.tensor([-1, 0, 1]))
    assert_matches_torch(fn, torch.tensor([True, False]))
    if fn in (torch.isnan, torch.isinf, torch.isfinite):
        assert_matches_torch(fn, torch.complex(EDGES, EDGES.flip(0)))


def test_isclose():
    x = torch.tensor([1.0, 1.0, NAN, INF, -INF])
    y = torch.tensor([1.0 + 1e-6, 1.1, NAN, INF, INF])
    for equal_nan in [False, True]:
        assert_matches_torch(torch.isclose, x, y, equal_nan=equal_nan)
    assert_matches_torch(torch.isclose, torch.tensor([100, 101]), torch.tensor([100, 100]))


@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor"])
def test_logic(name):
    fn = getattr(torch, name)
    for dtype in [*DTYPES, torch.complex64]:
        x, y = sample((3, 4), dtype, low=0, high=2), sample((4,), torch.int64, low=0, high=2, seed=1)
        assert_matches_torch(fn, x, y)
    assert_matches_torch(fn, EDGES, EDGES[:, None], forms=("functional", "out"))
    assert_matches_torch(torch.logical_not, EDGES, forms=("functional", "inplace", "out"))


@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or", "bitwise_xor"])
def test_bitwise(name):
    fn = getattr(torch, name)
    for dtype in [torch.bool, torch.uint8, torch.int8, torch.int64]:
        x, y = sample((3, 4), dtype), sample((4,), dtype, seed=1)
        assert_matches_torch(
            fn, x, y, forms=("functional", "inplace", "out") if dtype == torch.int8 else ("functional",)
        )
        assert_matches_torch(torch.bitwise_not, x)
    assert_matches_torch(fn, sample((3,), torch.int64), 6)
    assert_matches_torch(fn, 6, sample((3,), torch.int64))
    assert_matches_torch(fn, sample((3,), torch.bool), sample((3,), torch.int32))
    assert_same_error(fn, torch.ones(2), torch.ones(2))
