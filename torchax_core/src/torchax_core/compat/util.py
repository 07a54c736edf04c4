"""`torchax.util`: lists split in two of equal length, and put together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["merge", "partition"]


def partition(original: list[Any], func: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
    """(what `func` is true of, the rest), each as long as `original`, with None for what is in the other."""
    chosen = [bool(func(item)) for item in original]
    pairs = list(zip(original, chosen, strict=True))
    return [item if yes else None for item, yes in pairs], [None if yes else item for item, yes in pairs]


def merge(list1: list[Any], list2: list[Any]) -> list[Any]:
    """`list1` with the items of `list2` where it has None. Raises ValueError for lists of different lengths."""
    return [second if first is None else first for first, second in zip(list1, list2, strict=True)]
