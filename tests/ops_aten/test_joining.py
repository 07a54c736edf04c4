"""joining.py against CPU torch."""

import pytest
import torch
import torch.nn.functional as F

from torchax_core.testing import assert_matches_torch, sample

DTYPES = [torch.bool, torch.int64, torch.bfloat16, torch.float32, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_cat_and_stack(dtype):
    a, b = sample((2, 3), dtype), sample((2, 3), dtype, seed=1)
    for dim in (0, 1, -1):
        assert_matches_torch(torch.cat, [a, b[:, :3], a], dim)
        assert_matches_torch(torch.stack, [a, b], dim)
    assert_matches_torch(torch.cat, [sample((0,), dtype), a], 1)
    assert_matches_torch(torch.cat, [sample((0,), dtype), sample((0,), dtype)])
    assert_matches_torch(torch.cat, [sample((2, 0), dtype), a], 1)
    assert_matches_torch(torch.stack, [sample((), dtype), sample((), dtype)])
    assert_matches_torch(torch.hstack, [a.t(), b.t()])


def test_cat_promotes():
    parts = [sample((2,), torch.int64), sample((3,), torch.float16), sample((1,), torch.bool)]
    assert_matches_torch(torch.cat, parts)
    assert_matches_torch(torch.cat, [sample((2,), torch.float32), sample((2,), torch.complex64)])


def test_cat_gradients_and_out():
    a, b = sample((2, 3), torch.float64), sample((2, 1), torch.float64, seed=1)
    assert_matches_torch(lambda x, y: torch.cat([x, y], 1), a, b, grad=True)
    assert_matches_torch(lambda x, y: torch.stack([x, y], 1), a, a + 1, grad=True)
    assert_matches_torch(torch.cat, [a, b], 1, forms=("functional", "out"))


def test_block_diag():
    blocks = [sample((2, 3), torch.float32), sample((), torch.float32), sample((2,), torch.float32)]
    assert_matches_torch(torch.block_diag, *blocks)
    assert_matches_torch(torch.block_diag, blocks[0], sample((1, 2), torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_pad(dtype):
    x = sample((2, 3, 4), dtype)
    assert_matches_torch(F.pad, x, (1, 2))
    assert_matches_torch(F.pad, x, (1, 0, 2, 1, 0, 3), value=1)
    assert_matches_torch(F.pad, x, (-1, 2, 1, -2))
    assert_matches_torch(F.pad, sample((0, 2), dtype), (1, 1, 2, 0))
    if dtype is torch.float32:
        assert_matches_torch(F.pad, x, (-1, 2), value=2.5, grad=True)


def test_constant_pad_keeps_large_integers():
    assert_matches_torch(F.pad, torch.zeros(1, dtype=torch.int64), (1, 0), value=2**40 + 1)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [(2, 0), (-1, 2), (3, -2), (1, 2, 2, 0), (1, 1, 0, 2, 1, 0)])
def test_border_pads(padding, mode):
    spatial = (3, 4, 5)[-len(padding) // 2 :]
    x = sample((2, 2, *spatial), torch.float64)
    assert_matches_torch(F.pad, x, padding, mode=mode, grad=True)
    assert_matches_torch(F.pad, x.bfloat16()[0], padding, mode=mode)


def test_repeat():
    x = sample((2, 3), torch.float32)
    assert_matches_torch(torch.Tensor.repeat, x, (2, 1))
    assert_matches_torch(torch.Tensor.repeat, x, (2, 1, 3), grad=True)
    assert_matches_torch(torch.Tensor.repeat, x, (0, 2))
    assert_matches_torch(torch.Tensor.repeat, sample((), torch.int64), (2, 2))
    assert_matches_torch(torch.tile, x, (2,))


def test_repeat_interleave():
    x = sample((3, 2), torch.float64)
    assert_matches_torch(torch.repeat_interleave, x, 2, 0, grad=True)
    assert_matches_torch(torch.repeat_interleave, x, 3)
    repeats = torch.tensor([2, 0, 1])
    assert_matches_torch(torch.repeat_interleave, repeats)
    assert_matches_torch(torch.repeat_interleave, repeats.int())
    assert_matches_torch(lambda t, r: torch.repeat_interleave(t, r, 0), x, repeats, grad=True)
    assert_matches_torch(torch.repeat_interleave, x, repeats, 0, output_size=3)


@pytest.mark.parametrize("shape", [(4, 6), (0, 6)])
def test_roll(shape):
    x = sample(shape, torch.float64)
    assert_matches_torch(torch.roll, x, 1)
    assert_matches_torch(torch.roll, x, -2, 1, grad=True)
    assert_matches_torch(torch.roll, x, (1, -7), (0, 1))
    assert_matches_torch(torch.roll, x, (1, 2), (1, 1))


def test_flip_and_rot90():
    x = sample((2, 3, 4), torch.float64)
    assert_matches_torch(torch.flip, x, (0, -1), grad=True)
    assert_matches_torch(torch.flip, x, ())
    assert_matches_torch(torch.flip, sample((), torch.int64), ())
    for k in range(-1, 4):
        assert_matches_torch(torch.rot90, x, k, (1, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("diagonal", [0, 1, -2])
def test_triangles(diagonal, dtype):
    for shape in [(3, 4), (2, 4, 3), (0, 3)]:
        assert_matches_torch(torch.tril, sample(shape, dtype), diagonal, forms=("functional", "inplace", "out"))
        assert_matches_torch(torch.triu, sample(shape, dtype), diagonal, forms=("functional", "inplace"))


def test_chunk_cat():
    tensors = [sample((3, 2), torch.float32), sample((5,), torch.float32, seed=1), sample((2, 2, 2), torch.float32)]
    assert_matches_torch(torch._chunk_cat, tensors, 0, 2)
    assert_matches_torch(torch._chunk_cat, [t[None] for t in tensors], 1, 3)


def test_repeat_interleave_of_known_size_under_jit():
    import torchax_core

    repeats = torch.tensor([2, 0, 1])
    step = torchax_core.jit(lambda r: torch.repeat_interleave(r, output_size=3))
    torch.testing.assert_close(step(repeats.to("jax")).cpu(), torch.repeat_interleave(repeats))
