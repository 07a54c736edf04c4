"""What the commands share: the option `--json`, exit codes, printing, and what to suggest for a name that is not there."""

from __future__ import annotations

import difflib
import importlib
import json
import sys
from typing import Annotated, Any

import torch
import typer

__all__ = ["PROBLEM", "WRONG", "JsonOption", "near", "near_op", "print_json", "print_text", "torch_ops"]

PROBLEM, WRONG = 1, 2
"""Exit codes: a problem was found; a name, a setting or an option is wrong."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_text(text: str, *, stderr: bool = False) -> None:
    """Print a line as it is."""
    # plain: piped to grep, an op's line must stay one line
    print(text, file=sys.stderr if stderr else sys.stdout)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    print_text(json.dumps(value, indent=1))


def torch_ops() -> list[str]:
    """The names of all ops that torch knows."""
    return sorted(torch._C._dispatch_get_all_op_names())


def near(name: str, names: list[str]) -> str:
    """The hint `Did you mean ...?` with the nearest names, or nothing."""
    found = difflib.get_close_matches(name, names, 3)
    return f" Did you mean {' or '.join(repr(n) for n in found)}?" if found else ""


def near_op(op: str) -> str:
    """Where to look instead: the op's overloads, an op or function of that name elsewhere, or the nearest names."""
    every = torch_ops()
    base = op.partition(".")[0] if "::" in op else op.rpartition(".")[2]
    suffix = base.rpartition("::")[2]
    overloads = [name for name in every if name.partition(".")[0] == base]
    if overloads:
        return f" Its overloads: {', '.join(overloads)}."
    same = [name for name in every if name.partition(".")[0].endswith(f"::{suffix}")]
    if same:
        return f" Did you mean one of {', '.join(same[:6])}?"
    if "::" in op:
        return near(op, every)
    modules = ("torch", "torch.nn.functional", "torch.linalg", "torch.fft", "torch.special")
    return near(
        op,
        [f"{module}.{name}" for module in modules for name in dir(importlib.import_module(module)) if name[0] != "_"],
    )
