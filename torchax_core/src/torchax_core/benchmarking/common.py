"""How the benchmarks measure: contenders take turns in one process, times are medians, ratios come from the same turn.

A busy machine slows everything down for a while, so two programs timed one after the other cannot be compared.
Here every round times each contender for a few calls; the ratio of two contenders is the median over rounds of
their ratio *within* a round, which such slow spells leave alone.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

console = Console()
"""Where tables and verdicts go; `torchax bench --json` turns it to stderr, and stdout is JSON."""

Quick = Annotated[bool, typer.Option("--quick", help="Fewer repeats: shows that it runs; the figures are rough.")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]


def progress(text: str) -> None:
    """Show what is being measured, on a terminal: a line that the next one replaces. Not called while a clock runs."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[2K" + text[:100])
        sys.stderr.flush()


def print_line(text: str) -> None:
    """Print a line as it is, for the process that started this one."""
    sys.stdout.write(text + "\n")


def block_until_ready(result: Any) -> None:
    """Wait until every array in `result`, of torchax or of jax, has been computed."""
    import jax
    import torch

    jax.block_until_ready(
        [
            leaf.jax() if isinstance(leaf, torch.Tensor) and leaf.device.type == "jax" else leaf
            for leaf in torch.utils._pytree.tree_leaves(result)
            if not isinstance(leaf, torch.Tensor) or leaf.device.type == "jax"
        ]
    )


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds per call of each contender, one entry per round; rounds correspond across contenders."""

    seconds: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        """The median seconds per call of one contender."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, reference: str) -> float:
        """How many times longer `name` takes than `reference`: the median of the ratios within each round."""
        pairs = zip(self.seconds[name], self.seconds[reference], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)


def interleave(
    contenders: Mapping[str, Callable[[], Callable[[], Any]]],
    *,
    rounds: int,
    calls: int = 1,
    warm_up: int = 3,
    block: Callable[[Any], None] = block_until_ready,
) -> Timings:
    """Time all contenders in turn, `rounds` times over.

    contenders: by name, a function that prepares a turn (untimed: fresh inputs, a mode) and returns what to call in it.
    calls:      how often it is then called; the last result is waited for, and counts.
    warm_up:    untimed calls of each contender beforehand, which trace and compile.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for prepare in contenders.values():
        call = prepare()
        for _ in range(warm_up):
            block(call())
    enabled = gc.isenabled()
    gc.disable()  # as timeit does: whose turn the collector picks is chance
    try:
        for index in range(rounds):
            # Turn the order around every other round, so that nobody always follows the same neighbour.
            for name in list(contenders) if index % 2 == 0 else list(contenders)[::-1]:
                call = contenders[name]()
                result = None
                start = time.perf_counter()
                for _ in range(calls):
                    result = call()
                block(result)
                seconds[name].append((time.perf_counter() - start) / calls)
            del call, result
            gc.collect(0)
    finally:
        if enabled:
            gc.enable()
    return Timings(seconds)


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean, the fair average of ratios."""
    return statistics.geometric_mean(values)


def run_python(arguments: Sequence[str]) -> Any:
    """Run `python *arguments` in a fresh process; its last line of output is JSON, and is returned.

    The process keeps compiled bytecode, whatever this one does: pip compiles what it installs, and torch and JAX lie compiled,
    so without it a checkout would be measured with its compilation and they without.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    completed = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    if completed.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)[:200]} failed:\n{completed.stderr[-4000:]}")
    return json.loads(completed.stdout.strip().splitlines()[-1])


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import jax
    import torch

    return {
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "jax": jax.__version__,
        "device": str(jax.devices()[0]),
    }


def make_table(title: str, columns: Sequence[str]) -> Table:
    """A table with a left-aligned first column and figures to the right."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def verdict(value: float, limit: float) -> str:
    """`value` beside the limit it should keep, and whether it does."""
    mark = "[green]kept[/green]" if value <= limit else "[red]missed[/red]"
    return f"{value:.2f} (at most {limit:g}: {mark})"


def write_json(path: Path | None, figures: Mapping[str, Any]) -> dict[str, Any]:
    """`figures` with a description of the machine; written to a file too, if a path was given."""
    progress("")
    found = {"machine": machine(), **figures}
    if path is not None:
        path.write_text(json.dumps(found, indent=2) + "\n")
        console.print(f"Wrote {path}")
    return found


def count_instructions(hlo: str) -> int:
    """The number of instructions in a program as XLA prints it, those inside fusions and loops included."""
    return sum(" = " in line for line in hlo.splitlines())


def time_calls(call: Callable[[], Any], calls: int = 3) -> list[float]:
    """Seconds of the first calls of a function nobody has called yet, one by one."""
    import jax

    jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))  # the backend itself starts before, for every contender
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return seconds


def measure_first_calls(module: str, contenders: Sequence[str], processes: int) -> dict[str, list[float]]:
    """Seconds of the first calls (see `time_calls`) of each contender, medians over fresh processes.

    Runs `python -m module --worker CONTENDER`, which must print the list that `time_calls` returns.
    """
    runs: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for index in range(processes):
        for name in contenders if index % 2 == 0 else reversed(contenders):
            progress(f"{module.rpartition('.')[2]}: first calls, round {index + 1} of {processes}, {name}")
            runs[name].append(run_python(["-m", module, "--worker", name]))
    return {name: [statistics.median(call) for call in zip(*values, strict=True)] for name, values in runs.items()}
