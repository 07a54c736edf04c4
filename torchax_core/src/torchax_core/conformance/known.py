"""Known failures: a toml file of what fails, with the reason.

    [[failure]]
    op = "linalg.eig"            # OpInfo's full name, or a list of them; * and ? match
    dtype = ["complex64"]        # or "*", the default
    mode = ["out", "grad"]       # or "*", the default; "grad" covers "grad.first", "grad.second" and "grad.forward"
    torch = "<2.14"              # only on these versions; by default on all
    reason = "a fact about JAX or torch"

What is known to fail is run all the same, so that an entry that no longer holds is seen.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from torchax_core.conformance.cells import FAILED, Cell, Result

__all__ = ["KNOWN_FAILURES", "KnownFailure", "fixed", "known_failures", "reason"]

KNOWN_FAILURES = "tests/opinfo/known_failures.toml"
_KEYS = {"op", "dtype", "mode", "torch", "reason"}


@dataclasses.dataclass(frozen=True)
class KnownFailure:
    """One entry: patterns for op, dtype and mode, and the reason."""

    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    modes: tuple[str, ...]
    reason: str

    def covers(self, cell: Cell) -> bool:
        """Whether this is the entry of `cell`."""
        mode = cell.mode
        return (
            _matches(cell.op, self.ops)
            and _matches(cell.dtype, self.dtypes)
            and (_matches(mode, self.modes) or _matches(mode.partition(".")[0], self.modes))
        )

    def __str__(self) -> str:
        return " ".join(",".join(x) for x in (self.ops, self.dtypes, self.modes))


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def known_failures(file: Path | None = None) -> list[KnownFailure]:
    """The entries of `file` for this version of torch; None looks for tests/opinfo/known_failures.toml in the current
    folder and above it. Raises ValueError for an entry that is not as it should be."""
    if file is None:
        here = Path.cwd()
        file = next((x for folder in (here, *here.parents) if (x := folder / KNOWN_FAILURES).is_file()), None)
        if file is None:
            return []
    with open(file, "rb") as stream:
        entries = tomllib.load(stream).get("failure", [])
    return [_entry(file, entry) for entry in entries if _applies(file, entry)]


def _applies(file: Path, entry: dict[str, Any]) -> bool:
    try:
        return SpecifierSet(entry.get("torch", "")).contains(torch.__version__.partition("+")[0], prereleases=True)
    except InvalidSpecifier:
        raise ValueError(f'{file}: `torch` is a version specifier as "<2.14", not {entry["torch"]!r}') from None


def _entry(file: Path, entry: dict[str, Any]) -> KnownFailure:
    if not entry.get("op") or not entry.get("reason"):
        raise ValueError(f"{file}: every [[failure]] needs `op` and `reason`, but this one does not: {entry}")
    if unknown := set(entry) - _KEYS:
        raise ValueError(f"{file}: a [[failure]] has {sorted(_KEYS)}, but this one has {sorted(unknown)}: {entry}")

    def patterns(key: str) -> tuple[str, ...]:
        value = entry.get(key, "*")
        return (value,) if isinstance(value, str) else tuple(value)

    return KnownFailure(patterns("op"), patterns("dtype"), patterns("mode"), entry["reason"])


def reason(known: Iterable[KnownFailure], cell: Cell) -> str | None:
    """Why `cell` is known to fail, by the first entry that covers it; None if it is not."""
    return next((entry.reason for entry in known if entry.covers(cell)), None)


def fixed(known: Iterable[KnownFailure], results: Sequence[Result]) -> list[tuple[KnownFailure, list[Cell], bool]]:
    """Entries with cells that passed, these cells, and whether that is all of the entry's cells that ran."""
    found = []
    for entry in known:
        covered = [result for result in results if entry.covers(result.cell)]
        passed = [result.cell for result in covered if result.status == "passed"]
        if passed:
            found.append((entry, passed, not any(result.status in FAILED for result in covered)))
    return found
