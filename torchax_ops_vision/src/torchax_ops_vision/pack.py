"""What torchax-core finds through the entry point: what this pack serves, and the list of its families."""

from __future__ import annotations

from torchax_core import OpSet, hookimpl

TORCHAX_PACK_API = 1
TORCHAX_NAMESPACES = ("torchvision",)


@hookimpl
def torchax_op_sets() -> list[OpSet]:
    """Every family module's `ops`."""
    from torchax_ops_vision import deform_conv, nms, roi, second_order

    second_order.register()
    return [nms.ops, roi.ops, deform_conv.ops]
