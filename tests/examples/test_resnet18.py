"""examples/resnet18.py: torchvision's resnet18 computes on device "jax" what it computes on CPU."""

import pytest

pytest.importorskip("torchvision", reason="the example runs torchvision's resnet18")
import resnet18


@pytest.fixture(scope="module")
def figures():
    return resnet18.main(batch=4, size=32)


def test_eval_logits(figures):
    assert figures.logits_error < 1e-5


@pytest.mark.parametrize("kind", ["eager", "jitted"])
def test_a_training_step(figures, kind):
    errors = getattr(figures, kind)
    assert errors.loss < 1e-5
    assert errors.gradients < 1e-3
    assert errors.weights < 1e-3
    assert errors.running_statistics < 1e-4


def test_the_comparison_covers_the_running_statistics_and_notices_a_missing_update():
    images, labels = resnet18.make_data(2, 32)
    outcome = resnet18.train_once("cpu", images, labels)
    assert sum("running_var" in name for name in outcome.statistics) == 20
    untrained = dict(resnet18.make_model().named_buffers())
    assert resnet18.relative_error(untrained, outcome.statistics) > 0.01
