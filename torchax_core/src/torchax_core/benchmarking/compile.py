"""torch.compile(backend="torchax") on device "jax" against torchax_core.jit of the same code: GPT (4 layers, 256 wide), ResNet-18
and an MLP.

    torchax bench compile     # --quick for a rough look; in the repository, python benchmarks/compile.py

Forward: the same module, compiled either way. Gradients: forward and backward, which torch.compile runs as two programs, and
jit as one. Training: an AdamW step; torch.compile runs forward, backward and `optimizer.step` as three programs. Results
must agree before anything is timed. The host's own share of a call (dynamo's guards, AOTAutograd's wrappers, the autograd engine)
is timed on a GPT small enough that little else is left.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import nn

import torchax_core
from torchax_core.benchmarking.common import Json, Quick, console, interleave, make_table, progress, verdict, write_json
from torchax_core.benchmarking.models import GPTConfig, gpt_loss, make_gpt

STEADY_LIMIT = 1.10

TINY = GPTConfig(vocabulary=32, length=8, layers=4, width=16, heads=2, batch=1)

Ways = dict[str, Callable[[], Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model: `make` gives it with what its forward takes and what `loss(model, *batch)` takes, all on CPU."""

    name: str
    make: Callable[[], tuple[nn.Module, torch.Tensor, tuple[torch.Tensor, ...]]]
    loss: Callable[..., torch.Tensor]


def classification_loss(model: nn.Module, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of logits (N, C) of x and classes (N,)."""
    return F.cross_entropy(model(x), classes)


def gpt_case(name: str, config: GPTConfig) -> Case:
    """The GPT of that size."""

    def make() -> Any:
        model, tokens = make_gpt(config)
        return model, tokens[:, :-1].contiguous(), (tokens,)

    return Case(name, make, gpt_loss)


def make_mlp() -> Any:
    """Three layers of 1024 for (256, 784) images."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    x = torch.randn(256, 784)
    return model, x, (x, torch.randint(0, 10, (256,)))


def make_resnet18() -> Any:
    """torchvision's ResNet-18 for (4, 3, 96, 96) images."""
    from torchvision.models import resnet18

    torch.manual_seed(0)
    x = torch.randn(4, 3, 96, 96)
    return resnet18(), x, (x, torch.randint(0, 1000, (4,)))


def cases() -> list[Case]:
    """The models to be timed; ResNet-18 if torchvision is here."""
    found = [gpt_case("GPT", GPTConfig()), Case("MLP", make_mlp, classification_loss)]
    if importlib.util.find_spec("torchvision") is not None:
        found.insert(1, Case("ResNet-18", make_resnet18, classification_loss))
    return found


def _on_device(case: Case) -> tuple[nn.Module, torch.Tensor, list[torch.Tensor]]:
    model, x, batch = case.make()
    return model.to("jax"), x.to("jax"), [t.to("jax") for t in batch]


def forwards(case: Case) -> Ways:
    """The forward without gradients by both ways, checked to agree."""
    model, x, _ = _on_device(case)
    model.eval()
    compiled = torch.compile(model, backend="torchax", fullgraph=True)
    jitted = torchax_core.jit(lambda x: model(x))

    def run(forward: Callable[..., Any]) -> torch.Tensor:
        with torch.no_grad():
            return forward(x)  # type: ignore[no-any-return]

    np.testing.assert_allclose(run(compiled).cpu(), run(jitted).cpu(), rtol=1e-3, atol=1e-3)
    return {"compile": lambda: run(compiled), "jit": lambda: run(jitted)}


def gradients(case: Case) -> Ways:
    """Loss and gradients by both ways, checked to agree."""
    ways: Ways = {}
    found = []
    for name in ("compile", "jit"):
        model, _, batch = _on_device(case)
        parameters = list(model.parameters())
        loss_of = torch.compile(case.loss, backend="torchax", fullgraph=True) if name == "compile" else case.loss

        def step(loss_of: Any = loss_of, model: Any = model, batch: Any = batch, parameters: Any = parameters) -> Any:
            return torch.autograd.grad(loss_of(model, *batch), parameters)

        ways[name] = step if name == "compile" else torchax_core.jit(step)
        found.append(ways[name]())
    # as a whole: two programs round differently, and among millions of activations a ReLU or two are on the other side of 0
    ours, wanted = (torch.cat([g.cpu().flatten() for g in gradients]) for gradients in found)
    np.testing.assert_array_less((ours - wanted).norm(), 2e-2 * wanted.norm())
    return ways


def training(case: Case) -> Ways:
    """An AdamW step by both ways, checked to follow the same losses."""
    ways: Ways = {}
    losses = []
    for name in ("compile", "jit"):
        model, _, batch = _on_device(case)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        loss_of: Any = case.loss
        update: Any = optimizer.step
        if name == "compile":
            loss_of = torch.compile(loss_of, backend="torchax", fullgraph=True)
            update = torch.compile(lambda optimizer=optimizer: optimizer.step(), backend="torchax")

        def step(
            loss_of: Any = loss_of, update: Any = update, model: Any = model, batch: Any = batch, o: Any = optimizer
        ) -> Any:
            o.zero_grad()
            loss = loss_of(model, *batch)
            loss.backward()
            update()
            return loss

        ways[name] = step if name == "compile" else torchax_core.jit(step)
        losses.append([ways[name]().item() for _ in range(4)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-2)
    return ways


def turn(call: Callable[[], Any]) -> Callable[[], Callable[[], Any]]:
    """A contender that needs no preparation."""
    return lambda: call


def main(quick: Quick = False, json: Json = None) -> Any:
    """Time torch.compile(backend="torchax") against torchax_core.jit: forward, gradients, training, and the host's share."""
    rounds = 7 if quick else 41
    rows: dict[str, dict[str, float]] = {}
    tiny = gpt_case("tiny GPT", TINY)
    todo = [(case, kind, 1) for case in cases() for kind in (forwards, gradients, training)]
    for case, kind, calls in [*todo, (tiny, forwards, 20), (tiny, gradients, 20)]:
        name = f"{case.name}, {kind.__name__.removesuffix('s')}"
        progress(f"compile: {name}")
        torch._dynamo.reset()
        load = os.getloadavg()[0]
        timings = interleave({way: turn(call) for way, call in kind(case).items()}, rounds=rounds, calls=calls)
        rows[name] = {
            "compile_ms": 1e3 * timings.median("compile"),
            "jit_ms": 1e3 * timings.median("jit"),
            "ratio": timings.ratio("compile", "jit"),
            "fastest_ratio": min(timings.seconds["compile"]) / min(timings.seconds["jit"]),
            "load": load,
        }
    table = make_table("A compiled call, ms", ["what", "jit", "torch.compile", "ratio", "of fastest", "load"])
    for name, row in rows.items():
        figures = [f"{row[key]:.3f}" for key in ("jit_ms", "compile_ms", "ratio", "fastest_ratio")]
        table.add_row(name, *figures, f"{row['load']:.0f}")
    console.print(table)
    for name, row in rows.items():
        if not name.startswith(tiny.name):
            console.print(f"{name}: {verdict(row['ratio'], STEADY_LIMIT)}")
    return write_json(json, {"compile": rows})


if __name__ == "__main__":
    typer.run(main)
