"""Finding packs (entry points of the group `torchax.op_packs`), hosting them (pluggy), and reporting the broken ones.

Discovery happens once a process. What a pack serves is read from the source of its pack module (manifest.py); the pack
is imported when an op that it serves is first met. A pack that fails is left out with everything it had given so far; a
definition that does not fit the torch installed is left out alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import importlib.metadata
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import pluggy

from torchax_core import hookspecs
from torchax_core.config import Config
from torchax_core.errors import PackError, PackNameError, PackWarning, SignatureError, UnknownPackError
from torchax_core.manifest import CONSTANTS, Manifest, read_manifest
from torchax_core.opset import Definition, OpSet
from torchax_core.signatures import check_signature
from torchax_core.variants import find_op

__all__ = ["GROUP", "Pack", "PackHost", "host"]

GROUP = "torchax.op_packs"


@dataclasses.dataclass(eq=False)
class Pack:
    """One installed pack.

    name:          the entry point's name; what TORCHAX_PACKS and Config speak of.
    distribution:  "torchax-ops-aten 0.1.0", or "offered at run time".
    target:        the module the entry point names.
    module:        that module, once it has been imported.
    error:         None, or what went wrong, with its traceback; a pack with an error serves nothing.
    known:         whether namespaces, ops, functions, and the packs it goes before, have been read.
    sets:          its op sets, once they have been asked for.
    definitions:   what they define, by op name.
    misfits:       why a definition of theirs is not among these, by op name: it does not fit the torch installed.
    """

    name: str
    distribution: str
    target: str
    point: Any = None
    module: Any = None
    error: str | None = None
    known: bool = False
    namespaces: tuple[str, ...] = ()
    ops: frozenset[str] = frozenset()
    functions: frozenset[str] = frozenset()
    before: frozenset[str] = frozenset()
    sets: list[OpSet] | None = None
    definitions: dict[str, Definition] = dataclasses.field(default_factory=dict)
    misfits: dict[str, str] = dataclasses.field(default_factory=dict)

    def serves(self, op: str) -> bool:
        """Whether the pack says it may define `op`."""
        return op in self.ops or op.partition("::")[0] in self.namespaces or op in self.functions

    def forget(self) -> None:
        """Be as found: nothing read, nothing imported, no fault."""
        self.module, self.error, self.known = None, None, False
        self.sets, self.definitions, self.misfits = None, {}, {}


class PackHost:
    """All packs installed, imported as far as needed. One a process: :func:`host`."""

    def __init__(self, entry_points: Iterable[Any] | None = None) -> None:
        self._given = entry_points
        self._lock = threading.RLock()
        self._packs: dict[str, Pack] | None = None
        self._busy: set[Pack] = set()
        self._missed = False
        self._manager = pluggy.PluginManager("torchax")
        self._manager.add_hookspecs(hookspecs)
        self.on_known: list[Callable[[Pack], None]] = []
        """Called with each pack of which it has become known what it serves."""
        self.on_load: list[Callable[[Pack], None]] = []
        """Called with each pack whose op sets have been loaded."""
        self.on_change: list[Callable[[], None]] = []
        """Called when a pack has come, or is to be asked anew: what was concluded from the packs no longer holds."""

    def offer(self, name: str, target: str) -> None:
        """Add a pack that no entry point names: one under development, not installed yet.

        target: its pack module ("my_pack.pack"), which must be importable. Raises PackNameError if the name is taken.
        """
        with self._lock:
            found = self._discovered()
            if name in found:
                raise PackNameError(
                    f"a pack {name!r} is there already: {found[name].distribution}, {found[name].target}. To have it asked "
                    "anew, use `reload`."
                )
            point = importlib.metadata.EntryPoint(name, target, GROUP)
            found[name] = Pack(name, "offered at run time", target, point)
        self._changed()

    def reload(self, name: str) -> None:
        """Ask a pack anew for what it defines: after its modules have changed, or after a broken one has been repaired.

        Reloads its pack module; modules that this one imports are `importlib.reload`'s to reload, before this. Raises
        UnknownPackError for a name that no pack has, PackError if the pack is broken.
        """
        with self._lock:
            found = self._discovered()
            if name not in found:
                raise UnknownPackError(_unknown(name, "packs", list(found)))
            pack = found[name]
            if self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            pack.forget()
            importlib.invalidate_caches()
            strict = Config(strict=True)
            try:
                if (module := sys.modules.get(pack.target)) is not None:
                    importlib.reload(module)
            except (Exception, SystemExit) as error:
                self._leave_out(pack, error, strict)
            self._learn(pack, strict)
            self.definitions(pack, strict)
        self._changed()

    def _changed(self) -> None:
        for call in self.on_change:
            call()

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
            self._learn(pack, config)
        order = {name: rank for rank, name in enumerate(config.pack_order)}
        return sorted(chosen, key=lambda p: (order.get(p.name, len(order)), p.name))

    def definitions(self, pack: Pack, config: Config) -> dict[str, Definition]:
        """Everything the pack defines, by op name. Imports the pack on first use; empty if it is broken.

        Raises PackError if the pack, or a definition of it, does not fit and `config` is strict.
        """
        with self._lock:
            if pack.sets is None and pack.error is None:
                with self._undisturbed(pack) as first:
                    if first:
                        self._import(pack, config)
                        self._load(pack, config)
            missed = self._missed and not self._busy
            if missed:
                self._missed = False
        if missed:
            self._changed()
        if pack.misfits and config.strict:
            raise PackError("\n".join(pack.misfits.values()))
        return pack.definitions

    @contextlib.contextmanager
    def _undisturbed(self, pack: Pack) -> Iterator[bool]:
        """Around a pack's own code. It may run under a trace, which arrays made at import must not become part of; and it
        may run ops, which must not ask the pack again (False: it is being asked), but do without it for now."""
        if pack in self._busy:
            self._missed = True
            yield False
            return
        self._busy.add(pack)
        try:
            with jax.ensure_compile_time_eval():
                yield True
        finally:
            self._busy.remove(pack)

    def _discovered(self) -> dict[str, Pack]:
        with self._lock:
            if self._packs is None:
                entry_points = self._given if self._given is not None else importlib.metadata.entry_points(group=GROUP)
                packs: dict[str, Pack] = {}
                for point in sorted(entry_points, key=lambda p: (p.name, p.value)):
                    label = _distribution(point)
                    pack = Pack(point.name, label, point.value, point)
                    other = packs.get(point.name) or next((p for p in packs.values() if p.target == point.value), None)
                    if other is not None and (other.name, other.target) != (point.name, point.value):
                        what = f"name a pack {point.name!r}" if other.name == point.name else f"offer {point.value!r}"
                        pack.name = f"{point.name}@{label.partition(' ')[0]}"
                        pack.error = (
                            f"two distributions, {other.distribution} and {label}, both {what}; the first is used. "
                            "Uninstall one of them."
                        )
                        self._report(pack, strict=False)
                    packs.setdefault(pack.name, pack)
                self._packs = packs
            return self._packs

    def _learn(self, pack: Pack, config: Config) -> None:
        """Find out what the pack serves: from its source if that says it, else by importing it."""
        with self._lock:
            if pack.error is not None and config.strict:
                raise PackError(pack.error)
            if pack.error is not None or pack.known or pack in self._busy:
                return
            try:
                manifest = read_manifest(pack.target)
                if manifest is not None:
                    self._take(pack, manifest)
            except Exception as error:
                self._leave_out(pack, error, config)
                return
            # an op that torch does not know yet may be the pack's own: importing the pack registers it
            if manifest is None or any(find_op(op) is None for op in pack.ops if not op.startswith("aten::")):
                with self._undisturbed(pack):
                    self._import(pack, config)
            if pack.error is not None:
                return
            pack.known = True
            try:
                for call in self.on_known:
                    call(pack)
            except Exception as error:
                self._leave_out(pack, error, config)

    def _import(self, pack: Pack, config: Config) -> None:
        if pack.module is not None or pack.error is not None:
            return
        try:
            module = _load_point(pack.point)
            self._take(pack, Manifest.of({name: getattr(module, name) for name in CONSTANTS if hasattr(module, name)}))
            self._manager.register(module, name=pack.name)
            self._reject_unknown_hooks(module)
        except (Exception, SystemExit) as error:
            self._leave_out(pack, error, config)
            return
        pack.module = module

    def _take(self, pack: Pack, manifest: Manifest) -> None:
        if manifest.api != hookspecs.PACK_API:
            raise PackError(
                f"it states TORCHAX_PACK_API = {manifest.api!r}, but this torchax-core speaks {hookspecs.PACK_API}. "
                f"Install a version of {pack.distribution.partition(' ')[0]} made for this core."
            )
        pack.namespaces, pack.ops, pack.functions = manifest.namespaces, manifest.ops, manifest.functions
        pack.before = manifest.before

    def _reject_unknown_hooks(self, module: Any) -> None:
        known = {name for name in vars(hookspecs) if name.startswith("torchax_")}
        for name in dir(module):
            if self._manager.parse_hookimpl_opts(module, name) is not None and name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f" Did you mean {near[0]!r}?" if near else f" Known hooks: {', '.join(sorted(known))}."
                raise PackError(f"it implements {name!r}, which is no hook of torchax.{hint}")

    def _load(self, pack: Pack, config: Config) -> None:
        if pack.error is not None:
            return
        try:
            self._ask(pack, "torchax_configure", config=config)
            sets = self._op_sets(pack)
            definitions: dict[str, Definition] = {}
            for op_set in sets:
                for definition in op_set:
                    earlier = definitions.setdefault(definition.op, definition)
                    if earlier is not definition:
                        raise PackError(
                            f"{definition.op} is defined twice: by {earlier.origin} and {definition.origin}."
                        )
            misfits = _take_misfits(definitions)
            if misfits and config.strict:
                raise next(iter(misfits.values()))
            pack.sets, pack.definitions = sets, definitions
            pack.misfits = {op: str(error) for op, error in misfits.items()}
            for call in self.on_load:
                call(pack)
        except (Exception, SystemExit) as error:
            self._leave_out(pack, error, config)
            return
        for why in pack.misfits.values():
            warnings.warn(
                f"{why} This definition is left out; the others of the pack {pack.name!r} ({pack.distribution}) are used. "
                "(TORCHAX_STRICT=1 raises instead.)",
                PackWarning,
                stacklevel=2,
            )

    def _ask(self, pack: Pack, hook: str, **arguments: Any) -> Any:
        others = [plugin for plugin in self._manager.get_plugins() if plugin is not pack.module]
        return self._manager.subset_hook_caller(hook, others)(**arguments)

    def _op_sets(self, pack: Pack) -> list[OpSet]:
        given = self._ask(pack, "torchax_op_sets")  # at most one answer: a module has one function of that name
        if not given:
            known = hasattr(pack.module, "torchax_op_sets")
            raise PackError(
                "torchax_op_sets returned None; it must return a list of OpSet."
                if known and self._manager.parse_hookimpl_opts(pack.module, "torchax_op_sets") is not None
                else f"it has no hook torchax_op_sets{', for want of the decorator @hookimpl' if known else ''}."
            )
        (answer,) = given
        sets = list(answer) if isinstance(answer, Iterable) and not isinstance(answer, OpSet) else [answer]
        for op_set in sets:
            if not isinstance(op_set, OpSet) or isinstance(answer, OpSet):
                raise PackError(f"torchax_op_sets returned {op_set!r}; it must return a list of OpSet.")
        return sets

    def _leave_out(self, pack: Pack, error: BaseException, config: Config) -> None:
        """Roll back what the pack has registered, keep the reason, and report it once."""
        if self._manager.has_plugin(pack.name):
            self._manager.unregister(name=pack.name)
        pack.definitions, pack.misfits = {}, {}
        pack.sets = []
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
        place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        details = "".join(traceback.format_exception(error)).rstrip()
        pack.error = (
            f"the pack {pack.name!r} ({pack.distribution}, {pack.target}) could not be loaded and is left out: "
            f"{type(error).__name__}: {error}{place}\n{details}"
        )
        pack.module = None
        self._report(pack, strict=config.strict, cause=error)

    def _report(self, pack: Pack, *, strict: bool, cause: BaseException | None = None) -> None:
        if strict:
            raise PackError(pack.error) from cause
        warnings.warn(f"{pack.error}\n(TORCHAX_STRICT=1 raises instead.)", PackWarning, stacklevel=2)


def _take_misfits(definitions: dict[str, Definition]) -> dict[str, SignatureError]:
    """Take out of `definitions` those that do not fit the torch installed: what is wrong with each, by op."""
    misfits = {}
    for op, definition in definitions.items():
        try:
            check_signature(definition)
        except SignatureError as error:
            misfits[op] = error
    for op in misfits:
        del definitions[op]
    return misfits


def _distribution(point: Any) -> str:
    """ "torchax-ops-aten 0.1.0": where an entry point is from."""
    dist = getattr(point, "dist", None)
    try:
        return f"{dist.name} {dist.version}" if dist is not None else "unknown distribution"
    except (AttributeError, KeyError, TypeError):  # its METADATA file is missing or says neither
        return "unknown distribution"


def _load_point(point: Any) -> Any:
    if not getattr(point, "value", "module").replace(".", "").replace(":", "").isidentifier():
        raise PackError(
            f'its entry point names {point.value!r}, which is no module. Write `{point.name} = "my_pack.pack"` under '
            f'[project.entry-points."{GROUP}"].'
        )
    return point.load()


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
