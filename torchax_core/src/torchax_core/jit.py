"""jit: an imperative torch function as one XLA program.

    @torchax_core.jit
    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

The function is traced once per signature (see docs/jit.md): tensors it meets (parameters, buffers, optimizer state) become
inputs, storages it writes become outputs and take their new values after each call, and what is both is donated.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import torch

from torchax_core import collector, counters, log
from torchax_core.arguments import Call, StaticArguments, flatten, unflatten
from torchax_core.bridge import lay_out
from torchax_core.environment import current_env
from torchax_core.program import Program, traced
from torchax_core.rebinding import Changes, Habits
from torchax_core.shardings import argument_shardings, automatic_axes, resolve, spread_prefix
from torchax_core.tensor import DEVICE_TYPE, Tensor, active

__all__ = ["JittedFunction", "compile", "jit"]

_functorch_level: Callable[[], int | None] = (
    torch._C._functorch.maybe_current_level
)  # None outside torch.func's transformations
_MANY = 32  # traces of one function, that its user is told of
_MOST_PROGRAMS = 64  # of one signature; those that guards have failed longest are let go


@dataclasses.dataclass
class Compilation:
    """One compile of a jitted function, for `explain()`."""

    name: str
    number: int
    reason: str
    seconds: float
    inputs: int
    written: int

    def __str__(self) -> str:
        facts = f"{self.seconds:.2f} s, {self.inputs} state inputs, {self.written} written"
        return f"{self.name} #{self.number}: {self.reason} ({facts})"


class JittedFunction:
    """What `torchax_core.jit` returns: callable like the function, plus `explain()` and `clear_cache()`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        donate: bool | None = None,
        static_argnames: str | Iterable[str] | None = None,
        in_shardings: Any = None,
        out_shardings: Any = None,
        name: str | None = None,
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.fn = fn
        self.donate = donate
        self.name: str = name or getattr(fn, "__qualname__", None) or type(fn).__name__
        self.module_name = name or self.name.rpartition(".")[2].strip("<>") or "step"
        self.static = StaticArguments(fn, static_argnames, self.name) if static_argnames else None
        self.in_shardings = in_shardings
        self.out_shardings = out_shardings
        self.compilations: list[Compilation] = []
        self.habits = Habits()
        self.shares_counts = True  # an optimizer's, until they come apart inside
        self._programs: dict[Any, list[Program]] = {}
        self._last_key: Any = None
        self.calls = 0  # of a program of its own
        counters.jitted.add(self)
        self._warned = False

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.in_shardings is None and self.out_shardings is None:
            return self._run(args, kwargs)
        with automatic_axes():
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if active.trace is not None or _functorch_level() is not None:
            return self._inline(args, kwargs)
        watch = current_env()._watch  # of a debug check, or TORCHAX_LOG=ops
        if watch is not None and watch.eager:
            return watch.run_eagerly(self.fn, args, kwargs)
        call = self.call(args, kwargs)
        signature = self._signature(call)
        if signature is None:
            return self._inline(args, kwargs)
        program, reason, changes = self._known(signature, call)
        if program is not None and program.has_run:
            return self._start(program, call, args, kwargs, watch)
        with collector.paused():  # from the beginning of the trace to the end of XLA's compile
            program = program or self._compile(signature, call, reason, changes or Changes())
            return self._start(program, call, args, kwargs, watch)

    def _start(self, program: Program, call: Call, args: Any, kwargs: Any, watch: Any) -> Any:
        self.calls += 1
        if watch is not None:
            return watch.jitted(self, program, call.leaves, lambda: program.run(call), args, kwargs)
        return program.run(call)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The arguments of a call, flattened."""
        return Call((args, kwargs) if self.static is None else self.static.mark(args, kwargs))

    def leaf_shardings(self, call: Call) -> list[Any]:
        """How each leaf of the arguments is to lie; None where it stays as it is."""
        return argument_shardings(self.in_shardings, call, self.static, f"jit({self.name}): in_shardings")

    def _inline(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Inside another trace, or a transformation of jax's or torch.func's: part of what they make of it."""
        if self.in_shardings is not None:
            call = self.call(args, kwargs)
            for leaf, sharding in zip(call.leaves, self.leaf_shardings(call), strict=True):
                if sharding is not None and isinstance(leaf, Tensor):
                    leaf.shard_(sharding)
        result = self.fn(*args, **kwargs)
        if self.out_shardings is None:
            return result
        leaves: list[Any] = []
        structure = flatten(result, leaves)
        what = f"jit({self.name}): out_shardings"
        shardings = spread_prefix(resolve(self.out_shardings, what), result, what)
        placed = [
            lay_out(leaf, sharding) if sharding is not None and isinstance(leaf, Tensor) else leaf
            for leaf, sharding in zip(leaves, shardings, strict=True)
        ]
        return unflatten(structure, iter(placed))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The program for these arguments as jax's Lowered: `.as_text()`, `.compile().cost_analysis()`. Runs nothing.

        Tensors that the function makes and keeps have values once it has been called, not before.
        Raises RuntimeError if an argument is traced already.
        Source: https://docs.jax.dev/en/latest/aot.html
        """
        call = self.call(args, kwargs)
        with automatic_axes():
            program = self._program(call)
        if program is None:
            raise RuntimeError(
                f"jit({self.name}).lower: an argument is traced by a jax transformation. Lower that transformed function "
                "instead: `jax.jit(f).lower(...)`."
            )
        return program.lower(call.leaves)

    def _program(self, call: Call) -> Program | None:
        """The program for these arguments, traced if there is none yet; None if an argument is traced already."""
        signature = self._signature(call)
        if signature is None:
            return None
        program, reason, changes = self._known(signature, call)
        return program or self._compile(signature, call, reason, changes or Changes())

    def _signature(self, call: Call) -> Any:
        """What decides, beside guards, which program a call has; None if an argument is traced already."""
        environment = current_env()._root
        arguments = call.signature(self.name)
        if arguments is None:
            return None
        signature = (call.structure, environment, environment.version, *_torch_state(), *arguments)
        if self.in_shardings is not None or self.out_shardings is not None:
            signature += (jax.sharding.get_mesh(),)
        return signature

    def _known(self, signature: Any, call: Call) -> tuple[Program | None, str, Changes | None]:
        """The program whose guards hold; if there is none, why the last looked at does not fit, and what has changed where."""
        failed, changes = "", None
        for program in self._programs.get(signature, ()):
            failed = program.failed_guard(call.leaves)
            if not failed:
                return program, "", None
            changes = changes or Changes()
            changes.add(program.rebinding)
        return None, failed, changes

    def explain(self) -> str:
        """Why each compile happened, one line each."""
        return "\n".join(map(str, self.compilations)) or "not compiled yet"

    def clear_cache(self) -> None:
        """Forget every compiled program, and the tensors they refer to."""
        self._programs.clear()

    def _compile(self, signature: Any, call: Call, failed: str, changes: Changes) -> Program:
        reason = failed or _difference(self._last_key, signature)
        self._last_key = signature
        start = time.perf_counter()
        with collector.paused():
            program = traced(self, call, current_env()._root)
        known = [p for found in self._programs.values() for p in found]
        same = program.finish(known)
        seconds = time.perf_counter() - start
        done = Compilation(
            self.name, len(self.compilations) + 1, reason, seconds, len(program.captured), len(program.writes)
        )
        self.compilations.append(done)
        if len(self.compilations) == _MANY:
            warnings.warn(
                f"jit({self.name}) has been traced {_MANY} times by now, the last time because: {reason}. What differs from call "
                "to call belongs in a tensor that is an argument; `.explain()` says why each compile happened, and "
                "TORCHAX_LOG=recompiles while it does.",
                stacklevel=4,
            )
        if log.recompiles:
            log.logger.info("jit: traced %s", done)
        self.habits.learn(changes, program.captures, same)
        program.rebinding.values.drop(self.habits.unread)
        for programs in self._programs.values():
            programs[:] = [known for known in programs if not known.guards.lost]
        programs = self._programs.setdefault(signature, [])
        programs.insert(0, program)
        del programs[_MOST_PROGRAMS:]
        return program


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    donate: bool | None = None,
    static_argnames: str | Iterable[str] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    name: str | None = None,
) -> Any:
    """Compile an imperative torch function, training steps included, into one XLA program.

    fn:      any callable; a method or an nn.Module too. Also usable as `@jit(donate=False)`.
    donate:  let the program reuse the memory of state it replaces; default: the environment's `Config.donate`.
    static_argnames: arguments, given by position or name, that are no pytrees but hashable values: one program for each.
    in_shardings, out_shardings: how positional arguments (those that are not static) and results lie on devices: shardings,
             PartitionSpecs (with `jax.set_mesh`), or None (as they are), in a pytree that is a prefix of theirs.
    name:    for logs, `explain()` and the HLO module.

    Python side effects happen while tracing only. Raises DataDependentError where the function needs a tensor's value, TypeError
    for arguments that are neither tensors nor hashable, ShapeError if shardings do not fit.
    Source: https://docs.jax.dev/en/latest/_autosummary/jax.jit.html
    """
    options: dict[str, Any] = {"donate": donate, "static_argnames": static_argnames, "name": name}
    options |= {"in_shardings": in_shardings, "out_shardings": out_shardings}
    if fn is None:
        return lambda f: JittedFunction(f, **options)
    return JittedFunction(fn, **options)


def compile(module: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """The module with its forward jitted, in place; returns it, so that `model = compile(model)` reads as in torch."""
    module.forward = jit(module.forward, **options)
    return module


# -- keys ----------------------------------------------------------------------------------------


def _torch_state() -> tuple[Any, ...]:
    """What of torch's own state changes the meaning of a traced function."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(DEVICE_TYPE) and torch.get_autocast_dtype(DEVICE_TYPE),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
    )


_PARTS = (
    "argument structure",
    "environment",
    "an override",
    "grad mode",
    "inference mode",
    "autocast",
    "default dtype",
    "float32 matmul precision",
)


def _difference(old: Any, new: Any) -> str:
    if old is None:
        return "first call"
    for i, (a, b) in enumerate(zip(old, new, strict=False)):
        if a != b:
            what = _PARTS[i] if i < len(_PARTS) else "an argument"
            return f"{what} changed" + (f" from {a} to {b}" if what == "an argument" else "")
    return "number of arguments changed" if len(old) != len(new) else "cache cleared"
