"""Eager speed: small ops on device "jax" against the same function under jax.jit, called directly on jax arrays.

    torchax bench eager                # or, in the repository, python benchmarks/eager.py

Inputs are 8x8, so what is timed is the way to the op and back, not the op. Three questions, each answered by
ratios from one run: how much longer than JAX's own call does an op take without gradients; how much longer with
gradients recorded; and does importing torchax_core slow down CPU torch's own ops (fresh processes with and without
it).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
import typer

import torchax_core
from torchax_core.benchmarking.common import (
    Json,
    Quick,
    console,
    geometric_mean,
    interleave,
    make_table,
    progress,
    run_python,
    verdict,
    write_json,
)

MEAN_LIMIT, WORST_LIMIT, GRAD_LIMIT = 2.5, 6.0, 1.5


@dataclasses.dataclass(frozen=True)
class Case:
    """One op: the torch call, the JAX function it is measured against, and the inputs of both.

    inputs:  makes the call's arguments, on CPU; tensors move to "jax", and as jax arrays to the JAX function.
    view:    a view op: torch computes nothing until the view is read, so it is also measured with the read.
    inplace: writes into its first input, which gets fresh values (and, with gradients, no history) in each turn.
    """

    name: str
    ours: Callable[..., torch.Tensor]
    theirs: Callable[..., jax.Array]
    inputs: Callable[[], tuple[Any, ...]]
    view: bool = False
    inplace: bool = False


def square() -> torch.Tensor:
    """An 8x8 input."""
    return torch.randn(8, 8)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """Layer norm over the last axis."""
    mean = x.mean(-1, keepdims=True)
    variance = x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * weight + bias


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Softmax attention, (..., L, E) each."""
    scores = jnp.einsum("...le,...se->...ls", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("...ls,...se->...le", jax.nn.softmax(scores, axis=-1), value)


def conv2d(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """A 3x3 convolution with padding 1, channels first."""
    return jax.lax.conv_general_dilated(x, weight, (1, 1), ((1, 1), (1, 1))) + bias[:, None, None]


CASES = [
    Case("add", torch.add, jnp.add, lambda: (square(), square())),
    Case("mul by scalar", torch.mul, jnp.multiply, lambda: (square(), 2.5)),
    Case("relu", torch.relu, jax.nn.relu, lambda: (square(),)),
    Case("gelu", F.gelu, lambda x: x * 0.5 * (1 + jax.lax.erf(x * 0.5**0.5)), lambda: (square(),)),
    Case("mm", torch.mm, jnp.matmul, lambda: (square(), square())),
    Case("linear", F.linear, lambda x, w, b: x @ w.T + b, lambda: (square(), square(), torch.randn(8))),
    Case("sum(dim)", partial(torch.sum, dim=1), partial(jnp.sum, axis=1), lambda: (square(),)),
    Case("softmax", partial(torch.softmax, dim=1), partial(jax.nn.softmax, axis=1), lambda: (square(),)),
    Case(
        "layer_norm",
        lambda x, weight, bias: F.layer_norm(x, (8,), weight, bias),
        layer_norm,
        lambda: (square(), torch.randn(8), torch.randn(8)),
    ),
    Case("select", lambda x: x.select(0, 3), lambda x: x[3], lambda: (square(),), view=True),
    Case("transpose", lambda x: x.transpose(0, 1), lambda x: x.T, lambda: (square(),), view=True),
    Case("view", lambda x: x.view(4, 16), lambda x: x.reshape(4, 16), lambda: (square(),), view=True),
    Case("cat", lambda x, y: torch.cat([x, y]), lambda x, y: jnp.concatenate([x, y]), lambda: (square(), square())),
    Case("index", lambda x, i: x[i], lambda x, i: x[i], lambda: (square(), torch.tensor([5, 0, 3]))),
    Case("embedding", F.embedding, lambda i, w: w[i], lambda: (torch.tensor([5, 0, 3]), square())),
    Case(
        "conv2d",
        lambda x, weight, bias: F.conv2d(x, weight, bias, padding=1),
        conv2d,
        lambda: (torch.randn(1, 1, 8, 8), torch.randn(1, 1, 3, 3), torch.randn(1)),
    ),
    Case("sdpa", F.scaled_dot_product_attention, attention, lambda: tuple(torch.randn(3, 1, 1, 8, 8))),
    Case("add_", torch.Tensor.add_, jnp.add, lambda: (square(), square()), inplace=True),
    Case(
        "slice add_",
        lambda x, y: x[1:5].add_(y),
        lambda x, y: x.at[1:5].add(y),
        lambda: (square(), torch.randn(4, 8)),
        inplace=True,
    ),
]


def turns(case: Case) -> dict[str, Callable[[], Callable[[], Any]]]:
    """The contenders of a case: JAX, ours without and with gradients, and for view ops ours with the read."""
    arguments = case.inputs()
    tensors = [a.to("jax") if isinstance(a, torch.Tensor) else a for a in arguments]
    leaves = [
        t.detach().clone().requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for t in tensors
    ]
    arrays = [jnp.asarray(a.numpy()) if isinstance(a, torch.Tensor) else a for a in arguments]
    jitted = jax.jit(case.theirs)

    def ours(inputs: list[Any], grad: bool) -> Callable[[], Any]:
        torch.set_grad_enabled(grad)
        if case.inplace:
            inputs = [inputs[0].clone(), *inputs[1:]]
        return partial(case.ours, *inputs)

    def read() -> Callable[[], jax.Array]:
        torch.set_grad_enabled(False)
        return lambda: case.ours(*tensors).jax()

    contenders: dict[str, Callable[[], Callable[[], Any]]] = {
        "jax": lambda: partial(jitted, *arrays),
        "ours": lambda: ours(tensors, False),
        "grad": lambda: ours(leaves, True),
    }
    return contenders | ({"read": read} if case.view else {})


def measure_ops(rounds: int, calls: int) -> dict[str, dict[str, float | None]]:
    """For each op: microseconds of JAX and of ours, and the ratios."""
    results: dict[str, dict[str, float | None]] = {}
    for case in CASES:
        progress(f"eager: {case.name}")
        timings = interleave(turns(case), rounds=rounds, calls=calls)
        results[case.name] = {
            "jax_us": 1e6 * timings.median("jax"),
            "ours_us": 1e6 * timings.median("ours"),
            "ratio": timings.ratio("ours", "jax"),
            "read_us": 1e6 * timings.median("read") if case.view else None,
            "read_ratio": timings.ratio("read", "jax") if case.view else None,
            "grad_us": 1e6 * timings.median("grad"),
            "grad_ratio": timings.ratio("grad", "ours"),
        }
    torch.set_grad_enabled(True)
    return results


# What a fresh process runs to time CPU torch's own ops; {imports} differs.
CPU_OPS = """
import json, statistics, sys, time
{imports}
torch.set_num_threads(1)  # waiting for a busy machine to wake a second thread would drown the call itself
x, y = torch.randn(8, 8), torch.randn(8, 8)
ops = {{
    "add": lambda: x + y, "mm": lambda: torch.mm(x, y), "relu": lambda: torch.relu(x), "view": lambda: x.view(4, 16),
    "softmax": lambda: torch.softmax(x, 1), "select": lambda: x[3], "zeros": lambda: torch.zeros(8, 8),
    "add_": lambda: x.add_(y),
}}
seconds = {{name: [] for name in ops}}
for _ in range({rounds}):
    for name, op in ops.items():
        start = time.perf_counter()
        for _ in range(200):
            op()
        seconds[name].append((time.perf_counter() - start) / 200)
print(json.dumps({{name: 1e6 * statistics.median(values) for name, values in seconds.items()}}))
"""

CPU_IMPORTS = {
    "torch": "import torch",
    "torch, jax": "import torch, jax; jax.numpy.ones(2) + 1",
    "torch, torchax_core": "import torch, torchax_core; torch.ones(2, device='jax') + 1",
}


def measure_cpu_ops(processes: int, rounds: int) -> dict[str, dict[str, float]]:
    """CPU torch's own ops in fresh processes: microseconds by import and op, the median over processes."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in CPU_IMPORTS}
    for index in range(processes):
        for name in list(CPU_IMPORTS) if index % 2 == 0 else list(reversed(CPU_IMPORTS)):
            runs[name].append(run_python(["-c", CPU_OPS.format(imports=CPU_IMPORTS[name], rounds=rounds)]))
    return {
        name: {op: statistics.median(run[op] for run in values) for op in values[0]} for name, values in runs.items()
    }


def show_ops(results: dict[str, dict[str, float | None]]) -> dict[str, float]:
    """Print the ops' table; returns the summary figures."""
    table = make_table(
        "Eager ops: ours / jax, op and read / jax, with grad / without",
        ["op", "jax us", "ours us", "ratio", "read us", "ratio", "grad us", "ratio"],
    )
    for name, row in results.items():
        read = ("", "") if row["read_us"] is None else (f"{row['read_us']:.1f}", f"{row['read_ratio']:.2f}")
        table.add_row(
            name,
            f"{row['jax_us']:.1f}",
            f"{row['ours_us']:.1f}",
            f"{row['ratio']:.2f}",
            *read,
            f"{row['grad_us']:.1f}",
            f"{row['grad_ratio']:.2f}",
        )
    console.print(table)

    alone = {name: row["ratio"] or 0.0 for name, row in results.items()}
    read_ratios = {name: row["read_ratio"] or alone[name] for name, row in results.items()}
    worst = max(read_ratios, key=lambda name: read_ratios[name])
    summary = {
        "geometric_mean": geometric_mean(list(alone.values())),
        "geometric_mean_with_reads": geometric_mean(list(read_ratios.values())),
        "worst": max(alone.values()),
        "worst_with_reads": read_ratios[worst],
        "grad_over_no_grad": geometric_mean([row["grad_ratio"] or 0.0 for row in results.values()]),
    }
    console.print(f"geometric mean, views unread: {verdict(summary['geometric_mean'], MEAN_LIMIT)}")
    console.print(f"geometric mean, views read:   {verdict(summary['geometric_mean_with_reads'], MEAN_LIMIT)}")
    console.print(f"worst op, views read:         {verdict(summary['worst_with_reads'], WORST_LIMIT)}, {worst}")
    console.print(f"grad / no grad, mean:         {verdict(summary['grad_over_no_grad'], GRAD_LIMIT)}")
    return summary


def show_cpu_ops(results: dict[str, dict[str, float]]) -> dict[str, float]:
    """Print the table of CPU torch's ops; returns each import's mean ratio to importing torch alone."""
    plain = results["torch"]
    table = make_table("CPU torch's own ops, us, after importing ...", ["op", *results, "torchax_core / torch"])
    for op, base in plain.items():
        ours = results["torch, torchax_core"][op]
        table.add_row(op, *(f"{values[op]:.2f}" for values in results.values()), f"{ours / base:.2f}")
    console.print(table)
    ratios = {
        name: geometric_mean([values[op] / plain[op] for op in plain])
        for name, values in results.items()
        if name != "torch"
    }
    for name, ratio in ratios.items():
        console.print(f"importing {name} / importing torch, geometric mean: {ratio:.2f}")
    return ratios


def main(quick: Quick = False, json: Json = None) -> Any:
    """Time eager ops on device "jax" against jax.jit, with gradients too, and CPU torch's ops with us imported."""
    console.print(f"torchax_core {getattr(torchax_core, '__version__', '')}, one process, contenders in turn, medians")
    torch.manual_seed(0)
    # Turns shorter than a scheduler's time slice: on a busy machine few are interrupted, and medians ignore those.
    ops = measure_ops(rounds=11 if quick else 151, calls=30)
    summary = show_ops(ops)
    cpu = measure_cpu_ops(processes=1 if quick else 5, rounds=5 if quick else 51)
    ratios = show_cpu_ops(cpu)
    return write_json(json, {"summary": summary, "ops": ops, "cpu_ops_us": cpu, "cpu_ops_ratio": ratios})


if __name__ == "__main__":
    typer.run(main)
