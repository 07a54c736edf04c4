"""examples/flash_attention_override.py: a JAX attention with a backward of its own under an unmodified model."""

import flash_attention_override as example
import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

import torchax_core
from torchax_core.testing import sample


@pytest.fixture(scope="module")
def figures():
    return example.main(lengths=[64, 128], width=16, block=32, repeats=1)


def test_logits_and_gradients_are_those_of_the_cpu(figures):
    assert figures.logits_error < 1e-5
    assert figures.gradient_error < 1e-4


def test_it_is_used_and_may_decline(figures):
    assert figures.traces >= 1 and figures.declined == 1


def test_memory_grows_with_the_length_and_not_its_square(figures):
    assert figures.flash[1].memory_mib < figures.plain[1].memory_mib
    assert figures.flash[1].memory_mib / figures.flash[0].memory_mib < 2.5


@pytest.mark.parametrize("block", [3, 100])
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "grouped"])
def test_attention_against_torch(kind, block):
    query, key, value = (
        sample(s, torch.float64, seed=n) for n, s in enumerate([(2, 4, 7, 6), (2, 4, 9, 6), (2, 4, 9, 5)])
    )
    options = {"scale": 0.3} if kind == "plain" else {}
    if kind == "causal":
        options["is_causal"] = True
    elif kind == "mask":
        options["attn_mask"] = sample((2, 1, 7, 9), torch.int64, low=0, high=3, seed=5) > 0
        options["attn_mask"][0, 0, 2] = False  # a place that attends to nothing
    elif kind == "grouped":
        key, value, options = key[:, :2], value[:, :2], {"enable_gqa": True}

    def run(*tensors):
        tensors = [t.detach().requires_grad_() for t in tensors]
        given = {n: v.to(tensors[0].device) if isinstance(v, torch.Tensor) else v for n, v in options.items()}
        out = F.scaled_dot_product_attention(*tensors, **given)
        return [out, *torch.autograd.grad(out.pow(3).sum(), tensors)]

    attention = example.FlashAttention(block)
    with torchax_core.default_env().override_op_definition(example.OP, attention, is_jax_function=True):
        ours = run(*(t.to("jax") for t in (query, key, value)))
    assert attention.traces and not attention.declined
    for one, other in zip(ours, run(query, key, value), strict=True):
        torch.testing.assert_close(one.cpu(), other)


def test_half_types_are_computed_in_float32():
    query, key, value = (jnp.asarray(sample((2, 33, 8), torch.float32, seed=n).numpy(), jnp.bfloat16) for n in range(3))
    exact = example.flash_attention(*(x.astype(jnp.float32) for x in (query, key, value)), None, False, 0.3, 8)
    ours = example.flash_attention(query, key, value, None, False, 0.3, 8)
    assert ours.dtype == jnp.bfloat16
    assert float(jnp.abs(ours.astype(jnp.float32) - exact).max()) < 0.02
    assert (
        jax.eval_shape(
            lambda q: jax.grad(
                lambda q: example.flash_attention(q, key, value, None, True, 1.0, 8).sum().astype(jnp.float32)
            )(q),
            query,
        ).dtype
        == jnp.bfloat16
    )
