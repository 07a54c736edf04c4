"""Environment: what is in force for the ops of a thread: settings, overrides, random key. One default per process.

    env = torchax_core.default_env()
    with env.override_op_definition("aten::exp", my_exp, is_jax_function=True):
        y = model(x)

`with Environment(...):` makes another one active in this thread; nesting counts, and threads do not see each other's.
The autograd engine's own threads run in the environment of the thread that called backward.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch

from torchax_core import bridge, composite, functions, log, transforms
from torchax_core.carried import carried, carry
from torchax_core.config import Config
from torchax_core.device import register_factories
from torchax_core.errors import OpNameError
from torchax_core.forking import watch_forks
from torchax_core.kernel import DataDependentKernel, DirectKernel, ViewKernel, lowering_kernel
from torchax_core.opset import Definition, Origin, ViewDefinition, ViewRules
from torchax_core.overrides import DecliningKernel
from torchax_core.packs import host
from torchax_core.random import RandomState
from torchax_core.registry import OpTable, Source, is_composite
from torchax_core.tensor import active
from torchax_core.variants import find_op, op_name, variant_of
from torchax_core.writing import WritingKernel

__all__ = ["Environment", "Explanation", "Override", "current_env", "default_env", "override_op_definition"]

_TLS_KEY = "torchax_environment"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Who defines an op. `chain` is every candidate, the first is the one that runs; `str()` is for reading."""

    op: str
    schema: str
    chain: tuple[Source, ...]
    missing: str | None = None

    @property
    def source(self) -> Source | None:
        """The candidate that runs, or None if nobody defines the op."""
        return self.chain[0] if self.chain else None

    def __str__(self) -> str:
        lines = [self.op, f"  schema: {self.schema}"]
        for i, source in enumerate(self.chain):
            lines.append(f"  {'runs by' if i == 0 else 'over'}: {source}")
        if self.missing:
            lines.append("  " + self.missing.replace("\n", "\n  "))
        return "\n".join(lines)


_numbers = itertools.count()


class Override:
    """A definition put in force at run time. `undo()` takes it back; as a context manager it does so at the end."""

    def __init__(self, owner: Any, definition: Definition) -> None:
        self._owner = owner
        self.definition = definition
        self.active = True
        self.number = next(
            _numbers
        )  # of two overrides that concern an op, by its name or all its overloads', which is newer
        self.watched: list[Any] = []  # composite ops, for torch.func
        self.running = threading.local()  # `now`: what it calls goes past it

    def undo(self) -> None:
        """Take the override back; in any order, and twice is no fault."""
        if self.active:
            self.active = False
            self._owner._remove(self)
            for func in self.watched:
                transforms.pass_by(func)

    def __enter__(self) -> Override:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.undo()

    def __repr__(self) -> str:
        state = "" if self.active else ", undone"
        return f"Override({self.definition.op!r}, {self.definition.origin}{state})"


class _Overrides:
    """A stack of overrides per op name; the newest is asked first."""

    def __init__(self) -> None:
        self.by_op: dict[str, list[Override]] = {}
        self.version = 0
        self.lock = threading.RLock()

    def add(self, override: Override) -> None:
        with self.lock:
            self.by_op.setdefault(override.definition.op, []).append(override)
            self.version += 1

    def remove(self, override: Override) -> None:
        with self.lock:
            stack = self.by_op.get(override.definition.op, [])
            if override in stack:
                stack.remove(override)
            if not stack:
                self.by_op.pop(override.definition.op, None)
            self.version += 1

    def of(self, name: str) -> list[Override]:
        """Overrides for an op's full name, or for all overloads of its base name, the newest first."""
        found = [*self.by_op.get(name.partition(".")[0] + ".*", ()), *self.by_op.get(name, ())]
        return sorted(found, key=lambda override: -override.number)


