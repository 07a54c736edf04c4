"""An LSTM and an nn.TransformerEncoder over sentences of different lengths, on device "jax" and on CPU torch.

    python examples/sequence_models.py       # --help lists the options

What it shows: PyTorch's own sequence modules with padding. Both models learn to tell whether a sequence of tokens
holds more even than odd ones. Sequences are padded to one length: the encoder gets a `src_key_padding_mask`, the
LSTM's states are averaged over the real tokens only. In eval mode the scores are CPU's, and the same as for the
sequence without its padding; in train mode (dropout 0, since every device draws its own) the losses of some Adam
steps follow CPU's, eagerly and jitted.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import torchax_core

VOCABULARY = 20
WIDTH = 32


class MaskedMean(nn.Module):
    """(N, T, C) states to their (N, C) mean over the positions where the (N, T) mask `padding` is False."""

    def forward(self, states: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        states = states.masked_fill(padding.unsqueeze(-1), 0.0)
        return states.sum(dim=1) / (~padding).sum(dim=1, keepdim=True)


class LSTMClassifier(nn.Module):
    """Two layers of LSTM over (N, T) tokens; (N, 2) scores from the mean of the states that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.pool = MaskedMean()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(self.pool(states, padding))


class TransformerClassifier(nn.Module):
    """Two layers of nn.TransformerEncoder over (N, T) tokens, blind to padding; (N, 2) scores from the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.pool = MaskedMean()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        states = self.encoder(self.embedding(tokens), src_key_padding_mask=padding)
        return self.head(self.pool(states, padding))


MODELS: dict[str, type[nn.Module]] = {"LSTM": LSTMClassifier, "TransformerEncoder": TransformerClassifier}


@dataclasses.dataclass(frozen=True)
class ModelFigures:
    """One model's comparison with CPU. Errors are the largest absolute differences."""

    eval_error: float
    padding_error: float
    gradient_error: float
    cpu_losses: list[float]
    eager_losses: list[float]
    jitted_losses: list[float]


@dataclasses.dataclass(frozen=True)
class Figures:
    """The comparison of each model with CPU, by the name of its module."""

    models: dict[str, ModelFigures]


@dataclasses.dataclass(frozen=True)
class Batch:
    """(N, T) tokens, the (N, T) mask of what is padding, and (N,) labels: 1 where even tokens are more than half."""

    tokens: torch.Tensor
    padding: torch.Tensor
    labels: torch.Tensor

    def to(self, device: str) -> Batch:
        """The batch on another device."""
        return Batch(self.tokens.to(device), self.padding.to(device), self.labels.to(device))


def make_batch(size: int, length: int) -> Batch:
    """`size` random sequences of 2 to `length` tokens, padded with 0, on CPU."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (size, length), generator=generator)
    lengths = torch.randint(2, length + 1, (size, 1), generator=generator)
    padding = torch.arange(length) >= lengths
    even = ((tokens % 2 == 0) & ~padding).sum(dim=1, keepdim=True)
    return Batch(tokens.masked_fill(padding, 0), padding, (2 * even > lengths).squeeze(1).long())


def train(model: nn.Module, batch: Batch, steps: int, *, jit: bool = False) -> list[float]:
    """Adam steps on one batch; the loss before each. The last gradients stay in the parameters."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(tokens: torch.Tensor, padding: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens, padding), labels)
        loss.backward()
        optimizer.step()
        return loss

    run = torchax_core.jit(step) if jit else step
    model.train()
    return [run(batch.tokens, batch.padding, batch.labels).item() for _ in range(steps)]


def compare(model_class: type[nn.Module], device: str, batch: Batch, steps: int) -> ModelFigures:
    """One model in eval and train mode, on `device` and on CPU."""
    torch.manual_seed(0)
    reference = model_class().eval()
    model = copy.deepcopy(reference).to(device)
    jitted_model = copy.deepcopy(reference).to(device)
    there = batch.to(device)

    with torch.no_grad():
        expected = reference(batch.tokens, batch.padding)
        scores = model(there.tokens, there.padding).cpu()
        # The shortest sequence alone and without its padding: padding must not have changed its scores.
        index = int(batch.padding.sum(dim=1).argmax())
        real = int((~batch.padding[index]).sum())
        alone = model(there.tokens[index : index + 1, :real], there.padding[index : index + 1, :real]).cpu()

    cpu_losses = train(reference, batch, steps)
    eager_losses = train(model, there, steps)
    jitted_losses = train(jitted_model, there, steps, jit=device == "jax")
    differences = [
        (ours.grad.cpu() - theirs.grad).abs().max()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True)
        if ours.grad is not None and theirs.grad is not None
    ]
    return ModelFigures(
        eval_error=(scores - expected).abs().max().item(),
        padding_error=(alone - scores[index]).abs().max().item(),
        gradient_error=torch.stack(differences).max().item(),
        cpu_losses=cpu_losses,
        eager_losses=eager_losses,
        jitted_losses=jitted_losses,
    )


def main(
    device: Annotated[str, typer.Option(help="The device to compare with CPU.")] = "jax",
    steps: Annotated[int, typer.Option(min=1, help="Adam steps to compare.")] = 20,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in the batch.")] = 32,
    length: Annotated[int, typer.Option(min=2, help="Tokens in the longest sequence.")] = 12,
) -> Figures:
    """Run an LSTM and a TransformerEncoder with padding on device "jax" and on CPU, in eval and train mode."""
    data = make_batch(batch, length)
    figures = Figures({name: compare(model_class, device, data, steps) for name, model_class in MODELS.items()})

    table = Table(title=f"{batch} sequences of 2 to {length} tokens, on {device} and on CPU")
    table.add_column("compared")
    for name in MODELS:
        table.add_column(name, justify="right")
    results = figures.models.values()
    table.add_row("eval scores, largest difference", *(f"{model.eval_error:.1e}" for model in results))
    table.add_row("with and without padding", *(f"{model.padding_error:.1e}" for model in results))
    table.add_row("gradients at the last step", *(f"{model.gradient_error:.1e}" for model in results))
    for where in ("cpu", "eager", "jitted"):
        losses = [getattr(model, f"{where}_losses") for model in results]
        table.add_row(f"loss, {where}: first and last", *(f"{loss[0]:.5f} -> {loss[-1]:.5f}" for loss in losses))
    Console().print(table)
    return figures


if __name__ == "__main__":
    typer.run(main)
