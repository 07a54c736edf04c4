"""Eager speed: small ops on device "jax" against the same function under jax.jit.

    python benchmarks/eager.py                # --quick for a rough look, --json FILE to keep the figures

What it measures, and how, is in torchax_core.benchmarking.eager; `torchax bench eager` runs it anywhere.
"""

import typer

from torchax_core.benchmarking.eager import *  # noqa: F403
from torchax_core.benchmarking.eager import main

if __name__ == "__main__":
    typer.run(main)
