"""`python -m pytest`, with the pack installed or not."""

import pytest
import torch
from example_pack import soft_threshold

import torchax_core
from torchax_core.testing import assert_matches_torch, assert_same_error, sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_soft_threshold(shape, dtype):
    assert_matches_torch(soft_threshold, sample(shape, dtype), 0.5, grad=True)


def test_a_transposed_view():
    assert_matches_torch(soft_threshold, sample((4, 3), torch.float32).t(), 1.0, grad=True)


def test_error():
    assert "must be floating" in assert_same_error(soft_threshold, torch.arange(3), 0.5, wording=True)


def test_in_a_compiled_step():
    def step(x, threshold):
        x = x.detach().requires_grad_()
        soft_threshold(x, threshold).square().sum().backward()
        return x.grad

    x = sample((5,), torch.float32)
    torch.testing.assert_close(torchax_core.jit(step)(x.to("jax"), 0.5).cpu(), step(x, 0.5))


def test_the_pack_defines_it():
    assert "example_pack" in str(torchax_core.default_env().explain("example_pack::soft_threshold"))


def test_torchs_own_checks():
    torch.library.opcheck(soft_threshold, (sample((3,), torch.float32).requires_grad_(), 0.5))
