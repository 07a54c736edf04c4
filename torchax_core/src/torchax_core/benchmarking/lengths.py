"""Ops over long dims: the first call's seconds and the steady speed, against the same thing written in JAX.

    torchax bench lengths     # --quick for a rough look; in the repository, python benchmarks/lengths.py

A lowering that loops over elements, or unrolls over sizes, shows as a long first call; one that does more than it must,
as a ratio. Both sides are one compiled program (`torchax_core.jit`, `jax.jit`) of the same arguments, and their results
are compared first. What has gradients can also be timed with them (`--gradients`). The cases are in `lengths_cases`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import typer

import torchax_core
from torchax_core.benchmarking.common import (
    Json,
    Quick,
    block_until_ready,
    console,
    interleave,
    make_table,
    progress,
    verdict,
    write_json,
)
from torchax_core.benchmarking.lengths_cases import CASES, Case

SPEED_LIMIT = 2.0
FIRST_CALL_LIMIT = 5.0
"""Seconds: "compiles in seconds"."""


def first_floating(result: Any) -> Any:
    """The first result that is a floating or complex number, or else the first result."""
    leaves = jax.tree.leaves(result)
    return next((x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)), leaves[0])


def in_jax(case: Case, gradients: bool) -> Callable[..., Any]:
    """The case as one JAX program."""
    if not gradients:
        return jax.jit(case.theirs)

    def both(*arrays: Any) -> Any:
        floating = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

        def first(*chosen: Any) -> Any:
            given = list(arrays)
            for i, x in zip(floating, chosen, strict=True):
                given[i] = x
            return first_floating(case.theirs(*given))

        result, back = jax.vjp(first, *(arrays[i] for i in floating))
        return back(result)  # no ones, which XLA would fold at length

    return jax.jit(both)


def in_torch(case: Case, gradients: bool) -> Callable[..., Any]:
    """The case as one program of torchax_core.jit."""
    if not gradients:
        return torchax_core.jit(case.ours)

    def both(*tensors: torch.Tensor) -> Any:
        leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in tensors]
        result = case.ours(*leaves)
        first = result if isinstance(result, torch.Tensor) else next(x for x in result if x.is_floating_point())
        return torch.autograd.grad(first, [x for x in leaves if x.requires_grad], first.detach())

    return torchax_core.jit(both)


def measure(case: Case, gradients: bool, rounds: int) -> dict[str, float]:
    """First calls in seconds, medians in milliseconds, and the ratio. AssertionError if the results differ."""
    arrays = [jnp.asarray(x) for x in case.arguments(np.random.default_rng(0))]
    tensors = [torchax_core.interop.torch_view(x) for x in arrays]
    ours, theirs = in_torch(case, gradients), in_jax(case, gradients)
    found, results = {}, {}
    for name, function, given in (("torchax", ours, tensors), ("jax", theirs, arrays)):
        start = time.perf_counter()
        results[name] = function(*given)
        block_until_ready(results[name])
        found[f"{name}_first_s"] = time.perf_counter() - start
    if case.same and not gradients:
        mine = first_floating(torchax_core.interop.jax_view(results["torchax"]))
        wanted = first_floating(results["jax"])
        np.testing.assert_allclose(mine, wanted, rtol=1e-3, atol=1e-3 * float(jnp.abs(wanted).max()), err_msg=case.name)
    calls = max(1, min(50, round(0.005 / timed(theirs, arrays))))
    contenders = {"torchax": lambda: lambda: ours(*tensors), "jax": lambda: lambda: theirs(*arrays)}
    timings = interleave(contenders, rounds=rounds, calls=calls, warm_up=1)
    found |= {f"{name}_ms": 1e3 * timings.median(name) for name in contenders}
    return found | {"ratio": timings.ratio("torchax", "jax")}


def timed(function: Callable[..., Any], given: Sequence[Any]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    block_until_ready(function(*given))
    return time.perf_counter() - start


def main(
    quick: Quick = False,
    json: Json = None,
    only: Annotated[str, typer.Option(help="Only cases whose names have this word.")] = "",
    gradients: Annotated[bool, typer.Option("--gradients", help="Time the forward with its backward.")] = False,
) -> Any:
    """Time ops over long dims against JAX: the first call, and those that follow."""
    rows: dict[str, dict[str, float]] = {}
    for case in CASES:
        if only in case.name and (case.differentiable or not gradients):
            progress(f"lengths: {case.name}")
            rows[case.name] = measure(case, gradients, 5 if quick else 21)
    table = make_table(
        "Ops over long dims" + (", with gradients" if gradients else ""),
        ["", "jax, ms", "torchax, ms", "ratio", "first, s", "jax's"],
    )
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["ratio"]):
        table.add_row(
            name,
            *(f"{row[key]:.2f}" for key in ("jax_ms", "torchax_ms", "ratio", "torchax_first_s", "jax_first_s")),
        )
    console.print(table)
    if rows:
        console.print(f"slowest against JAX: {verdict(max(row['ratio'] for row in rows.values()), SPEED_LIMIT)}")
        longest = max(row["torchax_first_s"] for row in rows.values())
        console.print(f"longest first call, s: {verdict(longest, FIRST_CALL_LIMIT)}")
    return write_json(json, {"gradients" if gradients else "forward": rows})


if __name__ == "__main__":
    typer.run(main)
