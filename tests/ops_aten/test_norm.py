"""norm.py against CPU torch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchax_core
from torchax_core.testing import assert_matches_torch, assert_same_error, sample


def vectors(n, dtype=torch.float64):
    """A weight and a bias of length `n`."""
    return sample((n,), dtype, seed=1), sample((n,), dtype, seed=2)


@pytest.mark.parametrize("shape", [(5, 4), (3, 4, 6), (2, 4, 3, 5), (2, 4, 3, 2, 2)])
def test_batch_norm_by_the_batch(shape):
    x, (w, b) = sample(shape, torch.float64), vectors(4)
    assert_matches_torch(F.batch_norm, x, None, None, w, b, True, grad=True)
    assert_matches_torch(F.batch_norm, x, None, None, training=True, eps=0.1, grad=True)


def test_batch_norm_by_running_statistics():
    x, (w, b) = sample((2, 4, 3, 5), torch.float64), vectors(4)
    mean, var = sample((4,), torch.float64, seed=3), sample((4,), torch.float64, low=0.5, high=2, seed=4)
    assert_matches_torch(lambda x, w, b: F.batch_norm(x, mean.to(x.device), var.to(x.device), w, b), x, w, b, grad=True)


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)],
)
def test_running_statistics_are_written(layer):
    ours = copy.deepcopy(layer).to("jax")
    for seed in range(2):
        x = sample((2, 4, 3, 5), torch.float32, seed=seed)
        torch.testing.assert_close(ours(x.to("jax")).cpu(), layer(x), rtol=1e-5, atol=1e-5)
    for name, buffer in layer.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name).cpu(), buffer)
    assert not torch.equal(layer.running_mean, torch.zeros(4))  # else the loop above has compared nothing
    x = sample((2, 4, 3, 5), torch.float32, seed=9)
    torch.testing.assert_close(ours.eval()(x.to("jax")).cpu(), layer.eval()(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.running_mean.cpu(), layer.running_mean)


def test_batch_norm_wants_both_statistics():
    x, mean = sample((3, 4), torch.float64), torch.zeros(4, dtype=torch.float64)
    assert_same_error(torch.native_batch_norm, x, None, None, mean, None, True, 0.1, 1e-5, wording=True)


def test_functional_batch_norm():
    x, (w, b) = sample((2, 4, 3), torch.float64), vectors(4)
    mean, var = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    aten = torch.ops.aten
    assert_matches_torch(aten._native_batch_norm_legit_functional, x, w, b, mean, var, True, 0.1, 1e-5)
    assert_matches_torch(aten._native_batch_norm_legit, x, w, b, mean, var, True, 0.1, 1e-5)
    assert_matches_torch(aten._native_batch_norm_legit.no_stats, x, w, b, True, 0.1, 1e-5)


def test_batch_norm_over_two_processes():
    """What nn.SyncBatchNorm does, here by hand for two unequal halves of a batch, is batch norm of the whole."""
    x, grad = sample((5, 4, 3), torch.float64), sample((5, 4, 3), torch.float64, seed=7)
    w, b = vectors(4)
    mean, var = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    out = F.batch_norm(whole, mean, var, w, b, True)
    out.backward(grad)

    halves, grads = x.to("jax").split([2, 3]), grad.to("jax").split([2, 3])
    w, b, ours_mean = w.to("jax"), b.to("jax"), torch.zeros(4, dtype=torch.float64, device="jax")
    ours_var = ours_mean + 1
    means, invstds = zip(*(torch.batch_norm_stats(h, 1e-5) for h in halves), strict=True)
    counts = torch.tensor([6.0, 9.0], dtype=torch.float64, device="jax")
    statistics = torch.batch_norm_gather_stats_with_counts(
        halves[0], torch.stack(means), torch.stack(invstds), ours_mean, ours_var, 0.1, 1e-5, counts
    )
    torch.testing.assert_close(ours_mean.cpu(), mean)
    torch.testing.assert_close(ours_var.cpu(), var)
    ours = torch.cat([torch.batch_norm_elemt(h, w, b, *statistics, 1e-5) for h in halves])
    torch.testing.assert_close(ours.cpu(), out.detach())

    def reduced(h, g):
        return torch.batch_norm_backward_reduce(g, h, *statistics, w, True, True, True)

    sums = [sum(parts) for parts in zip(*map(reduced, halves, grads), strict=True)]
    back = [
        torch.batch_norm_backward_elemt(g, h, *statistics, w, sums[0], sums[1], counts.int())
        for h, g in zip(halves, grads, strict=True)
    ]
    torch.testing.assert_close(torch.cat(back).cpu(), whole.grad)
    torch.testing.assert_close(sums[3].cpu(), grad.sum((0, 2)))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights_are_half", [False, True])
def test_parts_of_batch_norm_have_the_dtypes_of_what_they_are_for(half, weights_are_half):
    x = sample((4, 3, 2), half).to("jax")
    w = torch.ones(3, dtype=half if weights_are_half else torch.float32, device="jax")
    mean, invstd = torch.batch_norm_stats(x, 1e-5)
    out = torch.batch_norm_elemt(x, w, w, mean, invstd, 1e-5)
    sum_dy, sum_dy_xmu, *grads = torch.batch_norm_backward_reduce(x, x, mean, invstd, w, True, True, True)
    back = torch.batch_norm_backward_elemt(
        x, x, mean, invstd, w, sum_dy, sum_dy_xmu, torch.full((1,), 8).int().to("jax")
    )
    assert {t.dtype for t in (mean, invstd, sum_dy, sum_dy_xmu)} == {torch.float32}
    assert out.dtype is back.dtype is half and {g.dtype for g in grads} == {w.dtype}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_keep_float32_statistics(dtype):
    x = sample((4, 3, 8), dtype)
    layer = nn.BatchNorm1d(3)
    ours = copy.deepcopy(layer).to("jax")
    out = ours(x.to("jax"))
    assert out.dtype is dtype
    torch.testing.assert_close(out.cpu(), layer(x), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(ours.running_var.cpu(), layer.running_var)


@pytest.mark.parametrize("normalized", [(5,), (3, 5)])
def test_layer_norm(normalized):
    x = sample((2, 3, 5), torch.float64)
    w, b = sample(normalized, torch.float64, seed=1), sample(normalized, torch.float64, seed=2)
    assert_matches_torch(F.layer_norm, x, normalized, w, b, grad=True)
    assert_matches_torch(F.layer_norm, x, normalized, w, grad=True)
    assert_matches_torch(F.layer_norm, x, normalized, grad=True, eps=0.5)
    assert_matches_torch(torch.native_layer_norm, x, normalized, w, b, 1e-5)
    assert_matches_torch(F.layer_norm, torch.empty(0, *normalized), normalized)


def test_layer_norm_is_stable():
    x = sample((2, 64), torch.float32) + 1e4
    assert_matches_torch(F.layer_norm, x, (64,), rtol=1e-3, atol=1e-3)
    assert_matches_torch(F.layer_norm, sample((2, 64), torch.bfloat16), (64,), rtol=2e-2, atol=2e-2)


def test_group_norm():
    x, (w, b) = sample((2, 6, 3, 5), torch.float64), vectors(6)
    assert_matches_torch(F.group_norm, x, 3, w, b, grad=True)
    assert_matches_torch(F.group_norm, x, 2, grad=True)
    assert_matches_torch(F.group_norm, sample((4, 6), torch.float64), 3, w, b, grad=True)
    assert_matches_torch(F.group_norm, torch.empty(0, 6, 2, dtype=torch.float64), 3, w, b)


def test_instance_norm():
    x, (w, b) = sample((2, 4, 3, 5), torch.float64), vectors(4)
    assert_matches_torch(F.instance_norm, x, None, None, w, b, grad=True)


@pytest.mark.parametrize("eps", [None, 0.1])
def test_rms_norm(eps):
    x, w = sample((2, 3, 5), torch.float64), sample((5,), torch.float64, seed=1)
    assert_matches_torch(F.rms_norm, x, (5,), w, eps, grad=True)
    assert_matches_torch(F.rms_norm, x, (3, 5), None, eps, grad=True)
    assert_matches_torch(F.rms_norm, x.bfloat16(), (5,), w.bfloat16(), eps, rtol=2e-2, atol=2e-2)


def test_local_response_norm():
    assert_matches_torch(F.local_response_norm, sample((2, 5, 4), torch.float64), 3, grad=True)


@pytest.mark.parametrize("dim", [0, 1])
def test_weight_norm(dim):
    v = sample((3, 4), torch.float64)
    g = sample((3, 1) if dim == 0 else (1, 4), torch.float64, seed=1)
    assert_matches_torch(torch._weight_norm, v, g, dim, grad=True)


@pytest.mark.parametrize("p", [1, 2.5, float("inf")])
def test_renorm(p):
    x = sample((3, 4, 2), torch.float64)
    assert_matches_torch(torch.renorm, x, p, 1, 2.0, forms=("functional", "inplace", "out"))
    assert_matches_torch(torch.renorm, x.to(torch.complex128) * 1j, p, -1, 2.0)
    assert_matches_torch(torch.renorm, x[:0], p, 0, 2.0)
    if p == float("inf"):
        assert_same_error(torch.renorm, x[:, :0], p, 0, 2.0, wording=True)
    else:
        assert_matches_torch(torch.renorm, x[:, :0], p, 0, 2.0)


@pytest.mark.parametrize("p", [0.5, 1, 2, float("inf")])
def test_gradients_of_renorm(p):
    x = sample((4, 5), torch.float64)
    x[1], x[2, 3] = 0, 0
    assert_matches_torch(torch.renorm, x, p, 0, 2.0, grad=True)

    @torchax_core.jit
    def gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(torch.renorm(x, p, 0, 2.0).sin().sum(), x)

    assert "f64" not in gradient.lower(x.float().to("jax")).as_text().replace("tensor<f64>", "a number")


def test_rms_norm_under_every_kind_of_differentiation():
    """It is composite and kept whole, so its derivatives are JAX's: conjugated, pushed forward, and left to torch.func."""
    z = sample((3, 4), torch.complex128)
    assert_matches_torch(F.rms_norm, z, [4], grad=True)

    def pushed(x):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x.flip(0))
            return torch.autograd.forward_ad.unpack_dual(F.rms_norm(dual, [4])).tangent

    assert_matches_torch(pushed, z)
    x = sample((3, 4), torch.float64)
    assert_matches_torch(pushed, x, grad=True)
    assert_matches_torch(torch.func.hessian(lambda x: F.rms_norm(x, [4]).pow(3).sum()), x)
