"""reductions.py against CPU torch: dims, keepdim, dtypes, empty and 0-d tensors, NaN, gradients."""

import math

import pytest
import torch

from torchax_core.testing import assert_matches_torch, assert_same_error, sample

NUMBERS = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64]
NAN = torch.tensor([[1.0, math.nan, 3.0], [2.0, -1.0, 2.0], [math.nan, math.nan, math.nan], [math.inf, 0.0, -math.inf]])


@pytest.mark.parametrize("dtype", [*NUMBERS, torch.complex64])
@pytest.mark.parametrize("fn", [torch.sum, torch.prod])
def test_sum_and_prod(fn, dtype):
    for shape in [(), (0,), (2, 3)]:
        assert_matches_torch(fn, sample(shape, dtype))
    x = sample((2, 3, 4), dtype, low=-2, high=3)
    assert_matches_torch(fn, x, 1, keepdim=True)
    assert_matches_torch(fn, x.transpose(0, 2), -1)


def test_sum_over_several_dims():
    x = sample((2, 3, 4), torch.float32)
    for dim in [(0, 2), (-1, 0), (), None]:
        assert_matches_torch(torch.sum, x, dim, grad=True)
        assert_matches_torch(torch.sum, x, dim, keepdim=True)
    assert_matches_torch(torch.sum, x, 0, forms=("functional", "out"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64, torch.bfloat16])
def test_sum_in_a_given_dtype(dtype):
    assert_matches_torch(torch.sum, sample((3, 2), torch.float32), dtype=dtype)
    assert_matches_torch(torch.prod, sample((3, 2), torch.int64), 0, dtype=dtype)


def test_integer_sums_are_exact_and_int64():
    assert_matches_torch(torch.sum, torch.full((3,), 2**60 + 1))
    assert_matches_torch(torch.sum, torch.full((300,), 100, dtype=torch.int8))
    assert_matches_torch(torch.prod, torch.full((3,), 200, dtype=torch.uint8))


