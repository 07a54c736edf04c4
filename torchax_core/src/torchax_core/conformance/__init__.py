"""PyTorch's own op samples (OpInfo), run on device "jax" and compared with CPU torch: `torchax conformance`.

A cell is one (op, dtype, mode). cells.py says which there are, checks.py and gradients.py what each mode checks, workers.py
runs them in processes apart, report.py and page.py tell how it went. See docs/conformance.md.
"""

from torchax_core.conformance.cells import DTYPES, MODES, Cell, Result, cells
from torchax_core.conformance.known import KnownFailure, known_failures
from torchax_core.conformance.ops import ops_of
from torchax_core.conformance.report import Report
from torchax_core.conformance.running import run_cell
from torchax_core.conformance.workers import Options, sweep

__all__ = [
    "DTYPES",
    "MODES",
    "Cell",
    "KnownFailure",
    "Options",
    "Report",
    "Result",
    "cells",
    "known_failures",
    "ops_of",
    "run_cell",
    "sweep",
]
