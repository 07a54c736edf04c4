"""The report of a sweep: a JSON file, written as it goes, from which a later sweep may go on; and tables to print."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import torch

from torchax_core.conformance.cells import ALL_MODES, DTYPES, FAILED, Cell, Result
from torchax_core.conformance.known import KnownFailure, reason
from torchax_core.packs import host

__all__ = ["FORMAT", "Report", "fingerprint", "slowest", "summary"]

FORMAT = 1


@dataclasses.dataclass
class Report:
    """What was run, with what, and how it went.

    choices:  the options that decide which cells there are and what is tried in each.
    results:  by cell.
    known:    the known failures.
    finished: whether every cell has its result.
    seconds:  all runs together, if it was resumed.
    """

    choices: dict[str, Any]
    known: list[KnownFailure]
    results: dict[Cell, Result] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=lambda: versions())
    code: str = ""
    seconds: float = 0.0
    finished: bool = False

    def status(self, result: Result) -> str:
        """The result's status; for a failure that is known, "known"."""
        return "known" if result.status in FAILED and reason(self.known, result.cell) is not None else result.status

    def failures(self) -> list[Result]:
        """What failed and is not known to fail."""
        return [result for result in self.results.values() if self.status(result) in FAILED]

    def save(self, file: Path) -> None:
        """Write the report as JSON, at once or not at all."""
        part = file.with_name(file.name + ".part")
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(self.as_json(), indent=0))
        part.replace(file)

    def as_json(self) -> dict[str, Any]:
        """Plain data: one entry in "cells" for each result, without what is empty."""
        entries = []
        for result in self.results.values():
            entry: dict[str, Any] = dataclasses.asdict(result.cell)
            for field in dataclasses.fields(Result)[1:]:
                value = getattr(result, field.name)
                if value != field.default and value != []:
                    entry[field.name] = round(value, 4) if isinstance(value, float) else value
            why = reason(self.known, result.cell)
            entries.append(entry | ({"known": why} if why is not None else {}))
        return {
            "torchax_conformance": FORMAT,
            "choices": self.choices,
            "versions": self.versions,
            "code": self.code,
            "seconds": round(self.seconds, 1),
            "finished": self.finished,
            "cells": entries,
        }

    @classmethod
    def load(cls, file: Path, known: list[KnownFailure]) -> Report:
        """A report that was saved. Raises ValueError for a file that is none."""
        try:
            data = json.loads(file.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is no JSON: {error}") from None
        if not isinstance(data, dict) or data.get("torchax_conformance") != FORMAT:
            raise ValueError(f"{file} is no report of torchax conformance, format {FORMAT}; choose another file")
        report = cls(data["choices"], known, versions=data["versions"], code=data["code"], seconds=data["seconds"])
        report.finished = data["finished"]
        for entry in data["cells"]:
            entry.pop("known", None)
            cell = Cell(entry.pop("op"), entry.pop("dtype"), entry.pop("mode"))
            report.results[cell] = Result(cell, **entry)
        return report


def versions() -> dict[str, str]:
    """Of Python, torch, jax, the device, and our distributions."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "jax": jax.__version__}
    for distribution in importlib.metadata.distributions():
        if distribution.name and distribution.name.startswith("torchax-"):
            found[distribution.name] = distribution.version
    return found


def fingerprint() -> str:
    """A digest of the core's and the packs' sources: results are only taken over unasked while it is the same."""
    folders = {Path(__file__).parent.parent}
    for pack in host()._discovered().values():
        spec = importlib.util.find_spec(pack.target.partition(".")[0])
        folders |= {Path(folder) for folder in (spec.submodule_search_locations or ())} if spec is not None else set()
    digest = hashlib.sha256()
    for folder in sorted(folders):
        for file in sorted(folder.rglob("*.py")):
            state = os.stat(file)
            digest.update(f"{file} {state.st_mtime_ns} {state.st_size}\n".encode())
    return digest.hexdigest()[:16]


# -- tables ------------------------------------------------------------------------------------------------------------


def summary(report: Report) -> list[str]:
    """Lines of a table: per mode and dtype, what passed, what failed before known failures and after, and the shares."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in report.results.values():
        groups.setdefault((result.cell.mode, result.cell.dtype), []).append(result)
    rows = [["mode", "dtype", "cells", "passed", "no sample", "failed", "known", "remain", "passed %", "with known %"]]
    for mode in ALL_MODES:
        parts = {dtype: groups[m, dtype] for m, dtype in sorted(groups, key=_place) if m == mode}
        if len(parts) > 1:
            parts["all"] = list(itertools.chain.from_iterable(parts.values()))
        rows += [[mode, dtype, *_numbers(report, results)] for dtype, results in parts.items()]
    rows.append(["all", "all", *_numbers(report, list(report.results.values()))])
    return _aligned(rows, names=2)


def _place(group: tuple[str, str]) -> tuple[int, str]:
    """Rows come in the order of `DTYPES`; what is not in it, last."""
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    return (names.index(group[1]) if group[1] in names else len(names), group[1])


def _numbers(report: Report, results: Sequence[Result]) -> list[str]:
    count = Counter(result.status for result in results)
    failed = sum(count[status] for status in FAILED)
    known = sum(report.status(result) == "known" for result in results)
    ran = len(results) - count["none"]
    numbers = [len(results), count["passed"], count["none"], failed, known, failed - known]
    shares = [f"{100 * part / ran:.2f}" if ran else "-" for part in (count["passed"], count["passed"] + known)]
    return [*map(str, numbers), *shares]


def slowest(results: Sequence[Result], most: int = 10) -> list[str]:
    """Lines of a table: the slowest cells, then those with the slowest single compile."""
    rows = [["op", "dtype", "mode", "seconds", "in XLA", "compiles", "longest"]]
    for key in ("seconds", "longest_compile"):
        for x in sorted(results, key=lambda result: -getattr(result, key))[:most]:
            numbers = (f"{x.seconds:.2f}", f"{x.compile_seconds:.2f}", str(x.compiles), f"{x.longest_compile:.2f}")
            rows.append([x.cell.op, x.cell.dtype, x.cell.mode, *numbers])
    head, *table = _aligned(rows, names=3)
    half = len(table) // 2
    return ["slowest cells", head, *table[:half], "slowest compiles", *table[half:]]


def _aligned(rows: list[list[str]], names: int) -> list[str]:
    """Rows in columns, the first `names` to the left. Plain text, which stays whole in a log."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(x.ljust(w) if i < names else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
