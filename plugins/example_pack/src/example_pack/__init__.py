"""A library with a torch op of its own, which runs on the CPU and, through pack.py, on device "jax"."""

from example_pack.op import soft_threshold

__all__ = ["soft_threshold"]
