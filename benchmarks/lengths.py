"""Ops over long dims on device "jax" against the same written in JAX: first calls, and steady speed.

    python benchmarks/lengths.py              # --quick for a rough look, --gradients, --only WORD, --json FILE

What it measures, and how, is in torchax_core.benchmarking.lengths; `torchax bench lengths` runs it anywhere.
"""

import typer

from torchax_core.benchmarking.lengths import *  # noqa: F403
from torchax_core.benchmarking.lengths import main

if __name__ == "__main__":
    typer.run(main)
