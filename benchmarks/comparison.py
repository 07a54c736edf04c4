"""Five models, jitted forward and AdamW step on device "jax", against JAX written by hand, eager torch and inductor.

    python benchmarks/comparison.py           # --quick for a rough look, --json FILE to keep the figures

What it measures, and how, is in torchax_core.benchmarking.comparison; `torchax bench comparison` runs it anywhere.
"""

import typer

from torchax_core.benchmarking.comparison import *  # noqa: F403
from torchax_core.benchmarking.comparison import main

if __name__ == "__main__":
    typer.run(main)
