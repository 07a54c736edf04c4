"""Indexing ops against torch: integer and bool indices, scatters and their reductions, masks, and writes to copies."""

import pytest
import torch

import torchax_core
from torchax_core.testing import assert_matches_torch, assert_same_error, sample

pytestmark = [
    pytest.mark.filterwarnings("ignore:index_reduce.. is in beta"),
    pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter with Tensor src is deprecated"),
]

DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64]


def integers(shape, low, high, seed=5):
    return sample(shape, torch.int64, low=low, high=high, seed=seed)


def mask(shape, seed=5):
    return sample(shape, torch.bool, seed=seed)


# -- index and index_put ----------------------------------------------------------------------------

INDICES = {
    "one": (integers((3,), -2, 2),),
    "int32": (integers((3,), -2, 2).int(),),
    "0-d": (torch.tensor(-1),),
    "table": (integers((2, 3), -2, 2),),
    "second": (slice(None), integers((4,), -3, 3)),
    "neighbours": (slice(None), integers((4,), -3, 3), integers((2, 1), -4, 4)),
    "apart": (integers((4,), -2, 2), slice(None), integers((2, 1), -4, 4)),
    "none": (integers((0,), 0, 2),),
    "mask": (mask((2,)),),
    "mask of two dims": (slice(None), mask((3, 4))),
    "mask of all": (mask((2, 3, 4, 2)),),
    "empty mask": (torch.zeros(2, 3, dtype=torch.bool),),
    "mask and index": (slice(None), torch.tensor([True, False, True]), torch.tensor([0, -1])),
    "masks apart": (torch.tensor([True, True]), slice(None), torch.tensor([True, False, False, True])),
    "mask of one": (torch.tensor([False, True]), integers((3,), -3, 3)),
}


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_getitem(name, dtype):
    x = sample((2, 3, 4, 2), dtype)
    assert_matches_torch(lambda x, i: x[i], x, INDICES[name], grad=dtype == torch.float32)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("name", INDICES)
def test_index_put(name, accumulate):
    x = sample((2, 3, 4, 2), torch.float32)
    indices = [None if isinstance(i, slice) else i.long() if i.dtype == torch.int32 else i for i in INDICES[name]]
    if not accumulate:  # several writes to one element: which stays is undefined
        indices = [
            i.flatten()[:1] if i is not None and not i.dtype == torch.bool and i.numel() > 2 else i for i in indices
        ]
    selected = x[tuple(slice(None) if i is None else i for i in indices)]
    put = torch.ops.aten.index_put.default
    for values in (sample(selected.shape, torch.float32, seed=1), torch.tensor(7.0), torch.tensor([7.0])):
        assert_matches_torch(put, x, indices, values, accumulate, grad=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_setitem(dtype):
    def write(x, i, v):
        x[i] = v
        return x

    x = sample((3, 4), dtype)
    value = sample((4,), dtype, seed=1)
    for index in (torch.tensor([0, -1]), torch.tensor([True, False, True]), slice(0, 2), 1):
        assert_matches_torch(write, x, index, value)
    assert_matches_torch(write, x, mask((3, 4)), sample((), dtype, seed=2))
    assert_matches_torch(write, x, mask((3, 4)), sample((int(mask((3, 4)).sum()),), dtype, seed=2))
    assert_matches_torch(write, x, (slice(None), torch.tensor([1, -1])), sample((3, 2), dtype, seed=2))


def test_a_masked_write_compiles_once_for_any_number_of_true():
    x = torch.zeros(6, device="jax")
    value = torch.tensor(1.0, device="jax")
    for count in range(7):
        x[torch.arange(6, device="jax") < count] = value
        assert x.sum().item() == count
    # and so under a trace, where the number is unknown
    import torchax_core

    @torchax_core.jit
    def write(x, at):
        y = x.clone()
        y[at] = 5.0
        y.index_put_((at[:3].repeat(2),), torch.ones((), device="jax"), accumulate=True)
        return y

    for count in (0, 2, 6):
        at = torch.arange(6, device="jax") < count
        expected = torch.zeros(6)
        expected[at.cpu()] = 5.0
        expected[at.cpu()[:3].repeat(2)] += 1.0
        assert torch.equal(write(torch.zeros(6, device="jax"), at).cpu(), expected)


def test_a_masked_read_is_refused_under_a_trace():
    import torchax_core

    @torchax_core.jit
    def read(x):
        return x[x > 0]

    with pytest.raises(torchax_core.errors.DataDependentError, match="nonzero_static"):
        read(torch.ones(3, device="jax"))


def test_bad_indices_raise_as_torch_does():
    x = sample((2, 3), torch.float32)
    assert_same_error(lambda x, i: x[i], x, mask((3, 3)))
    assert_same_error(torch.gather, x, 0, torch.zeros(2, 5, dtype=torch.int64))
    assert_same_error(torch.index_select, x, 5, torch.tensor([0]))


def test_accumulating_in_half_types_keeps_the_sum():
    zeros, index = (
        torch.zeros(1, dtype=torch.bfloat16, device="jax"),
        torch.zeros(1000, dtype=torch.int64, device="jax"),
    )
    ones = torch.ones(1000, dtype=torch.bfloat16, device="jax")
    assert zeros.index_put([index], ones, accumulate=True).item() == 1000
    assert zeros.index_add(0, index, ones).item() == 1000
    assert zeros.scatter_add(0, index, ones).item() == 1000


# -- gather and scatter -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "dim", "index"),
    [
        ((3, 4), 0, integers((2, 4), 0, 3)),
        ((3, 4), -1, integers((3, 6), 0, 4)),
        ((3, 4, 2), 1, integers((2, 5, 1), 0, 4)),
        ((3,), 0, torch.tensor(2)),
        ((), 0, torch.tensor([0])),
        ((), 0, torch.tensor(0)),
        ((3, 4), 1, torch.empty(0, dtype=torch.int64)),
        ((0, 4), 1, integers((0, 2), 0, 4)),
    ],
)
def test_gather(shape, dim, index, dtype):
    assert_matches_torch(torch.gather, sample(shape, dtype), dim, index, grad=dtype == torch.float32)


