"""The models that the benchmarks time: torchax_core.benchmarking.models."""

from torchax_core.benchmarking.models import *  # noqa: F403
