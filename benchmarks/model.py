"""Jitted inference of a GPT and a ResNet on device "jax" against JAX written by hand.

    python benchmarks/model.py                # --quick for a rough look, --json FILE to keep the figures

What it measures, and how, is in torchax_core.benchmarking.model; `torchax bench model` runs it anywhere.
"""

import typer

from torchax_core.benchmarking.model import *  # noqa: F403
from torchax_core.benchmarking.model import main

if __name__ == "__main__":
    typer.run(main)
