"""How long a program waits for torchax: the import, and a first op.

    python benchmarks/startup.py              # --quick for a rough look, --json FILE to keep the figures

What it measures, and how, is in torchax_core.benchmarking.startup; `torchax bench startup` runs it anywhere.
"""

import typer

from torchax_core.benchmarking.startup import *  # noqa: F403
from torchax_core.benchmarking.startup import main

if __name__ == "__main__":
    typer.run(main)
