"""The op pack of the torchvision namespace. Found through pack.py; `nms_padded` is for code under jit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchax_ops_vision.nms import nms_padded

__all__ = ["nms_padded"]


def __getattr__(name: str) -> Any:
    # Importing the pack's module imports this one: jax and the lowerings wait until they are wanted.
    if name == "nms_padded":
        from torchax_ops_vision.nms import nms_padded

        return nms_padded
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
