"""A blocked flash attention in plain JAX, in the place of `scaled_dot_product_attention` in an unmodified Hugging Face model.

    python examples/flash_attention_override.py          # --help lists the options

What it shows: `env.override_op_definition` puts a JAX function with its own backward (`jax.custom_vjp`) under every
attention of a Llama that knows nothing of it. Logits and gradients stay those of CPU torch; the memory of a training
step grows with the length of the text, not with its square, because no (length, length) matrix is ever made; calls
that the function does not know, it declines, and the definition beneath it runs.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import torchax_core

OP = "aten::scaled_dot_product_attention"
LENGTHS = [512, 1024, 2048]


@dataclasses.dataclass(frozen=True)
class Cost:
    """A training step at one length: MiB of temporary memory by XLA's account, and seconds, median of several."""

    length: int
    memory_mib: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Figures:
    """Errors are relative to the largest value on CPU; costs are for each length, without and with the override."""

    logits_error: float
    gradient_error: float
    worst_gradient: str
    traces: int
    declined: int
    plain: list[Cost]
    flash: list[Cost]


# -- the attention -------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    causal: bool,
    scale: float,
    block: int,
) -> jax.Array:
    """softmax(scale * query key^T) value, `block` keys at a time.

    query:   (..., L, E);   key: (..., S, E);   value: (..., S, Ev).
    mask:    None, or bool, broadcastable to (..., L, S); False is not attended to.
    causal:  a place attends to those up to itself.
    returns: (..., L, Ev), in the dtype of `query`; 0 for a place that attends to nothing. Computed in float32 at least.
    source:  https://arxiv.org/abs/2205.14135
    """
    return _forward(query, key, value, mask, causal, scale, block)[0]


