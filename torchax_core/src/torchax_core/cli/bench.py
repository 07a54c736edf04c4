"""`torchax bench`: the benchmarks behind the numbers that this project states, on this machine."""

from __future__ import annotations

import enum
import importlib
from typing import Annotated, Any

import typer
from rich.console import Console

from torchax_core.cli.output import PROBLEM, JsonOption, print_json, print_text

__all__ = ["Benchmark", "bench"]


class Benchmark(enum.StrEnum):
    """What can be measured."""

    STARTUP = "startup"
    EAGER = "eager"
    MODEL = "model"
    TRAIN = "train"
    COMPILE = "compile"
    COMPARISON = "comparison"
    LENGTHS = "lengths"


def bench(
    names: Annotated[
        list[Benchmark] | None,
        typer.Argument(
            metavar="[NAME]...",
            help=f"Of {', '.join(Benchmark)}; default: all.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer repeats: shows that it runs; the figures are rough.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure this installation against JAX written by hand, both sides in one run. Exit code 1 if a benchmark fails.

    A limit that is missed is shown, and is no failure: a busy or unusual machine misses some. Minutes; --quick takes less.
    """
    from torchax_core.benchmarking import common

    before = common.console
    figures: dict[str, Any] = {}
    failed: list[str] = []
    chosen = list(dict.fromkeys(names or Benchmark))
    try:
        if as_json:
            before.file = Console(stderr=True).file
        for number, name in enumerate(chosen, 1):
            print_text(f"{name} ({number} of {len(chosen)})", stderr=True)
            error = ""
            try:
                module = importlib.import_module(f"torchax_core.benchmarking.{name}")
                figures[name.value] = module.main(quick=quick, json=None)
            except ModuleNotFoundError as missing:
                distribution = (missing.name or "").partition(".")[0]
                error = f"{name} needs {distribution}: pip install {distribution}"
            except (AssertionError, RuntimeError) as wrong:  # the sides disagree, or a process ended
                error = f"{name}: {type(wrong).__name__}: {str(wrong).strip()}"
            if error:
                failed.append(error)
                print_text(f"error: {error}", stderr=True)
    finally:
        before.file = None  # type: ignore[assignment]  # stdout again
    if as_json:
        print_json({"ok": not failed, "errors": failed, "figures": figures})
    raise typer.Exit(PROBLEM if failed else 0)
