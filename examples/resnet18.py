"""torchvision's resnet18 on device "jax": inference and a training step, running statistics included, against CPU.

    python examples/resnet18.py              # --help lists the options

What it shows: a convolutional network with batch norm moved by `.to("jax")`. In eval mode the logits are CPU's; a
training step with momentum SGD, run eagerly and as one XLA program, gives CPU's loss, gradients, new weights and
new running statistics. Weights are random: nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torchvision.models import resnet18

import torchax_core


@dataclasses.dataclass(frozen=True)
class StepErrors:
    """How far one training step is from CPU's. Relative: the norm of the difference over the norm on CPU."""

    loss: float
    gradients: float
    weights: float
    running_statistics: float


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was compared with CPU torch, and how far apart it is."""

    logits_error: float
    eager: StepErrors
    jitted: StepErrors


def make_model() -> nn.Module:
    """A resnet18 for 10 classes, its random weights always the same."""
    torch.manual_seed(0)
    return resnet18(weights=None, num_classes=10)


def make_data(batch: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, 3, size, size) images and (batch,) labels, on CPU."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batch, 3, size, size, generator=generator)
    return images, torch.randint(0, 10, (batch,), generator=generator)


def relative_error(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative distance, in norm, between tensors of the same name."""
    errors = [
        (actual[name].detach().cpu() - value.detach()).double().norm() / value.detach().double().norm().clamp_min(1e-12)
        for name, value in expected.items()
    ]
    return torch.stack(errors).max().item()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All that a training step leaves behind, by name."""

    loss: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    statistics: dict[str, torch.Tensor]

    def errors(self, expected: Outcome) -> StepErrors:
        """The distance to another step's outcome."""
        return StepErrors(
            loss=relative_error(self.loss, expected.loss),
            gradients=relative_error(self.gradients, expected.gradients),
            weights=relative_error(self.weights, expected.weights),
            running_statistics=relative_error(self.statistics, expected.statistics),
        )


def train_once(device: str, images: torch.Tensor, labels: torch.Tensor, *, jit: bool = False) -> Outcome:
    """One step of momentum SGD of a fresh model on `device`."""
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    run = torchax_core.jit(step) if jit else step
    loss = run(images.to(device), labels.to(device))
    parameters = dict(model.named_parameters())
    return Outcome(
        loss={"loss": loss},
        gradients={name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None},
        weights=parameters,
        statistics=dict(model.named_buffers()),
    )


def main(
    device: Annotated[str, typer.Option(help="The device to compare with CPU.")] = "jax",
    batch: Annotated[int, typer.Option(min=2, help="Images in a batch.")] = 8,
    size: Annotated[int, typer.Option(min=32, help="Height and width of the images.")] = 64,
) -> Figures:
    """Run resnet18 on device "jax" and on CPU: eval logits, and one training step eagerly and jitted."""
    images, labels = make_data(batch, size)

    reference = make_model().eval()
    model = make_model().eval().to(device)
    with torch.no_grad():
        logits = model(images.to(device))
        expected_logits = reference(images)

    expected = train_once("cpu", images, labels)
    figures = Figures(
        logits_error=relative_error({"logits": logits}, {"logits": expected_logits}),
        eager=train_once(device, images, labels).errors(expected),
        jitted=train_once(device, images, labels, jit=device == "jax").errors(expected),
    )

    table = Table(title=f"resnet18, {batch} images of {size}x{size}: relative distance between {device} and CPU")
    for column in ("compared", "eager", "jitted"):
        table.add_column(column, justify="left" if column == "compared" else "right")
    table.add_row("eval logits", f"{figures.logits_error:.1e}", "")
    for field in dataclasses.fields(StepErrors):
        eager, jitted = getattr(figures.eager, field.name), getattr(figures.jitted, field.name)
        table.add_row(f"training step: {field.name.replace('_', ' ')}", f"{eager:.1e}", f"{jitted:.1e}")
    Console().print(table)
    return figures


if __name__ == "__main__":
    typer.run(main)
