"""Random ops: shapes and dtypes as torch's, the distributions' means and ranges, and seeds."""

import math

import pytest
import torch

from torchax_core.testing import assert_same_error

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
N = 20_000


def moments(x):
    x = x.detach().cpu().to(torch.complex128 if x.is_complex() else torch.float64)
    return x.mean().item(), x.std().item()


def assert_moments(x, mean, std):
    """Mean and standard deviation of a large sample, within what chance and the dtype's grid allow."""
    got_mean, got_std = moments(x)
    slack = 5 * std / math.sqrt(x.numel()) + 4 * torch.finfo(x.dtype).eps if x.is_floating_point() else 0.1
    assert abs(got_mean - mean) < max(slack, 0.05 * std), (got_mean, mean)
    assert abs(got_std - std) < 0.1 * std, (got_std, std)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64])
@pytest.mark.parametrize("shape", [(0,), (N,)])
def test_rand_and_randn(shape, dtype):
    for make in (torch.rand, torch.randn):
        made = make(shape, dtype=dtype, device="jax")
        like = getattr(torch, make.__name__ + "_like")(made)
        for x in (made, like):
            assert x.shape == shape and x.dtype == dtype and x.device.type == "jax"
    if shape == (N,) and not dtype.is_complex:
        uniform = torch.rand(shape, dtype=dtype, device="jax").cpu()
        assert uniform.min() >= 0 and uniform.max() < 1  # 1 excluded in half types too
        assert_moments(uniform, 0.5, math.sqrt(1 / 12))
        assert_moments(torch.randn(shape, dtype=dtype, device="jax"), 0, 1)


def test_a_complex_normal_has_variance_1_in_all():
    z = torch.randn(N, dtype=torch.complex64, device="jax").cpu()
    assert abs(z.real.var() - 0.5) < 0.05 and abs(z.imag.var() - 0.5) < 0.05


def test_factories_without_dtype_follow_the_default():
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.rand(2, device="jax").dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.rand(2, device="jax").dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_randint(dtype):
    x = torch.randint(2, 7, (N,), dtype=dtype, device="jax")
    assert x.dtype == dtype and sorted(x.cpu().unique().tolist()) == [2, 3, 4, 5, 6]
    assert sorted(torch.randint(3, (N,), dtype=dtype, device="jax").cpu().unique().tolist()) == [0, 1, 2]
    assert sorted(torch.randint_like(x, 3).cpu().unique().tolist()) == [0, 1, 2]
    assert sorted(torch.randint_like(x, 1, 3).cpu().unique().tolist()) == [1, 2]


def test_randint_of_64_bits():
    x = torch.randint(-(2**63), 2**63 - 1, (N,), device="jax").cpu()
    assert x.min() < -(2**62) and x.max() > 2**62
    x = torch.randint(2**40, 2**40 + 3, (N,), device="jax").cpu()
    assert x.unique().tolist() == [2**40, 2**40 + 1, 2**40 + 2]


def test_randperm():
    x = torch.randperm(100, device="jax")
    assert x.dtype == torch.int64 and x.cpu().tolist() != list(range(100))
    assert sorted(x.cpu().tolist()) == list(range(100))
    assert torch.randperm(0, device="jax").shape == (0,)
    assert torch.randperm(3, dtype=torch.float32, device="jax").dtype == torch.float32


FILLS = {
    "normal_": ((1.0, 2.0), 1.0, 2.0),
    "uniform_": ((2.0, 4.0), 3.0, math.sqrt(4 / 12)),
    "exponential_": ((2.0,), 0.5, 0.5),
    "bernoulli_": ((0.25,), 0.25, math.sqrt(0.1875)),
    "geometric_": ((0.5,), 2.0, math.sqrt(2.0)),
    "log_normal_": ((0.0, 0.25), math.exp(0.03125), 0.2616),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in FILLS), ("normal_", torch.float64), ("exponential_", torch.bfloat16)],
)
def test_fills_change_their_tensor(name, dtype):
    arguments, mean, std = FILLS[name]
    x = torch.full((N,), -7.0, dtype=dtype, device="jax")
    assert getattr(x, name)(*arguments) is x
    assert x.dtype == dtype
    assert_moments(x, mean, std)


def test_a_fill_of_a_view_reaches_its_base():
    x = torch.zeros(3, 4, device="jax")
    x[1].normal_()
    assert (x[1] != 0).all().item() and (x[::2] == 0).all().item()


def test_exponential_is_never_zero():
    x = torch.empty(200_000, device="jax").exponential_()
    assert x.min().item() > 0 and x.log().isfinite().all().item()


