"""`torchax ops`: the definitions of all packs, and what nobody defines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import typer

from torchax_core.builtins import BUILTINS
from torchax_core.cli.output import JsonOption, near, print_json, print_text, torch_ops
from torchax_core.config import Config
from torchax_core.errors import UnknownPackError
from torchax_core.registry import OpTable
from torchax_core.variants import find_op

__all__ = ["ops"]


def ops(
    pattern: Annotated[str, typer.Argument(help="Regular expression searched for in the op's name.")] = "",
    pack: Annotated[str | None, typer.Option(help="Only this pack's.")] = None,
    missing: Annotated[
        bool, typer.Option(help="Instead: what nobody defines, and definitions this torch lacks.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the definitions of all packs: op, pack, kind, file and line."""
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise typer.BadParameter(f"{pattern!r} is no regular expression: {error}", param_hint="PATTERN") from None
    table = OpTable(Config.from_environment())
    names = [p.name for p in table.packs]
    if pack is not None and pack not in names:
        raise UnknownPackError(f"no pack called {pack!r} is in use.{near(pack, names)} In use: {', '.join(names)}.")
    if missing:
        rows = [row for row in _missing(table) if search(row["op"]) and pack in (None, row["pack"])]
    else:
        rows = [
            {"op": d.op, "pack": owner.name, "kind": d.kind, "file": d.origin.file, "line": d.origin.line}
            for owner, d in table.all_definitions()
            if search(d.op) and pack in (None, owner.name)
        ]
    rows.sort(key=lambda row: row["op"])
    if as_json:
        print_json(rows)
        return
    for row in rows:
        if missing:
            print_text(f"{row['op']:50} {row['reason']}")
        else:
            print_text(f"{row['op']:50} {row['kind']:13} {row['file']}:{row['line']}")
    print_text(f"{len(rows)} ops", stderr=True)


def _missing(table: OpTable) -> Iterator[dict[str, Any]]:
    for owner, definition in table.all_definitions():
        if definition.kind != "function" and find_op(definition.op) is None:
            reason = f"defined by {definition.origin}, but torch {torch.__version__} has no such op"
            yield {"op": definition.op, "pack": owner.name, "reason": reason}
    for pack in table.packs:
        for op, why in pack.misfits.items():
            yield {"op": op, "pack": pack.name, "reason": why}
    namespaces = {"aten", *(n for p in table.packs for n in p.namespaces)}
    for name in torch_ops():
        func = find_op(name) if name.partition("::")[0] in namespaces else None
        if func is not None and name not in BUILTINS and next(table.chain(func), None) is None:
            yield {"op": name, "pack": None, "reason": "nobody defines it"}
