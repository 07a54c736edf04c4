"""What calling an already compiled step costs: 200 parameters, against jax.jit of the same flat list of arrays.

    python benchmarks/dispatch.py             # --quick for a rough look

CPU time of the calling thread, which other programs on the machine do not lengthen; results are waited for outside of it.
The steps are so small that dispatch is what they cost.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import torch
import typer
from torch import nn

import torchax_core

LAYERS = 100


def forward(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """The model by hand: `weights` are weight and bias of each layer."""
    for i in range(LAYERS):
        x = x @ weights[2 * i].T + weights[2 * i + 1]
    return x


def contenders() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """By name: ours, and jax's by hand."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(LAYERS)]).to("jax")
    x = torch.ones(4, 4, device="jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    @torchax_core.jit
    def decay(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = model(x)
            for p in model.parameters():
                p.mul_(0.99)
        return y.sum()

    @torchax_core.jit
    def train(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    array = x.jax() + 0
    held = {name: [p.detach().jax() + 0 for p in model.parameters()] for name in ("decay", "train")}
    by_hand = {
        "decay": jax.jit(lambda w, x: ([a * 0.99 for a in w], forward(w, x).sum()), donate_argnums=0),
        "train": jax.jit(_sgd, donate_argnums=0),
    }

    def jax_step(name: str) -> Any:
        held[name], loss, *_ = by_hand[name](held[name], array)
        return loss

    return {
        "state updated under no_grad": (lambda: decay(x), lambda: jax_step("decay")),
        "backward and SGD": (lambda: train(x), lambda: jax_step("train")),
    }


def _sgd(weights: list[jax.Array], x: jax.Array) -> Any:
    loss, gradients = jax.value_and_grad(lambda w: forward(w, x).sum())(weights)
    return [w - 0.01 * g for w, g in zip(weights, gradients, strict=True)], loss, gradients


def main(quick: bool = False) -> None:
    """Print microseconds per call, and the ratio: medians over interleaved rounds."""
    for name, calls in contenders().items():
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(10 if quick else 60):
            for call, found in zip(calls, seconds, strict=True):
                for _ in range(10):
                    start = time.thread_time()
                    result = call()
                    found.append(time.thread_time() - start)
                    jax.block_until_ready(result.jax() if isinstance(result, torch.Tensor) else result)
        ours, theirs = (statistics.median(found[20:]) for found in seconds)
        typer.echo(f"{name}: {ours * 1e6:.0f} us, jax {theirs * 1e6:.0f} us, {ours / theirs:.2f}x")


if __name__ == "__main__":
    typer.run(main)