def _in_blocks(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Split an axis into blocks, the blocks first; what is added at the end is 0 (False)."""
    axis %= x.ndim
    padding = -x.shape[axis] % block
    x = jnp.pad(x, [(0, padding if i == axis else 0) for i in range(x.ndim)])
    shape = (*x.shape[:axis], x.shape[axis] // block, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _blocks(key: jax.Array, value: jax.Array, mask: jax.Array | None, block: int) -> tuple[Any, ...]:
    length = key.shape[-2]
    if mask is not None:
        mask = _in_blocks(jnp.broadcast_to(mask, (*mask.shape[:-1], length)), -1, block)
    number = jnp.arange(-(-length // block), dtype=jnp.int32)
    return number, _in_blocks(key, -2, block), _in_blocks(value, -2, block), mask


def _scores(query: jax.Array, number: jax.Array, key: jax.Array, mask: jax.Array | None, rules: Any) -> jax.Array:
    """Scaled products with one block of keys, -inf where not attended to: (..., L, block)."""
    causal, scale, block, length = rules
    scores = jnp.einsum("...le,...se->...ls", query, key, preferred_element_type=_wide(query)) * scale
    place = number * block + jnp.arange(block, dtype=jnp.int32)
    allowed = place < length
    if causal:
        allowed = allowed & (place <= jnp.arange(query.shape[-2], dtype=jnp.int32)[:, None])
    if mask is not None:
        allowed = allowed & mask
    return jnp.where(allowed, scores, -jnp.inf)


def _wide(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _forward(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float, block: int) -> tuple[Any, Any]:
    rules = causal, scale, block, key.shape[-2]

    def step(state: Any, at: Any) -> Any:
        top, total, out = state
        number, keys, values, allowed = at
        scores = _scores(query, number, keys, allowed, rules)
        new_top = jnp.maximum(top, scores.max(-1))
        base = jnp.where(jnp.isfinite(new_top), new_top, 0)  # of a place that has attended to nothing yet
        weights = jnp.exp(scores - base[..., None])
        kept = jnp.exp(top - base)
        product = jnp.einsum(
            "...ls,...sv->...lv", weights.astype(values.dtype), values, preferred_element_type=out.dtype
        )
        return (new_top, total * kept + weights.sum(-1), out * kept[..., None] + product), None

    rows = jnp.broadcast_shapes(query.shape[:-2], key.shape[:-2]) + query.shape[-2:-1]
    wide = _wide(query)
    start = jnp.full(rows, -jnp.inf, wide), jnp.zeros(rows, wide), jnp.zeros((*rows, value.shape[-1]), wide)
    (top, total, out), _ = jax.lax.scan(step, start, _blocks(key, value, mask, block))
    total = jnp.where(total == 0, 1, total)
    out = (out / total[..., None]).astype(query.dtype)
    return out, (query, key, value, mask, out, jnp.where(jnp.isfinite(top), top, 0) + jnp.log(total))


def _backward(causal: bool, scale: float, block: int, kept: Any, grad: jax.Array) -> tuple[Any, ...]:
    query, key, value, mask, out, log_total = kept
    rules = causal, scale, block, key.shape[-2]
    wide = _wide(query)
    grad = grad.astype(wide)
    share = (grad * out).sum(-1)

    def step(grad_query: Any, at: Any) -> Any:
        number, keys, values, allowed = at
        weights = jnp.exp(_scores(query, number, keys, allowed, rules) - log_total[..., None])
        grad_values = jnp.einsum("...ls,...lv->...sv", weights, grad)
        grad_weights = jnp.einsum("...lv,...sv->...ls", grad, values.astype(wide))
        grad_scores = weights * (grad_weights - share[..., None]) * scale
        grad_keys = jnp.einsum("...ls,...le->...se", grad_scores, query.astype(wide))
        return grad_query + jnp.einsum("...ls,...se->...le", grad_scores, keys.astype(wide)), (grad_keys, grad_values)

    start = jnp.zeros(query.shape, wide)
    grad_query, by_block = jax.lax.scan(step, start, _blocks(key, value, mask, block))

    def joined(blocks: jax.Array, like: jax.Array) -> jax.Array:
        whole = jnp.moveaxis(blocks, 0, -3)
        whole = whole.reshape(*whole.shape[:-3], -1, whole.shape[-1])
        return whole[..., : like.shape[-2], :].astype(like.dtype)

    grad_key, grad_value = joined(by_block[0], key), joined(by_block[1], value)
    return grad_query.astype(query.dtype), grad_key, grad_value, None


flash_attention.defvjp(_forward, _backward)


class FlashAttention:
    """`flash_attention` with the parameters of torch's op; counts how often it was traced, and how often it declined."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.traces = self.declined = 0

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        attn_mask: jax.Array | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> jax.Array:
        """(..., L, E), (..., S, E), (..., S, Ev) to (..., L, Ev)."""
        added = attn_mask is not None and attn_mask.dtype != bool  # a mask that is added may want a gradient
        if dropout_p > 0 or added or query.shape[:-3] != key.shape[:-3]:
            self.declined += 1
            return NotImplemented
        self.traces += 1
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (jnp.repeat(x, groups, axis=-3) for x in (key, value))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return flash_attention(query, key, value, attn_mask, is_causal, scale, self.block)


# -- the model, and the comparison ---------------------------------------------------------------------------------


def make_model(width: int, longest: int) -> LlamaForCausalLM:
    """A Llama of two layers with random weights and two query heads per key, as `transformers` makes it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=longest,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def loss_and_gradients(model: LlamaForCausalLM, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits for `tokens`, (N, T), and the gradient of each weight for the next-token loss."""
    result = model(tokens, labels=tokens, use_cache=False)
    names, weights = zip(*model.named_parameters(), strict=True)
    return result.logits, dict(zip(names, torch.autograd.grad(result.loss, weights), strict=True))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest value expected."""
    return ((actual.detach().cpu() - expected).abs().max() / expected.abs().max()).item()


def cost(model: LlamaForCausalLM, length: int, repeats: int) -> Cost:
    """What one compiled step takes."""
    tokens = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(length)).to("jax")
    step: Callable[..., Any] = torchax_core.jit(lambda tokens: list(loss_and_gradients(model, tokens)[1].values()))
    memory = step.lower(tokens).compile().memory_analysis().temp_size_in_bytes
    jax.block_until_ready([grad.jax() for grad in step(tokens)])
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready([grad.jax() for grad in step(tokens)])
        times.append(time.perf_counter() - start)
    return Cost(length, memory / 2**20, sorted(times)[len(times) // 2])


def main(
    lengths: Annotated[list[int], typer.Option(help="A length of text to time; repeat for several.")] = LENGTHS,
    width: Annotated[int, typer.Option(help="Channels, a multiple of 8.")] = 64,
    block: Annotated[int, typer.Option(min=1, help="Keys in a block.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each step.")] = 3,
) -> Figures:
    """Train a Hugging Face Llama with a JAX flash attention under it: accuracy, memory and speed."""
    reference = make_model(width, max(lengths))
    model = copy.deepcopy(reference).to("jax")
    tokens = torch.randint(256, (2, 75), generator=torch.Generator().manual_seed(0))  # no multiple of a block
    expected, expected_gradients = loss_and_gradients(reference, tokens)

    attention = FlashAttention(block)
    env = torchax_core.default_env()
    with env.override_op_definition(OP, attention, is_jax_function=True):
        logits, gradients = loss_and_gradients(model, tokens.to("jax"))
        traces = attention.traces
        torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 8, device="jax")] * 3, dropout_p=0.5)
        flash = [cost(model, length, repeats) for length in lengths]
    plain = [cost(model, length, repeats) for length in lengths]

    errors = {name: relative_error(gradients[name], expected_gradients[name]) for name in gradients}
    worst = max(errors, key=lambda name: errors[name])
    figures = Figures(
        relative_error(logits, expected.detach()), errors[worst], worst, traces, attention.declined, plain, flash
    )
    console = Console()
    console.print(f"logits: {figures.logits_error:.1e} off CPU's; worst gradient, {worst}: {errors[worst]:.1e}")
    console.print(f"traced {traces} times for 2 layers, declined {attention.declined} call with dropout")
    table = Table("length", "plain MiB", "flash MiB", "plain s", "flash s", title="A training step, compiled")
    for one, other in zip(plain, flash, strict=True):
        table.add_row(
            f"{one.length}",
            f"{one.memory_mib:.1f}",
            f"{other.memory_mib:.1f}",
            f"{one.seconds:.3f}",
            f"{other.seconds:.3f}",
        )
    console.print(table)
    return figures


if __name__ == "__main__":
    typer.run(main)
