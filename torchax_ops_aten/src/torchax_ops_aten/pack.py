"""What torchax-core finds through the entry point: what this pack serves, and the list of its families."""

from __future__ import annotations

import importlib

from torchax_core import OpSet, hookimpl

TORCHAX_PACK_API = 1
TORCHAX_NAMESPACES = ("aten", "prims")

FAMILIES = (
    "activation",
    "attention",
    "autocast",
    "comparison",
    "conv",
    "copying",
    "creation",
    "embedding",
    "fft",
    "indexing",
    "joining",
    "linalg",
    "loss",
    "matmul",
    "metadata",
    "norm",
    "optim",
    "pointwise",
    "pool",
    "random",
    "reductions",
    "resize",
    "rnn",
    "scans",
    "sorting",
    "special",
    "views",
)


@hookimpl
def torchax_op_sets() -> list[OpSet]:
    """Every family module's `ops`."""
    return [importlib.import_module(f"torchax_ops_aten.{family}").ops for family in FAMILIES]
