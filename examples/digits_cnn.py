"""A small CNN learns handwritten digits on device "jax": eager at first, then as one compiled XLA program per step.

    python examples/digits_cnn.py            # or `make demo`; --help lists the options

What it shows: an ordinary PyTorch program (convolutions, batch norm, dropout, max pool, AdamW, a cosine schedule,
a DataLoader) whose only mark of JAX is `device="jax"`. Halfway, `torchax_core.jit` turns the training step,
gradients and optimizer included, into one XLA program; the learning rate keeps changing and nothing recompiles. At
the end it prints the accuracy on digits it has not seen, how long an eager, a jitted and a CPU torch step took,
and writes a picture of the loss curve and the confusion matrix.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.metrics import confusion_matrix
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchax_core

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a run measured. Times are medians over steps, in milliseconds; a step ends when its loss is known.

    compilations: how often the jitted step was compiled, though the learning rate changed after every step.
    """

    accuracy: float
    losses: list[float]
    eager_ms: float
    jitted_ms: float
    cpu_ms: float
    first_jitted_s: float
    compilations: int
    picture: Path


class DigitNet(nn.Module):
    """(N, 1, 8, 8) grey digits to (N, 10) logits; two convolution blocks and a linear head, 38 thousand weights."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Flatten(), nn.Linear(64 * 4 * 4, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images))


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 1,797 digits as (image, label): four fifths to learn from, the rest held out; always the same."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    train_x, test_x, train_y, test_y = map(torch.from_numpy, parts)
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """One step of training, as anybody writes it."""

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def cpu_step_ms(model: nn.Module, loader: DataLoader, steps: int) -> float:
    """The median milliseconds of a training step of a copy of `model` on CPU torch.

    The better of two settings: torch's own number of threads, and one thread. On a machine that is busy with something
    else, torch's threads wait for each other, and a step takes up to 40 times longer than on one thread.
    """
    model = copy.deepcopy(model).cpu().train()
    step = make_step(model, torch.optim.AdamW(model.parameters()))
    batches = list(loader)[: steps + 1]
    threads = torch.get_num_threads()
    medians = []
    try:
        for count in {1, threads}:
            torch.set_num_threads(count)
            times = []
            for images, labels in batches:
                start = time.perf_counter()
                step(images, labels).item()
                times.append(time.perf_counter() - start)
            medians.append(statistics.median(times[1:]))
    finally:
        torch.set_num_threads(threads)
    return 1e3 * min(medians)


def draw(losses: list[float], eager_steps: int, matrix: np.ndarray, accuracy: float, picture: Path) -> None:
    """The loss of every step, and which digit was taken for which, as one PNG."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    curve, confusion = figure.subplots(1, 2)
    curve.semilogy(losses, linewidth=1)
    curve.axvline(eager_steps, color="grey", linestyle="--", label="eager | jitted")
    curve.set(xlabel="step", ylabel="cross entropy", title="Training loss")
    curve.legend()
    confusion.imshow(matrix, cmap="Blues")
    for (row, column), count in np.ndenumerate(matrix):
        if count:
            color = "white" if count > matrix.max() / 2 else "black"
            confusion.text(column, row, str(count), ha="center", va="center", color=color)
    confusion.set(
        xlabel="predicted",
        ylabel="true",
        xticks=range(10),
        yticks=range(10),
        title=f"Held-out digits, {accuracy:.1%} right",
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)


def main(
    device: Annotated[
        str, typer.Option(help="Where to train: jax, or cpu to see the same program on plain torch.")
    ] = "jax",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training digits.")] = 15,
    eager_steps: Annotated[int, typer.Option(min=1, help="Steps to run eagerly before the rest is jitted.")] = 10,
    picture: Annotated[Path, typer.Option(help="Where to write the loss curve and the confusion matrix.")] = Path(
        "build/digits_cnn.png"
    ),
) -> Figures:
    """Train a small CNN on handwritten digits on device "jax", and say how well and how fast it went."""
    console = Console()
    torch.manual_seed(0)
    train, test = load_data()
    loader = DataLoader(train, batch_size=64, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0))
    total = epochs * len(loader)

    model = DigitNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
    eager = make_step(model, optimizer)
    jitted = torchax_core.jit(eager)
    rest = jitted if device == "jax" else eager

    losses: list[float] = []
    times: list[float] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("eager", total=total)
        for _ in range(epochs):
            for images, labels in loader:
                step = eager if len(losses) < eager_steps else rest
                start = time.perf_counter()
                loss = step(images.to(device), labels.to(device)).item()
                times.append(time.perf_counter() - start)
                scheduler.step()
                losses.append(loss)
                mode = "eager " if step is eager else "jitted"
                progress.update(
                    bar, advance=1, description=f"{mode} loss {loss:.4f} lr {scheduler.get_last_lr()[0]:.1e}"
                )

    model.eval()
    images, labels = test.tensors
    with torch.no_grad():
        predicted = model(images.to(device)).argmax(dim=1).cpu()
    accuracy = (predicted == labels).float().mean().item()
    draw(losses, eager_steps, confusion_matrix(labels, predicted), accuracy, picture)

    # The first step of each kind compiles, so it is left out of the medians.
    figures = Figures(
        accuracy=accuracy,
        losses=losses,
        eager_ms=1e3 * statistics.median(times[1:eager_steps] or times[:1]),
        jitted_ms=1e3 * statistics.median(times[eager_steps + 1 :]),
        cpu_ms=cpu_step_ms(model, loader, steps=10),
        first_jitted_s=times[eager_steps],
        compilations=len(jitted.compilations),
        picture=picture,
    )
    table = Table(title=f"digits_cnn on device {device!r}, {total} steps of 64 digits")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_row("held-out accuracy", f"{accuracy:.2%} of {len(test)}")
    table.add_row("eager step", f"{figures.eager_ms:.2f} ms")
    table.add_row("jitted step", f"{figures.jitted_ms:.2f} ms")
    table.add_row("CPU torch step", f"{figures.cpu_ms:.2f} ms")
    table.add_row("first jitted step (trace, compile)", f"{figures.first_jitted_s:.2f} s")
    table.add_row("compilations of the jitted step", str(figures.compilations))
    table.add_row("loss, first and last step", f"{losses[0]:.3f} -> {losses[-1]:.4f}")
    console.print(table)
    console.print(f"Wrote {picture}")
    return figures


if __name__ == "__main__":
    typer.run(main)
