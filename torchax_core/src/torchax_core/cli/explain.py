"""`torchax explain`: every way an op could run, the first of which is used."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import torch
import typer

from torchax_core.cli.output import PROBLEM, JsonOption, near_op, print_json, print_text, torch_ops
from torchax_core.environment import default_env
from torchax_core.errors import OpNameError
from torchax_core.functions import find_function
from torchax_core.registry import Source
from torchax_core.variants import find_op

__all__ = ["explain"]


def explain(
    op: Annotated[str, typer.Argument(help='As "aten::softmax.int", or a torch function: "torch.einsum".')],
    as_json: JsonOption = False,
) -> None:
    """Say who defines an op: every way it could run, the first of which is used. Exit code 1 if there is none.

    A name without overload ("aten::softmax") means all its overloads.
    """
    env = default_env()
    explanations = [env.explain(named) for named in _named(op)]
    if as_json:
        rows = [
            {"op": x.op, "schema": x.schema, "ways": [_way(source) for source in x.chain], "missing": x.missing}
            for x in explanations
        ]
        print_json(rows)
    else:
        for x in explanations:
            print_text(x.schema if "::" in x.op else f"{x.op} (a torch function)")
            for i, source in enumerate(x.chain):
                way = _way(source)
                via = f", derived from {way['via']}" if way["via"] else ""
                print_text(f"  {'runs by' if i == 0 else 'over'}: {way['level']} {way['kind']}{via}, {way['where']}")
                if i == 0 and way["doc"]:
                    print_text(f"           {way['doc']}")
            if not x.chain:
                print_text("  " + (x.missing or "only torch's own code runs it").replace("\n", "\n  "))
    raise typer.Exit(PROBLEM if any(x.missing for x in explanations) else 0)


def _named(op: str) -> list[Any]:
    """The torch ops that `op` stands for; [op] for a torch function. Raises OpNameError for an unknown name."""
    if "::" not in op:
        if find_function(op) is None:
            raise OpNameError(
                f"{op!r} is neither an op ('aten::add.Tensor') nor a torch function ('torch.einsum').{near_op(op)}"
            )
        return [op]
    if find_op(op) is None:  # its library may be a pack's own, which importing the pack registers
        table = default_env()._table
        for pack in table.packs:
            if pack.serves(op):
                table.host.definitions(pack, table.config)
    every = torch_ops()
    names = [op] if op in every else [name for name in every if name.partition(".")[0] == op]
    funcs = [func for func in map(find_op, names) if func is not None]
    if not funcs:
        raise OpNameError(f"torch {torch.__version__} has no op {op!r}.{near_op(op)}")
    return funcs


def _way(source: Source) -> dict[str, Any]:
    definition = source.definition
    return {
        "level": source.level,
        "kind": definition.kind if definition is not None else "",
        "where": source.origin,
        "via": source.via,
        "doc": (inspect.getdoc(definition.body) or "").partition("\n")[0] if definition is not None else "",
    }
