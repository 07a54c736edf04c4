"""torch's flex_attention on device "jax", which torchax_ops_jtorch serves: against CPU torch, and a formula for gradients."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import torchax_core
from torchax_core import Config, Environment
from torchax_core.testing import sample
from torchax_ops_jtorch import flex

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:return_lse")

QUERIES, KEYS, WIDTH = 19, 12, 4  # blocks of 8 leave 3 over


@pytest.fixture(autouse=True)
def in_blocks(monkeypatch):
    monkeypatch.setattr(flex, "block_length", lambda queries, weights: min(queries, 8))


def qkv(kv_heads=4, dtype=torch.float32):
    shapes = [(2, 4, QUERIES, WIDTH), (2, kv_heads, KEYS, WIDTH), (2, kv_heads, KEYS, WIDTH)]
    return [sample(shape, dtype, seed=i) for i, shape in enumerate(shapes)]


def on_jax(*tensors):
    return [t.to("jax").requires_grad_(t.requires_grad) for t in tensors]


def relative(score, b, h, q, k):
    return score + (q - k) * (h + 1) * 0.1


def near(b, h, q, k):
    return (q - k).abs() < 5


def biased(bias):
    return lambda score, b, h, q, k: torch.tanh(score) * bias[h, k] + bias[h, q % KEYS]


def mask_on(device):
    return create_block_mask(near, None, None, QUERIES, KEYS, device=device)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_scores_masks_and_statistics(kv_heads):
    values, options = qkv(kv_heads), {"score_mod": relative, "enable_gqa": kv_heads != 4, "return_lse": True}
    expected = flex_attention(*values, block_mask=mask_on("cpu"), **options)
    found = flex_attention(*on_jax(*values), block_mask=mask_on("jax"), **options)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.cpu(), theirs)


def test_queries_that_may_look_at_nothing():
    mask = create_block_mask(lambda b, h, q, k: q < 0, None, None, QUERIES, KEYS, device="jax")
    q, k, v = (t.requires_grad_() for t in on_jax(*qkv()))
    result = flex_attention(q, k, v, block_mask=mask)
    assert not result.any()
    assert all(not g.any() for g in torch.autograd.grad(result.sum(), [q, k, v]))


def formula(q, k, v, bias):
    place = torch.arange(QUERIES) % KEYS
    score = torch.tanh(q @ k.mT / math.sqrt(WIDTH)) * bias[:, None, :] + bias[:, place][:, :, None]
    return torch.softmax(score, -1) @ v


def by_flex(q, k, v, bias):
    return flex_attention(q, k, v, score_mod=biased(bias))


def gradients(function, values):
    leaves = [v.detach().requires_grad_() for v in values]
    return torch.autograd.grad(function(*leaves).square().sum(), leaves)


def test_gradients_reach_what_the_score_is_made_of():
    """Eager, and with forward and backward in one program, and compiled by torch; float64 is rounded to float32 in none."""
    values = [*qkv(dtype=torch.float64), sample((4, KEYS), torch.float64, seed=5)]
    expected = gradients(formula, values)
    ours = on_jax(*values)
    jitted = torchax_core.jit(lambda *leaves: torch.autograd.grad(by_flex(*leaves).square().sum(), leaves))
    ways = {
        "eager": gradients(by_flex, ours),
        "jit": jitted(*[v.clone().requires_grad_() for v in ours]),
        "compile": gradients(torch.compile(by_flex, backend="torchax"), ours),
    }
    for way, found in ways.items():
        for ours_gradient, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(
                ours_gradient.cpu(), theirs, rtol=1e-12, atol=1e-12, msg=lambda m, way=way: f"{way}: {m}"
            )


def test_compiled_without_gradients():
    values = [*qkv(), sample((4, KEYS), torch.float32, seed=5)]
    for compiled in (torchax_core.jit(by_flex), torch.compile(by_flex, backend="torchax")):
        torch.testing.assert_close(compiled(*on_jax(*values)).cpu(), formula(*values))


def test_half_types_and_autocast():
    values = qkv()
    expected = flex_attention(*values)
    for ours in (flex_attention(*on_jax(*[v.bfloat16() for v in values])), autocast(values)):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.cpu().float(), expected, rtol=2e-2, atol=2e-2)


def autocast(values):
    with torch.autocast("jax", dtype=torch.bfloat16):
        return flex_attention(*on_jax(*values))


def test_errors_are_torchs():
    q, k, v = on_jax(*qkv(kv_heads=2))
    with pytest.raises(ValueError, match="enable_gqa=True"):
        flex_attention(q, k, v)
    with Environment(Config(blocked_packs=("jtorch",))), pytest.raises(ValueError, match="only supported on"):
        flex_attention(q, k, v, enable_gqa=True)