SCATTERS = [
    ((3, 4), 0, torch.tensor([[2, 0, 1, 1]])),
    ((3, 4), 1, torch.tensor([[3, 1], [0, 2]])),
    ((2, 3, 4), -1, torch.tensor([[[3], [1]]])),
    ((3,), 0, torch.tensor(2)),
    ((), 0, torch.tensor(0)),
    ((3, 4), 1, torch.empty(0, dtype=torch.int64)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim", "index"), SCATTERS)
def test_scatter(shape, dim, index, dtype):
    x, src = sample(shape, dtype), sample([n + 1 for n in index.shape], dtype, seed=1)
    assert_matches_torch(torch.scatter, x, dim, index, src, forms=("functional", "inplace"))
    assert_matches_torch(torch.scatter, x, dim, index, True if dtype == torch.bool else 7)
    assert_matches_torch(torch.scatter_add, x, dim, index, src)
    if dtype == torch.float32:  # torch's own gradient refuses a larger `src`
        src = sample(index.shape, dtype, seed=1)
        assert_matches_torch(torch.scatter, x, dim, index, src, grad=True)
        assert_matches_torch(torch.scatter_add, x, dim, index, src, grad=True)
    if dtype != torch.bool:
        for reduce in ("add", "multiply"):
            assert_matches_torch(torch.scatter, x, dim, index, src, reduce=reduce)
            assert_matches_torch(torch.scatter, x, dim, index, 3, reduce=reduce)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float64])
def test_scatter_reduce_and_index_reduce(dtype, reduce, include_self):
    x, src, index = sample((3, 4), dtype), sample((5, 3), dtype, seed=1), integers((5, 3), 0, 3)
    grad = dtype == torch.float64
    assert_matches_torch(torch.scatter_reduce, x, 0, index, src, reduce, include_self=include_self, grad=grad)
    if reduce != "sum":
        src = sample((3, 6), dtype, seed=1)
        index = torch.tensor([0, 3, 3, 0, 3, 2])
        assert_matches_torch(torch.index_reduce, x, 1, index, src, reduce, include_self=include_self, grad=grad)


@pytest.mark.parametrize("include_self", [True, False])
def test_a_reduction_keeps_nan(include_self):
    x, index = torch.zeros(2), torch.tensor([0, 0, 1])
    src = torch.tensor([1.0, float("nan"), 2.0])
    for reduce in ("amax", "amin", "sum"):
        assert_matches_torch(torch.scatter_reduce, x, 0, index, src, reduce, include_self=include_self)


# -- whole slices ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), [((3, 4), 0), ((3, 4), -1), ((5,), 0), ((), 0), ((2, 3, 0), 1)])
def test_index_ops(shape, dim, dtype):
    n = shape[dim] if shape else 1
    index = torch.tensor([n - 1, 0])[: 1 if not shape else 2]
    x = sample(shape, dtype)
    source = sample([len(index) if i == dim % len(shape) else s for i, s in enumerate(shape)], dtype, seed=1)
    grad = dtype == torch.float32
    assert_matches_torch(torch.index_select, x, dim, index, grad=grad)
    assert_matches_torch(torch.index_select, x, dim, index.int())
    assert_matches_torch(torch.index_copy, x, dim, index, source, grad=grad, forms=("functional", "inplace"))
    alpha = True if dtype == torch.bool else 2
    assert_matches_torch(
        torch.index_add, x, dim, index, source, alpha=alpha, grad=grad, forms=("functional", "inplace")
    )
    value = True if dtype == torch.bool else 7
    assert_matches_torch(torch.index_fill, x, dim, index, value, grad=grad, forms=("functional", "inplace"))
    assert_matches_torch(torch.index_fill, x, dim, index, torch.tensor(value, dtype=dtype))


