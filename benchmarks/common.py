"""How the benchmarks measure: torchax_core.benchmarking.common."""

from torchax_core.benchmarking.common import *  # noqa: F403
