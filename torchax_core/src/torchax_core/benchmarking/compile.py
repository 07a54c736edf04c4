"""torch.compile(backend="torchax"): a GPT (4 layers, 256 wide) on device "jax" against torchax_core.jit of the same code.

    torchax bench compile     # --quick for a rough look; in the repository, python benchmarks/compile.py

Forward: the same module, compiled either way; both must give the same logits first. Training: forward and backward,
which torch.compile runs as two programs, and jit as one. The host's own share of a call (guards, AOTAutograd's wrappers,
gathering arguments) is timed on a GPT small enough that little else is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import typer

import torchax_core
from torchax_core.benchmarking.common import Json, Quick, console, interleave, make_table, progress, verdict, write_json
from torchax_core.benchmarking.models import GPTConfig, gpt_loss, make_gpt

STEADY_LIMIT = 1.10

TINY = GPTConfig(vocabulary=32, length=8, layers=4, width=16, heads=2, batch=1)


def forwards(config: GPTConfig) -> dict[str, Callable[[], Any]]:
    """The forward without gradients by both ways, checked to agree."""
    model, tokens = make_gpt(config)
    model = model.to("jax").eval()
    tokens = tokens[:, :-1].contiguous().to("jax")
    compiled = torch.compile(model, backend="torchax", fullgraph=True)
    jitted = torchax_core.jit(lambda tokens: model(tokens))

    def run(forward: Callable[..., Any]) -> torch.Tensor:
        with torch.no_grad():
            return forward(tokens)  # type: ignore[no-any-return]

    np.testing.assert_allclose(run(compiled).cpu(), run(jitted).cpu(), rtol=1e-3, atol=1e-4)
    return {"compile": lambda: run(compiled), "jit": lambda: run(jitted)}


def gradients(config: GPTConfig) -> dict[str, Callable[[], Any]]:
    """Loss and gradients by both ways, checked to agree."""
    ways: dict[str, Callable[[], Any]] = {}
    losses = []
    for name in ("compile", "jit"):
        model, tokens = make_gpt(config)
        model, tokens = model.to("jax"), tokens.to("jax")
        parameters = list(model.parameters())
        loss_of = torch.compile(gpt_loss, backend="torchax", fullgraph=True) if name == "compile" else gpt_loss

        def step(loss_of: Any = loss_of, model: Any = model, tokens: Any = tokens, parameters: Any = parameters) -> Any:
            return torch.autograd.grad(loss_of(model, tokens), parameters)

        ways[name] = step if name == "compile" else torchax_core.jit(step)
        losses.append(ways[name]())
    for ours, wanted in zip(*losses, strict=True):
        np.testing.assert_allclose(ours.cpu(), wanted.cpu(), rtol=1e-2, atol=1e-4)
    return ways


def turn(call: Callable[[], Any]) -> Callable[[], Callable[[], Any]]:
    """A contender that needs no preparation."""
    return lambda: call


def main(quick: Quick = False, json: Json = None) -> Any:
    """Time torch.compile(backend="torchax") against torchax_core.jit: forward, gradients, and the host's share."""
    rounds = 7 if quick else 41
    rows: dict[str, dict[str, float]] = {}
    for name, ways, calls in (
        ("forward", forwards(GPTConfig()), 3),
        ("gradients", gradients(GPTConfig()), 1),
        ("forward, tiny", forwards(TINY), 20),
    ):
        progress(f"compile: {name}")
        timings = interleave({way: turn(call) for way, call in ways.items()}, rounds=rounds, calls=calls)
        rows[name] = {
            "compile_ms": 1e3 * timings.median("compile"),
            "jit_ms": 1e3 * timings.median("jit"),
            "ratio": timings.ratio("compile", "jit"),
        }
    table = make_table("GPT, a compiled call, ms", ["what", "torchax_core.jit", "torch.compile", "ratio"])
    for name, row in rows.items():
        table.add_row(name, f"{row['jit_ms']:.3f}", f"{row['compile_ms']:.3f}", f"{row['ratio']:.3f}")
    console.print(table)
    console.print(f"forward:   {verdict(rows['forward']['ratio'], STEADY_LIMIT)}")
    console.print(f"gradients: {verdict(rows['gradients']['ratio'], STEADY_LIMIT)}")
    return write_json(json, {"compile": rows})


if __name__ == "__main__":
    typer.run(main)
