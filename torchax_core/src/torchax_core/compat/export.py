"""`torchax.export`: ours, and the shapes of a program's arguments by google/torchax's name."""

from __future__ import annotations

from torchax_core.export import exported_program_to_jax, exported_program_to_stablehlo, input_avals, load, save

__all__ = ["exported_program_to_jax", "exported_program_to_stablehlo", "extract_avals", "input_avals", "load", "save"]

extract_avals = input_avals
