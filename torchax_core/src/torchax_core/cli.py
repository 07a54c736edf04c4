"""The command `torchax`: which packs there are, who defines an op, and whether this installation is sound.

    torchax packs                       packs installed, and what is wrong with the broken ones
    torchax ops softmax                 definitions whose op's name has "softmax" in it; --missing: what nobody defines
    torchax explain aten::softmax.int   every way the op could run, the first of which is used
    torchax doctor                      versions, devices, packs, and a first op

Each takes `--json`. Exit codes: 0, all is well; 1, a problem was found (a broken pack, an op that nobody defines, a
failed check); 2, a name, a setting or an option is wrong.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
import json
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import jax
import torch
import typer
from rich.console import Console
from rich.table import Table

from torchax_core.builtins import BUILTINS
from torchax_core.config import Config
from torchax_core.environment import default_env
from torchax_core.errors import ConfigError, OpNameError, PackWarning, TorchaxError, UnknownPackError
from torchax_core.functions import find_function
from torchax_core.registry import OpTable, Source
from torchax_core.variants import find_op

__all__ = ["app", "main"]

PROBLEM, WRONG = 1, 2

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="PyTorch programs on JAX: which packs there are, who defines an op, and whether this installation is sound.",
    epilog="Exit codes: 0, all is well; 1, a problem was found; 2, a name, a setting or an option is wrong.",
)
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """The entry point of the command."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PackWarning)  # broken packs are in the output
        try:
            app()
        except TorchaxError as error:
            wrong = isinstance(error, (UnknownPackError, ConfigError, OpNameError))
            Console(stderr=True, highlight=False).print(f"error: {error}", markup=False, soft_wrap=True)
            sys.exit(WRONG if wrong else PROBLEM)


# -- packs -------------------------------------------------------------------------------------------------------------


@app.command()
def packs(as_json: JsonOption = False) -> None:
    """List the packs installed, highest rank first. Exit code 1 if one is broken."""
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
                "error": pack.error,
            }
        )
    broken = [row for row in rows if row["error"]]
    if as_json:
        _print_json(rows)
    elif not rows:
        _print("No pack is in use, so no op runs on device 'jax'. Install one: pip install torchax-ops-aten")
    else:
        shown = Table("pack", "distribution", "serves", "definitions")
        for row, pack in zip(rows, table.packs, strict=True):
            counts = [(len(pack.ops), "ops"), (len(pack.functions), "functions")]
            summary = [*pack.namespaces, *(f"{count} {what}" for count, what in counts if count)]
            state = "[red]broken, left out" if row["error"] else str(row["definitions"])
            shown.add_row(pack.name, pack.distribution, ", ".join(summary), state)
        Console().print(shown)
        for row in broken:
            _print(f"\n{row['error']}")
    raise typer.Exit(PROBLEM if broken else 0)


# -- ops ---------------------------------------------------------------------------------------------------------------


@app.command()
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
        raise UnknownPackError(f"no pack called {pack!r} is in use.{_near(pack, names)} In use: {', '.join(names)}.")
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
        _print_json(rows)
        return
    for row in rows:
        if missing:
            _print(f"{row['op']:50} {row['reason']}")
        else:
            _print(f"{row['op']:50} {row['kind']:13} {row['file']}:{row['line']}")
    _print(f"{len(rows)} ops", stderr=True)


def _missing(table: OpTable) -> Iterator[dict[str, Any]]:
    for owner, definition in table.all_definitions():
        if definition.kind != "function" and find_op(definition.op) is None:
            reason = f"defined by {definition.origin}, but torch {torch.__version__} has no such op"
            yield {"op": definition.op, "pack": owner.name, "reason": reason}
    namespaces = {"aten", *(n for p in table.packs for n in p.namespaces)}
    for name in _torch_ops():
        func = find_op(name) if name.partition("::")[0] in namespaces else None
        if func is not None and name not in BUILTINS and next(table.chain(func), None) is None:
            yield {"op": name, "pack": None, "reason": "nobody defines it"}


def _torch_ops() -> list[str]:
    return sorted(torch._C._dispatch_get_all_op_names())


# -- explain -----------------------------------------------------------------------------------------------------------


@app.command()
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
        _print_json(rows)
    else:
        for x in explanations:
            _print(x.schema if "::" in x.op else f"{x.op} (a torch function)")
            for i, source in enumerate(x.chain):
                way = _way(source)
                via = f", derived from {way['via']}" if way["via"] else ""
                _print(f"  {'runs by' if i == 0 else 'over'}: {way['level']} {way['kind']}{via}, {way['where']}")
                if i == 0 and way["doc"]:
                    _print(f"           {way['doc']}")
            if not x.chain:
                _print("  " + (x.missing or "only torch's own code runs it").replace("\n", "\n  "))
    raise typer.Exit(PROBLEM if any(x.missing for x in explanations) else 0)


def _named(op: str) -> list[Any]:
    """The torch ops that `op` stands for; [op] for a torch function. Raises OpNameError for an unknown name."""
    if "::" not in op:
        if find_function(op) is None:
            raise OpNameError(
                f"{op!r} is neither an op ('aten::add.Tensor') nor a torch function ('torch.einsum').{_near_op(op)}"
            )
        return [op]
    every = _torch_ops()
    names = [op] if op in every else [name for name in every if name.partition(".")[0] == op]
    funcs = [func for func in map(find_op, names) if func is not None]
    if not funcs:
        raise OpNameError(f"torch {torch.__version__} has no op {op!r}.{_near_op(op)}")
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


