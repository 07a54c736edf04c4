"""`torchax doctor`: whether this installation is sound."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax
import torch
import typer

from torchax_core.cli.output import PROBLEM, JsonOption, print_json, print_text
from torchax_core.config import Config
from torchax_core.registry import OpTable
from torchax_core.reporting import report, versions

__all__ = ["doctor"]


def doctor(as_json: JsonOption = False) -> None:
    """Check this installation: versions, devices, packs, and whether ops run. Exit code 1 if a check fails.

    With --json: the checks, and torchax_core.report() after them.
    """
    checks = []
    for name, check in _CHECKS.items():
        try:
            found, good = check(), True
        except Exception as error:
            found, good = f"{type(error).__name__}: {error}", False
        checks.append({"check": name, "ok": good, "found": found})
        if not as_json:
            print_text(f"{'ok  ' if good else 'FAIL'} {name}: {found}")
    failed = [check for check in checks if not check["ok"]]
    if as_json:
        print_json({"ok": not failed, "checks": checks, "report": report().as_dict()})
    else:
        print_text("all is well" if not failed else f"{len(failed)} of {len(checks)} checks failed")
    raise typer.Exit(PROBLEM if failed else 0)


def _check_versions() -> str:
    found = versions()
    ours = [name for name in found if name.startswith("torchax-")]
    problems = []
    for name in ours:
        problems += _unmet(name)
    if problems:
        raise RuntimeError("; ".join(problems))
    return ", ".join(f"{name} {version}" for name, version in found.items())


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
    errors = [pack.error.partition("\n")[0] for pack in table.packs if pack.error]
    if errors := [*errors, *(why for pack in table.packs for why in pack.misfits.values())]:
        raise RuntimeError("; ".join(errors))
    if not counts:
        raise RuntimeError("no pack is in use: pip install torchax-ops-aten")
    return ", ".join(f"{name} ({count} definitions)" for name, count in counts.items())


def _check_cache() -> str:
    folder = Config.from_environment().compilation_cache
    if folder is None:
        return "none; TORCHAX_CACHE=FOLDER keeps compiled programs from one process to the next"
    path = Path(folder)
    if path.exists() and not (path.is_dir() and os.access(path, os.W_OK | os.X_OK)):
        raise RuntimeError(f"TORCHAX_CACHE={folder} is no folder that can be written to: choose another, or `chmod` it")
    files = [file for file in path.rglob("*") if file.is_file()]
    return f"{folder}: {len(files)} files, {sum(file.stat().st_size for file in files) / 2**20:.1f} MiB"


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
    "compilation cache": _check_cache,
    "an op": _check_op,
    "a gradient": _check_gradient,
    "jit": _check_jit,
}
