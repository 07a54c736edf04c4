"""Running many cells in processes apart: one that aborts or hangs costs its own cell and no other."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from torchax_core.conformance import definitions
from torchax_core.conformance.cells import Cell, Result, cells
from torchax_core.conformance.ops import ops_of
from torchax_core.conformance.running import run_cell

__all__ = ["Options", "Worker", "WorkerError", "sweep"]

_GRACE = 15.0  # seconds beyond its time that a cell has before its process is ended
_GUESS = 60.0  # seconds to say which definitions a dead process probably ran
_MEMORY = 3 << 30  # bytes; compiled programs pile up, and from here on a process is replaced


class WorkerError(RuntimeError):
    """A process did not start, so that no cell can run."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How cells are run.

    max_samples: samples of the op tried in a cell.
    timeout:     seconds for one cell.
    pack:        whose ops they are (see `cells`).
    quick:       compile without optimizations. Takes half as long, but is not quite what users run.
    """

    max_samples: int = 8
    timeout: float = 60.0
    pack: str | None = None
    quick: bool = False


class Worker:
    """A process that runs cells one after the other; started when first needed, and again after it dies."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.process: multiprocessing.process.BaseProcess | None = None
        self.pipe: Any = None

    def cells(self, *choices: Any) -> list[Cell]:
        """`cells(*choices)`, by the process, which has to import torch's op database anyway."""
        answer = self._ask(("cells", choices))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def run(self, cell: Cell) -> Result:
        """The cell's result: a red one if the process dies, or does not answer in time. Raises WorkerError."""
        started = time.perf_counter()
        try:
            result, memory = self._ask(("run", cell), self.options.timeout + _GRACE)
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                result = Result(cell, "timeout", message=f"hangs: no answer for {self.options.timeout + _GRACE:g} s")
            else:
                result = Result(cell, "crashed", message=f"the process died with exit code {self._exit_code()}")
            self.stop()
            result.seconds = time.perf_counter() - started
            try:
                result.definitions = self._ask(("guess", cell), _GUESS)
            except (EOFError, OSError):  # the result counts, though nobody says who defines the op
                self.stop()
        else:
            if memory > _MEMORY:
                self.stop()
        return result

    def stop(self) -> None:
        """End the process, whatever it does."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = None

    def _ask(self, request: Any, timeout: float | None = None) -> Any:
        if self.process is None:
            self._start()
        self.pipe.send(request)
        if not self.pipe.poll(timeout):
            raise TimeoutError
        return self.pipe.recv()

    def _start(self) -> None:
        context = _context()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.options), daemon=True)
        self.process.start()
        theirs.close()
        try:
            self.pipe.recv()  # it has imported everything: the clock starts now
        except (EOFError, OSError):
            code = self._exit_code()
            self.stop()
            raise WorkerError(f"a worker process did not start, but died with exit code {code}; see above") from None

    def _exit_code(self) -> int | None:
        assert self.process is not None
        self.process.join(5)
        return self.process.exitcode


def _context() -> Any:
    """How processes start: forked from one that has imported everything, which takes tenths of a second; or afresh, where
    torch looks for a GPU when imported, whose driver does not survive a fork."""
    if "forkserver" in multiprocessing.get_all_start_methods() and not torch.cuda.is_available():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torchax_core.conformance.preloaded"])
        return context
    return multiprocessing.get_context("spawn")


def _serve(pipe: multiprocessing.connection.Connection, options: Options) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the parent's to handle
    _set_up(options)
    ops_of(options.pack)
    pipe.send("ready")
    while True:
        try:
            kind, what = pipe.recv()
        except EOFError:
            return
        if kind == "run":
            result = run_cell(what, max_samples=options.max_samples, timeout=options.timeout, pack=options.pack)
            pipe.send((result, _memory()))
        elif kind == "guess":
            pipe.send(definitions.guess(ops_of(options.pack)[what.op]))
        else:
            try:
                pipe.send(cells(*what))
            except ValueError as error:
                pipe.send(error)


def _set_up(options: Options) -> None:
    import jax

    torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # CPU torch's, of being slow
    torch.set_num_threads(1)  # samples are small, and there are other processes
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share an accelerator
    if options.quick:
        jax.config.update("jax_disable_most_optimizations", True)
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
    for module in (torch.cuda, torch.xpu, torch.mtia):
        # torch.manual_seed queues a call with its whole stack for each device that is absent: 0.7 ms, and never freed
        if not module.is_available():
            module.manual_seed_all = lambda seed: None


def _memory() -> int:
    """Bytes of memory this process holds; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def sweep(todo: Sequence[Cell], options: Options, workers: int = 1, first: Worker | None = None) -> Iterator[Result]:
    """Run all cells and yield their results as they come: those of one op and dtype by one process, for what it has
    compiled. `first`: a worker to use that has been started. Raises WorkerError if none can be started."""
    waiting: queue.SimpleQueue[list[Cell]] = queue.SimpleQueue()
    for _, group in itertools.groupby(todo, key=lambda cell: (cell.op, cell.dtype)):
        waiting.put(list(group))
    results: queue.SimpleQueue[Result | Exception] = queue.SimpleQueue()
    stopping = threading.Event()

    def work(worker: Worker) -> None:
        try:
            while not stopping.is_set():
                for cell in waiting.get_nowait():
                    if not stopping.is_set():
                        results.put(worker.run(cell))
        except queue.Empty:
            pass
        except Exception as error:
            results.put(error)
        finally:
            worker.stop()

    crew = [first or Worker(options)] + [Worker(options) for _ in range(min(workers, len(todo)) - 1)]
    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in crew]
    for thread in threads:
        thread.start()
    try:
        for _ in todo:
            result = results.get()
            if isinstance(result, Exception):
                raise result
            yield result
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
