"""creation.py against CPU torch: lengths, dtype rules, values."""

import pytest
import torch

from torchax_core.testing import assert_matches_torch, assert_same_result, sample

DTYPES = [None, torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]


def assert_makes_the_same(factory, *args, **kwargs):
    """`factory` gives on device "jax" what it gives on the CPU."""
    on_device = [x.to("jax") if isinstance(x, torch.Tensor) else x for x in args]
    assert_same_result(factory(*on_device, **kwargs, device="jax"), factory(*args, **kwargs))


@pytest.mark.parametrize("dtype", [None, torch.bool, torch.int64, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_constant_fills(shape, dtype):
    for factory in (torch.zeros, torch.ones):
        assert_makes_the_same(factory, shape, dtype=dtype)
    assert_makes_the_same(torch.full, shape, 1, dtype=dtype)
    x = sample(shape, torch.float32)
    for like in (torch.zeros_like, torch.ones_like):
        assert_matches_torch(like, x, dtype=dtype)
    assert_matches_torch(torch.full_like, x, 3, dtype=dtype)
    assert_matches_torch(torch.Tensor.new_zeros, x, (2, 1), dtype=dtype)
    assert_matches_torch(torch.Tensor.new_ones, x, (2, 1), dtype=dtype)
    assert_matches_torch(torch.Tensor.new_full, x, (2, 1), 2, dtype=dtype)


@pytest.mark.parametrize("value", [True, 7, 2**60 + 1, 2.5, float("nan"), 1 - 2j, -1])
def test_full_keeps_all_of_the_value_and_infers_its_dtype(value):
    assert_makes_the_same(torch.full, (2,), value)
    assert_makes_the_same(torch.scalar_tensor, value, dtype=torch.complex128)


def test_empty_has_shape_and_dtype():
    for shape in [(), (0, 2), (2, 3)]:
        for dtype in (torch.float32, torch.int16, torch.bool):
            x = torch.empty(shape, dtype=dtype, device="jax")
            assert (x.shape, x.dtype, x.device.type) == (torch.Size(shape), dtype, "jax")
    x = torch.empty_strided((2, 3), (1, 2), device="jax")
    assert x.stride() == (1, 2)
    assert x.new_empty_strided((2, 2), (1, 2)).stride() == (1, 2)
    assert torch.empty_permuted((2, 3, 4), (0, 2, 1), device="jax").stride() == (12, 1, 3)
    assert torch.empty_like(x, dtype=torch.int8).dtype == torch.int8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("args", [(5,), (0,), (2.5,), (1, 7, 2), (7, 1, -2), (0, 10, 2.5), (1, 1)])
def test_arange(args, dtype):
    if dtype is torch.uint8 and args[-1] == -2:
        args = (1, 7, 3)
    assert_makes_the_same(torch.arange, *args, dtype=dtype)


def test_arange_float_after_int_of_the_same_value():
    assert_makes_the_same(torch.arange, 0, 3)
    assert_makes_the_same(torch.arange, 0.0, 3.0)


def test_arange_counts_by_float64_and_in_exact_integers():
    assert_makes_the_same(torch.arange, 0, 1, 0.1)
    assert_makes_the_same(torch.arange, 2**53 + 1, 2**53 + 4)
    assert_makes_the_same(torch.arange, 0.5, 3.2, 0.3, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("args", [(0, 3.5), (-0.5, 2.5), (0, 7, 1.5), (5.5, 0, -1.5)])
def test_arange_of_whole_dtype_between_fractions(args, dtype):
    assert_makes_the_same(torch.arange, *args, dtype=dtype)  # before 2.14, int64 is counted unlike int32


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.int64])
def test_range_includes_its_end(dtype):
    assert_makes_the_same(torch.range, 1, 4, dtype=dtype)
    assert_makes_the_same(torch.range, 0, 10, 2.5, dtype=dtype)


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.int64, torch.complex64])
@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_linspace_and_logspace(steps, dtype):
    assert_makes_the_same(torch.linspace, 1.5, -7.25, steps, dtype=dtype)
    assert_makes_the_same(torch.logspace, -1, 2, steps, dtype=dtype)
    assert_makes_the_same(torch.logspace, 0, 3, steps, base=2.0, dtype=dtype)