def test_half_sums_accumulate_in_float32():
    assert_matches_torch(torch.sum, torch.ones(5000, dtype=torch.bfloat16))
    assert_matches_torch(torch.mean, torch.full((5000,), 100.0, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_mean(dtype):
    for shape in [(), (0,), (2, 3)]:
        assert_matches_torch(torch.mean, sample(shape, dtype))
    assert_matches_torch(torch.mean, sample((2, 3, 4), dtype), (0, -1), keepdim=True, grad=True, rtol=1e-2, atol=1e-2)
    assert_matches_torch(torch.mean, sample((2, 3), torch.int64), dtype=dtype)


def test_nansum_and_nanmean():
    for dim in [None, 0, (0, 1)]:
        assert_matches_torch(torch.nansum, NAN[:3], dim, grad=True)
        assert_matches_torch(torch.nanmean, NAN[:3], dim)


@pytest.mark.parametrize("dtype", [*NUMBERS, torch.complex64])
def test_truth(dtype):
    for fn in (torch.any, torch.all):
        for shape in [(), (0,), (2, 3)]:
            assert_matches_torch(fn, sample(shape, dtype))
        x = sample((2, 3, 4), dtype, low=0, high=2)
        assert_matches_torch(fn, x, 1, keepdim=True)
        assert_matches_torch(fn, x, (0, 2))
        assert_matches_torch(fn, x, ())
    assert_matches_torch(torch.count_nonzero, sample((2, 3, 4), dtype))
    assert_matches_torch(torch.count_nonzero, sample((2, 3, 4), dtype), (0, 2))


@pytest.mark.parametrize("dtype", NUMBERS)
def test_extremes(dtype):
    x = sample((2, 5, 3), dtype)
    for fn in (torch.amax, torch.amin):
        assert_matches_torch(fn, x, (0, 2))
        assert_matches_torch(fn, x)
        assert_matches_torch(fn, sample((), dtype), 0)
    for fn in (torch.max, torch.min):
        assert_matches_torch(fn, x)
        assert_matches_torch(fn, x, 1, keepdim=True)
        assert_matches_torch(fn, x, -1)
        assert_matches_torch(fn, sample((), dtype), 0)
    assert_matches_torch(torch.aminmax, x)
    assert_matches_torch(torch.aminmax, x, dim=1, keepdim=True)


@pytest.mark.parametrize("dtype", NUMBERS[1:])
def test_positions_of_extremes(dtype):
    x = sample((4, 9), dtype)  # repeats, so that the first of several counts
    for fn in (torch.argmax, torch.argmin):
        for dim in (None, 0, -1):
            assert_matches_torch(fn, x, dim)
            assert_matches_torch(fn, x, dim, keepdim=True)
        assert_matches_torch(fn, sample((), dtype))
        assert_matches_torch(fn, sample((0, 3), dtype), 1)


def test_nan_is_every_extreme():
    for fn in (torch.amax, torch.amin, torch.argmax, torch.argmin, torch.max, torch.min):
        assert_matches_torch(fn, NAN, 1)
        assert_matches_torch(fn, NAN[3:], 1)
    assert_matches_torch(torch.max, NAN)
    assert_matches_torch(torch.aminmax, NAN)
    assert_matches_torch(torch.max, torch.full((3,), -math.inf), 0)


def test_gradients_of_extremes():
    x = torch.tensor([[1.0, 4.0, 4.0], [2.0, 2.0, -1.0]], dtype=torch.float64)
    for fn in (torch.amax, torch.amin):
        assert_matches_torch(fn, x, 1, grad=True)
    for fn in (torch.max, torch.min):
        assert_matches_torch(lambda t, fn=fn: fn(t, 1).values, x, grad=True)
        assert_matches_torch(fn, x, grad=True)


def test_nothing_to_choose_from_is_torchs_error():
    assert_same_error(torch.max, torch.zeros(0))
    assert_same_error(torch.amax, torch.zeros(2, 0), 1)
    assert_same_error(torch.argmax, torch.zeros(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("fn", [torch.var, torch.std, torch.var_mean, torch.std_mean])
def test_moments(fn, dtype):
    x = sample((4, 3, 5), dtype)
    assert_matches_torch(fn, x)
    for correction in (0, 1, 2.5):
        assert_matches_torch(fn, x, (0, 2), correction=correction)
    assert_matches_torch(fn, x, 1, keepdim=True)
    assert_matches_torch(fn, x, 1, False)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_moments_of_too_few():
    assert_matches_torch(torch.var, torch.tensor([2.0]))
    assert_matches_torch(torch.var, torch.tensor([1.0, 2.0, 4.0]), correction=5)
    assert_matches_torch(torch.std, torch.zeros(0))


def test_gradients_of_moments():
    x = sample((4, 3), torch.float64)
    for fn in (torch.var, torch.std, torch.logsumexp, torch.prod):
        assert_matches_torch(fn, x, 1, grad=True)
    assert_matches_torch(torch.var, x + 1e4, 0)
    assert_matches_torch(
        torch.prod, torch.tensor([[0.0, 2.0], [0.0, 0.0], [1.0, 3.0]], dtype=torch.float64), 1, grad=True
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("ord", [0, 1, 2, 0.5, -1, math.inf, -math.inf])
def test_vector_norms(ord, dtype):
    x = sample((3, 4), dtype)
    assert_matches_torch(torch.linalg.vector_norm, x, ord)
    assert_matches_torch(torch.linalg.vector_norm, x, ord, 1, keepdim=True)


@pytest.mark.parametrize("ord", [1, 2, 3, math.inf])
def test_norms_at_zero_have_torchs_gradients(ord):
    x = torch.tensor([[0.0, 0.0], [3.0, -4.0]], dtype=torch.float64)
    assert_matches_torch(torch.linalg.vector_norm, x, ord, 1, grad=True)


def test_older_norms():
    x = sample((3, 4), torch.float32)
    for p in ("fro", 2, 3.0, None):
        assert_matches_torch(torch.norm, x, p)
        assert_matches_torch(torch.norm, x, p, 1)
    assert_matches_torch(torch.norm, x, 2, 0, True, dtype=torch.float64)
    assert_matches_torch(torch.Tensor.norm, x, 1)
    assert_matches_torch(torch.linalg.vector_norm, torch.zeros(0), 2)


def test_logsumexp():
    for shape in [(2, 3), (2, 0)]:
        assert_matches_torch(torch.logsumexp, sample(shape, torch.float32), 1)
        assert_matches_torch(torch.logsumexp, sample(shape, torch.float32), (0, 1), keepdim=True)
    extreme = torch.tensor([[1000.0, 1000.0], [-math.inf, -math.inf], [math.inf, 1.0], [math.nan, 0.0]])
    assert_matches_torch(torch.logsumexp, extreme, 1)
    assert_matches_torch(torch.logsumexp, sample((2, 3), torch.int64), 1)
    assert_matches_torch(torch.logsumexp, sample((2, 3), torch.bfloat16), 1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
def test_order_statistics(dtype):
    x = torch.randperm(24).reshape(2, 4, 3).to(dtype)  # no ties: which of several is chosen is not defined
    for fn in (torch.median, torch.nanmedian):
        assert_matches_torch(fn, x)
        assert_matches_torch(fn, x, 1, keepdim=True)
        assert_matches_torch(fn, x.transpose(0, 2), -1)
        assert_matches_torch(fn, torch.tensor(3, dtype=dtype), 0)
    assert_matches_torch(torch.kthvalue, x, 2, 1)
    assert_matches_torch(torch.kthvalue, x, 3, -1, keepdim=True)
    assert_matches_torch(torch.mode, sample((3, 12), dtype))
    assert_matches_torch(torch.mode, sample((3, 12), dtype), 0, keepdim=True)
    assert_matches_torch(torch.median, torch.zeros(0, dtype=dtype))


def test_order_statistics_with_nan():
    for fn in (torch.median, torch.nanmedian):
        assert_matches_torch(fn, NAN)
        assert_matches_torch(lambda x, fn=fn: fn(x, 1).values, NAN)
    assert_matches_torch(torch.nanmedian, NAN[:2], 1)
    assert_matches_torch(torch.kthvalue, NAN[1:2], 3, 1)


def test_gradients_of_order_statistics():
    x = torch.randperm(12).reshape(3, 4).double()
    assert_matches_torch(torch.median, x, grad=True)
    assert_matches_torch(lambda t: torch.median(t, 1).values, x, grad=True)
    assert_matches_torch(lambda t: torch.kthvalue(t, 2, 0).values, x, grad=True)
    assert_matches_torch(torch.quantile, x, 0.3, 1, grad=True)


def test_histograms():
    x = sample((40,), torch.float32)
    assert_matches_torch(torch.histc, x)
    assert_matches_torch(torch.histc, x, 7, -1, 2)
    assert_matches_torch(torch.histc, torch.ones(4), 5)
    assert_matches_torch(torch.histc, torch.zeros(0), 3)
    assert_matches_torch(torch.histogram, x, 6)
    assert_matches_torch(torch.histogram, x, 6, range=(-1.0, 2.0), weight=sample((40,), torch.float32, seed=1).abs())
    assert_matches_torch(torch.histogram, x, 6, density=True)
    assert_matches_torch(torch.histogram, x, torch.tensor([-2.0, 0.0, 0.5, 3.0]))
    assert_matches_torch(torch.histogram, torch.ones(3), 4)
    points = sample((20, 2), torch.float64)
    assert_matches_torch(torch.histogramdd, points, [3, 4])
    assert_matches_torch(torch.histogramdd, points, [3, 4], density=True, range=(-1.0, 1.0, -2.0, 2.0))


def test_bincount():
    x = torch.tensor([1, 4, 1, 0])
    assert_matches_torch(torch.bincount, x)
    assert_matches_torch(torch.bincount, x, minlength=8)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int32):
        assert_matches_torch(torch.bincount, x, torch.tensor([1, 2, 3, 4], dtype=dtype))
    assert_matches_torch(torch.bincount, torch.zeros(0, dtype=torch.int64), minlength=2)
    assert_same_error(torch.bincount, torch.tensor([-1, 2]), wording=True)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
def test_segment_reduce(reduce):
    x = torch.tensor([[1.0, 2.0], [0.0, 5.0], [3.0, 3.0], [3.0, 0.0], [-1.0, 2.0]], dtype=torch.float64)
    lengths, offsets = torch.tensor([2, 0, 3]), torch.tensor([0, 2, 2, 5])
    assert_matches_torch(torch.segment_reduce, x, reduce, lengths=lengths)
    assert_matches_torch(torch.segment_reduce, x, reduce, offsets=offsets, initial=1)
    by_row = torch.tensor([[2, 3], [4, 1]])
    assert_matches_torch(torch.segment_reduce, x.t().contiguous(), reduce, lengths=by_row, axis=1)
    full = torch.tensor([2, 3])
    assert_matches_torch(lambda d: torch.segment_reduce(d, reduce, lengths=full.to(d.device)), x, grad=True)


def test_trace():
    assert_matches_torch(torch.trace, sample((3, 4), torch.float32), grad=True)
    assert_matches_torch(torch.trace, sample((3, 2), torch.int8))


@pytest.mark.parametrize("dtype", NUMBERS)
def test_hash_tensor(dtype):
    x = sample((3, 4), dtype)
    assert_matches_torch(torch.hash_tensor, x)
    assert_matches_torch(torch.hash_tensor, x, 1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_histc_of_integers(dtype) -> None:
    """CPU torch has none, cuda has; a mixture of experts counts its tokens with it."""
    x = torch.tensor([0, 1, 1, 3, 3, 3, 2, 7], dtype=dtype)
    got = torch.histc(x.to("jax"), bins=4, min=0, max=3)
    assert got.dtype is dtype and torch.equal(got.cpu(), torch.tensor([1, 2, 1, 3], dtype=dtype))
    assert torch.equal(torch.histc(x.to("jax"), bins=7).cpu(), torch.histc(x.double(), bins=7).to(dtype))
