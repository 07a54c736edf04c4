"""JAX functions inside a torch model on device "jax": called directly, and in the place of one of torch's own ops.

    python examples/jax_in_torch.py          # --help lists the options

What it shows, in two parts:

1. `torchax_core.interop.call_jax` calls a JAX function on torch tensors. Gradients flow through it: to the torch
   layers before it, and to torch Parameters that are its own arguments. Here a gated linear recurrence, a loop
   over time in torch, is one `jax.lax.associative_scan` in JAX.
2. `env.override_op_definition` replaces `scaled_dot_product_attention` by a JAX function for the length of a
   `with` block. The model, an `nn.MultiheadAttention`, is not touched; its outputs and gradients stay CPU torch's;
   afterwards torch's own definition is back.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Annotated

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import torchax_core
from torchax_core.interop import call_jax

Pair = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Figures:
    """Largest absolute differences from the same program on CPU torch; how often the JAX attention was traced."""

    scan_output_error: float
    scan_gradient_errors: dict[str, float]
    attention_output_error: float
    attention_gradient_error: float
    traces_inside: int
    traces_after: int


# -- 1. a JAX function as a part of a torch model --------------------------------------------------


def linear_scan(inputs: jax.Array, decay: jax.Array) -> jax.Array:
    """h[t] = sigmoid(decay) * h[t - 1] + inputs[t] along time, all steps at once.

    inputs:  (batch, time, channels)
    decay:   (channels,)
    returns: (batch, time, channels)
    """

    def combine(
        earlier: tuple[jax.Array, jax.Array], later: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        (a, x), (b, y) = earlier, later
        return a * b, b * x + y

    rates = jnp.broadcast_to(jax.nn.sigmoid(decay), inputs.shape)
    return jax.lax.associative_scan(combine, (rates, inputs), axis=1)[1]


def linear_scan_torch(inputs: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """The same as `linear_scan`, in torch: what CPU runs."""
    rate = torch.sigmoid(decay)
    states = [inputs[:, 0]]
    for step in inputs.unbind(dim=1)[1:]:
        states.append(rate * states[-1] + step)
    return torch.stack(states, dim=1)


class ScanModel(nn.Module):
    """(N, T, C) to (N, T, C): a torch layer, the recurrence with a torch Parameter as its rate, another torch layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.decay = nn.Parameter(torch.linspace(-2, 2, width))
        self.after = nn.Linear(width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.before(inputs))
        if hidden.device.type == "jax":
            hidden = call_jax(linear_scan, hidden, self.decay)
        else:
            hidden = linear_scan_torch(hidden, self.decay)
        return self.after(hidden)


# -- 2. a JAX function in the place of one of torch's ops ------------------------------------------


class JaxAttention:
    """`scaled_dot_product_attention` as JAX mathematics; counts how often it is traced: so we see who was asked."""

    def __init__(self) -> None:
        self.traces = 0

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
        """(..., L, E), (..., S, E), (..., S, Ev) to (..., L, Ev). Declines what it does not know.

        Floats such as `dropout_p` are Python values here, so it can be asked about.
        """
        if enable_gqa or dropout_p:
            return NotImplemented  # torch's own definition is asked next
        self.traces += 1
        scores = jnp.einsum("...le,...se->...ls", query, key)
        scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        if attn_mask is not None:
            scores = jnp.where(attn_mask, scores, -jnp.inf) if attn_mask.dtype == bool else scores + attn_mask
        return jnp.einsum("...ls,...sv->...lv", jax.nn.softmax(scores, axis=-1), value)


def attend(layer: nn.MultiheadAttention, inputs: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Causal self-attention of (N, T, C) `inputs`: the output, and the gradients of all weights for a squared loss."""
    time = inputs.shape[1]
    mask = nn.Transformer.generate_square_subsequent_mask(time, device=inputs.device)
    output, _ = layer(inputs, inputs, inputs, attn_mask=mask, is_causal=True, need_weights=False)
    return output, list(torch.autograd.grad(output.square().mean(), tuple(layer.parameters())))


# -- the comparison --------------------------------------------------------------------------------


def largest_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest absolute difference between a tensor on any device and one on CPU."""
    return (actual.detach().cpu() - expected.detach()).abs().max().item()


def compare_scan(inputs: torch.Tensor) -> tuple[float, dict[str, float]]:
    """The error of `ScanModel`'s output, and of the gradients of its input and of each parameter."""
    torch.manual_seed(0)
    reference = ScanModel(inputs.shape[-1])
    model = copy.deepcopy(reference).to("jax")
    results = {}
    for name, module in (("cpu", reference), ("jax", model)):
        leaf = inputs.to(name, copy=True).requires_grad_()
        output = module(leaf)
        F.mse_loss(output, torch.ones_like(output)).backward()
        results[name] = output, {"inputs": leaf.grad, **{key: p.grad for key, p in module.named_parameters()}}
    (expected, expected_gradients), (actual, gradients) = results["cpu"], results["jax"]
    errors = {key: largest_difference(gradients[key], expected_gradients[key]) for key in expected_gradients}
    return largest_difference(actual, expected), errors


def compare_attention(inputs: torch.Tensor) -> tuple[float, float, int, int]:
    """Errors of the output and the gradients with JAX's attention; its traces in the `with` block and after it."""
    torch.manual_seed(0)
    reference = nn.MultiheadAttention(inputs.shape[-1], num_heads=4, batch_first=True)
    layer = copy.deepcopy(reference).to("jax")
    expected, expected_gradients = attend(reference, inputs)

    env = torchax_core.default_env()
    attention = JaxAttention()
    with env.override_op_definition("aten::scaled_dot_product_attention", attention, is_jax_function=True):
        actual, gradients = attend(layer, inputs.to("jax"))
    inside = attention.traces
    attend(layer, inputs[:, 1:].to("jax"))  # a length not seen before, so whoever is asked now is traced anew
    after = attention.traces - inside

    worst = max(map(largest_difference, gradients, expected_gradients))
    return largest_difference(actual, expected), worst, inside, after


def main(
    batch: Annotated[int, typer.Option(min=1, help="Sequences in the batch.")] = 4,
    time: Annotated[int, typer.Option(min=2, help="Steps in a sequence.")] = 16,
    width: Annotated[int, typer.Option(min=4, help="Channels, a multiple of 4.")] = 32,
) -> Figures:
    """Call JAX functions from torch models on device "jax", and compare outputs and gradients with CPU torch."""
    inputs = torch.randn(batch, time, width, generator=torch.Generator().manual_seed(1))
    scan_output, scan_gradients = compare_scan(inputs)
    attention_output, attention_gradient, inside, after = compare_attention(inputs)
    figures = Figures(
        scan_output_error=scan_output,
        scan_gradient_errors=scan_gradients,
        attention_output_error=attention_output,
        attention_gradient_error=attention_gradient,
        traces_inside=inside,
        traces_after=after,
    )

    table = Table(title="JAX functions in torch models: largest difference from CPU torch")
    table.add_column("compared")
    table.add_column("difference", justify="right")
    table.add_row("scan by call_jax: output", f"{scan_output:.1e}")
    for name, error in scan_gradients.items():
        table.add_row(f"scan by call_jax: gradient of {name}", f"{error:.1e}")
    table.add_row("attention overridden: output", f"{attention_output:.1e}")
    table.add_row("attention overridden: worst gradient", f"{attention_gradient:.1e}")
    console = Console()
    console.print(table)
    console.print(f"JAX attention was traced {inside} times inside the `with` block, {after} times after it.")
    return figures


if __name__ == "__main__":
    typer.run(main)
