"""activation.py against CPU torch: values, kinks, dtypes and gradients of activations and softmax."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from torchax_core.testing import assert_matches_torch, assert_same_error, sample

NAN, INF = math.nan, math.inf
EDGES = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 6.0, 1.5, -1.5, 25.0, -25.0])

ACTIVATIONS = {
    "celu": functools.partial(F.celu, alpha=1.5),
    "elu": functools.partial(F.elu, alpha=1.5),
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "hardshrink": functools.partial(F.hardshrink, lambd=1.5),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": functools.partial(F.hardtanh, min_val=-1.5, max_val=0.5),
    "leaky_relu": functools.partial(F.leaky_relu, negative_slope=0.2),
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "relu": F.relu,
    "relu6": F.relu6,
    "selu": F.selu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "softplus_beta": functools.partial(F.softplus, beta=2.0, threshold=1.0),
    "softshrink": functools.partial(F.softshrink, lambd=1.5),
    "softsign": F.softsign,
    "tanh": torch.tanh,
    "tanhshrink": F.tanhshrink,
    "threshold": functools.partial(F.threshold, threshold=0.5, value=-2.0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    fn = ACTIVATIONS[name]
    assert_matches_torch(fn, sample((3, 4), torch.float32, low=-5, high=5))
    assert_matches_torch(fn, sample((3, 4), torch.float64, low=-5, high=5).t(), grad=True)
    assert_matches_torch(fn, sample((20,), torch.bfloat16, low=-5, high=5), rtol=2e-2, atol=1e-2)
    # torch's gradient at NaN depends on whether the element is in a vectorized piece, and its gelu of inf is NaN
    assert_matches_torch(fn, EDGES[3:], grad=True)
    if not name.startswith("gelu"):
        assert_matches_torch(fn, EDGES)


INPLACE = {
    "celu": F.celu, "elu": F.elu, "hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish, "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu, "mish": F.mish, "relu": F.relu, "selu": F.selu, "silu": F.silu,
}  # fmt: skip


@pytest.mark.parametrize("name", INPLACE)
def test_in_place(name):
    def call(x):
        y = x * 1
        return INPLACE[name](y, inplace=True), y

    x = sample((3, 4), torch.float64)
    # torch refuses to differentiate mish and silu of a result of its own that was overwritten, as do we
    assert_matches_torch(call, x, grad=name not in ("hardsigmoid", "hardswish", "mish", "silu"))


@pytest.mark.parametrize(
    "name", ["gelu", "silu", "elu", "tanh", "sigmoid", "softplus", "leaky_relu", "mish", "hardswish"]
)
def test_second_gradients(name):
    def call(x):
        (grad,) = torch.autograd.grad(ACTIVATIONS[name](x).sum(), x, create_graph=True)
        return grad * x

    assert_matches_torch(call, sample((3, 4), torch.float64).requires_grad_(), grad=True)


def test_complex():
    for fn in [torch.sigmoid, torch.tanh, F.silu]:
        assert_matches_torch(fn, sample((3,), torch.complex128), grad=fn is not F.silu)


@pytest.mark.parametrize("fn", [F.relu, F.gelu, F.elu, torch.sigmoid])
def test_shapes(fn):
    for shape in [(), (0,), (2, 0, 3)]:
        assert_matches_torch(fn, sample(shape, torch.float64), grad=True)


def test_softplus_does_not_overflow():
    x = torch.tensor([1.0, 800.0, -800.0])
    assert_matches_torch(lambda x: F.softplus(x), x, grad=True)
    assert_matches_torch(F.logsigmoid, x, grad=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8])
def test_integers(dtype):
    x = sample((3, 4), dtype)
    assert_matches_torch(F.relu, x)
    assert_matches_torch(F.threshold, x, 1.5, 2.5)
    assert_matches_torch(F.hardtanh, x, 0.0, 2.5)
    assert_matches_torch(torch.sigmoid, x)
    assert_matches_torch(F.relu, torch.tensor([2**60 + 1, -1]))
    for fn in [F.gelu, F.silu, F.softplus, F.elu]:
        assert_same_error(fn, x)


def test_bad_arguments():
    x = torch.ones(2)
    assert_same_error(F.gelu, x, approximate="erf", wording=True)
    assert_same_error(F.celu, x, 0.0, wording=True)
    assert_same_error(F.softshrink, x, -0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_prelu(dtype):
    x = sample((2, 3, 4), dtype)
    grad = dtype == torch.float64
    assert_matches_torch(F.prelu, x, torch.tensor([0.25], dtype=dtype), grad=grad)
    assert_matches_torch(F.prelu, x, torch.tensor([0.25, -1.0, 2.0], dtype=dtype), grad=grad)


def test_glu():
    for dim in [-1, 0, 1]:
        assert_matches_torch(F.glu, sample((4, 2, 6), torch.float64), dim, grad=True)
    assert_matches_torch(F.glu, sample((4, 6), torch.bfloat16), rtol=2e-2, atol=1e-2)
    assert_same_error(F.glu, torch.ones(3))


def test_forward_mode_of_glu():
    def call(x, dx):
        return torch.func.jvp(F.glu, (x,), (dx,))

    assert_matches_torch(call, sample((4, 6), torch.float64), sample((4, 6), torch.float64, seed=1))


# -- rrelu ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rrelu(dtype):
    cpu = sample((1000,), dtype)
    assert_matches_torch(F.rrelu, cpu, 0.1, 0.3, grad=dtype == torch.float64)
    x = cpu.to("jax").requires_grad_()
    y = F.rrelu(x, 0.1, 0.3, training=True)
    y.sum().backward()
    slopes = (y / x).detach().cpu()
    torch.testing.assert_close(x.grad.cpu(), slopes)
    assert (slopes[cpu > 0] == 1).all()
    drawn = slopes[cpu < 0]
    assert 0.1 <= drawn.min() < 0.12 and 0.28 < drawn.max() < 0.3 + 1e-6
    assert drawn.unique().numel() > 0.9 * drawn.numel()


# -- softmax -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [torch.softmax, torch.log_softmax, F.softmin])
def test_softmax(fn):
    for dim in [0, 1, -1]:
        assert_matches_torch(fn, sample((3, 4, 5), torch.float64), dim, grad=True)
    assert_matches_torch(fn, sample((3, 4), torch.float32).t(), -1)
    assert_matches_torch(fn, sample((3, 4), torch.bfloat16), 1, dtype=torch.float32)
    assert_matches_torch(fn, sample((3, 4), torch.float16), 1, rtol=2e-3, atol=2e-3)
    assert_matches_torch(fn, torch.tensor(2.0), 0, grad=True)
    assert_matches_torch(fn, torch.zeros(0, 3), 0)
    assert_matches_torch(fn, torch.zeros(3, 0), 1)


def test_softmax_is_stable():
    x = torch.tensor(
        [[1000.0, 1001.0, -1000.0], [-INF, 0.0, -INF], [-INF, -INF, -INF], [NAN, 0.0, 1.0], [INF, 0.0, 1.0]]
    )
    for fn in [torch.softmax, torch.log_softmax]:
        assert_matches_torch(fn, x, 1)
        assert_matches_torch(fn, x[:2], 1, grad=True)


def test_safe_softmax():
    x = torch.tensor([[1.0, 2.0, -INF], [-INF, -INF, -INF]])
    assert_matches_torch(torch.ops.aten._safe_softmax, x, -1)
    assert_matches_torch(torch.ops.aten._safe_softmax, x, 0, torch.float64)
    assert_matches_torch(torch.ops.aten._safe_softmax, sample((3, 4), torch.float64), -1, grad=True)


def test_masked_softmax():
    x = sample((2, 3, 4, 4), torch.float64)
    mask = sample((2, 3, 4, 4), torch.bool)
    mask[0, 0, 0] = mask[0, 0, :, 0] = True
    for dim in [None, 1, 3]:
        assert_matches_torch(torch._masked_softmax, x, mask, dim, grad=True)
    assert_matches_torch(torch._masked_softmax, x, sample((4, 4), torch.bool), 3, 0)
    assert_matches_torch(torch._masked_softmax, x, sample((2, 4), torch.bool), 3, 1)
