"""pool.py against CPU torch."""

import pytest
import torch
import torch.nn.functional as F

from torchax_core.testing import assert_matches_torch, sample

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
SPATIAL = (9, 8, 7)


def image(ndim, dtype=torch.float64, *, batch=True):
    """(2, 3, *spatial) or (3, *spatial), all sizes unlike."""
    return sample((*((2, 3) if batch else (3,)), *SPATIAL[:ndim]), dtype)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_max_pool(ndim):
    pool = MAX[ndim]
    assert_matches_torch(pool, image(ndim), 2, return_indices=True)
    assert_matches_torch(pool, image(ndim), 2, grad=True)
    assert_matches_torch(pool, image(ndim), 3, 2, 1, 2, return_indices=True)
    assert_matches_torch(pool, image(ndim), 3, 2, 1, ceil_mode=True, grad=True)
    assert_matches_torch(pool, image(ndim, batch=False), 3, 1, 1, grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_max_pool_of_equals(dtype):
    """The first of equals wins; so many equals are in here that any other rule would show."""
    x = sample((2, 3, 9, 8), dtype, low=0, high=2)
    for arguments in [(3, 2, 1), (2,), (3, 1, 1, 2), ((2, 3), (1, 2))]:
        assert_matches_torch(F.max_pool2d, x, *arguments, return_indices=True)
        assert_matches_torch(F.max_pool2d, x, *arguments)
    if dtype.is_floating_point:
        assert_matches_torch(F.adaptive_max_pool2d, x, (4, 3), return_indices=True)


def test_max_pool_of_large_windows():
    x = sample((1, 2, 12, 11), torch.float32, low=0, high=3)
    x[0, 0, 5, 4] = x[0, 0, 9, 2] = float("nan")
    assert_matches_torch(F.max_pool2d, x, (7, 6), 2, 3, return_indices=True)


def test_max_pool_of_nan_and_infinities():
    x = sample((1, 2, 8, 8), torch.float32)
    x[0, 0, 2:4, 2:5] = float("nan")
    x[0, 1] = -float("inf")
    for arguments in [(3, 2, 1), (2,), (3, 1, 1)]:
        assert_matches_torch(F.max_pool2d, x, *arguments, return_indices=True)
        assert_matches_torch(F.max_pool2d, x, *arguments)
    assert_matches_torch(F.adaptive_max_pool2d, x, 3, return_indices=True)


def test_max_pool_gradients_meet():
    """Overlapping windows with one maximum add up there."""
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, 2, 2] = 1
    assert_matches_torch(F.max_pool2d, x, 3, 1, grad=True)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_avg_pool(ndim):
    pool = AVERAGE[ndim]
    assert_matches_torch(pool, image(ndim), 2, grad=True)
    assert_matches_torch(pool, image(ndim), 3, 2, 1, grad=True)
    assert_matches_torch(pool, image(ndim), 3, 2, 1, ceil_mode=True, grad=True)
    assert_matches_torch(pool, image(ndim), 3, 2, 1, ceil_mode=True, count_include_pad=False, grad=True)
    assert_matches_torch(pool, image(ndim, batch=False), 4, 4, 2, count_include_pad=False)
    if ndim > 1:
        assert_matches_torch(pool, image(ndim), 3, 2, 1, divisor_override=5, grad=True)


def test_avg_pool_types():
    assert_matches_torch(F.avg_pool2d, image(2, torch.int64), 2)
    assert_matches_torch(F.avg_pool2d, image(2, torch.bfloat16), 3, 2, 1, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 3, 4, 11])
def test_adaptive(ndim, size):
    average = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}[ndim]
    highest = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}[ndim]
    assert_matches_torch(average, image(ndim), size, grad=True)
    assert_matches_torch(highest, image(ndim), size, return_indices=True)
    assert_matches_torch(highest, image(ndim, batch=False), size, grad=True)


def test_adaptive_sizes():
    assert_matches_torch(F.adaptive_avg_pool2d, image(2), (3, None), grad=True)
    assert_matches_torch(F.adaptive_avg_pool2d, image(2), (0, 2))
    x = image(2, torch.float32)
    x[0, 0, 0, 0] = float("inf")
    assert_matches_torch(F.adaptive_avg_pool2d, x, (4, 3))  # an infinity stays in its own window
    long = sample((2, 100), torch.float64)
    assert_matches_torch(F.adaptive_avg_pool1d, long, 37, grad=True)
    assert_matches_torch(F.adaptive_max_pool1d, long, 37, return_indices=True)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_unpool(ndim):
    unpool = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}[ndim]
    values, indices = MAX[ndim](image(ndim), 2, return_indices=True)
    assert_matches_torch(unpool, values, indices, 2, output_size=SPATIAL[:ndim], grad=True)


@pytest.mark.parametrize("ndim", [2, 3])
def test_fractional(ndim):
    pool = {2: F.fractional_max_pool2d, 3: F.fractional_max_pool3d}[ndim]
    samples = sample((2, 3, ndim), torch.float64, low=0, high=1, seed=1)

    def fn(x, size):
        drawn = samples[: x.shape[0]].to(x.device)
        return pool(x, 2, output_size=size, return_indices=True, _random_samples=drawn)

    assert_matches_torch(fn, image(ndim), (4, 5, 3)[:ndim], grad=True)
    assert_matches_torch(fn, image(ndim), (1, 2, 5)[:ndim])
    assert_matches_torch(fn, image(ndim)[:0], (4, 5, 3)[:ndim], grad=True)


def test_lp_pool():
    assert_matches_torch(F.lp_pool2d, image(2).abs(), 3, 2, grad=True)


def test_empty_batch():
    assert_matches_torch(F.max_pool2d, torch.empty(0, 3, 8, 8), 2, return_indices=True)
    assert_matches_torch(F.avg_pool2d, torch.empty(0, 3, 8, 8), 2, grad=True)
    assert_matches_torch(F.adaptive_avg_pool2d, torch.empty(0, 3, 8, 8), 3)


def test_unpooling_keeps_the_memory_format():
    x = sample((1, 2, 2, 3), torch.float32).to(memory_format=torch.channels_last)
    where = torch.arange(6).view(1, 1, 2, 3).expand(1, 2, 2, 3).contiguous()
    theirs, ours = (F.max_unpool2d(x.to(d), where.to(d), 2) for d in ("cpu", "jax"))
    assert ours.stride() == theirs.stride()
    torch.testing.assert_close(ours.cpu(), theirs)
