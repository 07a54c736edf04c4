"""GPT-2 from Hugging Face transformers on device "jax", number for number against CPU torch.

    python examples/gpt2_training.py         # --help lists the options

What it shows: a model nobody wrote for JAX, moved by `.to("jax")`. The same weights and the same text give the
same logits and gradients as on CPU; 20 AdamW steps, eager and then as one XLA program each, follow CPU's losses;
and `generate`, with its key/value cache, picks the same tokens. The model has 4 layers, random weights and no
dropout, and learns to continue the Zen of Python letter by letter.
"""

from __future__ import annotations

import codecs
import contextlib
import copy
import dataclasses
import io
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel

import torchax_core


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was compared. Errors are relative: the largest difference over the largest value on CPU."""

    logits_error: float
    gradient_error: float
    worst_gradient: str
    cpu_losses: list[float]
    eager_losses: list[float]
    jitted_losses: list[float]
    cpu_tokens: list[int]
    tokens: list[int]


def zen() -> str:
    """The Zen of Python, all of it ASCII."""
    with contextlib.redirect_stdout(io.StringIO()):  # the module greets whoever imports it
        import this
    return codecs.decode(this.s, "rot13")


def make_model() -> GPT2LMHeadModel:
    """A GPT-2 of 4 layers over the 128 ASCII characters, without dropout so that every device computes the same."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=128,
        n_positions=128,
        n_embd=64,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config)


def make_batches(steps: int, batch: int = 4, length: int = 32) -> list[torch.Tensor]:
    """`steps` batches of (batch, length) character codes, cut from the text at random places, on CPU."""
    text = torch.tensor(list(zen().encode("ascii")))
    starts = torch.randint(0, len(text) - length, (steps, batch, 1), generator=torch.Generator().manual_seed(1))
    return list(text[starts + torch.arange(length)])


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest magnitude of `expected`."""
    difference = (actual.detach().cpu() - expected.detach()).abs().max()
    return (difference / expected.detach().abs().max()).item()


def train(model: GPT2LMHeadModel, batches: list[torch.Tensor], *, lr: float = 1e-3, jit: bool = False) -> list[float]:
    """One AdamW step per batch, on the device the model is on; the loss before each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss

    run = torchax_core.jit(step) if jit else step
    return [run(tokens.to(model.device)).item() for tokens in batches]


def continue_text(model: GPT2LMHeadModel, prompt: str, new_tokens: int) -> list[int]:
    """The character codes that `model` finds most likely after `prompt`, one at a time."""
    tokens = torch.tensor([list(prompt.encode("ascii"))], device=model.device)
    model.eval()
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
    )
    return output[0, tokens.shape[1] :].tolist()


def main(
    device: Annotated[str, typer.Option(help="The device to compare with CPU.")] = "jax",
    steps: Annotated[int, typer.Option(min=1, help="AdamW steps to compare.")] = 20,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate greedily.")] = 16,
) -> Figures:
    """Run GPT-2 on device "jax" and on CPU: logits, gradients, training steps and greedy text."""
    console = Console()
    batches = make_batches(steps)

    # 1. The same weights, the same text: logits and every gradient.
    reference = make_model()
    model = copy.deepcopy(reference).to(device)
    expected = reference(batches[0], labels=batches[0])
    expected.loss.backward()
    actual = model(batches[0].to(device), labels=batches[0].to(device))
    actual.loss.backward()
    logits_error = relative_error(actual.logits, expected.logits)
    gradient_errors = {
        name: relative_error(ours.grad, theirs.grad)
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True)
    }
    worst_gradient = max(gradient_errors, key=lambda name: gradient_errors[name])

    # 2. The same training steps three times: on CPU, eagerly, and jitted.
    cpu_losses = train(make_model(), batches)
    eager_losses = train(make_model().to(device), batches)
    jitted_losses = train(make_model().to(device), batches, jit=device == "jax")

    # 3. The same weights, trained until they spell words, greedily continue a line here and on CPU.
    trained = make_model().to(device)
    train(trained, make_batches(150), lr=3e-3, jit=device == "jax")
    prompt = "Simple is better "
    tokens = continue_text(trained, prompt, new_tokens)
    cpu_tokens = continue_text(copy.deepcopy(trained).cpu(), prompt, new_tokens)

    figures = Figures(
        logits_error=logits_error,
        gradient_error=gradient_errors[worst_gradient],
        worst_gradient=worst_gradient,
        cpu_losses=cpu_losses,
        eager_losses=eager_losses,
        jitted_losses=jitted_losses,
        cpu_tokens=cpu_tokens,
        tokens=tokens,
    )
    table = Table(
        title=f"GPT-2, 4 layers, {sum(p.numel() for p in reference.parameters()):,} weights: {device} and CPU"
    )
    for column in ("compared", "CPU", f"{device} eager", f"{device} jitted"):
        table.add_column(column, justify="left" if column == "compared" else "right")
    table.add_row("logits, relative error", "", f"{logits_error:.1e}", "")
    table.add_row("gradients, worst relative error", "", f"{figures.gradient_error:.1e}", "")
    for index in sorted({0, steps // 2, steps - 1}):
        losses = (cpu_losses[index], eager_losses[index], jitted_losses[index])
        table.add_row(f"loss at step {index + 1}", *(f"{loss:.6f}" for loss in losses))
    table.add_row(f"{new_tokens} greedy tokens", repr(bytes(cpu_tokens).decode()), repr(bytes(tokens).decode()), "")
    console.print(table)
    return figures


if __name__ == "__main__":
    typer.run(main)
