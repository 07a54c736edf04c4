"""copying.py against CPU torch: conversions between dtypes, copies, fills."""

import pytest
import torch

from torchax_core.testing import assert_matches_torch, assert_same_error, sample

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_to_dtype(source, target):
    assert_matches_torch(torch.Tensor.to, sample((2, 3), source), target)


def test_float_to_narrow_integers_wraps():
    x = torch.tensor([-1.0, 300.0, -129.0, 255.9])
    assert_matches_torch(torch.Tensor.to, x, torch.uint8)
    assert_matches_torch(torch.Tensor.to, x, torch.int8)


def test_complex_to_bool_asks_both_parts():
    assert_matches_torch(torch.Tensor.to, torch.tensor([0j, 1j, 1 + 0j]), torch.bool)


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_clone_is_a_copy(shape):
    x = sample(shape, torch.float32)
    assert_matches_torch(torch.clone, x, grad=True)
    ours = x.to("jax")
    copy = ours.clone()
    ours.add_(1)
    torch.testing.assert_close(copy.cpu(), x)


def test_contiguous_of_a_transposed_tensor():
    assert_matches_torch(lambda x: x.t().contiguous(), sample((2, 3), torch.float32), grad=True)


@pytest.mark.parametrize("source", [torch.int64, torch.float64, torch.bfloat16])
def test_copy_broadcasts_and_casts(source):
    for shape in [(2, 3), (3,), (1,), ()]:
        assert_matches_torch(torch.Tensor.copy_, sample((2, 3), torch.float32), sample(shape, source))
        assert_matches_torch(torch.Tensor.copy_, sample((2, 3), torch.int32), sample(shape, source))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fill_and_zero(dtype):
    x = sample((2, 3), dtype)
    assert_matches_torch(torch.fill, x, 3, forms=("functional", "inplace"))
    assert_matches_torch(torch.fill, x, torch.tensor(2), forms=("functional", "inplace"))
    assert_matches_torch(torch.Tensor.zero_, x)


def test_fill_keeps_large_integers():
    assert_matches_torch(torch.Tensor.fill_, torch.zeros(2, dtype=torch.int64), 2**60 + 1)
    assert_matches_torch(torch.Tensor.fill_, torch.zeros(2, dtype=torch.complex64), 1 - 2j)


def test_unsafe_view():
    assert_matches_torch(torch.ops.aten._unsafe_view, sample((2, 6), torch.float32), (3, -1))


@pytest.mark.parametrize("source", [torch.ones(3, 4), torch.ones(4)])
def test_copy_onto_an_expanded_tensor_is_refused(source):
    assert_same_error(lambda x, y: x.expand(3, 4).copy_(y), torch.zeros(3, 1), source, wording=True)


def test_more_dimensions_than_numpy_has():
    x = torch.arange(4.0).reshape([2] + [1] * 63 + [2])
    ours = x.to("jax")
    assert ours.neg().cpu().shape == x.shape
    assert torch.equal(ours.neg().cpu().flatten(), x.neg().flatten())
    with pytest.raises(RuntimeError, match="only tensors with up to 64 dims are supported"):
        ours.amax(0)
