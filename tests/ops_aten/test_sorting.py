"""sorting.py against CPU torch. Which of several equal elements an unstable sort or topk takes first is not defined."""

import math

import pytest
import torch

from torchax_core.errors import DataDependentError
from torchax_core.testing import assert_matches_torch, assert_same_error, sample

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
SPECIAL = torch.tensor([[1.0, math.nan, -0.0, 0.0, -math.inf], [math.inf, -math.nan, -1.0, math.nan, 2.0]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("descending", [False, True])
def test_stable_sort(descending, dtype):
    x = sample((4, 9), dtype)
    assert_matches_torch(torch.sort, x, stable=True, descending=descending)
    assert_matches_torch(torch.sort, x, dim=0, stable=True, descending=descending)
    assert_matches_torch(torch.argsort, x, stable=True, descending=descending)
    assert_matches_torch(torch.sort, sample((), dtype), descending=descending)
    assert_matches_torch(torch.sort, sample((2, 0), dtype), descending=descending)
    assert_matches_torch(torch.msort, x)


@pytest.mark.parametrize("descending", [False, True])
def test_sort_puts_nan_above_everything(descending):
    assert_matches_torch(torch.sort, SPECIAL, stable=True, descending=descending)
    assert_matches_torch(
        lambda x: torch.sort(x, descending=descending).values, sample((3, 4), torch.float64), grad=True
    )


@pytest.mark.parametrize("dtype", DTYPES[1:])  # torch has no topk of bools on CPU
@pytest.mark.parametrize("largest", [True, False])
def test_topk(largest, dtype):
    x = sample((4, 9), dtype)
    assert_matches_torch(lambda t: torch.topk(t, 3, largest=largest).values, x)
    assert_matches_torch(lambda t: torch.topk(t, 2, dim=0, largest=largest).values, x)
    assert_matches_torch(lambda t: t.gather(1, torch.topk(t, 4, largest=largest).indices), x)
    assert_matches_torch(torch.topk, sample((), dtype), 1)
    assert_matches_torch(torch.topk, x, 0)


@pytest.mark.parametrize("largest", [True, False])
def test_topk_of_different_numbers(largest):
    x = torch.randperm(24).reshape(2, 3, 4).double()
    assert_matches_torch(torch.topk, x, 2, 1, largest)
    assert_matches_torch(lambda t: torch.topk(t, 2, -1, largest).values, x, grad=True)
    assert_matches_torch(lambda t: torch.topk(t, 5, -1, largest).values + 0.0, SPECIAL)  # 0.0 and -0.0 are equal
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_matches_torch(torch.topk, torch.tensor([-2.0, 3.0, -5.0, 0.0, 7.0], dtype=dtype), 4, 0, largest)
    integers = torch.tensor([-128, 127, 0, -1, 5], dtype=torch.int8)
    assert_matches_torch(torch.topk, integers, 5, 0, largest)
    assert_same_error(torch.topk, x, 9)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("right", [False, True])
def test_searchsorted(right, dtype):
    edges = sample((3, 6), dtype).sort(-1).values
    values = sample((3, 4), dtype, seed=1)
    assert_matches_torch(torch.searchsorted, edges, values, right=right)
    assert_matches_torch(torch.searchsorted, edges[0].contiguous(), values, right=right, out_int32=True)
    assert_matches_torch(torch.searchsorted, edges[0].contiguous(), 2, right=right)
    assert_matches_torch(torch.bucketize, values, edges[0].contiguous(), right=right)
    assert_matches_torch(torch.bucketize, 1, edges[0].contiguous(), right=right)


def test_searchsorted_corners():
    edges = torch.tensor([0.0, 1.0, 1.0, math.nan])
    assert_matches_torch(torch.searchsorted, edges, torch.tensor([math.nan, 1.0, math.inf, -math.inf]))
    assert_matches_torch(torch.searchsorted, edges, torch.tensor([math.nan, 1.0]), side="right")
    assert_matches_torch(torch.searchsorted, torch.zeros(0), torch.tensor([1.0, 2.0]))
    assert_matches_torch(torch.searchsorted, torch.zeros(2, 0), torch.zeros(2, 3))
    assert_matches_torch(torch.searchsorted, edges, torch.zeros(0))
    shuffled = torch.tensor([5.0, 1.0, 3.0])
    assert_matches_torch(torch.searchsorted, shuffled, torch.tensor([2.0, 4.0]), sorter=torch.tensor([1, 2, 0]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_unique(dtype):
    for shape in [(), (0,), (3, 5)]:
        assert_matches_torch(torch.unique, sample(shape, dtype), return_inverse=True, return_counts=True)
        assert_matches_torch(torch.unique, sample(shape, dtype))
        assert_matches_torch(torch.unique_consecutive, sample(shape, dtype), return_inverse=True, return_counts=True)
    x = sample((6, 2), dtype, low=0, high=2)
    for dim in (0, 1):
        assert_matches_torch(torch.unique, x, dim=dim, return_inverse=True, return_counts=True)
        assert_matches_torch(torch.unique_consecutive, x, dim=dim, return_inverse=True, return_counts=True)


def test_unique_of_no_slices_and_of_empty_ones():
    for unique in (torch.unique, torch.unique_consecutive):
        assert_matches_torch(unique, torch.empty(0, 3), dim=0, return_inverse=True, return_counts=True)
        for shape in ((3, 0), (0, 0)):
            assert_same_error(unique, torch.empty(shape), dim=0, wording=True)


def test_unique_under_jit_names_the_alternative():
    import torchax_core

    with pytest.raises(DataDependentError, match="size=n"):
        torchax_core.jit(lambda x: torch.unique(x))(torch.ones(3, device="jax"))
