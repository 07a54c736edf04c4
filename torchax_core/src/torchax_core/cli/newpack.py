"""`torchax new-pack`: a complete, tested op pack to start from."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from torchax_core import newpack
from torchax_core.cli.output import JsonOption, print_json, print_text

__all__ = ["new_pack"]


def new_pack(
    name: Annotated[str, typer.Argument(help="What it is to be called: my-pack.")],
    into: Annotated[Path, typer.Option(help="The folder in which to make the pack's folder.")] = Path(),
    as_json: JsonOption = False,
) -> None:
    """Write a complete op pack: a torch op of its own, how it runs on JAX, tests, README and CI."""
    files = newpack.new_pack(name, into)
    folder = shlex.quote(str(into / name))
    then = [f"cd {folder}", "python -m pytest", 'python -m pip install -e ".[test]"', "torchax packs"]
    if as_json:
        print_json({"folder": str(into / name), "files": [str(file) for file in files], "then": then})
        return
    for file in files:
        print_text(str(file))
    print_text("\nNow:")
    for line in then:
        print_text(f"    {line}")
