"""The command `torchax conformance`, which `python -m torchax_core.testing` is, too. See docs/conformance.md."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from torchax_core.conformance.cells import ALL_MODES, FAILED, MODES, Cell
from torchax_core.conformance.known import fixed, known_failures
from torchax_core.conformance.page import write_page
from torchax_core.conformance.report import Report, fingerprint, slowest, summary
from torchax_core.conformance.workers import Options, Worker, WorkerError, sweep

__all__ = ["app"]

_SAVED_EVERY = 30.0  # seconds
_SAMPLES = 8  # of a cell, unless told otherwise

app: typer.Typer = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(
    epilog="Exit codes: 0, every cell passed or is known to fail; 1, some failed; 2, a wrong option; 130, interrupted "
    "(the report holds what was done, and the same command goes on from there)."
)
def conformance(
    ops: Annotated[str, typer.Option(help="Regular expression searched for in the ops' full names.")] = "",
    dtypes: Annotated[
        str,
        typer.Option(help="Comma-separated; 'all': the twelve that JAX and torch share. Gradients use the doubles."),
    ] = "all",
    mode: Annotated[
        str, typer.Option("--mode", "--modes", help=f"Comma-separated, of {', '.join(ALL_MODES)}; 'grad': all three.")
    ] = ",".join(MODES),
    pack: Annotated[str | None, typer.Option(help="Only what this pack brings (TORCHAX_OPINFO) or defines.")] = None,
    shard: Annotated[str, typer.Option(help="i/n: every n-th op, from the i-th on.")] = "1/1",
    max_samples: Annotated[
        int, typer.Option(help="Samples for each cell, spread over all there are.", min=1)
    ] = _SAMPLES,
    workers: Annotated[int, typer.Option("--workers", "--jobs", help="Processes.", min=1)] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds for one cell.")] = 60.0,
    quick: Annotated[
        bool, typer.Option(help="Compile without optimizations: twice as fast, not what users run.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here, as it goes.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the page here: a heat map of ops and dtypes per mode.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Take over the results of this report.")] = None,
    retry: Annotated[bool, typer.Option(help="With --resume: run again what failed there.")] = False,
    fresh: Annotated[bool, typer.Option(help="Do not go on from an unfinished --json file.")] = False,
    known: Annotated[
        Path | None, typer.Option(help="toml file of known failures; by default tests/opinfo/known_failures.toml.")
    ] = None,
    show: Annotated[int, typer.Option(help="Failures to list.")] = 200,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Failures whole, with sample and definitions.")
    ] = False,
    time_them: Annotated[bool, typer.Option("--time", help="List the slowest ops and compiles.")] = False,
) -> None:
    """Run PyTorch's own op samples on device "jax" and compare with CPU torch, cell by cell: an op, a dtype, a mode."""
    options = Options(max_samples, timeout, pack, quick)
    first = Worker(options)
    try:
        failures = known_failures(known)
        todo = first.cells(ops, dtypes, mode, pack, shard)
        chosen: dict[str, Any] = {"ops": ops, "dtypes": dtypes, "mode": mode, "pack": pack, "shard": shard}
        chosen |= {"max_samples": max_samples, "quick": quick}
        report = Report(chosen, failures, code=fingerprint())
        _take_over(report, set(todo), resume, retry, None if fresh else json_file)
    except (ValueError, OSError) as error:
        first.stop()
        raise typer.BadParameter(str(error)) from None
    except WorkerError as error:
        raise typer.BadParameter(str(error)) from None
    interrupted = _run(
        report, [cell for cell in todo if cell not in report.results], options, workers, first, json_file
    )
    report.finished = not interrupted
    report.results = {cell: report.results[cell] for cell in todo if cell in report.results}
    if json_file is not None:
        report.save(json_file)
    if html is not None:
        write_page(report, html)
    _print(report, show, verbose, time_them)
    raise typer.Exit(130 if interrupted else 1 if report.failures() else 0)


def _take_over(report: Report, todo: set[Cell], resume: Path | None, retry: bool, output: Path | None) -> None:
    """Results of the report to resume; or of an unfinished one at `output`, made of the same code by the same command."""
    if resume is not None:
        earlier = Report.load(resume, report.known)
    elif output is not None and output.is_file():
        try:
            earlier = Report.load(output, report.known)
        except ValueError:
            return  # whatever it is, it was named to be written
        same = (earlier.choices, earlier.code, earlier.versions) == (report.choices, report.code, report.versions)
        if earlier.finished or not same:
            return
        Console(stderr=True).print(f"going on from {output}, which is unfinished (--fresh: from the start)")
    else:
        return
    report.seconds = earlier.seconds
    for cell, result in earlier.results.items():
        if cell in todo and not (retry and result.status in FAILED):
            report.results[cell] = result


def _run(
    report: Report, todo: list[Cell], options: Options, workers: int, first: Worker, json_file: Path | None
) -> bool:
    """Fill the report; returns whether it was interrupted."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    begun, before = time.monotonic(), report.seconds
    saved, failed = begun, 0
    if not todo:
        first.stop()
        return False
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=len(todo))
        try:
            for i, result in enumerate(sweep(todo, options, workers, first), 1):
                report.results[result.cell] = result
                failed += report.status(result) in FAILED
                progress.update(task, advance=1, description=f"{failed} failed  {result.cell.op[:32]:32}")
                report.seconds = before + time.monotonic() - begun
                if json_file is not None and time.monotonic() - saved > _SAVED_EVERY:
                    report.save(json_file)
                    saved = time.monotonic()
                if not console.is_terminal and i % max(1, len(todo) // 20) == 0:
                    left = (time.monotonic() - begun) / i * (len(todo) - i)
                    console.print(f"{i} of {len(todo)} cells, {failed} failed, {left:.0f} s left", highlight=False)
        except KeyboardInterrupt:
            return True
    return False


def _print(report: Report, show: int, verbose: bool, time_them: bool) -> None:
    console = Console(highlight=False)

    def line(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    failures = report.failures()
    for result in failures[:show]:
        line(f"{result.status.upper()} {result.cell}: {result.message}")
        if verbose:
            parts = [result.detail, "sample:\n" + result.sample, "ran:\n" + "\n".join(result.definitions)]
            line("\n".join(re.sub("^", "    ", part, flags=re.MULTILINE) for part in parts if part))
    if len(failures) > show:
        line(f"... and {len(failures) - show} more failures (--show {len(failures)})")
    for entry, passed, whole in fixed(report.known, list(report.results.values())):
        if whole and report.choices["max_samples"] < _SAMPLES:
            line(f"KNOWN FAILURE passes: remove it if it does with --max-samples {_SAMPLES}: {entry}: {entry.reason}")
        elif whole:
            line(f"KNOWN FAILURE fixed: remove it: {entry}: {entry.reason}")
        else:
            shown = ", ".join(map(str, passed[:4])) + (", ..." if len(passed) > 4 else "")
            line(f"KNOWN FAILURE fixed in part: narrow it: {entry}: {len(passed)} cells pass, as {shown}")
    if time_them:
        line("\n".join(slowest(list(report.results.values()))) + "\n")
    line("\n".join(summary(report)))
    said = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    line(f"{len(report.results)} cells in {report.seconds:.0f} s; {said}")


if __name__ == "__main__":
    app()