class Environment(contextlib.ContextDecorator):
    """Settings, overrides and random key; active in a thread from `with env:` on, or as the process's default.

    config: the settings; what TORCHAX_PACKS and its kin say is the default.
    seed:   of the random key; torch.manual_seed sets it again, for every environment.
    """

    _default: Environment | None = None
    _everywhere = _Overrides()
    _default_lock = threading.RLock()
    _all: list[Any] = []

    def __init__(self, config: Config | None = None, *, seed: int | None = None) -> None:
        self.config = config or Config.from_environment()
        self._random = RandomState(torch.initial_seed() if seed is None else seed, self.config.random_impl)
        self._random_here = threading.local()
        self._table = OpTable(self.config)
        self._overrides = _Overrides()
        self._kernels: dict[Any, Any] = {}
        self._lock = threading.RLock()
        self._previous = threading.local()
        self._root = self  # the environment that this one is the watched twin of
        self._watch: Any = None  # what watches calls in it (watching.py); None: nothing does
        self._checks: list[Any] = []
        if self.config.debug_accuracy or self.config.debug_nans or self.config.debug_infs:
            from torchax_core.watching import checks_of

            self._checks = checks_of(self.config)
        Environment._all.append(weakref.ref(self))
        if self.config.compilation_cache:
            from torchax_core.caches import use_compilation_cache

            use_compilation_cache(self.config.compilation_cache)

    # -- active in a thread ----------------------------------------------------------------------

    def __enter__(self) -> Environment:
        stack = getattr(self._previous, "stack", None)
        if stack is None:
            stack = self._previous.stack = []
        stack.append((active.environment, active.kernels))
        self._activate()
        return self

    def __exit__(self, *exc: Any) -> None:
        environment, kernels = self._previous.stack.pop()
        if environment is None:
            active.environment = None
            active.kernels = None
            carry(_TLS_KEY, None)
        else:
            environment._activate()
            if kernels is not None and active.trace is not None:
                active.kernels = kernels

    def _activate(self) -> None:
        active.environment = self
        active.kernels = self._lookup() if active.trace is None else active.trace.kernels(self)
        # the autograd engine hands this on to the threads that run backward
        carry(_TLS_KEY, self)

    @classmethod
    def _attach_thread(cls) -> Any:
        """Find this thread's environment at its first op; returns the look-up from op to kernel."""
        environment = carried(_TLS_KEY) or default_env()
        active.environment = environment
        if not isinstance(threading.current_thread(), threading._DummyThread):
            # A thread of the autograd engine serves callers of any environment, so it asks each time.
            active.kernels = environment._lookup()
        return environment._lookup()

    def _lookup(self) -> Any:
        """What a thread asks for kernels: this environment's, or, where calls are watched, the same with checks around."""
        if not self._checks and not log.ops:
            self._watch = None
            return self._kernels
        if self._watch is None or self._watch.logs is not log.ops:
            from torchax_core.watching import Watch

            self._watch = Watch(self, self._checks, logs=log.ops)
        return self._watch

    def _watched_by(self, check: Any) -> Environment:
        """This environment, sharing all that it has, with one more check on every call made in it."""
        twin = copy.copy(self)
        twin._checks = [*self._checks, check]
        twin._previous, twin._watch = threading.local(), None
        return twin

    # -- ops -------------------------------------------------------------------------------------

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever a definition does; part of the key of every compiled function."""
        return (self._overrides.version, Environment._everywhere.version)

    def _kernel(self, func: Any) -> Any:
        """The kernel of a torch op, made on first use and kept until an override concerns it."""
        with self._lock:
            kernel = self._kernels.get(func)
            if kernel is None:
                kernel = self._make_kernel(func)
                self._kernels[func] = kernel
            return kernel

    def _make_kernel(self, func: Any, skip: int = 0) -> Any:
        from torchax_core.builtins import BUILTINS

        name = op_name(func)
        self._table.load()
        overrides = self._relevant(func)
        if skip < len(overrides):
            override, variant = overrides[skip]
            return DecliningKernel(
                _override_kernel(func, override.definition, variant),
                override,
                lambda: self._make_kernel(func, skip + 1),
            )
        builtin = BUILTINS.get(name)
        if builtin is not None:
            return DirectKernel(func, builtin(self, func))
        return self._pack_kernel(func)

    def _pack_kernel(self, func: Any) -> Any:
        """The kernel below the core's own device ops, for those that hand on."""
        return self._table.kernel(func)

    def _relevant(self, func: Any) -> list[tuple[Override, Any]]:
        """Overrides that decide how `func` runs: its own, then its functional twin's."""
        name = op_name(func)
        found: list[tuple[Override, Any]] = []
        stores = (self._overrides, Environment._everywhere)
        for store in stores:
            found += [(o, None) for o in store.of(name)]
        variant = variant_of(func) if func._schema.is_mutable else None
        if variant is not None:
            for store in stores:
                found += [(o, variant) for o in store.of(op_name(variant.twin)) if o.definition.op != name]
        return found

    def override_op_definition(
        self, op: Any, impl: Callable[..., Any], *, is_jax_function: bool = False, is_view_op: bool = False
    ) -> Override:
        """Let `impl` run `op`, in this environment, from now on (functions compiled by torchax_core.jit included).

        op:    "aten::exp", "aten::add.Tensor", a torch.ops object, or a torch function (or its dotted name). A function that is
               one op, as torch.exp is, means that op with all its overloads; "aten::max" the overload of that very name; a
               name that no overload has, "aten::add", all of them.
        impl:  with is_jax_function, a pure JAX function with the op's parameters, differentiable by jax.vjp where torch
               decomposes the op itself; else torch code. NotImplemented declines, and the next definition is asked.
               Tensors arrive as arrays, Scalars as traced 0-d arrays; floats (dropout_p, eps), ints and bools as values.
        Returns a handle: `handle.undo()`, or `with env.override_op_definition(...):`.
        Raises OpNameError for an op torch does not know.
        """
        return _override(self, self._overrides, op, impl, is_jax_function, is_view_op)

    def _changed(self) -> None:
        with self._lock:
            self._kernels.clear()

    def _remove(self, override: Override) -> None:
        self._overrides.remove(override)
        self._changed()
        functions.refresh()

    def explain(self, op: Any) -> Explanation:
        """Who defines `op`, where, what it overrides, and what is missing. Raises OpNameError for an unknown op."""
        func = resolve_op(op)
        if isinstance(func, torch._ops.OpOverloadPacket):
            func = getattr(func, func.overloads()[0])
        if func is None or not hasattr(func, "_schema"):
            function = functions.find_function(op) if isinstance(op, str) else op
            name = op if function is None else functions.function_name(function)
            found = functions.chain(self, name)
            if found or func is not None or functions.find_function(name) is not None:
                return Explanation(
                    name, "a torch function", tuple(Source(level, str(d.origin), d) for level, d in found)
                )
            raise OpNameError(unknown_op(op))
        chain = [
            Source("override", str(o.definition.origin), o.definition, via=op_name(v.twin) if v else None)
            for o, v in self._relevant(func)
        ]
        from torchax_core.builtins import BUILTINS

        name = op_name(func)
        if name in BUILTINS:
            chain.append(Source("core", f"torchax_core.builtins.{BUILTINS[name].__name__}"))
        chain += [source for source, _ in self._table.chain(func)]
        missing = None if chain else self._table.not_found_message(func)
        return Explanation(name, str(func._schema), tuple(chain), missing)

    # -- values for jax and back, by google/torchax's names --------------------------------------

    t2j_iso = staticmethod(bridge.t2j_iso)
    j2t_iso = staticmethod(bridge.j2t_iso)
    t2j_copy = staticmethod(bridge.t2j_copy)
    j2t_copy = staticmethod(bridge.j2t_copy)
    to_xla = staticmethod(bridge.to_xla)

    @property
    def packs(self) -> list[Any]:
        """The packs in force, highest rank first."""
        return self._table.packs

    # -- random numbers --------------------------------------------------------------------------

    @property
    def random(self) -> RandomState:
        """The random key and the count of draws from it, as overridden in this thread."""
        return getattr(self._random_here, "state", None) or self._random

    @property
    def prng_key(self) -> jax.Array:
        """The jax key of the next draw: a function of the seed and of the number of draws so far."""
        return jax.random.fold_in(self.random.key, self.random.count & 0xFFFF_FFFF)

    def get_and_rotate_prng_key(self, generator: torch.Generator | None = None) -> jax.Array:
        """A jax key for one draw of your own; the next is another. `generator`: draw it from a CPU generator instead."""
        key, count = self._random_arguments(generator)
        return jax.random.fold_in(key, count)

    @contextlib.contextmanager
    def override_property(self, *, prng: jax.Array) -> Iterator[None]:
        """Draw random numbers from the jax key `prng` in this thread, until the block ends: same key, same numbers.

        prng: a key of jax.random.key or jax.random.PRNGKey, traced ones too.
        """
        with self.drawing_from(RandomState.of_key(prng, self.config.random_impl)):
            yield

    @contextlib.contextmanager
    def drawing_from(self, state: RandomState) -> Iterator[None]:
        """As override_property, with the key and count of a random state, which moves on with the draws."""
        before = getattr(self._random_here, "state", None)
        self._random_here.state = state
        try:
            yield
        finally:
            self._random_here.state = before

    def manual_seed(self, seed: int) -> None:
        """Seed this environment's random key."""
        self.random.seed(seed)

    def _random_arguments(self, generator: Any) -> tuple[Any, Any]:
        return self.random.arguments(generator)

    def __deepcopy__(self, memo: Any) -> Environment:
        return self  # a copy of a module that runs in an environment runs in the same

    def __repr__(self) -> str:
        kind = "default " if self is Environment._default else ""
        return f"<{kind}Environment, overrides: {sum(map(len, self._overrides.by_op.values()))}>"


