"""What torchax-core finds through the entry point: what this pack serves, and the list of its families."""

from __future__ import annotations

from torchax_core import OpSet, hookimpl

TORCHAX_PACK_API = 1
TORCHAX_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "fsdp")


@hookimpl
def torchax_op_sets() -> list[OpSet]:
    """Every family module's `ops`."""
    from torchax_ops_c10d import collectives, fsdp, ops

    return [collectives.ops, fsdp.ops, ops.ops]
