"""`torchax_core.report()`: what this process runs with, what it has compiled so far, and what it holds."""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import jax
import torch

from torchax_core import counters
from torchax_core.environment import current_env
from torchax_core.hookspecs import PACK_API
from torchax_core.kernel import _all as _kernels

__all__ = ["Report", "report", "versions"]


@dataclasses.dataclass(frozen=True)
class Report:
    """What `torchax_core.report()` gives: to read as text, to store as `as_dict()` or `json()`.

    versions: of Python, torch, jax and every torchax distribution.
    devices:  of jax: id, platform, kind; bytes of the arrays that live there; and what the device says of its memory.
    packs:    name, distribution with version, api (TORCHAX_PACK_API), state ("in use", "not asked yet", "broken"),
              definitions (how many; None before they are asked for), error.
    compiled: programs that XLA was asked for in this process, the user's own JAX functions among them, and seconds.
    kernels:  ops that have run, signatures they hold programs of, signatures that were new since the start.
    jit:      per function of torchax_core.jit that is alive: calls, programs traced, seconds of tracing; hits are the
              calls that traced nothing.
    cache:    the persistent compilation cache: folder, hits and misses in this process, files, bytes; None without one.
    """

    versions: dict[str, str]
    devices: list[dict[str, Any]]
    packs: list[dict[str, Any]]
    compiled: dict[str, Any]
    kernels: dict[str, int]
    jit: list[dict[str, Any]]
    cache: dict[str, Any] | None

    def as_dict(self) -> dict[str, Any]:
        """As dicts, lists, strings and numbers."""
        return dataclasses.asdict(self)

    def json(self) -> str:
        """As JSON."""
        return json.dumps(self.as_dict(), indent=1)

    def __str__(self) -> str:
        lines = ["versions  " + ", ".join(f"{name} {version}" for name, version in self.versions.items())]
        for device in self.devices:
            lines.append(f"device    {device['name']} ({device['kind']}): {_size(device['live_bytes'])} in live arrays")
        for pack in self.packs:
            count = f", {pack['definitions']} definitions" if pack["definitions"] is not None else ""
            error = ": " + pack["error"].partition("\n")[0] if pack["error"] else ""
            lines.append(
                f"pack      {pack['name']} ({pack['distribution']}, api {pack['api']}): {pack['state']}{count}{error}"
            )
        lines.append(f"compiled  {self.compiled['programs']} programs in {self.compiled['seconds']:.2f} s")
        lines.append("kernels   {ops} ops, {signatures} signatures, {new} new ones so far".format(**self.kernels))
        for function in self.jit:
            lines.append(
                "jit       {name}: {calls} calls, {hits} hits, {traced} traced in {seconds:.2f} s".format(**function)
            )
        if self.cache is None:
            lines.append("cache     no persistent cache (Config.compilation_cache, TORCHAX_CACHE)")
        else:
            size = _size(self.cache["bytes"])
            lines.append(
                "cache     {folder}: {hits} hits, {misses} misses, {files} files".format(**self.cache) + f", {size}"
            )
        return "\n".join(lines)

    __repr__ = __str__


def report() -> Report:
    """What this process runs with, has compiled so far, and holds: versions, devices, packs, programs, caches, bytes.

    Counts come from where programs are made, and cost a running program nothing. A pack that has not been asked for its
    definitions is not imported for this.
    """
    functions = sorted(counters.jitted, key=lambda function: function.name)
    held = list(_kernels)
    return Report(
        versions=versions(),
        devices=_devices(),
        packs=[_pack(pack) for pack in current_env().packs],
        compiled={"programs": counters.total.compiled, "seconds": round(counters.total.seconds, 6)},
        kernels={
            "ops": sum(bool(kernel.entries) for kernel in held),
            "signatures": sum(len(kernel.entries) for kernel in held),
            "new": counters.signatures,
        },
        jit=[_jit(function) for function in functions if function.calls or function.compilations],
        cache=_cache(),
    )


def versions() -> dict[str, str]:
    """Of Python, what torchax stands on, and every torchax distribution."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}  # with the build: 2.14.1+cpu
    for name in ("jax", "jaxlib", "numpy", "pluggy"):
        found[name] = importlib.metadata.version(name)
    ours = {d.name: d.version for d in importlib.metadata.distributions() if d.name and d.name.startswith("torchax-")}
    return found | dict(sorted(ours.items()))


def _devices() -> list[dict[str, Any]]:
    live: collections.Counter[int] = collections.Counter()
    for array in jax.live_arrays():
        if not array.is_deleted():
            for shard in array.addressable_shards:
                live[shard.device.id] += shard.data.nbytes
    return [
        {
            "name": str(device),
            "id": device.id,
            "platform": device.platform,
            "kind": device.device_kind,
            "live_bytes": live[device.id],
            "memory": dict(device.memory_stats() or {}) if device.process_index == jax.process_index() else {},
        }
        for device in jax.devices()
    ]


def _pack(pack: Any) -> dict[str, Any]:
    asked = pack.sets is not None
    return {
        "name": pack.name,
        "distribution": pack.distribution,
        "api": getattr(pack.module, "TORCHAX_PACK_API", None if pack.error else PACK_API),
        "state": "broken" if pack.error else "in use" if asked else "not asked yet",
        "definitions": len(pack.definitions) if asked else None,
        "error": pack.error,
    }


def _jit(function: Any) -> dict[str, Any]:
    made = function.compilations
    return {
        "name": function.name,
        "calls": function.calls,
        "hits": max(function.calls - len(made), 0),
        "traced": len(made),
        "seconds": round(sum(c.seconds for c in made), 6),
    }


def _cache() -> dict[str, Any] | None:
    folder = jax.config.jax_compilation_cache_dir
    if not folder:
        return None
    files = [file for file in Path(folder).rglob("*") if file.is_file()]
    return {
        "folder": folder,
        "hits": counters.total.cache_hits,
        "misses": counters.total.cache_misses,
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
    }


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