def test_cauchy():
    x = torch.empty(N, device="jax").cauchy_(3.0, 2.0).cpu()
    assert abs(x.median() - 3) < 0.2
    assert abs((x - 3).abs().median() - 2) < 0.2  # half of it is within sigma of the median


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.int8, 127), (torch.uint8, 255), (torch.bool, 1), (torch.float16, 2048)]
)
def test_random_covers_the_range_of_the_dtype(dtype, largest):
    x = torch.zeros(N, dtype=dtype, device="jax").random_()
    assert x.dtype == dtype and x.cpu().min() == 0 and x.cpu().max() == largest


def test_random_between():
    x = torch.zeros(N, dtype=torch.int64, device="jax")
    assert x.random_(3).cpu().unique().tolist() == [0, 1, 2]
    assert x.random_(-2, 1).cpu().unique().tolist() == [-2, -1, 0]
    assert x.random_(5, None).cpu().min() >= 5


def test_normal_of_tensors():
    mean = torch.tensor([[0.0], [100.0]], device="jax").expand(2, N)
    x = torch.normal(mean, torch.tensor([1.0], device="jax"))
    assert x.shape == (2, N)
    assert_moments(x[0], 0, 1)
    assert_moments(x[1], 100, 1)
    assert_moments(torch.normal(mean[0], 3.0), 0, 3)
    assert_moments(torch.normal(5.0, torch.ones(N, device="jax")), 5, 1)
    assert_moments(torch.normal(1.0, 2.0, (N,), device="jax"), 1, 2)


def test_bernoulli_of_probabilities():
    p = torch.tensor([0.0, 1.0, 0.5], device="jax")[:, None].expand(3, N)
    x = torch.bernoulli(p)
    assert x.dtype == torch.float32 and (x[0] == 0).all().item() and (x[1] == 1).all().item()
    assert_moments(x[2], 0.5, 0.5)
    counts = torch.zeros(3, N, dtype=torch.int64, device="jax").bernoulli_(p)
    assert counts.dtype == torch.int64 and counts[1].sum().item() == N and 0.4 * N < counts[2].sum().item() < 0.6 * N


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_multinomial(dtype):
    weights = torch.tensor([[0.0, 1.0, 3.0, 0.0], [2.0, 0.0, 0.0, 2.0]], dtype=dtype, device="jax")
    many = torch.multinomial(weights, N, replacement=True).cpu()
    assert many.shape == (2, N) and many.dtype == torch.int64
    assert many[0].unique().tolist() == [1, 2] and many[1].unique().tolist() == [0, 3]
    assert abs((many[0] == 2).double().mean() - 0.75) < 0.02
    both = torch.multinomial(weights, 2).cpu()
    assert both[0].sort().values.tolist() == [1, 2] and both[1].sort().values.tolist() == [0, 3]
    assert torch.multinomial(weights[0], 1).shape == (1,)
    ones = torch.multinomial(torch.ones(N, 2, device="jax"), 1)
    assert abs(ones.double().mean().item() - 0.5) < 0.02


def test_poisson_binomial():
    rate = torch.full((N,), 4.0, device="jax")
    assert_moments(torch.poisson(rate), 4, 2)
    assert torch.poisson(torch.zeros(3, device="jax")).cpu().tolist() == [0, 0, 0]
    count, p = torch.full((N,), 10.0, device="jax"), torch.tensor(0.25, device="jax")
    assert_moments(torch.binomial(count, p.expand(N)), 2.5, math.sqrt(10 * 0.1875))


def test_gamma_and_dirichlet():
    dtype = torch.float64
    shape = torch.full((N,), 3.0, dtype=dtype, device="jax")
    assert_moments(torch._standard_gamma(shape), 3, math.sqrt(3))
    x = torch._sample_dirichlet(torch.tensor([1.0, 2.0, 0.01], dtype=dtype, device="jax").expand(N, 3)).cpu()
    assert torch.allclose(x.sum(-1), torch.ones(N, dtype=dtype)) and (x >= 0).all()
    assert abs(x[:, 1].mean() - 2 / 3.01) < 0.02


def test_reparametrized_draws_have_gradients():
    concentration = torch.tensor([0.5, 2.0], device="jax", requires_grad=True)
    torch.distributions.Gamma(concentration, torch.ones(2, device="jax")).rsample((500,)).mean().backward()
    assert ((concentration.grad * 2 - 1).abs() < 0.4).all().item()  # the mean of a draw is its concentration
    torch.distributions.Dirichlet(concentration).rsample((4,))[:, 0].sum().backward()
    assert concentration.grad.isfinite().all().item()


