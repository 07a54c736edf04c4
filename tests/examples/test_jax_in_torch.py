"""examples/jax_in_torch.py: JAX functions inside torch models, with gradients on both sides."""

import jax_in_torch
import pytest


@pytest.fixture(scope="module")
def figures():
    return jax_in_torch.main(batch=2, time=8, width=16)


def test_call_jax(figures):
    assert figures.scan_output_error < 1e-5


def test_gradients_reach_torch_on_both_sides_of_the_jax_function(figures):
    errors = figures.scan_gradient_errors
    assert errors.keys() == {"inputs", "decay", "before.weight", "before.bias", "after.weight", "after.bias"}
    assert max(errors.values()) < 1e-5


def test_attention_overridden(figures):
    assert figures.attention_output_error < 1e-5
    assert figures.attention_gradient_error < 1e-6
    assert figures.traces_inside >= 1


def test_attention_is_torchs_own_again_afterwards(figures):
    assert figures.traces_after == 0
