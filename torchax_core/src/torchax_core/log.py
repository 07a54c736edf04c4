"""`TORCHAX_LOG=recompiles,ops`: one line per compiled signature or step, and one per op run, on the "torchax" logger.

recompiles: what was compiled, and why: a new op signature, or which guard of a jitted function failed
ops:        `aten.add.Tensor(float32[2,3], float32[3]) -> float32[2,3]  12.3 us`; each op is waited for

The variable is read when the package is imported.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from torch.utils import _pytree as pytree

from torchax_core.errors import ConfigError

__all__ = ["LoggedKernels", "enable", "logger", "ops", "recompiles", "timed"]

logger = logging.getLogger("torchax")
TOPICS = ("recompiles", "ops")

recompiles = False
ops = False


def enable(topics: str) -> None:
    """Switch on the topics of a comma-separated list (empty: none). Raises ConfigError for an unknown one."""
    global recompiles, ops
    wanted = {t.strip() for t in topics.split(",") if t.strip()}
    unknown = wanted - set(TOPICS)
    if unknown:
        raise ConfigError(f"TORCHAX_LOG: unknown topic {', '.join(sorted(unknown))}; choose from {', '.join(TOPICS)}.")
    recompiles = "recompiles" in wanted
    ops = "ops" in wanted
    if wanted and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("torchax: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


class LoggedKernels:
    """The look-up from op to kernel under TORCHAX_LOG=ops: each call waits for its result and says how long it took."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment

    def get(self, func: Any) -> Any:
        """As dict.get: the kernel of an op, with its calls logged."""
        kernel = self.environment._kernels.get(func) or self.environment._kernel(func)
        return lambda args, kwargs: timed(func, args, kwargs, lambda: kernel(args, kwargs))


def timed(func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None, call: Callable[[], Any]) -> Any:
    """Run an op, wait for its result, and log the line of it."""
    start = time.perf_counter()
    result = call()
    jax.block_until_ready([t._store.array for t in pytree.tree_leaves(result) if hasattr(t, "_store")])
    parts = [describe(a) for a in args] + [f"{k}={describe(v)}" for k, v in (kwargs or {}).items()]
    elapsed = 1e6 * (time.perf_counter() - start)
    logger.info("%s(%s) -> %s  %.1f us", func, ", ".join(parts), describe(result), elapsed)
    return result


def describe(value: Any) -> str:
    """A value in a log line: tensors by dtype and shape."""
    aval = getattr(value, "_aval", None)
    if aval is not None:
        return repr(aval)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(describe(v) for v in value) + "]"
    return repr(value)


def new_signature(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Called once for each new signature of an op."""
    if recompiles:
        parts = [describe(a) for a in args] + [f"{k}={describe(v)}" for k, v in kwargs.items()]
        logger.info("compiling %s(%s): new signature", op, ", ".join(parts))


enable(os.environ.get("TORCHAX_LOG", ""))
