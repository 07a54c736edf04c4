"""examples/digits_cnn.py: the main job, at half its length."""

import digits_cnn
import pytest


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    picture = tmp_path_factory.mktemp("digits") / "new folder" / "digits.png"
    return digits_cnn.main(epochs=8, eager_steps=5, picture=picture)


def test_learns_to_read_digits(figures):
    assert figures.accuracy >= 0.97
    assert len(figures.losses) == 8 * 22
    assert figures.losses[0] > 2  # knows nothing: about log(10)
    assert sum(figures.losses[-10:]) / 10 < 0.1


def test_the_changing_learning_rate_does_not_recompile(figures):
    assert figures.compilations == 1


def test_says_how_fast_each_kind_of_step_was(figures):
    # Which is faster is no test's business: that depends on what else the machine does.
    assert min(figures.eager_ms, figures.jitted_ms, figures.cpu_ms) > 0
    assert figures.first_jitted_s > figures.jitted_ms / 1e3


def test_draws_a_picture(figures):
    content = figures.picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000


def test_the_held_out_digits_are_always_the_same():
    (_, first), (_, second) = digits_cnn.load_data(), digits_cnn.load_data()
    assert len(first) == 360
    assert all((a == b).all() for a, b in zip(first.tensors, second.tensors, strict=True))
