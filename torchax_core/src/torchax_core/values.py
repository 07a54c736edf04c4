"""Numbers, bools and strings in attributes, dicts and globals: what a traced function has read of them is in its program.

Python does not tell who reads them, so all that the function can reach are compared before each call. One whose change has
made no difference (a count of steps that nobody looks at) is compared no more.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

__all__ = ["ChangedValue", "Values"]


class ChangedValue:
    """A value that is another than when the function was traced."""

    def __init__(self, name: tuple[int, Any], before: Any, now: Any) -> None:
        self.name = name
        self.before = before
        self.now = now

    def __str__(self) -> str:
        return f"[{self.name[1]!r}] was {self.before!r}, and is {self.now!r} now"


class Values:
    """The entries of dicts, an object's attributes among them, as they are now.

    entries: a dict and a key each.
    modules: modules, of which the floats and bools count: torch's own have settings there (`p`, `eps`).
    unread:  names of entries, (identity of the dict, key), that are known to make no difference.
    """

    def __init__(self, entries: Iterable[tuple[dict[Any, Any], Any]], modules: Iterable[Any], unread: set[Any]) -> None:
        found = {(id(container), key): (container, key) for container, key in entries}
        for module in modules:
            attributes = vars(module)
            for key, value in attributes.items():
                if (
                    value.__class__ is float or value.__class__ is bool
                ) and key != "training":  # which has its own guard
                    found.setdefault((id(attributes), key), (attributes, key))
        self._containers = [container for container, _ in found.values()]
        self._keys = [key for _, key in found.values()]
        self._values = [*map(dict.get, self._containers, self._keys)]
        self.drop(unread)

    def drop(self, unread: set[Any]) -> None:
        """Compare these no more."""
        rows = zip(self._containers, self._keys, self._values, strict=True)
        kept = [row for row in rows if (id(row[0]), row[1]) not in unread]
        self._containers = [container for container, _, _ in kept]
        self._keys = [key for _, key, _ in kept]
        self._values = [value for *_, value in kept]

    def hold(self) -> bool:
        """Whether all are what they were."""
        now = [*map(dict.get, self._containers, self._keys)]
        if all(map(operator.is_, now, self._values)):
            return True
        if not all(map(_same, now, self._values)):
            return False
        self._values = now
        return True

    def changed(self) -> list[ChangedValue]:
        """Those that are not."""
        now = map(dict.get, self._containers, self._keys)
        rows = zip(self._containers, self._keys, self._values, now, strict=True)
        return [ChangedValue((id(c), key), before, value) for c, key, before, value in rows if not _same(value, before)]


def _same(a: Any, b: Any) -> bool:
    """Whether two values are one to a program: 1, 1.0 and True are not, nor 0.0 and -0.0; NaN is NaN."""
    return a is b or (a.__class__ is b.__class__ and repr(a) == repr(b))