class _Everywhere:
    """The owner of overrides that hold in every environment, existing or to come."""

    def _remove(self, override: Override) -> None:
        Environment._everywhere.remove(override)
        _all_changed()
        functions.refresh()


def _all_changed() -> None:
    for reference in list(Environment._all):
        environment = reference()
        if environment is None:
            Environment._all.remove(reference)
        else:
            environment._changed()


def override_op_definition(
    op: Any, impl: Callable[..., Any], *, is_jax_function: bool = False, is_view_op: bool = False
) -> Override:
    """As Environment.override_op_definition, in every environment, those made later included."""
    return _override(_Everywhere(), Environment._everywhere, op, impl, is_jax_function, is_view_op)


def _override(
    owner: Any, store: _Overrides, op: Any, impl: Callable[..., Any], is_jax_function: bool, is_view_op: bool
) -> Override:
    name, func = _override_name(op)
    origin = _origin(impl)
    definition: Definition
    if func is None:
        definition = Definition(name, "function" if is_jax_function else "decomposition", impl, origin)
    elif is_view_op:
        definition = ViewDefinition(name, "view", impl, origin, rules=ViewRules(impl))
    else:
        kind: Any = "lowering" if is_jax_function else "decomposition"
        definition = Definition(name, kind, impl, origin, static=_float_arguments(name))
    override = Override(owner, definition)
    store.add(override)
    if owner.__class__ is _Everywhere:
        _all_changed()
    else:
        owner._changed()
    if func is None:
        functions.refresh()
    else:
        for overload in _overloads(name):
            composite.keep_whole(overload)
            if is_composite(overload):
                transforms.watch(overload, _under_transforms)
                override.watched.append(overload)
    return override


