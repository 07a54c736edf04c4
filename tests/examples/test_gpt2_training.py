"""examples/gpt2_training.py: transformers' GPT-2 computes on device "jax" what it computes on CPU."""

import gpt2_training
import pytest


@pytest.fixture(scope="module")
def figures():
    return gpt2_training.main()


def test_logits_and_all_gradients(figures):
    assert figures.logits_error < 1e-5
    assert figures.gradient_error < 1e-4, figures.worst_gradient


@pytest.mark.parametrize("kind", ["eager_losses", "jitted_losses"])
def test_twenty_steps_follow_cpu(figures, kind):
    losses = getattr(figures, kind)
    assert len(losses) == 20
    assert losses == pytest.approx(figures.cpu_losses, rel=1e-3)
    assert losses[-1] < losses[0] - 0.5  # it learns: a step that did nothing would not pass


def test_greedy_tokens_are_identical(figures):
    assert len(figures.tokens) == 16
    assert len(set(figures.tokens)) > 3  # words, not one letter again and again
    assert figures.tokens == figures.cpu_tokens
