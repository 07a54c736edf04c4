"""Weight-only int8: the linear layers of an unmodified Hugging Face model run on int8 weights, by one override.

    python examples/int8_linear_override.py          # --help lists the options

What it shows: the weights of every `nn.Linear` become int8 with one scale a row, a quarter of their memory, and an override of
`aten::linear` computes with them; the modules are not touched, and still call `F.linear(input, self.weight, self.bias)`.
The override is torch code that looks at the weight's dtype: what is not int8 it declines, and torch's own linear runs.
Inputs keep their gradients, so that the parameters left in floating point can be trained on.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import torchax_core
from torchax_core.interop import call_jax


@dataclasses.dataclass(frozen=True)
class Figures:
    """Errors of the int8 model against the same weights in float32; sizes in MiB, times in seconds."""

    logits_error: float
    same_token: float
    loss: float
    int8_loss: float
    exact_error: float
    gradient_error: float
    weights_mib: float
    int8_weights_mib: float
    seconds: float
    int8_seconds: float


# -- the override --------------------------------------------------------------------------------------------------


def quantised(weight: torch.Tensor) -> nn.Parameter:
    """A weight (O, I) as int8, each row divided by its scale, which is kept with it: `.scale`, (O,)."""
    scale = weight.detach().abs().amax(dim=1) / 127
    scale = torch.where(scale == 0, 1, scale)
    result = nn.Parameter((weight.detach() / scale[:, None]).round().to(torch.int8), requires_grad=False)
    result.scale = scale
    return result


def quantise(model: nn.Module) -> None:
    """Put int8 weights into every linear layer of `model`."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = quantised(module.weight)


def product(input: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """(..., I), (O, I) int8 and (O,) to (..., O), in the dtype of `input`: the scales are applied to the sums."""
    sums = jnp.einsum("...i,oi->...o", input, weight.astype(input.dtype))
    return sums * scale.astype(input.dtype)


def int8_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`aten::linear` for int8 weights; declines others."""
    if weight.dtype != torch.int8:
        return NotImplemented
    result = call_jax(product, input, weight, weight.scale)
    return result if bias is None else result + bias


# -- the model, and the comparison ---------------------------------------------------------------------------------


def make_model(width: int) -> LlamaForCausalLM:
    """A Llama of two layers, as `transformers` makes it, with random weights of the size that training leaves."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval()


def mib(model: nn.Module) -> float:
    """Bytes of all weights and their scales."""
    tensors = [*model.parameters(), *[p.scale for p in model.parameters() if hasattr(p, "scale")]]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest value expected."""
    return ((actual.detach().cpu() - expected.detach().cpu()).abs().max() / expected.detach().abs().max().cpu()).item()


def timed(function: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call, after one that compiles."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(function().jax())
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def main(
    width: Annotated[int, typer.Option(help="Channels, a multiple of 8.")] = 256,
    length: Annotated[int, typer.Option(min=2, help="Tokens in the text.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs.")] = 5,
) -> Figures:
    """Run a Hugging Face Llama with int8 weights: accuracy, memory and speed."""
    model = make_model(width).to("jax")
    small = copy.deepcopy(model)
    quantise(small)
    tokens = torch.randint(256, (2, length), generator=torch.Generator().manual_seed(0)).to("jax")

    def run(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(tokens, use_cache=False).logits

    def loss(logits: torch.Tensor) -> float:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()

    def gradient_of_embedding(model: LlamaForCausalLM) -> torch.Tensor:
        weight = model.get_input_embeddings().weight
        return torch.autograd.grad(model(tokens, labels=tokens, use_cache=False).loss, weight)[0]

    logits = run(model, tokens)
    with torchax_core.default_env().override_op_definition("aten::linear", int8_linear):
        int8_logits = run(small, tokens)
        # the same computation, with the weights put back into floating point: what the override has to agree with
        restored = copy.deepcopy(model)
        for module, other in zip(restored.modules(), small.modules(), strict=True):
            if isinstance(module, nn.Linear):
                module.weight.data.copy_(other.weight.float() * other.weight.scale[:, None])
        exact = run(restored, tokens)  # declined, each time: its weights are floating
        gradient, exact_gradient = gradient_of_embedding(small), gradient_of_embedding(restored)
        compiled, small_compiled = torchax_core.jit(lambda t: run(model, t)), torchax_core.jit(lambda t: run(small, t))
        seconds, int8_seconds = (timed(lambda f=f: f(tokens), repeats) for f in (compiled, small_compiled))
        agrees = relative_error(small_compiled(tokens), int8_logits)

    figures = Figures(
        logits_error=relative_error(int8_logits, logits),
        same_token=(int8_logits.argmax(-1) == logits.argmax(-1)).float().mean().item(),
        loss=loss(logits),
        int8_loss=loss(int8_logits),
        exact_error=max(relative_error(int8_logits, exact), agrees),
        gradient_error=relative_error(gradient, exact_gradient),
        weights_mib=mib(model),
        int8_weights_mib=mib(small),
        seconds=seconds,
        int8_seconds=int8_seconds,
    )
    table = Table("", "float32", "int8", title="Weight-only int8")
    table.add_row("weights, MiB", f"{figures.weights_mib:.2f}", f"{figures.int8_weights_mib:.2f}")
    table.add_row("forward pass compiled, s", f"{seconds:.4f}", f"{int8_seconds:.4f}")
    table.add_row("loss", f"{figures.loss:.4f}", f"{figures.int8_loss:.4f}")
    console = Console()
    console.print(table)
    console.print(
        f"logits: {figures.logits_error:.1e} off float32's; the same token in {figures.same_token:.1%} of places"
    )
    console.print(
        f"off the same weights put back into float32: {figures.exact_error:.1e}, gradient {figures.gradient_error:.1e}"
    )
    return figures


if __name__ == "__main__":
    typer.run(main)
