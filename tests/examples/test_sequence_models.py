"""examples/sequence_models.py: an LSTM and a TransformerEncoder compute on device "jax" what they compute on CPU."""

import pytest
import sequence_models


@pytest.fixture(scope="module")
def figures():
    return sequence_models.main(steps=10, batch=8, length=7)


@pytest.fixture(params=sequence_models.MODELS)
def model(request, figures):
    return figures.models[request.param]


def test_eval_scores(model):
    assert model.eval_error < 1e-5


def test_padding_changes_nothing(model):
    assert model.padding_error < 1e-5


@pytest.mark.parametrize("kind", ["eager_losses", "jitted_losses"])
def test_training_follows_cpu(model, kind):
    losses = getattr(model, kind)
    assert len(losses) == 10
    assert losses == pytest.approx(model.cpu_losses, rel=1e-3)
    assert losses[-1] < losses[0]


def test_gradients(model):
    assert model.gradient_error < 1e-3


def test_the_batch_has_padding_and_both_labels():
    batch = sequence_models.make_batch(8, 7)
    assert batch.padding.any()
    assert not batch.padding.all(dim=1).any()
    assert set(batch.labels.tolist()) == {0, 1}
