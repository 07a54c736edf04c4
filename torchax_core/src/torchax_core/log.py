"""`TORCHAX_LOG=recompiles,ops`: one line per compiled signature or step, and one per op run, on the "torchax" logger.

recompiles: what was compiled, and why: a new op signature, or which guard of a jitted function failed
ops:        `aten.add.Tensor(float32[2,3], float32[3]) -> float32[2,3]  12.3 us, hit`: the time until the op was on its way
            (JAX computes meanwhile), and whether its program was there or had to be compiled, with XLA's time for it
ops:sync:   each op is waited for as well: `12.3 us, done after 45.6 us, hit`

The variable is read when the package is imported.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import jax
from torch.utils import _pytree as pytree

from torchax_core import counters
from torchax_core.errors import ConfigError

__all__ = ["OpLines", "describe", "describe_call", "enable", "logger", "new_signature", "ops", "recompiles", "sync"]

logger = logging.getLogger("torchax")
TOPICS = ("recompiles", "ops", "ops:sync")

recompiles = False
ops = False
sync = False


def enable(topics: str) -> None:
    """Switch on the topics of a comma-separated list (empty: none). Raises ConfigError for an unknown one.

    `ops` takes effect in environments entered, and threads started, from then on.
    """
    global recompiles, ops, sync
    wanted = {t.strip() for t in topics.split(",") if t.strip()}
    unknown = wanted - set(TOPICS)
    if unknown:
        raise ConfigError(f"TORCHAX_LOG: unknown topic {', '.join(sorted(unknown))}; choose from {', '.join(TOPICS)}.")
    recompiles = "recompiles" in wanted
    sync = "ops:sync" in wanted
    ops = sync or "ops" in wanted
    if wanted and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("torchax: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


class OpLines:
    """The check (watching.py) that logs a line per op."""

    jitted = ""

    def before(self, call: Any) -> Any:
        """The arguments in words, as they are before the call; what has been compiled so far; the time."""
        return describe_call(call.args, call.kwargs), begun()

    def after(self, call: Any, before: Any, result: Any) -> None:
        """Log the line."""
        name = str(call.func) if hasattr(call.func, "_schema") else call.name
        arguments, start = before
        line(name, arguments, start, result)

    def in_backward(self, call: Any, before: Any, given: Any, gradients: Any) -> None:
        """Nothing: it is no op."""


def begun() -> tuple[int, float, float]:
    """What `line` wants to know from before the call: how many programs have been compiled, in how long, and the time."""
    return counters.here.compiled, counters.here.seconds, time.perf_counter()


def line(name: str, arguments: str, before: tuple[int, float, float], result: Any, results: str = "") -> None:
    """Log a call that is over. results: in words, if not each of them."""
    compiled, seconds, start = before
    times = f"{1e6 * (time.perf_counter() - start):.1f} us"
    if sync:
        jax.block_until_ready([t._store.array for t in pytree.tree_leaves(result) if hasattr(t, "_store")])
        times += f", done after {1e6 * (time.perf_counter() - start):.1f} us"
    new = counters.here.compiled - compiled
    spent = 1e3 * (counters.here.seconds - seconds)
    programs = "1 program" if new == 1 else f"{new} programs"
    how = f"compiled {programs} in {spent:.1f} ms" if new else "hit"
    logger.info("%s(%s) -> %s  %s, %s", name, arguments, results or describe(result), times, how)


def describe_call(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """The arguments of a call in a line."""
    return ", ".join([describe(a) for a in args] + [f"{k}={describe(v)}" for k, v in kwargs.items()])


def describe(value: Any) -> str:
    """A value in a log line: tensors by dtype and shape."""
    aval = getattr(value, "_aval", None)
    if aval is not None:
        return repr(aval)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(describe(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {describe(v)}" for k, v in value.items()) + "}"
    if hasattr(value, "is_cpu") and hasattr(value, "dtype"):
        return f"cpu {str(value.dtype).removeprefix('torch.')}[{','.join(map(str, value.shape))}]"
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def new_signature(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Called once for each new signature of an op."""
    counters.signatures += 1
    if recompiles:
        logger.info("compiling %s(%s): new signature", op, describe_call(args, kwargs))


enable(os.environ.get("TORCHAX_LOG", ""))
