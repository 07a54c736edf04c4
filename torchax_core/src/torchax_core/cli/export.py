"""`torchax export`: a torch module as a file that JAX runs without torch."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Annotated, Any

import jax
import torch
import typer

from torchax_core.cli.output import PROBLEM, JsonOption, near, print_json, print_text

__all__ = ["export"]


def export(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="A function of no arguments: `mypackage.models:make`. It returns (model, args), (model, args, kwargs), or a "
            "torch.export.ExportedProgram.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write: model.zip.")],
    dynamic_batch: Annotated[
        bool,
        typer.Option("--dynamic-batch", help="Let the first dimension of every tensor argument be of any length."),
    ] = False,
    composites: Annotated[
        bool, typer.Option(help="Keep ops like attention as stablehlo.composite (static shapes only).")
    ] = True,
    platform: Annotated[
        list[str] | None,
        typer.Option(help="What it is to run on: cpu, cuda, tpu; repeat for several. Default: what JAX uses here."),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the StableHLO too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Export a torch module to StableHLO, with its weights, as one file that JAX runs without torch.

    The module is put into eval mode, exported with torch.export, and lowered by the op packs in use.

    docs/export.md has the few lines that run the file with JAX alone.
    """
    made = _make(factory)
    from torchax_core.export import input_avals, save  # imports torch.export, which takes a second

    program = made if isinstance(made, torch.export.ExportedProgram) else _program(made, factory, dynamic_batch)
    try:
        exported = save(out, program, composites=composites, platforms=platform)
    except ImportError as error:
        print_text(f"error: {error}", stderr=True)
        raise typer.Exit(PROBLEM) from None
    inputs = len(jax.tree.leaves(input_avals(program)))
    written: dict[str, Any] = {
        "file": str(out),
        "bytes": out.stat().st_size,
        "inputs": [str(aval) for aval in exported.in_avals[len(exported.in_avals) - inputs :]],
        "outputs": [str(aval) for aval in exported.out_avals],
        "platforms": list(exported.platforms),
    }
    if text:  # with dynamic dimensions, composites are in a program of their own
        written["stablehlo"] = getattr(exported, "composites", exported).mlir_module()
    if as_json:
        print_json(written)
        return
    if text:
        print_text(written["stablehlo"])
    print_text(f"{out}: {written['bytes']:,} bytes, for {', '.join(exported.platforms)}")
    print_text(f"    ({', '.join(written['inputs'])}) -> ({', '.join(written['outputs'])})")


def _make(factory: str) -> Any:
    """What the function named by MODULE:FACTORY returns."""
    name, colon, attribute = factory.partition(":")
    if not (name and colon and attribute):
        raise typer.BadParameter(f"{factory!r} is not of the form MODULE:FACTORY, as in mypackage.models:make.")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as for `python -m`: modules of the present folder are found
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] and error.name != name:
            raise  # the module is there, and misses one of its own
        raise typer.BadParameter(f"there is no module {name!r} in this folder, nor installed.") from None
    function = getattr(module, attribute, None)
    if not callable(function):
        raise typer.BadParameter(f"{name} has no function {attribute!r}.{near(attribute, dir(module))}")
    return function()


def _program(made: Any, factory: str, dynamic_batch: bool) -> torch.export.ExportedProgram:
    """The exported program of what a factory made."""
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], torch.nn.Module)):
        raise typer.BadParameter(
            f"{factory} returned {type(made).__name__}; expected (model, args) or (model, args, kwargs), args being a tuple of "
            "example tensors."
        )
    model, args = made[0].eval(), made[1]
    kwargs = made[2] if len(made) == 3 else {}
    if not isinstance(args, tuple):
        raise typer.BadParameter(f"{factory}: args must be a tuple, but is {type(args).__name__}: (model, (x,)).")
    shapes: Any = None
    if dynamic_batch:
        batch = torch.export.Dim("batch")
        shapes = torch.utils._pytree.tree_map(
            lambda leaf: {0: batch} if isinstance(leaf, torch.Tensor) and leaf.dim() else None, (args, kwargs)
        )
        bound = inspect.signature(model.forward).bind(*shapes[0], **shapes[1])
        shapes = dict(bound.arguments)  # by parameter of `forward`, as torch.export wants them
    try:
        return torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
    except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
        print_text(f"error: torch.export of {type(model).__name__} failed: {error}", stderr=True)
        raise typer.Exit(PROBLEM) from None