def test_linspace_of_tensor_ends():
    one, nine = torch.tensor(1.0), torch.tensor(9.0)
    for ends in [(one, nine), (one, 9), (1, nine)]:
        assert_makes_the_same(torch.linspace, *ends, 5)
        assert_makes_the_same(torch.logspace, *ends, 5)


@pytest.mark.parametrize("shape", [(0,), (3,), (2, 4), (4, 2)])
@pytest.mark.parametrize("dtype", [None, torch.bool, torch.int32])
def test_eye(shape, dtype):
    assert_makes_the_same(torch.eye, *shape, dtype=dtype)


@pytest.mark.parametrize("size", [(3, 4), (4, 3), (0, 3), (3, 3)])
@pytest.mark.parametrize("offset", [0, 1, -1, 5, -5])
def test_triangle_indices(size, offset):
    for indices in (torch.tril_indices, torch.triu_indices):
        assert_makes_the_same(indices, *size, offset)
        assert_makes_the_same(indices, *size, offset, dtype=torch.int32)


@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 8])
def test_windows(length, periodic):
    for window in (
        torch.hann_window,
        torch.hamming_window,
        torch.blackman_window,
        torch.bartlett_window,
        torch.kaiser_window,
    ):
        assert_makes_the_same(window, length, periodic)
    assert_makes_the_same(torch.hamming_window, length, periodic, 0.5, 0.3, dtype=torch.float64)
    assert_makes_the_same(torch.kaiser_window, length, periodic, 7.5, dtype=torch.float64)


def test_out_forms():
    for fn, args in [(torch.zeros, ((2, 3),)), (torch.ones, ((2,),)), (torch.full, ((2,), 3.5)), (torch.eye, (3,))]:
        out = torch.empty(0, device="jax")
        assert fn(*args, out=out) is out
        torch.testing.assert_close(out.cpu(), fn(*args))
    out = torch.empty(3, dtype=torch.int32, device="jax")
    assert torch.arange(3, out=out) is out
    torch.testing.assert_close(out.cpu(), torch.arange(3, dtype=torch.int32))
    out = torch.empty(5, dtype=torch.float64, device="jax")
    torch.linspace(0, 1, 5, out=out)
    torch.testing.assert_close(out.cpu(), torch.linspace(0, 1, 5, dtype=torch.float64))


@pytest.mark.parametrize("steps", [50, 8])
def test_linspace_in_integers_takes_whole_steps(steps):
    assert_makes_the_same(torch.linspace, steps, 1, steps, dtype=torch.int64)


@pytest.mark.parametrize("make", [torch.linspace, torch.logspace])
def test_an_out_of_another_shape_with_as_many_elements_is_filled(make):
    def filled(device):
        transposed, longer = torch.zeros(3, 2, device=device).t(), torch.zeros(7, 0, device=device)
        return make(0, 1, 6, out=transposed), make(0, 1, 6, out=longer)

    assert_same_result(filled("jax"), filled("cpu"), strides=True)


MADE = {
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x, **k: torch.full_like(x, 3, **k),
    "empty_like": torch.empty_like,
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x, **k: torch.randint_like(x, 1, 2, **k),
    "new_zeros": lambda x, **k: x.new_zeros(2, 3, **k),
    "new_ones": lambda x, **k: x.new_ones(2, 3, **k),
    "new_full": lambda x, **k: x.new_full((2,), 3, **k),
    "new_empty": lambda x, **k: x.new_empty(2, **k),
    "new_empty_strided": lambda x, **k: x.new_empty_strided((2, 3), (1, 2), **k),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", MADE)
def test_made_by_example_on_another_device(name, device):
    """Of a tensor on the device, there; and of one there, on the device."""
    x = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    make, ours = MADE[name], x.to("jax")
    for dtype in (None, torch.float64):
        expected = make(x, device=device, dtype=dtype)
        for found, where in (
            (make(ours, device=device, dtype=dtype), device),
            (make(x, device="jax", dtype=dtype), "jax"),
        ):
            assert found.device.type == where and found.dtype is expected.dtype
            assert found.shape == expected.shape and found.stride() == expected.stride()
            if device == "cpu" and "rand" not in name and "empty" not in name:
                assert torch.equal(found.cpu(), expected)
    assert make(ours, device="jax:0").device.type == "jax" and type(make(ours, device=device)) is torch.Tensor
