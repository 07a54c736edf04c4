"""Numerics that torch keeps stable, values and gradients, as on CPU torch; and that no program grows with a tensor's length."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchax_core
from torchax_core.testing import assert_matches_torch, sample

FAR = [[1e4, -1e4, 0.0, 88.0], [-88.0, 1000.0, 1000.0, 1e-8], [0.0, 0.0, 0.0, 0.0]]
INF, NAN = math.inf, math.nan


# -- values and gradients at the ends of the range ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.log_softmax(x, -1),
        lambda x: torch.softmax(x, -1),
        lambda x: torch.logsumexp(x, -1),
        lambda x: torch.logaddexp(x, x.flip(0)),
        lambda x: torch.logaddexp2(x, x.flip(0)),
        lambda x: F.cross_entropy(x, torch.tensor([1, 0, 2], device=x.device), reduction="none"),
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x), reduction="none"),
        F.logsigmoid,
        F.softplus,
        F.silu,
        F.mish,
        torch.sigmoid,
        torch.tanh,
        lambda x: torch.std(x, -1),
        lambda x: F.normalize(x, dim=-1),
        lambda x: F.cosine_similarity(x, x.flip(0), dim=-1),
        lambda x: F.layer_norm(x, [4]),
    ],
    ids="log_softmax softmax logsumexp logaddexp logaddexp2 cross_entropy bce_with_logits logsigmoid softplus silu mish "
    "sigmoid tanh std normalize cosine_similarity layer_norm".split(),
)
def test_far_from_zero(fn):
    assert_matches_torch(fn, torch.tensor(FAR), grad=True)


@pytest.mark.parametrize("fill", [-INF, INF, NAN])
def test_softmax_of_infinities(fill):
    x = torch.tensor([[fill, 0.0, 1.0], [fill, fill, fill], [0.0, 1.0, 2.0]])
    assert_matches_torch(lambda x: torch.log_softmax(x, -1), x, grad=True)
    assert_matches_torch(lambda x: torch.logsumexp(x, -1), x, grad=True)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.linalg.norm(x),
        lambda x: torch.linalg.vector_norm(x, 1, dim=-1),
        lambda x: torch.linalg.vector_norm(x, 3, dim=-1),
        lambda x: torch.linalg.vector_norm(x, INF, dim=-1),
        lambda x: torch.linalg.matrix_norm(x, "fro"),
        lambda x: F.pairwise_distance(x, x.detach(), eps=0.0),
        lambda x: torch.cdist(x, x.detach()),
        lambda x: torch.dist(x, x.detach()),
        lambda x: torch.var(x, -1),
        lambda x: torch.prod(x, -1),
        lambda x: torch.cumprod(x, -1),
        lambda x: torch.xlogy(x, x),
        lambda x: torch.special.entr(x),
        lambda x: torch.atan2(x, x),
        lambda x: torch.hypot(x, x),
        torch.sinc,
        torch.sgn,
        torch.abs,
        torch.sqrt,
        torch.rsqrt,
        torch.log1p,
        torch.erfinv,
        lambda x: x**0.5,
        lambda x: x**2,
        lambda x: x**x,
        lambda x: torch.special.xlog1py(x, x - 1),
        lambda x: torch.renorm(x, 2, 0, 1.0),
        lambda x: F.normalize(x, dim=-1),
        lambda x: F.cosine_similarity(x, x.detach(), dim=-1),
        lambda x: F.rms_norm(x, [3]),
        lambda x: torch.std(x, -1),
        lambda x: torch.logit(x, eps=1e-6),
        lambda x: torch.copysign(x, -x),
        lambda x: torch.linalg.matrix_norm(x, "nuc"),
        lambda x: torch.maximum(x, -x),
        lambda x: torch.amax(x, -1),
        lambda x: F.relu(x) + F.elu(x) + F.hardtanh(x) + F.leaky_relu(x),
    ],
    ids="norm norm1 norm3 norminf frobenius pairwise_distance cdist dist var prod cumprod xlogy entr atan2 hypot sinc sgn "
    "abs sqrt rsqrt log1p erfinv pow_half pow_two pow_self xlog1py renorm normalize cosine_similarity rms_norm std logit "
    "copysign nuclear maximum amax relus".split(),
)
def test_at_zero(fn):
    assert_matches_torch(fn, torch.zeros(2, 3, dtype=torch.float64), grad=True)


def test_at_the_ends_of_a_domain():
    """Where a function's derivative has a pole or its value is infinite: the same infinities and NaNs."""
    ends = torch.tensor([-1.0, 1.0, -1.5, 1.5], dtype=torch.float64)
    for fn in (
        torch.erfinv,
        torch.asin,
        torch.acos,
        torch.atanh,
        torch.acosh,
        lambda x: torch.logit(x),
        torch.special.ndtri,
    ):
        assert_matches_torch(fn, ends, grad=True)


