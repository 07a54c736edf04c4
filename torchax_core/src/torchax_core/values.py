"""What is no tensor, and a traced function may have read: numbers, strings, settings, lists of them, functions.

Python does not tell who reads what, so all that the code which ran can reach by the names in it (reached.py) is compared
before each call, by identity. Objects that have been replaced by their equals are no change. A number that no code names (a
count of steps), and whose change has made no difference, is compared no more.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

import numpy as np

from torchax_core.places import ABSENT
from torchax_core.reached import CLASS, DICT, PLAIN, Reached

__all__ = ["ChangedValue", "Values"]


class ChangedValue:
    """A value that is another than when the function was traced; `read`: by code that ran, as far as its names tell."""

    def __init__(self, name: tuple[Any, ...], before: Any, now: Any, read: bool) -> None:
        self.name = name
        self.before = before
        self.now = now
        self.read = read

    def __str__(self) -> str:
        return f"[{self.name[-1]!r}] was {_short(self.before)}, and is {_short(self.now)} now"


class Values:
    """The values that a function reaches.

    look:   finds them, now and later.
    unread: names of values that are known to make no difference.
    """

    def __init__(self, look: Callable[[], Reached], unread: set[Any]) -> None:
        self._look = look
        self._unread = unread
        self._take(look())

    def _take(self, now: Reached) -> None:
        """Compare with these from now on: in columns, for loops of C's."""
        self._values = now.values
        self._gone: list[Any] = []
        rows = [row for row in now.rows if row.name not in self._unread]
        dicts = [row for row in rows if row.kind == DICT]
        classes = [row for row in rows if row.kind == CLASS]
        others = [row for row in rows if row.kind not in (DICT, CLASS)]
        self._dicts, self._keys = [row.container for row in dicts], [row.key for row in dicts]
        self._classes, self._names = [row.container for row in classes], [row.key for row in classes]
        self._getters, self._owners = [row.key for row in others], [row.container for row in others]
        values = [row.value for row in (*dicts, *classes, *others)]
        self._ids = [*map(id, values)]
        self._held = [self._hold(value) for value in values]  # an identity is one as long as its object lives
        self._keyed, self._all_keys = now.dicts, [*chain.from_iterable(now.dicts)]
        self._counted = [*now.open, *now.lists, *now.dicts]
        self._counts = [*map(len, self._counted)]
        self._sets, self._copies = [found for found, _ in now.sets], [copy for _, copy in now.sets]
        self._tensors, self._versions = [tensor for tensor, _ in now.tensors], [version for _, version in now.tensors]
        self._arrays, self._bytes = [array for array, _ in now.arrays], [content for _, content in now.arrays]

    def _hold(self, value: Any) -> Any:
        try:
            return weakref.ref(value, self._gone.append)
        except TypeError:
            return value

    def _now(self) -> list[Any]:
        return [
            *map(dict.get, self._dicts, self._keys, repeat(ABSENT)),
            *map(types.MappingProxyType.get, self._classes, self._names, repeat(ABSENT)),
            *map(operator.call, self._getters, self._owners),
        ]

    def drop(self, unread: set[Any]) -> None:
        """Compare these no more."""
        self._unread = unread
        if not unread.isdisjoint(self._values):
            self._take(self._look())

    def hold(self) -> bool:
        """Whether all are what they were; those that have been replaced by their equals are looked at from now on."""
        try:
            if (
                not self._gone
                and [*map(id, self._now())] == self._ids
                and [*map(len, self._counted)] == self._counts
                and [*chain.from_iterable(self._keyed)] == self._all_keys
                and [*map(_VERSION, self._tensors)] == self._versions
                and self._sets == self._copies
                and [*map(np.ndarray.tobytes, self._arrays)] == self._bytes
            ):
                return True
        except (IndexError, AttributeError, ValueError):  # a list has got shorter, a slot or cell empty
            pass
        if self._plainly_differ():
            return False
        now = self._look()
        if self._differences(now):
            return False
        self._take(now)
        return True

    def _plainly_differ(self) -> bool:
        """Whether a number, bool or string is another, by a look that is cheaper than the whole."""
        try:
            rows = zip(self._now(), self._held, self._ids, strict=True)
        except (IndexError, AttributeError, ValueError):
            return True
        return any(
            id(now) != identity and (now.__class__ in PLAIN or held.__class__ in PLAIN) and not _same(now, held)
            for now, held, identity in rows
        )

    def changed(self) -> list[ChangedValue]:
        """Those that are not what they were."""
        return self._differences(self._look())

    def _differences(self, now: Reached) -> list[ChangedValue]:
        before, after = self._values, now.values
        names = [*before, *(name for name in after if name not in before)]
        found = []
        for name in names:
            old, new = before.get(name, _NOTHING), after.get(name, _NOTHING)
            if not _same(old[0], new[0]) and name not in self._unread:
                found.append(ChangedValue(name, old[0], new[0], (new if old is _NOTHING else old)[1]))
        return found


_VERSION = operator.attrgetter("_version")
_NOTHING: tuple[Any, bool] = (ABSENT, False)


def _same(a: Any, b: Any) -> bool:
    """Whether two values are one to a program: 1, 1.0 and True are not, nor 0.0 and -0.0; NaN is NaN."""
    if a is b:
        return True
    if a.__class__ is not b.__class__:
        return False
    if isinstance(a, (types.CodeType, frozenset)):
        return a == b
    if isinstance(a, weakref.ref):
        return a() is b() and a() is not None
    return not isinstance(a, type) and repr(a) == repr(b)


def _short(value: Any) -> str:
    if isinstance(value, weakref.ref):
        value = value()
    if isinstance(value, types.CodeType):
        return f"the function {value.co_name}"
    if isinstance(value, type):
        return f"a {value.__name__}"
    return repr(value)[:60]
