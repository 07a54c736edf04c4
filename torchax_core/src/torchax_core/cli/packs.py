"""`torchax packs`: what is installed, and what is wrong with what is broken."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from torchax_core.cli.output import PROBLEM, JsonOption, print_json, print_text
from torchax_core.config import Config
from torchax_core.registry import OpTable

__all__ = ["packs"]


def packs(as_json: JsonOption = False) -> None:
    """List the packs installed, highest rank first. Exit code 1 if one is broken, or has definitions that do not fit."""
    table = OpTable(Config.from_environment())
    rows: list[dict[str, Any]] = []
    for pack in table.packs:
        count = len(table.host.definitions(pack, table.config))  # imports its families: some break only here
        serves = (*pack.namespaces, *sorted(pack.ops | pack.functions))
        rows.append(
            {
                "pack": pack.name,
                "distribution": pack.distribution,
                "module": pack.target,
                "serves": list(serves),
                "definitions": count,
                "left_out": pack.misfits,
                "error": pack.error,
            }
        )
    broken = [row for row in rows if row["error"] or row["left_out"]]
    if as_json:
        print_json(rows)
    elif not rows:
        print_text("No pack is in use, so no op runs on device 'jax'. Install one: pip install torchax-ops-aten")
    else:
        shown = Table("pack", "distribution", "serves", "definitions")
        for row, pack in zip(rows, table.packs, strict=True):
            counts = [(len(pack.ops), "ops"), (len(pack.functions), "functions")]
            summary = [*pack.namespaces, *(f"{count} {what}" for count, what in counts if count)]
            state = "[red]broken, left out" if row["error"] else str(row["definitions"])
            state += f", [red]{len(row['left_out'])} left out" if row["left_out"] else ""
            shown.add_row(pack.name, pack.distribution, ", ".join(summary), state)
        Console().print(shown)
        for row in broken:
            print_text("\n" + "\n".join([row["error"]] if row["error"] else row["left_out"].values()))
    raise typer.Exit(PROBLEM if broken else 0)
