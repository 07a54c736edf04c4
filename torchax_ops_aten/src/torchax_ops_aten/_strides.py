"""How results lie where CPU torch's kernels say otherwise than its meta kernels (`OpSet.lowering(strides=...)`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

__all__ = ["column_major", "in_format_of", "row_major"]

Strides = tuple[int, ...]


def row_major(shape: tuple[int, ...], call: Mapping[str, Any]) -> Strides:
    """The last dimension varies fastest."""
    return torch.empty(shape, device="meta").stride()


def column_major(shape: tuple[int, ...], call: Mapping[str, Any]) -> Strides:
    """A matrix whose first dimension varies fastest."""
    return (1, shape[0])


def in_format_of(argument: str) -> Callable[[tuple[int, ...], Mapping[str, Any]], Strides]:
    """The memory format (channels_last, channels_last_3d) of the argument of this name."""

    def strides(shape: tuple[int, ...], call: Mapping[str, Any]) -> Strides:
        format = suggest_memory_format(call[argument])
        return torch.empty(shape, device="meta", memory_format=format).stride()

    return strides
