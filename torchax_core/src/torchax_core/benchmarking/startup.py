"""How long a program waits for torchax: importing it and running a first op, against importing torch and jax.

    torchax bench startup     # --quick for a rough look; in the repository, python benchmarks/startup.py

Every figure is the median over fresh processes, which take turns. The first op includes everything that is put off
until then: packs, environment, JAX's backend, and one XLA compilation; so plain JAX with a first op is shown as
well, with one op of a torch subclass that does nothing: torch 2.14 imports torch.distributed.tensor, and sympy with it,
when the first op of any wrapper subclass is dispatched.
"""

from __future__ import annotations

import statistics
from typing import Any

import typer

from torchax_core.benchmarking.common import Json, Quick, console, make_table, progress, run_python, verdict, write_json

LIMIT_S = 0.3

# Each is timed from inside, so that starting the interpreter itself is not counted.
PROGRAMS = {
    "import torch, jax": "import torch, jax, jax.numpy",
    "import torch, jax; first jax op": (
        "import torch, jax, jax.numpy as jnp; (jnp.ones((2, 3)) + 1).block_until_ready(); torch.ones(2, 3) + 1"
    ),
    "import torch, jax; first op of each": (
        "import torch, jax, jax.numpy as jnp; (jnp.ones((2, 3)) + 1).block_until_ready()\n"
        "class Bare(torch.Tensor):\n"
        "    __torch_function__ = torch._C._disabled_torch_function_impl\n"
        "    @classmethod\n"
        "    def __torch_dispatch__(cls, func, types, args=(), kwargs=None): return torch.ones(2, 3)\n"
        "torch.Tensor._make_wrapper_subclass(Bare, (2, 3)) + 1"
    ),
    "import torch, torchax_core": "import torch, torchax_core",
    "import torch, torchax_core; first op": (
        "import torch, torchax_core; (torch.ones(2, 3, device='jax') + 1).jax().block_until_ready()"
    ),
}
BASE = "import torch, jax"
BASE_WITH_OP = "import torch, jax; first jax op"
BASE_WITH_OPS = "import torch, jax; first op of each"
FIRST_OP = "import torch, torchax_core; first op"

TIMED = """
import time
start = time.perf_counter()
{program}
print(time.perf_counter() - start)
"""


def measure(processes: int) -> dict[str, list[float]]:
    """Seconds that each program takes, one entry per turn."""
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for index in range(processes + 1):
        for name in list(PROGRAMS) if index % 2 == 0 else list(reversed(PROGRAMS)):
            progress(f"startup: round {index + 1} of {processes + 1}, {name}")
            elapsed = run_python(["-c", TIMED.format(program=PROGRAMS[name])])
            if index:  # the first turn reads the files from disk
                seconds[name].append(elapsed)
    return seconds


def difference(seconds: dict[str, list[float]], name: str, base: str) -> float:
    """Seconds by which `name` takes longer than `base`: the median of the differences within each turn."""
    return statistics.median(ours - theirs for ours, theirs in zip(seconds[name], seconds[base], strict=True))


def main(quick: Quick = False, json: Json = None) -> Any:
    """Time importing torchax_core and running a first op, against importing torch and jax."""
    seconds = measure(processes=2 if quick else 9)
    table = make_table("Seconds in a fresh process, medians", ["program", "seconds", f"over {BASE!r}"])
    for name, values in seconds.items():
        table.add_row(name, f"{statistics.median(values):.2f}", f"{difference(seconds, name, BASE):+.2f}")
    console.print(table)
    over, over_op = difference(seconds, FIRST_OP, BASE), difference(seconds, FIRST_OP, BASE_WITH_OP)
    console.print(f"import and first op, seconds over importing torch and jax: {verdict(over, LIMIT_S)}")
    console.print(f"the same, over plain JAX with its first op: {over_op:.2f}")
    over_ops = difference(seconds, FIRST_OP, BASE_WITH_OPS)
    console.print(f"the same, over JAX's and a bare torch subclass's first op: {over_ops:.2f}")
    figures = {"seconds": seconds, "over_imports_s": over, "over_jax_first_op_s": over_op, "over_first_ops_s": over_ops}
    return write_json(json, figures)


if __name__ == "__main__":
    typer.run(main)