def _near_op(op: str) -> str:
    """Where to look instead: the op's overloads, an op or function of that name elsewhere, or the nearest names."""
    every = _torch_ops()
    base = op.partition(".")[0] if "::" in op else op.rpartition(".")[2]
    suffix = base.rpartition("::")[2]
    overloads = [name for name in every if name.partition(".")[0] == base]
    if overloads:
        return f" Its overloads: {', '.join(overloads)}."
    same = [name for name in every if name.partition(".")[0].endswith(f"::{suffix}")]
    if same:
        return f" Did you mean one of {', '.join(same[:6])}?"
    if "::" in op:
        return _near(op, every)
    modules = ("torch", "torch.nn.functional", "torch.linalg", "torch.fft", "torch.special")
    return _near(
        op,
        [f"{module}.{name}" for module in modules for name in dir(importlib.import_module(module)) if name[0] != "_"],
    )


def _near(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, 3)
    return f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


# -- doctor ------------------------------------------------------------------------------------------------------------


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Check this installation: versions, devices, packs, and whether ops run. Exit code 1 if a check fails."""
    checks = []
    for name, check in _CHECKS.items():
        try:
            found, good = check(), True
        except Exception as error:
            found, good = f"{type(error).__name__}: {error}", False
        checks.append({"check": name, "ok": good, "found": found})
        if not as_json:
            _print(f"{'ok  ' if good else 'FAIL'} {name}: {found}")
    failed = [check for check in checks if not check["ok"]]
    if as_json:
        _print_json(checks)
    else:
        _print("all is well" if not failed else f"{len(failed)} of {len(checks)} checks failed")
    raise typer.Exit(PROBLEM if failed else 0)


def _check_versions() -> str:
    found = {"python": platform.python_version()}
    for name in ("torch", "jax", "jaxlib", "numpy", "pluggy"):
        found[name] = importlib.metadata.version(name)
    ours = {d.name: d.version for d in importlib.metadata.distributions() if d.name and d.name.startswith("torchax-")}
    problems = []
    for name in ours:
        problems += _unmet(name)
    if problems:
        raise RuntimeError("; ".join(problems))
    return ", ".join(f"{name} {version}" for name, version in (found | dict(sorted(ours.items()))).items())


def _unmet(distribution: str) -> list[str]:
    """Requirements of a distribution that what is installed does not meet."""
    from packaging.requirements import Requirement

    problems = []
    for text in importlib.metadata.requires(distribution) or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{distribution} needs {requirement}, which is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{distribution} needs {requirement}, but {version} is installed")
    return problems


def _check_settings() -> str:
    Config.from_environment()
    names = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(("TORCHAX_", "JAX_"))]
    return ", ".join(names) or "no TORCHAX_* or JAX_* variable is set"


def _check_devices() -> str:
    return f"{jax.default_backend()}: " + ", ".join(str(device) for device in jax.devices())


def _check_packs() -> str:
    table = OpTable(Config.from_environment())
    counts = {pack.name: len(table.host.definitions(pack, table.config)) for pack in table.packs}
    if errors := [pack.error.partition("\n")[0] for pack in table.packs if pack.error]:
        raise RuntimeError("; ".join(errors))
    if not counts:
        raise RuntimeError("no pack is in use: pip install torchax-ops-aten")
    return ", ".join(f"{name} ({count} definitions)" for name, count in counts.items())


def _check_op() -> str:
    started = time.perf_counter()
    x = torch.arange(3.0, device="jax")
    first = time.perf_counter() - started
    if (x + 1).tolist() != [1.0, 2.0, 3.0]:
        raise RuntimeError(f"arange(3) + 1 gives {(x + 1).tolist()}")
    return f"arange and add on {x.device} (the first op took {first:.2f} s)"


def _check_gradient() -> str:
    x = torch.tensor([1.0, 2.0], device="jax", requires_grad=True)
    (x * x).sum().backward()
    if x.grad is None or x.grad.tolist() != [2.0, 4.0]:
        raise RuntimeError(f"the gradient of sum(x * x) at [1, 2] is {x.grad}")
    return "backward through mul and sum"


def _check_jit() -> str:
    import torchax_core

    square = torchax_core.jit(lambda x: x * x)
    if square(torch.tensor([3.0], device="jax")).tolist() != [9.0]:
        raise RuntimeError("a jitted square is wrong")
    return "a function compiles and runs"


_CHECKS: dict[str, Callable[[], str]] = {
    "versions": _check_versions,
    "settings": _check_settings,
    "jax devices": _check_devices,
    "packs": _check_packs,
    "an op": _check_op,
    "a gradient": _check_gradient,
    "jit": _check_jit,
}


# -- printing ----------------------------------------------------------------------------------------------------------


def _print(text: str, *, stderr: bool = False) -> None:
    # plain: piped to grep, an op's line must stay one line
    print(text, file=sys.stderr if stderr else sys.stdout)


def _print_json(value: Any) -> None:
    _print(json.dumps(value, indent=1))


if __name__ == "__main__":
    main()
