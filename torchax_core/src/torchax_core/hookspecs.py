"""Every hook a pack may implement. A pack is a module named by an entry point of the group `torchax.op_packs`:

    [project.entry-points."torchax.op_packs"]
    mine = "my_pack.pack"

Besides hooks, the module states in literal constants what it serves. They are read from its source: neither the module
nor its package is imported until an op is called that it may serve.

    TORCHAX_PACK_API = 1                      # the core API it was written for
    TORCHAX_NAMESPACES = ("mylib",)           # torch op namespaces it serves
    TORCHAX_OPS = ("aten::lstm.input",)       # single ops outside those namespaces
    TORCHAX_FUNCTIONS = ("torch.einsum",)     # torch functions it serves
    TORCHAX_BEFORE = ("aten",)                # packs whose definitions give way to this one's
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from torchax_core.config import Config
    from torchax_core.opset import OpSet

__all__ = ["PACK_API", "hookimpl", "hookspec"]

PACK_API = 1
"""The pack API of this core; a pack that states another one in TORCHAX_PACK_API is left out, and reported."""

hookspec = pluggy.HookspecMarker("torchax")
hookimpl = pluggy.HookimplMarker("torchax")


@hookspec
def torchax_op_sets() -> list[OpSet]:  # type: ignore[empty-body]
    """Called once, when the first op that the pack may serve is met. Return the op sets the pack offers.

    Import them here, not at module level, so that an unused pack costs nothing. Two packs offering the same op is a
    DuplicateOpError naming both, when the op is called, unless the user ranks them in `Config.pack_order`, or one says in
    TORCHAX_BEFORE that it goes before the other.
    """


@hookspec
def torchax_configure(config: Config) -> None:
    """Called once before the pack's op sets are asked for, with the default environment's settings (read only)."""
