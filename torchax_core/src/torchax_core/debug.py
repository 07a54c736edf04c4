"""Finding the op that is wrong: checks on every call, for a block.

    with torchax_core.debug.accuracy() as report:       # each op against CPU torch; the first difference raises
        loss = step(x)
    print(report)

    with torchax_core.debug.nans():                     # the op that makes the first NaN raises
        loss = step(x)

    with torchax_core.debug.profile("traces"):          # jax.profiler's, with modules and ops by name
        loss = step(x)

The checks for a whole environment: `Config(debug_accuracy="raise")`, `Config(debug_nans=True)`, `TORCHAX_DEBUG=nans`.
See docs/debugging.md.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from torchax_core.environment import current_env
from torchax_core.errors import ConfigError

if TYPE_CHECKING:
    from torchax_core.accuracy import AccuracyCheck

__all__ = ["accuracy", "infs", "nans", "profile"]


@contextlib.contextmanager
def _watched(check: Any) -> Iterator[None]:
    # what torch.compile has compiled runs as it is written: inside its programs there are no calls to look at
    loaded = "torch._dynamo" in sys.modules
    with (
        torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext(),
        current_env()._watched_by(check),
    ):
        yield


@contextlib.contextmanager
def accuracy(on_difference: str = "raise", *, tolerance: float | None = None) -> Iterator[AccuracyCheck]:
    """A block in which every op of this thread, backward included, is compared with CPU torch on the same inputs.

    on_difference: "raise" AccuracyError at the first; or "warn", an AccuracyWarning at the first of each op.
    tolerance:     relative; default: by dtype (`torchax_core.accuracy.TOLERANCES`).
    Gives what was compared, passed over, and found. Functions under torchax_core.jit run op by op meanwhile.
    """
    from torchax_core.accuracy import AccuracyCheck

    if on_difference not in ("raise", "warn"):
        raise ConfigError(f'debug.accuracy takes "raise" or "warn", but got {on_difference!r}.')
    check = AccuracyCheck(on_difference, tolerance)
    with _watched(check):
        yield check


@contextlib.contextmanager
def nans() -> Iterator[None]:
    """A block in which an op of this thread, in backward too, that makes NaN of inputs without raises NonFiniteError.

    A jitted function that returns NaN is run again, op by op, to find the op; its state is as before the call then.
    """
    from torchax_core.nonfinite import NonFiniteCheck

    with _watched(NonFiniteCheck(nans=True)):
        yield


@contextlib.contextmanager
def infs() -> Iterator[None]:
    """As `nans`, for infinities. Numbers that are infinite themselves, as in `masked_fill(mask, -inf)`, are let pass."""
    from torchax_core.nonfinite import NonFiniteCheck

    with _watched(NonFiniteCheck(nans=False, infs=True)):
        yield


@contextlib.contextmanager
def profile(folder: str | os.PathLike[str]) -> Iterator[None]:
    """A block whose profile jax.profiler writes to `folder`, with the modules and eager ops of this thread by name.

    What is still being computed at its end is waited for. Source: https://docs.jax.dev/en/latest/profiling.html
    """
    from torchax_core.scopes import Annotations, Scopes

    scopes = Scopes(scope=jax.profiler.TraceAnnotation)
    hooks = [
        register_module_forward_pre_hook(scopes.enter),
        register_module_forward_hook(scopes.leave, always_call=True),
    ]
    try:
        with jax.profiler.trace(os.fspath(folder)), current_env()._watched_by(Annotations()):
            yield
            torch.get_device_module("jax").synchronize()
    finally:
        for hook in hooks:
            hook.remove()
        scopes.close()
