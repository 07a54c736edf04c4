"""Jitted AdamW step of a GPT on device "jax" against hand-written JAX and optax.

    python benchmarks/train.py                # --quick for a rough look, --json FILE to keep the figures

What it measures, and how, is in torchax_core.benchmarking.train; `torchax bench train` runs it anywhere.
"""

import typer

from torchax_core.benchmarking.train import *  # noqa: F403
from torchax_core.benchmarking.train import main

if __name__ == "__main__":
    typer.run(main)
