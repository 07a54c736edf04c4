"""What torchax-core finds through the entry point: what this pack serves, and the list of its families."""

from __future__ import annotations

import importlib
import importlib.util

from torchax_core import OpSet, hookimpl

TORCHAX_PACK_API = 1
TORCHAX_NAMESPACES = ("aten", "prims")

FAMILIES = (
    "activation",
    "attention",
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
    "scans",
    "sorting",
    "special",
    "views",
)


@hookimpl
def torchax_op_sets() -> list[OpSet]:
    """Every family module's `ops`."""
    names = [f"torchax_ops_aten.{family}" for family in FAMILIES]
    # TEMPORARY while families are being written: those that do not exist yet are left out
    return [importlib.import_module(name).ops for name in names if importlib.util.find_spec(name) is not None]
