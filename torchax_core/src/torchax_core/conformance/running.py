"""Running one cell in this process."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import torch

from torchax_core.conformance.cells import Cell, Result
from torchax_core.conformance.checks import CHECKS
from torchax_core.conformance.compare import NoSample
from torchax_core.conformance.definitions import definitions_of, recorded
from torchax_core.conformance.ops import ops_of
from torchax_core.conformance.samples import Sample, samples_of
from torchax_core.testing import _described

__all__ = ["run_cell"]


class _TimeUp(BaseException):
    """The cell's time is over. No Exception, lest a sample that raises is thought to be meant."""


def run_cell(cell: Cell, *, max_samples: int = 8, timeout: float = 60.0, pack: str | None = None) -> Result:
    """Run one cell in this process. Never raises, except for KeyboardInterrupt.

    max_samples: of the op's samples, how many are tried; at most a few more in other layouts.
    timeout:     seconds, after which Python code is interrupted (C++ code is not: see `Worker`).
    pack:        whose list the op is of (see `cells`).
    """
    started = time.perf_counter()
    result = Result(cell, "none")
    at, sample = "sampling", None
    with warnings.catch_warnings(), _time_limit(timeout), _compiles_counted(result):
        warnings.simplefilter("ignore")
        try:
            op = ops_of(pack)[cell.op]
            check = CHECKS[cell.mode]
            for sample in samples_of(op, cell, max_samples):
                at = sample.name
                torch.manual_seed(0)
                try:
                    check(op, sample)
                except NoSample:
                    continue
                result.samples += 1
                result.status = "passed"
        except _TimeUp:
            result.status, result.message = "timeout", f"{at}: still running after {timeout:g} s"
            result.detail = traceback.format_exc()
        except Exception as error:
            first, _, rest = str(error).partition("\n")
            wrong = isinstance(error, AssertionError)
            result.status, result.message = "failed", f"{at}: {'' if wrong else type(error).__name__ + ': '}{first}"
            result.detail = rest if wrong else traceback.format_exc()
    if result.status == "failed" and sample is not None:
        result.sample = _arguments(sample)
        result.definitions = _definitions(op, check, sample, timeout)
    result.seconds = time.perf_counter() - started
    return result


def _arguments(sample: Sample) -> str:
    given = sample.input
    keywords = [f"{name}={_described(value)}" for name, value in given.kwargs.items()]
    return "\n".join([_described(given.input), *map(_described, given.args), *keywords])


def _definitions(op: Any, check: Any, sample: Sample, timeout: float) -> list[str]:
    """Run the failing sample once more, to see what runs."""
    try:
        with warnings.catch_warnings(), recorded() as ops, _time_limit(timeout):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            check(op, sample)
    except (_TimeUp, Exception):  # as it did before
        pass
    try:
        return definitions_of(ops)
    except Exception as error:  # a broken pack, say: the failure is to be reported all the same
        return [f"unknown, because of {type(error).__name__}: {error}"]


@contextlib.contextmanager
def _compiles_counted(result: Result) -> Iterator[None]:
    def listen(event: str, seconds: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            result.compiles += 1
            result.compile_seconds += seconds
            result.longest_compile = max(result.longest_compile, seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _TimeUp after `seconds`, once Python runs again (a C++ call is not interrupted); and again each second after
    that, since what is raised in a callback (of the garbage collector, say) goes no further."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: Any) -> None:
        raise _TimeUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
