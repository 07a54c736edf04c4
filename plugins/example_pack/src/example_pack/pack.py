"""What torchax-core finds through the entry point. It is imported early, so it imports nothing heavy itself."""

from __future__ import annotations

from torchax_core import OpSet, hookimpl

TORCHAX_PACK_API = 1
TORCHAX_NAMESPACES = ("example_pack",)  # torch.ops.example_pack.*; the hook is called when the first of them runs


@hookimpl
def torchax_op_sets() -> list[OpSet]:
    """The families of ops this pack defines, one module each."""
    from example_pack import lowerings

    return [lowerings.ops]