def _under_transforms(func: Any) -> list[tuple[Override, Any]]:
    """The overrides of a composite op in this thread, each with the kernel of a JAX function, None for torch code."""
    overrides = [override for override, variant in current_env()._relevant(func) if variant is None]
    return [
        (o, None if o.definition.kind == "decomposition" else _override_kernel(func, o.definition, None))
        for o in overrides
    ]


def _float_arguments(name: str) -> frozenset[str]:
    """Arguments of schema type `float` (dropout_p, eps, scale): an override sees their values, to decline by them. Those
    of type Scalar, which operands and learning rates are, stay traced."""
    schemas = [func._schema for func in _overloads(name)]
    return frozenset(a.name for s in schemas for a in s.arguments if str(a.type) in ("float", "Optional[float]"))


def _override_name(op: Any) -> tuple[str, Any]:
    """The name an override is kept under, and the torch op (None: a torch function)."""
    func = resolve_op(op)
    if func is None:
        function = functions.find_function(op) if isinstance(op, str) else op
        if not callable(function) or inspect.isclass(function):
            raise OpNameError(unknown_op(op))
        name = functions.function_name(function)
        if not functions.asks_tensors(function) or functions.find_function(name) is None:
            raise OpNameError(
                f"{name} does not ask its tensors whether they know it better (`torch.overrides.handle_torch_function`), so that "
                "an override would not be called. Override an op that it calls; those of torch.distributed are in the namespaces "
                "`c10d` and `_c10d_functional`."
            )
        return name, None
    if isinstance(func, torch._ops.OpOverloadPacket):
        return func._qualified_op_name + ".*", func
    return op_name(func), func


def _overloads(name: str) -> list[Any]:
    if name.endswith(".*"):
        packet = resolve_op(name[:-2])
        if isinstance(packet, torch._ops.OpOverload):
            packet = packet.overloadpacket
        return [getattr(packet, o) for o in packet.overloads()]
    return [find_op(name)]