def test_where_lets_nothing_through_of_what_it_does_not_take():
    x = torch.tensor([-1.0, 0.0, 4.0])

    def constant(x):
        return torch.where(x > 0, x * 2, torch.full_like(x, NAN))

    def masked(x):
        return x.masked_fill(x <= 0, NAN).nan_to_num(0.0) + torch.where(x > 0, x, INF).clamp(max=5)

    def safe(x):  # torch's advice for the next
        return torch.where(x > 0, torch.where(x > 0, x, 1.0).sqrt(), 0.0)

    def unsafe(x):  # whose gradient is NaN at -1, in torch too
        return torch.where(x > 0, x.sqrt(), 0.0)

    for fn in (constant, masked, safe, unsafe):
        assert_matches_torch(fn, x, grad=True)


# -- programs as long as their code ------------------------------------------------------------------------------------

LONG = {
    "cumsum": lambda x: x.cumsum(-1),
    "cumprod": lambda x: x.cumprod(-1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "cummax": lambda x: x.cummax(-1).values,
    "cummin": lambda x: x.cummin(-1).values,
    "max_pool1d": lambda x: F.max_pool1d(x, 3, 2),
    "max_pool1d_indices": lambda x: F.max_pool1d(x, 5, 3, return_indices=True)[0],
    "avg_pool1d": lambda x: F.avg_pool1d(x, 3, 2),
    "lp_pool1d": lambda x: F.lp_pool1d(x, 2.0, 3),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x, 7),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x, 7),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
    "sort": lambda x: x.sort(-1).values,
    "topk": lambda x: x.topk(5).values,
    "median": lambda x: x.median(-1).values,
    "unfold": lambda x: x.unfold(-1, 4, 2),
    "conv1d": lambda x: F.conv1d(x, x[:, :, :3].transpose(0, 1).expand(3, 3, 3)),
    "ctc_loss": lambda x: F.ctc_loss(
        x.permute(2, 0, 1).log_softmax(-1),
        torch.ones(1, 4, dtype=torch.int64, device=x.device),
        torch.full((1,), x.shape[-1], device=x.device),
        torch.full((1,), 4, device=x.device),
    ),
}
RECURRENT = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


def lines_of(fn, *shape):
    """How long the text of the program is for a tensor of this shape, forward and backward."""

    @torchax_core.jit
    def step(x):
        result = fn(x)
        return result, *torch.autograd.grad(result.square().sum(), [x])

    x = sample(shape, torch.float32, low=0.1, high=0.9).to("jax").requires_grad_()
    return len(step.lower(x).as_text().splitlines())


@pytest.mark.parametrize("name", [*LONG, *RECURRENT])
def test_a_program_does_not_grow_with_the_length(name):
    fn = LONG.get(name)
    if fn is None:
        layer = RECURRENT[name](3, 4, batch_first=True).to("jax")

        def fn(x):
            return layer(x.transpose(1, 2))[0]

    short, long = (lines_of(fn, 1, 3, length) for length in (256, 4096))
    # where the algorithm halves the length, each halving is a few lines more
    assert long < 1.5 * short + 40, f"{short} lines for a length of 256, {long} for 4,096"


