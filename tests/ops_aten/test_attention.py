"""attention.py against CPU torch."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchax_core.testing import assert_matches_torch, sample

sdpa = F.scaled_dot_product_attention


def heads(dtype=torch.float64, *, h=4, h_kv=4, length=5, source=7, e=8, v=8):
    """A query (2, h, length, e), key and value (2, h_kv, source, e or v)."""
    shapes = (2, h, length, e), (2, h_kv, source, e), (2, h_kv, source, v)
    return [sample(shape, dtype, seed=i) for i, shape in enumerate(shapes)]


def test_plain():
    q, k, v = heads()
    assert_matches_torch(sdpa, q, k, v, grad=True)
    assert_matches_torch(sdpa, q, k, v, scale=0.3, grad=True)
    assert_matches_torch(sdpa, q[0], k[0], v[0], grad=True)
    assert_matches_torch(sdpa, q[0, 0], k[0, 0], v[0, 0])
    assert_matches_torch(sdpa, *heads(v=3), grad=True)
    assert_matches_torch(sdpa, q, k[:1], v[:1])


def test_causal():
    assert_matches_torch(sdpa, *heads(), is_causal=True, grad=True)
    assert_matches_torch(sdpa, *heads(length=7, source=5), is_causal=True)


def test_masks():
    q, k, v = heads()
    allowed = sample((5, 7), torch.bool)
    allowed[2] = False  # a row that may look at nothing gives zeros
    assert_matches_torch(sdpa, q, k, v, allowed, grad=True)
    added = sample((2, 1, 5, 7), torch.float64, seed=5)
    added[0, 0, 1] = -float("inf")
    assert_matches_torch(sdpa, q, k, v, added, grad=True)
    assert_matches_torch(sdpa, q, k, v, added[:, :, :1])


def test_no_keys():
    assert_matches_torch(sdpa, *heads(source=0))


def test_grouped_queries():
    q, k, v = heads(h=6, h_kv=2)
    allowed = sample((2, 6, 5, 7), torch.bool)
    assert_matches_torch(sdpa, q, k, v, enable_gqa=True, grad=True)
    assert_matches_torch(sdpa, q, k, v, allowed, enable_gqa=True, scale=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    assert_matches_torch(sdpa, *heads(dtype), is_causal=True, rtol=tolerance, atol=tolerance)


def test_large_logits_do_not_overflow():
    q, k, v = (100 * t for t in heads(torch.float32))
    assert_matches_torch(sdpa, q, k, v, rtol=1e-4, atol=1e-3)


def test_dropout():
    ones = torch.ones(1, 1, 256, 64, device="jax")
    torch.manual_seed(1)
    dropped = sdpa(ones, ones, ones, dropout_p=0.5)
    assert abs(dropped.mean().item() - 1) < 0.05
    assert dropped.std().item() > 0.01
    assert not torch.equal(dropped, sdpa(ones, ones, ones, dropout_p=0.5))
    torch.manual_seed(1)
    assert torch.equal(dropped, sdpa(ones, ones, ones, dropout_p=0.5))
    assert sdpa(ones, ones, ones, dropout_p=1.0).abs().max().item() == 0


def test_dropout_has_gradients():
    q, k, v = (t.to("jax").requires_grad_() for t in heads(torch.float32))
    sdpa(q, k, v, dropout_p=0.5).sum().backward()
    assert all(t.grad.abs().sum().item() > 0 for t in (q, k, v))


def test_as_exported_on_the_cpu():
    """Its own gradient is registered in C++, and calls the op's backward."""
    # torch's meta kernel before 2.13 has the second result in float32 always, as CPU torch has it of float32 only
    dtype = torch.float64 if torch.__version__ >= (2, 13) else torch.float32
    q, k, v = heads(dtype)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    added = sample((5, 7), dtype, seed=5)
    assert_matches_torch(lambda q, k, v: op(q, k, v, attn_mask=added.to(q.device)), q, k, v, grad=True)
    assert_matches_torch(op, q, q, q, is_causal=True, scale=0.5, grad=True)


# -- the fast path of nn.TransformerEncoder ----------------------------------------------------------


def both(module, *args, **kwargs):
    """`module` on CPU and a copy of it on device "jax", both in eval mode and without gradients."""
    ours = copy.deepcopy(module).to("jax").eval()
    moved = {k: v.to("jax") if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    with torch.no_grad():
        return ours(*(a.to("jax") for a in args), **moved), module.eval()(*args, **kwargs)


PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
CAUSAL = torch.ones(5, 5).triu(1).bool()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layer(norm_first, activation):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first, activation=activation)
    x = sample((2, 5, 8), torch.float32)
    for masks in ({}, {"src_mask": CAUSAL}, {"src_key_padding_mask": PADDING}):
        ours, theirs = both(layer, x, **masks)
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)


def test_encoder_with_padding():
    with warnings.catch_warnings():
        # CPU torch makes a nested tensor here, and says once a process that those are a prototype; we make none
        warnings.filterwarnings("ignore", message=".*prototype.*")
        ours, theirs = both(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
            sample((2, 5, 8), torch.float32),
            src_key_padding_mask=PADDING,
        )
    torch.testing.assert_close(ours.cpu()[~PADDING], theirs[~PADDING], rtol=1e-5, atol=1e-5)


def test_multi_head_attention():
    x = sample((2, 5, 8), torch.float32)
    attend = nn.MultiheadAttention(8, 2, batch_first=True)
    merged = {"attn_mask": CAUSAL, "key_padding_mask": PADDING}
    average = {"average_attn_weights": False}
    for kwargs in ({}, {"need_weights": False}, average, merged, {"attn_mask": CAUSAL.expand(4, 5, 5)}):
        ours, theirs = both(attend, x, x, x, **kwargs)
        torch.testing.assert_close(ours[0].cpu(), theirs[0], rtol=1e-5, atol=1e-5)
        if theirs[1] is None:
            assert ours[1] is None
        else:
            torch.testing.assert_close(ours[1].cpu(), theirs[1], rtol=1e-5, atol=1e-5)
