"""writing.py: what `out=` does beside its results: resizing, warning, refusing dtypes; one program per form."""

import warnings

import pytest
import torch

from torchax_core.testing import assert_matches_torch, assert_same_error, sample


def out(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="jax")


def test_results_come_before_what_is_updated() -> None:
    x = sample((2, 3, 4), torch.float32)
    for given in ((2, 3, 4), (0,)):
        found = []
        for device in ("cpu", "jax"):
            mean, var = torch.zeros(3, device=device), torch.ones(3, device=device)
            outs = [torch.empty(s, device=device) for s in (given, (3,), (3,))]
            names = dict(zip(("out", "save_mean", "save_invstd"), outs, strict=True))
            op = torch.ops.aten._native_batch_norm_legit.out
            results = op(x.to(device), None, None, mean, var, True, 0.1, 1e-5, **names)
            assert all(r is o for r, o in zip(results, outs, strict=True))
            found.append([*outs, mean, var])
        torch.testing.assert_close([t.cpu() for t in found[1]], found[0])


@pytest.mark.parametrize("given", [(2, 3, 5), (0,), (7,)])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_matmul_of_folded_batches(given) -> None:
    a, b = sample((2, 3, 4), torch.float32), sample((4, 5), torch.float32, seed=1)
    y = out(given)
    assert torch.matmul(a.to("jax"), b.to("jax"), out=y) is y
    torch.testing.assert_close(y.cpu(), a @ b)
    wanting = a.to("jax").requires_grad_()
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        torch.matmul(wanting, b.to("jax"), out=y)


def test_other_out_forms_that_torch_writes_through_views() -> None:
    a, b = sample((2, 3, 2, 3), torch.float32), sample((2, 1, 3, 4), torch.float32, seed=1)
    assert_matches_torch(torch.kron, a, b, forms=["out"])
    assert_matches_torch(torch.linalg.matrix_rank, sample((2, 4, 4), torch.float32), forms=["out"])
    assert_matches_torch(torch.linalg.matrix_rank, sample((4, 4), torch.float64), 1.0, forms=["out"])


def test_an_out_form_of_a_composite_function() -> None:
    a, y = sample((4, 4), torch.float32), out(0, dtype=torch.complex64)
    assert torch.linalg.eigvals(a.to("jax"), out=y) is y
    torch.testing.assert_close(*(torch.view_as_real(x).sort(0).values for x in (y.cpu(), torch.linalg.eigvals(a))))


def test_resizing_warns_each_time() -> None:
    x = sample((3, 4), torch.float32).to("jax")
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"resized since it had shape \[2\]") as caught:
            torch.fft.fft(x, out=out(2, dtype=torch.complex64))
        assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.fft.fft(x, out=out(0, dtype=torch.complex64))


@pytest.mark.parametrize("fn", [torch.mm, lambda x, y, out: torch.renorm(x, 2, 0, 1.0, out=out)])
def test_an_out_of_another_dtype_is_refused_as_torch_does(fn) -> None:
    x, wide = sample((3, 3), torch.float32), torch.zeros(3, 3, dtype=torch.float64)
    assert_same_error(lambda x, o: fn(x, x, out=o), x, wide, wording=True)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: torch.cat([x[:3], x[3:]], out=x),
        lambda x: torch.take(x, torch.tensor([1, 2]).to(x.device), out=x[:2]),
        lambda x: torch.add(x[:3], 1, out=x[1:4]),
    ],
)
def test_out_on_memory_that_is_read_is_refused_where_torch_does(write):
    for _ in range(2):  # the verdict is kept for calls that are well, only
        assert_same_error(write, torch.arange(6.0), wording=True)


@pytest.mark.parametrize(
    "write",
    [
        lambda x, at: x[1:].add_(x[:-1]),
        lambda x, at: x[1:].copy_(x[:-1]),
        lambda x, at: x.__setitem__(slice(1, None), x[:-1]),
        lambda x, at: x.add_(x[:1]),
        lambda x, at: x.mul_(x),
        lambda x, at: x[:4].view(2, 2).copy_(x[:4].view(2, 2).t()),
        lambda x, at: x[::2].add_(x[1::2]),
        lambda x, at: x[:2].copy_(x[3:5]),
        lambda x, at: x.addcmul_(x[:1], x),
        lambda x, at: x[1:].clamp_(min=x[:-1]),
        lambda x, at: x.index_copy_(0, at, x[1:3]),
        lambda x, at: x.lerp_(x[:1], 0.5),
    ],
)
def test_writes_in_place_to_memory_that_is_read_are_refused_where_torch_does(write) -> None:
    outcomes = []
    for device in ("cpu", "jax"):
        x, at = torch.arange(6.0, device=device), torch.tensor([0, 1], device=device)
        for _ in range(3):  # the second and third go by what is known of the first
            try:
                outcomes.append((write(x, at), x.tolist())[1])
            except RuntimeError as error:
                outcomes.append(str(error))
    assert outcomes[:3] == outcomes[3:]


def test_out_on_memory_that_is_read_elsewhere_or_in_place():
    assert_matches_torch(lambda x: torch.exp(x[:3], out=x[3:]), torch.arange(6.0))
    assert_matches_torch(lambda x: torch.add(x, 1, out=x), torch.arange(6.0))


def test_results_of_ops_without_meta_kernels_resize_outs() -> None:
    a, b = sample((4, 3), torch.float64), sample((4, 2), torch.float64, seed=1)
    assert_matches_torch(torch.geqrf, a, forms=["out"])
    outs = [out(0, dtype=d) for d in (torch.float64, torch.float64, torch.int64, torch.float64)]
    found = torch.linalg.lstsq(a.to("jax"), b.to("jax"), out=tuple(outs))
    torch.testing.assert_close(found.solution.cpu(), torch.linalg.lstsq(a, b).solution)
    assert found.solution is outs[0]
    factors = torch.lu(a.to("jax"), out=(out(0, dtype=torch.float64), out(0, dtype=torch.int32)))
    torch.testing.assert_close(factors[0].cpu(), torch.lu(a)[0])


def test_out_that_is_an_input_too_and_would_be_resized():
    def write(x):
        empty = x[:0].clone()
        return torch.cat([empty, x], out=empty)

    assert_same_error(write, torch.arange(6.0), wording=True)


def test_dtypes_of_out_are_checked_where_zeros_are_no_input():
    assert_same_error(lambda x: torch.multinomial(x, 2, out=torch.zeros_like(x)), torch.ones(2, 3), wording=True)


def test_out_of_ops_whose_result_depends_on_data():
    x = torch.arange(6.0)
    assert_matches_torch(lambda x: torch.masked_select(x, x > 2, out=torch.zeros_like(x)[:3]), x)
    assert_same_error(lambda x: torch.masked_select(x, x > 2, out=torch.zeros_like(x).long()), x, wording=True)
    assert_same_error(lambda x: torch.masked_select(x, x > 2, out=x[:3]), x, wording=True)


@pytest.mark.parametrize("shapes", [((0,), (0,)), ((5, 2), (2, 2)), ((1, 2), (2, 2))])
def test_each_of_a_list_of_outs_is_resized(shapes):
    def split(x):
        outs = [torch.zeros(shape, device=x.device) for shape in shapes]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.split_with_sizes_copy(x, [1, 2], out=outs)
        return outs, len(caught)

    assert_matches_torch(split, sample((3, 2), torch.float32))