def test_gamma_gradient():
    # torch's own formula is an approximation, good to about 1e-3
    a = torch.linspace(0.5, 8, 16, dtype=torch.float64)
    x = torch._standard_gamma(a)
    ours = torch._standard_gamma_grad(a.to("jax"), x.to("jax")).cpu()
    torch.testing.assert_close(ours, torch._standard_gamma_grad(a, x), rtol=2e-3, atol=1e-4)


def test_dirichlet_gradient():
    concentration = torch.tensor([[0.3, 2.0, 5.0], [1.0, 1.0, 40.0]], dtype=torch.float64)
    x = torch._sample_dirichlet(concentration)
    total = concentration.sum(-1, keepdim=True).expand_as(x)
    ours = torch._dirichlet_grad(x.to("jax"), concentration.to("jax"), total.to("jax")).cpu()
    torch.testing.assert_close(ours, torch._dirichlet_grad(x, concentration, total), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout(dtype):
    x = torch.full((N,), 2.0, dtype=dtype, device="jax", requires_grad=True)
    y = torch.nn.functional.dropout(x, 0.25)
    dropped = (y == 0).double().mean().item()
    assert abs(dropped - 0.25) < 0.02 and abs(y.detach().cpu().double().max() - 2 / 0.75) < 0.02
    y.sum().backward()
    assert torch.equal((x.grad == 0).cpu(), (y == 0).cpu())
    y, mask = torch.native_dropout(x, 0.25, True)
    assert mask.dtype == torch.bool and y.dtype == dtype and torch.equal(mask.cpu(), (y != 0).cpu())
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal((gradient != 0).cpu(), mask.cpu())
    y, mask = torch.native_dropout(x, 0.25, False)
    assert torch.equal(y.cpu(), x.cpu()) and mask.all().item()
    assert (torch.native_dropout(x, 1.0, True)[0] == 0).all().item()


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(4, device="jax"),
        lambda: torch.empty(4, device="jax").normal_(),
        lambda: torch.randint(0, 10**6, (4,), device="jax"),
        lambda: torch.multinomial(torch.ones(4, 1000, device="jax"), 1),
        lambda: torch.nn.functional.dropout(torch.arange(1.0, 65, device="jax")),
    ],
)
def test_the_seed_decides_and_each_call_differs(draw):
    torch.manual_seed(3)
    first, second = draw().cpu(), draw().cpu()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(draw().cpu(), first)
    torch.manual_seed(4)
    assert not torch.equal(draw().cpu(), first)


@pytest.mark.usefixtures("new_signatures")
@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x.exponential_(0),
        lambda x: x.cauchy_(0, 0),
        lambda x: x.log_normal_(0, 0),
        lambda x: x.geometric_(1),
        lambda x: torch.multinomial(x.long(), 1),
        lambda x: torch.multinomial(x, 0),
        lambda x: torch.multinomial(x, 4),
        lambda x: torch.multinomial(-x, 1),
        lambda x: torch.multinomial(x / 0, 1),
        lambda x: torch.multinomial(x - x, 1),
        lambda x: torch.bernoulli(x + 1),
        lambda x: x.bernoulli_(1.5),
        lambda x: x.bernoulli_(-x),
        lambda x: x.uniform_(3, 1),
        lambda x: torch.normal(0.0, -x),
        lambda x: torch.normal(x, -x),
        lambda x: torch.poisson(-x),
    ],
)
def test_parameters_out_of_range(draw):
    assert_same_error(draw, torch.ones(3), wording=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_standard_gamma_grad(dtype):
    alpha = torch.tensor([0.01, 0.3, 0.9, 1.0, 2.5, 8.0, 40.0, 1000.0], dtype=dtype)
    draw = alpha * torch.tensor([0.5, 1.5, 0.2, 1.0, 2.0, 1.1, 0.9, 1.02], dtype=dtype)
    # CPU torch expands in series and rational functions, good to about 1e-3
    expected = torch._standard_gamma_grad(alpha, draw)
    actual = torch._standard_gamma_grad(alpha.to("jax"), draw.to("jax"))
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.cpu(), expected, rtol=2e-3, atol=1e-5)


def test_bounds_are_looked_at_in_every_call():
    x = torch.empty(11, device="jax").uniform_(1, 2)
    with pytest.raises(RuntimeError, match="from"):
        x.uniform_(3, 1)
    assert ((x >= 1) & (x < 2)).all()
