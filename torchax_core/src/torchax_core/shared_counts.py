"""An optimizer's step counts: torch keeps one for each weight, and they are all the same number.

While a function is traced, storages of equal counts are given one array. The program then takes it once and computes once
what follows from it, as JAX's optimizers do with their only count; each storage gets the result. Arrays never change, so
whoever writes to one count alone leaves the others as they are: the program finds them apart before its next call.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import Any

import jax

from torchax_core.convert import is_traced
from torchax_core.tensor import Storage

__all__ = ["SharedCounts", "share_equal"]

_ARRAY = operator.attrgetter("array")


def share_equal(stores: Iterable[Storage]) -> list[Any]:
    """Let storages that hold equal numbers, in one dtype and place, hold one array; those that several then hold.

    stores: each holds an array of shape (). One that is traced, or that this process does not see as a whole, stays as it is.
    """
    found = [s for s in stores if not is_traced(s.array) and s.array.is_fully_replicated]
    groups: dict[Any, list[Storage]] = {}
    for store, value in zip(found, jax.device_get([s.array.addressable_data(0) for s in found]), strict=True):
        array = store.array
        groups.setdefault((value.item(), array.dtype, array.sharding, array.committed), []).append(store)
    shared = [group for group in groups.values() if len(group) > 1]
    for first, *others in shared:
        for store in others:
            store.array = first.array
    return [group[0].array for group in shared]


class SharedCounts:
    """The groups of storages for which a program has one input each."""

    def __init__(self, groups: list[list[Storage]]) -> None:
        self._groups = groups

    def __bool__(self) -> bool:
        return bool(self._groups)

    def holders(self, store: Storage) -> int:
        """How many storages hold the array that is this one's input of the program."""
        return next((len(group) for group in self._groups if group[0] is store), 1)

    def in_one(self) -> bool:
        """Whether the storages of each group hold one array."""
        for group in self._groups:
            arrays = [*map(_ARRAY, group)]
            if not all(map(operator.is_, arrays, itertools.repeat(arrays[0]))):
                return False
        return True

    def unite(self) -> bool:
        """Whether the storages of each group hold one array, or equal ones: then they hold one afterwards."""
        if self.in_one():
            return True
        for group in self._groups:
            share_equal(group)
        return self.in_one()

    def replace(self, stores: dict[int, Storage]) -> None:
        """Look at other storages from now on: `stores` has them by the identities of the old ones."""
        self._groups = [[stores.get(id(s), s) for s in group] for group in self._groups]