def resolve_op(op: Any) -> Any:
    """An OpOverload or OpOverloadPacket from a name, an op, or a builtin torch function; None if it is no op."""
    if isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return op
    if isinstance(op, str):
        if "::" not in op:
            function = functions.find_function(op)  # "torch.exp" is what torch.exp is
            return None if function is None or isinstance(function, str) else resolve_op(function)
        namespace, _, rest = op.partition("::")
        base, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), base, None)
        if packet is None:
            raise OpNameError(unknown_op(op))
        if overload:
            found = getattr(packet, overload, None)
            if found is None:
                raise OpNameError(unknown_op(op))
            return found
        return packet.default if "default" in packet.overloads() and _dispatched(packet.default) else packet
    if inspect.isbuiltin(op) or type(op).__name__ in ("method_descriptor", "builtin_function_or_method"):
        # torch.exp and torch.Tensor.exp are one aten op, and both should follow the override
        found = getattr(torch.ops.aten, op.__name__, None)
        return found or getattr(
            torch.ops.aten, op.__name__.strip("_"), None
        )  # __add__ is add, __and__ an op of that name
    return getattr(op, "_opoverload", None)  # torch.library.custom_op


def _dispatched(func: Any) -> bool:
    """Whether tensors reach the overload. TorchScript has some of its own: aten::add without a name adds two numbers."""
    try:
        torch._C._dispatch_has_kernel_for_dispatch_key(op_name(func), "CompositeImplicitAutograd")
    except RuntimeError:
        return False
    return True


def unknown_op(op: Any) -> str:
    """The message for an op that torch does not know, with the nearest that it does."""
    import difflib

    name = op if isinstance(op, str) else repr(op)
    names = torch._C._dispatch_get_all_op_names()
    near = difflib.get_close_matches(str(name), names, 3)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return (
        f"torch has no op {name!r}. Ops are named 'namespace::name' or 'namespace::name.overload', functions by their dotted "
        f"path ('torch.nn.functional.interpolate').{hint}"
    )


def _override_kernel(func: Any, definition: Definition, variant: Any) -> Any:
    """The kernel of an overridden op. One that may decline is made afresh for each override."""
    if variant is not None:
        return WritingKernel(func, definition, variant)
    if isinstance(definition, ViewDefinition):
        return ViewKernel(func, definition)
    if definition.kind == "decomposition":
        return DirectKernel(func, definition.body, definition)
    if definition.data_dependent is not None:
        return DataDependentKernel(func, definition)
    if func._schema.is_mutable:
        twin = variant_of(func)
        raise OpNameError(
            f"{op_name(func)} writes into its arguments, which a JAX function cannot. Override its functional form "
            f"({op_name(twin.twin) if twin is not None else 'none exists'}); the writing forms follow from it."
        )
    made = [str(r.type) for r in func._schema.returns if r.type.kind() == "ClassType"]
    if made:
        raise OpNameError(
            f"{op_name(func)} returns a {made[0].rpartition('.')[2]}, which a JAX function cannot make. Override it by torch "
            "code; that may run JAX functions, by `torchax_core.interop.call_jax`."
        )
    return lowering_kernel(func, definition)


def _origin(impl: Callable[..., Any]) -> Origin:
    plain = inspect.unwrap(impl)
    code = getattr(plain, "__code__", None)
    module = getattr(plain, "__module__", None) or "?"
    if code is None:
        return Origin("override", module, getattr(plain, "__qualname__", repr(plain)), 0)
    return Origin("override", module, code.co_filename, code.co_firstlineno)


def default_env() -> Environment:
    """The process's default environment: what is in force where no `with Environment(...)` is."""
    if Environment._default is None:
        with Environment._default_lock:
            if Environment._default is None:
                Environment._default = Environment()
    return Environment._default


def current_env() -> Environment:
    """The environment active in this thread."""
    if active.environment is None or active.kernels is None:
        Environment._attach_thread()
    return active.environment  # type: ignore[no-any-return]


def _after_load(pack: Any) -> None:
    """What must be in place outside the op table once a pack's definitions are known."""
    for name, definition in pack.definitions.items():
        if definition.kind in ("lowering", "decomposition"):
            func = find_op(name)
            if func is not None:
                composite.keep_whole(func, differentiable=definition.differentiable)
    register_factories(pack.definitions)
    if pack.functions:
        functions.refresh()


def _after_known(pack: Any) -> None:
    """Composite ops a pack names among its constants are caught before it is imported: C++ would decompose them, and the
    pack would never be asked."""
    for name in pack.ops:
        func = find_op(name)
        if func is not None:
            composite.keep_whole(func)


def _after_change() -> None:
    """Every environment looks at the packs afresh, and functions compiled by torchax_core.jit are compiled anew."""
    Environment._everywhere.version += 1
    for reference in list(Environment._all):
        environment = reference()
        if environment is not None:
            environment._table.forget()
    _all_changed()
    functions.refresh()


host().on_load.append(_after_load)
host().on_known.append(_after_known)
host().on_change.append(_after_change)
watch_forks(Environment)
