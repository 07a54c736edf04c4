"""examples/int8_linear_override.py: int8 weights under the linear layers of an unmodified model."""

import int8_linear_override as example
import pytest
import torch
import torch.nn.functional as F

import torchax_core


@pytest.fixture(scope="module")
def figures():
    return example.main(width=32, length=12, repeats=1)


def test_the_override_computes_what_the_weights_say(figures):
    assert figures.exact_error < 1e-5
    assert figures.gradient_error < 1e-4


def test_accuracy(figures):
    assert 1e-4 < figures.logits_error < 0.1, "int8 is not exact, and not far off"
    assert figures.same_token > 0.8
    assert abs(figures.int8_loss - figures.loss) < 0.1


def test_memory(figures):
    linear = figures.weights_mib - 256 * 32 * 4 / 2**20  # all but the embedding, more or less
    assert figures.int8_weights_mib < figures.weights_mib - 0.6 * linear


def test_a_row_of_zeros_and_the_largest_value():
    weight = torch.tensor([[0.0, 0.0], [-3.0, 1.5]])
    small = example.quantised(weight)
    assert small.tolist() == [[0, 0], [-127, 64]]
    torch.testing.assert_close(small.scale, torch.tensor([1.0, 3 / 127]))


def test_a_bias_and_floating_weights():
    x, weight, bias = torch.randn(5, 4), torch.randn(3, 4), torch.randn(3)
    small = example.quantised(weight.to("jax"))
    with torchax_core.default_env().override_op_definition("aten::linear", example.int8_linear):
        ours = F.linear(x.to("jax"), small, bias.to("jax"))
        declined = F.linear(x.to("jax"), weight.to("jax"), bias.to("jax"))
    restored = small.cpu().float() * small.scale.cpu()[:, None]
    torch.testing.assert_close(ours.cpu(), F.linear(x, restored, bias))
    torch.testing.assert_close(declined.cpu(), F.linear(x, weight, bias))
