"""testing.py: it passes what is right and says what is wrong."""

import pytest
import torch

import torchax_core  # noqa: F401  # makes the device
from torchax_core.testing import assert_matches_torch, assert_same_error, assert_same_result, moved, sample

A, B = sample((2, 3), torch.float32), sample((3,), torch.float32, seed=1)
FORMS = ["functional", "inplace", "out"]


def on_jax(*tensors):
    return any(x.device.type == "jax" for x in tensors)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float8_e5m2, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (40, 30)])
def test_sample(shape, dtype):
    x, again, other = sample(shape, dtype), sample(shape, dtype), sample(shape, dtype, seed=1)
    assert x.shape == shape and x.dtype == dtype and x.device.type == "cpu"
    wide = torch.complex128 if dtype.is_complex else torch.float64
    assert torch.equal(x.to(wide), again.to(wide))
    if x.numel() > 1:
        assert not torch.equal(x.to(wide), other.to(wide))
        assert len(set(x.to(wide).flatten().tolist())) > 1


def test_sample_keeps_to_its_range():
    for dtype, low, high in [(torch.int32, 2, 5), (torch.float64, 0.5, 0.75)]:
        x = sample((1000,), dtype, low=low, high=high)
        assert low <= x.min() and x.max() < high
    assert set(sample((1000,), torch.int64, low=2, high=5).tolist()) == {2, 3, 4}


@pytest.mark.parametrize(
    "tensor",
    [
        A,
        A.t(),
        sample((4, 6), torch.int64)[1:, ::2],
        A[:, :1].expand(2, 5),
        A[:0].t(),
        sample((2, 3, 4, 5), torch.float32).to(memory_format=torch.channels_last),
        sample((3,), torch.complex64).conj(),
    ],
    ids=["plain", "transposed", "strided", "expanded", "empty", "channels_last", "conj"],
)
def test_moved_keeps_values_and_strides(tensor):
    there = moved(tensor, "jax")
    assert there.device.type == "jax" and there.stride() == tensor.stride()
    torch.testing.assert_close(there.cpu(), tensor, rtol=0, atol=0)


def test_moved_keeps_structure():
    leaf = sample((2,), torch.float64).requires_grad_()
    tree = {"twice": [leaf, leaf], "device": "cpu", "other": ("x", None, 1.5)}
    there = moved(tree, "jax")
    first, second = there["twice"]
    assert first is second and first.is_leaf and first.requires_grad
    assert there["device"] == "jax" and there["other"] == ("x", None, 1.5)
    assert leaf.device.type == "cpu"


def test_right_ops_match():
    assert_matches_torch(torch.add, A, B, alpha=2, forms=FORMS, grad=True)
    assert_matches_torch(torch.max, A, 1, forms=["functional", "out"], grad=True)
    assert_matches_torch(torch.cat, [A, A, B[None]], grad=True)


def test_an_inplace_form_that_torch_refuses_must_be_refused():
    assert_matches_torch(torch.add, sample((2, 3), torch.int64), B, forms=["functional", "inplace"])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x: x + 1 if on_jax(x) else x + 2, "values differ: Mismatched elements: 6 / 6"),
        (lambda x: x.double() if on_jax(x) else x, "dtype is torch.float64, not torch.float32"),
        (lambda x: x[None] if on_jax(x) else x, r"shape is \(1, 2, 3\), not \(2, 3\)"),
        (lambda x: (x,) if on_jax(x) else x, "but torch's is"),
        (lambda x: x.cpu(), "device is cpu, not jax"),
        (lambda x: x.add_(1).sum() * 0 if on_jax(x) else x.sum() * 0, "arguments afterwards"),
        (lambda x: 2 if on_jax(x) else 2.0, "type is int, not float"),
    ],
    ids=["value", "dtype", "shape", "structure", "device", "argument", "scalar"],
)
def test_a_wrong_result_is_said(wrong, says):
    with pytest.raises(AssertionError, match=says) as caught:
        assert_matches_torch(wrong, A)
    assert "called with" in str(caught.value) and "float32[2, 3]" in str(caught.value)


def test_a_wrong_gradient_is_said():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * (3 if on_jax(g) else 2)

    assert_matches_torch(Wrong.apply, A)
    with pytest.raises(AssertionError, match="gradients.*values differ"):
        assert_matches_torch(Wrong.apply, A, grad=True)


def test_an_inplace_form_that_writes_to_a_copy_is_said(monkeypatch):
    def lazy_(x, other):
        return (x.clone() if on_jax(x) else x).add_(other)

    def lazy(x, other):
        return x.add(other)

    monkeypatch.setattr(torch.Tensor, "lazy_", lazy_, raising=False)
    with pytest.raises(AssertionError, match="returned another tensor"):
        assert_matches_torch(lazy, A, B, forms=["inplace"])


def test_an_out_form_that_does_not_return_out_is_said():
    def forgetful(x, *, out=None):
        return x.exp() if out is None or on_jax(x) else torch.exp(x, out=out)

    with pytest.raises(AssertionError, match="not the one given as `out`"):
        assert_matches_torch(forgetful, A, forms=["out"])


def test_an_exception_only_here_is_said():
    def raising(x):
        if on_jax(x):
            raise IndexError("no such luck")
        return x

    with pytest.raises(AssertionError, match='device "jax" raises IndexError: no such luck'):
        assert_matches_torch(raising, A)


def test_same_error():
    assert "1" in assert_same_error(torch.sum, A, 5)
    assert_same_error(torch.sum, A, 5, wording=True)
    with pytest.raises(AssertionError, match="CPU torch raises nothing"):
        assert_same_error(torch.add, A, A)

    def silent(x):
        return x if on_jax(x) else torch.mm(x, x)

    with pytest.raises(AssertionError, match="raises nothing and gives"):
        assert_same_error(silent, A)


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="'sideways'"):
        assert_matches_torch(torch.add, A, B, forms=["sideways"])


def test_the_parts_of_the_sweep_are_there_too():
    from torchax_core import conformance, testing

    assert testing.run_cell is conformance.run_cell and testing.Cell is conformance.Cell
    with pytest.raises(AttributeError, match="run_cells"):
        testing.run_cells  # noqa: B018  # asking is the test


def test_a_tolerance_by_dtype():
    near = [A + 1e-3, A.double() + 1e-3]
    by_dtype = {torch.float32: (0.0, 1e-2), torch.float64: (0.0, 1e-2)}
    assert_same_result(near, [A, A.double()], on=None, tolerance=by_dtype.get)
    with pytest.raises(AssertionError, match="result 1: values differ"):
        assert_same_result(
            near, [A, A.double()], on=None, tolerance=lambda d: by_dtype[d] if d == torch.float32 else None
        )