MATRICES = {
    "householder_product": lambda x: torch.linalg.householder_product(x, x[:, 0].abs()),
    "ormqr": lambda x: torch.ormqr(x, x[:, 0].abs(), x),
    "matrix_exp": torch.linalg.matrix_exp,
    "svd": lambda x: torch.linalg.svd(x)[1],
    "qr": lambda x: torch.linalg.qr(x)[1],
    "eigh": lambda x: torch.linalg.eigh(x)[1].abs(),
    "eig": lambda x: torch.linalg.eig(x)[1].abs(),
    "lu": lambda x: torch.linalg.lu(x)[2],
    "det": torch.linalg.det,
    "solve": lambda x: torch.linalg.solve_ex(x, x).result,
    "cholesky": lambda x: torch.linalg.cholesky_ex(x).L,
    "lstsq": lambda x: torch.linalg.lstsq(x, x).solution,
    "pinv": torch.linalg.pinv,
}


@pytest.mark.parametrize("name", MATRICES)
def test_a_program_does_not_grow_with_a_matrix(name):
    assert lines_of(MATRICES[name], 1, 12, 12) == lines_of(MATRICES[name], 1, 96, 96)


# -- gradients of a compiled function, taken outside of it -------------------------------------------------------------

ROWS = torch.tensor([[1.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0], [0.0, -1.0, 0.0, -1.0]], dtype=torch.float64)
OUTSIDE = {
    "max_dim": lambda x: x.max(1).values,
    "min_dim": lambda x: x.min(1).values,
    "max_pool1d": lambda x: F.max_pool1d(x, 3, 1, 1),
    "max_pool1d_dilated": lambda x: F.max_pool1d(x, 2, 1, dilation=2),
    "max_pool2d_indices": lambda x: F.max_pool2d(x[None], 2, 1, return_indices=True)[0],
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x, 3),
    "matrix_exp": lambda x: torch.linalg.matrix_exp(x[:, :3]),
    "eig": lambda x: torch.linalg.eig(x[:, :3] + torch.eye(3, device=x.device).cumsum(0))[1].abs(),
    "kinks": lambda x: (
        F.relu(x) + F.hardtanh(x) + F.hardsigmoid(3 * x) + F.hardswish(3 * x) + F.logsigmoid(x) + x.abs()
    ),
    "far": lambda x: F.elu(1000 * x) + F.celu(1000 * x, 2.0) + F.selu(1000 * x) + F.softplus(1000 * x),
    "norms_of_zeros": lambda x: sum(torch.linalg.vector_norm(x - x[2] * x[2], p, dim=1) for p in (0.5, 1, 2, 3, INF)),
    "std_of_equals": lambda x: x.std(1),
    "distances": lambda x: sum(torch.cdist(x, x, p) for p in (1.0, 2.0, 3.0, INF)),
    "softmax": lambda x: torch.softmax(torch.where(x < 0, -INF, 1000 * x), 1) + torch.log_softmax(1000 * x, 1),
    "masked_softmax": lambda x: torch._safe_softmax(torch.where(x < 1, -INF, x), 1),
    "special": lambda x: torch.i0(x) + torch.special.i0e(x) + torch.special.log_ndtr(-30 * x) + torch.special.erfcx(x),
    "polygamma": lambda x: torch.digamma(x + 1.5) + torch.polygamma(1, x + 1.5) + torch.polygamma(2, x + 1.5),
    "one_triangle": lambda x: torch.linalg.eigvalsh(x[:, :3]) + torch.linalg.eigvalsh(x[:, :3], UPLO="U"),
    "cholesky": lambda x: torch.linalg.cholesky(x[:, :3].mT @ x[:, :3] + torch.eye(3, device=x.device)),
    "pinv_of_low_rank": lambda x: torch.linalg.pinv(x[:, :1] @ x[:1]),
    "embedding": lambda x: F.embedding(
        torch.tensor([[0, 1], [1, 2]], device=x.device), x, padding_idx=0, scale_grad_by_freq=True
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_gradients_outside_a_compiled_function(name):
    """Which are jax's of the lowerings, where inside it is torch's formulas that run."""
    fn = OUTSIDE[name]
    expected, x = ROWS.clone().requires_grad_(), ROWS.to("jax").requires_grad_()
    fn(expected).square().sum().backward()
    torchax_core.jit(fn)(x).square().sum().backward()
    torch.testing.assert_close(x.grad.cpu(), expected.grad, rtol=1e-7, atol=1e-7)
