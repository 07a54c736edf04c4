"""Finding packs (entry points of the group `torchax.op_packs`), hosting them (pluggy), and reporting the broken ones.

Discovery happens once a process. What a pack serves is read from constants of its pack module; its families are imported
when an op of theirs is first met. A pack that fails is left out with everything it had given so far.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pluggy

from torchax_core import hookspecs
from torchax_core.config import Config
from torchax_core.errors import PackError, PackWarning, UnknownPackError
from torchax_core.opset import Definition, OpSet
from torchax_core.signatures import check_signature

__all__ = ["GROUP", "Pack", "PackHost", "host"]

GROUP = "torchax.op_packs"


@dataclasses.dataclass(eq=False)
class Pack:
    """One installed pack.

    name:          the entry point's name; what TORCHAX_PACKS and Config speak of.
    distribution:  "torchax-ops-aten 0.1.0", or "given at run time".
    target:        the module the entry point names.
    error:         None, or what went wrong, with its traceback; a pack with an error serves nothing.
    """

    name: str
    distribution: str
    target: str
    point: Any = None
    module: Any = None
    error: str | None = None
    namespaces: tuple[str, ...] = ()
    ops: frozenset[str] = frozenset()
    functions: frozenset[str] = frozenset()
    sets: list[OpSet] | None = None
    definitions: dict[str, Definition] = dataclasses.field(default_factory=dict)

    def serves(self, op: str) -> bool:
        """Whether the pack says it may define `op`."""
        return op in self.ops or op.partition("::")[0] in self.namespaces or op in self.functions


class PackHost:
    """All packs installed, imported as far as needed. One a process: :func:`host`."""

    def __init__(self, entry_points: Iterable[Any] | None = None) -> None:
        self._given = entry_points
        self._lock = threading.RLock()
        self._packs: dict[str, Pack] | None = None
        self._manager = pluggy.PluginManager("torchax")
        self._manager.add_hookspecs(hookspecs)
        self.on_load: list[Callable[[Pack], None]] = []
        """Called with each pack whose op sets have been loaded."""
        self.on_import: list[Callable[[Pack], None]] = []
        """Called with each pack whose constants have been read."""

    def packs(self, config: Config) -> list[Pack]:
        """The packs that `config` chooses, broken ones included, highest rank first, then by name.

        Raises UnknownPackError for a name in `config` that no installed pack has; PackError for a broken pack if strict.
        """
        found = self._discovered()
        for setting in ("packs", "blocked_packs", "pack_order"):
            for name in getattr(config, setting) or ():
                if name not in found:
                    raise UnknownPackError(_unknown(name, setting, list(found)))
        chosen = [
            p for n, p in found.items() if (config.packs is None or n in config.packs) and n not in config.blocked_packs
        ]
        for pack in chosen:
            self._import(pack, config)
        order = {name: rank for rank, name in enumerate(config.pack_order)}
        return sorted(chosen, key=lambda p: (order.get(p.name, len(order)), p.name))

    def definitions(self, pack: Pack, config: Config) -> dict[str, Definition]:
        """Everything the pack defines, by op name. Imports its families on first use; empty if it is broken."""
        with self._lock:
            if pack.sets is None and pack.error is None:
                self._load(pack, config)
            return pack.definitions

    def _discovered(self) -> dict[str, Pack]:
        with self._lock:
            if self._packs is None:
                entry_points = self._given if self._given is not None else importlib.metadata.entry_points(group=GROUP)
                packs: dict[str, Pack] = {}
                for point in sorted(entry_points, key=lambda p: (p.name, p.value)):
                    dist = getattr(point, "dist", None)
                    label = f"{dist.name} {dist.version}" if dist is not None else "unknown distribution"
                    pack = Pack(point.name, label, point.value, point)
                    if point.name in packs and packs[point.name].target != point.value:
                        other = packs[point.name]
                        pack.name = f"{point.name}@{label.partition(' ')[0]}"
                        pack.error = (
                            f"two distributions, {other.distribution} and {label}, both name a pack {point.name!r}; the "
                            f"first is used. Uninstall one of them."
                        )
                        self._report(pack, strict=False)
                    packs.setdefault(pack.name, pack)
                self._packs = packs
            return self._packs

    def _import(self, pack: Pack, config: Config) -> None:
        with self._lock:
            if pack.error is not None or pack.module is not None:
                if pack.error is not None and config.strict:
                    raise PackError(pack.error)
                return
            try:
                module = pack.point.load()
                api = getattr(module, "TORCHAX_PACK_API", None)
                if api != hookspecs.PACK_API:
                    raise PackError(
                        f"it states TORCHAX_PACK_API = {api!r}, but this torchax-core speaks {hookspecs.PACK_API}. "
                        f"Install a version of {pack.distribution.partition(' ')[0]} made for this core."
                    )
                pack.namespaces = _names(module, "TORCHAX_NAMESPACES")
                pack.ops = frozenset(_names(module, "TORCHAX_OPS"))
                pack.functions = frozenset(_names(module, "TORCHAX_FUNCTIONS"))
                self._manager.register(module, name=pack.name)
                self._reject_unknown_hooks(module)
            except Exception as error:
                self._leave_out(pack, error, config)
                return
            pack.module = module
            for call in self.on_import:
                call(pack)

    def _reject_unknown_hooks(self, module: Any) -> None:
        known = {name for name in vars(hookspecs) if name.startswith("torchax_")}
        for name in dir(module):
            if self._manager.parse_hookimpl_opts(module, name) is not None and name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f" Did you mean {near[0]!r}?" if near else f" Known hooks: {', '.join(sorted(known))}."
                raise PackError(f"it implements {name!r}, which is no hook of torchax.{hint}")

    def _load(self, pack: Pack, config: Config) -> None:
        try:
            caller = self._manager.subset_hook_caller(
                "torchax_configure", [p for p in self._manager.get_plugins() if p is not pack.module]
            )
            caller(config=config)
            caller = self._manager.subset_hook_caller(
                "torchax_op_sets", [p for p in self._manager.get_plugins() if p is not pack.module]
            )
            sets = [op_set for given in caller() for op_set in given]
            definitions: dict[str, Definition] = {}
            for op_set in sets:
                if not isinstance(op_set, OpSet):
                    raise PackError(f"torchax_op_sets returned {op_set!r}; it must return a list of OpSet.")
                for definition in op_set:
                    earlier = definitions.setdefault(definition.op, definition)
                    if earlier is not definition:
                        raise PackError(
                            f"{definition.op} is defined twice: by {earlier.origin} and {definition.origin}."
                        )
                    check_signature(definition)
        except Exception as error:
            self._leave_out(pack, error, config)
            return
        pack.sets = sets
        pack.definitions = definitions
        for call in self.on_load:
            call(pack)

    def _leave_out(self, pack: Pack, error: Exception, config: Config) -> None:
        """Roll back what the pack has registered, keep the reason, and report it once."""
        if self._manager.has_plugin(pack.name):
            self._manager.unregister(name=pack.name)
        pack.definitions = {}
        pack.sets = []
        frames = traceback.extract_tb(error.__traceback__)
        place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        details = "".join(traceback.format_exception(error)).rstrip()
        pack.error = (
            f"the pack {pack.name!r} ({pack.distribution}, {pack.target}) could not be loaded and is left out: "
            f"{type(error).__name__}: {error}{place}\n{details}"
        )
        pack.module = None
        self._report(pack, strict=config.strict, cause=error)

    def _report(self, pack: Pack, *, strict: bool, cause: Exception | None = None) -> None:
        if strict:
            raise PackError(pack.error) from cause
        warnings.warn(f"{pack.error}\n(TORCHAX_STRICT=1 raises instead.)", PackWarning, stacklevel=2)


def _names(module: Any, constant: str) -> tuple[str, ...]:
    value = getattr(module, constant, ())
    if isinstance(value, str) or not all(isinstance(v, str) for v in value):
        raise PackError(f"its {constant} must be a tuple of strings, but is {value!r}.")
    return tuple(value)


def _unknown(name: str, setting: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    suggestion = f" Did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(known) if known else "none; install one with `pip install torchax-ops-aten`"
    return f"no installed pack is called {name!r} (from TORCHAX_PACKS or Config.{setting}).{suggestion} Installed: {listed}."


_host: PackHost | None = None
_host_lock = threading.Lock()


def host() -> PackHost:
    """The process's pack host."""
    global _host
    with _host_lock:
        if _host is None:
            _host = PackHost()
        return _host