def test_integers_stay_exact():
    big = 2**60 + 1
    x = torch.tensor([big, 3])
    assert_matches_torch(torch.index_add, x, 0, torch.tensor([0]), torch.tensor([big]), alpha=3)
    assert_matches_torch(torch.masked_fill, x, torch.tensor([False, True]), big)
    assert_matches_torch(torch.index_fill, x, 0, torch.tensor([1]), big)
    assert_matches_torch(torch.scatter, x, 0, torch.tensor([1]), big)


@pytest.mark.parametrize("dtype", DTYPES)
def test_take_and_put(dtype):
    x, index = sample((3, 4), dtype), torch.tensor([[11, -12], [4, 7]])
    assert_matches_torch(torch.take, x, index, grad=dtype == torch.float32)
    source = sample((2, 2), dtype, seed=1)
    assert_matches_torch(torch.Tensor.put, x, index, source, grad=dtype == torch.float32)
    assert_matches_torch(torch.Tensor.put, x, index * 0, source, True)
    assert_matches_torch(torch.take_along_dim, x, torch.tensor([[0, 3]]), 1)


# -- masks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "mask_shape"),
    [((3, 4), (3, 4)), ((3, 4), (4,)), ((), ()), ((0,), (0,)), ((1, 4), (3, 1)), ((4,), (2, 4))],
)
def test_masked_ops(shape, mask_shape, dtype):
    x, at = sample(shape, dtype), mask(mask_shape)
    grad = dtype == torch.float32
    value = True if dtype == torch.bool else 7
    assert_matches_torch(torch.masked_fill, x, at, value, grad=grad)
    assert_matches_torch(torch.masked_fill, x, at, torch.tensor(value, dtype=dtype), grad=grad)
    assert_matches_torch(torch.masked_select, x, at, grad=grad)
    if shape == torch.broadcast_shapes(shape, mask_shape):
        assert_matches_torch(torch.masked_scatter, x, at, sample((15,), dtype, seed=1), grad=grad)


def test_masked_fill_with_infinity():
    at = mask((3, 4))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_matches_torch(
            torch.masked_fill, sample((3, 4), dtype), at, float("-inf"), forms=("functional", "inplace")
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4), (5,), (), (0,), (2, 0, 3), (2, 2, 2)])
def test_nonzero(shape, dtype):
    x = sample(shape, dtype)
    if dtype != torch.bool:
        x = x * mask(shape)
    assert_matches_torch(torch.nonzero, x)
    assert_matches_torch(torch.argwhere, x)
    assert_matches_torch(lambda x: torch.nonzero_static(x, size=4), x)
    assert_matches_torch(lambda x: torch.nonzero_static(x, size=2, fill_value=9), x)
    if shape:
        assert_matches_torch(lambda x: torch.nonzero(x, as_tuple=True), x)


# -- writes to copies of views ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_slice_scatter(dtype):
    x = sample((5, 6), dtype)
    for dim, start, end, step in [
        (0, 1, 3, 1),
        (1, 0, None, 2),
        (1, 1, -1, 3),
        (-1, -4, 100, 1),
        (0, None, None, 1),
        (0, 3, 1, 1),
    ]:
        selected = x.transpose(0, dim)[slice(start, end, step)].transpose(0, dim)
        src = sample(selected.shape, dtype, seed=1)
        assert_matches_torch(torch.slice_scatter, x, src, dim, start, end, step, grad=dtype == torch.float32)


def test_select_and_diagonal_scatter():
    x = sample((3, 4, 5), torch.float32)
    assert_matches_torch(torch.select_scatter, x, sample((3, 5), torch.float32, seed=1), 1, -2, grad=True)
    for offset, dim1, dim2 in [(0, 0, 1), (1, 1, 2), (-2, 2, 0), (2, -1, 0), (-3, 0, 1)]:
        src = sample(x.diagonal(offset, dim1, dim2).shape, torch.float32, seed=1)
        assert_matches_torch(torch.diagonal_scatter, x, src, offset, dim1, dim2, grad=True)
    assert_matches_torch(torch.as_strided_scatter, x, sample((2, 3), torch.float32, seed=1), (2, 3), (7, 2), 4)


