"""torch.compile(backend="torchax") on device "jax" against torchax_core.jit.

    python benchmarks/compile.py              # --quick for a rough look, --json FILE to keep the figures

What it measures, and how, is in torchax_core.benchmarking.compile; `torchax bench compile` runs it anywhere.
"""

import typer

from torchax_core.benchmarking.compile import *  # noqa: F403
from torchax_core.benchmarking.compile import main

if __name__ == "__main__":
    typer.run(main)
