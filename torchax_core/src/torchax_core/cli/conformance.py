"""`torchax conformance`: PyTorch's own op samples on device "jax", compared with CPU torch."""

from __future__ import annotations

import typer

__all__ = ["conformance"]


def conformance(context: typer.Context) -> None:
    """Run PyTorch's own op samples on device "jax" and compare with CPU torch; --help lists the options."""
    from torchax_core.conformance.command import app  # here: it imports much that other commands do not need

    app(context.args, prog_name="torchax conformance")