@pytest.mark.parametrize(("size", "step"), [(3, 1), (2, 2), (2, 3), (1, 1), (7, 1), (3, 4)])
def test_gradients_of_views(size, step):
    x = sample((2, 7, 3), torch.float64)
    assert_matches_torch(lambda x: x.unfold(1, size, step), x, grad=True)


def test_gradients_of_slices_selects_and_diagonals():
    x = sample((4, 5, 4), torch.float64)
    assert_matches_torch(lambda x: x[1:, ::2, -3:-1] * 2, x, grad=True)
    assert_matches_torch(lambda x: x[-1, :, 2] * 2, x, grad=True)
    assert_matches_torch(lambda x: x.diagonal(1, 2, 0) * 2, x, grad=True)
    assert_matches_torch(lambda x: x[3:1] * 2, x, grad=True)


def test_errors_say_what_torch_says():
    x = sample((4, 4), torch.float32)
    said = assert_same_error(torch.index_add, x[:3, :2], 0, torch.tensor([0, 2]), torch.ones(2))
    assert "excluding the specified dimension. Got self.shape = [3, 2] source.shape = [2]" in said
    said = assert_same_error(torch.as_strided_scatter, x, x[:2, :2], (2, 2), (200, 200))
    assert "itemsize 4 requiring a storage size of 1604 are out of bounds for storage of size 64" in said


REFUSED = {
    "index": (lambda x, i, v: x[i], [1, 4]),
    "index below": (lambda x, i, v: x[i], [1, -5]),
    "index of a view": (lambda x, i, v: x.view(2, 2).t()[:, i], [0, 2]),
    "index by a view": (lambda x, i, v: x[i[::2]], [4, 0, 0, 0]),
    "setitem": (lambda x, i, v: x.index_put_((i,), v), [1, 4]),
    "mask": (lambda x, i, v: x.index_put_((i > 0,), v), [1, 0, 1, 1]),
    "masked_scatter": (lambda x, i, v: x.masked_scatter(i > 0, v), [1, 0, 1, 1]),
    "gather": (lambda x, i, v: x.gather(0, i), [1, -1]),
    "scatter_": (lambda x, i, v: x.scatter_(0, i, v), [1, 4]),
    "scatter_add": (lambda x, i, v: x.scatter_add(0, i, v), [1, 4]),
    "scatter_reduce": (lambda x, i, v: x.scatter_reduce(0, i, v, "amax"), [1, 4]),
    "index_select": (lambda x, i, v: x.index_select(0, i), [1, -1]),
    "index_add": (lambda x, i, v: x.index_add(0, i, v), [1, 4]),
    "index_fill": (lambda x, i, v: x.index_fill(0, i, 2.0), [1, 4]),
    "take": (lambda x, i, v: x.take(i), [1, 4]),
    "put_": (lambda x, i, v: x.put_(i, v), [1, 4]),
    "vmap": (lambda x, i, v: torch.func.vmap(lambda row, at: row[at])(x.view(2, 2), i), [0, 2]),
}


@pytest.mark.usefixtures("new_signatures")
@pytest.mark.parametrize(("fn", "index"), REFUSED.values(), ids=REFUSED)
def test_what_cpu_torch_refuses_for_its_values_a_new_signature_refuses(fn, index):
    assert_same_error(fn, torch.arange(4.0), torch.tensor(index), torch.ones(2), wording=True)


def test_later_calls_of_a_signature_are_not_looked_at():
    """They would wait for the device: reads take the nearest element, and writes are dropped."""
    x = torch.arange(5.0, device="jax")
    for last, read in ((4, 4.0), (9, 4.0)):
        at = torch.tensor([0, last], device="jax")
        assert x.gather(0, at).tolist() == [0.0, read]
        assert x.scatter(0, at, 7.0).tolist() == [7.0, 1.0, 2.0, 3.0, 7.0 if last == 4 else 4.0]


def test_a_trace_has_no_values_to_look_at():
    x, at = torch.arange(6.0, device="jax"), torch.tensor([0, 9], device="jax")
    assert torchax_core.jit(lambda x, at: x.gather(0, at))(x, at).tolist() == [0.0, 5.0]


@pytest.mark.parametrize("at", [torch.tensor([2, 0]), torch.tensor([True, False, True])])
def test_indices_may_lie_on_the_cpu(at):
    """As on every accelerator, for reading and for writing."""
    x = sample((3, 4), torch.float32)
    ours, expected = x.to("jax"), x.clone()
    assert torch.equal(ours[at].cpu(), expected[at])
    ours[at], expected[at] = 1.0, 1.0
    ours[..., at[:1].long()] = expected[..., at[:1].long()] = 2.0
    ours.index_put_((at,), torch.tensor(3.0), accumulate=True)
    expected.index_put_((at,), torch.tensor(3.0), accumulate=True)
    assert torch.equal(ours.cpu(), expected)
